"""Checks of mixtures of experts."""
