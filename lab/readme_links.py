"""The README of a distribution, as a package index shows it: links made absolute.

A build step of both distributions (``[tool.hatch.metadata.hooks.custom]``). The one
variable is ``EQUIPOISE_REPOSITORY``, the address of the repository, which the workflow
that publishes sets to where it runs. Links then name the tag of the version that is
built; an image is the file itself. Without the variable, as in a build on one's own
machine, links stay as they are in the repository.
"""

import os
import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "EQUIPOISE_REPOSITORY"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Gives the README to the metadata of a wheel and an sdist."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get(VARIABLE):
            tag = f"v{version(root)}"
            text = absolute(text, repository, tag, folder=self.config["folder"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def version(root: Path) -> str:
    """Return the version of the package below a distribution's folder."""
    (path,) = root.glob("src/*/__init__.py")
    found = re.search(r'^__version__ = "(.+)"$', path.read_text("utf-8"), re.M)
    if found is None:
        raise ValueError(f"{path} gives no __version__")
    return found[1]


def absolute(text: str, repository: str, tag: str, *, folder: str = "") -> str:
    """Return a page whose links to files of the repository begin with its address.

    >>> page = "![p](docs/p.png) [d](../a.md#b) [x](#here) [y](https://y.org)"
    >>> absolute(page, "https://h/o/n", "v1", folder="lab")
    '![p](https://h/o/n/raw/v1/lab/docs/p.png) [d](https://h/o/n/blob/v1/a.md#b) \
[x](#here) [y](https://y.org)'
    """

    def linked(found: re.Match[str]) -> str:
        target = found["target"]
        if target.startswith("#") or ":" in target:
            return found[0]
        kind = "raw" if found["image"] else "blob"
        place = normpath(f"{folder}/{target}").lstrip("/")
        address = f"{repository.rstrip('/')}/{kind}/{tag}/{place}"
        return f"{found['image']}[{found['text']}]({address})"

    return LINK.sub(linked, text)
