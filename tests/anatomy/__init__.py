"""Tests of the anatomy: what is found in somebody else's model, and where."""
