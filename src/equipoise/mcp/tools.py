"""What an agent may ask about a folder of runs: pure functions, each answer bounded.

The docstrings are what an agent reads when it chooses a tool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.errors import InputError
from equipoise.judging.checks import CHECKS
from equipoise.judging.remedy_choice import remedies_for
from equipoise.judging.rules import configured
from equipoise.judging.verdict import STATES, Verdict
from equipoise.mcp.bounds import answer, visible
from equipoise.records import Finding
from equipoise.report.comparison import compared
from equipoise.report.page_model import card_json, judged
from equipoise.store import Run
from equipoise.web.directory import Directory

LIST_S = 10.0
"""The list waits no longer for verdicts; the next call goes on."""
MOST_RUNS, MOST_FINDINGS, MOST_POINTS, MOST_SITES, MOST_COMPARED = 200, 200, 500, 40, 8


@dataclass(frozen=True, slots=True)
class RunTools:
    """The tools over one folder; a run is named by its key, as ``list_runs`` has it."""

    directory: Directory

    @classmethod
    def over(cls, folder: Path) -> "RunTools":
        return cls(Directory(folder))

    def all(self) -> list[Callable[..., dict[str, Any]]]:
        """Return every tool; all of them only read."""
        return [
            self.list_runs, self.verdict, self.card, self.findings, self.quantities,
            self.series, self.compare, self.remedy, self.rules,
        ]  # fmt: skip

    def list_runs(self, limit: int = 20, state: str = "") -> dict[str, Any]:
        """List training runs, the worst first, with verdict and last step.

        In a large folder some may be unread at first: ask again.

        Args:
            limit: At most this many, up to 200.
            state: Only of this state: healthy, not judged, at risk, failing, dead.
        """
        if state and state not in STATES:
            raise InputError(f"state={state!r}: choose one of {', '.join(STATES)}")
        self.directory.judge(seconds=LIST_S)
        rows = [self._row(key) for key in self.directory.paths()]
        read = [row for row in rows if row["state"]]
        found = sorted((r for r in read if state in ("", r["state"])), key=_badness)
        shown = found[: _within(limit, MOST_RUNS)]
        unread = len(rows) - len(read)
        return answer({"runs": shown}, runs=len(found) - len(shown), unread=unread)

    def verdict(self, run: str) -> dict[str, Any]:
        """Say whether a run is healthy, at risk, failing or dead, why, and what to do.

        Args:
            run: The key of a run, from list_runs.
        """
        opened = self._run(run)
        found = judged(opened)
        return answer(
            {
                "run": opened.info.name,
                **_brief(found),
                "step": found.step,
                "sentence": found.sentence,
                "advice": found.advice,
                "where": found.where,
                "rules_that_fire": [one.code for one in found.findings][:20],
            }
        )

    def card(self, run: str) -> dict[str, Any]:
        """Describe the training loop as it was seen: model, loss, batch, optimiser.

        Args:
            run: The key of a run, from list_runs.
        """
        return answer(card_json(self._run(run).card))

    def findings(self, run: str, limit: int = 20, severity: str = "") -> dict[str, Any]:
        """List what was found in a run, the gravest first.

        Args:
            run: The key of a run, from list_runs.
            limit: At most this many, up to 200.
            severity: Only of this severity: info, warn or error.
        """
        found = sorted(self._run(run).findings, key=lambda one: one.order)
        wanted = [one for one in found if severity in ("", one.severity)]
        shown = wanted[: _within(limit, MOST_FINDINGS)]
        rows = [_finding(one) for one in shown]
        return answer({"findings": rows}, findings=len(wanted) - len(shown))

    def quantities(self, run: str) -> dict[str, Any]:
        """List what was measured in a run; give one to series.

        Args:
            run: The key of a run, from list_runs.
        """
        return answer({"quantities": self._run(run).quantities})

    def series(
        self, run: str, quantity: str, site: str = "", points: int = 50
    ) -> dict[str, Any]:
        """Return a quantity over training: lowest, mean and highest of each stretch.

        Args:
            run: The key of a run, from list_runs.
            quantity: One of quantities, such as loss or attention.theta.p5.
            site: Only of this module; of all that were read, at most 40, otherwise.
            points: The resolution: at most about this many stretches, up to 500.
        """
        opened = self._run(run)
        asked = _within(points, MOST_POINTS)
        found = opened.summary(quantity, site or None, points=asked)
        sites = {
            name: {
                "step": one.last.tolist()[-MOST_POINTS:],
                "low": one.low.tolist()[-MOST_POINTS:],
                "mean": one.mean.tolist()[-MOST_POINTS:],
                "high": one.high.tolist()[-MOST_POINTS:],
                "not_finite": int(one.broken.sum()),
            }
            for name, one in list(found.items())[:MOST_SITES]
        }
        data = {"quantity": quantity, "points": asked, "sites": sites}
        return answer(data, sites=len(found) - len(sites))

    def compare(self, runs: Sequence[str]) -> dict[str, Any]:
        """Compare runs: settings, loops, and where curves part.

        Args:
            runs: Keys of 2 to 8 runs, from list_runs; the first is the baseline.
        """
        if not 2 <= len(runs) <= MOST_COMPARED:
            raise InputError(f"compare takes 2 to {MOST_COMPARED} runs")
        opened = {key: self._run(key) for key in runs}
        states = {key: judged(run).state for key, run in opened.items()}
        return answer({"states": states, **compared(opened)})

    def remedy(self, run: str) -> dict[str, Any]:
        """Name the remedies that fit a run, the one to try first in front, with code.

        Args:
            run: The key of a run, from list_runs.
        """
        found = judged(self._run(run))
        offers = [
            {"name": one.name, "does": one.does, "code": one.code.splitlines()}
            for one in remedies_for(found)
        ]
        return answer({**_brief(found), "remedies": offers})

    def rules(self, name: str = "") -> dict[str, Any]:
        """List the rules and checks that judge a run; of one by name, everything.

        Args:
            name: The code of a rule or a check, as findings have it; all if empty.
        """
        rules: dict[str, dict[str, Any]] = {
            one.name: {
                "reads": list(one.reads),
                "fires": f"{one.side} {one.threshold:g} for {one.persist} readings",
                "severity": one.severity,
                "source": one.source,
            }
            for one in configured()
        }
        checks: dict[str, dict[str, Any]] = {
            one.code: {"must_hold": one.relation, "severity": one.severity}
            for one in CHECKS.values()
        }
        known = {**rules, **checks}
        if not name:
            return answer({code: one["severity"] for code, one in known.items()})
        if name not in known:
            raise InputError("no such rule; rules() lists them")
        return answer({name: known[name]})

    def _row(self, key: str) -> dict[str, Any]:
        row = self.directory.row(key)
        found = row["verdict"] or {}
        state = "not judged" if row.get("trouble") else ""
        return {
            "key": key,
            "name": row["label"],
            "state": found.get("state", state),
            "headline": found.get("headline", row.get("trouble", "")),
            "since": found.get("since"),
            "last_step": row.get("last"),
            "writer": row.get("state"),
        }

    def _run(self, key: str) -> Run:
        """Return a run by its key, as it is or as it was shown."""
        known = {visible(one): one for one in self.directory.paths()}
        return self.directory.run(known.get(key, key))


def _brief(found: Verdict) -> dict[str, Any]:
    return {"state": found.state, "headline": found.headline, "since": found.since}


def _finding(one: Finding) -> dict[str, Any]:
    return {
        "code": one.code,
        "severity": one.severity,
        "step": one.step,
        "since": one.since,
        "site": one.site,
        "message": one.message,
        "advice": one.advice,
    }


def _badness(row: dict[str, Any]) -> int:
    return -STATES.index(row["state"])


def _within(asked: int, most: int) -> int:
    return max(1, min(most, asked))
