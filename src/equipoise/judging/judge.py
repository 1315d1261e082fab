"""The judge: readings in, findings and a verdict out.

A ``Judge`` takes readings one by one, in the order they were recorded, and asks every
rule whose quantities are complete at that step. It is a fold over the recorded order,
so the verdict live, at the end, and from the file are one and the same. A checkpoint or
the start of a run has no course: its readings are judged at once.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from equipoise.judging.episodes import is_episode, jumped_before, what_is_over
from equipoise.judging.history import History, RecordBatch, canonical
from equipoise.judging.rules import Rule, configured
from equipoise.judging.rules.conditions import FAILED, Condition, RuleAtWork
from equipoise.judging.rules.registry import RuleSubject
from equipoise.judging.settings import SETTINGS, moved_before
from equipoise.judging.verdict import Reason, State, Verdict
from equipoise.records import Finding, Reading, Scalar

LEAST_SAMPLES = 10
"""Sampled steps from which on a run is judged."""
ALIVE = 8
"""Finite losses in a row after which a non-finite number was an accident."""
NONFINITE = ("nonfinite", "weights.nonfinite")
IMPORTANT = ("loss", "gradient.norm", "attention.theta.p50")
"""Without these a run is not judged, whichever rules are in force."""
GAPS = ("watch.silent", "watch.unread", "store.damaged")
"""Findings that say something was not read: such a run is never called healthy."""
LARGE = 0.05
"""A type of layer that holds a larger share of the parameters must be read."""
STARTS = ("attention.projections_large", "residual.embedding_large")
"""Rules about what a run began with: a cause of whatever began together with it."""
PLAINEST = ("loss.above_chance", "loss.risen")
"""That a loss is above chance says more than that it rose or does not fall."""
NO_PROGRESS = "loss.not_falling"
"""The loss is what guessing gives, so a model that stays there has learnt nothing."""


@dataclass(slots=True)
class Judge:
    """Judges one run while it is recorded, or while its file is read."""

    details: Mapping[str, Any] = field(default_factory=dict)
    rules: Sequence[Rule] | None = None
    """Those in force unless given: ours, users', as ``equipoise.toml`` sets them."""
    of: RuleSubject = "run"
    history: History = field(init=False)
    at_work: list[RuleAtWork] = field(init=False)
    cursor: int = 0
    """How far a source has been read."""
    nonfinite: list[Finding] = field(default_factory=list)
    gaps: list[Finding] = field(default_factory=list)
    """What the watcher found: numbers that are not finite, and what was not read."""
    checks: dict[tuple[str, str], Finding] = field(default_factory=dict)
    """Code and site → a relation that the loop violates as things stand."""
    unseen: Mapping[str, str] = field(default_factory=dict)
    """What the card says was not seen of the loop: what → why."""
    given: list[Finding] = field(default_factory=list)
    """Everything that was found elsewhere, where readings are judged at once."""
    _held: list[RuleAtWork] = field(default_factory=list)
    """Rules that fired before there were enough samples to judge."""
    _by_quantity: dict[str, list[RuleAtWork]] = field(default_factory=dict)
    _noted_unread: bool = False
    _extra: frozenset[int] = frozenset()
    """Steps that were sampled besides those of the interval."""

    def __post_init__(self) -> None:
        self.history = History(self.details)
        self._extra = frozenset(self.details.get("extra_samples") or ())
        rules = configured(of=self.of) if self.rules is None else self.rules
        self.at_work = [RuleAtWork(rule) for rule in rules]
        for quantity in (*IMPORTANT, *SETTINGS):
            self._by_quantity[quantity] = []
        for one in self.at_work:
            for quantity in one.rule.reads:
                self._by_quantity.setdefault(quantity, []).append(one)

    @property
    def conditions(self) -> list[Condition]:
        """Every condition of every rule, in the order of the rules."""
        return [condition for one in self.at_work for condition in one.conditions]

    def add(self, readings: Iterable[Reading]) -> list[Finding]:
        """Take readings in the order they were recorded; return what the rules find."""
        found: list[Finding] = []
        for reading in map(canonical, readings):
            asking = self._by_quantity.get(reading.quantity)
            if asking is None:
                if reading.sites != ("",):
                    self.history.count_sample(reading.step)
            elif self.history.add(reading):
                for one in asking:
                    if self._is_complete(one.rule, reading.step):
                        found += self._asked(one)
            if not self._noted_unread and self.history.sampled > LEAST_SAMPLES:
                found += self._unread_rules(reading.step)
        return found

    def add_at_once(self, readings: Iterable[Reading]) -> list[Finding]:
        """Take readings that have no course: every rule is asked once, none waits.

        Rules about a course (a loss that rises) cannot know at one point, and say
        nothing. A rule over weights reads what of its quantities is there.
        """
        for reading in map(canonical, readings):
            self.history.add(reading)
        enough = all if self.of == "run" else any
        found: list[Finding] = []
        for one in self.at_work:
            if enough(quantity in self.history for quantity in one.rule.reads):
                one.rule = replace(one.rule, persist=1)
                found += one.ask(self.history)
        if self.of != "run":
            self.note(f for f in found if f.code == FAILED)
        return found

    def _unread_rules(self, step: int) -> list[Finding]:
        """Return, once, which rules need what another preset takes."""
        self._noted_unread = True
        rules = (one.rule for one in self.at_work if one.rule.preset)
        idle = [r.name for r in rules if not all(q in self.history for q in r.reads)]
        if not idle:
            return []
        return [
            Finding.info(step, "rules.unread", count=len(idle), rules=", ".join(idle))
        ]

    @property
    def is_early(self) -> bool:
        """Whether sampling has begun and too little is known to judge the model."""
        return self.of == "run" and 0 < self.history.sampled < LEAST_SAMPLES

    def _asked(self, one: RuleAtWork) -> list[Finding]:
        """Ask a rule; early findings about the model are held back.

        The first steps of a healthy run look like trouble: Adam's first updates are as
        large as the rate allows. The loss has a waiting time of its own.
        """
        before = self._release() if self._held else []
        # "Three readings in a row" means time: those of a dense start lie closer.
        counts = one.rule.about == "loss" or self.history.step not in self._extra
        new = one.ask(self.history, counts=counts)
        if not new:
            return before
        if self.is_early and one.rule.about != "loss" and not one.broken:
            self._held.append(one)
            return before
        return before + new

    def _release(self) -> list[Finding]:
        """Return what was held back while it was early, where it still holds."""
        if self.is_early:
            return []
        held, self._held = dict.fromkeys(self._held), []
        for one in held:
            for condition in one.conditions:
                condition.forget_unless_firing()
        return [finding for one in held for finding in one.firing]

    def _is_complete(self, rule: Rule, step: int) -> bool:
        if len(rule.reads) == 1:
            return True
        last_step = self.history.last_step
        for quantity in rule.reads:
            if last_step(quantity) != step:
                return False
        return True

    def note(self, findings: Iterable[Finding]) -> None:
        """Take what was found elsewhere: non-finite numbers and gaps, or everything."""
        for finding in findings:
            if self.of != "run":
                self.given.append(finding)
            elif finding.belongs_to("nonfinite") and finding.severity == "error":
                self.nonfinite.append(finding)
            elif finding.belongs_to("check"):
                self._note_check(finding)
            elif any(map(finding.belongs_to, GAPS)):
                if finding.severity != "info" or "share" in finding.params:
                    self.gaps.append(finding)

    def _note_check(self, finding: Finding) -> None:
        """Take a violated relation, or that it holds again."""
        place = finding.code, finding.site
        if "resolved" in finding.params:
            self.checks.pop(place, None)
        else:
            self.checks[place] = finding

    def follow(self, news: RecordBatch) -> None:
        """Take what a source has recorded since the last time."""
        self.add(news.readings)
        self.note(news.findings)

    @property
    def firing(self) -> list[Finding]:
        """What fires now, the gravest first, then the earliest."""
        early = self.is_early
        found = [
            finding
            for one in self.at_work
            if not (early and one.rule.about != "loss")
            for finding in one.firing
        ]
        return sorted(found, key=lambda finding: finding.order)

    def shows(self, names: Collection[str]) -> bool:
        """Return whether one of these rules, checks or states has come true."""
        found = [*self.firing, *self.checks.values()]
        fires = any(finding.code in names for finding in found)
        return bool(names) and (fires or self.verdict.state in names)

    @property
    def verdict(self) -> Verdict:
        """What is wrong as far as it was read; nothing is read or changed for it."""
        if self.of != "run":
            return _at_once(self)
        found = (
            _dead(self)
            or _violating(self)
            or _judged(self)
            or _unread(self)
            or _healthy(self)
        )
        now = {c.rule.name: c.now for c in self.conditions if c.now is not None}
        return replace(
            found,
            now=now,
            step=self.history.step,
            coverage={**_coverage(self), **found.coverage},
            quantities=self._quantities(),
        )

    def _quantities(self) -> tuple[str, ...]:
        """Return what rules that fired stand on."""
        fired = (c.rule for c in self.conditions if c.fired)
        stand_on = (q for r in fired if r.severity != "info" for q in r.reads)
        return tuple(dict.fromkeys(stand_on))


