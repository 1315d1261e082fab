"""Watch a small training, and read what was seen.

Run: python examples/watch_a_loop.py
"""

import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import equipoise
from equipoise_lab.models.gpt import GPT, GPTConfig

torch.manual_seed(0)
model = GPT(GPTConfig(width=32, depth=2, heads=2, context=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "loop.eqp"
    with equipoise.watch(model, optimizer, run=run, every=5) as handle:
        for _ in range(20):
            tokens = torch.randint(0, 256, (4, 17))
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    seen = equipoise.open_run(run)
    for site, (steps, theta) in seen.series("attention.theta.p50").items():
        print(site, dict(zip(steps.tolist(), theta.mean(-1).round(4), strict=True)))

assert list(steps) == [0, 5, 10, 15]
assert len(seen.info.details["attention"]) == 2 and not handle.findings
