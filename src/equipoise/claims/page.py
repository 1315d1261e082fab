"""The catalogue of claims for people: an offline page with filters, and a docs page."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.claims.catalogue import counts, summary
from equipoise.claims.result import PAPERS, VERDICTS, ClaimResult
from equipoise.report.offline_pages import StudyPage

_BODY = """
<h2>What a practitioner can rely on</h2><ul>
{% for one in practical %}<li>{{ one.practice }}
<a href="#{{ one.id }}">{{ one.verdict }}</a></li>{% endfor %}</ul>
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
<td><details><summary>{{ one.evidence | length }} numbers</summary><dl>
{% for name, value in one.evidence.items() %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}
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
    "Of the second to the fourth paper the statements checked are mostly the ones in "
    "doubt, so the shares do not grade a paper. What could not be read in full is "
    "marked as reconstructed."
)
PAGE = StudyPage(
    title="Claims of four papers",
    heading="What of the four papers can be relied on",
    body=_BODY,
    style="form { display: flex; gap: 1rem; margin: 1rem 0 } dd { margin: 0 0 .3rem }",
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
    """Return the docs page: what to rely on, paper by paper, then every claim."""
    lines = [
        "# Claims of the four papers",
        "",
        f"{summary(results)}. `equipoise claims` checks all of them again; `--evidence`"
        " prints the numbers, `--json` and `--html` keep them. A verdict is what its"
        f" check returned; statements are in our words. {INCOMPLETE}",
        "",
        "## What a practitioner can rely on",
        "",
        *(f"- {one.practice} ({one.id}: {one.verdict})" for one in _practical(results)),
        "",
    ]
    for paper in PAPERS:
        own = [result for result in results if result.paper == paper.key]
        if own:
            lines += [f"## {paper.title}", "", f"{summary(own)}.", "", *_rows(own), ""]
    return "\n".join(lines)


def _practical(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    return [result for result in results if result.practice]


def _rows(results: Sequence[ClaimResult]) -> list[str]:
    order = {verdict: number for number, verdict in enumerate(VERDICTS)}
    ranked = sorted(results, key=lambda one: order[one.verdict])
    cells = (
        (one.where, one.statement, f"**{one.verdict}**", one.instead) for one in ranked
    )
    rows = [" | ".join(c.replace("|", r"\|") for c in row) for row in cells]
    head = "| where | what is claimed | verdict | what is true |"
    return [head, "|---|---|---|---|", *(f"| {row} |" for row in rows)]
