"""The instrument: attaches to a model, measures on sampled steps, writes a run.

This package joins the two sides of the house: torch measures, the store remembers.
"""

from equipoise.watching.handle import Watch
from equipoise.watching.options import WatchOptions
from equipoise.watching.start import watch

__all__ = ["Watch", "WatchOptions", "watch"]
