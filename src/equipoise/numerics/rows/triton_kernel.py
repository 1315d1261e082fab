"""The kernel of ``triton_rows``: statistics of attention rows from queries and keys.

Tensors, in this file:  rows of the block × keys of the tile, or × deals.

No score leaves the chip. Three passes over tiles of keys: the two largest scores of
each lane of the tile, so of each group of keys; exponentials and sums; and how many
tiles of small keys come nearest to half of the mass. θ is found as ``torch_rows`` finds
it: the ten largest keys are dealt in all 2⁹ ways, and smaller keys complete each deal:
any of the six next ones, or a run of those that come after them, one of each lane. All
are on the chip already, and of a peaked row they hold what the dealt keys leave. Every
mask by position is a range of keys for each row: causal, window, padding and the
documents of a pack.
"""

import triton
import triton.language as tl

# A score that is no higher under an additive mask is hidden, as everywhere.
MASKED = tl.constexpr(-9e3)
_UNIT = tl.constexpr(2.0**-24)
_LOG2E = tl.constexpr(1.4426950408889634)
# What float32 leaves of it.
_LOG2E_LOW = tl.constexpr(1.4426950408889634 - 1.44269502162933349609375)
_LN2 = tl.constexpr(0.6931471805599453)
# Below it exp is 0 in float32: no infinity enters a product.
_FLOOR = tl.constexpr(-104.0)
_NONE = tl.constexpr(float("-inf"))


