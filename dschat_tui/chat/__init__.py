"""The conversation with a model: session, command table, renderers, REPL. Brings in no torch."""
