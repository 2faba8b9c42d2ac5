"""`dschat`: one file a command, with what it prints."""
