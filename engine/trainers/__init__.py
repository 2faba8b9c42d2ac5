"""The loops of the three steps."""
