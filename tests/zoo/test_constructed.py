"""A fixed sample of the classes that ``./dev bench zoo`` examines.

The page ``docs/zoo-by-class.md`` has every class; the sample has each kind of part
once: sinks, latent and windowed attention, biased routers, mixers, functional norms,
torch's own stacks.
"""

from typing import Any

import pytest

from docs import zoo_by_class
from tests.zoo.constructed.configurations import classes
from tests.zoo.constructed.examination import EXACT, row_of
from tests.zoo.constructed.subjects import subjects

READ = (
    *("GptOssForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "KimiLinearForCausalLM", "RwkvForCausalLM"),
    *("GraniteSWAForCausalLM", "MiniMaxForCausalLM", "Lfm2MoeForCausalLM"),
    *("T5ForConditionalGeneration", "ModernBertForMaskedLM", "nanochat-like"),
    *("modded-nanogpt-like", "nn.TransformerEncoder, norm first"),
)
NAMED = {"FNetForMaskedLM": "FNetFourierTransform"}


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return subjects()


@pytest.mark.parametrize("name", READ)
def test_a_class_is_read_in_full(name: str, known: dict[str, Any]) -> None:
    row = row_of(known[name])
    assert row["status"] == "read", row
    assert not row["marks"]
    parts = [row[how] for how in ("eager", "sdpa") if how in row]
    assert parts and all(x <= EXACT for part in parts for x in part["worst"].values())
    assert len(zoo_by_class._cells(row)) == 11


@pytest.mark.parametrize(("name", "layer"), NAMED.items())
def test_a_layer_that_is_not_read_is_named(
    name: str, layer: str, known: dict[str, Any]
) -> None:
    row = row_of(known[name])
    assert row["status"] == "named", row
    assert ["mixer", layer, 0, 2] in row["layers"]
    assert not row["eager"]["silent"] and not row["marks"]


def test_no_class_is_chosen_by_hand() -> None:
    import transformers

    every = classes()
    assert len(every) > 250 or transformers.__version__ < "5.22"
    assert all(name.isidentifier() for name in every)
