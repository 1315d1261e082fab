"""The page of every check, from its declaration: ``python -m docs.checks``."""

import re
from collections.abc import Iterable
from pathlib import Path

from docs.rules import write
from equipoise.judging.checks import CHECKS, Check
from equipoise.text.templates import templates

THREAD = r"https://github\.com/(.+)/(?:issues|pull|discussions)/(\d+)"
HERE = Path(__file__).parent / "checks"
GRAVITY = {
    "error": "an error: the training cannot be what was meant",
    "warn": "a warning: it is nearly never meant",
    "info": "a line on the card",
}
INDEX = """# Checks

A check is a relation that holds in every correct training loop: trainable weights get a gradient, labels are shifted once, no position sees its own target. It is decided from [facts of the loop](../watching.md#the-run-card) at sampled steps, most of them at the second; it has no threshold fitted to runs, and where a relation cannot be decided it says nothing. A finding is withdrawn when the loop is mended. `equipoise rules` lists all checks.

**If it is meant**, say so, everywhere or for some modules or parameters:

```py
import equipoise

with equipoise.watch(model, optimizer, expect={"same_batch": True}):
    ...
```

```toml
# equipoise.toml
[checks]
same_batch = true
frozen = "layers.*"
```

A name that no check has, and a pattern that fits nothing in the model, is an error that lists the nearest names. `stop_on=["check.labels_shift"]` ends a training at once.

"""  # noqa: E501


def page(check: Check) -> str:
    """Return the page of one check."""
    words = templates()[check.code]
    read = ", ".join(f"`{name}`" for name in check.reads)
    meant = check.expect or check.code
    parts = [
        f"# {check.code}",
        f"**What must hold.** {_sentence(check.relation)}",
        f"**Why.** {_sentence(check.reason)}",
        f"**What it says.** {_sentence(_example(words.message))}",
        f"**What to do.** {_sentence(words.advice)}" if words.advice else "",
        f"**Reads.** Facts of the sections {read}. It is {GRAVITY[check.severity]}.",
        _listed("**Legal, and not reported.**", map(_sentence, check.legal)),
        _listed("**Where it was the cause.**", map(_link, check.threads)),
        f'**If it is meant.** `watch(expect={{"{meant}": True}})`, or a pattern over '
        f'names of modules and parameters; `"{meant}" = true` under `[checks]` in '
        "`equipoise.toml`.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _example(message: str) -> str:
    """Return a template with its parameters as words.

    >>> _example("{site}{sites:more} sees {rows:.0f} of {of:.0f}")
    '*site* sees *rows* of *of*'
    """
    message = re.sub(r"\{\w+:(more|after|others)\}", "", message)
    return re.sub(r"\{(\w+)[^}]*\}", lambda match: f"*{match[1]}*", message)


def _link(thread: str) -> str:
    """Return a thread as a link, named as its site names it."""
    found = re.fullmatch(
        r"https://github\.com/(.+)/(?:issues|pull|discussions)/(\d+)", thread
    )
    if found:
        return f"[{found[1]}#{found[2]}]({thread})"
    return f"<{thread}>" if thread.startswith("http") else thread


def _listed(title: str, items: Iterable[str]) -> str:
    lines = [f"- {item}" for item in items]
    return "\n".join([title, "", *lines]) if lines else ""


def pages() -> dict[str, str]:
    """Return every page by file name."""
    own = {Path(check.page).name: page(check) for check in CHECKS.values()}
    return {"README.md": INDEX + _index(), **own}


def _index() -> str:
    rows = [
        f"| [{check.code}]({Path(check.page).name}) | {check.relation} | "
        f"{check.severity} | `{check.expect or check.code}` |"
        for check in CHECKS.values()
    ]
    head = [
        "| check | what must hold | severity | name in `expect` |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    write(HERE, pages())
