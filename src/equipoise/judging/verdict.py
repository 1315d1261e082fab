"""Verdicts: what is the matter with a run, in one word, one sentence and evidence.

A ``Judge`` takes readings one by one, in the order they were recorded, and asks every
rule whose quantities are complete at that step. It is a fold over the recorded order,
so the verdict live, at the end, and from the file are one and the same.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from equipoise.judging.history import History, News, judged
from equipoise.judging.rules import Rule, configured
from equipoise.judging.rules.conditions import Condition
from equipoise.judging.settings import SETTINGS, moved_before
from equipoise.judging.wording import (
    began_first,
    explained,
    is_episode,
    places,
    plainest,
    what_is_over,
    with_rate,
)
from equipoise.records import Finding, Reading, Record, html_table

State = Literal["healthy", "at risk", "failing", "dead", "not judged"]
STATES: tuple[State, ...] = ("healthy", "not judged", "at risk", "failing", "dead")
"""From the best to the worst."""
LEAST_SAMPLES = 10
"""Sampled steps from which on a run is judged."""
ALIVE = 8
"""Finite losses in a row after which a non-finite number was an accident."""
ORDER = {"error": 0, "warn": 1, "info": 2}
NONFINITE = "nonfinite"
IMPORTANT = ("loss", "gradient.norm", "attention.theta.p50")
"""Without these a run is not judged, whichever rules are in force."""
GAPS = ("watch.silent", "watch.unread", "store.damaged")
"""Findings that say something was not read: such a run is never called healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Record):
    """What is the matter with a run."""

    state: State
    sentence: str
    """One sentence a person can act on."""
    since: int | None = None
    """The step from which it is true; None of a healthy run, or one not judged."""
    findings: tuple[Finding, ...] = ()
    """The evidence: what fires now, the gravest first."""
    advice: str = ""
    """What to do."""
    now: dict[str, str] = field(default_factory=dict)
    """Rule → what holds now, for every rule that fires: findings say what held then."""
    cause: str = ""
    """The setting that was seen to move before what fires, if one was."""
    where: str | None = None
    """The site at fault now; nothing for the whole model, None where no rule fires."""
    seen: str = ""
    """The site in which one sees it most, as things stand now."""
    recovered: bool = False
    """Whether a loss that had gone wrong came back: healthy, and worth a look."""
    quantities: tuple[str, ...] = ()
    """What rules that fired stand on."""

    def __post_init__(self) -> None:
        given: tuple[Any, ...] = self.findings  # dictionaries when read from JSON
        found = (Finding.from_dict(f) if isinstance(f, dict) else f for f in given)
        object.__setattr__(self, "findings", tuple(found))
        object.__setattr__(self, "quantities", tuple(self.quantities))

    def __repr__(self) -> str:
        since = "" if self.since is None else f", since step {self.since}"
        return f"Verdict({self.state!r}, {self.sentence!r}{since})"

    def _repr_html_(self) -> str:
        rows = [
            (f.severity, f"step {f.step}", f.site, f.message) for f in self.findings
        ]
        advice = [("try", "", "", self.advice)] if self.advice else []
        return html_table(f"{self.state}: {self.sentence}", [*advice, *rows])


