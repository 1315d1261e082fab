"""One pass over a float32 row, then a fill by blocks: closes almost every row.

Axes, in this file:  K key · b block of 32 keys · c key inside its block.
The pass is the only work proportional to K that most rows see: block sums in float64,
and the largest bit pattern of each block, read as an unsigned integer. Where nothing is
negative this is the largest value; a negative entry or a NaN has a larger pattern than
any probability, so the same number also says whether the row is sound.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise.numerics.rows.compiled import compiled
from equipoise.numerics.rows.sorted_rows import Side, theta

WIDTH = 32
_BITS_OF_TWO = 0x40000000
# At most 31 keys exceed this share of the mass.
_LARGE = 1 / WIDTH
# Rejected blocks opened, and keys tried in a swap, before the row is sorted instead.
_OPENED = 4
_TRIED = 8
# How close the mass must be to a multiple of the largest key to look for a level row.
_LEVEL = 1e-6

Block = NDArray[np.float32]
Bits = NDArray[np.uint32]
Sums = NDArray[np.float64]
Keys = NDArray[np.int64]
Bounds = NDArray[np.float64]
Scratch = tuple[Sums, Bits, Block]
Options = tuple[float, float, int]
# A lower bound that no row has: the row needs the next steps of the ladder.
OPEN = -1.0


@compiled(reorder=True)
def block_sums(p_bc: Block, bits_bc: Bits, sum_b: Sums, top_b: Bits) -> None:
    """Write the sum and the largest bit pattern of every block."""
    for b in range(p_bc.shape[0]):
        total, top = 0.0, np.uint32(0)
        for c in range(p_bc.shape[1]):
            total += p_bc[b, c]
            top = max(top, bits_bc[b, c])
        sum_b[b] = total
        top_b[b] = top


@compiled()
def outside_top(p_K: Block, sum_b: Sums, top_b: Block) -> tuple[float, int]:
    """Return the mass outside the largest key, summed directly, and that key."""
    of = int(np.argmax(top_b))
    stop = min((of + 1) * WIDTH, p_K.size)
    top = of * WIDTH + int(np.argmax(p_K[of * WIDTH : stop]))
    rest = 0.0
    for b in range(sum_b.size):
        if b != of:
            rest += sum_b[b]
    for k in range(of * WIDTH, stop):
        if k != top:
            rest += p_K[k]
    return rest, top


@compiled()
def _large_keys(p_K: Block, top_b: Block, least: float) -> Keys:
    """Return the keys above ``least``, largest first."""
    key_m, m = np.empty(WIDTH, np.int64), 0
    for b in range(top_b.size):
        if top_b[b] <= least:
            continue
        for k in range(b * WIDTH, min((b + 1) * WIDTH, p_K.size)):
            if p_K[k] <= least:
                continue
            at = m
            while at > 0 and p_K[key_m[at - 1]] < p_K[k]:
                key_m[at] = key_m[at - 1]
                at -= 1
            key_m[at] = k
            m += 1
    return key_m[:m]


@compiled()
def _fill_large(
    p_K: Block, side_K: Side, key_m: Keys, sum_b: Sums, gap: float
) -> float:
    """Deal the large keys, largest first, and take them out of their block sums."""
    for k in key_m:
        sum_b[k // WIDTH] -= p_K[k]
        if p_K[k] <= gap:
            side_K[k] = 1
            gap -= p_K[k]
    return gap


@compiled()
def _fill_blocks(
    p_K: Block, side_K: Side, sum_b: Sums, gap: float, least: float
) -> float:
    """Take every block whose keys, the large ones apart, fit as a whole."""
    for b in range(sum_b.size):
        if 0.0 < sum_b[b] <= gap:
            gap -= sum_b[b]
            sum_b[b] = -1.0
            for k in range(b * WIDTH, min((b + 1) * WIDTH, p_K.size)):
                side_K[k] |= p_K[k] <= least
    return gap


@compiled()
def _fill_keys(
    p_K: Block, side_K: Side, sum_b: Sums, gap: float, enough: float
) -> float:
    """Open the first rejected blocks, and take the keys that still fit."""
    opened = 0
    for b in range(sum_b.size):
        if sum_b[b] <= 0.0 or opened == _OPENED:
            continue
        opened += 1
        for k in range(b * WIDTH, min((b + 1) * WIDTH, p_K.size)):
            if p_K[k] > 0.0 and p_K[k] - gap <= enough and not side_K[k]:
                side_K[k] = 1
                gap -= p_K[k]
                if gap <= enough:
                    return gap
    return gap


@compiled()
def _pairs(p_K: Block, side_K: Side, gap: float, enough: float) -> float:
    """Exchange the next key in S for the next one outside, whenever that helps.

    Near-uniform rows need many small corrections of one sign: one walk gives them.
    """
    i, j, K = 0, 0, p_K.size
    while True:
        while i < K and not side_K[i]:
            i += 1
        while j < K and (side_K[j] or p_K[j] == 0.0):
            j += 1
        if i >= K or j >= K:
            return gap
        left = gap - (np.float64(p_K[j]) - p_K[i])
        if abs(left) < abs(gap):
            gap = left
            side_K[i], side_K[j] = 0, 1
            if abs(gap) <= enough:
                return gap
        i += 1
        j += 1


@compiled()
def _swap(p_K: Block, side_K: Side, gap: float, enough: float) -> float:
    """Exchange one key outside S for one inside, if that leaves at most ``enough``."""
    tried = 0
    for j in range(p_K.size):
        if side_K[j] or p_K[j] <= max(gap, 0.0):
            continue
        wanted = p_K[j] - gap
        for i in range(p_K.size):
            if side_K[i] and abs(p_K[i] - wanted) <= enough:
                side_K[i], side_K[j] = 0, 1
                return float(gap - p_K[j] + p_K[i])
        tried += 1
        if tried == _TRIED:
            break
    return gap


@compiled()
def filled(
    p_K: Block, side_K: Side, sum_b: Sums, top_b: Block, half: float, enough: float
) -> float:
    """Write a set S into ``side_K``; return its gap, |gap| ≤ enough when it closed.

    Large keys are dealt one by one, largest first; then whole blocks; then the keys of
    the first blocks that did not fit; then swaps are looked for. Zeros inside a block
    that was taken are marked too.
    """
    side_K[:] = 0
    least = _LARGE * 2 * half
    gap = half
    if top_b.max() > least:
        key_m = _large_keys(p_K, top_b, least)
        gap = _fill_large(p_K, side_K, key_m, sum_b, gap)
    gap = _fill_blocks(p_K, side_K, sum_b, gap, least)
    if gap > enough:
        gap = _fill_keys(p_K, side_K, sum_b, gap, enough)
    if gap > enough:
        gap = _pairs(p_K, side_K, gap, enough)
    if abs(gap) > enough:
        gap = _swap(p_K, side_K, gap, enough)
    return gap


@compiled()
def _summed(p_K: Block, scratch: Scratch) -> tuple[float, np.uint32]:
    """Fill the scratch from one row; return its mass and its largest bit pattern."""
    sum_b, bits_b, _ = scratch
    whole = p_K.size // WIDTH
    cut = whole * WIDTH
    bits_K = p_K.view(np.uint32)
    blocks = p_K[:cut].reshape(whole, WIDTH), bits_K[:cut].reshape(whole, WIDTH)
    block_sums(blocks[0], blocks[1], sum_b, bits_b)
    if cut < p_K.size:
        short = p_K[cut:].reshape(1, -1), bits_K[cut:].reshape(1, -1)
        block_sums(short[0], short[1], sum_b[whole:], bits_b[whole:])
    return sum_b.sum(), bits_b.max()


@compiled()
def level(p_K: Block, side_K: Side, top: float, count: int) -> bool:
    """Return whether ``count`` keys share one value and no other key is visible.

    If so, S becomes the first ⌊count/2⌋ of them.
    """
    seen = 0
    for k in range(p_K.size):
        if p_K[k] != 0.0 and p_K[k] != top:
            return False
        side_K[k] = p_K[k] != 0.0 and 2 * (seen + 1) <= count
        seen += p_K[k] != 0.0
    return seen == count


@compiled()
def first_steps_row(
    p_K: Block, side_K: Side, scratch: Scratch, options: Options
) -> tuple[float, float]:
    """Return θ's interval if the closed form or the fill closes it, else ``OPEN``."""
    enough, off, _ = options
    sum_b, _, top_b = scratch
    total, pattern = _summed(p_K, scratch)
    # Above 2 also means negative, NaN or -0; the careful path tells them apart.
    if pattern > _BITS_OF_TWO or not abs(total - 1.0) <= off:
        return OPEN, OPEN
    if 2.0 * top_b.max() >= total:
        rest, top = outside_top(p_K, sum_b, top_b)
        if p_K[top] >= rest:
            side_K[:] = 0
            side_K[top] = 1
            value = theta(np.float64(p_K[top]), rest)
            return value, value
    keys = round(total / top_b.max())
    if abs(keys * top_b.max() - total) <= _LEVEL * total:
        if level(p_K, side_K, top_b.max(), keys):
            value = theta(np.float64(keys // 2), np.float64(keys - keys // 2))
            return value, value
    gap = filled(p_K, side_K, sum_b, top_b, total / 2, enough * total)
    if abs(gap) <= enough * total:
        return 1.0 - 4.0 * (gap / total) ** 2, 1.0
    return OPEN, OPEN


@compiled()
def first_steps(
    p_NK: NDArray[np.float32],
    side_NK: NDArray[np.uint8],
    bounds_N2: Bounds,
    options: Options,
) -> None:
    """Write bounds and sides of every row; all rows share a single row of sides."""
    blocks = -(-p_NK.shape[1] // WIDTH)
    bits_b = np.empty(blocks, np.uint32)
    scratch = (np.empty(blocks), bits_b, bits_b.view(np.float32))
    for i in range(p_NK.shape[0]):
        side_K = side_NK[min(i, side_NK.shape[0] - 1)]
        low, high = first_steps_row(p_NK[i], side_K, scratch, options)
        bounds_N2[i, 0] = low
        bounds_N2[i, 1] = high
