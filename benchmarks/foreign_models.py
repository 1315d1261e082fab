"""Healthy and sick runs of Hugging Face models, which no rule or forecast was tuned on.

``python -m benchmarks.foreign_models [STEPS]``. Five families, each trained on bytes of
the standard library in an ordinary loop, watched with the defaults at every 5th step:
once healthy, and with faults planted. *Failed* is a final loss 5 % above that of the
healthy run of its family, or no finite loss; the criterion is that of the storms.
"""

import math
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.table import publish
from benchmarks.text import standard_library
from equipoise import watch

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"vocab_size": 256, "intermediate_size": 192, "max_position_embeddings": 128}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": (
        "GPT2",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128},
    ),
    "LlamaForCausalLM": ("Llama", SIZES | GROUPED),
    "Qwen3ForCausalLM": ("Qwen3", SIZES | GROUPED),
    "GPTNeoXForCausalLM": ("GPTNeoX", SIZES),
    "BertForMaskedLM": ("Bert", SIZES | DRY),
}
LENGTH, BATCH, EVERY, TAIL = 64, 8, 5, 20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to a run; nothing by default."""

    rate: float = 1e-3
    warmup: int = 20
    scaled: float = 1.0
    """Every matrix but the embeddings, at the start."""
    growth: float = 1.0
    """Of the learning rate per step, from 40 % of the run on."""
    noise: tuple[float, float] = (1.0, 1.0)
    """The part of the run whose targets are random."""
    clip: float = 1.0


FAULTS = {
    "healthy": Fault(),
    "healthy, lower rate": Fault(rate=3e-4),
    "rate 50 times": Fault(rate=0.05),
    "no warm-up, rate 20 times": Fault(rate=0.02, warmup=0),
    "rate grows 5 % a step": Fault(growth=1.05),
    "matrices 20 times": Fault(scaled=20.0),
    "random targets for good": Fault(noise=(0.5, 1.0)),
    "no clipping, rate 20 times": Fault(rate=0.02, clip=math.inf),
}


def built(name: str) -> nn.Module:
    prefix, sizes = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{"vocab_size": 256, **sizes})
    found: nn.Module = getattr(transformers, name)(config)
    return found


def scale(model: nn.Module, factor: float) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not any(w in name for w in ("embed", "wte", "wpe")):
            parameter.data.mul_(factor)


def batches(steps: int, fault: Fault, *, masked: bool) -> Callable[[int], Any]:
    """Return a step → inputs and targets; the same for every fault."""
    tokens = standard_library()
    first, last = (share * steps for share in fault.noise)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rng = random.Random(step)
        at = [rng.randrange(len(tokens) - LENGTH) for _ in range(BATCH)]
        x = torch.stack([tokens[i : i + LENGTH] for i in at])
        g = torch.Generator().manual_seed(step)
        y = torch.randint(0, 256, x.shape, generator=g) if first <= step < last else x
        if not masked:
            return x, y
        hidden = torch.rand(x.shape, generator=g) < 0.15
        return x.masked_fill(hidden, 0), y.masked_fill(~hidden, -100)

    return batch


def rate_at(step: int, steps: int, fault: Fault) -> float:
    ramp = min(1.0, (step + 1) / fault.warmup) if fault.warmup else 1.0
    if fault.growth > 1:
        return fault.rate * ramp * fault.growth ** max(0, step - int(0.4 * steps))
    return fault.rate * ramp * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def run(name: str, fault: Fault, steps: int) -> dict[str, Any]:
    """Train once, watched; return the losses' end and what was said when."""
    torch.manual_seed(0)
    model = built(name)
    scale(model, fault.scaled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=fault.rate)
    batch = batches(steps, fault, masked="Masked" in name)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.eqp"
        with watch(model, optimizer, every=EVERY, run=path) as handle:
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(step, steps, fault)
                x, y = batch(step)
                loss = model(input_ids=x, labels=y).loss
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), fault.clip)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        verdict = handle.verdict
        grave = [f for f in handle.findings if f.severity != "info"]
    return {
        "loss": sum(losses[-TAIL:]) / TAIL,
        "state": verdict.state,
        "first warned": grave[0].step if grave else None,
        "by": grave[0].code if grave else "",
        "sentence": verdict.sentence,
    }


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 250
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in FAMILIES:
        healthy = math.nan
        for title, fault in FAULTS.items():
            found = run(name, fault, steps)
            healthy = found["loss"] if title == "healthy" else healthy
            failed = not found["loss"] <= 1.05 * healthy
            rows.append({"model": name, "fault": title, "failed": failed, **found})
            print(rows[-1], flush=True)
    planted = [r for r in rows if r["failed"] and not r["fault"].startswith("healthy")]
    fine = [r for r in rows if not r["failed"]]
    publish(
        "foreign_models",
        rows,
        steps=steps,
        failed=len(planted),
        failed_named=sum(r["state"] != "healthy" for r in planted),
        fine=len(fine),
        fine_called_healthy=sum(r["state"] == "healthy" for r in fine),
    )


if __name__ == "__main__":
    main()
