"""Every check states its claim, and a verdict is what the check computed."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise.errors import InputError
from equipoise_lab import claims
from equipoise_lab.claims import catalogue
from equipoise_lab.claims.exact import BY_HAND, COUNTEREXAMPLES
from equipoise_lab.claims.page import markdown, write_claims
from equipoise_lab.claims.result import (
    BARE,
    CAVEAT,
    CLAIMS,
    EMADI,
    IN_PLACE,
    KINDS,
    WRONG,
    Claim,
    ClaimResult,
    Found,
    judged,
    judged_pattern,
)
from equipoise_lab.claims.rules import (
    USUAL,
    ClaimVerdict,
    Outcome,
    above,
    below,
    experiment,
    statement,
    within,
)
from equipoise_lab.claims.search import INEQUALITIES, Inequality, violated
from equipoise_lab.results.statistics import PairedDifference


def test_every_decorated_check_is_in_the_catalogue() -> None:
    """A module that ``catalogue`` forgets to import would be silently absent."""
    files = Path(claims.__path__[0]).glob("[!_]*.py")
    decorated = sum(
        len(re.findall(r"^@(?:[A-Z_0-9]+\.claim|judged_by)\(", f.read_text(), re.M))
        for f in files
    )
    assert len(catalogue.select()) == decorated >= 118


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_every_claim_has_a_statement_and_a_verdict(claim: Claim) -> None:
    assert claim.statement.endswith(".") and claim.instead.endswith((".", ")", "``"))
    assert claim.kind in KINDS


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test register checks of its own."""
    monkeypatch.setattr("equipoise_lab.claims.result.CLAIMS", dict(CLAIMS))


@pytest.mark.parametrize(("outcome", "verdict"), [(True, "holds"), (False, "refuted")])
def test_the_result_holds_what_the_check_found(
    outcome: bool, verdict: ClaimVerdict, registry: None
) -> None:
    @EMADI.claim("Thm 0", kind="theorem")
    def check() -> Found:
        """One line.

        Claim: It is
        so: always.

        Instead: Never.
        """
        return judged({"always": outcome}, {"evidence": 1.0})

    assert check() == ClaimResult(
        id="emadi2026.check",
        paper="emadi2026",
        where="Thm 0",
        kind="theorem",
        statement="It is so: always.",
        verdict=verdict,
        evidence={"part: always": float(outcome), "evidence": 1.0},
        instead="Never.",
        statistic="One line.",
        rule=USUAL[False],
    )
    assert ClaimResult.from_json(check().to_json()) == check()


@pytest.mark.parametrize(
    ("outcomes", "of_statement", "of_experiment"),
    [
        ([True, True], "holds", "pattern reproduced"),
        ([True, False], "partly", "partly"),
        ([True, False, None], "partly", "partly"),
        ([True, None], "undecided", "undecided"),
        ([False, None], "refuted", "pattern not reproduced"),
        ([False], "refuted", "pattern not reproduced"),
        ([None], "undecided", "undecided"),
    ],
)
def test_a_label_follows_from_the_parts(
    outcomes: list[Outcome], of_statement: ClaimVerdict, of_experiment: ClaimVerdict
) -> None:
    parts = {str(n): outcome for n, outcome in enumerate(outcomes)}
    assert statement(parts) == of_statement
    assert experiment(parts) == of_experiment
    if of_statement == "holds":
        assert statement(parts, caveat=True) == "holds with a caveat"
        assert experiment(parts, interval=False) == "partly"
    if of_statement == "refuted":
        assert statement(parts, instead=True) == "corrected"


def test_a_label_that_does_not_follow_is_refused(registry: None) -> None:
    """Typed in, from other parts, or of a pattern that has no interval."""
    given: tuple[Found, ...] = (
        ("holds", {"p": 0.03}),
        ("holds", {"part: one": 1.0, "part: other": 0.0}),
        ("corrected", {"part: one": 0.0, IN_PLACE: 0.0}),
        ("pattern reproduced", {"part: one": 1.0, BARE: 1.0}),
    )
    for found in given:
        claim = replace(CLAIMS["emadi2026.regimes"], check=lambda found=found: found)
        with pytest.raises(InputError, match="does not follow from its evidence"):
            claim.run()


