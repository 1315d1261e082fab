"""Closed forms of second derivatives against autograd, and how fast the blocks come."""

from typing import Any

import torch

from benchmarks.table import cpu_seconds, publish
from equipoise.theory.lipschitz.heads import Heads
from equipoise_lab.theory.curvature.attention_blocks import attention_hessian
from lab.tests.theory.curvature_draws import TRIALS

DRAWS = 250
L = D = 64


def exactness(name: str) -> dict[str, Any]:
    """Return the worst relative error over many random points, shapes and masks."""
    # Seeds of the tests start at 0: these are other draws.
    errors = torch.tensor([TRIALS[name](1000 + seed) for seed in range(DRAWS)])
    dense, product = errors.max(0).values.tolist()
    return {
        "form": name,
        "draws": DRAWS,
        "worst dense": dense,
        "worst product": product,
    }


class Layer:
    """One attention layer of 64 tokens and 64 channels, and a cotangent."""

    def __init__(self, heads: int, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, dtype=dtype)

        self.x, self.g = normal(L, D), normal(L, D)
        self.q, self.k, self.v = (normal(heads, D, D // heads) / 8 for _ in range(3))
        self.o = torch.eye(D, dtype=dtype).reshape(heads, D // heads, D)
        self.heads = Heads(
            w_q_HDE=self.q, w_k_GDE=self.k, w_v_GDF=self.v, w_o_HFD=self.o
        )

    def loss(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        t = (self.x @ q) @ (self.x @ k).mT * q.shape[-1] ** -0.5
        return ((t.softmax(-1) @ (self.x @ v) @ self.o).sum(0) * self.g).sum()

    def ours(self) -> Any:
        return attention_hessian(self.heads, self.x, self.g, output=False)

    def autograd(self) -> Any:
        slope = torch.func.grad(self.loss, argnums=(0, 1, 2))
        return torch.func.jacfwd(slope, argnums=(0, 1, 2))(self.q, self.k, self.v)

    def disagreement(self) -> float:
        """Return the worst relative difference over the six blocks, head by head."""
        ours, truth = self.ours(), self.autograd()
        blocks = {
            (0, 0): ours.qq_DEDE,
            (0, 1): ours.qk_DEDE,
            (1, 1): ours.kk_DEDE,
            (2, 0): ours.vq_DFDE,
            (2, 1): ours.vk_DFDE,
        }
        worst = max(
            float(
                (block - truth[a][b][h, :, :, h]).abs().max() / truth[a][b].abs().max()
            )
            for (a, b), found in blocks.items()
            for h, block in enumerate(found)
        )
        return max(worst, float(truth[2][2].abs().max()))


def speed(heads: int) -> dict[str, Any]:
    """Return CPU seconds of the six blocks and of the same by jacfwd(grad)."""
    layer = Layer(heads, torch.float32)
    off = layer.disagreement()
    (ours, slowest), (theirs, _) = cpu_seconds(layer.ours, layer.autograd, repeats=3)
    return {
        "layer": f"L = d = 64, {heads} heads, float32",
        "ours s": ours,
        "ours worst s": slowest,
        "jacfwd(grad) s": theirs,
        "times faster": theirs / ours,
        "largest difference": off,
    }


def main() -> None:
    torch.set_num_threads(1)
    publish(
        "curvature_forms",
        [exactness(name) for name in TRIALS],
        speed=(timed := [speed(heads) for heads in (1, 4)]),
    )
    for row in timed:
        print(row)


if __name__ == "__main__":
    main()
