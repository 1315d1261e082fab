"""A violation is reported once, withdrawn when mended, and kept while undecided."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.judging.checks.checker import Checker
from equipoise.judging.checks.registry import Check, Violation, violated
from equipoise.judging.facts import Facts
from equipoise.judging.judge import Judge
from equipoise.records import Finding


def facts(step: int, *sections: Mapping[str, Any]) -> Facts:
    return Facts(step=step, ranks=tuple({"weights": s} for s in sections))


def unmoved(seen: Sequence[Facts]) -> Iterable[Violation] | None:
    names = seen[-1].section("weights").get("unmoved")
    return None if names is None else [violated(name, count=1) for name in names]


def checker(find: Any = unmoved, expect: str = "", **options: Any) -> Checker:
    check = Check(
        code="check.no_movement",
        reads=("weights",),
        severity="error",
        relation="a weight with a gradient moves",
        reason="an update that moves nothing is none",
        find=find,
        expect=expect,
    )
    return Checker(checks={check.code: check}, **options)


def test_what_is_violated_is_found_once_and_withdrawn_when_it_holds_again() -> None:
    one = checker()
    (first,) = one.add(facts(0, {"unmoved": ["h.0", "h.1"]}))[:1]
    assert first.key == ("check.no_movement", "h.0", 0) and first.severity == "error"
    assert one.add(facts(1, {"unmoved": ["h.0", "h.1"]})) == []
    (over,) = one.add(facts(2, {"unmoved": ["h.1"]}))
    assert over.site == "h.0" and over.params == {"resolved": True, "since": 0}
    assert [f.site for f in one.add(facts(3, {"unmoved": ["h.0", "h.1"]}))] == ["h.0"]


def test_what_cannot_be_decided_changes_nothing() -> None:
    one = checker()
    one.add(facts(0, {"unmoved": ["h.0"]}))
    assert one.add(facts(1, {"other": 1})) == []
    assert one.add(facts(2, {})) == []
    assert [f.params["resolved"] for f in one.add(facts(3, {"unmoved": []}))] == [True]


def test_what_a_user_expects_is_not_found() -> None:
    one = checker(expected={"check.no_movement": ("*",)})
    assert one.add(facts(0, {"unmoved": ["h.0"]})) == []


def test_what_is_meant_in_one_place_is_found_in_another() -> None:
    one = checker(expected={"no_movement": ("h.0*", "wte")}, expect="no_movement")
    seen = facts(0, {"unmoved": ["h.0.attn", "h.1", "wte"]})
    assert [found.site for found in one.add(seen)] == ["h.1"]


def test_a_violation_of_many_places_is_meant_if_all_of_them_are() -> None:
    def two(seen: Sequence[Facts]) -> Iterable[Violation]:
        yield violated("h.0", places=["h.0", "h.1"], sites=2)

    for pattern, found in (("h.*", 0), ("h.0", 1)):
        one = checker(two, expected={"check.no_movement": (pattern,)})
        assert len(one.add(facts(0, {"unmoved": []}))) == found


def test_a_check_that_raises_is_named_once_and_asked_no_more() -> None:
    asked = []

    def broken(seen: Sequence[Facts]) -> Iterable[Violation]:
        asked.append(seen[-1].step)
        raise KeyError("h.0")

    one = checker(broken)
    (failed,) = one.add(facts(0, {"unmoved": []}))
    assert failed.code == "rule.failed" and one.add(facts(1, {"unmoved": []})) == []
    assert asked == [0]


def test_a_violated_relation_is_the_verdict_and_withdrawing_it_ends_that() -> None:
    judge, one = Judge(), checker()
    judge.note(one.add(facts(0, {"unmoved": ["h.0"]})))
    assert judge.verdict.state == "failing" and judge.shows(["check.no_movement"])
    assert judge.verdict.lead is not None and judge.verdict.lead.site == "h.0"
    judge.note(one.add(facts(1, {"unmoved": []})))
    assert judge.verdict.state == "not judged" and judge.verdict.reason == "few_samples"


def test_a_warning_puts_a_run_at_risk_and_an_info_changes_nothing() -> None:
    judge = Judge()
    judge.note([Finding.info(0, "check.frozen_random", site="h.0")])
    assert judge.verdict.state == "not judged"
    judge.note([Finding.warn(0, "check.eval_mode")])
    assert judge.verdict.state == "at risk"
