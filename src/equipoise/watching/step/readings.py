"""A step's readings on the host: losses, scalars, and what derives from readings.

Scalars of every step stay on their device until there are enough to move at once: a
step costs a few Python operations here, no transfer, no wait, no write. Derived
readings follow from other readings, without the model.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equipoise.anatomy.sharding import local_part
from equipoise.judging.facts import Facts
from equipoise.probes.capture import HostTransfer, Table
from equipoise.probes.sharding import Parts, Transfer, copy_count, is_partial
from equipoise.records import Reading


def table_readings(step: int, table: Table) -> list[Reading]:
    """Return one reading per quantity."""
    return [
        Reading(
            step=step,
            quantity=quantity,
            sites=tuple(sites),
            values=tuple(cell.values for cell in sites.values()),
        )
        for quantity, sites in table.items()
    ]


MOST_STEPS = 64
LONGEST_S = 2.0
"""How stale the run file may get while training goes on."""

NORM, NORM_PART = "gradient.norm.total", "gradient.norm.part"
"""The norm that clips, and this rank's part of it where FSDP shards the gradient."""

Entry = tuple[int, str, float]


@dataclass(slots=True)
class RecordedSettings:
    """What the script chose beside the rate; a setting is recorded as it moves.

    The first group speaks for all, as for the rate, but of the weight decay the
    largest counts: vectors are often exempt from it.
    """

    _known: dict[tuple[int, str], float] = field(default_factory=dict)

    def moved(self, optimizer: Optimizer, number: int) -> list[tuple[str, float]]:
        """Return the settings that are not what they were at the last step."""
        found = list[tuple[str, float]]()
        for name, value in _settings(optimizer.param_groups):
            if self._known.get((number, name)) != value:
                self._known[number, name] = value
                suffix = f".{number + 1}" if number else ""
                found.append((f"optimizer.{name}{suffix}", value))
        return found

    def of_loop(self, facts: Facts) -> list[Entry]:
        """Return what a sampled step shows of the loop's own settings, if it moved."""
        found = list[Entry]()
        for name, value in _of_loop(facts):
            if self._known.get((-1, name)) != value:
                self._known[-1, name] = value
                found.append((facts.step, f"loop.{name}", value))
        return found


def _of_loop(facts: Facts) -> Iterator[tuple[str, float]]:
    """Yield the sequences of a step, the norm that is clipped at, the loss scale."""
    batches = facts.each("batch")
    if all("sequences" in batch for batch in batches):
        counts = [one["sequences"] * one["micro_batches"] for one in batches]
        apart = batches[0].get("parallel") == "data"
        yield "batch_size", float(sum(counts) if apart else counts[0])
    clipped = facts.section("clipping").get("each")
    numbers = {"clipping_limit": clipped[0]["largest"] if clipped else None}
    numbers["loss_scale"] = facts.section("scaler").get("factor")
    for name, number in numbers.items():
        if isinstance(number, int | float):
            yield name, float(number)


