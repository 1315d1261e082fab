"""Coverage: compares the attention sites that ran with those that were read.

What was not read becomes a finding, named with its reason and the next thing to try.
"""

import inspect
import sys
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Literal

from torch import Tensor, nn

from equipoise.anatomy.sites import Anatomy, Gaps, Reason
from equipoise.errors import SilentSiteError
from equipoise.probes.capture import PassCoverage
from equipoise.records import Finding
from equipoise.text.render import in_one_line
from equipoise.watching.findings import (
    NO_ATTENTION,
    NO_LOSS,
    NO_PASS,
    NO_STEP,
    PARTIAL_LOSS,
    UNREAD,
    not_read,
    silent,
    silent_sites,
)
from equipoise.watching.step.layers import share_of

# Attention implementations of Hugging Face whose kernels return no scores.
FLASH = ("flash", "sage", "paged", "kernels-community")
FOREIGN = ("flash_attn", "xformers", "sageattention", "transformer_engine", "fla")
UNSEEN_MOVES = 2
"""Moves of the weights outside any step seen, before that is reported."""


def unread(
    anatomy: Anatomy, read: Container[str], gaps: Gaps | None = None
) -> dict[str, Reason]:
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
) -> dict[str, Reason]:
    """Return the guessed sites that ran in a step and were not read: name → why.

    Declared sites are not among them: those must be read. Nor is a guess whose
    attention was read in a module inside it, or around it.
    """
    if not read and not anatomy.attention and not gaps.unread:
        return {"": NO_ATTENTION}
    guessed = [s for s in anatomy.attention if not s.declared and s.name in ran]
    return {s.name: _reason(s.module) for s in guessed if not _covered(s.name, read)}


def _covered(site: str, read: Collection[str]) -> bool:
    around = [name for name in read if name and f"{site}.".startswith(f"{name}.")]
    return site in read or bool(around) or any(n.startswith(f"{site}.") for n in read)


def _reason(module: nn.Module) -> Reason:
    implementation = _implementation(module)
    if implementation.startswith(FLASH):
        return Reason("implementation", kernel=implementation)
    kernel = _foreign(_code(module), _globals(module))
    if kernel:
        return Reason("foreign_kernel", kernel=kernel)
    if "linear" in f"{type(module).__name__} {_kind(module)}".lower():
        return Reason("linear_attention")
    return Reason("unknown_attention")


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
    "residual.*": "no_hidden_states",
    "norm.*": "no_norm_calls",
    "projection.*": "no_projections",
    "output.*": "no_logits",
    "gradient.*": "gradients_gone",
    "update.norm": "no_updates",
}
"""Readings that do not come → why, unless the model has no such part."""


def _why_missing(family: str, anatomy: Anatomy) -> str:
    if family == "residual.*" and not anatomy.blocks:
        return "no_blocks"
    if family == "norm.*" and not anatomy.norms:
        return "no_norms"
    return CAUSES[family]


