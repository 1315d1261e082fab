"""The autopilot live on open units of the field, beside the same units unwatched.

``python -m lab.benchmarks.field_autopilot RECORDS [COUNT]``: as many healthy as
failing units (60 unless given), in the order of the manifest, each once unwatched and
once with ``autopilot=True``; RECORDS is a file with a line for each, and what is in it
is not made again. ``--summary`` needs no training: healthy runs that were treated or
whose final weights differ in any bit, failing ones that were rescued (at least half of
the gap to the healthy twin closed) and that were harmed (more than 1 % above the
untreated one), each with its exact interval. The manifest behind the lock is not read.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import equipoise
from equipoise_lab.storms.field import training
from equipoise_lab.storms.field.bars import Share
from equipoise_lab.storms.field.manifest import Unit, units

HARMED, GAP = 1.01, 0.5


@contextmanager
def piloted(kept: list[Any], digests: list[str]) -> Iterator[None]:
    """Watch with the autopilot, keep its handles, and note the final weights."""
    watch, evaluated = training._watch, training.evaluated

    def with_autopilot(model: nn.Module, optimisers: list[Any], path: Path) -> Any:
        given: Any = optimisers[0] if len(optimisers) == 1 else optimisers
        options: dict[str, Any] = {"every": training.EVERY, "quiet": True}
        kept.append(equipoise.watch(model, given, run=path, autopilot=True, **options))
        return kept[-1]

    def digested(unit: Unit, model: nn.Module) -> float:
        digest = hashlib.blake2s()
        for x in model.state_dict().values():
            digest.update(
                x.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            )
        digests.append(digest.hexdigest())
        return evaluated(unit, model)

    training._watch, training.evaluated = with_autopilot, digested
    try:
        yield
    finally:
        training._watch, training.evaluated = watch, evaluated


def made(unit: Unit) -> dict[str, Any]:
    """Train a unit twice; return what came of it."""
    kept: list[Any] = []
    digests: list[str] = []
    with piloted(kept, digests):
        alone = training.run(unit, watched=False)
        treated = training.run(unit)
    log = [(e.step, e.event, e.text) for h in kept for e in h.autopilot.log]
    return {
        "unit": unit.name,
        "fault": unit.fault,
        "twin": unit.twin,
        "refused": treated.refused,
        "untreated": alone.validation,
        "treated": treated.validation,
        "applied": sum(event == "applied" for _, event, _ in log),
        "identical": len(set(digests)) == 1 and len(digests) == 2,
        "log": log,
        "seconds": alone.seconds + treated.seconds,
    }


def chosen(count: int) -> list[Unit]:
    """Return healthy and failing units in turns, by the order of the manifest."""
    every = units("open")
    healthy = [unit for unit in every if not unit.fault][:count]
    failing = [unit for unit in every if unit.fault][:count]
    pairs = zip(healthy, failing, strict=False)
    return [unit for pair in pairs for unit in pair]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    runs = [row for row in rows if not row["refused"]]
    healthy = [row for row in runs if not row["fault"]]
    failing = [row for row in runs if row["fault"]]
    twins = {row["unit"]: row["untreated"] for row in healthy}
    hurt = [r for r in failing if twins.get(r["twin"], r["untreated"]) < r["untreated"]]

    def rescued(row: dict[str, Any]) -> bool:
        gap = row["untreated"] - twins[row["twin"]]
        return bool(row["treated"] <= row["untreated"] - GAP * gap)

    def counted(found: list[Any], of: list[Any]) -> dict[str, Any]:
        share = Share(what="", count=len(found), of=len(of))
        return {"count": len(found), "of": len(of), "interval": share.interval}

    return {
        "healthy treated": counted([r for r in healthy if r["applied"]], healthy),
        "healthy not identical": counted(
            [r for r in healthy if not r["identical"]], healthy
        ),
        "failing rescued": counted([r for r in hurt if rescued(r)], hurt),
        "failing treated": counted([r for r in failing if r["applied"]], failing),
        "harmed": counted(
            [r for r in runs if r["treated"] > HARMED * r["untreated"]], runs
        ),
        "refused": len(rows) - len(runs),
    }


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    records, count = Path(words[0]), int(words[1]) if len(words) > 1 else 60
    lines = records.read_text().splitlines() if records.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {row["unit"] for row in rows}
    torch.set_num_threads(1)
    logging.getLogger("equipoise").setLevel(logging.CRITICAL)
    for unit in chosen(count) if "--summary" not in sys.argv else ():
        if unit.name not in done:
            rows.append(made(unit))
            with records.open("a") as stream:
                stream.write(f"{json.dumps(rows[-1])}\n")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
