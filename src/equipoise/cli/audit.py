"""``equipoise audit PATH|MODEL``: a verdict on a model as it stands."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.arguments import (
    BatchFile,
    Html,
    Json,
    RandomTokens,
    Rows,
    TextFile,
    put_json,
)
from equipoise.errors import InputError

if TYPE_CHECKING:
    from equipoise.auditing.audit import Audit
    from equipoise.auditing.subject import ModelAndBatch
    from equipoise.auditing.weights.measures import Progress

EXAMPLES = (
    "equipoise audit model.safetensors",
    "equipoise audit ./gpt2 --fail-on error",
)
FAIL_ON = ("warn", "error")
FailOn = Annotated[
    str | None,
    typer.Option(
        help="Exit with 1 at findings of this severity or above: warn, error. A dead "
        "model always does."
    ),
]


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="Weights (.safetensors, its .index.json, .pt, .bin, .gguf), a model "
            "directory, or FILE.py:FUNCTION.",
            show_default=False,
        ),
    ],
    *,
    batch: BatchFile = None,
    text: TextFile = None,
    random_tokens: RandomTokens = False,
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier checkpoint: list the tensors that moved."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="With data: also the error in this format.")
    ] = None,
    selection: Annotated[
        bool, typer.Option("--selection", help="With data: also which heads select.")
    ] = False,
    curvature: Annotated[
        bool, typer.Option("--curvature", help="With data: also how sharp the loss is.")
    ] = False,
    fail_on: FailOn = None,
    rows: Rows = 20,
    html: Html = None,
    json: Json = None,
) -> None:
    """Judge a model by its weights alone, or also on a batch."""
    if fail_on is not None and fail_on not in FAIL_ON:
        raise InputError(f"--fail-on {fail_on}: give one of {', '.join(FAIL_ON)}")
    # Here, not above: --help must not load torch.
    from equipoise.auditing.audit import audit
    from equipoise.auditing.page import print_audit

    found: ModelAndBatch | None = None
    wanted = {"precision": precision, "selection": selection, "curvature": curvature}
    if batch or text or random_tokens or any(wanted.values()) or _is_function(model):
        from equipoise.cli.subject import needed, subject

        found = subject(
            model, batch, text=text, random_tokens=random_tokens, targets=True
        )
        if any(wanted.values()):
            needed(model, found)
    with _progress() as progress:
        result = audit(
            model if found is None else found.model,
            None if found is None else found.batch,
            against=against,
            source=None if found is None else found.source,
            progress=progress,
        )
    printed = json is not None and put_json(audit_json(result), json)
    if not printed:
        print_audit(result, rows=rows)
        if found is not None:
            _study(model, found, wanted)
    write_page(result, html, quietly=printed)
    grave = (finding.is_grave(fail_on) for finding in result.findings if fail_on)
    raise typer.Exit(int(result.verdict.state == "dead" or any(grave)))


def audit_json(result: "Audit", command: str = "audit") -> str:
    """Return an audit's verdict and numbers, laid out to be read."""
    # Here, not above: an audit that prints a table does not load the report.
    from equipoise.report.judged import judged_json

    judged = [(result.subject, result.verdict)]
    return judged_json(command, judged, jsonlib.loads(result.to_json()), indent=1)


def write_page(result: "Audit", html: Path | None, *, quietly: bool) -> None:
    """Write an audit's page where one was asked for; say so beside JSON on stderr."""
    if html is not None:
        # Here, not above: only a page needs it.
        from equipoise.auditing.offline_page import write_audit

        typer.echo(f"wrote {write_audit(result, html)}", err=quietly)


def _is_function(model: str) -> bool:
    return ":" in model and not Path(model).exists()


def _study(model: str, found: "ModelAndBatch", wanted: dict[str, Any]) -> None:
    """Run the studies that were asked for, each in its own words."""
    from equipoise.cli.subject import checked_batch, loss_batch

    if wanted["precision"]:
        from equipoise.auditing.precision import page as precision_page
        from equipoise.auditing.precision.emulation import Storage
        from equipoise.auditing.precision.study import study as precision_study

        storage = Storage.named(wanted["precision"], fused=True)
        given = checked_batch(model, _inputs(found))
        result = precision_study(found.model, given, storage=storage)
        precision_page.print_study(result, source=found.source)
    if wanted["selection"]:
        from equipoise.auditing.selection import page as selection_page
        from equipoise.auditing.selection.study import study as selection_study

        heads = selection_study(found.model, checked_batch(model, _inputs(found)))
        selection_page.print_study(heads, source=found.source)
    if wanted["curvature"]:
        from equipoise.auditing.curvature import page as curvature_page
        from equipoise.auditing.curvature.study import study as curvature_study

        sharp = curvature_study(found.model, loss_batch(model, found))
        curvature_page.print_study(sharp, source=found.source)


def _inputs(found: "ModelAndBatch") -> "ModelAndBatch":
    """Return the subject without targets: a pair is (inputs, targets)."""
    batch = found.batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return found._replace(batch=batch[0])
    return found


class _progress:
    """A bar with the time left on a terminal; nothing elsewhere."""

    def __enter__(self) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("reading weights"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeRemainingColumn(),
            transient=True,
            console=Console(stderr=True),
            speed_estimate_period=600.0,  # a large matrix takes seconds
        )
        self.shown = self.bar.console.is_terminal  # elsewhere it leaves an empty line
        if self.shown:
            self.bar.start()
        task = self.bar.add_task("", total=1.0)
        return lambda share: self.bar.update(task, completed=share)

    def __exit__(self, *raised: object) -> None:
        if self.shown:
            self.bar.stop()
