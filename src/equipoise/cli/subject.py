"""Open the model, batch and optimiser of a command, from what the user typed.

The user's code is not trusted here: what a model, or the function that makes it, raises
becomes one line that names it. ``EQUIPOISE_TRACEBACK=1`` shows where it was raised.
"""

import __future__

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from equipoise.auditing.curvature.objective import calls, mean_loss
from equipoise.auditing.subject import (
    UNPICKLING,
    Batch,
    loaded,
    loaded_batch,
    output_of,
)
from equipoise.errors import EquipoiseError, InputError

TEXT_SHAPE = (4, 32)
"""Sequences and tokens of the text that stands in where no batch is given."""
# What Python and torch raise; an interruption or a call of exit() is left alone.
FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn what the user's code raises into one line."""
    try:
        yield
    except EquipoiseError:
        raise
    except FAULTS as error:
        raise InputError(f"{what}: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """Return an exception's kind and the first line of its message."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def subject(
    spec: str, batch: Path | None, *, tokens: int = 64, targets: bool = False
) -> tuple[nn.Module, Any]:
    """Return the model that was typed, in evaluation mode, and a batch for it if any.

    Args:
        spec: As typed.
        batch: A file with a batch; read first, since weights may take minutes.
        tokens: Length, where a batch has to be made up.
        targets: Whether a run of the lab gives (inputs, targets), or inputs alone.
    """
    given = None if batch is None else loaded_batch(batch)
    with user_code(spec):
        model, own = _opened(spec, tokens, targets)
    return model.eval(), own if given is None else given


def _opened(spec: str, tokens: int, targets: bool) -> tuple[nn.Module, Any]:
    if not is_lab_folder(Path(spec)):
        return loaded(spec, tokens=tokens)
    # Only for a run of the lab: a user's own model must not load the lab.
    from equipoise.lab.running.saved_runs import reopened

    model, pair = reopened(Path(spec))
    return model, pair if targets else pair[0]


def is_lab_folder(path: Path) -> bool:
    """Say whether a folder is a run of the lab, or a checkpoint inside one.

    Asked of the files alone, so that the lab is imported only when it is needed.
    """
    return (path / "run.eqp").is_file() or (path / "state.json").is_file()


def checked_batch(spec: str, model: nn.Module, batch: Batch | None) -> Batch:
    """Return the batch when the model can be called on it."""
    if batch is None:
        raise InputError(f"{spec} came without a batch: give one with --batch")
    with user_code(f"{spec} cannot be called on this batch"), torch.no_grad():
        output_of(model, batch)
    return batch


def loss_batch(spec: str, model: nn.Module, batch: Any) -> Any:
    """Return a batch of which the model has a loss; text is used if there is none."""
    given = _text_batch(spec, model) if batch is None else batch
    with user_code(f"{spec} has no loss on this batch"), torch.no_grad():
        for part in calls(model, given):
            mean_loss(model(*part.args, **part.kwargs), part.target)
    return given


def _text_batch(spec: str, model: nn.Module) -> Tensor:
    """Return the first bytes of Python's own library, for a model that reads tokens."""
    words = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not words:
        raise InputError(f"{spec} came without a batch: give one with --batch")
    B, T = TEXT_SHAPE
    text = Path(__future__.__file__).read_bytes()[: B * T]
    return torch.tensor(list(text)).view(B, T) % max(words)


def optimizer_for(
    model: nn.Module, state: Path | None, *, lr: float | None, momentum: float
) -> Optimizer | None:
    """Return the Adam whose state was given, else SGD at ``lr``, if that was given."""
    if state is None:
        if lr is None:
            return None
        return SGD(model.parameters(), lr=lr, momentum=momentum)
    if not state.is_file():
        raise InputError(f"{state}: no such file")
    adam = AdamW([p for p in model.parameters() if p.requires_grad])
    try:
        adam.load_state_dict(torch.load(state, weights_only=True))
    except UNPICKLING as error:
        raise InputError(
            f"{state} is not the state of one group of this model's parameters "
            f"({in_one_line(error)}); in Python, "
            "equipoise.auditing.curvature.edge_of_stability takes any"
        ) from error
    for group in adam.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    return adam
