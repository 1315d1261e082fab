"""Two checkpoints of one model: what moved, how far, which layers changed places."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.auditing.weights.entries import Checkpoint, printable
from equipoise.errors import InputError
from equipoise.judging.rules.weights import role
from equipoise.records import Reading, Record

SAMPLES, SAMPLE = 8, 512
"""Stretches of a matrix that are compared with every layer, and their entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange(Record):
    """One tensor in both checkpoints."""

    name: str
    relative: float
    """‖new − old‖ / ‖old‖; infinite where the old tensor was all zeros."""
    cosine: float


@dataclass(slots=True)
class Comparison:
    """What is different between an old and a new checkpoint."""

    changes: list[WeightChange] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """In the old one only."""
    added: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    match: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """New tensor → cosine with each old one of its role, in the order of ``roles``."""
    roles: dict[str, list[str]] = field(default_factory=dict)

    @property
    def moved(self) -> list[WeightChange]:
        """What moved: NaN, then the farthest, then what was all zeros before."""
        return sorted((c for c in self.changes if c.relative != 0), key=_distance)

    def facts(self, old: str) -> list[str]:
        """Return in a line or two what moved since the other checkpoint, and where."""
        moved, count = self.moved, len(self.changes)
        lines = [f"against {old}: {len(moved)} of {count} tensors moved"]
        if moved and math.isfinite((far := moved[0]).relative):
            lines[0] += f", {printable(far.name)} the farthest (by {far.relative:.3g} "
            lines[0] += f"of its norm, cosine {far.cosine:.3g})"
        if zeros := sum(math.isinf(change.relative) for change in moved):
            lines.append(f"tensors that were all zeros before: {zeros}")
        if self.added:
            new = printable(self.added[0])
            lines.append(f"tensors that are new: {len(self.added)}, such as {new}")
        return lines

    def readings(self) -> list[Reading]:
        names = [c.name for c in self.changes]
        sizes = [(c.relative, c.cosine) for c in self.changes]
        found = [
            Reading(
                step=0,
                quantity="weights.change",
                sites=tuple(names),
                values=tuple(sizes),
            )
        ]
        rows = tuple(self.match.items())
        if rows:
            sites, values = zip(*rows, strict=True)
            found.append(
                Reading(step=0, quantity="weights.match", sites=sites, values=values)
            )
        gone = [("weights.missing", self.missing), ("weights.reshaped", self.reshaped)]
        for quantity, tensors in gone:
            ones = tuple((1.0,) for _ in tensors)
            if tensors:
                found.append(
                    Reading(
                        step=0, quantity=quantity, sites=tuple(tensors), values=ones
                    )
                )
        return found


def _distance(change: WeightChange) -> tuple[bool, float]:
    """Return what tensors that moved are sorted by."""
    size = change.relative
    return math.isinf(size), -math.inf if math.isnan(size) else -size


@torch.no_grad()
def compare(new: Checkpoint, old: Checkpoint) -> Comparison:
    """Return how a checkpoint differs from an earlier one, read side by side."""
    found = Comparison(
        missing=[n for n in old.entries if n not in new.entries],
        added=[n for n in new.entries if n not in old.entries],
    )
    common = [n for n in new.entries if n in old.entries]
    if not common:
        raise InputError(
            f"{new.name} and {old.name} have no tensor in common "
            f"({printable(next(iter(new.entries)))}, "
            f"{printable(next(iter(old.entries)))})"
        )
    for name in common:
        if new.entries[name].shape != old.entries[name].shape:
            found.reshaped.append(name)
        elif new.entries[name].is_float and old.entries[name].is_float:
            found.changes.append(_change(new, old, name))
    _match(new, old, found)
    return found


def _change(new: Checkpoint, old: Checkpoint, name: str) -> WeightChange:
    away = size = own = dot = 0.0
    for a, b in zip(new.chunks(name), old.chunks(name), strict=True):
        x, y = a.double(), b.double()
        away += float((x - y).square().sum())
        size, own = size + float(y.square().sum()), own + float(x.square().sum())
        dot += float(x @ y)
    still = away == 0
    relative = 0.0 if still else math.sqrt(away / size) if size else math.inf
    scale = math.sqrt(size) * math.sqrt(own)
    return WeightChange(
        name=name, relative=relative, cosine=dot / scale if scale else math.nan
    )


def _match(new: Checkpoint, old: Checkpoint, found: Comparison) -> None:
    """Compare samples of every matrix with all of its role in the other checkpoint."""
    for change in found.changes:
        if len(new.entries[change.name].shape) > 1:
            found.roles.setdefault(role(change.name), []).append(change.name)
    for names in found.roles.values():
        shapes = {new.entries[n].shape for n in names}
        moved = any(c.relative for c in found.changes if c.name in names)
        if len(names) < 2 or len(shapes) > 1 or not moved:
            continue
        a, b = (torch.stack([_sample(c, n) for n in names]) for c in (new, old))
        for name, row in zip(names, (a @ b.mT).tolist(), strict=True):
            found.match[name] = tuple(row)


def _sample(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return some entries of a tensor, from places that depend on its size alone."""
    total = checkpoint.entries[name].numel
    count = min(SAMPLE, total)
    starts = [(total - count) * i // (SAMPLES - 1) for i in range(SAMPLES)]
    parts = [checkpoint.load(name, start, count).double() for start in starts]
    return torch.nn.functional.normalize(torch.cat(parts), dim=0)
