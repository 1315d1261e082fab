"""The ranks of one training."""
