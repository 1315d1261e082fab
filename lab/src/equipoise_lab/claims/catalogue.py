"""The catalogue of claims: every check of the four papers, chosen, run and summarised.

Importing this registers all checks. ``summary`` says what of the papers a practitioner
can rely on, from the results alone.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence

from equipoise.errors import InputError
from equipoise_lab.claims import (  # noqa: F401 - importing them registers their checks
    baek_estimators,
    baek_heads,
    baek_networks,
    emadi,
    emadi_appendix,
    emadi_depth,
    emadi_layers,
    emadi_rows,
    exact_petrov_baek,
    measured_results,
    mudarisov_distance,
    mudarisov_normalisation,
    mudarisov_separability,
    petrov_attention,
    petrov_block,
    petrov_formulas,
    published_results,
)
from equipoise_lab.claims import result as registry
from equipoise_lab.claims.result import (
    OURS,
    PAPERS,
    VERDICTS,
    Claim,
    ClaimResult,
)
from equipoise_lab.claims.rules import ClaimVerdict

RELIABLE: tuple[ClaimVerdict, ...] = (
    "holds",
    "holds with a caveat",
    "pattern reproduced",
)
COUNTED: dict[ClaimVerdict, str] = {
    "holds": "hold",
    "holds with a caveat": "hold with a caveat",
    "partly": "hold partly",
    "corrected": "corrected",
    "refuted": "refuted",
    "undecided": "undecided",
    "pattern reproduced": "patterns reproduced",
    "pattern not reproduced": "patterns not reproduced",
    "not checkable here": "not checkable here",
}
"""Verdict → what several claims do."""


def select(*, paper: str | None = None, claim: str | None = None) -> list[Claim]:
    """Return the claims of a paper, or those whose id contains a text.

    Raises:
        InputError: If nothing fits; it lists what there is.
    """
    known = list(registry.CLAIMS.values())
    if paper is not None and not any(paper in p.key for p in PAPERS):
        names = ", ".join(p.key for p in PAPERS)
        raise InputError(f"no paper is called {paper!r}: there are {names}")
    chosen = [c for c in known if paper is None or paper in c.paper.key]
    found = [c for c in chosen if claim is None or claim in c.id]
    if not found:
        names = ", ".join(c.id for c in chosen[:6])
        raise InputError(
            f"no claim is called {claim!r}: there are {names} … (equipoise claims "
            "--list shows all)"
        )
    order = {p.key: number for number, p in enumerate(PAPERS)}
    return sorted(found, key=lambda c: order[c.paper.key])


def run(
    claims: Sequence[Claim],
    *,
    progress: Callable[[Claim], None] = lambda claim: None,
    thorough: bool = False,
) -> list[ClaimResult]:
    """Run the checks one after another; ``thorough`` searches longer."""
    found = []
    for claim in claims:
        progress(claim)
        found.append(claim.run(thorough=thorough))
    return found


def counts(results: Sequence[ClaimResult]) -> dict[ClaimVerdict, int]:
    """Return how many claims got each verdict; verdicts that none got are left out."""
    tally = Counter(result.verdict for result in results)
    return {verdict: tally[verdict] for verdict in VERDICTS if tally[verdict]}


def summary(results: Sequence[ClaimResult]) -> str:
    """Return in one sentence how many claims got which label.

    >>> summary([])
    'no claim was checked'
    """
    if not results:
        return "no claim was checked"
    tally = counts(results).items()
    parts = ", ".join(f"{n} {kind if n == 1 else COUNTED[kind]}" for kind, n in tally)
    own = sum(result.where.startswith(OURS) for result in results)
    theirs = (
        f"; {own} of the statements are ours, about what a paper says" if own else ""
    )
    return f"{len(results)} claims: {parts}{theirs}"


def as_json(results: Sequence[ClaimResult]) -> str:
    """Return the results as one JSON array."""
    rows = [json.loads(result.to_json()) for result in results]
    return json.dumps(rows, indent=1, ensure_ascii=False)
