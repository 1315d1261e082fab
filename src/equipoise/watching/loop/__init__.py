"""The training loop: what torch does in it becomes events."""
