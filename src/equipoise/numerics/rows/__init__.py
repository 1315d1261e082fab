"""Kernels on rows of attention scores: θ as a certified interval, and statistics."""
