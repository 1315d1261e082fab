"""``equipoise precision MODEL``: what a narrow format does to a model, and where."""

from typing import Annotated

import typer

from equipoise.cli.study import StudyArgs, StudyOutput, studies

EXAMPLES = (
    "equipoise precision ./gpt2 --format fp16",
    "equipoise precision train.py:build --batch batch.pt --html page.html",
    "equipoise precision ./gpt2 --target 0.001 --json",
)


@studies(rows=20)
def command(
    typed: StudyArgs,
    *,
    format: Annotated[
        str, typer.Option(help="bf16, fp16, tf32, e4m3, e5m2, or generic e5m10.")
    ] = "bf16",
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Relative error to reach; modules to keep in fp32 are chosen for it.",
        ),
    ] = None,
    scaled: Annotated[
        bool | None,
        typer.Option(help="Scale each tensor to fill the range; on for 8 bits."),
    ] = None,
    fused: Annotated[
        bool,
        typer.Option(
            "--fused/--opened",
            help="Fused attention stores no scores, or is opened and stores them.",
        ),
    ] = True,
    every_module: Annotated[
        bool, typer.Option(help="Also measure each module alone (slow).")
    ] = False,
) -> StudyOutput:
    """Predict and measure the error of a format; name modules to keep in fp32."""
    # Here, not above: --help must not load torch.
    from equipoise.auditing.precision import page
    from equipoise.auditing.precision.emulation import Storage
    from equipoise.auditing.precision.study import study
    from equipoise.cli.subject import checked_batch

    # First what is cheap to refuse: weights may take minutes to load.
    storage = Storage.named(format, scaled=scaled, fused=fused)
    found = typed.opened(f"measuring {format} in")
    batch = checked_batch(typed.model, found)
    result = study(
        found.model, batch, storage=storage, target=target, every_module=every_module
    )
    more = {"headline": page.headline(result)}
    return StudyOutput(result=result, source=found.source, page=page, more=more)
