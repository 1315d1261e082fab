"""Normalisers an arm may name in place of softmax, fixed or learnt."""

from torch import nn

from equipoise.numerics.normalisers import NORMALISERS, Normaliser
from equipoise.numerics.normalisers.exponential import Softmax
from equipoise.remedies.normaliser import SEAT, NormaliserSwap
from equipoise.remedies.normaliser_module import LEARNABLE, Weigher

LEARNT = "-learnt"
RIVALS = (*NORMALISERS, *(f"{name}{LEARNT}" for name in LEARNABLE))
"""Every name; ``sink-learnt`` has one sink per head that training moves."""


def seat(model: nn.Module, name: str) -> None:
    """Let every attention of the model weigh with the named rival.

    >>> from equipoise.lab.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(depth=1))
    >>> seat(model, "sink-learnt"); model.blocks[0].attention.normaliser
    Weigher(sink, heads=4)
    """
    learn = name.endswith(LEARNT)
    NormaliserSwap(to=name.removesuffix(LEARNT), learn=learn).apply(model)


def seated(attention: nn.Module) -> Normaliser:
    """Return what an attention module of the lab weighs with."""
    weigher = getattr(attention, SEAT)
    return weigher.normaliser if isinstance(weigher, Weigher) else Softmax()
