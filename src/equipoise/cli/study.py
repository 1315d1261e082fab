"""The commands that study a model on a batch: shared options, opening, reporting.

A command declares what is its own. :func:`studies` adds MODEL, ``--batch``, ``--text``,
``--random-tokens``, ``--rows``, ``--html`` and ``--json``, and shows the result.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from equipoise.cli.arguments import (
    BatchFile,
    Html,
    Json,
    Model,
    RandomTokens,
    Rows,
    TextFile,
    as_json,
    declared,
    put_json,
)
from equipoise.cli.progress import Spinner, working

if TYPE_CHECKING:
    from equipoise.auditing.subject import ModelAndBatch, ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutput:
    """What a command measured, and how it is shown."""

    result: Any
    source: "ModelSource | None"
    page: Any
    """The module with its ``print_study`` and ``write_study``."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What ``--json`` prints beside the result's fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyArgs:
    """The model and data that were typed; opened once the options are checked."""

    model: str
    batch: Path | None
    text: Path | None
    random_tokens: bool
    shown: Spinner

    def opened(self, doing: str, **options: Any) -> "ModelAndBatch":
        """Return the model and its batch; show ``doing`` from then on."""
        from equipoise.cli.subject import subject  # loads torch

        given: dict[str, Any] = {"text": self.text, "random_tokens": self.random_tokens}
        found = subject(self.model, self.batch, **given, **options)
        self.shown.now(f"{doing} {self.model}")
        return found


def studies(
    *, rows: int
) -> Callable[[Callable[..., StudyOutput]], Callable[..., None]]:
    """Make a command of a function of :class:`StudyArgs` and options of its own.

    Args:
        rows: Rows of its table unless ``--rows`` is given.
    """

    def made(measure: Callable[..., StudyOutput]) -> Callable[..., None]:
        def command(
            model: Model,
            *,
            batch: BatchFile = None,
            text: TextFile = None,
            random_tokens: RandomTokens = False,
            rows: Rows = rows,
            html: Html = None,
            json: Json = None,
            **own: Any,
        ) -> None:
            with working(f"opening {model}") as shown:
                study = measure(
                    StudyArgs(
                        model=model,
                        batch=batch,
                        text=text,
                        random_tokens=random_tokens,
                        shown=shown,
                    ),
                    **own,
                )
            result = as_json(study.result, source=study.source, **study.more)
            printed = json is not None and put_json(result, json)
            if not printed:
                study.page.print_study(study.result, rows=rows, source=study.source)
            if html is not None:
                page = study.page.write_study(study.result, html, source=study.source)
                typer.echo(f"wrote {page}", err=printed)

        _, *own = inspect.signature(measure).parameters.values()
        command.__doc__ = measure.__doc__
        return declared(command, own, before="rows")

    return made
