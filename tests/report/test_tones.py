"""One colour per state and one order of severities, on every surface."""

import json
import re

import pytest

from equipoise.judging.verdict import STATES
from equipoise.records import SEVERITIES
from equipoise.report.assets import script, style
from equipoise.report.live_screen import STYLES
from equipoise.text import tones


def test_every_state_and_severity_has_a_look() -> None:
    assert set(tones.STATES) == set(STATES)
    assert tuple(tones.SEVERITIES) == SEVERITIES
    looks = (*tones.STATES.values(), *tones.SEVERITIES.values())
    assert {look.tone for look in looks} <= set(tones.TONES)
    assert {colours.terminal for colours in tones.TONES.values()} <= set(STYLES)


def test_the_page_is_given_words_and_tones_as_data() -> None:
    (line,) = re.findall(r"^const LOOKS = (.*);$", script(), re.M)
    given = json.loads(line)
    assert given["states"]["at risk"] == ["At risk", "warn"]
    assert list(given["severities"]) == list(SEVERITIES)


@pytest.mark.parametrize("tone", tones.TONES)
def test_the_style_names_each_tone_once_per_theme(tone: str) -> None:
    values = re.findall(rf"--{tone}: (#\w+);", style())
    colours = tones.TONES[tone]
    assert values == [colours.light, colours.dark, colours.dark]
