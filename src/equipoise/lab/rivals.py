"""Normalisers an arm may name in place of softmax."""

from functools import partial

from equipoise.errors import InputError
from equipoise.lab.models import Normaliser
from equipoise.numerics.normalisers import NORMALISERS, attention_weights


def normaliser(name: str) -> Normaliser:
    """Return the named rival, with its default parameters, as a map of masked scores.

    >>> import torch
    >>> normaliser("sparsemax")(torch.tensor([2.0, 0.0, -torch.inf]))
    tensor([1., 0., 0.])
    """
    if name not in NORMALISERS:
        known = ", ".join(sorted(NORMALISERS))
        raise InputError(f"no normaliser {name!r}; there are {known}")
    return partial(attention_weights, NORMALISERS[name]())
