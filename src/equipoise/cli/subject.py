"""The model that a command is about, its batch, and where its page goes.

Nobody's code is trusted here: what a model, or the function that makes it, raises is
one line that names it. ``EQUIPOISE_TRACEBACK=1`` shows where it was raised.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from equipoise.auditing.subject import FORMS, Batch, loaded, loaded_batch, output_of
from equipoise.errors import EquipoiseError, InputError
from equipoise.lab.running.saved_runs import is_ours, reopened
from equipoise.report.pages import page_place

Model = Annotated[str, typer.Argument(help=f"The model: {FORMS}.", show_default=False)]
BatchFile = Annotated[
    Path | None,
    typer.Option(
        "--batch",
        help="Inputs, and targets where a loss is asked for: .pt, .safetensors or "
        ".json, name → tensor.",
    ),
]
Rows = Annotated[int, typer.Option(min=1, help="Rows of the table to show.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write one offline page.", callback=lambda p: _page(p)),
]
# What Python and torch raise; an interruption or a call of exit() is not ours to read.
FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)


def _page(path: Path | None) -> Path | None:
    """Refuse a page that cannot be written before the work, not after it."""
    return None if path is None else page_place(path)


@contextmanager
def somebodys_code(what: str) -> Iterator[None]:
    """Turn what somebody's code raises into one line."""
    try:
        yield
    except EquipoiseError:
        raise
    except FAULTS as error:
        raise InputError(f"{what}: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """Return an exception's kind and the first line of what it says."""
    said = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {said[0]}"


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
    with somebodys_code(spec):
        model, own = _opened(spec, tokens, targets)
    return model.eval(), own if given is None else given


def _opened(spec: str, tokens: int, targets: bool) -> tuple[nn.Module, Any]:
    if not is_ours(Path(spec)):
        return loaded(spec, tokens=tokens)
    model, pair = reopened(Path(spec))
    return model, pair if targets else pair[0]


def tried(spec: str, model: nn.Module, batch: Batch | None) -> Batch:
    """Return the batch when the model can be called on it."""
    if batch is None:
        raise InputError(f"{spec} came without a batch: give one with --batch")
    with somebodys_code(f"{spec} cannot be called on this batch"), torch.no_grad():
        output_of(model, batch)
    return batch
