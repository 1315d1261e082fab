"""``equipoise warmup``: compile ahead of the first watched run."""

import typer

EXAMPLES = ("equipoise warmup",)


def command() -> None:
    """Compile the CPU kernels now: in an image or in CI, before training starts."""
    from equipoise.watching.warmup import compile_kernels

    seconds = compile_kernels(typer.echo)
    typer.echo(f"compiled in {seconds:.1f} CPU s" if seconds else "already compiled")
