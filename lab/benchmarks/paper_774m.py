"""The paper's 774M shape on a CPU: build it, take one watched step, report.

One sequence of 1024 tokens, or of as many as are said; the bar is 24 GiB of memory.

usage: python -m lab.benchmarks.paper_774m [TOKENS]
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.table import publish
from equipoise.report.html import write_report
from equipoise.store import open_run
from equipoise_lab.data import Windows, embedded
from equipoise_lab.models import GPT, gpt_preset
from equipoise_lab.training.options import TrainOptions
from equipoise_lab.training.trainer import Trainer


def main() -> None:
    start = time.process_time()
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    torch.manual_seed(42)
    model = GPT(gpt_preset("paper-774m"))
    parameters = sum(p.numel() for p in model.parameters())
    data = Windows(embedded(), context=tokens, batch=1)
    options = TrainOptions(steps=1, batch=1, lr=3e-4, warmup=0, every=1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        result = Trainer(model, data, options, folder=folder).run()
        run = open_run(folder / "run.eqp")
        layers = run.series("gradient.norm")
        blocks = [layers[name][1][0] for name in run.info.details["blocks"]]
        page = write_report({"774M": run}, folder / "report.html")
        row = {
            "parameters": parameters,
            "tokens": tokens,
            "loss": result.losses[0],
            "quantities": len(run.quantities),
            "blocks read": len(blocks),
            "gradient, first ÷ last": float(blocks[0] / blocks[-1]),
            "report, MB": page.stat().st_size / 1e6,
            "peak memory, GiB": peak_gib(),
            "CPU seconds": time.process_time() - start,
        }
    publish("paper_774m", [row], bars={"peak memory, GiB": 24})


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
