"""Coverage: compares the attention sites that ran with those that were read.

What was not read becomes a finding, named with its reason.
"""

from dataclasses import dataclass, field

from equipoise.anatomy.sites import Anatomy
from equipoise.anatomy.unread import unread, unread_in_step
from equipoise.errors import SilentSiteError
from equipoise.probes.capture import PassCoverage
from equipoise.records import Finding


@dataclass(slots=True)
class CoverageCheck:
    """Compares what ran with what was read, one sampled step after another.

    Only declared sites must be read: a guess may be wrong, and a module that did not
    run (LayerDrop, routing) has nothing to read.
    """

    anatomy: Anatomy
    first: bool = True
    compiled: bool = False
    """Whether compiled code was seen to call the model."""
    _steps_without_pass: int = 0
    _reported: set[str] = field(default_factory=set)
    _reasons_reported: set[tuple[str, str]] = field(default_factory=set)

    def check(self, step: int, seen: PassCoverage, *, no_pass: bool) -> list[Finding]:
        """Return findings of sites that were not read.

        Raises:
            SilentSiteError: At the first sampled step, naming sites and cause.
        """
        if no_pass:
            return self._no_pass(step)
        declared = [s.name for s in self.anatomy.attention if s.declared]
        missing = [s for s in declared if s in seen.ran and s not in seen.read]
        if seen.ran or seen.read:
            first, self.first = self.first, False
            if missing and first:
                raise SilentSiteError(_first_message(self.anatomy, seen, missing))
        found = [f for site in missing if (f := self._once(step, site, LATER))]
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
        return [_not_read(step, sites, why) for why, sites in reasons.items()]

    def _no_pass(self, step: int) -> list[Finding]:
        """Report at the second step without a pass: the first may have begun early."""
        self._steps_without_pass += 1
        if self._steps_without_pass == 1 and not self.compiled:
            return []
        first, self.first = self.first, False
        if first and any(site.declared for site in self.anatomy.attention):
            raise SilentSiteError(NO_PASS_SEEN)
        found = self._once(step, "", NO_PASS_SEEN)
        return [found] if found else []

    def _once(self, step: int, site: str, message: str) -> Finding | None:
        if site in self._reported:
            return None
        self._reported.add(site)
        return Finding(
            step=step,
            severity="warn",
            rule="watch.silent",
            site=site,
            message=message.format(site=site),
            advice="its readings stop here; the other sites are unaffected",
        )


def _not_read(step: int, sites: list[str], why: str) -> Finding:
    more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
    return Finding(
        step=step,
        severity="info",
        rule="watch.unread",
        site=sites[0],
        message=f"{sites[0] or 'the model'}{more}: {why}",
        advice="everything else is read",
        evidence={"sites": len(sites)},
    )


LATER = "{site} ran, but its attention was not seen"

NO_PASS_SEEN = (
    "gradients arrived, but no forward pass of the watched model was seen: it runs "
    "inside compiled code (a compiled step function, or a torch.compile wrapper made "
    "beside the watched model), or is not called as model(...). "
    "Compile the model, not the step, and watch what you call: "
    "model = torch.compile(model); equipoise.watch(model, optimizer)"
)


NO_STEP_SEEN = (
    "gradients come and are cleared, but no step was ever seen to end: the optimiser's "
    "step is compiled (torch.compile(optimizer.step), or a compiled step function), or "
    "another optimiser trains this model. Leave the step eager, or watch without an "
    "optimiser and call .step() yourself"
)


def no_step_seen(step: int) -> Finding:
    """Return the finding that no step's end can be seen."""
    return Finding(
        step=step, severity="error", rule="watch.silent", message=NO_STEP_SEEN
    )


def _first_message(anatomy: Anatomy, seen: PassCoverage, missing: list[str]) -> str:
    why = unread(anatomy, seen.read, seen.gaps)
    declared = sum(site.declared for site in anatomy.attention)
    return (
        f"no attention call was seen at {', '.join(missing[:3])} in the first sampled "
        f"step ({len(missing)} of {declared} sites were not read): {why[missing[0]]}"
    )