@triton.jit
def _tanh(x):
    """Return tanh, by its series where 1 - 2/(e²ˣ+1) would cancel."""
    y = x * x
    series = 0.13333333333333333 + y * (-0.05396825396825397 + y * 0.021869488536155203)
    series = 1.0 + y * (-0.3333333333333333 + y * series)
    return tl.where(tl.abs(x) < 0.25, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def _exp(z, shift):
    """Return exp(z - shift); the rounding of the product with log₂e is made good."""
    d = tl.maximum(z - shift, _FLOOR)
    y = d * _LOG2E
    lost = tl.fma(d, tl.full(d.shape, _LOG2E, tl.float32), -y) + d * _LOG2E_LOW
    return tl.where(z > _NONE, tl.exp2(y) * (1.0 + lost * _LN2), 0.0)


@triton.jit
def _scores(
    tile, rows, keys, BK: tl.constexpr, MASK: tl.constexpr, CAPPED: tl.constexpr
):
    """Return the scores of one tile, hidden keys at -inf."""
    q, mask_at, lo, hi, diagonal = rows
    k_at, width, slope, cap, scale, K, D, k_key, k_width, m_key = keys
    key = tile * BK + tl.arange(0, BK)
    k = tl.load(
        k_at + key[None, :].to(tl.int64) * k_key + width[:, None] * k_width,
        mask=(key[None, :] < K) & (width[:, None] < D),
        other=0.0,
    )
    z = tl.dot(q, k.to(q.dtype), input_precision="ieee").to(tl.float32) * scale
    if CAPPED:
        z = cap * _tanh(z / cap)
    z -= slope * tl.abs(key[None, :] - diagonal[:, None]).to(tl.float32)
    seen = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
    if MASK > 0:
        at = mask_at[:, None] + key[None, :].to(tl.int64) * m_key
        given = tl.load(at, mask=seen, other=0)
        if MASK == 1:
            seen = seen & (given != 0)
        else:
            z += given.to(tl.float32)
            seen = seen & ~(z <= MASKED)
    return tl.where(seen, z, _NONE)


@triton.jit
def _largest(
    tiles, rows, keys, BQ: tl.constexpr, BK: tl.constexpr, MASK: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """First pass: the two largest scores of each lane and their tiles; and counts."""
    best = tl.full([BQ, BK], _NONE, tl.float32)
    second = tl.full([BQ, BK], _NONE, tl.float32)
    where = tl.full([BQ, BK], -1, tl.int32)
    where_second = tl.full([BQ, BK], -1, tl.int32)
    squares = tl.zeros([BQ, BK], tl.float32)
    seen = tl.zeros([BQ, BK], tl.int32)
    unread = tl.zeros([BQ, BK], tl.int32)
    for tile in range(tiles[0], tiles[1]):
        z = _scores(tile, rows, keys, BK, MASK, CAPPED)
        shown = z != _NONE
        seen += shown.to(tl.int32)
        squares += tl.where(shown, z * z, 0.0)
        # Bit 0: NaN, which a maximum may pass by; bit 1: +inf.
        unread = unread | (z != z).to(tl.int32) | ((z == float("inf")).to(tl.int32) * 2)
        later = tl.where(z > second, tile, where_second)
        where_second = tl.where(z > best, where, later)
        second = tl.where(z > best, best, tl.maximum(second, z))
        where = tl.where(z > best, tile, where)
        best = tl.maximum(best, z)
    visible, squares = tl.sum(seen, 1), tl.sum(squares, 1)
    no_number, broken = tl.max(unread & 1, 1) > 0, tl.max(unread, 1) > 0
    return best, second, where, where_second, visible, squares, no_number, broken


@triton.jit
def _next(left, after, shift):
    """Take the largest key that is left; return its mass, and what is left then."""
    lane = tl.arange(0, left.shape[1])
    value, at = tl.max(left, 1), tl.argmax(left, 1)
    here = lane[None, :] == at[:, None]
    found = here & (value > _NONE)[:, None]
    mass = _exp(value, shift)
    return mass, found, tl.where(here, after, left), tl.where(here, _NONE, after)


@triton.jit
def _dealt(
    best, second, shift, BQ: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr,
    DEALS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Return the sums of all subsets of the dealt keys but the first, those of the
    next few keys, and of each lane how many keys these are and the mass of the next.

    With them the mass of the dealt keys but the first, and that of the next few.
    """
    deal, lane = tl.arange(0, DEALS), tl.arange(0, BK)
    sums = tl.zeros([BQ, DEALS], tl.float32)
    few = tl.zeros([BQ, BK], tl.float32)
    count = tl.zeros([BQ, BK], tl.int32)
    others = tl.zeros([BQ], tl.float64)
    few_mass = tl.zeros([BQ], tl.float64)
    left, after = best, second
    for i in tl.static_range(BITS + 1 + FEW):
        mass, found, left, after = _next(left, after, shift)
        count += found.to(tl.int32)
        if i > BITS:
            few_mass += mass.to(tl.float64)
            few += mass[:, None] * ((lane[None, :] >> (i - BITS - 1)) & 1).to(
                tl.float32
            )
        elif i > 0:
            others += mass.to(tl.float64)
            sums += mass[:, None] * ((deal[None, :] >> (i - 1)) & 1).to(tl.float32)
    return sums, few, count, _exp(left, shift[:, None]), others, few_mass


@triton.jit
def _taken(deal, best, second, shift, BITS: tl.constexpr):
    """Return the mass of one deal, summed in float64."""
    taken = 0.0 * shift.to(tl.float64)
    left, after = best, second
    for i in tl.static_range(BITS + 1):
        mass, _, left, after = _next(left, after, shift)
        if i > 0:
            taken += tl.where((deal >> (i - 1)) & 1 == 1, mass, 0.0).to(tl.float64)
    return taken


@triton.jit
def _small(e, tile, where, where_second, count):
    """Return the masses of the keys that are not on the chip, dealt or next."""
    return tl.where((where == tile) | ((where_second == tile) & (count > 0)), 0.0, e)


@triton.jit
def _summed(
    tiles, rows, keys, largest, first_key, BQ: tl.constexpr, BK: tl.constexpr,
    MASK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Second pass: sums of exponentials; that of small keys keeps what rounding loses.

    Returns their mass, Σ e·d, Σ e² and the mass of the first key.
    """
    shift, where, where_second, count = largest
    lane = tl.arange(0, BK)
    rest = tl.zeros([BQ, BK], tl.float32)
    lost = tl.zeros([BQ, BK], tl.float32)
    moment = tl.zeros([BQ, BK], tl.float32)
    masses = tl.zeros([BQ, BK], tl.float32)
    sink = tl.zeros([BQ, BK], tl.float32)
    for tile in range(tiles[0], tiles[1]):
        z = _scores(tile, rows, keys, BK, MASK, CAPPED)
        e = _exp(z, shift[:, None])
        moment += e * tl.maximum(z - shift[:, None], _FLOOR)
        masses += e * e
        sink += tl.where((tile * BK + lane)[None, :] == first_key[:, None], e, 0.0)
        small = _small(e, tile, where, where_second, count) - lost
        total = rest + small
        lost = (total - rest) - small
        rest = total
    mass = tl.sum(rest.to(tl.float64) - lost.to(tl.float64), 1)
    return mass, tl.sum(moment.to(tl.float64), 1), tl.sum(masses, 1), tl.sum(sink, 1)


@triton.jit
def _before(
    tiles, rows, keys, largest, aim, wanted, BQ: tl.constexpr, BK: tl.constexpr,
    MASK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Third pass: the mass of the first tiles' small keys that is nearest to ``aim``.

    Once no row waits, no tile is read.
    """
    shift, where, where_second, count = largest
    passed = tl.zeros([BQ], tl.float64)
    before = tl.zeros([BQ], tl.float64)
    for tile in range(tiles[0], tiles[1]):
        waiting = (passed < aim) & wanted
        if tl.max(waiting.to(tl.int32)) > 0:
            z = _scores(tile, rows, keys, BK, MASK, CAPPED)
            small = _exp(z, shift[:, None])
            small = _small(small, tile, where, where_second, count)
            passed += tl.sum(small.to(tl.float64), 1)
            nearer = tl.abs(passed - aim) < tl.abs(before - aim)
            before = tl.where(waiting & nearer, passed, before)
    return before


@triton.jit
def _nearest(goal, run, few, BK: tl.constexpr):
    """Return how near smaller keys bring the best deal to its goal.

    They are a run of keys from the first on, some of a few, or those and all others.
    """
    lane = tl.arange(0, BK)
    whole = tl.max(run, 1)
    gap = tl.abs(goal)
    for key in range(BK):
        upto = tl.sum(tl.where(lane[None, :] == key, run, 0.0), 1)
        some = tl.sum(tl.where(lane[None, :] == key, few, 0.0), 1)
        gap = tl.minimum(gap, tl.abs(goal - upto[:, None]))
        gap = tl.minimum(gap, tl.abs(goal - some[:, None]))
        gap = tl.minimum(gap, tl.abs(goal - (some + whole)[:, None]))
    return tl.min(gap, 1)


@triton.jit
def _interval(inside, outside, proven, gap, mean, visible):
    """Return θ's bounds, rounding included; see ``torch_rows.bounds``.

    In float32 a deal cannot be told from one that is nearer by 16 units of the mass.
    """
    whole = inside + outside
    value = 4.0 * (inside / whole) * (outside / whole)
    away = tl.abs(inside - outside) / (2.0 * whole)
    near = 4.0 * tl.minimum(inside, outside) > whole
    value = tl.where(near, 1.0 - 4.0 * away * away, value)
    margin = 8.0 * _UNIT * away * (mean + 6.0 * value)
    reached = gap.to(tl.float64) / whole + _UNIT * (mean + 48.0)
    lower = tl.where(proven, value - margin, 1.0 - 4.0 * reached * reached)
    upper = tl.where(proven, value + margin + 128.0 * _UNIT * away, 1.0)
    # Of S and the rest, one has at most half of the keys, none above the largest.
    short = 0.5 - (visible // 2).to(tl.float64) / whole * (1.0 + 16.0 * _UNIT)
    short = tl.maximum(short, 0.0)
    upper = tl.minimum(upper, 1.0 - 4.0 * short * short)
    lower = tl.maximum(lower * (1.0 - 2.0 * _UNIT), 0.0)
    return lower, tl.minimum(tl.maximum(upper * (1.0 + 2.0 * _UNIT), lower), 1.0)


@triton.jit
def _read(
    at, o_column, real, tiles, rows, keys, first_key, lanes, top, facts,
    BQ: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, DEALS: tl.constexpr,
    FEW: tl.constexpr, MASK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write all columns but the largest score and the number of keys."""
    best, second, where, where_second = lanes
    visible, squares, broken = facts
    bad = float("nan")
    shift = tl.where(top > _NONE, top, 0.0)
    sums, few, count, middle, others, few_mass = _dealt(
        best, second, shift, BQ, BK, BITS, DEALS, FEW
    )
    largest = (shift, where, where_second, count)
    rest, moment, masses, sink = _summed(
        tiles, rows, keys, largest, first_key, BQ, BK, MASK, CAPPED
    )
    near = few_mass + tl.sum(middle.to(tl.float64), 1)
    small = rest + near
    whole = 1.0 + others + small
    # The deal that leaves half of the small keys to be taken.
    centre = (0.5 * (whole - small) - 1.0).to(tl.float32)
    deal = tl.argmin(tl.abs(sums - centre[:, None]), 1)
    taken = _taken(deal, best, second, shift, BITS)
    missing = 0.5 * whole - 1.0 - taken
    over = missing <= 0.0
    proven = over | (missing >= small)
    wanted = real & ~proven & ~broken
    aim = missing - 0.5 * near
    before = _before(tiles, rows, keys, largest, aim, wanted, BQ, BK, MASK, CAPPED)
    run = tl.cumsum(middle, 1)
    goal = (0.5 * whole - 1.0 - before).to(tl.float32)[:, None] - sums
    mean = -moment / whole
    lower, upper = _interval(
        1.0 + taken + tl.where(over, 0.0, small),
        (others - taken) + tl.where(over, small, 0.0),
        proven, _nearest(goal, run, few, BK), mean, visible,
    )  # fmt: skip
    mass = whole.to(tl.float32)
    p_max = (1.0 / whole).to(tl.float32)
    entropy = tl.maximum(tl.log(mass) + mean.to(tl.float32), 0.0)
    # Rows without keys read 0, rows with a NaN or +inf read NaN.
    known = tl.where(broken, bad, tl.where(visible > 0, 1.0, 0.0))
    tl.store(at, lower.to(tl.float32) * known, mask=real)
    tl.store(at + o_column, upper.to(tl.float32) * known, mask=real)
    tl.store(at + 3 * o_column, entropy * known, mask=real)
    tl.store(at + 4 * o_column, sink * p_max * known, mask=real)
    tl.store(at + 5 * o_column, p_max * known, mask=real)
    tl.store(at + 6 * o_column, tl.where(broken, bad, squares), mask=real)
    tl.store(at + 7 * o_column, masses * p_max * p_max * known, mask=real)
    tl.store(at + 9 * o_column, tl.where(broken, bad, top + tl.log(mass)), mask=real)


@triton.jit
def attention_rows(
    q_at, k_at, mask_at, slopes_at, sees_at, chosen_at, out_at,
    scale, cap, H, group, n, K, D,
    q_batch, q_head, q_row, q_width, k_batch, k_head, k_key, k_width,
    m_batch, m_head, m_row, m_key, a_batch, a_head, s_part, s_batch, s_row, o_column,
    BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BITS: tl.constexpr,
    DEALS: tl.constexpr, FEW: tl.constexpr, MASK: tl.constexpr, CAPPED: tl.constexpr,
    ALIBI: tl.constexpr, CHOSEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the statistics of some rows of one head of one sequence."""
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    place = tl.program_id(0) * BQ + tl.arange(0, BQ)
    real = place < n
    row = place.to(tl.int64)
    if CHOSEN:
        row = tl.load(chosen_at + place, mask=real, other=0).to(tl.int64)
    sees = sees_at + batch * s_batch + row * s_row
    lo = tl.load(sees, mask=real, other=0)
    hi = tl.load(sees + s_part, mask=real, other=0)
    diagonal = tl.load(sees + 2 * s_part, mask=real, other=0)
    first_key = tl.load(sees + 3 * s_part, mask=real, other=0)
    width = tl.arange(0, BD)
    q_rows = q_at + batch * q_batch + head * q_head + row * q_row
    inside = real[:, None] & (width[None, :] < D)
    q = tl.load(q_rows[:, None] + width[None, :] * q_width, mask=inside, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_at + batch * a_batch + head * a_head).to(tl.float32)
    rows = (
        q,
        mask_at + batch * m_batch + head * m_head + row * m_row,
        lo,
        hi,
        diagonal,
    )
    k_head_at = k_at + batch * k_batch + (head // group) * k_head
    keys = (k_head_at, width, slope, cap, scale, K, D, k_key, k_width, m_key)
    sees_some = hi > lo
    begin = tl.min(tl.where(sees_some, lo, K)) // BK
    end = (tl.max(tl.where(sees_some, hi, 0)) + BK - 1) // BK
    tiles = (begin, end)
    at = out_at + tl.program_id(1).to(tl.int64) * n + place
    best, second, where, where_second, visible, squares, no_number, broken = _largest(
        tiles, rows, keys, BQ, BK, MASK, CAPPED
    )
    top = tl.max(best, 1)
    logit = tl.where(no_number, float("nan"), top)
    tl.store(at + 2 * o_column, logit, mask=real)
    tl.store(at + 8 * o_column, visible.to(tl.float32), mask=real)
    lanes = (best, second, where, where_second)
    facts = (visible, squares, broken)
    _read(at, o_column, real, tiles, rows, keys, first_key, lanes, top, facts,
          BQ, BK, BITS, DEALS, FEW, MASK, CAPPED)  # fmt: skip
