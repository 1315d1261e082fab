"""``equipoise doctor [MODEL]``: what is installed, and what of a model can be read."""

import os
import platform
import sqlite3
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from equipoise.cli.arguments import (
    BatchFile,
    Json,
    RandomTokens,
    TextFile,
    as_json,
    plain,
    put_json,
)
from equipoise.cli.progress import working
from equipoise.store import runs_directory

if TYPE_CHECKING:
    from equipoise.auditing.doctor import ModelCheck

EXAMPLES = (
    "equipoise doctor",
    "equipoise doctor ./gpt2",
    "equipoise doctor train.py:build --batch batch.pt --json",
)
PACKAGES = {
    "equipoise": "",
    "numpy": "",
    "torch": "torch",
    "numba": "torch",
    "safetensors": "torch",
    "triton": "",
    "transformers": "hf",
    "lightning": "lightning",
    "tensorboard": "loggers",
    "wandb": "loggers",
    "mlflow-skinny": "loggers",
    "pandas": "export",
    "polars": "export",
    "pyarrow": "export",
    "ray": "ray",
}
"""Package → the extra that brings it."""
EVERY = (1, 10, 100)
Model = Annotated[
    str | None,
    typer.Argument(
        help="A model to try, as for `equipoise precision`; optional.",
        show_default=False,
    ),
]


def command(
    model: Model = None,
    *,
    batch: BatchFile = None,
    text: TextFile = None,
    random_tokens: RandomTokens = False,
    json: Json = None,
) -> None:
    """Show versions, devices and kernels; for a model, readings and their cost.

    The model is trained for a few steps at learning rate 0, in memory only.
    """
    with working("looking at this machine") as shown:
        found: dict[str, Any] = {"versions": versions(), **machine()}
        checked = None
        if model is not None:
            # Here, not above: --help and a machine without torch must not need it.
            from equipoise.auditing.doctor import check_model
            from equipoise.cli.subject import checked_batch, subject

            shown.now(f"opening {model}")
            subject_ = subject(
                model, batch, text=text, random_tokens=random_tokens, wanted=False
            )
            given = checked_batch(model, subject_)
            shown.now(f"training {model} for a few steps")
            checked = check_model(subject_.model, given)
            found["source"] = subject_.source
    numbers = None if checked is None else _numbers(checked)
    if json and put_json(as_json(found, model=numbers), json):
        return
    print_machine(found)
    if checked is not None:
        print_model(checked, found["source"].name)


def versions() -> dict[str, str | None]:
    """Return the version of each package; None where it is not installed."""
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    return {**found, **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Return devices, threads, kernels, and where runs go."""
    place = runs_directory().absolute()
    above = next(p for p in (place, *place.parents) if p.exists())
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "runs": {"folder": str(place), "writable": os.access(above, os.W_OK)},
        "devices": ["cpu"],
        "kernels": "torch is not installed: runs can be read, not written",
    }
    if _version("torch") is not None:
        from equipoise.auditing.doctor import (
            torch_machine,
        )  # only where it is installed

        found.update(torch_machine())
    return found


def print_machine(found: dict[str, Any]) -> None:
    """Print what is installed and what is missing."""
    screen = Console(soft_wrap=True)
    table = Table(box=None, show_header=False)
    for name, number in found["versions"].items():
        extra = PACKAGES.get(name, "")
        hint = f'pip install "equipoise[{extra}]"' if extra else ""
        table.add_row(name, number or "not installed", "" if number else hint)
    screen.print(table, markup=False)
    devices = ", ".join(found["devices"])
    screen.print(f"{found['system']}, {found['cores']} cores; devices: {devices}")
    screen.print(f"kernels: {found['kernels']}", highlight=False)
    runs = found["runs"]
    state = "" if runs["writable"] else ", where nothing can be written"
    screen.print(f"runs go to {runs['folder']}{state}", highlight=False)


def print_model(found: "ModelCheck", source: str) -> None:
    """Print what of a model was read, what was not, and the cost."""
    screen = Console(soft_wrap=True, highlight=False)
    screen.print(
        f"{found.model}: {found.parameters:,} parameters, "
        f"{found.blocks} blocks, {found.attention} attention sites; tried on {source}"
    )
    screen.print(f"read: {', '.join(found.quantities) or 'nothing'}")
    if found.without_projections:
        names = ", ".join(found.without_projections[:3])
        screen.print(f"no projections known for {names}: no projection.* there")
    for finding in found.findings:
        screen.print(f"{finding.severity}: {finding.message}")
    if not found.findings:
        screen.print("nothing was left unread")
    costs = ", ".join(f"every={n}: {found.share(n):+.1%}" for n in EVERY)
    screen.print(
        f"a sampled step takes {found.ratio:.2f} times a plain one here "
        f"(CPU seconds); {costs} of the training"
    )


def _numbers(found: "ModelCheck") -> dict[str, Any]:
    costs = {str(n): found.share(n) for n in EVERY}
    return {**plain(found), "ratio": found.ratio, "share_by_every": costs}
