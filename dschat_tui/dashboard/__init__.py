"""`dschat-tui`: the app, its keys, screens and widgets."""
