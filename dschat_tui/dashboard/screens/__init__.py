"""One file a screen, its styles beside it."""
