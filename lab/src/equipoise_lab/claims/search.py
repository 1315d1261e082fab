"""Adversarial search for everything that says ≤.

A claim's two sides as one ratio of a point's numbers, at most 1 if the claim is true.
Points are drawn at seven scales, and with a scale for each number; then they are
climbed: along the gradient, by turning signs and by exchanging numbers. Drawn and
climbed ones are evaluated in float32, bfloat16 and float16 too. The ratios are written
from the statements, beside the code that the checks call. Names are those of the
checks; what is refuted needs no search.

Axes, in this file:  B point · K token or key · D width.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, jvp, vmap

Scalar = Any
"""A tensor of one number: what torch's operators return has no type of its own."""
Ratio = Callable[[Tensor], Scalar]
"""One point's numbers → this ÷ what it is at most."""
SCALES = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e8)
MIXED = 5
"""Half of the points have a scale for each number, up to so many powers of ten."""
ROOM = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 16 * 2**-8,
    torch.float16: 64 * 2**-11,
}
"""Rounding in a ratio near 1: of a few hundred operations, in the narrow formats of a
few dozen; float16's small numbers are rounded more coarsely (1.011 was seen)."""
FORMATS = {f"in {str(t).removeprefix('torch.')}": t for t in list(ROOM)[1:]}
WIDE = (torch.float32,)
"""Where what is compared is a difference of nearly equal numbers, or below the smallest
number of float16, a narrow format shows its rounding and nothing of the inequality."""
EPS = 1e-5


@dataclass(frozen=True)
class Inequality:
    """A ratio, and how many numbers its point has."""

    ratio: Ratio
    size: int
    formats: tuple[torch.dtype, ...] = tuple(FORMATS.values())
    """In which the two sides can be compared."""

    def largest(self, *, rounds: int = 1) -> dict[str, float]:
        """Return the largest ratio that each way of searching found."""
        rng = torch.Generator().manual_seed(0)
        scale_B1 = torch.tensor(SCALES, dtype=torch.float64).repeat(4 * rounds)[:, None]
        drawn = torch.randn(2, len(scale_B1), self.size, generator=rng).double()
        powers = MIXED * (2 * torch.rand(drawn[1].shape, generator=rng).double() - 1)
        start = torch.cat([scale_B1 * drawn[0], 10**powers * drawn[1]])
        alike = len(scale_B1)
        found, x = {"drawn": _most(self._all(start))}, start
        x = self._ascended(x, 12 * rounds)
        found["by gradient"] = _most(self._all(x))
        for name, moved in (("by signs", _turned), ("by exchange", _exchanged)):
            x = self._climbed(x, moved, 12 * rounds, rng)
            found[name] = _most(self._all(x))
        found["at mixed scales"] = _most(self._all(x[alike:]))
        # In narrow formats squares of mixed sizes leave the range, not the bound.
        points = torch.cat([start[:alike], x[:alike]])
        for name, dtype in FORMATS.items():
            if dtype in self.formats:
                found[name] = _most(self._all(points.to(dtype)))
        return found

    def _all(self, x: Tensor) -> Tensor:
        ratios: Tensor = vmap(self.ratio)(x)
        return ratios

    def _ascended(self, x: Tensor, steps: int) -> Tensor:
        """Follow the gradient of each ratio, by steps in proportion to the point."""
        for step in range(steps):
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self._all(y).nan_to_num().sum(), y)
            length = slope.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            rate = 0.3 * 0.9**step * x.norm(dim=-1, keepdim=True)
            tried = x + rate * slope.nan_to_num() / length
            x = self._better(x, tried)
        return x

    def _climbed(
        self,
        x: Tensor,
        moved: Callable[[Tensor, torch.Generator], Tensor],
        steps: int,
        rng: torch.Generator,
    ) -> Tensor:
        for _ in range(steps):
            x = self._better(x, moved(x, rng))
        return x

    def _better(self, x: Tensor, tried: Tensor) -> Tensor:
        with torch.no_grad():
            gained = self._all(tried) > self._all(x)
        return torch.where(gained[:, None], tried, x)


def _most(ratio_B: Tensor) -> float:
    known = ratio_B[ratio_B.isfinite()]
    return float(known.max()) if len(known) else math.nan


