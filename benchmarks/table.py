"""What every benchmark shares: a table on the screen, and the same rows as JSON."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]


def machine() -> dict[str, Any]:
    """Return the class of machine, never its name."""
    import torch

    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def publish(name: str, rows: Sequence[Row], **context: Any) -> None:
    """Print the rows as a table and write them to ``benchmarks/results/NAME.json``."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=name)
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    Console(width=160).print(table)
    RESULTS.mkdir(exist_ok=True)
    record = {"name": name, "machine": machine(), **context, "rows": list(rows)}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, default=float) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cpu_seconds(
    *contestants: Callable[[], object], repeats: int = 7
) -> list[tuple[float, float]]:
    """Return (median, worst) CPU seconds of each contestant, run in turns.

    Machines are shared and noisy: only contestants of one call are comparable.
    """
    times: list[list[float]] = [[] for _ in contestants]
    for _ in range(repeats):
        for spent, contestant in zip(times, contestants, strict=True):
            start = time.process_time()
            contestant()
            spent.append(time.process_time() - start)
    return [(statistics.median(spent), max(spent)) for spent in times]
