"""``docs/forecast.md``: what the forecast says and how well, from measured numbers."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "forecast.json"
RULES = RESULT.with_name("rules.json")
UNARMED = 15
"""Steps of a run, at a reading every five, before the alarm can fire."""
TEXT = Path(__file__).parent / "forecast.template"
"""What is written by hand; ``{{name}}`` stands where a table goes."""
Rows = Iterable[Sequence[object]]


def page() -> str:
    """Return the page, its tables filled from the benchmark's numbers."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    text = TEXT.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = text.replace("{{" + name + "}}", table(found))
    return text


def _table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _number(value: Any, shown: str = ".2f") -> str:
    return "–" if value is None else format(value, shown)


def _share(value: Any) -> str:
    return "–" if value is None else f"{value:.0%}"


def _interval(pair: Sequence[Any], shown: str = ".2f") -> str:
    return f"{_number(pair[0], shown)} to {_number(pair[1], shown)}"


def _row(name: str, score: dict[str, Any]) -> list[str]:
    low, high = score["recall_interval"]
    return [
        name,
        f"{score['hits']} of {score['failures']} ({_share(score['recall'])})",
        f"{_share(low)} to {_share(high)}",
        str(score["false_alarms"]),
        _number(score["rate"]),
        _number(score["rate_bound"]),
        _number(score["median_lead"], ".0f"),
    ]


HEAD = (
    *("forecaster", "foreseen", "95 % interval", "false alarms"),
    *("per 10,000 stable steps", "at most (95 %)", "median lead, steps"),
)


def _headline(found: dict[str, Any]) -> str:
    rows = [_row("**the forecast**", found["detection"])]
    parts = found["held_out"]
    rows.append(_row("… on families no fit has met", parts["families"]))
    rows.append(_row("… on seeds never looked at", parts["fresh seeds"]))
    rows.append(_row("shipped coefficients, on those seeds", parts["shipped"]))
    best = found["best_single"]
    rows.append(_row(f"best single reading ({best['reading']})", best))
    for name, rule in found["baselines"].items():
        rows.append(_row(f"{name}, matched", rule["matched"]))
    return _table(HEAD, rows)


def _published(found: dict[str, Any]) -> str:
    rows = [
        [*_row(name, rule["published"]), f"{rule['threshold']:g}", rule["source"]]
        for name, rule in found["baselines"].items()
    ]
    return _table((*HEAD, "threshold", "source"), rows)


def _families(found: dict[str, Any]) -> str:
    left = found["leave_one_family_out"]
    rows = []
    for name, row in found["families"].items():
        kind = "held out" if row["held_out"] else ""
        kind = "exogenous, counted apart" if row["exogenous"] else kind
        alone = left.get(name)
        rows.append(
            [
                name,
                f"{row['hits']} of {row['failures']}",
                _number(row["median_lead"], ".0f"),
                f"{alone['hits']} of {alone['failures']}" if alone else "–",
                kind,
            ]
        )
    head = ("family", "foreseen", "median lead", "foreseen, family left out", "")
    return _table(head, rows)


def _counts(found: dict[str, Any]) -> str:
    table = found["runs"]["counts"]
    columns = ("failed", "survived", "between", "too early")
    rows = [[name, *(row[c] for c in columns)] for name, row in table.items()]
    return _table(("runs", *columns), rows)


def _calibration(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{b['from']:.1f} to {b['to']:.1f}",
            b["readings"],
            _number(b["predicted"]),
            _number(b["observed"]),
            _interval(b["interval"]),
        ]
        for b in found["probabilities"]["reliability"]
    ]
    head = ("probability", "readings", "mean forecast", "share that failed", "95 %")
    return _table(head, rows)


def _quality(found: dict[str, Any]) -> str:
    p, length = found["probabilities"], found["run_length"]
    shown = "none" if length["measured"] is None else f"{length['measured']:.0f}"
    said = ", ".join(f"{a:g}" for a in length["guaranteed"])
    rows = [
        ("AUROC", _number(p["auroc"]["value"]), _interval(p["auroc"]["interval"])),
        (
            "Brier score",
            _number(p["brier"]["value"], ".3f"),
            _interval(p["brier"]["interval"], ".3f"),
        ),
        ("Brier score of the base rate", _number(p["base_rate"], ".3f"), ""),
        ("run length A of the alarm, readings", said, "guaranteed, conditionally"),
        (
            "readings per alarm on unused controls",
            shown,
            f"{length['alarms']} alarms in {length['readings']} readings",
        ),
    ]
    return _table(("number", "value", "95 % interval, or what it is"), rows)


def _deep(found: dict[str, Any]) -> str:
    return _table(HEAD, [_row("small forecast on the deep tier", found["deep"])])


