"""A plan: settings with their formulas and references, for people and for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from equipoise.errors import InputError
from equipoise.planning.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing to set, and why."""

    name: str
    """Dotted: ``init.gain.v``, ``residual.branch``, ``warmup.steps``, ``norm.eps``."""
    value: float
    formula: str
    reference: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to set for one model; iterate over it, index it by name, or print it."""

    model: Model
    settings: tuple[Setting, ...]

    def __iter__(self) -> Iterator[Setting]:
        return iter(self.settings)

    def __getitem__(self, name: str) -> float:
        for setting in self.settings:
            if setting.name == name:
                return setting.value
        known = ", ".join(setting.name for setting in self.settings)
        raise InputError(f"this plan has no {name}; it has {known}")

    def __str__(self) -> str:
        rows = [(s.name, f"{s.value:.6g}", s.formula, s.reference) for s in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)
