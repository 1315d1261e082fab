"""Off-sample no device data is read; a sampled step reads it once, and does not wait.

On ``meta`` every read of data raises, so a model there finds each one. Only the one
function that copies readings to the host is replaced, by one that counts. Copies that
take their time have a stand-in whose event says "not yet" for some questions, and whose
numbers are NaN until then.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

import equipoise
from equipoise.probes import capture
from equipoise.watching import Watch
from tests.watching.models import TinyModel, batches, objective
from tests.zoo.handwritten import encoder, lab_gpt, nano_gpt
from tests.zoo.specimens import hugging

META = torch.device("meta")
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "lab GPT": lambda: lab_gpt("rope"),
    "nano GPT": lambda: nano_gpt("sdpa"),
    "nn.TransformerEncoder": lambda: encoder("training"),
    "Llama": lambda: hugging("LlamaForCausalLM", num_key_value_heads=2)("sdpa"),
    "BERT": lambda: hugging("BertModel")("sdpa"),
    "GPT-2": lambda: hugging("GPT2Model", pad_token_id=None)("sdpa"),
}
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam, fused off": lambda p: torch.optim.Adam(p, foreach=False),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    # torch's own, and this one's relative steps, read the weights' scale themselves.
    "Adafactor": lambda p: Adafactor(
        p, lr=1e-3, scale_parameter=False, relative_step=False
    ),
}


class Transfers:
    """Stands in for what moves numbers to the host, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(capture, "start_copy", self._copy)

    def _copy(self, packed: Tensor) -> tuple[Tensor, None]:
        self.count += packed.device == META
        return torch.ones(packed.shape), None

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


class Late:
    """An event that is asked some times before it has happened; then numbers are."""

    def __init__(self, packed: Tensor, questions: int) -> None:
        self._packed, self._left = packed.clone(), questions
        self.buffer, self.waited = torch.full_like(packed, torch.nan), 0

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0 and self._arrive()

    def synchronize(self) -> None:
        self.waited += not self.buffer.equal(self._packed)
        self._arrive()

    def _arrive(self) -> bool:
        self.buffer.copy_(self._packed)
        return True


NEVER = 1 << 30


def late_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, questions: int, steps: int = 9
) -> tuple[Watch, list[Late], list[int]]:
    """Watch every third step; return how many samples are written after each step."""
    events: list[Late] = []

    def copy(packed: Tensor) -> tuple[Tensor, Late]:
        events.append(Late(packed, questions))
        return events[-1].buffer, events[-1]

    if questions:
        monkeypatch.setattr(capture, "start_copy", copy)
    torch.manual_seed(0)
    model = TinyModel()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = equipoise.watch(model, optimiser, run=path, every=3, quiet=True)
    written = []
    for batch in batches(steps):
        objective(model, batch).backward()
        optimiser.step()
        optimiser.zero_grad()
        written.append(len(samples(path)))
    return handle, events, written


def samples(path: Path) -> list[int]:
    run, name = equipoise.open_run(path), "attention.theta.p50"
    found = run.series(name) if name in run.quantities else {}
    return [int(step) for steps, _ in list(found.values())[:1] for step in steps]


@pytest.mark.parametrize(
    ("questions", "written", "waited"),
    [
        (0, [1, 1, 1, 2, 2, 2, 3, 3, 3], 0),
        (2, [0, 0, 1, 1, 1, 2, 2, 2, 3], 0),
        (NEVER, [0, 0, 0, 1, 1, 1, 2, 2, 2], 2),
    ],
)
def test_a_step_is_written_when_it_has_arrived(
    questions: int,
    written: list[int],
    waited: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the latest at the next sample: only there and at the end it is waited for."""
    path = tmp_path / "a.eqp"
    handle, events, found = late_run(path, monkeypatch, questions=questions)
    assert found == written
    assert sum(event.waited for event in events) == waited
    handle.close()
    assert samples(path) == [0, 3, 6]


def test_what_arrives_late_is_what_would_have_been_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every quantity at every step, the loop's own scalars and findings included."""
    runs = []
    for name, questions in (("a", 0), ("b", 2), ("c", NEVER)):
        path = tmp_path / f"{name}.eqp"
        late_run(path, monkeypatch, questions=questions)[0].close()
        runs.append(equipoise.open_run(path))
    for other in runs[1:]:
        assert other.quantities == runs[0].quantities
        assert [*other.findings] == [*runs[0].findings]
        for quantity in other.quantities:
            theirs, ours = other.series(quantity), runs[0].series(quantity)
            assert {
                site: (steps.tolist(), values.tolist())
                for site, (steps, values) in theirs.items()
            } == {
                site: (steps.tolist(), values.tolist())
                for site, (steps, values) in ours.items()
            }, quantity


@pytest.mark.parametrize("what", ["verdict", "state", "raise", "drop"])
def test_whatever_asks_for_a_step_gets_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict, a checkpoint, an exception in the loop, a handle that is dropped."""
    path = tmp_path / "a.eqp"
    handle, _, written = late_run(path, monkeypatch, questions=NEVER, steps=4)
    assert written[-1] == 1
    if what == "verdict":
        assert handle.verdict.state
    elif what == "state":
        handle.state_dict()
    elif what == "raise":
        with pytest.raises(KeyError), handle:
            raise KeyError
    else:
        del handle
        gc.collect()
    assert samples(path) == [0, 3]