def test_what_decides_a_label_stands_in_the_evidence() -> None:
    parts = {"one": False}
    assert judged(parts, {}, instead=True) == (
        "corrected",
        {"part: one": 0.0, IN_PLACE: 1.0},
    )
    assert judged(parts, {}, instead=False)[0] == "refuted"
    assert judged({"one": True}, {}, caveat=True)[1] == {"part: one": 1.0, CAVEAT: 1.0}
    found = judged_pattern({"one": True}, {}, interval=False)
    assert found == ("partly", {"part: one": 1.0, BARE: 1.0})
    (open_part,) = judged_pattern({"one": None}, {})[1].values()
    assert math.isnan(open_part)


def test_an_interval_decides_only_where_all_of_it_lies_on_one_side() -> None:
    def found(low: float, high: float) -> PairedDifference:
        return PairedDifference(mean=(low + high) / 2, low=low, high=high, p=0.5, n=5)

    assert [above(found(*ends)) for ends in ((1, 2), (-2, -1), (-1, 1))] == [
        *(True, False, None)
    ]
    assert [below(found(*ends)) for ends in ((1, 2), (-2, -1), (-1, 1))] == [
        *(False, True, None)
    ]
    bands = ((1, 2), (5, 6), (-3, -2), (2, 4))
    assert [within(found(*ends), 0, 3) for ends in bands] == [True, False, False, None]
    assert above(found(float("nan"), float("nan"))) is None


def test_every_claim_says_what_is_computed_and_how_it_is_judged() -> None:
    for claim in CLAIMS.values():
        assert claim.statistic.endswith((".", ":", "?")) and len(claim.rule) > 30, (
            claim.id
        )
        assert claim.where


def test_two_checks_cannot_share_a_name(registry: None) -> None:
    with pytest.raises(InputError, match=r"two checks are called emadi2026\.one"):
        for _ in range(2):

            @EMADI.claim("Thm 0", kind="theorem")
            def one() -> Found:
                return "holds", {}


def test_claims_are_selected_by_paper_and_by_name() -> None:
    of_emadi = catalogue.select(paper="emadi")
    assert of_emadi and all(c.paper is EMADI for c in of_emadi)
    assert [c.id for c in catalogue.select(claim="greedy_prefix")] == [
        "emadi2026.greedy_prefix"
    ]


@pytest.mark.parametrize("given", [{"paper": "einstein"}, {"claim": "no_such"}])
def test_a_name_that_fits_nothing_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(InputError, match="there are"):
        catalogue.select(**given)


def test_a_check_that_raises_is_not_a_verdict(registry: None) -> None:
    @EMADI.claim("Thm 0", kind="theorem")
    def broken() -> Found:
        raise ValueError("no such layer")

    claim = next(c for c in catalogue.select() if c.id == "emadi2026.broken")
    with pytest.raises(ValueError, match="no such layer"):
        catalogue.run([claim])


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_a_counterexample_stands_in_exact_arithmetic(name: str) -> None:
    """And a point at which the claim is right is not taken for one."""
    known = COUNTEREXAMPLES[name]
    assert name in CLAIMS
    assert known.evaluated()[1] and not known.evaluated(known.harmless)[1]


@pytest.mark.parametrize(
    "name", [n for n in COUNTEREXAMPLES if n.startswith("emadi") or "petrov" in n]
)
def test_a_wrong_counterexample_refutes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = COUNTEREXAMPLES[name]
    monkeypatch.setitem(COUNTEREXAMPLES, name, replace(known, at=known.harmless))
    claim = replace(CLAIMS[name], check=lambda: judged({"one": False}, {"theta": 1.0}))
    found = claim.run()
    assert found.verdict == "not checkable here"
    assert {"theta", "exact, at most", "exact, found"} <= found.evidence.keys()


