"""``equipoise demo``: two deep models, one of which cannot learn, in about a minute."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from equipoise.report.offline_pages import check_folder_path
from equipoise.store import open_run, runs_directory

EXAMPLES = ("equipoise demo", "equipoise demo --steps 60 --out demo")


def command(
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs and report.html.")
    ] = None,
    steps: Annotated[int, typer.Option(min=20, help="Training steps.")] = 100,
) -> None:
    """Train pre-LN and post-LN side by side, watch both, and print the verdicts."""
    # Here, not above: --help must not load torch.
    from equipoise.cli.demo_models import ARMS, train
    from equipoise.report.comparison import compared
    from equipoise.report.html import write_report
    from equipoise.report.report_model import view
    from equipoise.report.terminal import print_report
    from equipoise.watching.warmup import compile_kernels

    console = Console()
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    root = check_folder_path(out or runs_directory() / f"demo-{moment}")
    root.mkdir(parents=True, exist_ok=True)
    console.print(
        "Two 24-layer models that differ in one thing: where LayerNorm is placed.\n"
        f"Each reads Python's own library for {steps} steps; both are watched.\n"
    )
    compile_kernels(console.print)
    for name in ARMS:
        train(name, root / f"{name}.eqp", steps=steps, console=console)
    runs = {name: open_run(root / f"{name}.eqp") for name in ARMS}
    print_report(view(runs), compared(runs))
    page = write_report(runs, root / "report.html")
    console.print(f"Open {page} in a browser; its runs are beside it.", soft_wrap=True)
