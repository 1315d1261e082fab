"""``docs/accelerators.md``: what the fused kernel costs on GPUs, counted, not measured.

Time of one launch is the largest of three: products on tensor cores, instructions on
vector units, bytes from memory, each at the peak its vendor states. Counts are per
score and per row, from ``numerics/rows/triton_kernel.py`` line by line; tile sizes are
read from ``triton_rows.py``.
"""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from docs import figures

HERE = Path(__file__).parent
ROWS = HERE.parent / "src" / "equipoise" / "numerics" / "rows" / "triton_rows.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peaks as the vendor states them: dense bf16, float32 outside tensor cores."""

    tensor: float
    vector: float
    """Float32 FLOP/s; a fused multiply-add is two, so half of it is instructions."""
    memory: float
    source: str


DEVICES = {
    "A100 SXM 80 GB": Device(
        tensor=312e12,
        vector=19.5e12,
        memory=2.039e12,
        source="NVIDIA A100 data sheet",
    ),
    "H100 SXM": Device(
        tensor=989e12, vector=67e12, memory=3.35e12, source="NVIDIA H100 data sheet"
    ),
    "MI300X": Device(
        tensor=1307e12,
        vector=163.4e12,
        memory=5.3e12,
        source="AMD Instinct MI300X data sheet",
    ),
}