NOT_A_BOUND = {"baek2026.analytic_checks"}
"""Statements with ≤ in them that bound nothing, and fail nowhere."""
SEARCHED = ("emadi2026.mixing_does_not_expand", "mudarisov2025.lemma_1")
VERDICTS = json.loads(
    (Path(__file__).parents[3] / "benchmarks/results/claims_sabotage.json").read_text()
)["rows"]


def test_the_docs_page_has_every_claim_as_it_is_stated_and_judged() -> None:
    """``./dev docs`` writes it. Verdicts by the benchmark: all of them take long."""
    page = (Path(__file__).parents[3] / "docs/claims.md").read_text(encoding="utf-8")
    labels = {row["claim"]: f"**{row['verdict']}**" for row in VERDICTS}
    for claim in CLAIMS.values():
        own = "" if claim.rule in USUAL.values() else f" {claim.rule}"
        judging = claim.statistic + own
        cells = (claim.where, claim.statement, judging, labels[claim.id], claim.instead)
        row = " | ".join(cell.replace("|", r"\|") for cell in cells)
        assert f"| {row} |" in page and claim.practice in page, claim.id


@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_finds_a_bound_that_is_too_small(name: str) -> None:
    """Every ratio comes above ½, so that half of a bound is found to be violated."""
    honest = INEQUALITIES[name]
    half = Inequality(lambda x: 2 * honest.ratio(x), honest.size)
    assert violated(half.largest()) and not violated(honest.largest())


def test_what_says_at_most_is_searched_or_refuted() -> None:
    """By the benchmark's verdicts, since running all of them here would take long."""
    failing = (*WRONG, "partly")
    refuted = {r["claim"] for r in VERDICTS if r["verdict"] in failing}
    stated = {c.id for c in CLAIMS.values() if re.search("[≤≥]", c.statement)}
    assert len(stated) > 12 and set(INEQUALITIES) <= CLAIMS.keys()
    assert stated - set(INEQUALITIES) - refuted == NOT_A_BOUND


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_violation_in_one_format_is_found(dtype: str) -> None:
    """1.3 in one format, a half in the others: only that format's reading tells."""
    high = {getattr(torch, dtype): 1.3}
    wrong = Inequality(lambda x: x.square().sum() * 0 + high.get(x.dtype, 0.5), 3)
    found = wrong.largest()
    assert violated(found) and found[f"in {dtype}"] > 1.2
    wide = replace(wrong, formats=())
    assert not violated(wide.largest())


def test_a_violation_between_numbers_of_different_size_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One number a million times the other: no common scale brings that about."""

    def ratio(x: torch.Tensor) -> torch.Tensor:
        return (x[0] / x[1]).abs().detach() / 1e6 + 0 * x.sum()  # nothing to climb

    wrong = Inequality(ratio, 2, formats=())
    assert violated(wrong.largest())
    monkeypatch.setattr("equipoise_lab.claims.search.MIXED", 0)
    assert not violated(wrong.largest())


def test_a_violation_found_by_the_search_refutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "emadi2026.mixing_does_not_expand"
    wrong = Inequality(lambda x: 1 + x.square().sum(), 3)
    monkeypatch.setitem(INEQUALITIES, name, wrong)
    assert CLAIMS[name].run().verdict == "refuted"


def test_the_page_groups_advice_and_can_be_filtered(tmp_path: Path) -> None:
    names = ("one_throughout", "greedy_prefix", "balanced_mass")
    results = [CLAIMS[f"emadi2026.{name}"].run() for name in names]
    text = write_claims(results, tmp_path / "claims.html").read_text()
    assert "<h3>It holds</h3>" in text and "do this instead</h3>" in text
    assert "Not decided" not in text
    for one in results:
        assert f'id="{one.id}" data-paper="emadi2026" data-verdict="{one.verdict}"' in (
            text
        )
    assert text.count("<option>") == 1 + 2 and text.count(BY_HAND) == 2
    page = markdown(results)
    assert (
        f"2 of 2 counterexamples are {BY_HAND}.\n" in page
        and "### Use it as corrected" not in page
    )
