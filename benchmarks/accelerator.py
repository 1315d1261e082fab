"""Everything this repository claims of accelerators, measured on the one that is here.

``./dev bench accelerator`` (or ``python -m benchmarks.accelerator [cuda|cpu]``): the
kernel against the forward pass it reads, agreement with the CPU kernel on every kind of
call, what a sampled step and one step in ten cost, whether anything waits for the
device, and peak memory at 8192 tokens. Without a CUDA or ROCm device it says so in one
line; ``cpu`` runs the same measurements there, small, to try the command itself, and
writes nothing. ``docs/accelerators.md`` shows what it wrote.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import equipoise
from benchmarks.table import publish
from benchmarks.watch_memory import allocated_mib
from equipoise.anatomy.calls import AttentionCall
from equipoise.numerics.rows.statistics import RowStatistics, row_columns
from equipoise.probes.attention import rows_of_call
from equipoise.probes.fused_rows import readable
from equipoise.probes.row_sample import chosen_queries
from tests.models import GPT, GPTConfig

HEADS, WIDTH, ROWS = 16, 64, 512
ROUNDS, WARM_UP = 5, 12
"""Rounds of the step times, and steps before them: kernels compile in the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is measured on a device; smaller on a CPU."""

    lengths: tuple[int, ...] = (1024, 8192, 32768)
    repeats: int = 20
    gpt: tuple[int, int, int, int] = (768, 12, 12, 1024)
    """Width, depth, heads and tokens of the model whose steps are timed."""
    steps: int = 20
    """Steps of one round; two in twenty are sampled where every tenth is."""
    longest: int = 8192
    """Tokens of the step whose memory is measured."""


CPU = Size(lengths=(96,), repeats=1, gpt=(32, 1, 2, 32), steps=2, longest=64)


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(device: str, act: Callable[[], object], *, repeats: int) -> float:
    """Return the median time of one call, by the clock, the device's work included."""
    times = []
    for _ in range(repeats + 1):
        synchronise(device)
        start = time.perf_counter()
        act()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def call_of(device: str, length: int, *, scale: float = 1.0) -> AttentionCall:
    """Return one causal attention call with bf16 queries and keys, seeded."""
    rng = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k = (
        torch.randn(1, HEADS, length, WIDTH, generator=rng).to(device, dtype)
        for _ in range(2)
    )
    return AttentionCall(
        module=None,
        kind="sdpa",
        q_BHQD=q,
        k_BGKD=k,
        scale=scale * WIDTH**-0.5,
        causal=True,
    )


def kernels(device: str, size: Size) -> Iterator[dict[str, Any]]:
    """Time the kernel beside SDPA, all rows and a sample of them."""
    for length in size.lengths:
        call = call_of(device, length)
        q, k = call.q_BHQD, call.k_BGKD
        assert q is not None and k is not None
        chosen = sample(length)

        def forward(q: Tensor = q, k: Tensor = k) -> Tensor:
            return scaled_dot_product_attention(q, k, k, is_causal=True)

        base, few, every = (
            seconds(device, act, repeats=size.repeats)
            for act in (
                forward,
                lambda c=call, n=chosen: rows_of_call(c, n),
                lambda c=call: rows_of_call(c, None),
            )
        )
        yield {
            "what": f"rows ÷ SDPA forward, L = {length}",
            "kernel": "triton" if readable(call) else "torch",
            "sampled rows": few / base,
            "all rows": every / base,
        }


