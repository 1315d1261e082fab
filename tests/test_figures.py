"""What README and docs quote of a benchmark is what its JSON says."""

from pathlib import Path

import pytest

from docs import accelerators, figures, peers


def test_every_quoted_figure_is_the_one_in_the_json() -> None:
    pages = figures.quoting()
    assert any(page.name == "README.md" for page in pages)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert figures.filled(text) == text, f"{page.name}: python -m docs.figures"


def test_the_page_beside_peers_is_the_one_its_numbers_make() -> None:
    page = figures.HERE / "peers.md"
    assert page.read_text(encoding="utf-8") == peers.page(), "./dev docs"


def test_the_page_on_accelerators_is_what_its_counts_make() -> None:
    page = figures.HERE / "accelerators.md"
    assert page.read_text(encoding="utf-8") == accelerators.page(), "./dev docs"


def test_a_kernel_that_does_more_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all rows costs more than a sample; counted work is what decides."""
    device = accelerators.DEVICES["H100 SXM"]
    shape = accelerators.Shape(length=8192)
    few, all_rows = (
        accelerators.row_seconds(device, shape, sampled=s) for s in (True, False)
    )
    assert few < all_rows
    monkeypatch.setattr(accelerators, "FIRST", 10 * accelerators.FIRST)
    assert accelerators.row_seconds(device, shape, sampled=True) > few


def test_a_figure_that_is_not_in_the_json_is_refused() -> None:
    with pytest.raises(LookupError, match="rows/99"):
        figures.filled("<!-- fig overhead_small/rows/99/x as .1f -->1<!-- /fig -->")
    with pytest.raises(LookupError, match="no result 'no_such'"):
        figures.value("no_such/x")


def test_a_row_is_found_by_what_it_says_wherever_it_stands() -> None:
    plain = figures.value("overhead_small/rows/monitor=plain/mean %")
    assert plain == figures.value("overhead_small/rows/0/mean %") == 0
    assert figures.value("overhead_small/rows/monitor=trainscope, defaults/mean %") > 0
    with pytest.raises(LookupError, match="monitor=none"):
        figures.value("overhead_small/rows/monitor=none/mean %")


def test_a_changed_number_is_written_again() -> None:
    quoted = "<!-- fig overhead_small/every as d -->{}<!-- /fig --> steps"
    assert figures.filled(quoted.format(7)) == quoted.format(10)


def test_no_figure_beside_a_peer_is_typed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``./dev docs`` stops there; pages made from JSON are compared as a whole."""
    figures.check()
    page = tmp_path / "docs" / "how.md"
    page.parent.mkdir()
    (tmp_path / "README.md").write_text("Beside trainscope.")
    page.write_text("trainscope costs <!-- fig a/b as .1f -->17<!-- /fig --> % more")
    monkeypatch.setattr(figures, "HERE", page.parent)
    figures.check()
    page.write_text("trainscope costs 17 % more")
    with pytest.raises(LookupError, match=r"how\.md has a figure .* costs 17 % more"):
        figures.write()
