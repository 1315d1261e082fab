"""Random points for every closed form: the test draws a few, the benchmark hundreds.

Each trial returns two relative errors against autograd: of the dense blocks, and of the
product with a random tangent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.theory.curvature.norm import norm_hessian, norm_product
from equipoise.theory.curvature.softmax import (
    cross_entropy_hessian,
    cross_entropy_product,
    softmax_hessian,
    softmax_product,
    squared_error_product,
)
from equipoise.theory.lipschitz.heads import Heads, rotary
from equipoise_lab.theory.curvature.attention import (
    QKV,
    Weights,
    attention_product,
    attention_weights_product,
)
from equipoise_lab.theory.curvature.attention_blocks import attention_hessian
from equipoise_lab.theory.curvature.feedforward import (
    FeedForwardCurvature,
    Tangent,
    feedforward_hessian,
    feedforward_product,
)
from tests.oracles import curvature as oracle

Errors = tuple[float, float]
Trial = Callable[[int], Errors]


class Draw:
    """Everything random about a trial, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.rng))

    def choice(self, options: list[Any]) -> Any:
        return options[self.number(0, len(options) - 1)]

    def seen(self, L: int) -> Tensor:
        """Return a mask: full, causal, padded, or causal and padded."""
        seen = torch.ones(L, L, dtype=torch.bool)
        if self.number(0, 1):
            seen = seen.tril()
        if self.number(0, 1):
            seen[:, L - self.number(0, L // 2) :] = False
        return seen | torch.eye(L, dtype=torch.bool)


def flat(tensors: tuple[Tensor | None, ...] | list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors if t is not None])


def norm_trial(*, centred: bool) -> Trial:
    def trial(seed: int) -> Errors:
        draw = Draw(seed)
        # Two centred channels are ±1 whatever x is: no digit of a Hessian is left.
        rows, width = draw.number(1, 3), draw.number(3, 9)
        eps = draw.choice([0.0, 1e-5, 0.1, 3.0])
        x = draw.normal(rows, width, scale=draw.choice([0.3, 1.0, 5.0]))
        x, gain, g = x + draw.normal(1), draw.normal(width), draw.normal(rows, width)
        truth = oracle.whole_hessian(
            lambda x, c: (oracle.norm(x, c, eps=eps, centred=centred) * g).sum(),
            (x, gain),
        )
        given = {"gain_D": gain, "eps": eps, "centred": centred}
        blocks = norm_hessian(x, g, **given)
        dense = torch.zeros_like(truth)
        n = x.numel()
        dense[:n, :n] = torch.block_diag(*blocks.x_x_xDE)
        dense[:n, n:] = blocks.x_gain_xDE.flatten(0, 1)
        dense[n:, :n] = dense[:n, n:].mT
        dx, dgain = draw.normal(rows, width), draw.normal(width)
        product = norm_product(x, g, dx, dgain_D=dgain, **given)
        return (
            oracle.relative(dense, truth),
            oracle.relative(flat(product), truth @ flat([dx, dgain])),
        )

    return trial


def softmax_trial(seed: int) -> Errors:
    draw = Draw(seed)
    K = draw.number(2, 9)
    t = draw.normal(K, scale=draw.choice([0.1, 1.0, 4.0]))
    t[draw.number(0, K - 1)] = draw.choice([0.0, -torch.inf])
    e, dt = draw.normal(K), draw.normal(K)
    hidden = t == -torch.inf
    truth = oracle.whole_hessian(
        lambda u: (u.masked_fill(hidden, -torch.inf).softmax(-1) * e).sum(),
        (t.masked_fill(hidden, 0.0),),
    )
    a = t.softmax(-1)
    return (
        oracle.relative(softmax_hessian(a, e), truth),
        oracle.relative(softmax_product(a, e, dt), truth @ dt),
    )


def attention_trial(*, rotates: bool) -> Trial:
    def trial(seed: int) -> Errors:
        draw = Draw(seed)
        H, L = draw.choice([1, 2, 4]), draw.number(2, 6)
        G = draw.choice([g for g in (1, 2, 4) if H % g == 0])
        D, E, F = draw.number(1, 4), draw.choice([2, 4]), draw.number(1, 3)
        turn = rotary(L, draw.choice([2, E]), interleaved=bool(seed % 2))
        scale = draw.choice([0.3, 1.0, 2.0])
        weights = [
            draw.normal(*shape, scale=scale)
            for shape in ((H, D, E), (G, D, E), (G, D, F), (H, F, D))
        ]
        x, g, seen = draw.normal(L, D), draw.normal(L, D), draw.seen(L)
        turn = turn if rotates else None
        truth = oracle.whole_hessian(
            lambda *w: (oracle.attention(w, x, seen, turn) * g).sum(), weights
        )
        q, k, v, o = weights
        heads = Heads(w_q_HDE=q, w_k_GDE=k, w_v_GDF=v, w_o_HFD=o, rotary=turn)
        tangent = Weights(*(draw.normal(*w.shape) for w in weights))
        product = attention_weights_product(heads, x, g, tangent, mask=seen)
        return (
            oracle.relative(attention_hessian(heads, x, g, mask=seen).dense(), truth),
            oracle.relative(flat(product), truth @ flat(tangent)),
        )

    return trial


def local_attention_trial(seed: int) -> Errors:
    draw = Draw(seed)
    L, E, F = draw.number(1, 6), draw.number(1, 4), draw.number(1, 4)
    at = QKV(draw.normal(L, E), draw.normal(L, E), draw.normal(L, F))
    g, seen, scale = draw.normal(L, F), draw.seen(L), draw.choice([0.5, 1.0, 2.0])

    def rows(q: Tensor, k: Tensor) -> Tensor:
        return (scale * q @ k.T).masked_fill(~seen, -torch.inf).softmax(-1)

    truth = oracle.whole_hessian(lambda q, k, v: (rows(q, k) @ v * g).sum(), at)
    tangent = QKV(*(draw.normal(*x.shape) for x in at))
    a = rows(at.q_xQE, at.k_xKE)
    product = attention_product(at, tangent, a_xQK=a, g_xQF=g, scale=scale)
    error = oracle.relative(flat(product), truth @ flat(tangent))
    return error, error


def feedforward_trial(activation: str, *, gated: bool = False) -> Trial:
    def trial(seed: int) -> Errors:
        draw = Draw(seed)
        N, D, M, C = (draw.number(1, 4) for _ in range(4))
        x, g = draw.normal(N, D), draw.normal(N, C)
        w_in, w_out = draw.normal(D, M, scale=2.0), draw.normal(M, C)
        w_up = draw.normal(D, M) if gated else None
        at = [x, w_in, *([] if w_up is None else [w_up]), w_out]

        def value(x: Tensor, w_in: Tensor, *rest: Tensor) -> Tensor:
            up = rest[0] if gated else None
            return (oracle.feedforward(x, w_in, rest[-1], up, activation) * g).sum()

        truth = oracle.whole_hessian(value, at)
        net = FeedForwardCurvature(
            w_in_DM=w_in, w_out_MO=w_out, w_up_DM=w_up, activation=activation
        )
        moves = [draw.normal(*t.shape) for t in at]
        tangent = Tangent(moves[0], moves[1], moves[-1], moves[2] if gated else None)
        found = feedforward_product(net, x, g, tangent)
        ordered = (found.x_ND, found.w_in_DM, found.w_up_DM, found.w_out_MO)
        return (
            oracle.relative(feedforward_hessian(net, x, g).dense(), truth),
            oracle.relative(flat(ordered), truth @ flat(moves)),
        )

    return trial


def cross_entropy_trial(seed: int) -> Errors:
    draw = Draw(seed)
    N, V = draw.number(1, 4), draw.number(2, 7)
    z, dz = draw.normal(N, V, scale=3.0), draw.normal(N, V)
    target = torch.randint(0, V, (N,), generator=draw.rng)
    target[1:] = torch.where(target[1:] == 0, -100, target[1:])
    smoothing = draw.choice([0.0, 0.1])
    truth = oracle.whole_hessian(
        lambda z: torch.nn.functional.cross_entropy(
            z, target, label_smoothing=smoothing
        ),
        (z,),
    )
    counts = (target != -100).double()
    weight = counts / counts.sum()
    dense = torch.block_diag(*cross_entropy_hessian(z, weight_x=weight))
    product = cross_entropy_product(z, dz, weight_x=weight)
    return (
        oracle.relative(dense, truth),
        oracle.relative(product.flatten(), truth @ dz.flatten()),
    )


def squared_error_trial(seed: int) -> Errors:
    draw = Draw(seed)
    z, dz, target = (draw.normal(3, 4) for _ in range(3))
    truth = oracle.whole_hessian(lambda z: ((z - target) ** 2).mean(), (z,))
    product = squared_error_product(dz, entries=z.numel())
    error = oracle.relative(product.flatten(), truth @ dz.flatten())
    return error, error


TRIALS: dict[str, Trial] = {
    "LayerNorm": norm_trial(centred=True),
    "RMSNorm": norm_trial(centred=False),
    "softmax": softmax_trial,
    "attention in q, k, v": local_attention_trial,
    "attention in W": attention_trial(rotates=False),
    "attention in W, RoPE": attention_trial(rotates=True),
    **{f"FFN {name}": feedforward_trial(name) for name in oracle.ACTIVATIONS},
    "SwiGLU": feedforward_trial("silu", gated=True),
    "GeGLU": feedforward_trial("gelu", gated=True),
    "cross-entropy": cross_entropy_trial,
    "squared error": squared_error_trial,
}