def _coverage(judge: Judge) -> dict[str, Scalar]:
    """Return a run's coverage: rules, samples, the course of loss and rate."""
    history, loss = judge.history, judge.history.curve("loss")
    found: dict[str, Scalar] = {
        "rules": sum(all(q in history for q in o.rule.reads) for o in judge.at_work),
        "sampled": history.sampled,
        "least": LEAST_SAMPLES,
        "loss_first": loss.blocks[0][1] if loss.blocks else math.nan,
        "loss_now": loss.smoothed(),
    }
    rate = history.curve("learning_rate")
    if rate.count:
        found |= {"rate_peak": rate.largest, "rate_peak_step": rate.largest_step}
    return found


def _dead(judge: Judge) -> Verdict | None:
    """Non-finite numbers, and no finite losses since: a skipped batch is no death."""
    first = _first_nonfinite(judge)
    if first is None:
        return None
    moved = moved_before(judge.history, first.step)
    earlier = _model_rules(judge, before=first.step)
    return Verdict(
        state="dead",
        lead=first,
        cause=moved.finding(judge.history.step) if moved else earlier,
        since=first.step,
        findings=(first, *judge.firing),
    )


def _model_rules(judge: Judge, *, before: int) -> Finding | None:
    """Return the rule about the model that fired first, ahead of a step."""
    about = {one.rule.name: one.rule.about for one in judge.at_work}
    firing = [f for f in judge.firing if f.severity != "info"]
    found = [f for f in firing if about[f.code] == "model" and f.step < before]
    if not found:
        return None
    first = began_first(found).code
    return next(c.now for c in judge.conditions if c.rule.name == first and c.now)


