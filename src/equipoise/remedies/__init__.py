"""Remedies: changes to a user's model that can be undone bit for bit."""
