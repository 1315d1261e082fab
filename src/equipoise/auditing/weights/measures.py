"""Measure a checkpoint tensor by tensor: what comes out are readings of step 0.

Of every tensor: size, zeros, subnormal and non-finite numbers. Of projections and
feed-forward maps also the spectral norm, and how far they are from independent random
entries. Of every head ‖W_Q W_Kᵀ‖₂ and ‖W_V W_O‖₂, and how much it resembles another.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.auditing.weights.bounds import (
    Found,
    attention_bound,
    feedforward_bounds,
    gain_offset,
)
from equipoise.auditing.weights.entries import Checkpoint, Entry
from equipoise.auditing.weights.heads import head_values
from equipoise.auditing.weights.layout import (
    DOWN,
    UP,
    AttentionLayout,
    attentions,
    is_norm_gain,
    norm_epsilon,
)
from equipoise.judging.rules.weights import is_random, layer_of
from equipoise.numerics.scaling import initial_std
from equipoise.numerics.spectra.norm import spectral_norm
from equipoise.records import Reading

Progress = Callable[[float], None]
"""Called with the share of the work that is done."""
LARGEST_MATRIX = 1 << 28
"""Entries of a matrix whose spectral norm is taken: 1 GB in float32."""
SPECTRAL_COST = 6
"""Reading a matrix for its norm costs so many times as much as looking at it once."""
NARROWEST = 32
"""Rows and columns needed to tell random entries from trained ones by their scatter."""


class Statistics(NamedTuple):
    """What one look at a tensor's entries gives."""

    rms: float
    largest: float
    zeros: float
    subnormal: float
    """Shares of the entries."""
    nonfinite: int


@dataclass(slots=True)
class Measurement:
    """Readings of a checkpoint, and what could not be read."""

    values: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    """Quantity → site → values."""
    unread: list[str] = field(default_factory=list)
    attentions: int = 0
    widths: dict[str, int] = field(default_factory=dict)
    """Map that reads the residual stream → the model's width."""
    headless: int = 0
    """Attention modules whose number of heads is not known."""
    uppers: dict[str, float] = field(default_factory=dict)
    """Map → upper end of its spectral norm."""
    unbounded: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Attention or feed-forward, and why it has no bound → sites."""

    def add(self, quantity: str, site: str, *values: float) -> None:
        self.values.setdefault(quantity, {})[site] = values

    def bound(self, part: str, site: str, found: Found) -> None:
        """Note log₁₀ of a bound, or why there is none."""
        if found.reason:
            self.unbounded.setdefault((part, found.reason), []).append(site)
            return
        log = math.log10(found.value) if found.value > 0 else -math.inf
        self.add(f"weights.bound.{part}", site, log)

    def get(self, quantity: str, site: str) -> float:
        """Return one value of a site, NaN where there is none."""
        return self.values.get(quantity, {}).get(site, (math.nan,))[0]

    def readings(self) -> list[Reading]:
        return [
            Reading(
                step=0, quantity=name, sites=tuple(rows), values=tuple(rows.values())
            )
            for name, rows in self.values.items()
        ]


@torch.no_grad()
def measure(
    checkpoint: Checkpoint, *, progress: Progress = lambda share: None
) -> Measurement:
    """Return all readings of a checkpoint, holding one module's maps at a time."""
    found, sites = Measurement(), attentions(checkpoint)
    work = _Work(checkpoint, progress, {name for a in sites for name in a.tensors})
    for attention in sites:
        _measure_attention(checkpoint, attention, found)
        work.done(attention.tensors)
    for name, entry in checkpoint.entries.items():
        if not entry.is_float or not entry.numel:
            if is_packed(name, entry):
                found.unread.append(name)
        elif name not in work.projections:
            _measure_tensor(checkpoint, name, found)
            _measure_constant(checkpoint, name, found)
        work.done([name])
    _measure_norms(checkpoint, found)
    _measure_pairs(sites, found)
    for site, bound in feedforward_bounds(checkpoint, sites, found.uppers):
        found.bound("feedforward", site, bound)
    _measure_plan(found)
    return found


CODES = re.compile(r"(qweight|qzeros|weight_packed|_blocks)$")


def is_packed(name: str, entry: Entry) -> bool:
    """Say whether a tensor holds codes of weights, in no layout that is known here.

    Masks are bytes too: of one batch and head.
    """
    if entry.dtype is None:
        return True
    mask = entry.dtype == torch.bool or entry.shape[:2] == (1, 1)
    small = entry.dtype.itemsize == 1 and not mask
    return bool(entry.numel) and (small or bool(CODES.search(name)))


