"""``docs/peers.md``: Equipoise beside its peers, from the benchmarks' JSON."""

import statistics
from collections.abc import Callable, Sequence

from docs.figures import value

TEXT = """# Beside its peers

Every figure on this page is read from `benchmarks/results/`; `./dev bench peers` runs
the benchmarks again and writes the page. Ratios are of CPU seconds taken in turns in
one process on a shared machine with 2 cores, without a GPU.

{tables}

Tests hold FSDP2 and tensor parallelism on real processes to the readings of one process
(`tests/watching/test_two_ranks.py`, `tests/watching/test_four_ranks.py`, to 1e-5).
"""


def page() -> str:
    """Return the page."""
    parts = [f"## {title}\n\n{said}\n\n{_table(rows())}" for title, said, rows in PARTS]
    return TEXT.format(tables="\n\n".join(parts))


def _table(rows: Sequence[Sequence[object]]) -> str:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _speed() -> list[list[str]]:
    rows = value("balance_speed/rows")
    found = [
        [
            f"{row['score scale']:g}",
            f"{row['× sort + cumsum']:.1f}",
            f"{row['× softmax']:.1f}",
            f"{100 * row['prefix wrong by > 1e-6']:.0f} %",
        ]
        for row in rows
    ]
    head = ["score scale", "× faster than sort-and-cumsum", "× faster than softmax"]
    return [[*head, "rows that the published heuristic gets wrong"], *found]


def _overhead() -> list[list[str]]:
    found = [
        [
            row["monitor"],
            f"{row['mean %']:+.1f} %",
            f"{row['95 % from']:+.1f} to {row['95 % to']:+.1f} %",
        ]
        for row in value("overhead_small/rows")[1:]
    ]
    every = value("overhead_small_pairs/rows/0")
    found.append(
        [
            every["monitor"],
            f"{_percent(every['median ratio'])} %",
            f"{_percent(every['95 % from'])} to {_percent(every['95 % to'])} %",
        ]
    )
    return [["monitor", "a mean step costs", "95 % interval"], *found]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


def _compile() -> list[list[str]]:
    return [
        ["backend", "compiled", "added graphs", "added breaks", "bit-identical"],
        *(
            [
                row["backend"],
                row["compiled"],
                row["added graphs"],
                row["added breaks"],
                "yes" if row["identical"] else "no",
            ]
            for row in value("watch_compile/rows")
        ),
    ]


def _sharded() -> list[list[str]]:
    found = [
        [row["monitor"], row["reads"], f"{row['apart']:.1g}"]
        for row in value("fsdp2_truth/rows")
    ]
    for row in value("fsdp2_truth/wandb"):
        ranks = "one process" if row["processes"] == 1 else "FSDP2"
        read = f"{row.get('gradients', 0)} of {row['parameters']} gradients"
        said = "raises" if "error" in row else read
        found.append([f'wandb.watch(log="{row["log"]}"), {ranks}', "gradient", said])
    return [["monitor", "reading", "largest difference from one process"], *found]


def _bounds() -> list[list[str]]:
    rows = value("lipschitz/rows")
    names = {
        "dual": "dual bracket (ours)",
        "joint": "joint bound (ours)",
        "emadi": "Emadi, Thm 5.1",
    }
    groups = list(dict.fromkeys(row["group"] for row in rows))
    found = []
    for key, name in names.items():
        cells = [
            [r[key] for r in rows if r["group"] == g and r.get(key)] for g in groups
        ]
        shown = [_median_and_worst(c) for c in cells]
        found.append([name, *shown])
    return [["bound ÷ truth: median (worst)", *groups], *found]


def _median_and_worst(numbers: list[float]) -> str:
    if not numbers:
        return "–"
    return f"{statistics.median(numbers):.3g} ({max(numbers):.3g})"


def _precision() -> list[list[str]]:
    return [
        ["model", "format", "ours", "Baek v1", "Baek v2"],
        *(
            [
                row["model"],
                row["format"],
                *(f"{row[f'measured/{n}']:.3g}" for n in ("ours", "v1", "v2")),
            ]
            for row in value("fragility_models/rows")
        ),
    ]


def _curvature() -> list[list[str]]:
    return [
        ["", "CPU seconds", "peak GiB", "met the tolerance"],
        *(
            [
                row["contestant"],
                f"{row['CPU seconds, best']:.0f}",
                f"{row['peak GiB']:.1f}",
                "yes" if row["converged"] else "no",
            ]
            for row in value("curvature_speed/rows")
        ),
    ]


Rows = Callable[[], Sequence[Sequence[object]]]
PARTS: tuple[tuple[str, str, Rows], ...] = (
    ("θ of attention rows", "20 × 1024 × 1024 causal float32 rows.", _speed),
    ("What watching costs", "A 4-layer, 192-wide GPT, one step in ten.", _overhead),
    ("`torch.compile`", "What watching adds to compiled training.", _compile),
    ("FSDP2", "Two processes, a tiny model; relative to the largest value.", _sharded),
    ("Bounds of attention", "Against a bracket of the local constant.", _bounds),
    ("Rounding error", "Measured ÷ predicted; 1 is right.", _precision),
    ("Top-5 Hessian eigenvalues", "12-layer GPT, residual ≤ 1e-3.", _curvature),
)
