"""What the card states follows from the facts, each by counts that are written out."""

from typing import Any

import pytest

from equipoise.judging.card import Card
from equipoise.judging.statements import STATEMENTS, stated
from equipoise.text.card import difference_sentence, differences, worded

SHIFTS = [0, 1, 2, 3, -1]


def call(shift: int = 1, **more: Any) -> dict[str, Any]:
    equal = [60.0 if s == shift else 3.0 for s in SHIFTS]
    meets = [{"shifts": SHIFTS, "compared": [60.0] * 5, "equal": equal}]
    given = {"function": "cross_entropy", "given": "logits", "reduction": "mean"}
    counts = {"classes": 64, "targets": 64, "counted": 48.0, "value": 4.2}
    return {**given, **counts, "uniform": 4.16, "meets": meets, **more}


def sections(**more: Any) -> dict[str, Any]:
    return {
        "model": {
            "class": "GPT",
            "parameters": 1000,
            "trainable": 750,
            "groups": {
                "embedding": {"all": 250, "trainable": 0},
                "attention": {"all": 750, "trainable": 750},
            },
            "dtypes": {"float32": 900, "bfloat16": 100},
            "training": True,
            "dropout": 3,
        },
        "weights": {"ties": [["wte.weight", "head.weight"]]},
        "loss": {
            "passes": 2,
            "calls": [call(weight=1.0), call(weight=1.0)],
            "auxiliary": {"balance": {"part": True}, "lost": {"part": False}},
        },
        "batch": {"sequences": 4, "tokens": 64, "micro_batches": 2, "padding": 16.0},
        "forward": {
            "sites": {
                "h.0": {
                    "kind": "sdpa",
                    "shape": [4, 2, 16, 16],
                    "ahead": 0.0,
                    "behind": 13.0,
                    "last_row": 13.0,  # rows are drawn: this is the last of them
                },
                "h.1": {
                    "kind": "sdpa",
                    "shape": [4, 2, 16, 16],
                    "ahead": 0.0,
                    "behind": 3.0,
                },
                "h.2": {
                    "kind": "own",
                    "shape": [4, 2, 16, 16],
                    "ahead": 9.0,
                    "behind": 15.0,
                },
            }
        },
        "optimizers": {
            "each": [
                {
                    "class": "AdamW",
                    "parameters": 700,
                    "groups": [
                        {"rate": 0.1, "decay": 0.0},
                        {"rate": 0.1, "decay": 0.2},
                    ],
                    "moments": {"dtype": "bfloat16", "epsilon": 1e-8},
                }
            ],
            "unheld": {"parameters": 50, "names": ["norm.weight"]},
        },
        "schedule": {"moves": [{"class": "LambdaLR", "each": [8, 8], "at": 16}]},
        "clipping": {"each": [{"largest": 1.0, "norm": 2.5}]},
        "start": {"norms": {"began": True, "count": 5, "untouched": 2.0}},
        "experts": {
            "routers": {
                "h.0.moe": {"tokens": [9.0, 3.0, 0.0], "balanced_by_bias": True}
            }
        },
        **more,
    }


EXPECTED = {
    "model": {
        "trainable_share": 0.75,
        "is_partial": True,
        "frozen_groups": ["embedding"],
    },
    "weights": {"tied": ["wte.weight = head.weight"]},
    "loss": {
        "shift": 1,
        "ignored": 0.25,
        "micro_weights": 2.0,
        "auxiliary_out": ["lost"],
    },
    "batch": {"padding_share": 0.25, "step_tokens": 128},
    "forward": {
        "looks": ["causal in 1", "causal within 4 tokens in 1", "both sides in 1"]
    },
    "optimizers": {"unheld_parameters": 50},
    "schedule": {"none": None},
    "clipping": {"clips": "yes", "largest": 1.0},
    "start": {"began_as": "partly"},
    "experts": {
        "list": [{"site": "h.0.moe", "count": 3, "idle": 1, "most": 2.25, "bias": True}]
    },
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_follows_from_its_facts(name: str) -> None:
    found = stated(name, sections())
    assert {key: found.get(key) for key in EXPECTED[name]} == EXPECTED[name]


LINES = [
    ("Model", "750 of 1 k parameters of GPT are trained (75 %); frozen: embedding"),
    ("Model", "stored in float32 90 %, bfloat16 10 %"),
    (
        "Start",
        "part of the weights were trained before: 2 of 5 norms are as initialised",
    ),
    ("Loss", "cross_entropy of logits, mean, over 64 classes"),
    ("Loss", "labels are shifted once: each position predicts the next token"),
    ("Loss", "25 % of 128 targets are ignored"),
    ("Loss", "computed and not part of the loss: lost"),
    ("Batch", "25 % of the tokens are padding"),
    ("Optimisers", "no optimiser holds 50 trainable parameters: norm.weight"),
    ("Schedule", "LambdaLR moves the rate 8 times an update"),
    ("Clipping", "gradients are clipped at 1; last norm 2.5"),
]


@pytest.mark.parametrize(("title", "line"), LINES)
def test_the_card_says_it(title: str, line: str) -> None:
    assert line in worded(Card(sections=sections())).text[title]


@pytest.mark.parametrize(
    ("calls", "shift"),
    [
        ([call(2)], 2),
        ([call(0), call(1)], None),  # two heads: no one shift
        ([call(7)], None),
        ([call(meets=[{"shifts": [1], "compared": [3.0], "equal": [3.0]}])], None),
        ([{"function": "mse_loss"}], None),
    ],
)
def test_a_shift_is_stated_where_there_is_one(calls: list[Any], shift: Any) -> None:
    assert stated("loss", {"loss": {"calls": calls}}).get("shift") == shift


def test_facts_of_another_shape_state_nothing_and_break_nothing() -> None:
    for wrong in (None, 3, [], {"calls": 5}, {"calls": [None]}, {"each": [{}]}):
        for name in STATEMENTS:
            broken = {name: wrong if isinstance(wrong, dict) else {"x": wrong}}
            assert stated(name, broken) == broken[name]


def test_two_loops_are_compared_in_a_sentence() -> None:
    def card(shift: int) -> Card:
        loss = {"calls": [call(shift)]}
        return Card(sections=sections(loss=loss))

    cards = {"A": card(1), "B": card(2)}
    assert difference_sentence(cards) == "B shifts labels twice, A shifts labels once"
    (row,) = differences(cards)
    assert row[0] == "Loss" and "twice" in row[1][1] and "once" in row[1][0]
    assert difference_sentence({"A": card(1), "B": card(1)}) == ""
    assert difference_sentence({"A": card(1), "B": Card()}) == ""
