"""`dschat`: one file per command, with what it prints."""
