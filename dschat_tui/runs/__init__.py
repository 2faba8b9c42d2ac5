"""A run on disk: folder and state, checks before it, processes, progress and results."""
