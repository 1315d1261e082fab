"""Which types of layers were read, and how much of the model each holds.

A layer that mixes tokens is read if its attention or its gates were seen; a short
convolution has neither, and is what its class says. Layers are counted over the
run: one that some steps leave out (LayerDrop) is read once it was.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from equipoise.anatomy.mixers import mixers
from equipoise.anatomy.sites import Anatomy, named
from equipoise.judging.facts import Facts
from equipoise.judging.judge import LARGE
from equipoise.probes.capture import PassCoverage
from equipoise.records import Finding
from equipoise.watching.findings import UNREAD_MIXERS

UNKNOWN = "unknown_class"
Json = dict[str, Any]


@dataclass(slots=True)
class LayerCoverage:
    """Counts, type by type, the layers that ran and those that were read."""

    _read: set[str] = field(default_factory=set)
    _ran: set[str] = field(default_factory=set)
    _gated: set[str] = field(default_factory=set)
    _types: list[Json] = field(default_factory=list)
    _known: tuple[int, int, int, int] = (0, 0, 0, 0)

    def add(
        self, anatomy: Anatomy, seen: PassCoverage, gated: Collection[str] = ()
    ) -> list[Json]:
        """Take what a sampled step showed; return the types of layers so far.

        ``gated`` are the mixers whose gates were read.
        """
        kinds = anatomy.mixers.items()
        self._gated |= {*gated, *(n for n, m in kinds if m.kind == "convolution")}
        self._read |= {name.partition("#")[0] for name in seen.read}
        unread = {name for name in seen.gaps.unread if name}
        self._ran |= {*seen.ran, *(name.partition("#")[0] for name in unread)}
        known = id(anatomy), len(self._read), len(self._ran), len(self._gated)
        if known != self._known:  # counting parameters takes longer than a step may
            self._types, self._known = self._counted(anatomy), known
        return self._types

    def _counted(self, anatomy: Anatomy) -> list[Json]:
        modules = dict(named(anatomy.model))
        attending = {n: modules[n] for n in self._read | self._ran if n in modules}
        total = _size(modules[""]) or 1
        found = [
            *_types("attention", attending, self._read, total),
            *_types("mixer", mixers(anatomy, attending), self._gated, total),
        ]
        return sorted(found, key=lambda one: -float(one["share"]))


def _types(
    kind: str, layers: Mapping[str, nn.Module], read: Collection[str], total: int
) -> list[Json]:
    """Return one entry for each class among the layers."""
    classes: dict[str, list[str]] = {}
    for name, module in layers.items():
        classes.setdefault(type(module).__name__, []).append(name)
    found = []
    for name, own in classes.items():
        seen = [layer for layer in own if layer in read]
        share = _size(*(layers[layer] for layer in own)) / total
        one = {"kind": kind, "class": name, "read": len(seen), "of": len(own)}
        one |= {"share": share, "site": own[0]}
        found.append(one if seen else {**one, "why": UNKNOWN})
    return found


def _size(*modules: nn.Module) -> int:
    """Return how many parameters some modules hold, shared ones once."""
    each = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(each.values())


def unread_mixers(facts: Facts) -> list[Finding]:
    """Return a finding for each type of mixer of which nothing was read."""
    layers = facts.section("coverage").get("layers", ())
    mixers = [one for one in layers if one["kind"] == "mixer" and not one["read"]]
    return [_not_read(facts.step, one) for one in mixers]


def _not_read(step: int, one: Json) -> Finding:
    known = {name: one[name] for name in ("class", "read", "of", "share")}
    make = Finding.warn if one["share"] > LARGE else Finding.info
    return make(step, UNREAD_MIXERS, site=one["site"], **known)


def share_of(anatomy: Anatomy, sites: Collection[str]) -> float | None:
    """Return the share of the parameters that some sites hold; None if unknown."""
    modules = dict(named(anatomy.model))
    names = [site.partition("#")[0] for site in sites]
    if not all(name and name in modules for name in names):
        return None
    return _size(*(modules[name] for name in names)) / (_size(modules[""]) or 1)
