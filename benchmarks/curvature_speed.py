"""Top-5 Hessian eigenvalues of a 12-layer, d = 384 GPT: ours and two peers.

Each contestant runs in a process of its own, in turns, so that its peak memory is its
own; CPU seconds are counted inside, from the built model to the eigenvalues. All stop
at the same criterion, residual ≤ 1e-3·|λ| for each of the five. curvlinops goes through
SciPy's ARPACK, as its documentation does; hessian-eigenthings has to be told how many
steps to take (it cannot stop by itself); its row says whether they sufficed. Both peers
are put under the plain attention kernel, without which neither differentiates twice.

hessian-eigenthings exists as a pre-release only and is not part of the environment: put
it on PYTHONPATH, or its row is left out.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.table import publish

COUNT, TOLERANCE, LENGTH, ROUNDS = 5, 1e-3, 64, 1
# Enough to be compared, not to converge: 35 took 150 CPU seconds and did not either.
STEPS = 25


class Rows(nn.Module):
    """One row of logits per target, as curvlinops wants them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out.flatten(0, 1)


def subject() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    from benchmarks.text import standard_library
    from tests.models import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(width=384, depth=12, heads=6, context=LENGTH)).eval()
    text = standard_library()[None, : LENGTH + 1]
    return model, (text[:, :-1], text[:, 1:])


def ours() -> dict[str, Any]:
    from equipoise.auditing.curvature import eigenvalues, hessian
    from equipoise.numerics.spectra.estimate import Search

    model, batch = subject()
    start = time.process_time()
    search = Search(tolerance=TOLERANCE, at_most=400)
    found = eigenvalues(hessian(model, batch), COUNT, search=search)
    return {
        "seconds": time.process_time() - start,
        "values": [e.value for e in found],
        "products": found[0].steps,
    }


def curvlinops() -> dict[str, Any]:
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import LinearOperator, eigsh

    model, (x, y) = subject()
    rows, products = Rows(model), 0
    start = time.process_time()
    operator = HessianLinearOperator(
        rows,
        nn.CrossEntropyLoss(),
        list(rows.parameters()),
        [(x, y.flatten())],
        check_deterministic=False,
    ).to_scipy()

    def counted(v: Any) -> Any:
        nonlocal products
        products += 1
        return operator @ v

    with sdpa_kernel(SDPBackend.MATH):
        linear = LinearOperator(operator.shape, matvec=counted, dtype=operator.dtype)
        values = eigsh(linear, k=COUNT, which="LA", tol=TOLERANCE)[0]
    seconds = time.process_time() - start
    return {
        "seconds": seconds,
        "values": sorted(map(float, values), reverse=True),
        "products": products,
    }


def eigenthings(steps: int = STEPS) -> dict[str, Any]:
    from hessian_eigenthings import HessianOperator, lanczos

    model, batch = subject()
    start = time.process_time()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    with sdpa_kernel(SDPBackend.MATH):
        operator = HessianOperator(model, [batch], loss)
        found = lanczos(
            operator, k=COUNT, max_iter=steps, tol=TOLERANCE, which="LA", seed=0
        )
    return {
        "seconds": time.process_time() - start,
        "values": found.eigenvalues.tolist(),
        "products": found.iterations,
        "converged": bool(found.converged.all()),
    }


CONTESTANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ours": ours,
    "curvlinops": curvlinops,
    "hessian-eigenthings": eigenthings,
}


def child(name: str) -> None:
    torch.set_num_threads(1)
    found = CONTESTANTS[name]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({**found, "peak GiB": peak}))


def measured(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.curvature_speed", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    names = [
        name
        for name in CONTESTANTS
        if name != "hessian-eigenthings" or find_spec("hessian_eigenthings")
    ]
    runs = [{name: measured(name) for name in names} for _ in range(ROUNDS)]
    best = {name: min(run[name]["seconds"] for run in runs) for name in names}
    rows = [
        {
            "contestant": name,
            "CPU seconds, best": best[name],
            "worst": max(run[name]["seconds"] for run in runs),
            "ours ÷ theirs": best["ours"] / best[name],
            "products": runs[0][name]["products"],
            "converged": runs[0][name].get("converged", True),
            "peak GiB": max(run[name]["peak GiB"] for run in runs),
            "largest": runs[0][name]["values"][0],
            "fifth": runs[0][name]["values"][4],
        }
        for name in names
    ]
    publish("curvature_speed", rows, tolerance=TOLERANCE, length=LENGTH, rounds=ROUNDS)


if __name__ == "__main__":
    child(sys.argv[1]) if sys.argv[1:] else main()
