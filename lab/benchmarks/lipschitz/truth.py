"""The constants themselves, from below: autograd on real modules, nothing of ours."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vjp

from tests.oracles.lipschitz import block_inf_lower

Map = Callable[[Tensor], Tensor]


def worst_and_others(rows_Q: Tensor, *, count: int) -> list[int]:
    """Return the queries most likely to be the worst, and as many evenly spaced."""
    worst = rows_Q.argsort(descending=True)[:count].tolist()
    spread = torch.linspace(0, len(rows_Q) - 1, count).long().tolist()
    return sorted({*worst, *spread})


def block_inf(f: Map, x_LD: Tensor, queries: list[int]) -> list[float]:
    """Return max ‖Σ_j J_ij z_j‖ over ‖z_j‖ = 1, as far as alternation climbs."""
    found = []
    for i in queries:
        J_cjd = jacrev(lambda x, i=i: f(x)[i])(x_LD)
        found.append(block_inf_lower(J_cjd.permute(1, 0, 2)[None].contiguous()))
    return found


def frobenius(f: Map, x_LD: Tensor, steps: int = 40) -> float:
    """Return ‖J‖₂ of the whole map by power iteration, which approaches from below."""
    _, pull = vjp(f, x_LD)
    rng = torch.Generator().manual_seed(0)
    u = torch.randn(x_LD.shape, generator=rng, dtype=x_LD.dtype)
    for _ in range(steps):
        u = u / u.norm()
        (u,) = pull(jvp(f, (x_LD,), (u,))[1])
    return float(u.norm().sqrt())
