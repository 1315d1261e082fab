"""Checks of the forward pass."""
