"""What to measure of a layer's heads, what was measured, and its mean per head.

Axes, in this file:  B batch · H head · Q query · T sizes tried · x any leading axes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.errors import InputError
from equipoise.numerics.selection.concentration import Concentration
from equipoise.numerics.selection.distance import Distance
from equipoise.numerics.selection.separability import Separability

TOPS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure; each part can be left out where only another is needed."""

    tops: tuple[int, ...] = TOPS
    """Sizes of selection; each costs two matrix products per block."""
    distance: bool = True
    """d̃, its bounds and its expectation."""
    published: bool = False
    """Theorem 1's own bound as well: N passes over the keys."""
    separability: bool = True
    """Recall, precision and margin, Euclidean and cosine."""
    random: int = 0
    """Random rankings as a control; each costs as much as the true one."""
    seed: int = 0
    """Of the random rankings."""

    def __post_init__(self) -> None:
        if not self.tops or min(self.tops) < 1 or self.random < 0:
            raise InputError(
                f"tops {self.tops}, random {self.random}: give sizes of at least 1 and "
                "a number of random rankings"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSizes:
    """Readings of shape (…, T): one per size. A part not asked for is None."""

    distance: Distance | None = None
    published: Float[Tensor, "*x T"] | None = None
    euclidean: Separability | None = None
    cosine: Separability | None = None
    random_euclidean: Separability | None = None
    random_cosine: Separability | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Readings of every query of every head: (B, H, Q), and (B, H, Q, T) per size."""

    tops: tuple[int, ...]
    concentration: Concentration
    at: AtSizes

    def per_head(
        self, counted_BQ: Bool[Tensor, "B Q"] | None = None
    ) -> dict[str, Tensor]:
        """Return every reading's mean over queries: name → (H,) or (H, T).

        Queries without a reading (no more visible keys than chosen ones) are left out,
        as are those where ``counted_BQ`` is False (padding). A reading of NaN makes no
        mean NaN here: see ``broken``.
        """
        found = {}
        for name, value in _named(self):
            if counted_BQ is not None:
                out = ~counted_BQ[:, None, :].to(value.device)
                out = out if value.ndim == 3 else out[..., None]
                value = value.masked_fill(out, float("nan"))
            found[name] = value.transpose(0, 1).flatten(1, 2).nanmean(1)
        return found

    @property
    def broken(self) -> int:
        """Rows whose scores held NaN or +inf: they have no reading."""
        return int(self.concentration.p_max.isnan().sum())


def _named(found: Selection) -> Iterator[tuple[str, Tensor]]:
    seen = found.concentration
    visible = seen.visible > 1  # one key: nothing to select from
    for name in ("rho", "p_max", "entropy", "entropy_floor", "evenness"):
        yield name, getattr(seen, name).masked_fill(~visible, float("nan"))
    yield "weight.upper", seen.weight.upper.masked_fill(~visible, float("nan"))
    if found.at.distance is not None:
        yield from _of_distance(found.at.distance)
    if found.at.published is not None:
        yield "distance.published", found.at.published
    for prefix in ("euclidean", "cosine", "random_euclidean", "random_cosine"):
        part: Separability | None = getattr(found.at, prefix)
        if part is not None:
            for name in ("recall", "precision", "f", "margin"):
                yield f"{prefix}.{name}", getattr(part, name)


def _of_distance(at: Distance) -> Iterator[tuple[str, Tensor]]:
    yield "distance", at.value
    for name in ("upper", "lower", "per_token", "lift_lower", "lift_upper"):
        yield f"distance.{name}", getattr(at, name)
    yield "distance.expected_lower", at.expected_lower
    yield "distance.expected_upper", at.expected_upper
