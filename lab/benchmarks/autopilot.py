"""The autopilot on storms: how many failing runs it rescues, what else it touches.

Every failing run of ``equipoise lab run storms`` is made again with
``watch(..., autopilot=True)``. *Rescued*: the final validation loss is within 5 % of
the matched healthy run's, and at least half of the gap is closed, at equal optimiser
steps and tokens; steps that were rolled back count. Beside it, from the same start: no
action (the recorded run), half the learning rate from the start, and a random remedy at
the step of the alarm. Every run of storms clips its gradient at 1.0 already, so "clip
at 1.0" is no action.

A control without an alarm is not touched, so its recorded verdicts say whether it would
be; those that would be are made again. ``--live N`` makes N controls of different kinds
twice, with the autopilot and unwatched: final weights must agree in every bit.

    python -m lab.benchmarks.autopilot STORMS_FOLDER --minutes 40
    python -m lab.benchmarks.autopilot STORMS_FOLDER --summary

The summary goes to ``results/autopilot_summary.json``, which ``docs/autopilot.md``
quotes.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.table import RESULTS
from equipoise.autopilot.treatments import evidence_of
from equipoise.errors import InputError
from equipoise.judging.judge import Judge
from equipoise.remedies.catalogue import REMEDIES, remedy
from equipoise_lab.storms.labels import Label, labels
from equipoise_lab.storms.plan import SCORED
from equipoise_lab.storms.scoring import steps_of
from equipoise_lab.training.trainer import Trainer
from lab.benchmarks.remedies import HALVED, is_rescued, made

HERE = RESULTS / "autopilot.json"
AUTOPILOT, RANDOM = "autopilot", "random remedy"
SCREENED, LIVE = "screened", "live control"
ADAM = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
"""Stands for the optimiser where only a file is read; its settings are the usual."""


def autopilot(label: Label) -> dict[str, Any]:
    """Make the run with the autopilot, switched on as a user would from outside."""
    os.environ["EQUIPOISE_AUTOPILOT"] = "1"
    try:
        return made(label.storm, lambda trainer: None, watched=True)
    finally:
        del os.environ["EQUIPOISE_AUTOPILOT"]


def halved(label: Label) -> dict[str, Any]:
    def act(trainer: Trainer) -> None:
        if trainer.step == 0:
            chosen = remedy("learning_rate", warmup=0)
            chosen.apply(trainer.model, trainer.optimizer)

    return made(label.storm, act, watched=False)


def random_remedy(label: Label) -> dict[str, Any]:
    """Apply a remedy drawn from all that this model takes, at the alarm's step."""
    alarm = alarm_step(label)
    names = sorted(REMEDIES)
    random.Random(label.storm.key).shuffle(names)
    applied: list[str] = []

    def act(trainer: Trainer) -> None:
        if alarm is None or trainer.step != alarm + 1:
            return
        for name in names:
            try:
                remedy(name).apply(trainer.model, trainer.optimizer)
            except (InputError, TypeError):  # not for this model, or needs an option
                continue
            applied.append(name)
            return

    return {**made(label.storm, act, watched=False), "remedy": applied}


def alarm_step(label: Label) -> int | None:
    """Return the first sampled step at which the autopilot has evidence."""
    judge: Judge | None = None
    for step, readings in steps_of(label.folder / "run.eqp"):
        judge = judge or Judge(readings.details)
        judge.add(readings.records)
        sampled = any(record.sites != ("",) for record in readings.records)
        if sampled and judge.firing and evidence_of(judge, ADAM) is not None:
            return step
    return None


def screened(label: Label) -> dict[str, Any]:
    """Say whether there is anything to treat, from the recorded run alone."""
    return {"alarm": alarm_step(label)}


def live(label: Label) -> dict[str, Any]:
    """Make a control with the autopilot, and unwatched: the same to the last bit?"""
    with_pilot = autopilot(label)
    alone = made(label.storm, lambda trainer: None, watched=False)
    return {
        "log": with_pilot["log"],
        "identical": with_pilot["digest"] == alone["digest"],
        "digest": alone["digest"],
        "cpu_seconds": with_pilot["cpu_seconds"] + alone["cpu_seconds"],
    }


MAKERS = {
    LIVE: live,
    AUTOPILOT: autopilot,
    HALVED: halved,
    RANDOM: random_remedy,
    SCREENED: screened,
}


def key_of(label: Label, name: str) -> str:
    storm = label.storm
    return f"{storm.role} | {storm.family} | {storm.seed} | {storm.severity} | {name}"


def cells(
    found: Sequence[Label], seeds: Sequence[int], known: dict[str, Any]
) -> Iterator[tuple[Label, str]]:
    """Yield what to make: unseen seeds first, the autopilot before what it is beside.

    Controls are only screened, unless one has an alarm.
    """
    small = [one for one in found if one.storm.tier == "small"]
    failing = sorted(
        (one for one in small if one.outcome == "failed" and one.storm.seed in seeds),
        key=lambda one: (one.storm.seed < SCORED, one.storm.seed),
    )
    yield from ((one, AUTOPILOT) for one in failing)
    yield from ((one, name) for name in (HALVED, RANDOM) for one in failing)
    for one in small:
        if one.storm.role == "control":
            yield one, SCREENED
            if known[key_of(one, SCREENED)]["alarm"] is not None:
                yield one, AUTOPILOT


