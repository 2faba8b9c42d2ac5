"""Sweeps: a matrix of runs, its states on disk, what was measured, and the report of it."""
