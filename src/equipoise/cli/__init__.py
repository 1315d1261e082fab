"""The command line: one file per command, listed once, loaded only when typed.

To add a command, write ``cli/NAME.py`` with a function called ``command`` (its typed
parameters are the arguments and options, its docstring the help), or a ``typer.Typer``
called ``app`` for a command with subcommands, and add one line to ``COMMANDS``. The
module is loaded for ``--help`` too, so it imports torch, and what imports torch, inside
``command``. ``EXAMPLES``, a tuple of lines that can be typed, ends its help. A dict
called ``CONTEXT`` becomes the command's context settings (a command
that hands on unknown options to a user's script needs it). ``tests/test_surface.py``
pins them. ``arguments`` and ``subject`` are what several commands share. Installed
packages bring commands of their own: see ``plugins``.

Exit codes: 0 done · 1 or an ``EquipoiseError``'s own code, with one line saying what
and what next (2 input, 3 run file, 4 silent site, 5 missing extra; see ``errors``) ·
6 a verdict as bad as ``report --fail-on`` names ·
2 also for wrong usage · 70 a defect of ours · 130 interrupted · 141 the reader of a
pipe left early.
"""

import errno
import os
import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import equipoise
from equipoise.cli import plugins
from equipoise.cli.arguments import with_targets
from equipoise.errors import EquipoiseError, InputError, MissingExtraError

COMMANDS = {
    "audit": "Judge a model by its weights, or on a batch: what is wrong, and where.",
    "board": "Show live and finished runs in your browser.",
    "curvature": "Measure how sharp a loss is, why, and the largest stable rate.",
    "demo": "Train two deep models, watch both, and see why one cannot learn.",
    "doctor": "Show what is installed; try a model: readings it supports, their cost.",
    "export": "Write readings to CSV, Parquet, JSON lines or TensorBoard files.",
    "live": "Follow a run on the terminal: loss, verdict, worst layers, findings.",
    "mcp": "Let an agent read runs: a Model Context Protocol server, read-only.",
    "plan": "Recommend gains, multipliers, warm-up and ε for a model, with reasons.",
    "precision": "Predict the error of bf16, fp16 or fp8, and what to keep in fp32.",
    "preflight": "Run a training script for a few steps, and judge its start.",
    "remedies": "List the remedies: what each does, and the troubles it fits.",
    "remedy": "Name the remedy to try first for a run, with the code that applies it.",
    "replay": "Repeat a recorded step, and see where it first goes wrong.",
    "report": "Show runs here, or write them into one offline HTML page.",
    "rules": "List the rules that judge a run, with thresholds and their sources.",
    "run": "Run a training script, unmodified, and watch what it trains.",
    "runs": "List the runs of a directory.",
    "selection": "Tell heads that select tokens from heads that have gone flat.",
    "warmup": "Compile the CPU kernels ahead of the first watched run.",
}
"""Name → one line for ``--help``. ``pre-flight`` lives in ``cli/pre_flight.py``."""

EXAMPLES = ("equipoise demo", "equipoise run train.py", "equipoise report --help")

EXTRAS = {
    "torch": "torch",
    "numba": "torch",
    "jaxtyping": "torch",
    "safetensors": "torch",
    "transformers": "hf",
    "datasets": "hf",
    "lightning": "lightning",
    "ray": "ray",
    "mcp": "mcp",
    "prometheus_client": "metrics",
}
"""Module that may be absent → the extra that brings it."""
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

DEFECT, INTERRUPTED, CLOSED_PIPE = 70, 130, 141


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave with its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            application(given)(given, prog_name="equipoise")
        finally:
            sys.stdout.flush()  # here, where a full disk or a closed pipe is caught
    except KeyboardInterrupt:  # while a command is loaded; typer sees to the rest
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `| head` has seen enough
        _drop_output()
        sys.exit(CLOSED_PIPE)
    except Exception as error:
        if os.environ.get("EQUIPOISE_TRACEBACK"):
            raise
        if _is_output(error):
            _drop_output()
        typer.echo(f"equipoise: {_message(error)}", err=True)
        sys.exit(_code(error))


