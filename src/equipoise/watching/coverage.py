"""Coverage: compares the attention sites that ran with those that were read.

What was not read becomes a finding, named with its reason.
"""

from dataclasses import dataclass, field

from equipoise.anatomy.sites import Anatomy
from equipoise.anatomy.unread import NONE_AT_ALL, unread, unread_in_step
from equipoise.errors import SilentSiteError
from equipoise.probes.capture import PassCoverage
from equipoise.records import Finding, Severity


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
    _steps_without_pass: int = 0
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
        return [*found, *self._not_read(step, seen)]

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

    def no_step(self, step: int) -> list[Finding]:
        """Return the finding, once, that the end of steps cannot be seen."""
        if NO_STEP_SEEN in self._reported:
            return []
        self._reported.add(NO_STEP_SEEN)
        return [self._silent(step, "", NO_STEP_SEEN, severity="error")]

    def other_optimizer(self, step: int) -> list[Finding]:
        """Return the finding, once, that another optimiser steps these parameters."""
        if OTHER_OPTIMIZER in self._reported:
            return []
        self._reported.add(OTHER_OPTIMIZER)
        rule = "watch.optimizer"
        message = OTHER_OPTIMIZER.format(step=step)
        return [Finding(step=step, severity="info", rule=rule, message=message)]

    def _silent(
        self, step: int, site: str, message: str, severity: Severity = "warn"
    ) -> Finding:
        if self.strict:
            raise SilentSiteError(message)
        return Finding(
            step=step,
            severity=severity,
            rule="watch.silent",
            site=site,
            message=message,
        )


def _not_read(step: int, sites: list[str], why: str, *, missing: bool) -> Finding:
    more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
    return Finding(
        step=step,
        severity="warn" if missing else "info",
        rule="watch.unread",
        site=sites[0],
        message=f"{sites[0] or 'the model'}{more}: {why}",
        advice="everything else is read",
        evidence={"sites": len(sites)},
    )


NO_PASS_SEEN = (
    "gradients arrived, but no forward pass of the watched model was seen: it runs "
    "inside compiled code (a compiled step function, or a torch.compile wrapper made "
    "beside the watched model), or is not called as model(...). "
    "Compile the model, not the step, and watch what you call: "
    "model = torch.compile(model); equipoise.watch(model, optimizer)"
)


OTHER_OPTIMIZER = (
    "another optimiser steps this model's parameters: from step {step} on, its steps "
    "are recorded too"
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
