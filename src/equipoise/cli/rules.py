"""``equipoise rules``: every rule with its threshold, every check with its relation."""

import json as jsonlib
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from equipoise.cli.arguments import Json, put_json
from equipoise.judging.checks import CHECKS, Check
from equipoise.judging.rules import Rule, configured

EXAMPLES = ("equipoise rules", "equipoise rules --json")


def command(
    *,
    json: Json = None,
) -> None:
    """List the rules in force, with their sources, and the checks of the loop."""
    rules = configured()
    found = [*map(described, rules), *map(described_check, CHECKS.values())]
    if json and put_json(jsonlib.dumps(found), json):
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
    _print_checks(screen)
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


def _print_checks(screen: Console) -> None:
    table = Table(box=None)
    table.add_column("check", no_wrap=True)
    for title in ("what must hold", "severity", "say that it is meant"):
        table.add_column(title)
    for check in CHECKS.values():
        meant = check.expect or check.code
        table.add_row(check.code, check.relation, check.severity, meant)
    screen.print(table)
    screen.print(
        'What you mean: watch(expect={"NAME": "layers.*"}), or [checks] and then '
        'NAME = "layers.*" (true for everywhere) in equipoise.toml',
        highlight=False,
        markup=False,
    )


def described_check(check: Check) -> dict[str, object]:
    """Return everything about a check as JSON values, under the keys of a rule."""
    plain = {f.name: getattr(check, f.name) for f in fields(check) if f.name != "find"}
    return {"name": check.code, **plain, "source": check.reason, "page": check.page}


def _first_line(rule: Rule) -> str:
    lines = (rule.measure.__doc__ or rule.reads[0]).strip().splitlines()
    return lines[0].rstrip(".")
