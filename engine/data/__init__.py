"""Data: sources and their schemas, the dialogue template, the phases' rows, batches.

`schemas` needs neither torch nor datasets; import the other modules where they are used.
"""