@dataclass(slots=True)
class _Work:
    checkpoint: Checkpoint
    progress: Progress
    projections: set[str]
    costs: dict[str, float] = field(init=False)
    spent: float = 0.0
    total: float = field(init=False)

    def __post_init__(self) -> None:
        entries = self.checkpoint.entries
        self.costs = {
            name: entry.numel * (SPECTRAL_COST if self._is_spectral(name) else 1)
            for name, entry in entries.items()
        }
        self.total = sum(self.costs.values()) or 1.0

    def _is_spectral(self, name: str) -> bool:
        return name in self.projections or bool(UP.search(name) or DOWN.search(name))

    def done(self, names: tuple[str, ...] | list[str]) -> None:
        self.spent += sum(self.costs.pop(name, 0.0) for name in names)
        self.progress(self.spent / self.total)


def _measure_tensor(checkpoint: Checkpoint, name: str, found: Measurement) -> None:
    entry = checkpoint.entries[name]
    matrix = len(entry.shape) == 2 and bool(UP.search(name) or DOWN.search(name))
    if matrix and entry.numel <= LARGEST_MATRIX:
        stored = checkpoint.read(name)
        _note(found, name, statistics([stored], smallest=_tiny(stored.dtype)))
        _measure_matrix(stored.float(), name, found)
        return
    dtype = entry.dtype
    assert dtype is not None
    _note(found, name, statistics(checkpoint.chunks(name), smallest=_tiny(dtype)))


def _measure_attention(
    checkpoint: Checkpoint, attention: AttentionLayout, found: Measurement
) -> None:
    found.attentions += 1
    stored = {name: checkpoint.read(name) for name in attention.tensors}
    for name, tensor in stored.items():
        _note(found, name, statistics([tensor], smallest=_tiny(tensor.dtype)))
    maps = {
        letter: getattr(attention, letter).of(stored[getattr(attention, letter).tensor])
        for letter in "qkvo"
    }
    maps = {letter: matrix.float() for letter, matrix in maps.items()}
    stored.clear()
    norms = []
    for letter, matrix in maps.items():
        norm = _measure_matrix(matrix, _place(attention, letter), found)
        if letter != "o":
            found.widths[_place(attention, letter)] = matrix.shape[1]
        found.add(f"projection.norm.{letter}", attention.site, norm)
        norms.append(norm)
    found.add("projection.G", attention.site, math.prod(norms))
    heads = {} if attention.heads is None else head_values(attention, maps)
    found.headless += attention.heads is None
    for quantity, values in heads.items():
        found.add(quantity, attention.site, *values)
    width = maps["q"].shape[0] // (attention.heads or 1)
    bound = attention_bound(checkpoint, attention, {**heads, "width": [width]})
    found.bound("attention", attention.site, bound)


def _place(attention: AttentionLayout, letter: str) -> str:
    """Return the tensor's name, with the letter where several share one."""
    name: str = getattr(attention, letter).tensor
    alone = sum(getattr(attention, other).tensor == name for other in "qkvo") == 1
    return name if alone else f"{name}[{letter}]"


def _measure_matrix(matrix: Tensor, name: str, found: Measurement) -> float:
    """Note σ₁, and how far the matrix is from independent random entries.

    For those σ₁ is near rms·(√M + √N), and norms of rows and columns scatter by
    1/√(2N) and 1/√(2M) relatively.
    """
    rows, columns = matrix.shape
    # Tall and contiguous: the compiled loop reads it row by row, once a step.
    estimate = spectral_norm((matrix if rows >= columns else matrix.mT).contiguous())
    rms = float(matrix.norm()) / math.sqrt(matrix.numel())
    found.add("weights.norm", name, estimate.value)
    found.uppers[name] = estimate.upper
    found.add("weights.map.rms", name, rms)
    if min(rows, columns) < NARROWEST:
        return estimate.value
    edge = rms * (math.sqrt(rows) + math.sqrt(columns))
    found.add("weights.edge", name, estimate.value / edge if edge > 0 else math.nan)
    found.add(
        "weights.spread",
        name,
        _scatter(matrix.norm(dim=1)) * math.sqrt(2 * columns),
        _scatter(matrix.norm(dim=0)) * math.sqrt(2 * rows),
    )
    return estimate.value


def _scatter(norms: Tensor) -> float:
    mean = float(norms.double().mean())
    return float(norms.double().std(correction=0)) / mean if mean > 0 else math.nan


def _measure_norms(checkpoint: Checkpoint, found: Measurement) -> None:
    """Note γ of each norm (its largest, and whether it is exactly 1), and its ε."""
    for name, entry in checkpoint.entries.items():
        if not is_norm_gain(name, entry) or not entry.numel:
            continue
        offset = gain_offset(checkpoint, name.rpartition(".")[0])
        gain = checkpoint.read(name).float() + offset
        found.add("weights.gain", name, float(gain.abs().max()))
        epsilon = norm_epsilon(checkpoint, name)
        dtype = entry.dtype
        assert dtype is not None
        if epsilon is not None:
            stored = float(torch.tensor(epsilon, dtype=torch.float64).to(dtype))
            found.add("weights.epsilon", name, epsilon, stored, _tiny(dtype))


