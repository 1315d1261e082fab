"""The catalogue of claims for people: an offline page with filters, and a docs page."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.report.offline_pages import StudyPage
from equipoise_lab.claims.catalogue import RELIABLE, counts, summary
from equipoise_lab.claims.coverage import page_rows
from equipoise_lab.claims.exact import BY_HAND
from equipoise_lab.claims.result import EMADI, PAPERS, VERDICTS, ClaimResult
from equipoise_lab.claims.rules import USUAL, ClaimVerdict

_BODY = """
<h2>What a practitioner can rely on</h2>
{% for heading, group in practical.items() %}<h3>{{ heading }}</h3><ul>
{% for one in group %}<li>{{ one.practice }}
<a href="#{{ one.id }}">{{ one.paper }}, {{ one.where }}: {{ one.verdict }}</a></li>
{% endfor %}</ul>{% endfor %}
<form id="filters"><label>Paper <select name="paper"><option value="">all</option>
{% for paper in papers %}<option>{{ paper }}</option>{% endfor %}</select></label>
<label>Verdict <select name="verdict"><option value="">all</option>
{% for verdict in verdicts %}<option>{{ verdict }}</option>{% endfor %}</select></label>
<output id="shown">{{ results | length }} claims</output></form>
<div class="wide" tabindex="0"><table><thead><tr>
<th>paper</th><th>where</th><th>what is claimed</th>
<th>verdict</th><th>what is true</th><th>evidence</th></tr></thead><tbody>
{% for one in results %}
<tr id="{{ one.id }}" data-paper="{{ one.paper }}" data-verdict="{{ one.verdict }}">
<td>{{ one.paper }}</td><td>{{ one.where }}</td><td>{{ one.statement }}</td>
<td><strong>{{ one.verdict }}</strong></td><td>{{ one.instead }}</td>
<td><details><summary>{{ one.evidence | length }} numbers</summary>
<p>{{ one.statistic }}</p><p>{{ one.rule }}</p><dl>
{% for name, value in one.evidence.items() %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}
{% if one.exact %}<dt>without rounding</dt><dd>{{ one.exact }}</dd>{% endif %}
</dl></details></td></tr>{% endfor %}
</tbody></table></div>
<script>
const form = document.getElementById("filters");
form.addEventListener("change", () => {
  const chosen = new FormData(form);
  let count = 0;
  for (const row of document.querySelectorAll("tbody tr")) {
    row.hidden = ["paper", "verdict"].some(
      (key) => chosen.get(key) && row.dataset[key] !== chosen.get(key));
    count += row.hidden ? 0 : 1;
  }
  document.getElementById("shown").value = `${count} claims`;
});
</script>
"""
INCOMPLETE = (
    "The statements checked of the second to the fourth paper are mostly the ones in "
    "doubt, so the shares do not grade a paper. Where a source could not be read in "
    "full the statement is marked as reconstructed: a reader who has the original "
    "should compare it first. Experiments are repeated with small models on CPUs; a "
    "pattern not reproduced says what happens there, not that the paper's own runs "
    "were wrong."
)
LABELS = (
    "Every part true: *holds*, or *holds with a caveat* where the check found the "
    "limitation it names. Some true and some false: *partly*. None true: *corrected* "
    "where what we state in its place was checked and held, otherwise *refuted*. "
    "Something open and nothing false: *undecided*. Patterns of experiments are "
    "*reproduced*, *partly* or *not reproduced* by the same rule; what has no interval "
    "(one model, a median over seeds) is at most *partly* a pattern. Every run of a "
    "check derives its label again from the parts in its evidence, and fails if "
    "another was returned. Where *how it is judged* names no rule, it is the usual one:"
)
ADVICE: dict[str, tuple[ClaimVerdict, ...]] = {
    "It holds": RELIABLE,
    "Use it as corrected": ("corrected",),
    "It does not hold: do this instead": ("refuted", "pattern not reproduced"),
    "It holds in part": ("partly",),
    "Not decided": ("undecided", "not checkable here"),
}
PAGE = StudyPage(
    title="Claims of four papers",
    heading="What of the four papers can be relied on",
    body=_BODY,
    style="form { display: flex; flex-wrap: wrap; gap: .4rem 1rem; margin: 1rem 0 } "
    "select { max-width: 100% } dd { margin: 0 0 .3rem } "
    ".wide table { min-width: 64rem } .wide td { white-space: normal }",
)


def write_claims(results: Sequence[ClaimResult], path: Path) -> Path:
    """Write the results as one offline page."""
    return PAGE.write(
        path,
        headline=summary(results),
        remarks=[INCOMPLETE],
        results=results,
        practical=_practical(results),
        papers=[p.key for p in PAPERS if any(r.paper == p.key for r in results)],
        verdicts=list(counts(results)),
    )


def markdown(results: Sequence[ClaimResult]) -> str:
    """Return the docs page: what to rely on, then every claim, paper by paper."""
    lines = [
        "# Claims of the four papers",
        "",
        f"{summary(results)}. `equipoise claims` checks all of them again; `--evidence`"
        " prints the numbers, `--json` and `--html` keep them. A statement, in our"
        " words, is taken apart into parts, each true, false or undecided; the label "
        f"follows from them ([how](#how-a-label-follows)). {INCOMPLETE}",
        "",
        _confirmed(results),
        "",
        "## What a practitioner can rely on",
        "",
    ]
    for heading, group in _practical(results).items():
        lines += [f"### {heading}", ""]
        lines += [f"- {one.practice} ({one.id}: {one.verdict})" for one in group]
        lines.append("")
    lines += ["## How a label follows", "", LABELS, "", *_usual(), ""]
    for paper in PAPERS:
        own = [result for result in results if result.paper == paper.key]
        if own:
            lines += [f"## {paper.title}", "", f"{summary(own)}.", "", *_rows(own), ""]
    if any(result.paper == EMADI.key for result in results):
        lines += ["## The main paper, section by section", "", *page_rows(), ""]
    return "\n".join(lines)


def _usual() -> list[str]:
    return [
        f"- {what}: {rule[0].lower()}{rule[1:]}"
        for what, rule in (("statements", USUAL[False]), ("experiments", USUAL[True]))
    ]


def _practical(results: Sequence[ClaimResult]) -> dict[str, list[ClaimResult]]:
    """Return the advice under what to make of the claim; headings without any fall."""
    groups = {
        heading: [one for one in results if one.practice and one.verdict in verdicts]
        for heading, verdicts in ADVICE.items()
    }
    return {heading: group for heading, group in groups.items() if group}


def _confirmed(results: Sequence[ClaimResult]) -> str:
    """Say how many refutations stand without rounding, and why the others are none."""
    wrong = [one for one in results if one.exact]
    left = [one for one in wrong if one.exact != BY_HAND]
    reasons = "; ".join(f"{one.id.split('.')[1]}: {one.exact}" for one in left)
    found = f"{len(wrong) - len(left)} of {len(wrong)} counterexamples are {BY_HAND}."
    return f"{found} The others are not algebraic: {reasons}." if left else found


def _rows(results: Sequence[ClaimResult]) -> list[str]:
    order = {verdict: number for number, verdict in enumerate(VERDICTS)}
    ranked = sorted(results, key=lambda one: order[one.verdict])
    cells = (
        (one.where, one.statement, _judging(one), f"**{one.verdict}**", one.instead)
        for one in ranked
    )
    rows = [" | ".join(c.replace("|", r"\|") for c in row) for row in cells]
    head = "| where | what is claimed | how it is judged | verdict | what is true |"
    return [head, "|---|---|---|---|---|", *(f"| {row} |" for row in rows)]


def _judging(one: ClaimResult) -> str:
    """Return the statistic, and the rule where it is not the usual one."""
    own = one.rule not in USUAL.values()
    return f"{one.statistic} {one.rule}" if own else one.statistic
