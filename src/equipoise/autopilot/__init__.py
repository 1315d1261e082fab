"""The autopilot: on a verdict it applies the smallest change that helps, and undoes it.

Its options are in ``options``; ``watch(..., autopilot=True)`` switches it on.
"""
