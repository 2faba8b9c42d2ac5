"""One file per widget. What a widget shows is made by pure functions, as rows of styled text."""