def sample(length: int) -> Tensor:
    """Return the rows that a sampled step reads, on the host as there."""
    rows = min(ROWS, length // 2)
    return chosen_queries(length, rows, step=0, site="blocks.0.attention")


def agreement(device: str, size: Size) -> Iterator[dict[str, Any]]:
    """Compare sampled rows of θ on the device with the CPU kernel's."""
    for length in size.lengths:
        for scale in (1.0, 4.0):
            call, chosen = call_of(device, length, scale=scale), sample(length)[::8]
            found, truth = rows_of_call(call, chosen), on_cpu(call, chosen)
            low, high = (
                x.double().cpu() for x in (found.theta_lower, found.theta_upper)
            )
            slack = 1e-5  # products are summed in another order
            missed = (low > truth.theta_upper + slack) | (
                high < truth.theta_lower - slack
            )
            off = (low - truth.theta_lower).abs() > slack
            yield {
                "what": f"agreement, L = {length}, scale {scale:g}",
                "rows": low.numel(),
                "missed": int(missed.sum()),
                "lower off by more than 1e-5": float(off.double().mean()),
            }


def on_cpu(call: AttentionCall, chosen: Tensor) -> RowStatistics:
    """Return the same rows by the CPU kernel, (H, n)."""
    assert call.q_BHQD is not None and call.k_BGKD is not None
    q, k = (x.float().cpu() for x in (call.q_BHQD, call.k_BGKD))
    hidden = torch.arange(k.shape[2]) > chosen[:, None]
    scores = (q[0, :, chosen] @ k[0].mT * call.scale).masked_fill(hidden, -torch.inf)
    return RowStatistics.of(row_columns(scores))


def variants(device: str) -> Iterator[dict[str, Any]]:
    """Read every kind of call of the kernel's tests, where there is a kernel."""
    if device == "cpu" or not readable(call_of(device, 64)):
        return
    # Here: they import the kernel, and with it triton.
    from tests.numerics.rows.kernel_cases import CASES, compared

    for name, case in CASES.items():
        found = compared(case, 0, device)
        counts = {key: found[key] for key in ("rows", "missed", "off", "wide", "error")}
        yield {"what": f"every kind of call: {name}", **counts}


@contextmanager
def training(
    device: str, gpt: tuple[int, int, int, int], every: int | None
) -> Iterator[Callable[[], None]]:
    """Give a function that makes one step of a GPT under autocast, perhaps watched."""
    torch.manual_seed(0)
    width, depth, heads, length = gpt
    config = GPTConfig(width=width, depth=depth, heads=heads, context=length)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 256, (max(1, 8192 // length), length + 1)).to(device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            logits = model(ids[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        given = {"run": Path(folder) / "a.eqp", "quiet": True, "strict": True}
        with (
            equipoise.watch(model, optimizer, every=every, **given)
            if every
            else nullcontext()
        ):
            yield step


def step_seconds(device: str, size: Size, every: int | None) -> float:
    """Return the mean time of a step in the median round; no step is waited for."""
    with training(device, size.gpt, every) as step:

        def round_() -> None:
            for _ in range(size.steps):
                step()

        for _ in range(WARM_UP if device != "cpu" else 1):
            step()
        return seconds(device, round_, repeats=ROUNDS) / size.steps


def costs(device: str, size: Size) -> Iterator[dict[str, Any]]:
    """Return what sampled steps and one step in ten cost."""
    plain = step_seconds(device, size, None)
    for what, every in (("sampled step ÷ plain step", 1), ("every 10 ÷ plain", 10)):
        yield {"what": what, "ratio": step_seconds(device, size, every) / plain}


def peak_mib(device: str, size: Size, every: int | None) -> float:
    """Return the allocator's peak over two steps at the longest length."""

    def steps() -> None:
        with training(device, (*size.gpt[:3], size.longest), every) as step:
            step()
            step()

    if device == "cpu":
        return allocated_mib(steps)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    steps()
    return torch.cuda.max_memory_allocated() / 2**20


def memory(device: str, size: Size) -> dict[str, Any]:
    plain, sampled = (peak_mib(device, size, every) for every in (None, 1))
    what = f"peak of a sampled step ÷ plain, L = {size.longest}"
    return {"what": what, "ratio": sampled / plain, "MiB": plain}


@contextmanager
def no_wait(device: str) -> Iterator[None]:
    """Raise where anything waits for the device."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(device: str, size: Size) -> Iterator[dict[str, Any]]:
    """Return what waited in steps that are sampled and not, unwatched for comparison.

    Kernels compile and memory is reserved in the first steps, which are left out.
    """
    kinds = (("unwatched", None), ("not sampled", 1000), ("sampled", 1))
    for name, every in kinds:
        with training(device, size.gpt, every) as step:
            for _ in range(3):
                step()
            said = "nothing"
            try:
                with no_wait(device):
                    step()
                    step()
            except RuntimeError as error:
                said = str(error).splitlines()[0]
            yield {"what": f"waits for the device, {name}", "found": said}


def rows_of(device: str, size: Size) -> Iterator[dict[str, Any]]:
    """Yield everything that is measured, the cheapest first."""
    yield from agreement(device, size)
    yield from variants(device)
    yield from waits(device, size)
    yield from kernels(device, size)
    yield memory(device, size)
    yield from costs(device, size)


def main(device: str = "cuda") -> None:
    if device == "cuda" and not torch.cuda.is_available():
        print(
            "accelerator: no CUDA or ROCm device here (torch "
            f"{torch.__version__}); run this command where there is one"
        )
        return
    size, rows = CPU if device == "cpu" else Size(), []
    for row in rows_of(device, size):
        print(row, flush=True)
        rows.append(row)
    if device != "cpu":
        name = torch.cuda.get_device_name()
        publish("accelerator", rows, device=name, heads=HEADS, width=WIDTH)


if __name__ == "__main__":
    main(*sys.argv[1:2])
