"""Regenerate the pages that are made from measurements: ``./dev docs``.

Results are rendered again from the raw numbers beside them; no experiment is repeated.
"""

from collections.abc import Callable
from pathlib import Path

from docs import (
    accelerators,
    choosing,
    command_line,
    figures,
    peers,
    zoo,
    zoo_by_class,
)
from equipoise_lab.claims import catalogue
from equipoise_lab.claims.page import markdown
from equipoise_lab.results.publishing import index, publish, published

HERE = Path(__file__).parent
PAGES: dict[str, Callable[[], str]] = {
    "zoo.md": zoo.page,
    "zoo-by-class.md": zoo_by_class.page,
    "accelerators.md": accelerators.page,
    "choosing-a-normaliser.md": choosing.page,
    "cli.md": command_line.page,
    "peers.md": peers.page,
    "claims.md": lambda: markdown(catalogue.run(catalogue.select())),
}


def main() -> None:
    """Write every generated page."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
        print(f"docs/{name}")
    figures.write()
    results = HERE / "results"
    for name, evidence in published(results).items():
        publish(evidence, results / name)
        print(f"docs/results/{name}/")
    index(results)


if __name__ == "__main__":
    main()
