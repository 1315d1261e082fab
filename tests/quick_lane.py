"""The tests of ``./dev test --quick``: all but those that ``quick_lane.toml`` names.

The file lists what is *left out*, so a new test is in the lane until somebody finds it
too slow for every commit. A path is written by as much of its end as tells it from all
others, so that a file may move without an edit here.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
# Where tests are: folders of the repository, with the doctests of the source.
PLACES = ("tests", "src", "lab")


def ends_with(path: Path, entry: str) -> bool:
    """Tell whether the last parts of a path are those of an entry."""
    parts = Path(entry).parts
    return path.parts[-len(parts) :] == parts


@dataclass(frozen=True, slots=True)
class QuickLane:
    """Files, and tests of other files, that wait for the whole suite."""

    files: Sequence[str]
    tests: Mapping[str, Sequence[str]]

    def leaves_out_file(self, path: Path) -> bool:
        return any(ends_with(path, entry) for entry in self.files)

    def leaves_out_test(self, path: Path, name: str) -> bool:
        """Tell whether a test waits, all its parameters with it."""
        return any(
            name.partition("[")[0] in names
            for entry, names in self.tests.items()
            if ends_with(path, entry)
        )

    def stale(self, paths: Sequence[Path]) -> Iterator[str]:
        """Yield each entry that does not name one file, or one of its tests."""
        for entry in (*self.files, *self.tests):
            found = [path for path in paths if ends_with(path, entry)]
            if len(found) != 1:
                yield f"{entry}: {len(found)} files end so"
                continue
            text = found[0].read_text(encoding="utf-8")
            for name in self.tests.get(entry, ()):
                if f"def {name}(" not in text:
                    yield f"{entry}: no test {name}"


def read(file: Path = LIST) -> QuickLane:
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return QuickLane(table["files"], table["tests"])


def files() -> list[Path]:
    """Return every file that may hold tests or doctests."""
    return sorted(p for place in PLACES for p in (ROOT / place).rglob("*.py"))
