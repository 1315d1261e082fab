"""Regenerate the pages that are made from measurements: ``./dev docs``."""

from collections.abc import Callable
from pathlib import Path

from docs import choosing, zoo

HERE = Path(__file__).parent
PAGES: dict[str, Callable[[], str]] = {
    "zoo.md": zoo.page,
    "choosing-a-normaliser.md": choosing.page,
}


def main() -> None:
    """Write every generated page."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
