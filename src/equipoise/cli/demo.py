"""``equipoise demo``: two deep models, one of which cannot learn, in three minutes."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from equipoise.errors import EquipoiseError
from equipoise.store import runs_directory

if TYPE_CHECKING:
    from equipoise.lab.running.experiment import Experiment

EXAMPLES = ("equipoise demo", "equipoise demo --steps 60 --out demo")


def command(
    *,
    out: Annotated[
        Path | None, typer.Option(help="Where runs and report.html go.")
    ] = None,
    steps: Annotated[int, typer.Option(min=20, help="Training steps.")] = 100,
) -> None:
    """Train pre-LN and post-LN side by side, watch both, and say what happened."""
    # Here, not above: --help must not load torch.
    from equipoise.lab.results.evidence import gather
    from equipoise.lab.results.finding import Finding, measured, rows
    from equipoise.lab.results.publishing import bars, first_runs, tables, write_page
    from equipoise.lab.running.runner import run_experiment
    from equipoise.report.views import default_verdict
    from equipoise.watching.warmup import compile_kernels

    console = Console()
    experiment = demo(steps)
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    root = out or runs_directory() / f"demo-{moment}"
    console.print(
        "Two 24-layer models that differ in one thing: where LayerNorm is placed.\n"
        f"Each reads Python's own library for {steps} steps; both are watched.\n"
    )
    # Once here, not once in each of the two workers.
    compile_kernels(console.print)
    with bars(len(experiment.tasks), console=console) as watcher:
        failures = run_experiment(experiment, root, watcher=watcher)
    if failures:
        raise EquipoiseError(f"the demo stopped: {failures[0].reason}")
    evidence = gather(experiment, root)
    runs = first_runs(experiment, root)
    verdict = default_verdict({name: run.verdict for name, run in runs.items()})
    results = rows(evidence)
    summary = Finding(verdict=verdict, grids=[measured(evidence, results)])
    for table in tables(experiment.question, summary):
        console.print(table)
    console.print(verdict, highlight=False)
    page = write_page(experiment, root, results, verdict=verdict)
    console.print(f"Open {page} in a browser; its runs are beside it.", soft_wrap=True)


def demo(steps: int) -> "Experiment":
    """Return ``prepost`` at its smallest: two arms, one seed."""
    from equipoise.lab.studies.catalogue import recipe

    full = recipe("prepost", quick=True)
    arms = tuple(
        replace(arm, train=replace(arm.train, steps=steps, warmup=steps // 10))
        for arm in full.arms
        if arm.name in {"pre", "post"}
    )
    measures = (
        "loss",
        "validation",
        "gradient_first_to_last",
        "gradient_least_to_last",
        "gradient_spread",
        "theta_p5",
        "theta_p50",
        "theta_p100",
        "S",
    )
    return replace(
        full, name="demo", arms=arms, seeds=(42,), measures=measures, curves=()
    )
