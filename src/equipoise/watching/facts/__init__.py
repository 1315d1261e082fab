"""Readers of facts: what the loop does, as data for checks and the card."""
