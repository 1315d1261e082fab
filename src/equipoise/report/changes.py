"""What changed first: a robust change point for every quantity and layer of a run.

At each column the level ahead is compared with the line that continues the columns
before it. Levels are medians and the scale is a median absolute deviation, so that a
single spike neither makes nor hides a change. A change counts if it is still there at
the end: where a run went another way, not where it stumbled. What fires without such a
turn (it was so from the first sample, or came while the run settled) is listed too.

Axes, in this file:  S series · N column · W column of a window.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from equipoise.records import Finding
from equipoise.report.grids import Grid
from equipoise.report.quantities import MOST, quantity_of, shown

Array = NDArray[np.float64]
Kind = Literal["turn", "start", "slow"]
"""A lasting turn; so from the first sample; out of bounds since a step, no turn."""

MOST_CHANGES = 60
"""That a page lists."""
STRENGTH = 8.0
"""Least size of a change, in scales of what came before it."""
FACTOR = 1.5
"""Least size of a change of a quantity on a logarithmic scale."""
SHARE = 0.1
"""Least size on a linear scale, as a share of the largest value."""
WINDOW = 6
"""Columns before; half as many ahead."""
SETTLING = 0.1
"""Share of the steps at the start in which every healthy run changes too."""
NEVER = -1
EMPTY = ("update.unchanged",)
"""NaN in files of earlier versions where there was nothing to read: no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A quantity of a layer that took another course."""

    quantity: str
    site: str
    step: int
    before: float
    after: float
    """The level at the end; NaN where it broke."""
    strength: float
    """Size in scales of what came before; infinite where it became NaN or Inf."""
    broken: bool = False
    kind: Kind = "turn"


def changes(
    grids: Sequence[Grid], among: Collection[str], firing: Sequence[Finding] = ()
) -> list[Change]:
    """Return the first change of each quantity ``among`` these at its first layer.

    In order of onset. A model that learns changes everywhere, so only what a verdict
    rests on counts (``Verdict.quantities``), and what became NaN or Inf; errors of our
    own estimates say nothing about the model. One line per quantity: how many layers
    followed is to be seen in the heatmap. What is ``firing`` on a quantity that took no
    turn stands among them from the step on from which it is true, the gravest first.
    """
    ours = [grid for grid in grids if not grid.quantity.endswith(".error")]
    turned = (_of_grid(grid, is_turn=grid.quantity in among)[:1] for grid in ours)
    # Stable: of what began together a NaN comes first, then what fires, by severity.
    found = sorted([*chain(*turned), *_standing(ours, firing)], key=_onset)
    first: dict[str, Change] = {}
    for change in found:
        first.setdefault(change.quantity, change)
    return list(first.values())[:MOST_CHANGES]


def seen_at(finding: Finding) -> str:
    """Return the site in which one sees a finding: a cause may sit in front of it."""
    most = finding.params.get("most_in")
    return most if isinstance(most, str) and most else finding.site


def _standing(grids: Sequence[Grid], firing: Sequence[Finding]) -> list[Change]:
    """Return what fires, from the step on from which it is true, the gravest first."""
    by_name = {grid.quantity: grid for grid in grids if grid.mean.size}
    found = []
    for finding in sorted(firing, key=lambda f: f.order[0]):
        name = quantity_of(finding, list(by_name))
        if finding.severity != "info" and name is not None:
            found.append(_since(by_name[name], finding))
    return found


def _since(grid: Grid, finding: Finding) -> Change:
    """Return a quantity at the first sample and at the end, where it fires."""
    since, site = finding.since, seen_at(finding)
    n = int(np.searchsorted(grid.last, since).clip(0, len(grid.last) - 1))
    s = grid.sites.index(site) if site in grid.sites else _worst(grid, n)
    level = grid.high if grid.quantity in MOST else grid.mean
    row = level[s][np.isfinite(level[s])]
    return Change(
        quantity=grid.quantity,
        site=grid.sites[s],
        step=since,
        before=float(row[0]) if row.size else float("nan"),
        after=float(np.median(row[-(WINDOW // 2) :])) if row.size else float("nan"),
        strength=float("inf"),
        kind="start" if since <= grid.first[0] else "slow",
    )


def _worst(grid: Grid, n: int) -> int:
    """Return the site that is worst in a column: the lowest, or the highest."""
    sign = -1 if shown(grid.quantity).worse == "low" else 1
    return int(np.nan_to_num(sign * grid.mean[:, n], nan=-np.inf).argmax())


def _onset(change: Change) -> tuple[int, float]:
    return change.step, -change.strength


def _of_grid(grid: Grid, *, is_turn: bool) -> list[Change]:
    """Return the changes of all layers of a quantity, the first one first.

    Without ``is_turn`` only those to NaN or Inf.
    """
    found = [] if grid.quantity in EMPTY else [*_breaks(grid)]
    if not len(grid.first) or not is_turn:
        return found
    settled = grid.first[0] + SETTLING * (grid.last[-1] - grid.first[0])
    logarithmic = is_logarithmic(grid)
    x_SN = _usable(grid, logarithmic)
    onset_S, strength_S = onsets(x_SN, least=_least(x_SN, grid.quantity, logarithmic))
    for s, n in enumerate(onset_S.tolist()):
        if n != NEVER and grid.first[n] >= settled:
            found.append(_change(grid, s, n, float(strength_S[s])))
    return sorted(found, key=_onset)


def is_logarithmic(grid: Grid) -> bool:
    """Say whether a quantity is compared by its logarithm: shown so, and positive."""
    if shown(grid.quantity).scale != "log":
        return False
    finite = grid.mean[np.isfinite(grid.mean)]
    return bool(finite.size) and float((finite <= 0).mean()) < 0.05


def _usable(grid: Grid, logarithmic: bool) -> Array:
    if not logarithmic:
        return np.where(np.isfinite(grid.mean), grid.mean, np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(grid.mean > 0, np.log(grid.mean), np.nan)


def _least(x_SN: Array, quantity: str, logarithmic: bool) -> float:
    if logarithmic or ".ln_" in quantity:
        return float(np.log(FACTOR))
    finite = x_SN[np.isfinite(x_SN)]
    most = float(np.abs(finite).max()) if finite.size else 0.0
    return max(SHARE * most, 1e-12)


def _breaks(grid: Grid) -> list[Change]:
    """Return the first NaN or Inf of each site."""
    found = []
    for s in np.flatnonzero(grid.broken.any(axis=1)).tolist():
        n = int(np.flatnonzero(grid.broken[s])[0])
        before = grid.mean[s, :n][np.isfinite(grid.mean[s, :n])]
        found.append(
            Change(
                quantity=grid.quantity,
                site=grid.sites[s],
                step=int(grid.first[n]),
                before=float(before[-1]) if before.size else float("nan"),
                after=float("nan"),
                strength=float("inf"),
                broken=True,
            )
        )
    return found


def _change(grid: Grid, s: int, n: int, strength: float) -> Change:
    before = grid.mean[s, max(0, n - WINDOW) : n]
    after = grid.mean[s, max(n, grid.mean.shape[1] - WINDOW // 2) :]
    return Change(
        quantity=grid.quantity,
        site=grid.sites[s],
        step=int(grid.first[n]),
        before=float(np.nanmedian(before)),
        after=float(np.nanmedian(after)),
        strength=strength,
    )


def onsets(x_SN: Array, *, least: float) -> tuple[NDArray[np.int64], Array]:
    """Return per series the column of its first lasting change (−1: none), its size.

    >>> x = np.r_[np.tile([0.0, 0.1], 15), np.tile([5.0, 5.1], 15)]
    >>> onsets(x[None], least=0.5)[0].tolist()
    [30]
    >>> onsets(np.linspace(0, 9, 60)[None], least=0.5)[0].tolist()  # a steady line
    [-1]
    """
    series, columns = x_SN.shape
    never = np.full(series, NEVER)
    if columns < 2 * WINDOW + WINDOW // 2 or not series:
        return never, np.zeros(series)
    x_SN = _without_gaps(x_SN)
    jump_SN, scale_SN = _jumps(x_SN)
    strong = (np.abs(jump_SN) >= np.maximum(STRENGTH * scale_SN, least)) & _lasting(
        x_SN, jump_SN
    )
    # A small turn on the way to a large one is not yet the change.
    most_S = np.where(strong, np.abs(jump_SN), 0).max(axis=1, keepdims=True)
    strong &= np.abs(jump_SN) >= most_S / 2
    place_S = np.where(strong.any(axis=1), strong.argmax(axis=1), NEVER)
    rows = np.arange(series)
    size_S = np.abs(jump_SN[rows, place_S]) / np.maximum(scale_SN[rows, place_S], 1e-12)
    onset_S = np.where(place_S == NEVER, NEVER, place_S + WINDOW)
    return _refined(x_SN, onset_S, jump_SN[rows, place_S]), size_S


def _without_gaps(x_SN: Array) -> Array:
    """Return each series with its last value carried over gaps, 0 where it has none."""
    known = np.isfinite(x_SN)
    last = np.maximum.accumulate(np.where(known, np.arange(x_SN.shape[1]), 0), axis=1)
    return np.nan_to_num(np.take_along_axis(x_SN, last, axis=1))


def _jumps(x_SN: Array) -> tuple[Array, Array]:
    """Return per column how far the level ahead is from the line so far, and a scale.

    Column n of the answer is column n + WINDOW of the series.
    """
    half = WINDOW // 2
    ahead = sliding_window_view(x_SN[:, WINDOW:], half, axis=1)
    count = ahead.shape[1]
    behind = sliding_window_view(x_SN, WINDOW, axis=1)[:, :count]
    older, newer = (
        np.median(behind[..., :half], axis=2),
        np.median(behind[..., half:], axis=2),
    )
    slope = (newer - older) / half
    offsets = np.arange(WINDOW) - (WINDOW - 1) / 2
    middle = (older + newer) / 2
    residual = behind - middle[..., None] - slope[..., None] * offsets
    scale = 1.4826 * np.median(np.abs(residual), axis=2)
    # A window that happens to be calm must not make the next one a change.
    typical = np.median(scale, axis=1, keepdims=True)
    expected = middle + slope * (WINDOW / 2 + half / 2)
    return np.median(ahead, axis=2) - expected, np.maximum(scale, typical)


def _lasting(x_SN: Array, jump_SN: Array) -> NDArray[np.bool_]:
    """Say whether half of a jump is still there at the end of the run."""
    end = np.median(x_SN[:, -(WINDOW // 2) :], axis=1)
    count = jump_SN.shape[1]
    level = np.median(sliding_window_view(x_SN, WINDOW, axis=1)[:, :count], axis=2)
    return (end[:, None] - level) * np.sign(jump_SN) >= np.abs(jump_SN) / 2


def _refined(
    x_SN: Array, onset_S: NDArray[np.int64], jump_S: Array
) -> NDArray[np.int64]:
    """Move each onset to the first column that has gone half of the way."""
    refined = onset_S.copy()
    for s in np.flatnonzero(onset_S != NEVER).tolist():
        n = int(onset_S[s])
        level = np.median(x_SN[s, n - WINDOW : n])
        ahead = x_SN[s, n : n + WINDOW]
        gone = (ahead - level) * np.sign(jump_S[s]) >= abs(jump_S[s]) / 2
        refined[s] = n + int(gone.argmax()) if gone.any() else n
    return refined