def constant(name: str) -> int:
    """Return a tile size of the kernel; triton is not imported for it."""
    for node in ast.parse(ROWS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return int(ast.literal_eval(node.value))
    raise LookupError(f"triton_rows.py has no {name}")


# Instructions per score: scale, two comparisons with the range and a select (4), then
FIRST = 4 + 14  # _largest: count, square, two tests for NaN and inf, five selects …
SECOND = 4 + 10 + 12  # _exp (10); moment, masses, sink, small keys, compensated sum
THIRD = 4 + 10 + 4  # _exp; small keys, mass
BLOCK_ROWS = 32
SOFTMAX = 8  # of a fused attention: scale, maximum, exp2, sum, rescale


def per_row() -> float:
    """Return instructions per row beside the passes over its scores."""
    keys, bits, few = (constant(x) for x in ("BLOCK_K", "BITS", "FEW"))
    deals = 1 << bits
    # _dealt and _taken: maximum, place, selects
    candidates = (2 * (bits + 1) + few) * keys * 6
    sums = bits * deals * 2 + few * keys * 2
    nearest = keys * (4 * keys + 6 * deals)  # _nearest: three distances to each deal
    return candidates + sums + nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One attention call: causal, so that a row sees half of the keys on average."""

    length: int
    width: int = 128
    rows: int = 512
    """Queries read of a longer sequence; ``rows="all"`` reads every one."""

    @property
    def seen(self) -> float:
        return self.length / 2

    @property
    def share(self) -> float:
        return min(1.0, self.rows / self.length)


def row_seconds(device: Device, shape: Shape, *, sampled: bool) -> float:
    """Return seconds per row of the sequence: all of it, or the default sample."""
    share = shape.share if sampled else 1.0
    # Rows of one block read the keys of its last row: sampled ones lie far apart.
    read = shape.seen + BLOCK_ROWS / 2 / share
    tensor = 3 * share * 2 * shape.width * read / device.tensor
    scores = (FIRST + SECOND + THIRD) * read
    vector = share * (scores + per_row()) / (device.vector / 2)
    # Keys come from memory once a head and from the cache after that, queries once;
    # of each row which one it is and which keys it sees; ten columns go out.
    bytes_ = 2 * shape.width * (1 + share) + (8 + 4 * 4 + 4 * 10) * share
    return max(tensor, vector, bytes_ / device.memory)


def attention_seconds(device: Device, shape: Shape) -> float:
    """Return seconds per row of a fused attention's forward pass, by the same count."""
    tensor = 2 * 2 * shape.width * shape.seen / device.tensor
    vector = SOFTMAX * shape.seen / (device.vector / 2)
    return max(tensor, vector, 4 * 2 * shape.width / device.memory)


MODELS = {
    "125M, L = 1024": (125e6, 12 * 12, Shape(length=1024, width=64)),
    "7B, L = 8192": (7e9, 32 * 32, Shape(length=8192)),
    "70B, L = 8192": (70e9, 80 * 64, Shape(length=8192)),
}
USED = 0.4
"""Share of the tensor peak that a good training run reaches (MFU); assumed."""


def _launches() -> Iterable[Sequence[str]]:
    for name, device in DEVICES.items():
        for length in (1024, 8192, 32768):
            shape = Shape(length=length)
            base = attention_seconds(device, shape)
            whole = row_seconds(device, shape, sampled=False)
            few = row_seconds(device, shape, sampled=True)
            yield (
                name,
                f"{length:,}",
                f"{base * length * 1e6:,.3g} µs",
                f"{whole / base:.3g} ×",
                f"{few / base:.3g} ×",
            )


def _steps() -> Iterable[Sequence[str]]:
    for model, (parameters, heads, shape) in MODELS.items():
        for name, device in DEVICES.items():
            step = 6 * parameters / (USED * device.tensor)
            added = heads * row_seconds(device, shape, sampled=True) / step
            yield model, name, f"+{100 * added:.2g} %", f"+{10 * added:.2g} %"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TEXT = """# On accelerators

Watch a model on a GPU as on a CPU; there is nothing to set. On CUDA or ROCm with
`triton` installed (`pip install ".[triton]"`) one fused kernel reads attention rows
from queries and keys. A torch path that sorts nothing reads them without triton, where
the model forms its scores itself, and for calls that the kernel does not take:
`flex_attention`, learned sinks, an additive mask under a soft-cap, heads wider than
256. Kernels of flash-attn, xFormers and others are [read from their
arguments](families.md#fused-kernels-from-outside-torch). `rows=512` is the default for
sequences above 512.

**None of this has run on a GPU.** What is proven on a CPU: the kernel in triton's
interpreter and the torch path against the CPU kernel (`tests/numerics/rows`; of
{agreed:,} rows of every kind of call read by the kernel and {by_torch:,} by the torch
path, `./dev bench kernel_agreement`, {missed} intervals of θ missed the truth), that it
compiles for an A100 (`./dev bench kernel_compiled`), and that a step which is not
sampled reads no data of the device, a sampled one in a single transfer
(`tests/watching/test_no_wait.py`).
Nothing is copied to the device in a way that waits for it either: the same test finds
such copies by their operations.

That transfer goes to pinned memory behind an event, and the training does not wait for
it: the step is written when it has arrived, at the latest at the next sample, and
before `verdict`, `findings`, a checkpoint or the end of the run is asked for. Several
ranks exchange a sample when the step after it ends, while the device works on that
step: then `verdict` and `findings` are those of the last exchange. Only an autopilot
waits for the sampled step itself, because it may act before the next one begins. The
order of all this is tested with an event that says "not yet", on two ranks too.

A sampled step of 8192 tokens takes {more:.2f} % more memory at its peak than a plain
one, by the count of torch's CPU allocator (`python -m benchmarks.watch_memory counted
toy`): the tiles of scores are small beside what the backward pass keeps.

Everything below is **computed, not measured**: operations of the kernel and of a fused
attention, counted per score and per row, at peak rates. Real kernels reach a part of
their peaks; ours has never run on a GPU.

## One launch against the forward pass it reads

Causal, head width 128, bf16, one head of one sequence. "All rows" is `rows="all"`.

{launches}

The kernel is bound by its vector units, not by products or memory: three passes over
the scores take {passes} instructions a score, and finding θ takes {row:,.0f} a row
whatever the length. That is why a sample of rows is the default.

## A training step

What a sampled step costs on top of a plain one with default `rows`, and one step in
ten, for attention rows alone. A plain step is 6 FLOP per parameter and token at
{used:.0f} % of the tensor peak (assumed). `./dev bench accelerator` measures it where
there is a device.

{steps}

## Measured

{measured}

## Where the peaks are from

{sources}
"""


def measured() -> str:
    """Return what ``./dev bench accelerator`` wrote, or that no device was there."""
    if not (figures.RESULTS / "accelerator.json").exists():
        return (
            "No device has been measured yet. `./dev bench accelerator` on a machine "
            "with one measures all of this, and what it writes is shown here."
        )
    rows = figures.value("accelerator/rows")
    found = [
        ", ".join(_named(x) for x in row.items() if x[0] != "what") for row in rows
    ]
    lines = [(row["what"], text) for row, text in zip(rows, found, strict=True)]
    return _table(["on " + str(figures.value("accelerator/device")), "found"], lines)


def _named(pair: tuple[str, object]) -> str:
    name, value = pair
    return f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"


def page() -> str:
    """Return the page."""
    head = ["device", "L", "fused attention, forward", "all rows", "default rows"]
    agreement = figures.value("kernel_agreement/rows/case=all")
    return TEXT.format(
        agreed=agreement["rows"],
        by_torch=agreement["torch rows"],
        missed=agreement["missed"] + agreement["torch missed"],
        more=100 * figures.value("watch_memory_counted/rows/shape=toy/more"),
        measured=measured(),
        launches=_table(head, _launches()),
        passes=FIRST + SECOND + THIRD,
        row=per_row(),
        used=100 * USED,
        steps=_table(["model", "device", "sampled step", "every 10"], _steps()),
        sources="\n".join(
            f"- {name}: {d.tensor / 1e12:.0f} TFLOP/s bf16 dense, "
            f"{d.vector / 1e12:.1f} TFLOP/s float32, {d.memory / 1e12:.2f} TB/s "
            f"({d.source})."
            for name, d in DEVICES.items()
        ),
    )
