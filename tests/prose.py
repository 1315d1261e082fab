"""No pattern of translated English may become more frequent: a part of ``./dev check``.

``python -m tests.prose`` counts each pattern in the work tree and in the commit it was
branched from. There is no committed number to raise, and what an older file says blocks
nobody: only a line that is new can fail, and it is printed with the better form.
"""

import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ = {".py", ".md", ".toml", ".js", ".j2", ".html", ".template"}
# The changelog tells history; the others hold the patterns themselves.
NOT_READ = {"CHANGELOG.md", "tests/prose.py", "tests/test_prose.py"}

PATTERNS = {
    r"\b(Return|Say|Give|Yield|Tell|Name)s? what\b": "name the noun: 'Return the loss'",
    r"\bis no (?!longer\b|more\b|less\b)[a-z]": "'is not a …', or the positive form",
    r"\bso many\b": "the number or its name: 'every N steps'",
    r"\banew\b": "'again', or 'from the start'",
    r"(^|[.:;#\"] ?)Of [a-z]": "begin with the noun: 'Longer sequences: …'",
    r"(?<![\w.:])\.\d+ ?%": "a digit before the point: '0.03 %'",
    r"\b(patient|somebody's|whoever|nobody|farewell|deafness|overheard|sheaf)\b": (
        "a plain word: 'model', 'user's model', 'caller', 'final message'"
    ),
}
"""A pattern of our translated English → what to write instead."""

Found = dict[str, Counter[str]]
"""Pattern → the lines that hold it, each as often as it is there."""


def found(texts: Iterable[str]) -> Found:
    """Return the lines that hold each pattern."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return {
        pattern: Counter(line for line in lines if re.search(pattern, line))
        for pattern in PATTERNS
    }


def more_frequent(before: Found, now: Found) -> Iterator[str]:
    """Yield a message for each pattern that more lines hold than before."""
    for pattern, better in PATTERNS.items():
        if now[pattern].total() > before[pattern].total():
            new = sorted((now[pattern] - before[pattern]).elements())
            yield "\n  ".join([f"/{pattern}/ → {better}; in new lines:", *new])


def is_read(name: str) -> bool:
    return Path(name).suffix in READ and name not in NOT_READ


def git(*words: str) -> bytes:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, check=True
    ).stdout


def texts_now() -> Iterator[str]:
    """Yield each file that git tracks or would add, as it is on the disk."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in listed.decode().split("\0"):
        if is_read(name) and (ROOT / name).is_file():
            yield (ROOT / name).read_text(encoding="utf-8")


def texts_at(commit: str) -> Iterator[str]:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        for member in archive:
            if is_read(member.name) and (file := archive.extractfile(member)):
                yield file.read().decode()


def branched_from() -> str:
    """Return where this branch left main; on a clean main, the commit before."""
    known = git("branch", "--all", "--format=%(refname:short)").decode().split()
    main = next((name for name in ("main", "origin/main") if name in known), "HEAD")
    base, head = git("merge-base", main, "HEAD"), git("rev-parse", "HEAD")
    clean = not git("status", "--porcelain")
    return "HEAD~1" if base == head and clean else base.decode().strip()


def main() -> int:
    base = branched_from()
    messages = [*more_frequent(found(texts_at(base)), found(texts_now()))]
    print("\n".join(messages) or f"prose: no pattern more frequent than at {base[:9]}")
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main())