def _first_nonfinite(judge: Judge) -> Finding | None:
    curve = judge.history.curve("loss")
    losses = list(zip(curve.steps, curve.values, strict=True))
    after = [step for step, value in losses if math.isfinite(value)][-ALIVE:]
    alive_since = after[0] if len(after) == ALIVE else -1
    lasting = [f for f in judge.nonfinite if f.step >= alive_since]
    broken = [pair for pair in losses if not math.isfinite(pair[1])]
    if lasting:
        return lasting[0]
    if not broken or broken[-1][0] < alive_since:
        return None
    step, value = broken[0]
    return Finding.error(step, "nonfinite.loss", loss=value)


def _is_stuck(judge: Judge, firing: Sequence[Finding]) -> bool:
    """Return whether the loss was that of a guess for half of the run."""
    first, now = judge.history.first_step, judge.history.step
    began = [f.params["since_step"] for f in firing if f.code == NO_PROGRESS]
    return any(2 * (float(step or 0) - first) <= now - first for step in began)


def began_first(causes: Sequence[Finding]) -> Finding:
    """Return what went wrong first.

    Of what began together: how the model was made, then the gravest.
    """
    return min(causes, key=lambda found: (found.since, found.code not in STARTS))


def _plainest(finding: Finding) -> int:
    return (*PLAINEST, finding.code).index(finding.code)


def _violated(judge: Judge) -> list[Finding]:
    """Return relations that the loop violates, the gravest first."""
    found = (f for f in judge.checks.values() if f.severity != "info")
    return sorted(found, key=lambda finding: finding.order)


def _violating(judge: Judge) -> Verdict | None:
    """What the loop does wrong: a cause, so it comes before what rules see of it.

    A relation that broke after a rule had fired, in a loop that was right before, is
    not what made it fire.
    """
    violated = _violated(judge)
    if not violated:
        return None
    first = violated[0]
    since = min(finding.since for finding in violated)
    firing = [f for f in judge.firing if f.severity != "info"]
    if first.severity != "error" and any(f.since < since for f in firing):
        return None
    return Verdict(
        state="failing" if first.severity == "error" else "at risk",
        lead=first,
        since=since,
        findings=(*violated, *judge.firing),
        where=first.site,
    )


