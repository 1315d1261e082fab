"""Every command that judges prints one head of one published schema."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from equipoise import cli
from equipoise.judging.verdict import STATES, Verdict
from equipoise.records import Finding
from equipoise.report.judged import SCHEMA, SCHEMA_FILE
from tests.report.runs import pre_and_post

PUBLISHED = json.loads(SCHEMA_FILE.read_text("utf-8"))
LOOP = """
import torch
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(4):
    layer(torch.randn(2, 4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        cli.main([*words, "--json"])
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
    jsonschema.validate(found, PUBLISHED)
    assert found["schema"] == SCHEMA and found["command"] == words[0]
    return found


def test_the_schema_names_each_field() -> None:
    jsonschema.Draft202012Validator.check_schema(PUBLISHED)
    known = PUBLISHED["$defs"]
    assert known["state"]["enum"] == list(STATES)
    assert known["finding"]["properties"].keys() == {f.name for f in fields(Finding)}
    assert known["verdict"]["properties"].keys() == {f.name for f in fields(Verdict)}


@pytest.mark.parametrize("command", ["report", "runs", "remedy"])
def test_commands_over_runs(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pre_and_post(tmp_path, steps=60)
    (tmp_path / "broken.eqp").write_bytes(b"no run" * 100)
    place = tmp_path if command == "runs" else tmp_path / "post.eqp"
    found = printed(capsys, command, str(place))
    assert found["state"] == "at risk"
    judged = {Path(one["name"]).stem: one["verdict"] for one in found["judged"]}
    if command == "runs":
        assert judged.keys() == {"pre", "post", "broken"} and judged["broken"] is None
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        assert printed(capsys, command, str(tmp_path))["state"] == "not judged"
    else:
        assert judged["post-LN"]["state"] == "at risk"


def test_audit_and_preflight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32)
    torch.save(layer.state_dict(), tmp_path / "m.pt")
    assert len(printed(capsys, "audit", str(tmp_path / "m.pt"))["judged"]) == 1
    (tmp_path / "train.py").write_text(LOOP)
    words = ("preflight", "--steps", "3")
    with pytest.raises(SystemExit):
        cli.main(
            [*words, "--json", str(tmp_path / "p.json"), str(tmp_path / "train.py")]
        )
    found = json.loads((tmp_path / "p.json").read_text())
    jsonschema.validate(found, PUBLISHED)
    assert found["command"] == "preflight"
