"""Records survive the trip to JSON and back, broken numbers included."""

import json
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from equipoise.records import Applied, Finding, Reading, RunInfo


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def there_and_back(record):
    line = record.to_json()
    json.loads(line, parse_constant=refuse)
    assert "\n" not in line
    return type(record).from_json(line)


@given(st.lists(st.lists(st.floats(), min_size=1), max_size=3), st.integers(0))
def test_readings(values: list[list[float]], step: int) -> None:
    sites = tuple(f"h.{i}" for i in range(len(values)))
    rows = tuple(map(tuple, values))
    given = Reading(step=step, quantity="q", sites=sites, values=rows)
    back = there_and_back(given)
    assert (back.step, back.sites) == (step, sites)
    assert repr(back.values) == repr(given.values)


def test_a_scalar_belongs_to_the_model_as_a_whole() -> None:
    assert Reading.scalar(3, "loss", 2) == Reading(
        step=3, quantity="loss", sites=("",), values=((2.0,),)
    )


def test_sites_and_values_must_match() -> None:
    with pytest.raises(ValueError, match="q: 2 sites, 1 values"):
        Reading(step=0, quantity="q", sites=("a", "b"), values=((1.0,),))


def test_findings_remedies_and_runs() -> None:
    finding = Finding(
        step=1,
        severity="error",
        code="nonfinite.forward",
        site="h.3",
        message="h.3 is not finite",
        advice="lower the learning rate",
        params={"max_logit": 1e9, "name": "h.3", "first": True, "none": None},
    )
    applied = Applied(step=2, remedy="temperature", undone=True, details={"tau": 2.0})
    info = RunInfo(name="n", created="c", version="v", details={"blocks": ["a", "b"]})
    for record in (finding, applied, info):
        assert there_and_back(record) == record


def test_non_finite_evidence_becomes_text() -> None:
    finding = Finding(
        step=0, severity="warn", code="r", message="m", params={"x": math.inf}
    )
    assert there_and_back(finding).params == {"x": "inf"}


def test_findings_of_older_files_are_read() -> None:
    line = (
        '{"step": 4, "severity": "warn", "rule": "a.b", "site": "h.3", "message": "m"}'
    )
    found = Finding.from_json(line[:-1] + ', "advice": "c", "evidence": {"since": 2}}')
    assert (found.code, found.params, found.message) == ("a.b", {"since": 2}, "m")
    assert found.key == ("a.b", "h.3", 2)


def test_fields_of_a_newer_writer_are_ignored() -> None:
    line = Applied(step=1, remedy="r").to_json()
    newer = json.dumps({**json.loads(line), "colour": "blue"})
    assert Applied.from_json(newer) == Applied(step=1, remedy="r")