def _turned(x: Tensor, rng: torch.Generator) -> Tensor:
    chosen = torch.rand(x.shape, generator=rng) < 2 / x.shape[-1]
    return torch.where(chosen, -x, x)


def _exchanged(x: Tensor, rng: torch.Generator) -> Tensor:
    i, j = torch.randint(x.shape[-1], (2,), generator=rng).tolist()
    tried = x.clone()
    tried[:, [i, j]] = x[:, [j, i]]
    return tried


INEQUALITIES: dict[str, Inequality] = {}
"""Claim → what to search."""


def violated(found: dict[str, float]) -> bool:
    """Return whether some way of searching got past 1 by more than rounding."""
    room = {name: ROOM[torch.float64] for name in found}
    room |= {name: ROOM[dtype] for name, dtype in FORMATS.items()}
    return any(value > 1 + room[name] for name, value in found.items())


def inequality(
    claim: str, size: int, *formats: torch.dtype
) -> Callable[[Ratio], Ratio]:
    """Return a decorator that registers the ratio of a claim; all formats if none."""

    def decorated(ratio: Ratio) -> Ratio:
        known = formats or tuple(FORMATS.values())
        INEQUALITIES[claim] = Inequality(ratio, size, known)
        return ratio

    return decorated


def _parts(x: Tensor, *shapes: tuple[int, ...]) -> Iterator[Tensor]:
    start = 0
    for shape in shapes:
        size = math.prod(shape)
        yield x[start : start + size].reshape(shape)
        start += size


def _two(a: Tensor) -> Scalar:
    """Return ‖a‖₂, of narrow formats in float32: there is no SVD in them."""
    wide = a.float() if a.dtype in (torch.bfloat16, torch.float16) else a
    finite = wide.isfinite().all()
    norm = torch.linalg.matrix_norm(torch.where(finite, wide, 0.0), ord=2)
    return torch.where(finite, norm, math.nan)


def _longest(x_KD: Tensor) -> Scalar:
    return x_KD.norm(dim=-1).amax()


def _norm(x: Tensor, eps: float = EPS) -> Scalar:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def _deviation(x: Tensor) -> Scalar:
    return (x.var(-1, correction=0) + EPS).sqrt()


@inequality("emadi2026.mixing_does_not_expand", 48)
def mixing(x: Tensor) -> Scalar:
    tokens, scores = _parts(x, (4, 8), (4, 4))
    return _longest(scores.softmax(-1) @ tokens) / _longest(tokens)


@inequality("emadi2026.frobenius_grows_with_length", 24)
def frobenius(x: Tensor) -> Scalar:
    tokens, scores = _parts(x, (4, 2), (4, 4))
    return (scores.softmax(-1) @ tokens).norm() / (2 * tokens.norm())


@inequality("emadi2026.spectral_bound_is_half", 5)
def softmax_jacobian(x: Tensor) -> Scalar:
    """2‖J‖₂ of a row at τ = 1."""
    return 2 * _two(jacrev(lambda z: z.softmax(-1))(x))


@inequality("emadi2026.only_near_one_hot_rows_are_insensitive", 5, *WIDE)
def majority(x: Tensor) -> Scalar:
    """8/9 over θ of a row whose largest weight is at most ½."""
    p = x.softmax(-1)
    at = p.argmax()
    rest = p * (torch.arange(5) != at)
    halved = 0.5 * rest / rest.sum() + 0.5 * (torch.arange(5) == at)
    row = torch.where(p.amax() > 0.5, halved, p)
    subsets = torch.tensor(list(product((0.0, 1.0), repeat=5)), dtype=x.dtype)
    mass = subsets @ row
    return 8 / 9 / (4 * mass * (1 - mass)).amax()


@inequality("emadi2026.norm_resets_magnitude", 18, torch.float32, torch.bfloat16)
def magnitude(x: Tensor) -> Scalar:
    row, gamma, beta = _parts(x, (6,), (6,), (6,))
    rms = (_norm(row) * gamma + beta).square().mean().sqrt()
    return rms / (gamma.abs().amax() + beta.abs().amax())