@dataclass(slots=True)
class Judge:
    """Judges one run while it is recorded, or while its file is read."""

    details: Mapping[str, Any] = field(default_factory=dict)
    rules: Sequence[Rule] | None = None
    """Those in force unless given: ours, users', as ``equipoise.toml`` sets them."""
    history: History = field(init=False)
    conditions: list[Condition] = field(init=False)
    cursor: int = 0
    """How far a source has been read."""
    nonfinite: list[Finding] = field(default_factory=list)
    gaps: list[Finding] = field(default_factory=list)
    """What the watcher found: numbers that are not finite, and what was not read."""
    _held: list[Condition] = field(default_factory=list)
    """Conditions that fired before there were enough samples to judge."""
    _by_quantity: dict[str, list[Condition]] = field(default_factory=dict)
    _noted_unread: bool = False

    def __post_init__(self) -> None:
        self.history = History(self.details)
        rules = configured() if self.rules is None else self.rules
        self.conditions = [Condition(rule) for rule in rules]
        for quantity in (*IMPORTANT, *SETTINGS):
            self._by_quantity[quantity] = []
        for condition in self.conditions:
            for quantity in condition.rule.reads:
                self._by_quantity.setdefault(quantity, []).append(condition)

    def add(self, readings: Iterable[Reading]) -> list[Finding]:
        """Take readings in the order they were recorded; return what the rules find."""
        found: list[Finding] = []
        for reading in map(judged, readings):
            asking = self._by_quantity.get(reading.quantity)
            if asking is None:
                if reading.sites != ("",):
                    self.history.count_sample(reading.step)
            elif self.history.add(reading):
                for condition in asking:
                    if self._is_complete(condition.rule, reading.step):
                        found += self._asked(condition)
            if not self._noted_unread and self.history.sampled > LEAST_SAMPLES:
                found += self._unread_rules(reading.step)
        return found

    def _unread_rules(self, step: int) -> list[Finding]:
        """Return, once, which rules need what another preset takes."""
        self._noted_unread = True
        idle = [
            c.rule.name
            for c in self.conditions
            if c.rule.preset and not all(q in self.history for q in c.rule.reads)
        ]
        return [_needs_preset(step, idle)] if idle else []

    @property
    def is_early(self) -> bool:
        """Whether sampling has begun and too little is known to judge the model."""
        return 0 < self.history.sampled < LEAST_SAMPLES

    def _asked(self, condition: Condition) -> list[Finding]:
        """Return what a condition finds; the early finds of the model are held back.

        The first steps of a healthy run look like trouble: Adam's first updates are as
        large as the rate allows. The loss has a waiting time of its own.
        """
        before = self._release() if self._held else []
        new = self._update(condition)
        if not new:
            return before
        if self.is_early and condition.rule.about != "loss":
            self._held.append(condition)
            return before
        return before + new

    def _release(self) -> list[Finding]:
        """Return what was held back while it was early, where it still holds."""
        if self.is_early:
            return []
        held, self._held = dict.fromkeys(self._held), []
        for condition in held:
            condition.forget_unless_firing()
        return [c.finding for c in held if c.finding]

    def _update(self, condition: Condition) -> list[Finding]:
        if condition.phase == "broken":
            return []
        try:
            return condition.update(self.history)
        # A boundary: a user's rule may raise anything, and must not end the training.
        except Exception as error:
            condition.phase = "broken"
            return [_rule_failed(self.history.step, condition.rule, error)]

    def _is_complete(self, rule: Rule, step: int) -> bool:
        if len(rule.reads) == 1:
            return True
        last_step = self.history.last_step
        for quantity in rule.reads:
            if last_step(quantity) != step:
                return False
        return True

    def note(self, findings: Iterable[Finding]) -> None:
        """Take what the watcher itself found: non-finite numbers, and gaps."""
        for finding in findings:
            if finding.belongs_to(NONFINITE) and finding.severity == "error":
                self.nonfinite.append(finding)
            elif any(map(finding.belongs_to, GAPS)) and finding.severity != "info":
                self.gaps.append(finding)

    def follow(self, news: News) -> None:
        """Take what a source has recorded since the last time."""
        self.add(news.readings)
        self.note(news.findings)

    @property
    def firing(self) -> list[Finding]:
        """What fires now, the gravest first, then the earliest."""
        early = self.is_early
        found = [
            c.finding
            for c in self.conditions
            if c.finding is not None and not (early and c.rule.about != "loss")
        ]
        return sorted(found, key=lambda f: (ORDER[f.severity], f.step))

    def shows(self, names: Collection[str]) -> bool:
        """Return whether one of these rules fires, or the state is one of these."""
        fires = any(finding.code in names for finding in self.firing)
        return bool(names) and (fires or self.verdict.state in names)

    @property
    def verdict(self) -> Verdict:
        """What is the matter with the run as far as it was read."""
        found = _dead(self) or _judged(self) or _unread(self) or _healthy(self)
        now = {c.rule.name: c.sentence for c in self.conditions if c.sentence}
        return replace(found, now=now, quantities=self._quantities())

    def _quantities(self) -> tuple[str, ...]:
        """Return what rules that fired stand on."""
        fired = (c.rule for c in self.conditions if c.fired)
        stand_on = (q for r in fired if r.severity != "info" for q in r.reads)
        return tuple(dict.fromkeys(stand_on))


def _rule_failed(step: int, rule: Rule, error: Exception) -> Finding:
    return Finding.warn(
        step,
        "rule.failed",
        f"the rule {rule.name} failed and is switched off: {error!r}",
        advice=f'repair it, or switch it off in equipoise.toml: "{rule.name}" = false',
        rule=rule.name,
    )


def _needs_preset(step: int, names: Sequence[str]) -> Finding:
    return Finding(
        step=step,
        severity="info",
        code="rules.unread",
        message=f"{len(names)} rules have nothing to judge, because this preset does "
        f"not read what they need: {', '.join(names)}",
        advice='watch(..., preset="deep") reads it',
        params={"rules": ", ".join(names)},
    )


