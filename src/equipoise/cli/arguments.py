"""Arguments that several commands share, declared without torch.

``--help`` reads declarations only, so it answers where torch is not installed.
"""

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.auditing import MODEL_FORMS
from equipoise.errors import InputError
from equipoise.report.offline_pages import check_page_path
from equipoise.store import Run, open_run, runs_directory
from equipoise.store.location import newest

RunOrFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN|DIR",
        help="A run file, or a folder whose newest run is taken; $EQUIPOISE_RUNS or "
        "./runs unless given.",
        show_default=False,
    ),
]


def run_file(given: Path | None) -> Path:
    """Return the run file that was typed, or the newest of a folder."""
    place = runs_directory() if given is None else given
    return newest(place) if given is None or place.is_dir() else place


def opened_run(given: Path | None) -> Run:
    """Return a reader of the run that was typed, or of the newest of a folder."""
    return open_run(run_file(given))


Model = Annotated[
    str, typer.Argument(help=f"The model: {MODEL_FORMS}.", show_default=False)
]
BatchFile = Annotated[
    Path | None,
    typer.Option(
        "--batch",
        help="Inputs, and targets where a loss is asked for: .pt, .safetensors or "
        ".json, name → tensor.",
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text", help="Text to run on, where the model's folder has a tokenizer.json."
    ),
]
RandomTokens = Annotated[
    bool,
    typer.Option(
        "--random-tokens", help="Run on random tokens; every verdict is marked."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of a table.")
]
Rows = Annotated[int, typer.Option(min=1, help="Rows of the table to show.")]


def _page(path: Path | None) -> Path | None:
    """Refuse a page that cannot be written before the work, not after it."""
    return None if path is None else check_page_path(path)


Html = Annotated[
    Path | None, typer.Option("--html", help="Write one offline page.", callback=_page)
]


def _json_path(path: Path | None) -> Path | None:
    """Refuse early what cannot be written, and what is no JSON: weights, perhaps."""
    if path is None:
        return None
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"{path}: name a file in a folder that is there")
    if path.exists() and path.read_bytes()[:1] not in (b"", b"{"):
        raise InputError(f"{path} exists and is no JSON: it was not overwritten")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Write verdict and numbers as JSON.", callback=_json_path
    ),
]


Options = Mapping[str, tuple[type, str]]
"""Name → type and help of an option without a default."""


def with_options(
    table: Options, *, before: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command, which takes those that are given by ``**name``."""
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, typer.Option(help=text)],
        )
        for name, (kind, text) in table.items()
    ]

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def given_only(*words: Any, **values: Any) -> None:
            absent = {name for name in table if values.get(name) is None}
            command(*words, **{k: v for k, v in values.items() if k not in absent})

        return declared(given_only, added, before=before)

    return declare


def declared(
    command: Callable[..., None], added: Sequence[inspect.Parameter], *, before: str
) -> Callable[..., None]:
    """Let a command show more options, in place of ``**name``, before its own one."""
    *shown, _ = inspect.signature(command).parameters.values()
    place = [parameter.name for parameter in shown].index(before)
    parameters = [*shown[:place], *added, *shown[place:]]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def print_json(found: Any, **more: Any) -> None:
    """Print a result as one JSON object: its fields, and what is added by name."""
    fields = plain(found)
    typer.echo(json.dumps({**fields, **plain(more)}, allow_nan=False))


def plain(value: Any) -> Any:
    """Return JSON values: dataclasses as objects, NaN and Inf as text, no tensors."""
    if dataclasses.is_dataclass(value):
        shown = (f.name for f in dataclasses.fields(value) if f.repr)
        return {name: plain(getattr(value, name)) for name in shown}
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return _leaf(value)


def _leaf(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, str | int | float | None) else str(value)