@inequality("emadi2026.norm_constant_is_true_and_empty", 6)
def norm_constant(x: Tensor) -> Scalar:
    return _two(jacrev(_norm)(x)) * math.sqrt(EPS)


@inequality("emadi2026.attention_bound_is_loose", 3 * 4 * 2 + 4 * 16)
def attention(x: Tensor) -> Scalar:
    """Thm 5.1 of one head on three tokens, along one direction."""
    tokens, push, *weights = _parts(x, (3, 4), (3, 4), *[(4, 4)] * 4)
    q, k, v, o = weights

    def rows(u: Tensor) -> Scalar:
        return (u @ q @ (u @ k).mT / 2).softmax(-1)

    moved = jvp(lambda u: rows(u) @ u @ v @ o, (tokens,), (push,))[1]
    p = rows(tokens)
    theta = (4 * p * (1 - p)).amax()  # of three keys, one is alone on its side
    phi = _longest(tokens) ** 2 * _two(q) * _two(k) * _two(v)
    bound = _two(o) * (_two(v) + theta * phi)
    return _longest(moved) / (_longest(push) * bound)


@inequality("emadi2026.identity_path", 4 * 5 + 4 * 25)
def sublayer(x: Tensor) -> Scalar:
    """‖J_k‖ of two tokens over C = L_MHA·Lip(LN), along one direction; γ = 1, ε = 1."""
    tokens, push, *weights = _parts(x, (2, 5), (2, 5), *[(5, 5)] * 4)
    q, k, v, o = weights

    def mixed(stream: Tensor) -> Scalar:
        u = _norm(stream, 1.0)
        return ((u @ q) @ (u @ k).mT / 5**0.5).softmax(-1) @ u @ v @ o

    moved = jvp(mixed, (tokens,), (push,))[1]
    c = _two(o) * _two(v) * (1 + 2 * 5 / 5**0.5 * _two(q) * _two(k))
    return _longest(moved) / (_longest(push) * c)


def _branch(row: Tensor, first: Tensor, second: Tensor) -> Scalar:
    return (row @ first).relu() @ second


@inequality("emadi2026.activation_constant", 2 * 5 + 2 * 25)
def feedforward(x: Tensor) -> Scalar:
    row, push, first, second = _parts(x, (5,), (5,), (5, 5), (5, 5))
    moved = jvp(lambda r: _branch(r, first, second), (row,), (push,))[1]
    return moved.norm() / (push.norm() * _two(first) * _two(second))


@inequality("emadi2026.residual_forms", 2 * 5 + 2 * 25)
def residual(x: Tensor) -> Scalar:
    """The larger of the pre-LN and the post-LN ratio, along one direction."""
    row, push, first, second = _parts(x, (5,), (5,), (5, 5), (5, 5))
    pre = jvp(lambda r: r + _branch(_norm(r), first, second), (row,), (push,))[1]
    post = jvp(lambda r: _norm(r + _branch(r, first, second)), (row,), (push,))[1]
    net = _two(first) * _two(second)
    inner = row + _branch(row, first, second)
    bounds = 1 + net / _deviation(row), (1 + net) / _deviation(inner)
    ratios = pre.norm() / bounds[0], post.norm() / bounds[1]
    return torch.stack(ratios).amax() / push.norm()


@inequality("emadi2026.product_of_layer_bounds", 2 * 5 + 4 * 25)
def two_layers(x: Tensor) -> Scalar:
    row, push, *w = _parts(x, (5,), (5,), *[(5, 5)] * 4)

    def layer(r: Tensor, n: int) -> Scalar:
        return r + _branch(_norm(r), w[n], w[n + 1])

    moved = jvp(lambda r: layer(layer(r, 0), 2), (row,), (push,))[1]
    bound = 1 + _two(w[0]) * _two(w[1]) / _deviation(row)
    bound = bound * (1 + _two(w[2]) * _two(w[3]) / _deviation(layer(row, 0)))
    return moved.norm() / (push.norm() * bound)


@inequality("mudarisov2025.lemma_2", 5)
def weights_of_any_function(x: Tensor) -> Scalar:
    """‖J‖ ≤ ½·max|F'/F| for F = 1 + l²."""
    J = jacrev(lambda z: (1 + z * z) / (1 + z * z).sum())(x)
    return 2 * _two(J) / (2 * x / (1 + x * x)).abs().amax()


