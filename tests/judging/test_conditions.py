"""Pending, firing, resolved; hysteresis; missing data; users' rules and settings."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest

from equipoise.errors import InputError
from equipoise.judging.judge import Judge
from equipoise.judging.remedy_catalogue import CATALOGUE, advise
from equipoise.judging.rules import (
    RULES,
    Rule,
    configured,
    measured,
    registry,
    rule,
)
from equipoise.judging.rules.registry import RuleSubject
from equipoise.records import Finding, Reading
from equipoise.text.render import render
from equipoise.text.templates import templates

MESSAGE = "x is {value:g}, above {threshold:g}"


@pytest.fixture(autouse=True)
def _rules_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", dict(RULES))


def level(**options: object) -> Rule:
    """Return a rule that looks at x itself: above 10, over below 5."""
    given = {"above": 10.0, "release": 5.0, "persist": 3, "recover": 2, **options}
    rule("test.x", reads="x", source="this test", message=MESSAGE, **given)(
        lambda history: history.scalar("x")
    )
    return registry.RULES["test.x"]


def course(values: Iterable[float], one: Rule) -> tuple[Judge, list[Finding]]:
    judge = Judge({}, rules=[one])
    readings = [Reading.scalar(n, "x", value) for n, value in enumerate(values)]
    return judge, judge.add(readings)


def test_it_fires_after_its_persistence_and_says_so_once() -> None:
    judge, found = course([0, 11, 11, 11, 12, 13, 12], level())
    assert [(f.step, f.severity) for f in found] == [(3, "warn")]
    assert render(found[0]).message == "x is 11, above 10"
    assert found[0].params["since"] == 1
    assert judge.conditions[0].phase == "firing" and judge.firing == found


def test_a_verdict_gives_the_value_and_the_step_that_belong_together() -> None:
    """Onset, alarm and now are three steps with three values: none is mixed up."""
    judge, found = course([0, 11, 12, 13, 14, 15, 3], level())
    (firing,) = judge.firing
    given = {key: firing.params[key] for key in ("since", "value_since")}
    assert given == {"since": 1, "value_since": 11.0}
    assert (firing.step, firing.params["value"]) == (3, 13.0)
    condition = judge.conditions[0]
    now = condition.now
    assert now is not None and firing == found[0]
    assert (now.step, now.since, now.params["noticed"]) == (5, 1, 3)
    assert render(now).message == "x is 15, above 10"


def test_an_interruption_starts_the_count_again() -> None:
    assert not course([11, 11, 9, 11, 11, 9], level())[1]


def test_between_the_limits_nothing_changes() -> None:
    judge, found = course([11] * 3 + [6] * 50, level())
    assert len(found) == 1 and judge.conditions[0].phase == "firing"


def test_it_is_over_after_its_recovery_and_may_come_again() -> None:
    judge, found = course([11] * 3 + [4, 6, 4, 4] + [11] * 3, level())
    assert [f.step for f in found] == [2, 6, 9]
    assert found[1].severity == "info" and found[1].params["resolved"]
    assert judge.conditions[0].fired == 2


def test_missing_data_never_end_it() -> None:
    one = level()
    rule("test.sometimes", reads="x", above=10.0, source="s", message="m", persist=1)(
        lambda history: None if history.scalar("x") == 0 else history.scalar("x")
    )
    judge, _ = course([11] + [0] * 100, registry.RULES["test.sometimes"])
    assert judge.conditions[0].phase == "firing"
    judge, _ = course([11] * 3 + [math.nan], one)
    assert judge.conditions[0].phase == "firing"


def test_it_becomes_an_error_once_it_is_severe() -> None:
    found = course([11, 11, 11, 12, 101, 102, 11, 103], level(severe=100.0))[1]
    assert [(f.step, f.severity) for f in found] == [(2, "warn"), (4, "error")]


def test_below_is_the_mirror_image() -> None:
    one = level(above=None, below=1.0, release=2.0)
    _, found = course([0.5] * 3 + [1.5] * 9 + [2.5] * 2, one)
    assert [f.step for f in found] == [2, 13]


def test_two_quantities_are_judged_when_both_are_of_one_step() -> None:
    rule("test.both", reads=("x", "y"), above=0.0, source="s", message="m", persist=1)(
        lambda h: h.scalar("x") * h.scalar("y")
    )
    judge = Judge({}, rules=[registry.RULES["test.both"]])
    assert not judge.add([Reading.scalar(0, "x", 1.0), Reading.scalar(1, "y", 1.0)])
    assert judge.add([Reading.scalar(1, "x", 1.0)])


def test_a_rule_that_raises_is_switched_off_and_named() -> None:
    rule("test.broken", reads="x", above=0.0, source="s", message="m")(
        lambda history: 1 / 0
    )
    judge, found = course([1.0] * 9, registry.RULES["test.broken"])
    assert [f.code for f in found] == ["rule.failed"] and "ZeroDivision" in str(found)
    assert judge.at_work[0].broken


def test_a_name_is_taken_once_and_a_threshold_is_given_once() -> None:
    level()
    with pytest.raises(InputError, match="twice"):
        level()
    with pytest.raises(InputError, match="one of above"):
        rule("test.two", reads="x", above=1.0, below=1.0, source="s", message="m")


def settings(tmp_path: Path, text: str) -> dict[str, Rule]:
    path = tmp_path / "equipoise.toml"
    path.write_text(text)
    return {one.name: one for one in configured(path)}


def test_a_file_switches_rules_off_and_changes_thresholds(tmp_path: Path) -> None:
    text = """
    [rules]
    "loss.risen" = false
    attention.saturated = 0.05
    "update.too_large" = {threshold = 0.04, persist = 9}
    "gradient.spike" = {severity = "error"}
    """
    found = settings(tmp_path, text)
    assert "loss.risen" not in found
    assert found["attention.saturated"].threshold == 0.05
    assert found["attention.saturated"].release == pytest.approx(0.1)
    assert found["update.too_large"].persist == 9
    assert found["update.too_large"].release == pytest.approx(0.03)
    assert found["gradient.spike"].severity == "error"
    assert RULES["update.too_large"].threshold == 0.06


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[rules]\n"loss.rizen" = 1.0', "loss.risen"),
        ('[rules]\n"loss.risen" = "no"', "give false"),
        ('[rules]\n"loss.risen" = {treshold = 1}', "loss.risen.treshold"),
        ('[rules]\n"loss.risen" = {threshold = 1, x = 1}', "give false"),
        ("rules = 3", "a table"),
        ("[rules", "not TOML"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_clear_line(
    tmp_path: Path, text: str, named: str
) -> None:
    with pytest.raises(InputError, match=named):
        settings(tmp_path, text)


class Point:
    """An entry point whose module registers a rule, or cannot be imported."""

    value = "their.package"

    def __init__(self, *, broken: bool) -> None:
        self.broken = broken

    def load(self) -> None:
        if self.broken:
            raise ImportError("no such thing")
        level()


@pytest.mark.parametrize("broken", [False, True])
def test_rules_of_installed_packages(
    monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    point = Point(broken=broken)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    if broken:
        with pytest.raises(InputError, match=r"their\.package"):
            registry.load_rules()
    else:
        assert "test.x" in registry.load_rules()


def test_every_remedy_a_rule_names_is_in_the_catalogue() -> None:
    for one in RULES.values():
        assert set(one.remedies) <= CATALOGUE.keys(), one.name
        assert one.about == "watching" or one.of != "run" or advise(one.remedies)
    assert all(entry.code and entry.fits for entry in CATALOGUE.values())


@pytest.mark.parametrize("change", ["one_more", "one_less"])
def test_a_declaration_without_measure_is_an_error(change: str, tmp_path: Path) -> None:
    table = "".join(f'["{name}"]\n' for name in registry._MEASURES)
    first = f'["{next(iter(registry._MEASURES))}"]\n'
    text = table + '["no.measure"]\n' if change == "one_more" else table[len(first) :]
    for file in registry.DECLARED:
        (tmp_path / file).write_text(text if file == "run.toml" else "")
    with pytest.raises(InputError, match="missing"):
        registry.declare(tmp_path)


def places(**options: object) -> Rule:
    """Return a rule that finds every site of x, above 10."""
    given = {"above": 10.0, "persist": 2, "many": True, **options}
    rule("test.places", reads="x", source="this test", message=MESSAGE, **given)(
        lambda history: [
            measured(row[0], site) for site, row in history.table("x").items()
        ]
    )
    return registry.RULES["test.places"]


def everywhere(step: int, **values: float) -> Reading:
    rows = tuple((value,) for value in values.values())
    return Reading(step=step, quantity="x", sites=tuple(values), values=rows)


def test_a_rule_that_finds_many_places_waits_and_ends_at_each() -> None:
    judge = Judge({}, rules=[places(recover=1, about="loss")])
    found = judge.add(
        [
            everywhere(0, a=11.0, b=1.0),
            everywhere(1, a=12.0, b=11.0),
            everywhere(2, a=1.0, b=12.0),
        ]
    )
    assert [(f.code, f.site, f.step) for f in found] == [
        ("test.places", "a", 1),
        ("test.places", "a", 2),
        ("test.places", "b", 2),
    ]
    assert found[1].params["resolved"] and found[1].since == 0
    assert [f.key for f in judge.firing] == [("test.places", "b", 1)]


def test_beyond_forty_places_the_rest_is_counted() -> None:
    judge = Judge({}, rules=[places(severity="error")], of="weights")
    sites = {f"w{i}": 11.0 for i in range(100)}
    found = judge.add_at_once([everywhere(0, **sites)])
    assert len(found) == len(judge.verdict.findings) == 41
    more = found[-1]
    assert (more.code, more.severity) == ("rules.more", "error")
    assert more.params == {"of": "test.places", "count": 60}
    assert judge.verdict.state == "failing" and judge.verdict.coverage["more"] == 40


def test_what_is_judged_at_once_is_not_healthy_where_a_rule_failed() -> None:
    rule("test.broken", reads="x", above=0.0, source="s", message="m")(
        lambda history: 1 / 0
    )
    judge = Judge({}, rules=[registry.RULES["test.broken"]], of="start")
    judge.add_at_once([Reading.scalar(0, "x", 1.0)])
    assert judge.verdict.state != "healthy"
    assert [f.code for f in judge.verdict.findings] == ["rule.failed"]


@pytest.mark.parametrize(
    ("of", "state"), [("weights", "failing"), ("start", "at risk")]
)
def test_an_error_in_weights_is_failing_and_numbers_that_are_not_finite_dead(
    of: RuleSubject, state: str
) -> None:
    found = [Reading.scalar(0, "x", 11.0)]
    judge = Judge({}, rules=[level(severity="error")], of=of)
    judge.add_at_once(found)
    assert judge.verdict.state == state
    judge.note([Finding.error(0, "nonfinite.loss", loss="nan")])
    assert judge.verdict.state == "dead"


def test_one_list_of_settings_changes_rules_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "equipoise.toml"
    path.write_text('[rules]\n"weights.dead_head" = false\n"start.logits" = 80\n')
    names = {one.name: one for one in configured(path)}
    assert "weights.dead_head" not in names and "weights.scale" in names
    assert names["start.logits"].threshold == 80
    weights, starts = (configured(path, of=of) for of in ("weights", "start"))
    assert {one.of for one in weights} == {"weights"} != {one.of for one in starts}


def test_every_rule_of_ours_has_a_sentence() -> None:
    for one in RULES.values():
        cases = [code for code in templates() if code.startswith(f"{one.name}/")]
        assert one.name in templates() or cases, one.name
