"""Training loops of SFT, the reward model and DPO, and what they share with step 3."""
