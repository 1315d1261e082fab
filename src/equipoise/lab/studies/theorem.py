"""Emadi's Fig. 3: the theorem against brute force, at each length and temperature."""

from equipoise.lab.results.evidence import Evidence
from equipoise.lab.results.finding import Finding, Grid

ROUNDING = 1e-9


def theorem(evidence: Evidence) -> Finding:
    """Say whether θ/τ is exact, and whether the paper's heuristic is θ."""
    worst = max(evidence.mean(arm, "theta_error") for arm in evidence.runs)
    wrong = {arm: evidence.mean(arm, "heuristic_wrong") for arm in evidence.runs}
    off = max(evidence.mean(arm, "heuristic_error") for arm in evidence.runs)
    most = max(wrong, key=lambda arm: wrong[arm])
    exact = "holds" if worst < ROUNDING else "does not hold here"
    match = "holds" if max(wrong.values()) == 0 else "does not hold here"
    lines = [
        ["Fig. 3", "‖J‖ = θ/τ, exactly", f"worst |θ - τ‖J‖| {worst:.1e}", exact],
        [
            "App. E.2",
            "the sorted-prefix heuristic matches exhaustive search for L ≤ 16",
            f"differs in up to {wrong[most]:.0%} of rows ({most}), by up to {off:.2g}",
            match,
        ],
    ]
    return Finding(
        verdict=f"The theorem {exact} (worst error {worst:.1e}); that the heuristic "
        f"equals θ {match}: it differs in up to {wrong[most]:.0%} of rows.",
        grids=[
            Grid(
                title="The paper's statement beside ours",
                head=["", "Emadi 2026", "ours", "pattern"],
                cells=lines,
            ),
            _points(evidence),
        ],
    )


def _points(evidence: Evidence) -> Grid:
    cells = [
        [
            arm,
            f"{evidence.mean(arm, 'norm'):.4g}",
            f"{evidence.mean(arm, 'theta_error'):.1e}",
            f"{evidence.mean(arm, 'heuristic_error'):.1e}",
            f"{evidence.mean(arm, 'heuristic_wrong'):.0%}",
        ]
        for arm in evidence.runs
    ]
    head = ["rows", "‖J‖, mean", "θ/τ, worst", "heuristic, worst", "heuristic wrong"]
    return Grid(title="Means over seeds, 200 rows each", head=head, cells=cells)
