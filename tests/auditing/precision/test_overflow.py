"""Numbers beyond a format's range: kept first, told in few lines."""

import math

import pytest
import torch
from torch import Tensor, nn

from equipoise.auditing.precision.emulation import Bench, Storage
from equipoise.auditing.precision.page import (
    OUT_OF_RANGE,
    headline,
    print_study,
    remarks,
    table,
)
from equipoise.auditing.precision.prediction import predicted
from equipoise.auditing.precision.study import (
    kept_by_measurement,
    kept_by_prediction,
    study,
)
from tests.auditing.precision.models import tokens


def overflowing(norms: int = 1) -> tuple[nn.Module, Tensor]:
    """Return a model of which fp16 cannot hold the first module's results."""
    torch.manual_seed(0)
    after = [nn.LayerNorm(8, eps=1e-8) for _ in range(norms)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), *after)
    with torch.no_grad():
        model[0].weight.mul_(1e6)
        model[1].weight.mul_(1e-3)
    return model, torch.randn(2, 4, 8)


def test_what_overflows_is_kept_first() -> None:
    found = study(*overflowing(), storage=Storage.named("fp16"), every_module=True)
    assert not math.isfinite(found.measured) and not math.isfinite(found.predicted)
    assert found.keep_list.sites == ("0",) and found.keep_list.reached
    assert 0 < found.keep_list.predicted < 0.01 and 0 < found.keep_list.measured < 0.01
    assert [row.share for row in found.rows] == [1.0, 0.0, 0.0]
    assert "(not finite emulated, not finite predicted)" in headline(found)
    assert "target any finite error)" in headline(found)
    assert any("out of range" in line for line in remarks(found))


def test_a_target_is_reached_beyond_an_overflow() -> None:
    bench, fp16 = Bench(*overflowing()), Storage.named("fp16")
    found = predicted(bench.model, bench.batch, storage=fp16)
    ours = kept_by_prediction(bench, found, storage=fp16, target=2e-4)
    greedy = kept_by_measurement(bench, storage=fp16, target=2e-4)
    assert ours.reached and greedy.reached and "0" in ours.sites
    assert len(ours.sites) <= len(greedy.sites)


def test_many_remarks_are_few_lines() -> None:
    model, x = overflowing(norms=6)
    wide = study(model, x, storage=Storage.named("fp16"), target=0.5)
    (line,) = [line for line in remarks(wide) if "ε" in line]
    assert "ε becomes 0" in line and line.endswith("2, 3 and 4 others")
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(7)])
    for layer in model:
        nn.init.zeros_(layer.weight)
        nn.init.constant_(layer.bias, 1e6)
    many = study(model, x, storage=Storage.named("fp16"), target=0.5)
    lines = [line for line in remarks(many) if "out of range" in line]
    assert len(lines) == OUT_OF_RANGE
    assert "so are numbers of 2 other modules, by smaller shares" in remarks(many)


def test_kept_modules_are_named_below_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, ids = tokens()
    found = study(model.float(), ids, storage=Storage.named("bf16"))
    columns, lines = table(found)
    assert "measured" not in columns and len(lines) == len(found.rows)
    print_study(found, rows=1)
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "also to keep" in line
    ]
    assert all((row.site or "itself") in line for row in found.rows[1:] if row.keep)
