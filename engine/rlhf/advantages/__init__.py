"""How advantages are found: one strategy a file."""
