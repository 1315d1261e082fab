"""Attention as strangers write it: names, axes and shapes no table knows.

Each model takes (B, T, C) and says how many heads' scores one forward pass makes.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

C, H, D = 16, 4, 4


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Oddly(nn.Module):
    """Three maps under names nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Linear(C, C), nn.Linear(C, C)
        self.gamma, self.delta = nn.Linear(C, C), nn.Linear(C, C)

    def maps(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(self.alpha(x)), split(self.beta(x)), split(self.gamma(x))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x)
        out: Tensor = self.delta(joined(self.attend(q, k, v)))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / D**0.5).softmax(-1) @ v


class Closure(Oddly):
    """The softmax sits in a function inside a function."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def scored() -> Callable[[], Tensor]:
            def weights() -> Tensor:
                return torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), dim=-1)

            return weights

        return torch.einsum("bhqk,bhkd->bhqd", scored()(), v)


class MultiQuery(Oddly):
    """One key and value head for all, einsum with the query's axis first."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = H
        self.beta, self.gamma = nn.Linear(C, D), nn.Linear(C, D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.alpha(x).unflatten(-1, (H, -1))
        z = torch.einsum("b q h d, b k d -> b q h k", q, self.beta(x)) / D**0.5
        y = torch.einsum("bqhk,bkd->bqhd", z.softmax(dim=3), self.gamma(x))
        out: Tensor = self.delta(y.flatten(2))
        return out


class ComplexRotary(Oddly):
    """Positions as complex numbers, then the fused call."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(q.shape[2]).float(), torch.ones(D // 2))
        turn = torch.polar(torch.ones_like(angle), angle).to(_complex(q.dtype))
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
            ).flatten(-2)
            for x in (q, k)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _complex(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


class TalkingHeads(Oddly):
    """Heads are mixed by a learned map after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Linear(H, H, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = F.softmax(q @ k.transpose(-1, -2) / D**0.5, dim=-1)
        p = self.talk(p.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return p @ v


class Differential(Oddly):
    """Two softmaxes, one subtracted from the other before values are mixed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = (q @ k.mT).softmax(-1), (k @ q.mT / 2).softmax(-1)
        return (first - 0.3 * second) @ v


class Twice(Oddly):
    """Two attentions in one module."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, super().attend(k, q, v))


class Folded(Oddly):
    """Batch and heads in one axis, bmm, a mask of -1e9, dropout in place."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        z = torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype), q, k.mT, alpha=0.5)
        z = z.masked_fill(torch.ones_like(z[0]).triu(1).bool(), -1e9)
        p = F.dropout(F.softmax(z, dim=-1), 0.0, training=True, inplace=True)
        return torch.bmm(p, v).unflatten(0, (-1, H))


class HeadByHead(Oddly):
    """The weights are made at once and used head by head."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = nn.Softmax(dim=-1)(q @ k.mT / D**0.5)
        return torch.stack([p[:, h] @ v[:, h] for h in range(H)], dim=1)


class SummedOut(Oddly):
    """The product written out: weights times values, summed over keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        return (p.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


class KeysFirst(Oddly):
    """Images' way: (B, K, Q) scores, softmax over the first, values on the left."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).mT for m in (self.alpha, self.beta, self.gamma))
        p = torch.softmax(k.mT @ q, dim=1)
        out: Tensor = self.delta(torch.bmm(v, p).mT)
        return out


class Sink(Oddly):
    """One learned column more in the softmax, cut off before values are mixed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT
        sink = torch.zeros(1, dtype=q.dtype).expand(*z.shape[:-1], 1)
        return torch.cat([z, sink], -1).softmax(-1)[..., :-1] @ v


class LogSpace(Oddly):
    """A softmax taken through its logarithm, in half the model's precision."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = F.log_softmax(q @ k.mT, dim=-1).exp().to(v.dtype)
        return torch.matmul(p.contiguous(), v)


class Grouped(Oddly):
    """Five axes: key-value heads, and the queries of each group."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(1, (2, 2))
        k, v = k[:, :2, None], v[:, :2, None]
        y: Tensor = ((q @ k.mT / math.sqrt(D)).softmax(-1) @ v).flatten(1, 2)
        return y


class Functional(nn.Module):
    """No modules at all: parameters, and functions that take them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(C, C) / 4) for _ in "qkv"])

    def forward(self, x: Tensor) -> Tensor:
        return joined(_mixed(*(split(x @ w) for w in self.w)))


def _mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (lambda p: p @ v)(torch.softmax(q @ k.mT / D**0.5, -1))


class InSequence(nn.Sequential):
    """Attention as one step of a Sequential."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(C), Oddly(), nn.GELU(), ComplexRotary())


class Inner(Oddly):
    """The module with the weights hands them to a module without any."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.core(q, k, v)
        return out


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.softmax(q @ k.transpose(-2, -1)) @ v
        return out


# Each with the sites of its calls, in order.
ODD: dict[type[nn.Module], list[str]] = {
    **{kind: [""] for kind in (Oddly, Closure, MultiQuery, ComplexRotary, Folded)},
    **{kind: [""] for kind in (TalkingHeads, HeadByHead, SummedOut, KeysFirst, Sink)},
    **{kind: [""] for kind in (LogSpace, Grouped, Functional)},
    **{kind: ["", ""] for kind in (Differential, Twice)},
    InSequence: ["1", "3"],
    Inner: ["core"],
}