def live_cells(found: Sequence[Label], count: int) -> list[tuple[Label, str]]:
    """Return so many controls, one of each kind before the second of any."""
    turns: dict[str, int] = {}
    ordered = []
    for one in sorted(found, key=lambda one: one.storm.seed):
        if one.storm.role == "control" and one.storm.tier == "small":
            turns[one.storm.family] = turns.get(one.storm.family, 0) + 1
            ordered.append((turns[one.storm.family], one))
    ordered.sort(key=lambda pair: pair[0])
    return [(one, LIVE) for _, one in ordered[:count]]


def make_cells(given: argparse.Namespace, found: Sequence[Label]) -> None:
    known = json.loads(given.results.read_text()) if given.results.exists() else {}
    start = time.process_time()
    chosen: Iterable[tuple[Label, str]] = live_cells(found, given.live)
    for label, name in chosen or cells(found, given.seeds, known):
        key = key_of(label, name)
        if time.process_time() - start > 60 * given.minutes:
            break
        if key in known:
            continue
        known[key] = row = MAKERS[name](label)
        if "validation" in row:
            row |= {"healthy": label.healthy, "untreated": label.validation}
            row["rescued"] = is_rescued(label, row["validation"])
        given.results.write_text(json.dumps(known, indent=1) + "\n")
        print(key, known[key], flush=True)


CAP = math.log(256)
"""A loss above chance counts as chance, so that one run does not decide a mean."""


def summary(known: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Return rescues and final losses by maker, over failing runs of these seeds."""
    rows: dict[str, dict[str, Any]] = {}
    for key, row in known.items():
        role, family, seed, severity, name = key.split(" | ")
        if role == "fault" and first <= int(seed) <= last:
            rows.setdefault(f"{family} {seed} {severity}", {})[name] = row
    full = [row for row in rows.values() if AUTOPILOT in row]
    out: dict[str, Any] = {"runs": len(full)}
    won = [row[AUTOPILOT]["rescued"] for row in full]
    out["rescued"] = sum(won)
    out["interval"] = _interval(won)
    for name in (HALVED, RANDOM, "no action"):
        pairs = [_pair(row, name) for row in full if name in (*row, "no action")]
        if pairs:
            better = [b - a for a, b in pairs]
            out[f"nats below {name}"] = float(np.mean(better)), *_interval(better)
            out[f"runs with {name}"] = len(pairs)
    for name in (HALVED, RANDOM):
        out[f"{name} rescued"] = sum(r[name]["rescued"] for r in full if name in r)
    return out


def _pair(row: dict[str, Any], name: str) -> tuple[float, float]:
    mine = row[AUTOPILOT]
    other = mine["untreated"] if name == "no action" else row[name]["validation"]
    return _capped(mine["validation"]), _capped(other)


def _capped(loss: float | None) -> float:
    return CAP if loss is None or not loss < CAP else loss


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean, by a bootstrap over runs."""
    if not values:
        return math.nan, math.nan
    draws = np.random.default_rng(0).choice(
        np.asarray(values, float), (2000, len(values))
    )
    low, high = np.quantile(draws.mean(1), [0.025, 0.975])
    return float(low), float(high)


def controls(known: dict[str, Any]) -> dict[str, Any]:
    """Return how many controls were screened and touched, and the worst change."""
    mine = {k: row for k, row in known.items() if k.startswith("control")}
    alarms = [k for k, row in mine.items() if row.get("alarm") is not None]
    touched = [row for k, row in mine.items() if k.endswith(AUTOPILOT) and row["log"]]
    worst = [row["validation"] / row["untreated"] - 1 for row in touched]
    both = list(mine.items())
    screened = sum(k.endswith(SCREENED) for k in mine)
    return {
        "controls": screened,
        "with an alarm": alarms,
        "touched": len(touched),
        "live": sum(k.endswith(LIVE) for k in mine),
        "live and treated": sum(k.endswith(LIVE) and bool(r["log"]) for k, r in both),
        "live and identical": sum(k.endswith(LIVE) and r["identical"] for k, r in both),
        "largest rise of the final loss": max(worst, default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("storms", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[9, 10, 11, 1, 2, 3])
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--results", type=Path, default=HERE)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--summary", action="store_true")
    given = parser.parse_args()
    if not given.summary:
        make_cells(given, labels(given.storms))
    known = json.loads(given.results.read_text())
    seeds = {"held out": (SCORED, 99), "seed 12": (12, 12), "tuned": (0, SCORED - 1)}
    found = {title: summary(known, *ends) for title, ends in seeds.items()}
    found = {title: part for title, part in found.items() if part["runs"]}
    text = json.dumps({**found, "controls": controls(known)}, indent=1)
    given.results.with_name("autopilot_summary.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