def _measure_constant(checkpoint: Checkpoint, name: str, found: Measurement) -> None:
    """Note whether a vector is one number throughout, as γ and biases start."""
    if len(checkpoint.entries[name].shape) == 1 and checkpoint.entries[name].numel > 1:
        vector = checkpoint.read(name)
        vector = vector.float() if vector.dtype.itemsize == 1 else vector
        first = vector[0]
        found.add(
            "weights.constant", name, float((vector == first).all()), float(first)
        )


def _measure_pairs(sites: Sequence[AttentionLayout], found: Measurement) -> None:
    """Note of each map that has a partner the product of both sizes.

    W_Q · 8 beside W_K / 8 is the same model, so what is large or small is the product;
    so it is of values and outputs, and nearly of a feed-forward network's two maps.
    """
    sizes = found.values.get("weights.map.rms", {})
    pairs = [
        (_place(site, one), _place(site, other))
        for site in sites
        for one, other in (("q", "k"), ("v", "o"))
    ]
    attended = {name for pair in pairs for name in pair}
    layers: dict[str, list[str]] = {}
    for name in sizes:
        if name not in attended and layer_of(name):
            layers.setdefault(layer_of(name), []).append(name)
    for names in layers.values():
        down = [name for name in names if DOWN.search(name)]
        up = [name for name in names if name not in down]
        if len(up) == len(down) == 1:
            pairs.append((up[0], down[0]))
    for pair in pairs:
        if all(name in sizes for name in pair):
            product = sizes[pair[0]][0] * sizes[pair[1]][0]
            for name in pair:
                found.add("weights.pair.rms", name, product)


def _measure_plan(found: Measurement) -> None:
    """Note initial sizes over planned ones, for a model that looks untrained.

    A gain that is not 1 belongs to the matrix behind it: then the plan is not known.
    """
    edges = found.values.get("weights.edge", {})
    spreads = found.values.get("weights.spread", {})
    gains = found.values.get("weights.gain", {})
    constant = found.values.get("weights.constant", {})
    fresh = all(is_random(edges[name][0], spreads[name]) for name in edges)
    if (
        not edges
        or not fresh
        or not all(constant[n][0] for n in gains if n in constant)
        or not all(abs(gain - 1) < 0.01 for (gain,) in gains.values())
    ):
        return
    pairs = found.values.get("weights.pair.rms", {})
    for name, (size,) in found.values["weights.map.rms"].items():
        # What writes to the stream may be scaled down by depth on purpose.
        if name in found.widths and not DOWN.search(name):
            planned = initial_std(found.widths[name])
            if name in pairs:
                size = math.sqrt(pairs[name][0])
            found.add("weights.plan", name, size / planned)


def _tiny(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).smallest_normal)


def statistics(chunks: Iterable[Tensor], *, smallest: float) -> Statistics:
    """Return what one look at a tensor's pieces gives; non-finite ones are set apart.

    Example:
        >>> statistics([torch.tensor([3.0, 0.0, math.nan])], smallest=1e-38)[2:]
        (0.3333333333333333, 0.0, 1)
    """
    total, nonfinite, zeros, subnormal = 0, 0, 0, 0
    square, largest = 0.0, 0.0
    for chunk in chunks:
        # torch promotes no format of 8 bits.
        wide = torch.float64 if chunk.dtype == torch.float64 else torch.float32
        sizes = chunk.reshape(-1).to(wide, copy=True).abs_()
        total += sizes.numel()
        # A finite sum shows that all are; one that overflows asks for a second look.
        if not bool(sizes.sum().isfinite()):
            bad = ~sizes.isfinite()
            nonfinite += int(bad.sum())
            sizes = sizes[~bad]
        if not sizes.numel():
            continue
        none = sizes.numel() - int(torch.count_nonzero(sizes))
        small = int(torch.count_nonzero(sizes < smallest)) if smallest else none
        zeros, subnormal = zeros + none, subnormal + small - none
        largest = max(largest, float(sizes.max()))
        square += _square(sizes)
    return Statistics(
        rms=math.sqrt(square / max(1, total - nonfinite)),
        largest=largest,
        zeros=zeros / max(1, total),
        subnormal=subnormal / max(1, total),
        nonfinite=nonfinite,
    )


ROW = 4096
"""Entries summed in float32: their squares' sum is right to 2e-6 or better."""


def _square(sizes: Tensor) -> float:
    """Return the sum of squares: of rows in float32, of all rows in float64.

    Where squares leave float32's range everything is summed in float64, which takes
    five times as long.
    """
    top = float(sizes.max())
    if sizes.numel() % ROW or not 1e-15 < top < 1e15:
        return float(torch.linalg.vector_norm(sizes, dtype=torch.float64)) ** 2
    rows = torch.linalg.vector_norm(sizes.view(-1, ROW), dim=1).double()
    return float(rows @ rows)


def _note(found: Measurement, name: str, given: Statistics) -> None:
    found.add("weights.rms", name, given.rms)
    found.add("weights.max", name, given.largest)
    found.add("weights.zero", name, given.zeros)
    found.add("weights.subnormal", name, given.subnormal)
    found.add("weights.nonfinite", name, float(given.nonfinite))
