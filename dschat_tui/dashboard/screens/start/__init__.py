"""The Start screen: one file per panel, the draft they all show, and the screen around them."""
