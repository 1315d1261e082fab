"""Coverage: compares the attention sites that ran with those that were read.

What was not read becomes a finding, named with its reason and the next thing to try.
"""

import inspect
import re
import sys
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from equipoise.anatomy.sites import Anatomy, Gaps
from equipoise.errors import SilentSiteError
from equipoise.judging.verdict import Verdict
from equipoise.probes.capture import PassCoverage
from equipoise.records import Finding, Severity, html_table

# Attention implementations of Hugging Face whose kernels return no scores.
FLASH = ("flash", "sage", "paged", "kernels-community")
FOREIGN = ("flash_attn", "xformers", "sageattention", "transformer_engine", "fla")
SWITCH = "choose sdpa or eager attention to read it"
UNSEEN_MOVES = 2
"""Moves of the weights outside any step seen, before that is reported."""
NONE_SEEN = (
    "no softmax over scores and no fused attention was seen while it ran: linear "
    "attention, weights made by another function (sigmoid, ReLU, sparsemax, Gumbel), a "
    "softmax written out by hand, or code that was scripted or compiled before"
)
NONE_AT_ALL = (
    "no attention was met: what needs attention is not read, all else is (loss, "
    "gradients, norms, updates)"
)


def unread(
    anatomy: Anatomy, read: Container[str], gaps: Gaps | None = None
) -> dict[str, str]:
    """Return every attention site that was not read: name → why.

    ``read`` are the names of sites whose calls were read in a step. Calls that were
    seen outside any known site and could not be read, the step's ``gaps``, are listed
    as well.
    """
    missing = [site for site in anatomy.attention if site.name not in read]
    reasons = {site.name: _reason(site.module) for site in missing}
    seen = gaps.unread if gaps is not None else {}
    return {**reasons, **{n: why for n, why in seen.items() if n not in read}}


def unread_in_step(
    anatomy: Anatomy, ran: Collection[str], read: Collection[str], gaps: Gaps
) -> dict[str, str]:
    """Return the guessed sites that ran in a step and were not read: name → why.

    Declared sites are not among them: those must be read. Nor is a guess whose
    attention was read in a module inside it, or around it.
    """
    if not read and not anatomy.attention and not gaps.unread:
        return {"": NONE_AT_ALL}
    guessed = [s for s in anatomy.attention if not s.declared and s.name in ran]
    return {s.name: _reason(s.module) for s in guessed if not _covered(s.name, read)}


def _covered(site: str, read: Collection[str]) -> bool:
    around = [name for name in read if name and f"{site}.".startswith(f"{name}.")]
    return site in read or bool(around) or any(n.startswith(f"{site}.") for n in read)


def _reason(module: nn.Module) -> str:
    implementation = _implementation(module)
    if implementation.startswith(FLASH):
        return f"attn_implementation={implementation!r} returns no scores; {SWITCH}"
    kernel = _foreign(_code(module), _globals(module))
    if kernel:
        return f"it calls {kernel}, which returns no scores; {SWITCH}"
    if "linear" in f"{type(module).__name__} {_kind(module)}".lower():
        return "linear attention has no softmax over scores"
    return NONE_SEEN


def _code(module: nn.Module) -> CodeType | None:
    """Return the code of a module's forward; a scripted one has none."""
    forward = inspect.unwrap(type(module).forward)
    return getattr(forward, "__code__", None)


def _implementation(module: nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "_attn_implementation", ""))


def _kind(module: nn.Module) -> str:
    """Return what a module's configuration says its attention is, as our lab's does."""
    return str(getattr(getattr(module, "config", None), "attention", ""))


def _globals(module: nn.Module) -> Mapping[str, object]:
    home = inspect.getmodule(type(module)) or sys.modules.get(type(module).__module__)
    return vars(home) if home is not None else {}


def _foreign(code: CodeType | None, names: Mapping[str, object]) -> str:
    """Return the foreign kernel a function names, by where its globals come from."""
    for name in code.co_names if code else ():
        home = str(getattr(names.get(name), "__module__", "") or "")
        if home.partition(".")[0] in FOREIGN:
            return f"{home}.{name}"
    return ""


class Note(NamedTuple):
    """What is reported once, as it is met."""

    message: str
    advice: str = ""
    rule: str = "watch.unread"


PROMISED = {
    "gain": "projection.*",
    "gradients": "gradient.*",
    "logits": "output.*",
    "magnitudes": "residual.*",
    "normalisers": "norm.*",
    "updates": "update.norm",
}
"""Probe → the readings that it brings in every sampled step."""
CAUSES = {
    "residual.*": "no block was called with hidden states (…, tokens, width)",
    "norm.*": "no LayerNorm or RMSNorm was called with hidden states",
    "projection.*": "no attention was read in a module whose projections are known",
    "output.*": "the model returns no logits (…, classes)",
    "gradient.*": "no gradient was left after the backward pass",
    "update.norm": "watch was given no optimiser that moves this model's parameters",
}
NO_BLOCKS = "no list of like blocks was found in the model"
NO_NORMS = "no module whose class name ends in LayerNorm or RMSNorm was found"