@dataclass(slots=True)
class CoverageCheck:
    """Compares what ran with what was read, one sampled step after another.

    Only declared sites must be read: a guess may be wrong, and a module that did not
    run (LayerDrop, routing) has nothing to read.
    """

    anatomy: Anatomy
    strict: bool = False
    """Raise instead of returning a finding that something was not read."""
    known: set[Literal["loss", "compiled code"]] = field(default_factory=set)
    """Whether a loss was ever seen, or given, and compiled code that called the model.
    """
    _unseen_moves: int = 0
    _steps_without_pass: int = 0
    _steps_without_loss: int = 0
    _steps_missing: dict[str, int] = field(default_factory=dict)
    """Family of readings → sampled steps in a row that did not bring it."""
    _reported: set[str] = field(default_factory=set)
    _reasons_reported: set[tuple[str, Reason]] = field(default_factory=set)

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
            found = [self._strictly(self._silent_sites(step, seen, new))]
        return [*found, *self._not_read(step, seen), *self._missing(step, seen.gaps)]

    def _missing(self, step: int, gaps: Gaps) -> list[Finding]:
        """Name, once, readings that the preset promises and that do not come.

        At the second such step in a row, and only where no other finding names them.
        """
        missed, self._steps_missing = self._steps_missing, {}
        reasons = (why for _, why in self._reasons_reported)
        explained = {family for why in reasons for family in why.families}
        found = []
        for family in dict.fromkeys(gaps.missing):
            count = self._steps_missing[family] = missed.get(family, 0) + 1
            if count == 2 and family.partition(".")[0] not in explained:
                why = _why_missing(family, self.anatomy)
                found += self.once(step, f"{UNREAD}.{why}")
        return found

    def _not_read(self, step: int, seen: PassCoverage) -> list[Finding]:
        """Name, once, what was met and could not be read: one finding per reason."""
        guesses = unread_in_step(self.anatomy, seen.ran, seen.read, seen.gaps)
        sites = {**(guesses if seen.started else {}), **seen.gaps.unread}
        met = [(site, why) for site, why in sites.items() if site not in seen.read]
        partial = [
            (site, why) for site, all in seen.gaps.partial.items() for why in all
        ]
        reasons: dict[Reason, list[str]] = {}
        for site, why in [*met, *partial]:
            if (site, why) not in self._reasons_reported:
                self._reasons_reported.add((site, why))
                reasons.setdefault(why, []).append(site)
        unread = {site for site, why in met if why != NO_ATTENTION}
        return [
            not_read(
                step,
                sites,
                why,
                missing=sites[0] in unread,
                share=share_of(self.anatomy, sites) if sites[0] in unread else None,
            )
            for why, sites in reasons.items()
        ]

    def _no_pass(self, step: int) -> list[Finding]:
        """Report at the second step without a pass: the first may have begun early."""
        self._steps_without_pass += 1
        early = self._steps_without_pass == 1 and "compiled code" not in self.known
        if early or "" in self._reported:
            return []
        self._reported.add("")
        return [self._strictly(silent(step, NO_PASS))]

    def check_loss(self, step: int, loss: Tensor | None, partial: str) -> list[Finding]:
        """Return the finding, once, that steps end and no loss was ever seen.

        At the second such step: the first one's loss may be given after the step.
        If it is only ``partial``, that is the finding.
        """
        self.known |= {"loss"} if loss is not None else set()
        if partial and loss is not None:
            return self.once(step, PARTIAL_LOSS[partial])
        self._steps_without_loss += "loss" not in self.known
        if "loss" in self.known or self._steps_without_loss != 2:
            return []
        return [self._strictly(silent(step, NO_LOSS))]

    def moved_unseen(self, step: int) -> list[Finding]:
        """Note that weights moved outside any step; return the finding once it is."""
        self._unseen_moves += 1
        return self.no_step(step) if self._unseen_moves == UNSEEN_MOVES else []

    def no_step(self, step: int) -> list[Finding]:
        """Return the finding, once, that the end of steps cannot be seen."""
        if NO_STEP in self._reported:
            return []
        self._reported.add(NO_STEP)
        return [self._strictly(silent(step, NO_STEP, "error"))]

    def once(self, step: int, code: str) -> list[Finding]:
        """Return the note of a code, the first time."""
        if code in self._reported:
            return []
        self._reported.add(code)
        return [Finding.info(step, code)]

    def _silent_sites(
        self, step: int, seen: PassCoverage, missing: list[str]
    ) -> Finding:
        why = unread(self.anatomy, seen.read, seen.gaps)[missing[0]]
        declared = sum(site.declared for site in self.anatomy.attention)
        share = share_of(self.anatomy, missing)
        return silent_sites(step, missing, declared, why, share)

    def _strictly(self, found: Finding) -> Finding:
        if self.strict:
            raise SilentSiteError(in_one_line(found))
        return found
