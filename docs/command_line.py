"""The page of the command line, made from the commands themselves."""

from collections.abc import Iterator

import click
from typer.main import get_command

from equipoise.cli import COMMANDS, application

TOP = """# Command line

`equipoise COMMAND --help` shows the same as this page, without torch installed. Made by
`./dev docs` from the commands.

Complete commands and options in your shell: `equipoise --install-completion`. Anything
that takes longer than two seconds shows its progress on a terminal. `NO_COLOR=1` turns
colour off. `EQUIPOISE_RUNS` is where runs are written and looked for (`./runs`).

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | failed for the reason printed; `audit --fail-on` or `preflight` found something |
| 2 | what was given cannot be used: an option, a file, a shape; or wrong usage |
| 3 | a run file is missing, damaged, newer than this version, or being written |
| 4 | something that ran could not be read, and `strict` asks for an error |
| 5 | an optional package is missing; the line names the extra that brings it |
| 6 | a verdict as bad as `--fail-on` names |
| 70 | a defect of ours; `EQUIPOISE_TRACEBACK=1` shows where |
| 130 | interrupted (Ctrl-C) |
| 141 | the reader of a pipe left early |

`equipoise run` leaves with the script's own code.
"""


def page() -> str:
    """Return the page."""
    parts = [TOP]
    for name in COMMANDS:
        root = get_command(application([name]))
        parts += _sections(f"equipoise {name}", root.commands[name])  # type: ignore[attr-defined]
    return "\n".join(parts)


def _sections(path: str, command: click.Command) -> Iterator[str]:
    below = getattr(command, "commands", None)
    if below is not None:
        yield f"## {path}\n\n{command.help or ''}\n"
        for name, inner in below.items():
            yield _section(f"{path} {name}", inner, "###")
    else:
        yield _section(path, command, "##")


def _section(path: str, command: click.Command, level: str) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"{level} {path}", "", f"`{path} {usage}`", "", _plain(command.help), ""]
    rows = [_row(parameter) for parameter in command.params]
    if rows:
        lines += [
            "| argument or option | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    examples = (command.epilog or "").split("\n\n")[1:]
    lines += ["```", *(line.replace("\\[", "[") for line in examples), "```", ""]
    return "\n".join(lines)


def _row(parameter: click.Parameter) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if not names[0].startswith("-"):
        names = [getattr(parameter, "metavar", None) or names[0].upper()]
    name = ", ".join(f"`{n}`" for n in names)
    unset = parameter.default is None or parameter.default in (False, "", ())
    default = "" if callable(parameter.default) or unset else f"{parameter.default}"
    meaning = _plain(getattr(parameter, "help", "") or "").replace("|", "\\|")
    name = name.replace("|", "\\|")
    return f"| {name} | {default} | {meaning} |"


def _plain(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())
