"""One file per screen with its styles; a screen with tabs or panels is a folder."""