@inequality("mudarisov2025.theorem_1", 6 + 18)
def distance(x: Tensor) -> Scalar:
    """d̃ of the two largest of six weights, over the printed bound."""
    scores, tokens = _parts(x, (6,), (6, 3))
    alpha = scores.softmax(-1)
    order = alpha.argsort(descending=True)
    alpha, tokens = alpha[order], tokens[order]
    y = alpha[:, None] * tokens
    mass = alpha[:2].sum()
    apart = (tokens[2:, None] - tokens[None, :2]).norm(dim=-1).amax()
    bound = (1 - mass) * apart + _longest(tokens[:2]) * (mass * 4 - (1 - mass))
    return (y[:2].sum(0) - y[2:]).norm(dim=-1).sum() / bound


@inequality("mudarisov2025.random_sets", 5 + 15)
def expected_distance(x: Tensor) -> Scalar:
    """E[d̃] over every pair of five tokens, over our upper bound."""
    scores, tokens = _parts(x, (5,), (5, 3))
    y = scores.softmax(-1)[:, None] * tokens
    sets = list(combinations(range(5), 2))
    rest = [[i for i in range(5) if i not in s] for s in sets]
    total = sum(
        (y[list(s)].sum(0) - y[r]).norm(dim=-1).sum()
        for s, r in zip(sets, rest, strict=True)
    )
    others = y.sum(0) - y
    squares = y.square().sum() - y.square().sum(-1)
    spread = 2 * 2 / (4 * 3) * (squares - others.square().sum(-1) / 4)
    main = (y - others / 2).square().sum(-1)
    return total / len(sets) / (3 / 5 * (main + spread).clamp_min(0).sqrt().sum())


@inequality("mudarisov2025.random_directions_understate", 10, *WIDE)
def finite_step(x: Tensor) -> Scalar:
    """A step ε of softmax(l/T), T = 0.1, over min{1/(2T), √2/ε}·ε."""
    logits, step = _parts(x, (5,), (5,))
    moved = ((logits + step) / 0.1).softmax(-1) - (logits / 0.1).softmax(-1)
    return moved.norm() / (5 * step.norm()).clamp_max(math.sqrt(2))


@inequality("mudarisov2025.swapped_leaders", 7, *WIDE)
def exchanged_leaders(x: Tensor) -> Scalar:
    """(a + ε, a, …) and (a, a + 2ε, …) at T = 1, over √5·ε/2."""
    step, rest = x[:1].abs(), -x[1:].abs()
    none = torch.zeros_like(step)
    before, after = torch.cat([step, none, rest]), torch.cat([none, 2 * step, rest])
    moved = (after.softmax(-1) - before.softmax(-1)).norm()
    return moved / (math.sqrt(5) / 2 * step[0])


@inequality("mudarisov2025.lemma_1", 6)
def largest_weight(x: Tensor) -> Scalar:
    """α_max against 1/(1 + (L − 1)e^−ρ)."""
    spread = x.amax() - x.amin()
    return x.softmax(-1).amax() * (1 + 5 * (-spread).exp())


@inequality("petrov2025.softmax_second_derivative_is_not_its_largest_block", 4)
def softmax_bend(x: Tensor) -> Scalar:
    """The unfolded second derivative of a row, against √(2/27)."""
    bend = jacfwd(jacrev(lambda z: z.softmax(-1)))(x)
    return _two(bend.reshape(16, 4)) / math.sqrt(2 / 27)


@inequality("baek2026.norm_coefficient_is_loose", 6, torch.float32, torch.bfloat16)
def norm_coefficient(x: Tensor) -> Scalar:
    v = x.var(correction=0)
    return _two(jacrev(_norm)(x)) * (v + EPS) ** 1.5 / (EPS + 2 * v)


@inequality("baek2025.score_ratio_is_at_least_one", 40, torch.float32, torch.bfloat16)
def score_ratio(x: Tensor) -> Scalar:
    q, k = _parts(x, (5, 4), (5, 4))
    return _two(q @ k.mT) / (_two(q) * _two(k))
