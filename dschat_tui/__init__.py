"""The person's side of dschat. Importing it brings in neither torch nor transformers."""
