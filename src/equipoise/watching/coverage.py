"""A site that ran and said nothing: an error at first, a finding later."""

from dataclasses import dataclass, field

from equipoise.anatomy.sites import Anatomy
from equipoise.anatomy.unread import unread, unread_in_step
from equipoise.errors import SilentSiteError
from equipoise.probes.capture import Heard
from equipoise.records import Finding


@dataclass(slots=True)
class Silence:
    """Compares what ran with what was heard, one sampled step after another.

    Only declared sites are held to it: a guess may be wrong, and a module that did not
    run (LayerDrop, routing) has nothing to say.
    """

    anatomy: Anatomy
    first: bool = True
    certain: bool = False
    """Whether compiled code was seen to call the model."""
    _strikes: int = 0
    _known: set[str] = field(default_factory=set)
    _named: set[tuple[str, str]] = field(default_factory=set)

    def checked(self, step: int, heard: Heard, *, unseen: bool) -> list[Finding]:
        """Return findings of sites that fell silent.

        Raises:
            SilentSiteError: At the first sampled step, naming sites and cause.
        """
        if unseen:
            return self._unseen(step)
        expected = [s.name for s in self.anatomy.attention if s.declared]
        silent = [s for s in expected if s in heard.ran and s not in heard.attention]
        if heard.ran or heard.attention:
            first, self.first = self.first, False
            if silent and first:
                raise SilentSiteError(_complaint(self.anatomy, heard, silent))
        later = [f for site in silent if (f := self._once(step, site, LATER))]
        return [*later, *self._unread(step, heard)]

    def _unread(self, step: int, heard: Heard) -> list[Finding]:
        """Name, once, what was met and could not be read: one finding per reason."""
        silent = unread_in_step(self.anatomy, heard.ran, heard.attention)
        noticed = {**(silent if heard.passed else {}), **self.anatomy.noticed}
        met = [
            (site, why) for site, why in noticed.items() if site not in heard.attention
        ]
        partly = self.anatomy.partly.items()
        reasons: dict[str, list[str]] = {}
        for site, why in [*met, *((site, why) for site, all in partly for why in all)]:
            if (site, why) not in self._named:
                self._named.add((site, why))
                reasons.setdefault(why, []).append(site)
        return [_not_read(step, sites, why) for why, sites in reasons.items()]

    def _unseen(self, step: int) -> list[Finding]:
        """Complain at the second whole step unseen: the first may have begun early."""
        self._strikes += 1
        if self._strikes == 1 and not self.certain:
            return []
        first, self.first = self.first, False
        if first and any(site.declared for site in self.anatomy.attention):
            raise SilentSiteError(UNSEEN)
        found = self._once(step, "", UNSEEN)
        return [found] if found else []

    def _once(self, step: int, site: str, message: str) -> Finding | None:
        if site in self._known:
            return None
        self._known.add(site)
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

UNSEEN = (
    "gradients arrived, but no forward pass of the watched model was seen: it runs "
    "inside compiled code (a compiled step function, or a torch.compile wrapper made "
    "beside the watched model), or is not called as model(...). "
    "Compile the model, not the step, and watch what you call: "
    "model = torch.compile(model); equipoise.watch(model, optimizer)"
)


DEAF = (
    "gradients come and are cleared, but no step was ever seen to end: the optimiser's "
    "step is compiled (torch.compile(optimizer.step), or a compiled step function), or "
    "another optimiser trains this model. Leave the step eager, or watch without an "
    "optimiser and call .step() yourself"
)


def deafness(step: int) -> Finding:
    """Return the finding that no step's end can be seen."""
    return Finding(step=step, severity="error", rule="watch.silent", message=DEAF)


def _complaint(anatomy: Anatomy, heard: Heard, silent: list[str]) -> str:
    why = unread(anatomy, heard.attention)
    expected = sum(site.declared for site in anatomy.attention)
    return (
        f"no attention call was seen at {', '.join(silent[:3])} in the first sampled "
        f"step ({len(silent)} of {expected} sites ran unheard): {why[silent[0]]}"
    )
