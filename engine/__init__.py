"""The trainer's side of dschat: the three steps of InstructGPT on DeepSpeed."""
