"""Checks of the loss and its targets."""