def _judged(judge: Judge) -> Verdict | None:
    """What rules fire: about the loss it is failing, about the model at risk."""
    about = {one.rule.name: one.rule.about for one in judge.at_work}
    now = {c.rule.name: c for c in judge.conditions if c.finding is not None}
    firing = [f for f in judge.firing if f.severity != "info"]
    if not firing:
        return None
    loss = sorted((f for f in firing if about[f.code] == "loss"), key=_plainest)
    causes = [f for f in firing if about[f.code] != "loss"]
    first = now[(began_first(causes) if causes else loss[0]).code]
    moved = moved_before(judge.history, first.since)
    failing: State = "dead" if _is_stuck(judge, loss) else "failing"
    since = min(finding.since for finding in firing)
    lead = first.now
    assert lead is not None
    return Verdict(
        state=failing if loss else "at risk",
        lead=lead,
        cause=moved.finding(judge.history.step)
        if moved
        else jumped_before(judge.history, tuple(judge.conditions), first.since),
        effects=tuple(_now(now[f.code]) for f in loss[:1] if causes),
        since=since if moved is None else min(since, moved.since),
        findings=(*_violated(judge), *judge.firing),
        # A stream that grows in one block begins as every stream does, in the first:
        # the site at which a rule fired may be another.
        where=lead.site,
        seen=str(lead.params.get("most_in") or lead.site),
    )


def _now(condition: Condition) -> Finding:
    assert condition.now is not None
    return condition.now


def _unread(judge: Judge) -> Verdict | None:
    """Too early, or something important was not read."""
    reason = _missing(judge)
    if not reason:
        return None
    lead = _grave_gaps(judge)[0] if reason == "gap" else None
    return Verdict(
        state="not judged", reason=reason, lead=lead, findings=tuple(judge.gaps)
    )


def _missing(judge: Judge) -> Reason:
    history = judge.history
    if history.sampled < LEAST_SAMPLES:
        return "few_samples"
    if "loss" not in history:
        return "no_loss"
    if "gradient.norm" not in history:
        return "no_gradient"
    if history.details.get("attention") and "attention.theta.p50" not in history:
        return "no_attention"
    return "gap" if _grave_gaps(judge) else ""


def _grave_gaps(judge: Judge) -> list[Finding]:
    """Return the gaps that are too large to call a run healthy.

    Where the share of the parameters is known, it must be large; files of older
    versions do not say it.
    """
    shares = ((gap, gap.params.get("share")) for gap in judge.gaps)
    return [
        gap
        for gap, share in shares
        if not isinstance(share, int | float) or not share <= LARGE
    ]


def _healthy(judge: Judge) -> Verdict:
    return Verdict(
        state="healthy",
        over=tuple(what_is_over(judge.conditions, judge.history)),
        findings=(*judge.firing, *judge.gaps),
        unseen=judge.unseen,
        recovered=any(is_episode(c) for c in judge.conditions),
    )


def _at_once(judge: Judge) -> Verdict:
    """What is wrong with weights or a start: the gravest first, all of it is now."""
    found = sorted([*judge.given, *judge.firing], key=lambda f: f.order)
    grave = [f for f in found if f.severity != "info"]
    coverage: Mapping[str, Scalar] = dict(judge.details.get("coverage", {}))
    if not grave:
        reason: Reason = judge.details.get("reason", "")
        return Verdict(
            state="not judged" if reason else "healthy",
            of=judge.of,
            reason=reason,
            findings=tuple(found),
            coverage=coverage,
        )
    return Verdict(
        state=_state_at_once(judge, grave),
        of=judge.of,
        since=0,
        lead=grave[0],
        findings=tuple(found),
        coverage={**coverage, "more": len(grave) - 1},
    )


def _state_at_once(judge: Judge, grave: Sequence[Finding]) -> State:
    if any(f.belongs_to(family) for f in grave for family in NONFINITE):
        return "dead"
    lost = judge.of == "weights" and any(f.severity == "error" for f in grave)
    return "failing" if lost else "at risk"