def _why_missing(family: str, anatomy: Anatomy) -> str:
    cause = CAUSES[family]
    if family == "residual.*" and not anatomy.blocks:
        cause = NO_BLOCKS
    if family == "norm.*" and not anatomy.norms:
        cause = NO_NORMS
    return f"{family} is not read: {cause}"


@dataclass(slots=True)
class CoverageCheck:
    """Compares what ran with what was read, one sampled step after another.

    Only declared sites must be read: a guess may be wrong, and a module that did not
    run (LayerDrop, routing) has nothing to read.
    """

    anatomy: Anatomy
    strict: bool = False
    """Raise instead of returning a finding that something was not read."""
    compiled: bool = False
    """Whether compiled code was seen to call the model."""
    loss_known: bool = False
    """Whether a loss was ever seen, or given."""
    _unseen_moves: int = 0
    _steps_without_pass: int = 0
    _steps_without_loss: int = 0
    _steps_missing: dict[str, int] = field(default_factory=dict)
    """Family of readings → sampled steps in a row that did not bring it."""
    _reported: set[str] = field(default_factory=set)
    _reasons_reported: set[tuple[str, str]] = field(default_factory=set)

    def check(self, step: int, seen: PassCoverage, *, no_pass: bool) -> list[Finding]:
        """Return findings of sites that were not read.

        Raises:
            SilentSiteError: If strict, naming sites and cause.
        """
        if no_pass:
            return self._no_pass(step)
        declared = [s.name for s in self.anatomy.attention if s.declared]
        missing = [s for s in declared if s in seen.ran and s not in seen.read]
        new = [site for site in missing if site not in self._reported]
        self._reported |= set(new)
        found = []
        if new:
            found = [self._silent(step, new[0], _message(self.anatomy, seen, new))]
        return [*found, *self._not_read(step, seen), *self._missing(step, seen.gaps)]

    def _missing(self, step: int, gaps: Gaps) -> list[Finding]:
        """Name, once, readings that the preset promises and that do not come.

        At the second such step in a row, and only where no other finding names them.
        """
        missed, self._steps_missing = self._steps_missing, {}
        explained = "".join(why for _, why in self._reasons_reported)
        found = []
        for family in dict.fromkeys(gaps.missing):
            count = self._steps_missing[family] = missed.get(family, 0) + 1
            word = family.partition(".")[0]
            if count == 2 and not re.search(rf"(?<![.\w]){word}\.", explained):
                why = _why_missing(family, self.anatomy)
                found += self.once(step, Note(why, "everything else is read"))
        return found

    def _not_read(self, step: int, seen: PassCoverage) -> list[Finding]:
        """Name, once, what was met and could not be read: one finding per reason."""
        guesses = unread_in_step(self.anatomy, seen.ran, seen.read, seen.gaps)
        sites = {**(guesses if seen.started else {}), **seen.gaps.unread}
        met = [(site, why) for site, why in sites.items() if site not in seen.read]
        partial = [
            (site, why) for site, all in seen.gaps.partial.items() for why in all
        ]
        reasons: dict[str, list[str]] = {}
        for site, why in [*met, *partial]:
            if (site, why) not in self._reasons_reported:
                self._reasons_reported.add((site, why))
                reasons.setdefault(why, []).append(site)
        unread = {site for site, why in met if why != NONE_AT_ALL}
        return [
            _not_read(step, sites, why, missing=sites[0] in unread)
            for why, sites in reasons.items()
        ]

    def _no_pass(self, step: int) -> list[Finding]:
        """Report at the second step without a pass: the first may have begun early."""
        self._steps_without_pass += 1
        early = self._steps_without_pass == 1 and not self.compiled
        if early or "" in self._reported:
            return []
        self._reported.add("")
        return [self._silent(step, "", NO_PASS_SEEN)]

    def check_loss(self, step: int, loss: Tensor | None, partial: str) -> list[Finding]:
        """Return the finding, once, that steps end and no loss was ever seen.

        At the second such step: the first one's loss may be given after the step.
        If it is only ``partial``, that is the finding.
        """
        self.loss_known |= loss is not None
        if partial and loss is not None:
            return self.once(step, PARTIAL_LOSS[partial])
        self._steps_without_loss += not self.loss_known
        if self.loss_known or self._steps_without_loss != 2:
            return []
        return [self._silent(step, "", NO_LOSS_SEEN)]

    def moved_unseen(self, step: int) -> list[Finding]:
        """Note that weights moved outside any step; return the finding once it is."""
        self._unseen_moves += 1
        return self.no_step(step) if self._unseen_moves == UNSEEN_MOVES else []

    def no_step(self, step: int) -> list[Finding]:
        """Return the finding, once, that the end of steps cannot be seen."""
        if NO_STEP_SEEN in self._reported:
            return []
        self._reported.add(NO_STEP_SEEN)
        return [self._silent(step, "", NO_STEP_SEEN, severity="error")]

    def once(self, step: int, note: Note) -> list[Finding]:
        """Return the finding of a note, the first time."""
        if note.message in self._reported:
            return []
        self._reported.add(note.message)
        text, rule, advice = note.message.format(step=step), note.rule, note.advice
        return [
            Finding(step=step, severity="info", code=rule, message=text, advice=advice)
        ]

    def _silent(
        self, step: int, site: str, message: str, severity: Severity = "warn"
    ) -> Finding:
        if self.strict:
            raise SilentSiteError(message)
        return Finding(
            step=step,
            severity=severity,
            code="watch.silent",
            site=site,
            message=message,
        )


