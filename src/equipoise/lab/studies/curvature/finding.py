"""Whose Hessian is largest, at the start and after training?"""

from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.figures import Figure, Line
from equipoise.lab.results.finding import Finding, Grid
from equipoise.lab.studies.curvature.measurement import GROUPS

SMALL = [name for name in GROUPS if name != "block"]


def curvature(evidence: Evidence) -> Finding:
    """Rank the groups at both ends of training, and show them on the way."""
    kinds = list(dict.fromkeys(arm.split("-")[0] for arm in evidence.runs))
    return Finding(
        verdict=" ".join(_ranking(evidence, kind) for kind in kinds),
        grids=[
            *(_norms(evidence, kind) for kind in kinds),
            *(
                grid
                for kind in kinds
                for arm in ends(evidence, kind)
                if (grid := _entries(evidence, arm)) is not None
            ),
        ],
        figures=[
            _figure(evidence, kind, what)
            for kind in kinds
            for what in ("hessian", "weights")
        ],
    )


def steps(evidence: Evidence, kind: str) -> list[int]:
    """Return the lengths of training of one model, ascending."""
    return sorted(
        int(arm.split("-")[1]) for arm in evidence.runs if arm.startswith(kind)
    )


def ends(evidence: Evidence, kind: str) -> list[str]:
    """Return the arms at the start and at the end of training."""
    lengths = steps(evidence, kind)
    return [f"{kind}-{at}" for at in dict.fromkeys((lengths[0], lengths[-1]))]


def _ranking(evidence: Evidence, kind: str) -> str:
    said = []
    for arm in ends(evidence, kind):
        norms = {g: evidence.mean(arm, f"hessian_{g}") for g in SMALL}
        order = sorted(norms, key=norms.__getitem__, reverse=True)
        said.append(", ".join(f"{g} {norms[g]:.3g}" for g in order))
    start, end = ends(evidence, kind)[0], ends(evidence, kind)[-1]
    grew = [
        g
        for g in SMALL
        if evidence.mean(end, f"hessian_{g}") > evidence.mean(start, f"hessian_{g}")
    ]
    ratio = evidence.mean(end, "hessian_FF") / evidence.mean(end, "hessian_LN2")
    return (
        f"{kind}, spectral norm of each group's Hessian at init: {said[0]}; at the "
        f"end: {said[-1]}. {len(grew)} of {len(SMALL)} groups grew. At the end the "
        f"feed-forward's own Hessian is {ratio:.3g} times that of the second norm, "
        "which is what the paper plots under its name."
    )


def _norms(evidence: Evidence, kind: str) -> Grid:
    arms = [f"{kind}-{at}" for at in steps(evidence, kind)]
    lines = [(f"‖H‖ of {g}", f"hessian_{g}") for g in GROUPS]
    lines += [("tr H of the block", "trace_block")]
    lines += [("−λ_min ÷ λ_max of the block", "negative_block")]
    lines += [(f"largest ‖W‖ in {g}", f"weights_{g}") for g in SMALL]
    return Grid(
        title=f"{kind}: steps of training, mean over seeds",
        head=["", *(arm.split("-")[1] for arm in arms), "seeds"],
        cells=[
            [
                words,
                *(f"{evidence.mean(arm, name):.3g}" for arm in arms),
                str(len(evidence.runs[arms[0]])),
            ]
            for words, name in lines
        ],
    )


def _entries(evidence: Evidence, arm: str) -> Grid | None:
    """Return the mean log₁₀ entry of each pair of groups, where it was measured."""
    cells = [
        [a, *(f"{evidence.mean(arm, f'entries_{a}_{b}'):.2f}" for b in SMALL[: i + 1])]
        for i, a in enumerate(SMALL)
    ]
    if "nan" in cells[0]:
        return None
    return Grid(
        title=f"{arm}: mean log₁₀ |entry| of the Hessian (10⁻⁶ is the floor)",
        head=["", *SMALL],
        cells=[[*row, *[""] * (len(SMALL) + 1 - len(row))] for row in cells],
    )


def _figure(evidence: Evidence, kind: str, what: str) -> Figure:
    lengths = steps(evidence, kind)
    words = {"hessian": "Hessian of each group", "weights": "Weights of each group"}
    return Figure(
        name=f"{kind}-{what}",
        title=f"{words[what]}, {kind}: spectral norm",
        x="step",
        y="",
        lines=[
            Line(
                name=g,
                x=lengths,
                y=[evidence.mean(f"{kind}-{at}", f"{what}_{g}") for at in lengths],
            )
            for g in SMALL
        ],
        log_y=True,
    )
