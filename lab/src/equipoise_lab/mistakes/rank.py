"""One rank of a case: ``python -m equipoise_lab.mistakes.rank FOLDER``.

The environment is what torchrun would give; the program makes its own process group.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from equipoise_lab.mistakes.case import CASES
from equipoise_lab.mistakes.running import (
    Recording,
    Unwatched,
    load,
    seeded,
    weights,
)


def main(folder: Path) -> None:
    """Run the case that ``job.json`` names, and leave this rank's weights."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    load(job["half"])
    options = job["options"]
    watch = Unwatched() if options is None else Recording(folder, options)
    with seeded(job["seed"]):
        CASES[job["case"]].run(job["wrong"], watch)
    watch.close()
    torch.save(weights(watch), folder / f"weights-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
