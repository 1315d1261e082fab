"""Checks of weights and their gradients."""
