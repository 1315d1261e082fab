"""One micro-batch, stored by reference: run again without a trace, saved, replayed.

Restored after a repeated forward pass: random state (torch on every device in use,
``random``, NumPy) and autocast; buffers (BatchNorm's statistics, spectral norm's
vectors) are never touched. Python attributes that a module changes in its forward are
not restored.

A step can be repeated where its batch, its random state and the weights it started from
were saved. ``watch(..., hold_batch=True)`` saves all three beside the run when the loss
or the gradient norm turns non-finite.
"""

import glob
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.random_state import RandomState
from equipoise.anatomy.sites import unwrapped
from equipoise.errors import InputError, RunFileError
from equipoise.probes.capture import Boundary, Capture, Collector, Table
from equipoise.probes.protocols import Probe
from equipoise.probes.window import CallWrapper, is_compiled

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Autocast:
    """Which devices cast, and to what."""

    dtypes: dict[str, torch.dtype]

    @classmethod
    def now(cls) -> "Autocast":
        on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        return cls({device: torch.get_autocast_dtype(device) for device in on})

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device in DEVICES:
                wanted = device in self.dtypes
                if wanted or torch.is_autocast_enabled(device):
                    # No cache: a copy cast without gradients must not be found there
                    # by the model's next pass.
                    cast = torch.autocast(
                        device,
                        self.dtypes.get(device),
                        enabled=wanted,
                        cache_enabled=False,
                    )
                    stack.enter_context(cast)
            yield


@dataclass(frozen=True, slots=True)
class CallState:
    """What a call depends on besides its arguments and the weights."""

    random_state: RandomState
    autocast: Autocast

    @classmethod
    def now(cls, model: nn.Module) -> "CallState":
        return cls(RandomState.now(model), Autocast.now())


@contextmanager
def isolated(model: nn.Module, call_state: CallState) -> Iterator[None]:
    """Restore that state for the block; undo everything afterwards."""
    before = RandomState.now(model)
    call_state.random_state.restore()
    try:
        with torch.no_grad(), call_state.autocast.entered():
            yield
    finally:
        before.restore()


def called_on_copies(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a model's output while its buffers are copies.

    Restoring them in place would not do: a backward pass that has yet to come would
    find that what it saved was written to.
    """
    copies = {name: b.detach().clone() for name, b in model.named_buffers()}
    return functional_call(model, copies, args, kwargs)


# What only wraps a call. FSDP's wrapper is not here: it gathers the weights.
TRANSPARENT = {"OptimizedModule", "DistributedDataParallel", "DataParallel"}


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call of the model, and the state it ran in."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call_state: CallState

    def replay(self, model: nn.Module) -> Any:
        """Return the model's output for it now, eagerly, without gradients.

        Compiled code stays compiled: the stance only makes this one call run the
        Python that was compiled.
        """
        inner = _called(model)
        with (
            isolated(inner, self.call_state),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            # A compiled block's wrapper warns of the global hooks we read with.
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            return called_on_copies(inner, self.args, self.kwargs)


def _called(model: nn.Module) -> nn.Module:
    while type(model).__name__ in TRANSPARENT:
        inner = getattr(model, "_orig_mod", None)
        model = cast(nn.Module, model.module if inner is None else inner)
    return model


class BatchCapture:
    """Stores the first micro-batch that counts, without touching compiled code."""

    def __init__(
        self,
        model: nn.Module,
        *,
        only_training: bool,
        stored: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._only_training, self._stored = model, only_training, stored
        self.batch: Batch | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Store a call of the model during the block."""
        wrapper = CallWrapper(self._model, self._store, lambda module: None)
        try:
            yield
        finally:
            wrapper.remove()

    def _store(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling() or self.batch is not None:
            return
        if torch.is_grad_enabled() or not self._only_training:
            now = CallState.now(unwrapped(self._model))
            self.batch = Batch(args, dict(kwargs), now)
            self._stored()


class HeldBatch:
    """The batch of the step under way, stored by reference until the next one."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._stack = model, ExitStack()
        self._capture: BatchCapture | None = None

    def get(self) -> Batch | None:
        return None if self._capture is None else self._capture.batch

    def renew(self, only_training: bool) -> None:
        """Drop the last batch, and store the next."""
        self._stack.close()
        self._capture = BatchCapture(self._model, only_training=only_training)
        self._stack.enter_context(self._capture.installed())

    def close(self) -> None:
        """Take the hook off; the last batch stays until this is dropped."""
        self._stack.close()


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the names of the modules that torch.compile has compiled.

    Example:
        >>> compiled_parts(nn.Linear(2, 2)), compiled_parts(torch.compile(nn.ReLU()))
        ([], [''])
    """
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "OptimizedModule" or is_compiled(module)
    ]


def bundle_path(run: Path, step: int) -> Path:
    """Return where the step of a run is saved.

    >>> bundle_path(Path("runs/a.eqp"), 7).as_posix()
    'runs/a.eqp.step-7.pt'
    """
    return run.with_name(f"{run.name}.step-{step}.pt")


def bundles(run: Path) -> dict[int, Path]:
    """Return the steps of a run that can be repeated."""
    # Escaped: a run may be called lr[1e-3].eqp.
    found = run.parent.glob(f"{glob.escape(run.name)}.step-*.pt")
    numbers = ((p.name.rsplit("-", 1)[1].removesuffix(".pt"), p) for p in sorted(found))
    return {int(number): path for number, path in numbers if number.isdecimal()}


def save_step(path: Path, batch: Batch, model: nn.Module) -> None:
    """Keep a step: its batch, the state it ran in and the weights before the update."""
    random_state = batch.call_state.random_state
    numpy = random_state.numpy
    torch.save(
        {
            "args": batch.args,
            "kwargs": batch.kwargs,
            "weights": model.state_dict(),
            "training": model.training,
            "host": random_state.host,
            "cuda": random_state.cuda,
            "python": random_state.python,
            "numpy": None
            if numpy is None
            else [numpy[0], numpy[1].tolist(), *numpy[2:]],
            "autocast": batch.call_state.autocast.dtypes,
        },
        path,
    )


def load_step(path: Path, model: nn.Module) -> Batch:
    """Return the batch of a saved step, and put its weights into the model.

    Raises:
        RunFileError: If there is no such file.
        InputError: If the weights are not this model's, or the batch holds objects
            that cannot be loaded safely.
    """
    if not path.is_file():
        raise RunFileError(f"{path}: no such step; {NEEDED}")
    try:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["weights"])
        model.train(saved["training"])
        random_state = RandomState(
            saved["host"], saved["cuda"], saved["python"], saved["numpy"]
        )
        now = CallState(random_state, Autocast(saved["autocast"]))
        return Batch(saved["args"], saved["kwargs"], now)
    except (pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise InputError(f"{path}: cannot be loaded safely ({error})") from error
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: does not fit this model ({reason})") from error


NEEDED = (
    "a step can be repeated where batch, random state and weights were saved: watch "
    "with hold_batch=True, which saves them when a loss turns non-finite"
)


def measure(model: nn.Module, batch: Batch, probes: list[Probe]) -> Table:
    """Return what the probes read in one step, repeated."""
    emit, boundary = Collector(), Boundary(strict=True)
    with Capture(probes, anatomy_of(model), emit, boundary=boundary).open():
        batch.replay(model)
    return emit.pop()