def _dead(judge: Judge) -> Verdict | None:
    """Non-finite numbers, and no finite losses since: a skipped batch is no death."""
    first = _first_nonfinite(judge)
    if first is None:
        return None
    return Verdict(
        state="dead",
        sentence=f"non-finite numbers from step {first.step}: {first.message}",
        since=first.step,
        findings=(first, *judge.firing),
        advice=with_rate(_then_slower(first), judge.history.curve("learning_rate")),
    )


def _then_slower(first: Finding) -> str:
    """Return the advice; where an update broke the weights, a smaller step too."""
    broke = first.code == f"{NONFINITE}.update"
    return f"{first.advice}; then lower the learning rate" if broke else first.advice


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
    return Finding.error(
        step,
        "nonfinite.loss",
        f"the loss is {value}",
        advice="go back to a checkpoint before this step, and lower the learning rate",
        loss=value,
    )


NO_PROGRESS = "loss.not_falling"
AT_CHANCE = 0.9
"""Share of ln V above which a model has learnt next to nothing."""


def _is_stuck(judge: Judge, firing: Sequence[Finding]) -> bool:
    """Return whether the loss was near that of a guess for half of the run.

    A plateau lower down is failing, not dead: masked-language models stay at the
    entropy of single tokens for thousands of steps, and then go on.
    """
    for seen in (f.params for f in firing if f.code == NO_PROGRESS):
        keys = ("since_step", "loss", "reference")
        began, loss, guess = (float(seen[key] or 0) for key in keys)
        return 2 * began <= judge.history.step and loss > AT_CHANCE * guess
    return False


def _judged(judge: Judge) -> Verdict | None:
    """What rules fire: about the loss it is failing, about the model at risk."""
    about = {c.rule.name: c.rule.about for c in judge.conditions}
    now = {c.rule.name: c for c in judge.conditions}
    firing = [f for f in judge.firing if f.severity != "info"]
    if not firing:
        return None
    loss = sorted((f for f in firing if about[f.code] == "loss"), key=plainest)
    causes = [f for f in firing if about[f.code] != "loss"]
    lead = now[(began_first(causes) if causes else loss[0]).code]
    moved = moved_before(judge.history, lead.since, lead.rule.remedies)
    place, rate = places(lead), judge.history.curve("learning_rate")
    failing: State = "dead" if _is_stuck(judge, loss) else "failing"
    effect = [now[loss[0].code].sentence] if loss and causes else []
    advice = lead.advice or (loss[0].advice if loss else "")
    since = min(finding.since for finding in firing)
    return Verdict(
        state=failing if loss else "at risk",
        sentence="; ".join([*effect, explained(lead, moved)]),
        since=since if moved is None else min(since, moved.since),
        findings=tuple(judge.firing),
        advice=with_rate(advice, rate),
        cause="" if moved is None else moved.setting,
        where=place[0],
        seen=place[1],
    )


def _unread(judge: Judge) -> Verdict | None:
    """Too early, or something important was not read."""
    reason = _missing(judge)
    if not reason:
        return None
    return Verdict(
        state="not judged", sentence=reason, findings=tuple(judge.gaps), advice=""
    )


def _missing(judge: Judge) -> str:
    history = judge.history
    if history.sampled < LEAST_SAMPLES:
        return (
            f"{history.sampled} sampled steps so far: a run is judged from "
            f"{LEAST_SAMPLES} on"
        )
    if "loss" not in history:
        return "the loss was not read: give it to handle.step(loss=loss)"
    if "gradient.norm" not in history:
        return "no gradient was read"
    if history.details.get("attention") and "attention.theta.p50" not in history:
        return "no attention was read"
    if judge.gaps:
        return f"nothing wrong in what was read, but {judge.gaps[0].message}"
    return ""


def _healthy(judge: Judge) -> Verdict:
    history, loss = judge.history, judge.history.curve("loss")
    rules = sum(all(q in history for q in c.rule.reads) for c in judge.conditions)
    over = what_is_over(judge.conditions, history)
    recovered = any(is_episode(c) for c in judge.conditions)
    now = (
        f"{rules} rules over {history.sampled} sampled steps, none fires"
        f"{' any more' * bool(over)}; smoothed loss "
        f"{loss.blocks[0][1] if loss.blocks else math.nan:.4g} → {loss.smoothed():.4g}"
    )
    # A loss that had gone wrong is what a reader must know first.
    said = [f"{over}; over now", now] if recovered else [now, f"earlier: {over}"]
    return Verdict(
        state="healthy",
        sentence="; ".join(said if over else [now]),
        findings=tuple(judge.firing),
        recovered=recovered,
    )