def _settings(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield name and value of settings that are plain numbers: no device is asked."""
    decays = [group.get("weight_decay") for group in groups]
    if numbers := [d for d in decays if isinstance(d, int | float)]:
        yield "weight_decay", float(max(numbers))
    first = groups[0]
    betas = first.get("betas")
    pairs = [("momentum", first.get("momentum")), ("epsilon", first.get("eps"))]
    if isinstance(betas, Sequence):
        pairs += [(f"beta{n + 1}", beta) for n, beta in enumerate(betas)]
    for name, value in pairs:
        if isinstance(value, int | float):
            yield name, float(value)


@dataclass(slots=True)
class StepScalars:
    """Scalars of steps not yet written."""

    _pending: list[tuple[int, str, Tensor | float]] = field(default_factory=list)
    _first_step: int = 0
    _since: float = field(default_factory=time.monotonic)

    def add(self, step: int, name: str, value: Tensor | float) -> None:
        if not self._pending:
            self._first_step, self._since = step, time.monotonic()
        value = value.detach() if isinstance(value, Tensor) else float(value)
        self._pending.append((step, name, value))

    def add_rate(self, step: int, optimizer: Optimizer, number: int = 0) -> None:
        """Add the learning rate, copied: a scheduler may change the tensor in place.

        The rate of a second optimiser is ``learning_rate.2``, and so on.
        """
        rate = optimizer.param_groups[0]["lr"]
        rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
        self.add(
            step, f"learning_rate.{number + 1}" if number else "learning_rate", rate
        )

    def add_norm(self, step: int, norm: Tensor, *, ranks: int) -> Tensor:
        """Add the norm that clips, or this rank's share of it; return what is here."""
        name = NORM_PART if is_partial(norm) else NORM
        count = ranks if name == NORM_PART else 1
        copies = copy_count(norm, count) if count > 1 else 1
        norm = local_part(norm)
        self.add(step, name, norm * copies**-0.5)
        return norm

    def extend(self, newer: "StepScalars") -> None:
        """Add what was gathered since."""
        for entry in newer._pending:
            self.add(*entry)

    @property
    def due(self) -> bool:
        """Whether enough has gathered to be worth a transfer and a commit."""
        if not self._pending:
            return False
        many = self._pending[-1][0] - self._first_step >= MOST_STEPS
        return many or time.monotonic() - self._since >= LONGEST_S

    def waiting(self) -> list[Tensor]:
        """Return what is still on its device."""
        return [value for _, _, value in self._pending if isinstance(value, Tensor)]

    def arrived(self, numbers: Sequence[tuple[float, ...]]) -> None:
        """Take the numbers of all that was ``waiting``."""
        found = iter(numbers)
        self._pending = [
            (step, name, next(found)[0] if isinstance(value, Tensor) else value)
            for step, name, value in self._pending
        ]

    def fetch(self) -> list[Entry]:
        """Bring everything gathered to the host and return it; it stays gathered."""
        entries = self.pop()
        for entry in entries:
            self.add(*entry)
        return entries

    def pop(self) -> list[Entry]:
        """Return everything gathered as host numbers, and start afresh."""
        self.arrived(Transfer(self.waiting()).numbers())
        pending, self._pending = self._pending, []
        return [(step, name, float(value)) for step, name, value in pending]


@dataclass(frozen=True, slots=True)
class PendingSample:
    """What is on its way to the host: a sampled step and scalars, or only those."""

    step: int | None
    readings: HostTransfer
    scalars: StepScalars


@dataclass(frozen=True, slots=True)
class HostSample:
    """What has arrived on the host of a sampled step, or of scalars alone."""

    step: int | None
    table: Table
    parts: dict[str, Parts]
    facts: dict[str, Any]
    """What the loop was seen to do, by section."""


def scalar_readings(entries: Iterable[Entry]) -> list[Reading]:
    """Return one reading per scalar and step; the last value counts."""
    last = {(step, name): value for step, name, value in entries}
    return [Reading.scalar(step, name, value) for (step, name), value in last.items()]


LEAST_SHARE = 1e-9
"""Of the largest block's gradient: a smaller one is taken for none."""

LEAST_FACTOR = 2.0**-126
"""float32's smallest normal number."""

Values = dict[str, tuple[float, ...]]
"""site → values."""


DerivedTable = dict[str, Values]
"""quantity → site → values."""


def derived_readings(
    step: int, readings: Iterable[Reading], blocks: list[str]
) -> list[Reading]:
    """Return the step's derived readings; what cannot be derived is absent, never 0."""
    table = {r.quantity: dict(zip(r.sites, r.values, strict=True)) for r in readings}
    found = [
        *_gradients(table, blocks),
        *_updates(table),
        *_sensitivities(table, blocks),
    ]
    return [
        Reading(step=step, quantity=q, sites=tuple(v), values=tuple(v.values()))
        for q, v in found
        if v
    ]


def _gradients(table: DerivedTable, blocks: list[str]) -> Iterator[tuple[str, Values]]:
    norms = table.get("gradient.norm", {})
    if norms and "gradient.norm.total" not in table:
        total = math.sqrt(sum(v[0] ** 2 for v in norms.values()))
        yield "gradient.norm.total", {"": (total,)}
    if blocks and {blocks[0], blocks[-1]} <= norms.keys():
        first, last = norms[blocks[0]][0], norms[blocks[-1]][0]
        # A last block without gradient: 0 on one CPU is rounding on another.
        if not last <= LEAST_SHARE * max(v[0] for v in norms.values()):
            yield "gradient.first_to_last", {"": (first / last,)}


def _updates(table: DerivedTable) -> Iterator[tuple[str, Values]]:
    moved, size = table.get("update.norm", {}), table.get("weight.norm", {})
    here = [site for site in moved if site in size and size[site][0]]
    yield "update.ratio", {s: (moved[s][0] / size[s][0],) for s in here}


def _sensitivities(
    table: DerivedTable, blocks: list[str]
) -> Iterator[tuple[str, Values]]:
    """S = θ·B̄²·G per attention site, with B̄ of its input and of its block's stream.

    The factors are kept as logarithms: their differences over time or over layers
    say which of them moved S.
    """
    G, theta = table.get("projection.G", {}), table.get("attention.theta.mean", {})
    streams = table.get("residual.B", {})
    mean = {site: sum(v) / len(v) for site, v in theta.items() if site in G}
    for name, B in (
        ("S", table.get("attention.B", {})),
        (
            "S_residual",
            {
                s: streams[b]
                for s in mean
                if (b := _stream(s, blocks, streams)) in streams
            },
        ),
    ):
        here = [site for site in G if site in mean and site in B]
        S: Values = {s: (mean[s] * B[s][0] ** 2 * G[s][0],) for s in here}
        yield f"sensitivity.{name}", S
        yield f"sensitivity.{name}.ln_B2", {s: (2 * _ln(B[s][0]),) for s in here}
    yield "sensitivity.ln_theta", {s: (_ln(mean[s]),) for s in G if s in mean}
    yield "sensitivity.ln_G", {s: (_ln(G[s][0]),) for s in G if s in mean}


def _stream(site: str, blocks: list[str], streams: Values) -> str:
    """Return which stream a site reads: of a layer that is shared, that pass's."""
    layer, _, number = site.partition("#")
    block = block_of(layer, blocks)
    found = (name for name in (f"{block}#{number}", block) if name in streams)
    return next(found, "")


def block_of(site: str, blocks: list[str]) -> str:
    """Return the block a site lies in, or an empty name."""
    return next((b for b in blocks if f"{site}.".startswith(f"{b}.")), "")


def _ln(x: float) -> float:
    """Return ln x, of what is below float32's normal numbers ln 1.2e-38 = -87.3.

    Whether so small a factor is 0 or not is rounding, and differs between CPUs.
    """
    return math.log(max(x, LEAST_FACTOR)) if x >= 0 else math.nan
