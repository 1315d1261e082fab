"""``equipoise rules``: every rule with its threshold, where that is from, its page."""

import json as jsonlib
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from equipoise.cli.arguments import Json, put_json
from equipoise.judging.rules import Rule, configured

EXAMPLES = ("equipoise rules", "equipoise rules --json")


def command(
    *,
    json: Json = None,
) -> None:
    """List the rules in force, over runs, weights and starts, with their sources."""
    rules = configured()
    if json and put_json(jsonlib.dumps([described(rule) for rule in rules]), json):
        return
    table = Table(box=None)
    table.add_column("rule", no_wrap=True)
    for title in ("fires when", "for", "severity", "source"):
        table.add_column(title)
    for rule in rules:
        sign = ">" if rule.side == "above" else "<"
        when = f"{_first_line(rule)} {sign} {rule.threshold:g}"
        readings = f"{rule.persist} readings"
        table.add_row(rule.name, when, readings, rule.severity, rule.source)
    screen = Console()
    screen.print(table)
    screen.print(
        "Change one in equipoise.toml: [rules] then "
        '"loss.risen" = false, or = 8.0, or = {persist = 50}',
        highlight=False,
        markup=False,
    )


def described(rule: Rule) -> dict[str, object]:
    """Return everything about a rule as JSON values."""
    plain = {f.name: getattr(rule, f.name) for f in fields(rule) if f.name != "measure"}
    return {**plain, "measures": _first_line(rule), "page": rule.page}


def _first_line(rule: Rule) -> str:
    lines = (rule.measure.__doc__ or rule.reads[0]).strip().splitlines()
    return lines[0].rstrip(".")
