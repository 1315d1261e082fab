"""What Baek's three experiments say, with the null predictors on every figure."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from equipoise.numerics.formats import FORMATS
from equipoise_lab.results.evidence import Evidence
from equipoise_lab.results.figures import Figure, FigureLine, chart
from equipoise_lab.results.finding import StudyFinding, StudyGrid
from equipoise_lab.results.statistics import PairedDifference, corrected, holm, paired
from equipoise_lab.studies.fragility.measurement import (
    COLUMNS,
    PREDICTORS,
    FragilityReading,
    leading,
    predictions,
    tracking,
)

HALF = FORMATS["fp16"]


def finding(evidence: Evidence) -> StudyFinding:
    """Say who foresees the error, whether κ leads it, and whether ε moves it."""
    followed = _readings(evidence, "tracking")
    series = _readings(evidence, "leading")
    control: dict[str, list[dict[str, Any]]] = dict(evidence.curves["control"])
    rows = tracking(followed)
    found = [_tracked(rows), _led(series), _moved(control, evidence.digits)]
    return StudyFinding(
        verdict=" ".join(text for text, _ in found),
        grids=[grid for _, grid in found],
        figures=[
            *_tracking_figures(followed),
            *_series_figures(series),
            _control_figure(control),
        ],
    )


def _readings(evidence: Evidence, name: str) -> list[FragilityReading]:
    return [
        FragilityReading(
            subject=subject,
            **dict(zip(COLUMNS, values, strict=True)),
        )
        for subject, listed in evidence.curves[name].items()
        for values in listed
    ]


def _tracked(rows: list[dict[str, Any]]) -> tuple[str, StudyGrid]:
    names = ("points", "log-correlation", "median measured/predicted", "p5", "p95")
    cells = [
        [row["format"], row["predictor"], *(_formatted(row[name]) for name in names)]
        for row in rows
    ]
    by = {(row["format"], row["predictor"]): row for row in rows}
    formats = [row["format"] for row in rows if row["predictor"] == "ours"][:-1]

    def least(predictor: str) -> str:
        found = [by[f, predictor]["log-correlation"] for f in formats]
        return f"{min(found):.2f} to {max(found):.2f}"

    mixed = by["all mixed", "ε_mach alone"]["log-correlation"]
    text = (
        "Within a format the log-correlation with the measured error is "
        f"{least('ours')} for ours, {least('v1')} for v1 and {least('v2')} for v2; "
        "with formats mixed, "
        f"ε_mach alone, knowing nothing of the model, reaches {mixed:.2f}."
    )
    head = ["format", "predictor", "points", "log-correlation", "median", "p5", "p95"]
    title = "Experiment 1: measured ÷ predicted error"
    return text, StudyGrid(title=title, head=head, cells=cells)


def _led(series: list[FragilityReading]) -> tuple[str, StudyGrid]:
    rows = [
        (run[0].seed, name, leading(run, against=against))
        for run in _by_run(series)
        for against, name in (("measured", "fp16 error"), ("loss", "loss"))
    ]
    p_values = holm([row["p"] for _, _, row in rows])
    cells = [
        [f"seed {seed}", name, *map(_formatted, row.values()), _formatted(p)]
        for (seed, name, row), p in zip(rows, p_values, strict=True)
    ]
    alone, all_at_once = (
        sum(p <= 0.05 for p in given)
        for given in ([row["p"] for _, _, row in rows], p_values)
    )
    text = (
        f"κ_softmax against error or loss: {all_at_once} of {len(rows)} pairs show a "
        "relation at 5 % once trends and memory are taken out, by Holm over the pairs "
        f"({alone} taken one by one, where chance gives {0.05 * len(rows):.1f})."
    )
    head = ["", "κ_softmax against", *leading(_by_run(series)[0]), "p, Holm"]
    return text, StudyGrid(title="Experiment 2: who leads", head=head, cells=cells)


POLICIES = [
    "policy",
    "actions",
    "tail loss",
    "final fp16 error",
    "worst fp16 error",
    "onsets",
    "same batch, ε moved",
]


ENDS = ("tail_loss", "final_mismatch", "worst_mismatch")


def _lower(pair: PairedDifference | None) -> bool:
    return pair is not None and pair.mean < 0 and pair.p < 0.05


def _moved(
    control: dict[str, list[dict[str, Any]]], digits: int | None
) -> tuple[str, StudyGrid]:
    plain = control["nothing"]
    seeds = len(plain)
    cells, helped, mended = [], [], []
    given = [
        None
        if runs is plain
        else paired([r[name] for r in runs], [r[name] for r in plain], digits=digits)
        for runs in control.values()
        for name in ENDS
    ]
    found = iter(corrected(given))
    for policy, runs in control.items():
        tail, final, worst = (next(found) for _ in ENDS)
        shown = [str(pair or "–") for pair in (tail, final, worst)]
        cells.append([policy, *_policy_cells(runs, shown)])
        if _lower(tail):
            helped.append(f"{policy} (by {-tail.mean:.1g} nats)")  # type: ignore[union-attr]
        if _lower(final):
            mended.append(policy)
    acted = statistics.fmean(r["actions"] for r in control["published rule"])
    text = (
        f"The published ε rule acted {acted:g} times a run; over {seeds} paired seeds "
        f"{', '.join(helped) or 'no policy'} lowered the loss against doing nothing, "
        f"and {', '.join(mended) or 'none'} the fp16 error."
    )
    title = (
        f"Experiment 3: minus doing nothing, {seeds} paired seeds, 95 % interval, p by "
        f"Holm over {sum(pair is not None for pair in given)} comparisons; the "
        "last column is the error's change on the very batch of each decision"
    )
    return text, StudyGrid(title=title, head=POLICIES, cells=cells)


def _policy_cells(runs: Sequence[Any], compared: list[str]) -> list[str]:
    replays = [r["replayed"] for r in runs if not math.isnan(r["replayed"])]
    return [
        f"{statistics.fmean(r['actions'] for r in runs):.1f}",
        *compared,
        f"{statistics.fmean(r['onsets'] for r in runs):.1f}",
        f"{statistics.fmean(replays):+.2%}" if replays else "–",
    ]


def _by_run(series: list[FragilityReading]) -> list[list[FragilityReading]]:
    seeds = dict.fromkeys((look.subject, look.seed) for look in series)
    return [[k for k in series if (k.subject, k.seed) == key] for key in seeds]


def _tracking_figures(found: list[FragilityReading]) -> list[Figure]:
    figures = []
    for name in dict.fromkeys(look.format for look in found):
        some = [look for look in found if look.format == name]
        measured = [look.measured for look in some]
        exact = [min(measured), max(measured)]
        figures.append(
            chart(
                f"tracking-{name}",
                f"{name}: every predictor, and two that know nothing",
                [
                    FigureLine(name="measured = predicted", x=exact, y=exact),
                    *(
                        FigureLine(
                            name=predictor,
                            x=predictions(some, predictor),
                            y=measured,
                            points=True,
                        )
                        for predictor in PREDICTORS
                    ),
                ],
                x="predicted error",
                y="measured error",
                log="xy",
            )
        )
    return figures


def _series_figures(series: list[FragilityReading]) -> list[Figure]:
    run = _by_run(series)[0]
    steps = [float(look.step) for look in run]
    lines = [FigureLine(name="measured", x=steps, y=[look.measured for look in run])]
    lines += [
        FigureLine(name=name, x=steps, y=predictions(run, name))
        for name in ("ours", "ε_mach alone", "constant")
    ]
    kappa = [look.kappa_softmax for look in run]
    scale = statistics.fmean(look.measured for look in run) / statistics.fmean(kappa)
    lines.append(
        FigureLine(name="κ_softmax, scaled", x=steps, y=[scale * k for k in kappa])
    )
    title = f"{run[0].subject}, seed {run[0].seed}: fp16 error over training"
    return [chart("leading", title, lines, x="step", y="relative error", log="y")]


def _control_figure(control: dict[str, list[dict[str, Any]]]) -> Figure:
    plain = [run["final_mismatch"] for run in control["nothing"]]
    seeds = [float(run["seed"]) for run in control["nothing"]]
    lines = [
        FigureLine(name=policy, x=seeds, y=[r["final_mismatch"] for r in runs])
        for policy, runs in control.items()
    ]
    lines.append(
        FigureLine(name="ε_mach alone", x=seeds, y=[HALF.spacing] * len(seeds))
    )
    typical = float(np.exp(np.mean(np.log(plain))))
    lines.append(FigureLine(name="constant", x=seeds, y=[typical] * len(seeds)))
    title = "fp16 error at the end, by seed and policy"
    return chart("control", title, lines, x="seed", y="relative error")


def _formatted(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"
