"""Normalisers an arm may name in place of softmax."""

from importlib import import_module

from equipoise.errors import InputError
from equipoise.lab.models import Normaliser


def normaliser(name: str) -> Normaliser:
    """Return the named normaliser of ``numerics.normalisers``."""
    table: dict[str, Normaliser] = import_module(
        "equipoise.numerics.normalisers"
    ).NORMALISERS
    if name not in table:
        raise InputError(
            f"no normaliser {name!r}; there are {', '.join(sorted(table))}"
        )
    return table[name]
