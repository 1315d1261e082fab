"""``equipoise export RUN``: readings as CSV, Parquet, JSON lines or TensorBoard."""

import csv
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from equipoise.cli.arguments import RunOrFolder, opened_run
from equipoise.cli.progress import Spinner, working
from equipoise.errors import InputError
from equipoise.sinks import sink
from equipoise.store import Run
from equipoise.store.tables import (
    arrow_part,
    arrow_schema,
    chosen,
    library,
    long_tables,
    to_arrow,
    wide_table,
)

EXAMPLES = (
    "equipoise export runs/mine.eqp --csv mine.csv",
    'equipoise export --wide --quantities "loss,router.*" --parquet x.parquet',
    "equipoise export runs/mine.eqp --tensorboard logs/",
)
LONG = ("step", "quantity", "site", "head", "value")
STANDARD_OUTPUT = Path("-")

Csv = Annotated[Path | None, typer.Option("--csv", help="To this CSV file; - prints.")]
Jsonl = Annotated[
    Path | None, typer.Option("--jsonl", help="To this file of JSON lines; - prints.")
]
Parquet = Annotated[
    Path | None, typer.Option("--parquet", help="To this Parquet file (pyarrow).")
]
TensorBoard = Annotated[
    Path | None,
    typer.Option("--tensorboard", help="To this folder, as TensorBoard event files."),
]


def command(
    run: RunOrFolder = None,
    *,
    csv: Csv = None,
    jsonl: Jsonl = None,
    parquet: Parquet = None,
    tensorboard: TensorBoard = None,
    quantities: Annotated[
        str | None,
        typer.Option(
            help='Names or patterns, such as "loss,attention.*"; all by default.'
        ),
    ] = None,
    wide: Annotated[
        bool,
        typer.Option("--wide", help="One row per step, not one row per value."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that exist.")
    ] = False,
) -> None:
    """Export the readings of a run for other programs."""
    targets = {"csv": csv, "jsonl": jsonl, "parquet": parquet, "tb": tensorboard}
    given = {kind: path for kind, path in targets.items() if path is not None}
    _check(given, wide=wide, force=force)
    source = opened_run(run)
    names = quantities.split(",") if quantities else None
    total = len(chosen(source, names)) * len(given)
    for kind, path in given.items():
        with working(f"writing {path}", total=total) as shown:
            WRITERS[kind](source, path, names, wide=wide, shown=shown)
        if path != STANDARD_OUTPUT:
            typer.echo(f"wrote {path}")


def _check(given: dict[str, Path], *, wide: bool, force: bool) -> None:
    if not given:
        raise InputError("say where to: --csv, --jsonl, --parquet or --tensorboard")
    if wide and "tb" in given:
        raise InputError("--wide has no meaning for --tensorboard: leave one out")
    for path in given.values():
        if path.is_file() and not force:
            raise InputError(f"{path} exists: --force replaces it")


@contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """Write a whole file or none; ``-`` is standard output."""
    if path == STANDARD_OUTPUT:
        yield sys.stdout
        return
    with _draft(path) as draft:
        with draft.open("w", encoding="utf-8", newline="") as stream:
            yield stream


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """Yield a file beside the wanted one, which takes its place when all is well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        draft.replace(path)
    except OSError as error:
        if error.filename not in (draft, str(draft)):
            raise
        raise InputError(f"{path}: {error.strerror}") from error
    finally:
        with suppress(OSError):  # it was moved, or could not be made
            draft.unlink()


def _rows(
    run: Run, names: list[str] | None, *, wide: bool, shown: Spinner
) -> Iterator[tuple[Any, ...]]:
    """Yield the header, then every row."""
    if wide:
        table = wide_table(run, names)
        yield ("step", *table.columns)
        for i, step in enumerate(table.step.tolist()):
            cells = ((table.recorded[n][i], x[i]) for n, x in table.columns.items())
            yield (step, *(float(x) if there else None for there, x in cells))
        return
    yield LONG
    for part in long_tables(run, names):
        columns = (c.tolist() for c in (part.step, part.site, part.head, part.value))
        for step, site, head, value in zip(*columns, strict=True):
            yield (step, part.quantity, part.sites[site], head, value)
        shown.advance()


def _csv(
    run: Run, path: Path, names: list[str] | None, *, wide: bool, shown: Spinner
) -> None:
    with _written(path) as stream:
        rows = _rows(run, names, wide=wide, shown=shown)
        csv.writer(stream, lineterminator="\n").writerows(rows)


def _jsonl(
    run: Run, path: Path, names: list[str] | None, *, wide: bool, shown: Spinner
) -> None:
    with _written(path) as stream:
        rows = _rows(run, names, wide=wide, shown=shown)
        header = next(rows)
        for row in rows:
            pairs = zip(header, row, strict=True)
            cells = {name: _plain(cell) for name, cell in pairs if cell is not None}
            stream.write(json.dumps(cells, allow_nan=False) + "\n")


def _plain(cell: Any) -> Any:
    """Return NaN and Inf as text, since JSON has neither."""
    broken = isinstance(cell, float) and not math.isfinite(cell)
    return repr(cell) if broken else cell


def _parquet(
    run: Run, path: Path, names: list[str] | None, *, wide: bool, shown: Spinner
) -> None:
    parquet = library("pyarrow.parquet")
    with _draft(path) as draft:
        if wide:
            parquet.write_table(to_arrow(run, names, form="wide"), draft)
            return
        with parquet.ParquetWriter(draft, arrow_schema()) as writer:
            for part in long_tables(run, names):
                writer.write_table(arrow_part(part))
                shown.advance()


def _tensorboard(
    run: Run, path: Path, names: list[str] | None, *, wide: bool, shown: Spinner
) -> None:
    """Write the mean over heads, as the sink of the same name does."""
    files = sink(f"tensorboard:{path}", run=run.path)
    try:
        for quantity in chosen(run, names):
            for site, (steps, values) in run.series(quantity).items():
                tag = f"{quantity}/{site}" if site else quantity
                means = values.reshape(len(steps), -1).mean(1)
                for step, mean in zip(steps.tolist(), means.tolist(), strict=True):
                    files.log({tag: mean}, step)
            shown.advance()
    finally:
        getattr(files, "close", lambda: None)()


WRITERS = {"csv": _csv, "jsonl": _jsonl, "parquet": _parquet, "tb": _tensorboard}
