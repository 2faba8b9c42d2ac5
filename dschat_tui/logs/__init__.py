"""Logs as the screen needs them: followed while they grow, kept as bounded series."""