def _diagnosis(found: dict[str, Any]) -> str:
    d = found["diagnosis"]
    parts = {"all": d, "seeds never looked at": d["fresh"], "deep tier": d["deep"]}
    rows = [
        [
            name,
            part["runs"],
            " · ".join(map(_share, part["top1"])),
            " · ".join(map(_share, part["top3"])),
            f"{_share(part['layer_within_1'])} of {part['layers']}",
        ]
        for name, part in parts.items()
    ]
    at = " · ".join(f"+{step}" for step in d["steps_after_alarm"])
    head = (
        *("failures", "count", f"cause first, at the alarm {at} steps"),
        *("among the first three", "layer within ±1"),
    )
    wrong = ", ".join(f"{pair} ({n})" for pair, n in d["confused"].items())
    return _table(head, rows) + f"\n\nTaken for another: {wrong or 'none'}."


def _misses(found: dict[str, Any]) -> str:
    rows = [
        [
            m["kind"],
            f"{tier}: {m['family']}, seed {m['seed']}, severity {m['severity']}",
            _number(m["onset"], "d"),
            m["injected"],
            ", ".join(map(str, m["alarms"])) or "none",
            _number(m["highest_stake"]),
            f"{m['farthest'][0]} ({m['farthest'][1]:.2f})",
            f"{100 * m['excess']:.1f} %" if m["excess"] is not None else "∞",
        ]
        for tier, key in (("small", "misses"), ("deep", "deep_misses"))
        for m in found[key]
    ]
    head = (
        *("what", "run", "onset", "injected", "alarms"),
        *("highest stake before onset (alarm: 1)", "farthest reading (edge: 1)"),
        "final loss above healthy",
    )
    return _table(head, rows)


def _ceiling(found: dict[str, Any]) -> str:
    c = found["ceiling"]
    return (
        f"{c['failures_outside']} of {c['failures']} failures are outside the band at "
        f"some reading between injection and onset, and {c['stable_outside']} of "
        f"{c['stable']} stable runs at any time"
    )


def _bars(found: dict[str, Any]) -> str:
    """Return what was asked for, what was measured, and whether that is enough."""
    all_runs, fresh = found["detection"], found["held_out"]["fresh seeds"]
    d, runs = found["diagnosis"], found["runs"]
    rules = [rule["matched"]["median_lead"] for rule in found["baselines"].values()]
    lead, armed = all_runs["median_lead"], _armed_steps(found)
    bound = all_runs["rate_bound"] * all_runs["stable_steps"] / armed
    rows = [
        _bar("recall", "≥ 90 %", _both(all_runs, fresh), all_runs["recall"] >= 0.9),
        _bar("false alarms per 10,000 armed stable steps, 95 % upper bound", "≤ 1",
             f"{bound:.2f} ({all_runs['false_alarms']} alarms)", bound <= 1),
        _bar("armed stable steps", "≥ 63,000", f"{armed:,}", armed >= 63_000),
        _bar("median lead, steps", "≥ 16", f"{lead:.0f}", lead >= 16),
        _bar("… beside the best loss, gradient or published rule", "≥ 2 ×",
             f"{max(rules):.0f}", lead >= 2 * max(rules)),
        _bar("… beside the best single reading", "no worse",
             f"{found['best_single']['median_lead']:.0f}",
             lead >= found["best_single"]["median_lead"]),
        _bar("cause first, at the alarm · 20 steps later", "≥ 75 %",
             " · ".join(map(_share, d["top1"])), min(d["top1"]) >= 0.75),
        _bar("layer within ±1", "≥ 75 %",
             f"{_share(d['layer_within_1'])} of {d['layers']}",
             d["layer_within_1"] >= 0.75),
        _bar("failures too early to foresee", "≤ a third",
             f"{runs['too_early']} of {runs['failed']}",
             3 * runs["too_early"] <= runs["failed"]),
        _bar("recording, CPU minutes", "≤ 90", f"{runs['cpu_minutes']:.0f}",
             runs["cpu_minutes"] <= 90),
    ]  # fmt: skip
    return _table(("number", "bar", "measured", ""), rows)


def _bar(name: str, bar: str, shown: str, is_met: bool) -> list[str]:
    return [name, bar, shown, "met" if is_met else "**missed**"]


def _both(all_runs: dict[str, Any], fresh: dict[str, Any]) -> str:
    share, late = _share(all_runs["recall"]), f"{fresh['hits']} of {fresh['failures']}"
    return f"{share}; {late} on seeds never looked at"


def _armed_steps(found: dict[str, Any]) -> int:
    """Return the stable steps at which the alarm could fire."""
    stable = found["ceiling"]["stable"]
    return int(found["detection"]["stable_steps"] - UNARMED * stable)


def _rules(found: dict[str, Any]) -> str:
    """Return what the rules say of the same runs, and of others."""
    rows = json.loads(RULES.read_text(encoding="utf-8"))["rows"]
    head = list(rows[0])
    return _table(head, ([row[name] for name in head] for row in rows))


TABLES = {
    "bars": _bars,
    "rules": _rules,
    "ceiling": _ceiling,
    "headline": _headline,
    "published": _published,
    "families": _families,
    "counts": _counts,
    "calibration": _calibration,
    "quality": _quality,
    "deep": _deep,
    "diagnosis": _diagnosis,
    "misses": _misses,
}
