"""Rewards that functions give, in Python."""
