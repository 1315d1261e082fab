"""Makes the sentences of findings: codes and parameters become words, here alone.

A finding is rendered where it leaves: to the log, the run file, the sinks, a page. A
code that this version does not know, or parameters that do not fit its template, as
in files of another version, keep the text that was stored with them.
"""

from dataclasses import replace

from equipoise.judging.remedy_catalogue import advise
from equipoise.judging.rules import registry
from equipoise.records import Finding
from equipoise.text.templates import filled, template


def render(finding: Finding) -> Finding:
    """Return a finding with its message and advice in the words of this version.

    >>> found = Finding.warn(3, "probe.failed", probe="gain", error="KeyError(1)")
    >>> render(found).message
    'the gain probe failed and was detached: KeyError(1)'
    """
    words = {"step": finding.step, "code": finding.code, **finding.params}
    words["site"] = finding.site or "the model"
    known, rule = template(finding.code, finding.params.get("case")), None
    if "resolved" in finding.params:
        known = template("rules.over")
    else:
        rule = registry.RULES.get(finding.code)
    # A user's own rule brings its sentence; the advice of a rule is its remedies.
    message = filled(known.message or (rule.message if rule else ""), words)
    if not message:
        return finding if finding.message else replace(finding, message=_bare(finding))
    advice = filled(known.advice, words) or (advise(rule.remedies) if rule else "")
    return replace(finding, message=message, advice=advice)


def in_one_line(finding: Finding) -> str:
    """Return message and advice together, as an error says them."""
    found = render(finding)
    return f"{found.message}; {found.advice}" if found.advice else found.message


def _bare(finding: Finding) -> str:
    """Return code and parameters, for a finding that nothing has words for."""
    numbers = ", ".join(f"{key} = {value}" for key, value in finding.params.items())
    return f"{finding.code}: {numbers}" if numbers else finding.code
