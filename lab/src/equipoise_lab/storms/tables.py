"""Tables of the benchmark on the terminal: labels by family, scores by forecaster."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from equipoise_lab.storms.labels import Label, counts, sensitivity
from equipoise_lab.storms.scoring import Score


def label_table(found: Sequence[Label]) -> Table:
    """Return how many runs of each family failed and survived."""
    rows = counts(found)
    head = list(next(iter(rows.values())))
    table = Table(
        "runs",
        *head,
        title="Outcomes, by the loss alone",
        caption="too early: failed within 32 steps of the start or of the injection; "
        f"learning-rate sensitivity {sensitivity(found):.2f} nats",
    )
    for name, row in rows.items():
        table.add_row(name, *(str(row[column]) for column in head))
    return table


def score_table(scores: Mapping[str, Score]) -> Table:
    """Return recall, false alarms and lead of each forecaster."""
    first = next(iter(scores.values()))
    table = Table(
        "forecaster",
        "recall",
        "95 %",
        "false alarms",
        "per 10,000",
        "at most (95 %)",
        "median lead",
        title=f"{len(first.forecastable)} foreseeable failures, "
        f"{first.stable_steps} stable steps",
    )
    for name, score in scores.items():
        low, high = score.recall_interval()
        table.add_row(
            name,
            f"{score.recall:.0%}",
            f"{low:.0%} – {high:.0%}",
            str(score.false_alarms),
            f"{score.rate:.2f}",
            f"{score.rate_bound:.2f}",
            f"{score.median_lead:.0f}",
        )
    return table
