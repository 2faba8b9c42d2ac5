"""A run on disk: its folder and state, the checks before it, the processes, what a person sees."""
