"""Off-sample no device data is read; a sampled step reads it once, and does not wait.

On ``meta`` every read of data raises, so a model there finds each one. Only the one
function that copies readings to the host is replaced, by one that counts. Copies to the
device that a GPU would be waited for are found by their operations. Copies that take
their time have a stand-in whose event says "not yet" for some questions, and whose
numbers are NaN until then.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.optimization import Adafactor

import equipoise
from equipoise.numerics.spectra import tracking
from equipoise.probes import sharding
from equipoise.watching import Watch, start
from equipoise.watching.ranks.group import SingleRank
from equipoise.watching.ranks.merge import RankSample
from tests.watching.models import Late, TinyModel, batches, objective
from tests.zoo.handwritten import encoder, lab_gpt, nano_gpt
from tests.zoo.specimens import hugging

META = torch.device("meta")
HANDED_ON = ("__torch_function__", "_backward")
"""Functions of ours that only pass on what the model itself does."""
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "lab GPT": lambda: lab_gpt("rope"),
    "nano GPT": lambda: nano_gpt("sdpa"),
    "nn.TransformerEncoder": lambda: encoder("training"),
    "Llama": lambda: hugging("LlamaForCausalLM", num_key_value_heads=2)("sdpa"),
    "BERT": lambda: hugging("BertForMaskedLM")("sdpa"),
    "GPT-2": lambda: hugging("GPT2LMHeadModel", pad_token_id=None)("sdpa"),
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


class ToDevice(TorchDispatchMode):
    """Finds what moves numbers from the host to the device in a way that waits.

    Our own calls only: a model may do so as it likes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        host = [x for x in given if x.is_cpu]
        device = [x for x in (*given, *tree_leaves(out)) if getattr(x, "is_meta", 0)]
        copies = "copy" in func.__name__
        # A number alone is an argument of the kernel, and not copied.
        waits = not kwargs.get("non_blocking") if copies else any(x.ndim for x in host)
        if host and device and waits:
            self.note(func.__name__)
        return out

    def note(self, what: str) -> None:
        frame: Any = sys._getframe(2)
        while frame.f_globals["__name__"].startswith(("torch.", __name__)):
            if frame.f_back is None:
                return
            frame = frame.f_back
        module, name = frame.f_globals["__name__"], frame.f_code.co_name
        if module.startswith("equipoise.") and name not in HANDED_ON:
            self.found.add(f"{what} in {module}.{name}")


class MadeThere(TorchFunctionMode):
    """Finds tensors that are made of numbers on the device: torch copies and waits."""

    def __init__(self, found: ToDevice) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        there = torch.device(kwargs.get("device") or "cpu") == META
        like = name == "new_tensor" and args[0].device == META
        if like or (name in ("tensor", "as_tensor", "asarray") and there):
            self._found.note(name)
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a norm's iteration is the same code, and slow on ``meta``."""
    monkeypatch.setattr(tracking, "COLD_STEPS", 2)
    monkeypatch.setattr(tracking, "_SQUARINGS", 2)


class Transfers:
    """Stands in for what moves numbers to the host, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(sharding, "start_copy", self._copy)

    def _copy(self, packed: Tensor) -> tuple[Tensor, None]:
        self.count += packed.device == META
        return torch.ones(packed.shape), None

    def pop(self) -> int:
        count, self.count = self.count, 0
        return count


def _loss(model: nn.Module, length: int) -> Tensor:
    if isinstance(model, nn.TransformerEncoder | nn.Sequential):
        out: Any = model(torch.zeros(2, length, 32, device=META))
    else:
        out = model(torch.zeros(2, length, dtype=torch.long, device=META))
    for name in ("logits", "last_hidden_state"):
        out = getattr(out, name, out)
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


def trained(
    model: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    transfers: Transfers,
    *,
    length: int = 7,
    copied: ToDevice | None = None,
    **options: Any,
) -> tuple[list[int], Watch]:
    """Return how often each of four steps read data; every other one is sampled.

    ``copied`` finds what is copied to the device and waited for.
    """
    model = model.to(META)
    optimiser = make(model.parameters())
    counts = []
    looking = (copied, MadeThere(copied)) if copied else (nullcontext(), nullcontext())
    with equipoise.watch(model, optimiser, every=2, quiet=True, **options) as handle:
        transfers.pop()
        for _ in range(4):
            with looking[1], looking[0]:
                _loss(model, length).backward()
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
    copied = ToDevice() if preset == "default" else None
    counts, _ = trained(
        FAMILIES[family](),
        torch.optim.AdamW,
        Transfers(monkeypatch),
        copied=copied,
        preset=preset,
        run=tmp_path / "a.eqp",
        strict=True,
    )
    assert counts == [1, 0, 1, 0] and not (copied and copied.found)


class TwoRanks(SingleRank):
    """The first of two ranks that read the same."""

    count = 2

    def exchange(self, message: RankSample) -> Sequence[RankSample]:
        return [message, RankSample.from_bytes(message.to_bytes())]


@pytest.mark.parametrize(
    ("family", "ranks"), [("lab GPT", TwoRanks), ("Llama", SingleRank)]
)
def test_so_does_it_with_sampled_rows_and_several_ranks(
    family: str,
    ranks: type[SingleRank],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of twenty rows sixteen are read; what only all ranks can read comes along."""
    monkeypatch.setattr(start, "connect_ranks", ranks)
    copied = ToDevice()
    counts, handle = trained(
        FAMILIES[family](),
        torch.optim.AdamW,
        Transfers(monkeypatch),
        length=20,
        copied=copied,
        rows=16,
        run=tmp_path / "a.eqp",
        strict=True,
    )
    assert counts == [1, 0, 1, 0] and not copied.found
    names = equipoise.open_run(handle.path).quantities
    assert {"attention.theta.p50.error", "precision.kappa_softmax"} <= set(names)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_so_does_it_under_any_optimiser(
    optimiser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = ToDevice() if optimiser == "SGD" else None
    counts, _ = trained(
        lab_gpt("rope"),
        OPTIMISERS[optimiser],
        Transfers(monkeypatch),
        copied=copied,
        run=tmp_path / "a.eqp",
        strict=True,
    )
    assert counts == [1, 0, 1, 0] and not (copied and copied.found)


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
    failed = {f.code for f in handle.findings if f.belongs_to("probe.failed")}
    assert failed == {"probe.failed.curvature", "probe.failed.fragility"}


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
        monkeypatch.setattr(sharding, "start_copy", copy)
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


@pytest.mark.parametrize("what", ["flush", "state", "raise", "drop"])
def test_whatever_asks_for_a_step_gets_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush, a checkpoint, an exception in the loop, a handle that is dropped."""
    path = tmp_path / "a.eqp"
    handle, _, written = late_run(path, monkeypatch, questions=NEVER, steps=4)
    assert written[-1] == 1
    if what == "flush":
        assert handle.verdict.step == 0 and not handle.should_stop and repr(handle)
        assert samples(path) == [0], "a query writes nothing"
        handle.flush()
        assert handle.verdict.step == 3
    elif what == "state":
        handle.state_dict()
    elif what == "raise":
        with pytest.raises(KeyError), handle:
            raise KeyError
    else:
        del handle
        gc.collect()
    assert samples(path) == [0, 3]
