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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.auditing import MODEL_FORMS
from equipoise.errors import InputError

if TYPE_CHECKING:
    from equipoise.store import Run

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
    # Here, not above: a command without a run loads no store.
    from equipoise.store import runs_directory
    from equipoise.store.location import newest

    place = runs_directory() if given is None else given
    return newest(place) if given is None or place.is_dir() else place


def opened_run(given: Path | None) -> "Run":
    """Return a reader of the run that was typed, or of the newest of a folder."""
    from equipoise.store import open_run

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
Rows = Annotated[int, typer.Option(min=1, help="Rows of the table to show.")]


def _page(path: Path | None) -> Path | None:
    """Refuse a page that cannot be written before the work, not after it."""
    if path is None:
        return None
    from equipoise.report.offline_pages import check_page_path

    return check_page_path(path)


Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="[FILE.html]",
        help="Write one offline page, to COMMAND.html if no file is named.",
        callback=_page,
    ),
]


PRINTED = Path("-")
"""Where JSON goes if ``--json`` names no file: to the screen, in the table's place."""


def _json_path(path: Path | None) -> Path | None:
    """Refuse early a path that cannot be written, or a file that is not JSON."""
    if path is None or path == PRINTED:
        return path
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"{path}: name a file in a folder that is there")
    if path.exists() and path.read_bytes()[:1] not in (b"", b"{", b"["):
        raise InputError(f"{path} exists and is not JSON: it was not overwritten")
    return path


Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[FILE.json]",
        help="Print JSON in place of the table, or write it to this file.",
        callback=_json_path,
    ),
]


def with_targets(words: Sequence[str]) -> list[str]:
    """Return a command's words with what ``--json`` and ``--html`` alone mean.

    The word after them is their file if it looks like one: in ``runs --json sweeps``
    the folder is what to list. What follows a script's name is the script's own.

    >>> with_targets(["runs", "--json", "sweeps"])
    ['runs', '--json', '-', 'sweeps']
    >>> with_targets(["audit", "m.pt", "--json", "m.json"])
    ['audit', 'm.pt', '--json', 'm.json']
    >>> with_targets(["audit", "m.pt", "--html"])
    ['audit', 'm.pt', '--html', 'audit.html']
    """
    found: list[str] = []
    for at, word in enumerate(words):
        if word == "--" or word.endswith(".py"):
            return [*found, *words[at:]]
        found.append(word)
        after = words[at + 1] if at + 1 < len(words) else ""
        if word == "--json" and after != "-" and not after.endswith(".json"):
            found.append("-")
        if word == "--html" and _is_no_page(after):
            found.append(f"{words[0]}.html")
    return found


def _is_no_page(word: str) -> bool:
    """Say whether the word behind ``--html`` is something else: nothing, or a run."""
    other = (".eqp", ".safetensors", ".index.json", ".pt", ".pth", ".bin", ".gguf")
    return not word or word.startswith("-") or word.endswith(other)


def put_json(text: str, target: Path) -> bool:
    """Print JSON, or write it where it was asked for; say whether it was printed."""
    if target == PRINTED:
        typer.echo(text)
        return True
    target.write_text(f"{text}\n", encoding="utf-8")
    typer.echo(f"wrote {target}", err=True)
    return False


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


def as_json(found: Any, **more: Any) -> str:
    """Return a result as one JSON object: its fields, and what is added by name."""
    fields = plain(found)
    return json.dumps({**fields, **plain(more)}, allow_nan=False)


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
