"""Emadi (2026), §5–§7: what layers do together, and how gains must fall with depth.

Axes, in this file:  N layer · K token · D model width.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev
from torch.nn.functional import layer_norm

from equipoise.numerics.norms import layer_norm_gain
from equipoise.numerics.scaling import deepnorm_original
from equipoise.theory.lipschitz.heads import Heads
from equipoise_lab.claims.emadi_appendix import TwoSublayers, block_norm
from equipoise_lab.claims.result import EMADI, Found, judged
from equipoise_lab.theory.lipschitz.layers import (
    feedforward_bound,
    norm_local,
    pre_norm,
)
from equipoise_lab.theory.lipschitz.published import emadi_local

ROUNDING = 1e-12
EPS = 1e-5
Layer = Callable[[Tensor], Tensor]


def _normal(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def _norm(x_KD: Tensor) -> Tensor:
    return layer_norm(x_KD, x_KD.shape[-1:], eps=EPS)


@EMADI.claim("App. D.1, end-to-end bound", kind="theorem")
def product_of_layer_bounds() -> Found:
    """‖∂X_m/∂X_0‖ of a pre-LN stack in block-∞ norm, beside the product of its bounds.

    Claim: The product of the layers' bounds bounds the sensitivity of the whole
    network.

    Rule: It holds if nothing measured exceeds the product; with a caveat if its slack
    after 8 layers is more than twice that after 2.

    Instead: A valid bound whose slack multiplies: the worse the deeper. Measure the
    transport of one cotangent instead (``gradient.*``).
    """
    rng = torch.Generator().manual_seed(0)
    x = _normal(6, 16, rng=rng)
    whole = torch.eye(x.numel(), dtype=torch.float64)
    log_bound, slack = 0.0, {}
    for depth in range(1, 9):
        for layer, bound in _pair(x, rng):
            whole = _flat(jacrev(layer)(x)) @ whole
            x, log_bound = layer(x), log_bound + math.log(bound)
        low, high = _block_norm(whole, x.shape)
        slack[depth] = log_bound - math.log(low), log_bound - math.log(high)
    least = min(upper for upper, _ in slack.values())
    numbers = {
        "ln of bound ÷ truth, at least": least,
        "ln of bound ÷ truth after 2 layers, at most": slack[2][0],
        "ln of bound ÷ truth after 8 layers, at least": slack[8][1],
    }
    parts = {"nothing exceeds the product": least >= -ROUNDING}
    return judged(parts, numbers, caveat=slack[8][1] > 2 * slack[2][0])


def _pair(x_KD: Tensor, rng: torch.Generator) -> list[tuple[Layer, float]]:
    """Return an attention and a feed-forward layer, each with its local bound."""
    scale = 16**-0.5
    qkv = [scale * _normal(2, 16, 8, rng=rng) for _ in range(3)]
    heads = Heads(
        w_q_HDE=qkv[0],
        w_k_GDE=qkv[1],
        w_v_GDF=qkv[2],
        w_o_HFD=scale * _normal(2, 8, 16, rng=rng),
    )
    w_in, w_out = (scale * _normal(16, 16, rng=rng) for _ in range(2))

    def mixed(stream: Tensor) -> Tensor:
        q, k, v = (torch.einsum("kd,hde->hke", _norm(stream), w) for w in qkv)
        rows = (q @ k.mT / math.sqrt(8)).softmax(-1)
        return stream + torch.einsum("hkf,hfd->kd", rows @ v, heads.w_o_HFD)

    def mapped(stream: Tensor) -> Tensor:
        return stream + (_norm(stream) @ w_in).relu() @ w_out

    ones = torch.ones(16, dtype=torch.float64)
    after = mixed(x_KD)
    gains = [norm_local(layer_norm_gain(s, ones, eps=EPS)) for s in (x_KD, after)]
    first = pre_norm(emadi_local(heads, _norm(x_KD)), norm=gains[0]).value
    net = feedforward_bound(w_in, w_out, activation="relu")
    return [(mixed, first), (mapped, pre_norm(net, norm=gains[1]).value)]


def _flat(J: Tensor) -> Tensor:
    size = J.shape[0] * J.shape[1]
    return J.reshape(size, size)


def _block_norm(J: Tensor, shape: torch.Size) -> tuple[float, float]:
    """Return an attained value of the block-∞ norm, and the sum of block norms."""
    tokens, width = shape
    blocks = J.reshape(tokens, width, tokens, width).transpose(1, 2)
    upper = torch.linalg.matrix_norm(blocks, ord=2).sum(1).max()
    lower = 0.0
    for row in blocks:
        y = torch.ones(width, dtype=torch.float64)
        for _ in range(30):
            z = torch.nn.functional.normalize(row.mT @ y, dim=-1)
            y = torch.einsum("kde,ke->d", row, z)
        lower = max(lower, float(y.norm()))
    return lower, float(upper)


@EMADI.claim("Thm 5.4 (i), (iii)", kind="theorem")
def identity_path() -> Found:
    """‖J_k‖ over C at every layer of a pre-LN stack; the product as the J_k shrink.

    Claim: ‖J_k‖ ≤ L_MHA·Lip(LN) =: C at every layer k; I is a term of the end-to-end
    Jacobian that goes through no J_k.

    Rule: Two parts: no J_k of 12 layers exceeds C, with B̄ = (‖γ‖_∞ + ‖β‖_∞)√d; with
    every J_k times t the product tends to I as t → 0.

    Instead: As stated. What it does not say is ``identity_can_be_cancelled``.
    """
    rng = torch.Generator().manual_seed(0)
    x, ratios, factors = _normal(5, 6, rng=rng), [], []
    for _ in range(12):
        one = TwoSublayers(rng)

        def branch(stream: Tensor, one: TwoSublayers = one) -> Tensor:
            return one.mixed(one.norm(stream))

        J = jacrev(branch)(x)
        ratios.append(block_norm(J) / (one.attention(one.radius) * one.gain))
        factors.append(_flat(J))
        x = x + branch(x)
    eye = torch.eye(x.numel(), dtype=torch.float64)
    left = {}
    for t in (1e-3, 1e-6):
        whole = eye
        for factor in factors:
            whole = (eye + t * factor) @ whole
        left[t] = float(torch.linalg.matrix_norm(whole - eye, 2))
    parts = {
        "every ‖J_k‖ ≤ C": max(ratios) <= 1 + ROUNDING,
        "I remains as J → 0": left[1e-6] < 2e-3 * left[1e-3],
    }
    numbers = {
        "largest ‖J_k‖ ÷ C": max(ratios),
        "‖product − I‖ at t = 1e-3": left[1e-3],
        "at t = 1e-6": left[1e-6],
    }
    return judged(parts, numbers)


@EMADI.claim("ours, on Thm 5.4 (iii): what the identity guarantees", kind="theorem")
def identity_can_be_cancelled() -> Found:
    """What is left of a gradient behind one layer x + LN(x)·W_V·W_O, W_V W_O = −σI.

    Claim: Because I is a term of it, the Jacobian of a pre-LN layer keeps every
    gradient: at least a tenth of its length.

    Rule: One direction that is lost refutes it; what stands in its place is checked on
    50 stacks of 8 random layers.

    Instead: I + J_k loses what J_k maps to its negative: here all but two directions.
    While every ‖J_k‖ < 1, a product keeps Π(1 − ‖J_k‖) of any gradient at least.
    """
    x = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    v = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64) / 2
    J = jacrev(lambda row: row - layer_norm(row, (4,), eps=1e-300))(x)
    rng, room = torch.Generator().manual_seed(0), math.inf
    for _ in range(50):
        maps = 0.1 * _normal(8, 6, 6, rng=rng)
        whole, least = torch.eye(6, dtype=torch.float64), 1.0
        for one in maps:
            whole = whole + one @ whole
            least *= 1 - float(torch.linalg.matrix_norm(one, 2))
        room = min(room, float(torch.linalg.svdvals(whole)[-1]) / least)
    kept = float((v @ J).norm())
    return judged(
        {"a tenth is kept": kept >= 0.1},
        {"kept of one gradient": kept, "least σ_min ÷ Π(1 − ‖J_k‖)": room},
        instead=room >= 1,
    )


@EMADI.claim("Thm 6.1, the value path", kind="theorem")
def value_path_has_two_maps() -> Found:
    """A pre-LN stack whose W_V W_O is aligned: its Jacobian is exactly (1 + β²)^N.

    Claim: With four projections of norm N^(−1/4) the sensitivity of N layers is O(1).

    Instead: Only of the path through the scores, which multiplies all four. The value
    path multiplies two, so W_V and W_O need β = N^(−1/2).

    Practice: Where gains must fall with depth, scale W_V and W_O, as DeepNorm does.
    """
    evidence, found = {}, {}
    for maps, depth in ((4, 16), (4, 64), (2, 16), (2, 64)):
        gain = depth ** (-1 / maps)
        found[maps, depth] = _aligned(gain, gain, depth)
        name = f"‖∂X_N/∂X_0‖ at N = {depth}, β = N^(−1/{maps})"
        evidence[name] = found[maps, depth]
    parts = {"O(1) at N^(−1/4)": found[4, 64] <= 10 * found[4, 16]}
    bounded = max(found[2, 16], found[2, 64]) <= math.e + ROUNDING
    return judged(parts, evidence, instead=bounded)


def _aligned(value: float, output: float, depth: int) -> float:
    """Return the end-to-end norm of N layers x + LN(x)·W_V·W_O along one direction.

    One token attends to itself alone, so the scores play no part. The direction is
    orthogonal to x and to 1: the forward pass does not see it, the Jacobian does.
    """
    x = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64) / math.sqrt(2)
    x = x / x.std(correction=0)
    both = (value * torch.outer(u, u)) @ (output * torch.outer(u, u))

    def stack(stream: Tensor) -> Tensor:
        for _ in range(depth):
            stream = stream + layer_norm(stream, (4,), eps=1e-300) @ both
        return stream

    return float(torch.linalg.matrix_norm(jacrev(stack)(x), 2))


@EMADI.claim("Thms 6.1 and 6.2, asymmetric scaling", kind="theorem")
def asymmetric_gains() -> Found:
    """One product 1/N, split over the four projections in three ways, 32 layers.

    Claim: With unequal norms the condition for bounded end-to-end sensitivity is that
    the product ‖W_O‖‖W_Q‖‖W_K‖‖W_V‖ is O(1/N).

    Rule: Two parts: the theorem's own product Π(1 + S), S = 1/N, stays below e; so does
    the Jacobian of a network, however the product is split.

    Instead: The product Π(1 + S) is as stated. A network's Jacobian reaches e where W_V
    and W_O carry the 1/N; put on W_Q and W_K alone, the value path grows like 2^N.
    """
    depth = 32
    splits = {
        "W_V and W_O": (depth**-0.5, depth**-0.5),
        "all four": (depth**-0.25, depth**-0.25),
        "W_Q and W_K": (1.0, 1.0),
    }
    found = {name: _aligned(*gains, depth) for name, gains in splits.items()}
    product = (1 + 1 / depth) ** depth
    parts = {
        "of the product Π(1 + S)": product <= math.e,
        "of a network, however split": max(found.values()) <= math.e,
    }
    named = {f"‖∂X_N/∂X_0‖ with 1/N on {n}": value for n, value in found.items()}
    return judged(parts, {"Π(1 + S)": product, **named})


@EMADI.claim("§6, DeepNorm from the quartic path", kind="heuristic")
def deepnorm_is_not_the_quartic_path() -> Found:
    """DeepNorm's own gains, put into the condition they are said to come from.

    Claim: DeepNorm's N^(−1/4) follows from four projections with a product of O(1/N).

    Instead: DeepNorm leaves W_Q and W_K alone: its product falls like N^(−3/4). What
    its gains keep constant is 2N·(v² + w²)/a², the size of an update (Wang et al.).
    """
    depths = (8, 512)
    product, update = [], []
    for depth in depths:
        made = deepnorm_original(depth)
        product.append(depth * made.gain**2 / made.skip)
        update.append(2 * depth * 2 * made.gain**2 / made.skip**2)
    span = math.log(depths[1] / depths[0])
    exponent = math.log(product[1] / product[0]) / span
    constant = abs(update[1] / update[0] - 1) < ROUNDING
    numbers = {
        "exponent over N of N·product": exponent,
        "2N(v² + w²)/a² at N = 8": update[0],
        "2N(v² + w²)/a² at N = 512": update[1],
    }
    parts = {"the product is O(1/N)": abs(exponent) < 0.05}
    return judged(parts, numbers, instead=constant)


@EMADI.claim("Table 1 against the text, 61.15 and 60.6", kind="experiment")
def two_losses_of_post_norm() -> Found:
    """Whether 60.6 can be one of three seeds with mean 61.15 and deviation 0.45.

    Of three numbers with mean m the least is at most √2·s (dividing by 3) or 2s/√3
    (by 2) below m; printed digits widen both.

    Claim: The post-LN model ends at 61.15 ± 0.45 in the table and 60.6 in the text.

    Instead: Two numbers for one thing: 60.6 can be the best seed only if the other two
    are nearly equal. Quote 61.15.
    """
    mean, spread, other, seeds = 61.15 - 0.005, 0.45 + 0.005, 60.6 + 0.05, 3
    population = mean - spread * math.sqrt(seeds - 1)
    sample = mean - spread * (seeds - 1) / math.sqrt(seeds)
    numbers = {
        "lowest seed possible, deviation over 3": population,
        "lowest seed possible, deviation over 2": sample,
        "the text's number, at most": other,
        "the table's mean, at least": mean,
    }
    parts = {"both can be true": min(population, sample) <= other}
    return judged(parts, numbers, caveat=abs(mean - other) >= 0.1)
