"""Checks of optimisers, clipping, schedules, batches and ranks."""
