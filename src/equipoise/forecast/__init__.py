"""Reads what a run has said so far, and says what is coming."""
