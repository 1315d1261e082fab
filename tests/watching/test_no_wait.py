"""Off-sample no device data is read; a sampled step reads it once.

On ``meta`` every read of data raises, so a model there finds each one. Only the one
function that moves readings to the host is replaced, by one that counts.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise
from equipoise.probes import capture
from equipoise.watching import Watch, step_readings
from tests.zoo.handwritten import encoder, lab_gpt, nano_gpt
from tests.zoo.specimens import hugging

META = torch.device("meta")
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "lab GPT": lambda: lab_gpt("rope"),
    "nano GPT": lambda: nano_gpt("sdpa"),
    "nn.TransformerEncoder": lambda: encoder("training"),
    "Llama": lambda: hugging("LlamaForCausalLM", num_key_value_heads=2)("sdpa"),
    "BERT": lambda: hugging("BertModel")("sdpa"),
}
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam, fused off": lambda p: torch.optim.Adam(p, foreach=False),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


class Transfers:
    """Stands in for what moves numbers to the host, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for module in (capture, step_readings):
            monkeypatch.setattr(module, "to_host", self._move)

    def _move(self, tensors: Iterable[Tensor]) -> list[tuple[float, ...]]:
        tensors = list(tensors)
        self.count += any(t.device == META for t in tensors)
        return [(1.0,) * t.numel() for t in tensors]

    def pop(self) -> int:
        count, self.count = self.count, 0
        return count


def _loss(model: nn.Module) -> Tensor:
    if isinstance(model, nn.TransformerEncoder | nn.Sequential):
        out: Any = model(torch.zeros(2, 7, 32, device=META))
    else:
        out = model(torch.zeros(2, 7, dtype=torch.long, device=META))
    for name in ("logits", "last_hidden_state"):
        out = getattr(out, name, out)
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


def trained(
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    transfers: Transfers,
    **options: Any,
) -> tuple[list[int], Watch]:
    """Return how often each of four steps read data; every other one is sampled."""
    model = model.to(META)
    optimiser = make(model.parameters())
    counts = []
    with equipoise.watch(model, optimiser, every=2, quiet=True, **options) as handle:
        transfers.pop()
        for _ in range(4):
            _loss(model).backward()
            optimiser.step()
            optimiser.zero_grad()
            counts.append(transfers.pop())
        transfers.pop()
    return counts, handle


@pytest.mark.parametrize("preset", ["minimal", "default"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sampled_step_reads_data_once(
    family: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, _ = trained(
        FAMILIES[family](),
        torch.optim.AdamW,
        Transfers(monkeypatch),
        preset=preset,
        run=tmp_path / "a.eqp",
        strict=True,
    )
    assert counts == [1, 0, 1, 0]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_so_does_it_under_any_optimiser(
    optimiser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, _ = trained(
        lab_gpt("rope"),
        OPTIMISERS[optimiser],
        Transfers(monkeypatch),
        run=tmp_path / "a.eqp",
        strict=True,
    )
    assert counts == [1, 0, 1, 0]


def test_deep_names_what_reads_data_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharpness is a search on the host, and fragility looks for damaged rows there."""
    counts, handle = trained(
        lab_gpt("rope"),
        torch.optim.AdamW,
        Transfers(monkeypatch),
        preset="deep",
        run=tmp_path / "a.eqp",
    )
    assert counts == [1, 0, 1, 0]
    failed = {f.message.split()[1] for f in handle.findings if f.rule == "probe.failed"}
    assert failed == {"curvature", "fragility"}
