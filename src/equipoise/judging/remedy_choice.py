"""Which remedies fit a verdict, the one to try first in front."""

from equipoise.judging.remedy_catalogue import CATALOGUE, RemedyEntry
from equipoise.judging.rules import load_rules
from equipoise.judging.verdict import Verdict
from equipoise.records import Finding

NONFINITE = ("roll_back", "learning_rate", "skip_step")
"""After numbers that are not finite, whatever the rules say: there is no way on."""


def remedies_for(verdict: Verdict) -> list[RemedyEntry]:
    """Return the remedies of the rules that fire, the first to try in front.

    As in the verdict's sentence, a cause comes before what it does to the loss.
    """
    if verdict.state in ("healthy", "not judged"):
        return []
    grave = [finding for finding in verdict.findings if finding.severity != "info"]
    about = {name: rule.about for name, rule in load_rules().items()}
    ordered = sorted(grave, key=lambda finding: about.get(finding.code) == "loss")
    names = (name for finding in ordered for name in _remedies(finding))
    return [CATALOGUE[name] for name in dict.fromkeys(names)]


def _remedies(finding: Finding) -> tuple[str, ...]:
    if finding.belongs_to("nonfinite"):
        return NONFINITE
    rule = load_rules().get(finding.code)
    return rule.remedies if rule is not None else ()
