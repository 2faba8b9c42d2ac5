"""The conversation with a model: session, commands, settings, files. Imports no torch."""
