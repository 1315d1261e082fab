"""Open the model, batch and optimiser of a command, from what the user typed.

The user's code is not trusted here: what a model, or the function that makes it, raises
becomes one line that names it. ``EQUIPOISE_TRACEBACK=1`` shows where it was raised.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from equipoise.auditing.subject import (
    MAKE,
    UNPICKLING,
    Batch,
    ModelAndBatch,
    ModelSource,
    loaded,
    loaded_batch,
    output_of,
)
from equipoise.cli.plugins import subject_in
from equipoise.errors import EquipoiseError, InputError


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn what the user's code and files raise into one line."""
    try:
        yield
    except EquipoiseError:
        raise
    # A boundary, like the CLI's main: libraries raise errors of their own for a broken
    # file (SafetensorError, UnpicklingError, a bare Exception from tokenizers).
    except Exception as error:
        raise InputError(f"{what}: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """Return an exception's kind and the first line of its message."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def subject(
    spec: str,
    batch: Path | None,
    *,
    text: Path | None = None,
    random_tokens: bool = False,
    tokens: int = 64,
    targets: bool = False,
    wanted: bool = True,
) -> ModelAndBatch:
    """Return the model that was typed, in evaluation mode, and a batch for it if any.

    Args:
        spec: As typed.
        batch: A file with a batch; read first, since weights may take minutes.
        text: A file of text, for the model's own tokenizer.
        random_tokens: Whether random tokens are wanted.
        tokens: Length of a sequence of text or of random tokens.
        targets: Whether a batch of a run's own data is (inputs, targets), or the
            inputs alone.
        wanted: Whether nothing can be done without a batch: said before loading.
    """
    if sum((batch is not None, text is not None, random_tokens)) > 1:
        raise InputError("--batch, --text and --random-tokens: give one of them")
    given = None if batch is None else loaded_batch(batch)
    if given is None and not random_tokens and wanted:
        _check_tokens(Path(spec), text)
    with user_code(spec):
        found = _installed_subject(Path(spec), targets)
        if found is None:
            found = loaded(spec, text=text, random_tokens=random_tokens, tokens=tokens)
    found.model.eval()
    if given is None:
        return found
    return found._replace(batch=given, source=ModelSource(name=f"the batch in {batch}"))


def _check_tokens(path: Path, text: Path | None) -> None:
    """Refuse a model directory that no batch can be made for, before it is loaded."""
    if not (path / "config.json").is_file():
        return
    if not (path / "tokenizer.json").is_file():
        named = "--text needs a tokenizer.json, and" if text else "no batch, and"
        raise InputError(
            f"{named} {path} has none: give a batch with {MAKE}; "
            "--random-tokens runs it on noise"
        )
    if text is not None and not text.is_file():
        raise InputError(f"{text}: no such file of text")


def _installed_subject(path: Path, targets: bool) -> ModelAndBatch | None:
    """Return the model that an installed package makes of a folder of its format."""
    # A folder with a configuration is Hugging Face's: no package is loaded for it.
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    opened = subject_in(path)
    if opened is None:
        return None
    model, pair = opened
    source = ModelSource(name="a batch of the run's own data")
    return ModelAndBatch(model, pair if targets else pair[0], source)


def checked_batch(spec: str, found: ModelAndBatch) -> Batch:
    """Return the batch when the model can be called on it."""
    batch = needed(spec, found)
    with user_code(f"{spec} cannot be called on this batch"), torch.no_grad():
        output_of(found.model, batch)
    return batch


def loss_batch(spec: str, found: ModelAndBatch) -> Any:
    """Return a batch of which the model has a loss."""
    # Here, not above: no other command needs what curvature is made of.
    from equipoise.auditing.curvature.objective import calls, mean_loss

    batch = needed(spec, found)
    with user_code(f"{spec} has no loss on this batch"), torch.no_grad():
        for part in calls(found.model, batch):
            mean_loss(found.model(*part.args, **part.kwargs), part.target)
    return batch


def needed(spec: str, found: ModelAndBatch) -> Batch:
    """Return the batch, or say how to give one."""
    if found.batch is None:
        raise InputError(
            f"{spec} came without a batch: give one with {MAKE}, or --text FILE where "
            "it has a tokenizer.json; --random-tokens runs it on noise"
        )
    return found.batch


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
