"""Makes the sentences of findings: codes and parameters become words, here alone.

A finding is rendered where it leaves: to the log, the run file, the sinks, a page. A
code that this version does not know, or parameters that do not fit its template, as
in files of another version, keep the text that was stored with them.
"""

from dataclasses import replace

from equipoise.records import Finding
from equipoise.text.templates import filled, template


def render(finding: Finding) -> Finding:
    """Return a finding with its message and advice in the words of this version.

    >>> found = Finding.warn(3, "probe.failed", probe="gain", error="KeyError(1)")
    >>> render(found).message
    'the gain probe failed and was detached: KeyError(1)'
    """
    words = {"step": finding.step, **finding.params}
    words["site"] = finding.site or "the model"
    known = template(finding.code, finding.params.get("case"))
    message = filled(known.message, words)
    if not message:
        return finding if finding.message else replace(finding, message=_bare(finding))
    return replace(finding, message=message, advice=filled(known.advice, words) or "")


def in_one_line(finding: Finding) -> str:
    """Return message and advice together, as an error says them."""
    found = render(finding)
    return f"{found.message}; {found.advice}" if found.advice else found.message


def _bare(finding: Finding) -> str:
    """Return code and parameters, for a finding that nothing has words for."""
    numbers = ", ".join(f"{key} = {value}" for key, value in finding.params.items())
    return f"{finding.code}: {numbers}" if numbers else finding.code
