"""Typed configuration, rules on combinations, profiles, the table of steps. No torch."""
