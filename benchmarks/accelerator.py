"""Everything this repository claims of accelerators, measured on the one that is here.

``./dev bench accelerator`` (or ``python -m benchmarks.accelerator [cuda|cpu]``): the
kernel against the forward pass it reads, agreement with the CPU kernel, what a sampled
step and one step in ten cost, whether anything waits for the device, and peak memory.
Without a CUDA or ROCm device it says so in one line; ``cpu`` runs the same measurements
there, to try the command itself, and writes nothing.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import equipoise
from benchmarks.table import publish
from equipoise.anatomy.calls import AttentionCall
from equipoise.lab.models import GPT, GPTConfig
from equipoise.numerics.rows.statistics import row_columns
from equipoise.probes.fused_rows import fused_columns, readable

LENGTHS = (1024, 8192, 32768)
HEADS, WIDTH = 16, 64
LATER = 5
"""Steps before the first that is timed."""


def seconds(device: str, act: Callable[[], object], *, repeats: int) -> float:
    """Return the median time of one call, by the device's own clock."""
    if device == "cpu":
        times = [_host_seconds(act) for _ in range(repeats)]
        return statistics.median(times)
    act()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        act()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _host_seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def call_of(device: str, length: int) -> AttentionCall:
    """Return one causal attention call with bf16 queries and keys, seeded."""
    rng = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k = (
        torch.randn(1, HEADS, length, WIDTH, generator=rng).to(device, dtype)
        for _ in range(2)
    )
    return AttentionCall(
        module=None, kind="sdpa", q_BHQD=q, k_BGKD=k, scale=WIDTH**-0.5, causal=True
    )


def read(call: AttentionCall, chosen: Tensor | None) -> Tensor:
    """Return the rows' columns by the kernel, or by torch where there is none."""
    if readable(call):
        return fused_columns(call, chosen)
    assert call.q_BHQD is not None and call.k_BGKD is not None
    q = call.q_BHQD if chosen is None else call.q_BHQD[:, :, chosen]
    scores = (q @ call.k_BGKD.mT).float() * call.scale
    place = torch.arange(call.q_BHQD.shape[2], device=q.device)
    hidden = place[None] > (place if chosen is None else chosen)[:, None]
    return row_columns(scores.masked_fill(hidden, -torch.inf)).movedim(-1, 0)


def kernels(device: str, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Time the kernel beside SDPA, all rows and 512 of them; compare with the CPU."""
    for length in lengths:
        call = call_of(device, length)
        q, k = call.q_BHQD, call.k_BGKD
        assert q is not None and k is not None
        chosen = torch.linspace(0, length - 1, min(512, length), device=device).long()
        repeats = 3 if device == "cpu" else 20

        def forward(q: Tensor = q, k: Tensor = k) -> Tensor:
            return scaled_dot_product_attention(q, k, k, is_causal=True)

        base = seconds(device, forward, repeats=repeats)
        some = seconds(device, lambda c=call, n=chosen: read(c, n), repeats=repeats)
        yield {
            "what": f"rows ÷ SDPA forward, L = {length}",
            "kernel": "triton" if readable(call) else "torch",
            "512 rows": some / base,
            "all rows": seconds(device, lambda c=call: read(c, None), repeats=repeats)
            / base,
        }
        yield {"what": f"agreement, L = {length}", **agreement(call, chosen[:64])}


def agreement(call: AttentionCall, chosen: Tensor) -> dict[str, float]:
    """Return how far θ on the device is from the CPU kernel's, on the chosen rows."""
    found = read(call, chosen).double().cpu()
    assert call.q_BHQD is not None and call.k_BGKD is not None
    q, k = (x.float().cpu() for x in (call.q_BHQD[:, :, chosen], call.k_BGKD))
    hidden = torch.arange(k.shape[2])[None] > chosen.cpu()[:, None]
    scores = (q @ k.mT * call.scale).masked_fill(hidden, -torch.inf)
    truth = row_columns(scores).double().movedim(-1, 0)
    # One sequence: (H, 1, n) and (1, H, n) are the same rows in the same order.
    off = (found[0].flatten() - truth[0].flatten()).abs()
    return {"θ off by more than 1e-6": float((off > 1e-6).double().mean())}


def loop(device: str, *, every: int | None, steps: int) -> tuple[list[float], int]:
    """Train a small GPT; return the seconds of each step and the peak memory."""
    torch.manual_seed(0)
    sizes = (2, 64, 64) if device == "cpu" else (12, 768, 1024)
    depth, width, length = sizes
    model = GPT(GPTConfig(width=width, depth=depth, heads=4, context=length)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 256, (4, length + 1), device=device)
    handle = equipoise.watch(model, optimizer, every=every) if every else None
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        logits = model(ids[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    times = [seconds(device, step, repeats=1) for _ in range(steps)]
    if handle is not None:
        handle.close()
    return times, 0 if device == "cpu" else torch.cuda.max_memory_allocated()


def costs(device: str, *, steps: int = 40) -> Iterator[dict[str, Any]]:
    """Return what sampled steps and one step in ten cost, and the peak memory."""
    plain, room = loop(device, every=None, steps=steps)
    sampled, more = loop(device, every=1, steps=steps)
    tenth, _ = loop(device, every=10, steps=steps)
    base = statistics.median(plain[LATER:])
    yield {
        "what": "sampled step ÷ plain step",
        "median": statistics.median(sampled[LATER:]) / base,
    }
    yield {"what": "every 10, mean", "ratio": statistics.fmean(tenth[LATER:]) / base}
    yield {"what": "peak memory", "ratio": more / room if room else float("nan")}


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


def waits(device: str) -> dict[str, Any]:
    """Return whether steps that are not sampled ran without waiting."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=64, depth=2, heads=2, context=32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 256, (2, 33), device=device)
    said = "none off-sample"
    with equipoise.watch(model, optimizer, every=100):
        for step in range(4):
            with no_wait(device if step else "cpu"):
                logits = model(ids[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
                try:
                    loss.backward()
                    optimizer.step()
                except RuntimeError as error:
                    said = str(error)
                optimizer.zero_grad()
    return {"what": "waits for the device", "found": said}


def main(device: str = "cuda", lengths: tuple[int, ...] = LENGTHS) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        print(
            "accelerator: no CUDA or ROCm device here (torch "
            f"{torch.__version__}); run this command where there is one"
        )
        return
    rows = [*kernels(device, lengths), *costs(device), waits(device)]
    if device == "cpu":
        for row in rows:
            print(row)
        return
    name = torch.cuda.get_device_name()
    publish("accelerator", rows, device=name, heads=HEADS, width=WIDTH)


if __name__ == "__main__":
    main(*sys.argv[1:2])
