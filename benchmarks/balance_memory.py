"""Peak memory of ``sensitivity`` beyond what was resident before the call (Linux)."""

from pathlib import Path

import torch

from benchmarks.table import publish
from equipoise.numerics.attention_sensitivity import sensitivity

MIB = 1 << 20


def status(field: str) -> int:
    """Return a field of this process's memory status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def peak_extra(length: int, heads: int, causal: bool) -> float:
    """Return the high-water mark of one call, above the resident size before it."""
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, heads, length, 64, generator=rng).unbind(0)
    sensitivity(q[:, :64], k[:, :64], causal=causal)  # kernels loaded, pool started
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = status("VmRSS")
    sensitivity(q, k, causal=causal)
    return (status("VmHWM") - before) / MIB


def main() -> None:
    cases = [(8192, 1, False), (8192, 1, True), (2048, 1, True), (8192, 4, True)]
    rows = [
        {
            "L": length,
            "heads": heads,
            "causal": causal,
            "peak extra MiB": peak_extra(length, heads, causal),
            "L × L scores MiB": heads * length**2 * 4 / MIB,
        }
        for length, heads, causal in cases
    ]
    publish("balance_memory", rows)


if __name__ == "__main__":
    main()
