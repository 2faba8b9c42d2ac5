"""Models: load, reward head, LoRA, save. Nothing heavy is imported here."""
