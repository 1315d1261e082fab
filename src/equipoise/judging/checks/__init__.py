"""Checks: relations that must hold in a training loop, one file for each area.

Beside the functions of an area (``weights.py``) stands the file that declares them
(``weights.toml``): how grave a violation is, the relation, why it must hold, which
correct loops look like a violation, and public threads in which it was the cause.
Their sentences are in ``text/checks``.
"""

from equipoise.judging.checks import experts, forward, influence, loop, loss, weights
from equipoise.judging.checks.registry import CHECKS, Check, declare

for area in (weights, loss, forward, loop, experts, influence):
    declare(str(area.__file__))

__all__ = ["CHECKS", "Check"]