def _drop_output() -> None:
    """Let the interpreter flush what is left into nothing as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def application(given: list[str]) -> typer.Typer:
    """Return the application with only the command that is asked for loaded."""
    words = _completed_words() or given
    wanted = next((word for word in words if not word.startswith("-")), None)
    app = typer.Typer(
        cls=_Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, line in COMMANDS.items():
        if name == wanted:
            _add(app, name, _module(name), line)
        else:
            app.command(name, help=line)(_not_loaded)
    missing = {} if wanted in COMMANDS else _add_installed(app, wanted)
    app.callback(epilog=epilog(*EXAMPLES, *_how_to_install(missing)))(_root)
    return app


class _Commands(TyperGroup):
    """The commands; what ``--json`` without a file means is spelt out for each."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_targets(args))


def _add_installed(app: typer.Typer, wanted: str | None) -> dict[str, str]:
    """Add what packages offer; return command → package of what is not installed."""
    offered, refused = plugins.offered(taken=COMMANDS)
    for line in refused:
        typer.echo(f"equipoise: {line}", err=True)
    for name, point in offered.items():
        if wanted not in offered or name == wanted:
            _add_offered(app, point, is_wanted=name == wanted)
    missing = {n: p for n, p in plugins.NOT_INSTALLED.items() if n not in offered}
    if wanted in missing:
        raise MissingExtraError(
            f"`equipoise {wanted}` is not installed: pip install {missing[wanted]}"
        )
    return missing


def _add_offered(app: typer.Typer, point: EntryPoint, *, is_wanted: bool) -> None:
    try:
        module = point.load()
    # A boundary: another package's module may raise anything while it is imported.
    except Exception as error:
        if is_wanted:
            raise InputError(plugins.problem(point, error)) from error
        app.command(point.name, help=plugins.problem(point, error))(_not_loaded)
        return
    line = getattr(module, "HELP", "")
    if is_wanted:
        _add(app, point.name, module, line)
    else:
        app.command(point.name, help=line)(_not_loaded)


def _how_to_install(missing: dict[str, str]) -> list[str]:
    packages = sorted(set(missing.values()))
    return [
        f"pip install {package}  # brings {', '.join(n for n in missing)}"
        for package in packages
    ]


def _completed_words() -> list[str]:
    """Return the words of the line that a shell asks us to complete, if one does."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return line.split()[1:] if "_EQUIPOISE_COMPLETE" in os.environ else []


def _module(name: str) -> ModuleType:
    return import_module(f"equipoise.cli.{name.replace('-', '_')}")


def _add(app: typer.Typer, name: str, module: ModuleType, line: str) -> None:
    examples = epilog(*getattr(module, "EXAMPLES", ()))
    if hasattr(module, "app"):
        app.add_typer(module.app, name=name, help=line, epilog=examples)
    else:
        settings = getattr(module, "CONTEXT", None)
        app.command(name, context_settings=settings, epilog=examples)(module.command)


def epilog(*examples: str) -> str | None:
    """Return the examples of a command as they stand at the end of its help."""
    if not examples:
        return None
    # Blank lines: typer joins lines that are not a paragraph of their own. Not rich's
    # own escape: every command would wait for the import of rich.
    return "\n\n".join(["Examples:", *(line.replace("[", r"\[") for line in examples)])


def _not_loaded() -> None:
    """Fill the place of a command in the list; never called."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"equipoise {equipoise.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """A stability instrument for transformers."""


def _message(error: Exception) -> str:
    """Return the line that names what went wrong and what to try next."""
    if isinstance(error, EquipoiseError):
        return str(error)
    if (extra := _extra(error)) is not None:
        name = getattr(error, "name", "")
        return f'needs {name}, not installed: pip install "equipoise[{extra}]"'
    if isinstance(error, OSError) and _is_outside(error):
        return f"{error.filename or 'standard output'}: {error.strerror}"
    return (
        f"unexpected {type(error).__name__}: {error}\n"
        "This is a defect of ours. EQUIPOISE_TRACEBACK=1 shows where it happened."
    )


def _code(error: Exception) -> int:
    if isinstance(error, EquipoiseError):
        return error.exit_code
    if _extra(error) is not None:
        return MissingExtraError.exit_code
    return InputError.exit_code if _is_outside(error) else DEFECT


def _extra(error: Exception) -> str | None:
    """Return the extra that would bring a module that is not there."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    return EXTRAS.get((error.name or "").split(".")[0])


def _is_outside(error: Exception) -> bool:
    """Say whether the system refused a file: no room, no right, no such place."""
    return _is_output(error) or (isinstance(error, OSError) and bool(error.filename))


def _is_output(error: Exception) -> bool:
    """Say whether standard output has no room for what we print."""
    return isinstance(error, OSError) and error.errno in NO_ROOM and not error.filename
