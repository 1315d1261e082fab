"""A whole model's heads, from the function to the command."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.auditing.selection import Row, Study, study
from equipoise.auditing.selection.page import cells, headline, print_study
from equipoise.cli import main
from equipoise.errors import InputError
from tests.probes.reading import gpt, tokens

L, D = 96, 8


class FourHeads(nn.Module):
    """One causal call whose heads are, by construction: sink, flat, spreading, sharp.

    Keys carry their position; queries are constant. Head 0 adores key 0, head 1 ignores
    keys, head 2 prefers a twentieth of all keys, head 3 the token eight before it.
    """

    def forward(self, noise_BTD: Tensor) -> Tensor:
        T = noise_BTD.shape[1]
        place = torch.arange(T)
        z = torch.zeros(4, T, T)
        z[0, :, 0] = 12.0
        z[2, :, place % 20 == 3] = 9.0
        recent = place[:, None] - place[None, :]
        z[3] = torch.where(recent == 4, 9.0, 0.0)
        z = z.masked_fill(recent < 0, -torch.inf)
        v = noise_BTD[:, None].expand(-1, 4, T, D)
        basis, eye = torch.zeros(1, 4, T, T), torch.eye(T).expand(1, 4, T, T)
        bias = torch.where(z == -torch.inf, -torch.inf, z)[None]
        return F.scaled_dot_product_attention(basis, eye, v, attn_mask=bias)


def batch() -> Tensor:
    return torch.randn(1, L, D, generator=torch.Generator().manual_seed(0))


def test_each_head_gets_its_verdict() -> None:
    found = study(FourHeads(), batch(), queries=L)
    assert [row.verdict for row in found.rows] == ["sink", "flat", "spreads", "selects"]
    sink, flat, spreads, selects = found.rows
    assert sink.sink > 0.9 and sink.lift > 3
    assert flat.evenness == pytest.approx(1.0) and flat.growth == pytest.approx(1.0)
    assert flat.rho == 0 and flat.lift < 2
    assert spreads.growth > 0.5 and spreads.evenness < 0.3
    assert selects.growth < 0.5
    assert (found.keys, found.chosen) == (L, 12)
    assert found.needed == pytest.approx(math.log(L - 1))
    assert sum(found.counts.values()) == 4


def test_a_model_that_is_not_causal_has_no_growth() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x[:, None]
            return F.scaled_dot_product_attention(q, q, q)

    (row,) = study(Plain(), batch()).rows
    assert math.isnan(row.growth) and row.verdict in {"flat", "selects"}


def test_a_lab_model_is_left_as_it_was() -> None:
    model = gpt().train()
    before = torch.get_rng_state()
    found = study(model, tokens())
    assert len(found.rows) == 6 and model.training
    assert {row.site for row in found.rows} == {
        f"blocks.{i}.attention" for i in range(3)
    }
    assert torch.equal(before, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_scores_without_values_leave_lift_out() -> None:
    class Weighing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x[:, None] @ x[:, None].mT, -1) @ x[:, None]

    with pytest.raises(InputError, match="called no attention"):
        study(nn.Linear(D, D), batch())
    rows = study(Weighing(), batch()).rows
    assert all(math.isnan(row.lift) and not math.isnan(row.rho) for row in rows)
    assert cells(rows[0])[-3:] == ["", "", ""]


def test_broken_options() -> None:
    with pytest.raises(InputError, match="at least 1"):
        study(FourHeads(), batch(), queries=0)


ROW = Row(
    site="a",
    head=0,
    rho=3.0,
    evenness=0.2,
    growth=0.1,
    sink=0.0,
    lift=4.0,
    recall=0.75,
    recall_random=0.1,
)


def test_the_page_states_the_verdict_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flat = replace(ROW, head=1, evenness=0.9)
    lost = replace(ROW, head=2, evenness=math.nan)
    found = Study(model="Model", rows=[ROW, flat, lost], keys=1024, chosen=16)
    said = headline(found)
    assert "of 3 heads 1 select, 1 are flat, 1 could not be read" in said
    assert "6.93" in said
    assert cells(ROW)[-2:] == ["75%", "10%"]
    print_study(found, rows=1)
    out = capsys.readouterr().out
    assert "2 heads that are less even" in out and "flat" in out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.auditing.selection.test_study import FourHeads, batch\n"
        "def make():\n    return FourHeads(), batch()\n"
        "def bare():\n    return FourHeads()\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["selection", f"{file}:make", "--queries", "96"])
    assert not left.value.code
    assert "of 4 heads 1 select" in capsys.readouterr().out
    given = tmp_path / "batch.json"
    given.write_text(json.dumps({"noise_BTD": batch().tolist()}))
    with pytest.raises(SystemExit) as left:
        main(["selection", f"{file}:bare", "--batch", str(given)])
    assert not left.value.code
    with pytest.raises(SystemExit) as left:
        main(["selection", f"{file}:bare"])
    assert left.value.code == InputError.exit_code
