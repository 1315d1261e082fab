"""The selection probe against dense attention, and on calls that are odd."""

import pytest
import torch
from torch import Tensor

from equipoise.anatomy.calls import AttentionCall
from equipoise.numerics.selection import (
    chosen,
    concentration,
    distance_of,
    separability_of,
    weighted_tokens,
)
from equipoise.probes.selection import HeadSelection
from tests.probes.reading import Emitter, gpt, measured, tokens

NAMES = ("rho", "evenness", "lift", "recall", "recall.cosine", "recall.random")


def emitted(call: AttentionCall, **options: int) -> dict[str, Tensor]:
    emit = Emitter()
    HeadSelection(**options).on_attention("here", call, emit)
    return {
        quantity.removeprefix("selection."): values
        for (_, quantity), values in emit.found.items()
    }


def call(
    B: int = 2, H: int = 4, G: int = 2, L: int = 40, **more: object
) -> AttentionCall:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, n, L, 8, generator=rng) for n in (H, G, G))
    given = {"q_BHQD": q, "k_BGKD": k, "v_BGKD": v, "scale": 8**-0.5, **more}
    return AttentionCall(module=None, kind="sdpa", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [True, False])
def test_reads_what_dense_rows_read(causal: bool) -> None:
    made = call(causal=causal)
    found = emitted(made, sequences=2)
    assert set(found) == set(NAMES)
    z = made.scores(slice(0, 40))
    for h in range(4):
        rho, lift, recall = [], [], []
        for b in range(2):
            for i in range(4, 40, 5):
                n = i + 1 if causal else 40
                row = z[b, h, i, :n].double()
                rho.append(concentration(row).rho)
                if n > 5:
                    assert made.v_BGKD is not None
                    x = made.v_BGKD[b, h // 2, :n]
                    picked = chosen(weighted_tokens(row.softmax(-1)[None], x), 5)
                    lift.append(distance_of(picked).lift_lower)
                    recall.append(separability_of(picked).recall)
        for name, values in (("rho", rho), ("lift", lift), ("recall", recall)):
            mean = torch.stack([v.squeeze() for v in values]).mean().item()
            assert found[name][h].item() == pytest.approx(mean, rel=1e-5), name


def test_a_flat_head_and_a_selecting_one_read_apart() -> None:
    """Head 0 cannot tell keys apart; head 1 puts its mass on one of them."""
    made = call(H=2, G=2)
    scores = torch.zeros(2, 2, 40, 40)
    scores[:, 1, :, 3] = 9.0
    found = emitted(
        AttentionCall(
            module=None, kind="softmax", scores_BHQK=scores, v_BGKD=made.v_BGKD
        )
    )
    assert found["evenness"][0].item() == pytest.approx(1.0)
    assert found["evenness"][1] < 0.05
    assert found["lift"][0] < 1.5 < 5 < found["lift"][1]
    assert found["rho"].tolist() == [0.0, 9.0]


def test_padding_is_left_out() -> None:
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1, ..., 20:] = False
    found = emitted(call(mask=mask), at_most=40, sequences=2)
    alone = call(mask=mask)
    assert alone.q_BHQD is not None
    z = torch.cat([alone.scores(slice(0, 40))[1, 0, :20]])
    z = torch.cat([alone.scores(slice(0, 40))[0, 0], z])
    mean = concentration(z).rho.mean().item()
    assert found["rho"][0].item() == pytest.approx(mean, rel=1e-5)


def test_sinks_take_mass_and_are_no_token() -> None:
    made = call(H=2, G=2)
    scores = torch.zeros(2, 2, 40, 41)
    scores[..., 40] = 20.0
    found = emitted(
        AttentionCall(
            module=None,
            kind="softmax",
            scores_BHQK=scores,
            v_BGKD=made.v_BGKD,
            extra_keys=1,
        )
    )
    assert found["lift"].isfinite().all() and found["recall"].isfinite().all()
    assert found["evenness"].max() < 0.05  # the sink counts as a key for entropy


def test_scores_alone_give_concentration_alone() -> None:
    found = emitted(
        AttentionCall(module=None, kind="softmax", scores_BHQK=torch.zeros(1, 2, 9, 9))
    )
    assert set(found) == {"rho", "evenness"}


def test_a_row_that_sees_nothing_is_no_reading() -> None:
    mask = torch.zeros(2, 1, 40, 40, dtype=torch.bool)
    mask[0] = True
    found = emitted(call(mask=mask), sequences=2)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_model_is_read_head_by_head(kv_heads: int) -> None:
    found = measured(gpt(kv_heads=kv_heads), [HeadSelection()], tokens())
    for name in NAMES:
        read = found["blocks.1.attention", f"selection.{name}"]
        assert read.shape == (2,) and read.isfinite().all()


def test_the_global_generator_is_not_drawn_from() -> None:
    before = torch.get_rng_state()
    emitted(call())
    assert torch.equal(before, torch.get_rng_state())