def _not_read(step: int, sites: list[str], why: str, *, missing: bool) -> Finding:
    more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
    return Finding(
        step=step,
        severity="warn" if missing else "info",
        code="watch.unread",
        site=sites[0],
        message=f"{sites[0] or 'the model'}{more}: {why}",
        advice="everything else is read",
        params={"sites": len(sites)},
    )


NO_PASS_SEEN = (
    "gradients arrived, but no forward pass of the watched model was seen: it runs "
    "inside compiled code (a compiled step function, or a torch.compile wrapper made "
    "beside the watched model), or is not called as model(...). "
    "Compile the model, not the step, and watch what you call: "
    "model = torch.compile(model); equipoise.watch(model, optimizer)"
)

LATE_OPTIMIZER = Note(
    "a second optimiser of this model steps after the one that ends the step, or in a "
    "backward pass: its update.*, and gradients that it frees, are not read",
    "give watch the optimiser that steps last",
)
OTHER_OPTIMIZER = Note(
    "another optimiser steps this model's parameters: from step {step} on, its steps "
    "are recorded too",
    rule="watch.optimizer",
)
OTHER_BATCHES = Note(
    "a second optimiser of this model steps on batches of its own: steps are counted "
    "and losses recorded of the first one only",
    "to record all: watch(model) without an optimiser, .step(loss=loss)",
)
MODULES_CHANGED = Note(
    "modules of this model were added, replaced or removed: from step {step} on, sites "
    "have the names of the modules as they are now",
    rule="watch.modules",
)
GIVE_LOSS = "if that is not your loss, give it after each step: handle.step(loss=loss)"
PARTIAL_LOSS = {
    "no scalar": Note(
        "a backward pass from a tensor that is no scalar reached this model: loss is "
        "of the step's other passes alone",
        GIVE_LOSS,
    ),
    "replaced": Note(
        "the loop replaces gradients after the backward pass (as PCGrad does): "
        "gradient.* is read of the new ones, loss is of the last passes alone",
        GIVE_LOSS,
    ),
}

NO_LOSS_SEEN = (
    "steps end, but no backward pass from a scalar loss was seen: the loss is not "
    "recorded. Call loss.backward(), not torch.autograd.grad, or give the loss after "
    "each step: handle.step(loss=loss)"
)

NO_STEP_SEEN = (
    "the weights move, but no step was ever seen to end: the optimiser's step is "
    "compiled (torch.compile(optimizer.step), or a compiled step function), or the "
    "weights are moved by hand. Leave the step eager, or watch without an optimiser "
    "and call .step() yourself"
)


def _message(anatomy: Anatomy, seen: PassCoverage, missing: list[str]) -> str:
    why = unread(anatomy, seen.read, seen.gaps)
    declared = sum(site.declared for site in anatomy.attention)
    return (
        f"no attention call was seen at {', '.join(missing[:3])} in a sampled step "
        f"({len(missing)} of {declared} sites were not read): {why[missing[0]]}"
    )


class Shown(Protocol):
    """What a watch handle shows of itself."""

    anatomy: Anatomy
    path: Path
    closed: bool

    @property
    def current_step(self) -> int: ...

    @property
    def findings(self) -> tuple[Finding, ...]: ...

    @property
    def verdict(self) -> Verdict: ...


def describe_watch(handle: Shown) -> str:
    """Return a handle in one line: model, step, state and file."""
    state = "closed" if handle.closed else "watching"
    found = f"step {handle.current_step}, {handle.verdict.state}"
    return f"Watch({handle.anatomy.family}, {state}, {found}, {str(handle.path)!r})"


def watch_html(handle: Shown) -> str:
    """Return a handle as a table for notebooks."""
    verdict = handle.verdict
    rows = [
        ("state", "closed" if handle.closed else "watching"),
        ("steps", handle.current_step),
        ("verdict", f"{verdict.state}: {verdict.sentence}"),
        ("try", verdict.advice),
        ("findings", len(handle.findings)),
        ("file", handle.path),
    ]
    return html_table(handle.anatomy.family, [row for row in rows if row[1] != ""])
