"""What a release says of itself agrees, and its README reads outside the repository."""

import importlib.util
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import equipoise

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://host.example/owner/name"
DISTRIBUTIONS = {"equipoise": ROOT, "equipoise_lab": ROOT / "lab"}
needs_repository = pytest.mark.skipif(
    not (ROOT / "lab" / "src").is_dir(), reason="an sdist holds one distribution"
)


def readme_links() -> ModuleType:
    path = ROOT / "lab" / "readme_links.py"
    spec = importlib.util.spec_from_file_location("readme_links", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_place_names_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    released = re.search(r"^## \[(\d\S*)\] - (\d{4}-\d\d-\d\d)$", changelog, re.M)
    assert released is not None and released[1] == equipoise.__version__
    assert f"\nversion: {released[1]}\ndate-released: {released[2]}\n" in citation


@needs_repository
def test_both_distributions_have_one_version() -> None:
    version = readme_links().version
    assert {version(folder) for folder in DISTRIBUTIONS.values()} == {
        equipoise.__version__
    }
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text("utf-8"))
    (ours,) = (d for d in lab["project"]["dependencies"] if re.match(r"equipoise\b", d))
    assert ours.endswith(f">={equipoise.__version__.rpartition('.')[0]}")


def test_links_of_the_readme_are_absolute() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    shown = readme_links().absolute(text, REPOSITORY, "v9.9.9")
    targets = re.findall(r"\]\(([^)\s]+)", shown)
    assert "![First screen" in shown and targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert f"{REPOSITORY}/raw/v9.9.9/docs/images/report.png" in targets
    assert f"{REPOSITORY}/blob/v9.9.9/CONTRIBUTING.md" in targets


@needs_repository
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_wheel_and_sdist_carry_the_readme_and_the_licence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIPOISE_REPOSITORY", REPOSITORY)
    folder = DISTRIBUTIONS[name]
    for builder in (WheelBuilder(str(folder)), SdistBuilder(str(folder))):
        (file,) = builder.build(directory=str(tmp_path))
        found = dict(members(Path(file)))
        (told,) = (
            text for path, text in found.items() if path in ("METADATA", "PKG-INFO")
        )
        metadata = Parser().parsestr(told)
        assert metadata["Version"] == equipoise.__version__
        assert metadata["Description-Content-Type"] == "text/markdown"
        links = re.findall(r"\]\(([^)\s#]+)", str(metadata.get_payload()))
        assert links and all(link.startswith("https://") for link in links)
        assert "LICENSE" in found


def members(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of what tells about a distribution."""
    wanted = {"METADATA", "PKG-INFO", "LICENSE"}
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            for path in wheel.namelist():
                if Path(path).name in wanted:
                    yield Path(path).name, wheel.read(path).decode()
        return
    with tarfile.open(file) as sdist:
        for member in sdist:
            opened = sdist.extractfile(member)
            if Path(member.name).name in wanted and opened is not None:
                yield Path(member.name).name, opened.read().decode()
