"""Lipschitz bounds of all heads together, of whole layers, and those of others."""
