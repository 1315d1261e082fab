"""Makes the sentences of verdicts: the cause, one number, what to do.

A reader has one minute. So the sentence begins with what somebody would change (the
learning rate, the start, the data), then says by what it was noticed.
"""

from collections.abc import Iterable
from dataclasses import replace

from equipoise.judging.rules import registry
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding
from equipoise.text.card import unseen
from equipoise.text.render import render
from equipoise.text.templates import filled, template


def worded(verdict: Verdict) -> Verdict:
    """Return a verdict with the words of this version, its findings' too."""
    lead, cause = (f and render(f) for f in (verdict.lead, verdict.cause))
    found = replace(
        verdict,
        lead=lead,
        cause=cause,
        effects=tuple(map(render, verdict.effects)),
        over=tuple(map(render, verdict.over)),
        findings=tuple(map(render, verdict.findings)),
        now={code: render(finding) for code, finding in verdict.now.items()},
    )
    headline, because = _in_two(found)
    return replace(
        found,
        headline=headline,
        because=because,
        sentence=_sentence(found),
        advice=_advice(found),
    )


def _sentence(verdict: Verdict) -> str:
    """Return the whole verdict in one sentence, with the moments it stands on."""
    lead = verdict.lead
    if lead is None:
        said = [_plain(verdict), _earlier(verdict)]
        return "; ".join(filter(None, reversed(said) if verdict.recovered else said))
    if verdict.of != "run":
        return f"{lead.message}{_more(verdict)}"
    if verdict.reason == "gap":
        return f"nothing wrong in what was read, but {lead.message}"
    if lead.belongs_to("nonfinite"):
        before = f"; before it: {verdict.cause.message}" if verdict.cause else ""
        return f"{_nonfinite(lead)}{before}"
    cause = f"{verdict.cause.message}: " if verdict.cause else ""
    effects = [f"{one.message} ({_when(one)})" for one in verdict.effects]
    return "; ".join([*effects, f"{cause}{lead.message} ({_when(lead)})"])


def _in_two(verdict: Verdict) -> tuple[str, str]:
    """Split a verdict into headline and evidence, without the moments."""
    lead = verdict.lead
    if lead is None:
        return _plain(verdict), _earlier(verdict)
    if verdict.of != "run" or verdict.reason == "gap":
        return _sentence(verdict), ""
    if lead.belongs_to("nonfinite"):
        found = _nonfinite(lead)
        return (verdict.cause.message, found) if verdict.cause else (found, "")
    named = (verdict.cause, lead, *verdict.effects)
    front, *others = [one for one in named if one is not None]
    return front.message, "; ".join(one.message for one in others)


def _nonfinite(lead: Finding) -> str:
    return f"non-finite numbers from step {lead.step}: {lead.message}"


def _plain(verdict: Verdict) -> str:
    """Return the sentence of a verdict that has no finding in front."""
    code = f"verdict.{verdict.reason or f'{verdict.state}.{verdict.of}'}"
    known = template(code, "over" if verdict.over else None)
    said = filled(known.message, verdict.coverage) or ""
    if verdict.reason or verdict.of != "run":
        return said
    return "; ".join(filter(None, [said, _not_seen(verdict)]))


def _not_seen(verdict: Verdict) -> str:
    """Name the facts that a healthy verdict does not stand on, with the reasons."""
    parts = [unseen(what, why) for what, why in verdict.unseen.items()]
    gaps = {gap.params.get("class") or gap.site for gap in _gaps(verdict)}
    return (
        f"not seen: {', '.join([*parts, *sorted(map(str, gaps))])}"
        if parts or gaps
        else ""
    )


def _gaps(verdict: Verdict) -> list[Finding]:
    found = (one for one in verdict.findings if one.belongs_to("watch.unread"))
    return [gap for gap in found if "share" in gap.params]


def _more(verdict: Verdict) -> str:
    more = verdict.coverage.get("more")
    return f" (and {more} more)" if more else ""


def _earlier(verdict: Verdict) -> str:
    """Return the episodes that are over, and whether the loss recovered from them."""
    told = "; ".join(_episodes(verdict.over))
    if not told:
        return ""
    return f"{told}; over now" if verdict.recovered else f"earlier: {told}"


def _episodes(over: Iterable[Finding]) -> Iterable[str]:
    for one in over:
        ended, times = one.params.get("ended"), one.params.get("times")
        if ended is None:
            yield one.message
            continue
        again = f", {times} times" if isinstance(times, int) and times > 1 else ""
        yield f"from step {one.since} to {ended}{again}: {one.message}"


def _when(finding: Finding) -> str:
    """Return the step it was read at, since when it holds, and when it was noticed."""
    when, noticed = [f"step {finding.step}"], finding.params.get("noticed")
    if finding.since < finding.step:
        when.append(f"since step {finding.since}")
    if isinstance(noticed, int) and finding.since < noticed < finding.step:
        when.append(f"noticed at step {noticed}")
    return ", ".join(when)


def _advice(verdict: Verdict) -> str:
    lead = verdict.lead
    if lead is None:
        return template(f"verdict.{verdict.reason}").advice if verdict.reason else ""
    if verdict.reason == "gap":
        return ""
    cause = verdict.cause
    if cause and cause.code not in registry.RULES and cause.advice:
        return cause.advice  # what was seen to move, before remedies of symptoms
    advised = [lead.advice, *(one.advice for one in verdict.effects)]
    advice = next(filter(None, advised), "")
    if lead.code == "nonfinite.update":
        advice += "; then lower the learning rate"
    return f"{advice}{_peak(verdict)}" if advice else ""


def _peak(verdict: Verdict) -> str:
    """Return the peak of the learning rate, where the advice is about the rate."""
    lead, peak = verdict.lead, verdict.coverage.get("rate_peak")
    assert lead is not None
    rule = registry.RULES.get(lead.code)
    about = lead.belongs_to("nonfinite") or (rule and "learning_rate" in rule.remedies)
    if peak is None or not about:
        return ""
    at = verdict.coverage["rate_peak_step"]
    return f" (learning rate: peak {peak:.3g}, reached at step {at})"
