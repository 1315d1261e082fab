"""What README and docs quote of a benchmark is what its JSON says."""

import pytest

from docs import figures, peers


def test_every_quoted_figure_is_the_one_in_the_json() -> None:
    pages = figures.quoting()
    assert any(page.name == "README.md" for page in pages)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert figures.filled(text) == text, f"{page.name}: python -m docs.figures"


def test_the_page_beside_peers_is_the_one_its_numbers_make() -> None:
    page = figures.HERE / "peers.md"
    assert page.read_text(encoding="utf-8") == peers.page(), "./dev docs"


def test_a_figure_that_is_not_in_the_json_is_refused() -> None:
    with pytest.raises(LookupError, match="rows/99"):
        figures.filled("<!-- fig overhead_small/rows/99/x as .1f -->1<!-- /fig -->")
    with pytest.raises(LookupError, match="no result 'no_such'"):
        figures.value("no_such/x")


def test_a_changed_number_is_written_again() -> None:
    quoted = "<!-- fig overhead_small/every as d -->{}<!-- /fig --> steps"
    assert figures.filled(quoted.format(7)) == quoted.format(10)
