"""Two training steps of a class, alone and watched: every bit, and what is said."""

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from equipoise.watching import Watch
from tests.watching.models import Digest
from tests.zoo.constructed.subjects import Batch, Subject

STEPS, RATE = 3, 1e-3


def trained(subject: Subject, run: Path | None = None) -> tuple[dict[str, str], Any]:
    """Return a digest of everything a training left behind, and its handle."""
    random.seed(0)
    np.random.seed(0)
    model = subject.build("eager").train()
    batch = subject.batch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    torch.manual_seed(1)
    handle = None
    if run is not None:
        handle = equipoise.watch(model, optimizer, run=run, every=1, quiet=True)
    digest = Digest()
    for _ in range(STEPS):
        loss = objective(model, batch)
        loss.backward()
        digest.step(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.close()
    digest.end(model, optimizer)
    streams = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    return {**digest.parts(), "streams": repr(streams)}, handle


def objective(model: nn.Module, batch: Batch) -> Tensor:
    """Predict the next token where there is one for each logit, else any."""
    out: Any = model(**batch)
    logits = out.logits if getattr(out, "logits", None) is not None else out[0]
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    if ids is None or ids.shape != logits.shape[:2]:
        targets = torch.arange(logits[..., 0].numel())
    else:
        logits, targets = logits[:, :-1], ids[:, 1:].flatten()
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits.float(), targets % logits.shape[-1])


def watched(subject: Subject) -> dict[str, Any]:
    """Return whether watching left a mark, and what the run says of its layers."""
    alone, _ = trained(subject)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.eqp"
        beside, handle = trained(subject, path)
        return {
            "marks": [part for part in alone if alone[part] != beside[part]],
            **said(handle),
        }


def said(handle: Watch) -> dict[str, Any]:
    """Return the verdict, the findings about what was not read, and the readings."""
    run = equipoise.open_run(handle.path)
    families = {name.partition(".")[0] for name in run.quantities}
    unread = {f.code for f in handle.findings if f.code.startswith("watch.")}
    broken = {f.code for f in handle.findings if f.code.startswith("probe.")}
    return {
        "verdict": handle.verdict.state,
        "findings": sorted(unread | broken),
        "checks": sorted({f.code for f in handle.findings} - unread - broken),
        "readings": sorted(families),
    }
