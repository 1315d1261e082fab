"""Our bounds of attention, from loose to tight, against the autograd Jacobian."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from equipoise.errors import InputError
from equipoise.theory.lipschitz import local as local_file
from equipoise.theory.lipschitz.forward import attend, attend_captured
from equipoise.theory.lipschitz.heads import Rotary, heads_from_linear, rotary
from equipoise.theory.lipschitz.local import local_bound, local_paths
from equipoise_lab.theory.lipschitz.joint import (
    block_bound,
    block_norms,
    dual_bound,
    dual_rows,
    joint_bound,
    joint_rows,
    value_path,
)
from tests.conftest import FLOATS, error_budget
from tests.oracles import lipschitz as oracle
from tests.theory.lipschitz_cases import NORMS, ROTATIONS, Case, cases, cast, plain

OURS = [local_bound, joint_bound, block_bound, dual_bound]


@settings(max_examples=60)
@given(cases())
def test_blocks_are_those_of_the_autograd_jacobian(case: Case) -> None:
    J = oracle.jacobian(oracle.attention(case.heads, case.mask), case.x)
    norms = block_norms(attend(case.heads, case.x, mask=case.mask))
    # A Gram matrix squares the condition: √ε on blocks that are themselves rounding.
    torch.testing.assert_close(norms, oracle.block_norms(J), rtol=1e-9, atol=1e-7)


@settings(max_examples=40)
@given(cases())
def test_every_bound_holds_and_each_is_tighter_than_the_last(case: Case) -> None:
    J = oracle.jacobian(oracle.attention(case.heads, case.mask), case.x)
    truth = oracle.block_inf_lower(J)
    loose, joint, blocks, dual = (
        bound(case.heads, case.x, mask=case.mask).value for bound in OURS
    )
    slack = 1 + 1e-9
    assert truth <= dual * slack
    assert dual <= blocks * (1 + 1e-4)  # the floor under the weights
    assert blocks <= joint * slack
    assert joint <= loose * 8 ** (1 / 512)  # the joint query matrix is D wide, D = 8
    whole = block_bound(case.heads, case.x, mask=case.mask, norm="frobenius")
    assert oracle.frobenius(J) <= whole.value * slack


@settings(max_examples=30)
@given(cases())
def test_the_bracket_closes(case: Case) -> None:
    lower, upper = dual_rows(attend(case.heads, case.x, mask=case.mask))
    assert (lower <= upper).all()
    assert (upper <= 1.1 * lower).all()


def test_the_lower_bound_is_attained() -> None:
    case = plain(3, gain=2.0)
    J = oracle.jacobian(oracle.attention(case.heads), case.x)
    lower = dual_rows(attend(case.heads, case.x)).lower.max()
    assert lower == pytest.approx(oracle.block_inf_lower(J, starts=20), rel=1e-6)


@pytest.mark.parametrize("rotation", sorted(ROTATIONS))
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_a_sample_of_queries_reads_their_rows(rotation: str, norm: str) -> None:
    case = plain(1, H=4, G=2, biased=True)
    options = dict(rotary=ROTATIONS[rotation], q_norm=NORMS[norm], k_norm=NORMS[norm])
    heads = replace(case.heads, causal=True, **options)
    some = torch.tensor([4, 1])
    everything = attend(heads, case.x)
    sample = attend(heads, case.x, queries=some)
    for full, few in zip(
        (local_paths(everything).total_HQ, joint_rows(everything)),
        (local_paths(sample).total_HQ, joint_rows(sample)),
        strict=True,
    ):
        torch.testing.assert_close(few, full[..., some])
    torch.testing.assert_close(block_norms(sample), block_norms(everything)[some])


def test_a_sample_is_no_certificate() -> None:
    case = plain()
    found = local_bound(case.heads, case.x, queries=torch.tensor([0]))
    assert found.kind == "estimate" and "1 sampled" in found.note
    assert local_bound(case.heads, case.x).kind == "first order"


def test_keys_in_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = plain(2, L=7)
    heads = replace(case.heads, rotary=rotary(7, 4), causal=True)
    whole = local_paths(attend(heads, case.x)).total_HQ
    monkeypatch.setattr(local_file, "_KEYS", 3)
    torch.testing.assert_close(local_paths(attend(heads, case.x)).total_HQ, whole)


@pytest.mark.parametrize("bound", OURS)
def test_grouped_heads_are_repeated_heads(bound) -> None:
    case = plain(4, H=4, G=2)
    repeated = replace(
        case.heads,
        w_k_GDE=case.heads.w_k_GDE[[0, 0, 1, 1]],
        w_v_GDF=case.heads.w_v_GDF[[0, 0, 1, 1]],
    )
    assert bound(case.heads, case.x).value == bound(repeated, case.x).value


@pytest.mark.parametrize("bound", OURS)
def test_known_changes_of_the_layer(bound) -> None:
    case = plain(5)
    value = bound(case.heads, case.x).value
    close = pytest.approx(value, rel=1e-6)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert bound(case.heads, case.x[order]).value == close
    double = replace(case.heads, w_o_HFD=2 * case.heads.w_o_HFD)
    assert bound(double, case.x).value == pytest.approx(2 * value, rel=1e-6)
    warm = replace(case.heads, temperature=2.0, scale=1.0)  # 1/√4 either way
    assert bound(warm, case.x).value == close
    capped = replace(case.heads, softcap=1e6)
    assert bound(capped, case.x).value == close


@pytest.mark.parametrize("bound", OURS)
def test_uniform_attention_only_averages_values(bound) -> None:
    case = plain(6, H=1)
    heads = replace(case.heads, w_q_HDE=0 * case.heads.w_q_HDE, scale=0.0)
    value = torch.linalg.matrix_norm(heads.w_v_GDF[0] @ heads.w_o_HFD[0], ord=2)
    assert bound(heads, case.x).value == pytest.approx(float(value), rel=2e-3)


@pytest.mark.parametrize("bound", OURS)
def test_a_single_token_only_passes_its_value(bound) -> None:
    case = plain(7, L=1)
    value = sum(w_v @ w_o for w_v, w_o in zip(*case.heads.weights[2:], strict=True))
    truth = float(torch.linalg.matrix_norm(value, ord=2))
    assert truth <= bound(case.heads, case.x).value * (1 + 1e-9)
    if bound is not local_bound:
        assert bound(case.heads, case.x).value == pytest.approx(truth, rel=2e-3)


@pytest.mark.parametrize("bound", OURS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_low_precision_reads_the_same(bound, dtype: torch.dtype) -> None:
    case = plain(8, biased=True)
    rounded, x = cast(case.heads, dtype), case.x.to(dtype)
    exact = cast(rounded, torch.float64)
    budget = error_budget(torch.promote_types(dtype, torch.float32), ops=2000)
    assert bound(rounded, x).value == pytest.approx(
        bound(exact, x.double()).value, rel=budget
    )


@pytest.mark.parametrize("bound", OURS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_token_reads_nan(bound, bad: float) -> None:
    case = plain(9)
    x = case.x.clone()
    x[2, 1] = bad
    assert math.isnan(bound(case.heads, x).value)


@pytest.mark.parametrize("bound", OURS)
def test_broken_weights_read_nan(bound) -> None:
    case = plain(9)
    heads = replace(case.heads, w_v_GDF=case.heads.w_v_GDF * math.nan)
    assert math.isnan(bound(heads, case.x).value)


def test_linear_layers_split_into_heads() -> None:
    case = plain(10, H=4, G=2)
    h = case.heads
    flat = {
        "q": h.w_q_HDE.permute(0, 2, 1).flatten(0, 1),
        "k": h.w_k_GDE.permute(0, 2, 1).flatten(0, 1),
        "v": h.w_v_GDF.permute(0, 2, 1).flatten(0, 1),
        "o": h.w_o_HFD.flatten(0, 1).T,
    }
    back = heads_from_linear(**flat, heads=4, kv_heads=2)
    for split, given_weights in zip(back.weights, h.weights, strict=True):
        assert torch.equal(split, given_weights)
    with pytest.raises(InputError, match="do not split into 3 heads"):
        heads_from_linear(**flat, heads=3, kv_heads=1)


def test_invalid_inputs_raise() -> None:
    case = plain()
    with pytest.raises(InputError, match="G dividing H"):
        replace(case.heads, w_k_GDE=case.heads.w_k_GDE[:, :3])
    with pytest.raises(InputError, match="must be positive"):
        replace(case.heads, temperature=0.0)
    with pytest.raises(InputError, match="must be positive"):
        replace(case.heads, softcap=-1.0)
    with pytest.raises(InputError, match=r"must be \(tokens, 8\)"):
        attend(case.heads, case.x[None])
    with pytest.raises(InputError, match="does not broadcast"):
        attend(case.heads, case.x, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(InputError, match="even width"):
        Rotary(cos_LR=torch.ones(4, 3), sin_LR=torch.ones(4, 3))


def captured(case: Case, queries: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return q, k, v as a hook on the attention call would see them."""
    everything = attend(case.heads, case.x)
    groups = len(everything.k_HKE) // len(case.heads.w_k_GDE)
    return {
        "q_HQE": everything.q_HQE[:, queries],
        "k_GKE": everything.k_HKE[::groups],
        "v_GKF": everything.v_HKF[::groups],
        "queries": queries,
    }


@pytest.mark.parametrize("rotation", sorted(ROTATIONS))
def test_captured_tensors_read_like_the_input(rotation: str) -> None:
    case = plain(11, H=4, G=2, biased=True)
    heads = replace(case.heads, causal=True, rotary=ROTATIONS[rotation])
    case, queries = replace(case, heads=heads), torch.tensor([4, 2])
    mask = torch.tensor([True, True, False, True, True])
    from_x = local_paths(attend(heads, case.x, queries=queries, mask=mask))
    given_qkv = attend_captured(heads, **captured(case, queries), mask=mask)
    torch.testing.assert_close(local_paths(given_qkv).total_HQ, from_x.total_HQ)
    torch.testing.assert_close(
        joint_rows(given_qkv),
        joint_rows(attend(heads, case.x, queries=queries, mask=mask)),
    )


def test_unknown_rotations_are_bounded_all_the_same() -> None:
    case = plain(12)
    known = replace(case.heads, rotary=rotary(5, 4))
    everything = torch.arange(5)
    given_qkv = captured(replace(case, heads=known), everything)
    paths = local_paths(attend_captured(case.heads, **given_qkv), any_rotation=True)
    exact = local_paths(attend(known, case.x))
    assert (exact.total_HQ <= paths.total_HQ * (1 + 1e-9)).all()
    assert (paths.total_HQ <= 20 * exact.total_HQ).all()


def test_queries_are_counted_from_the_first_by_default() -> None:
    case = plain(13)
    given_qkv = captured(case, torch.arange(3))
    del given_qkv["queries"]
    assert attend_captured(case.heads, **given_qkv).at_Q.tolist() == [0, 1, 2]


def test_captured_tensors_must_fit_the_weights() -> None:
    case = plain(14, H=4, G=2)
    given_qkv = captured(case, torch.arange(5))
    with pytest.raises(InputError, match="must have 4, 2, 2 heads"):
        attend_captured(case.heads, **given_qkv | {"k_GKE": given_qkv["q_HQE"]})
    normed = replace(case.heads, k_norm=NORMS["rms"])
    with pytest.raises(InputError, match="give x"):
        attend_captured(normed, **given_qkv)


@pytest.mark.parametrize("gain", [0.1, 1.0, 5.0])
def test_the_value_path_covers_its_blocks(gain: float) -> None:
    """Alone: in the sum of paths the slack of the others hides a small one."""
    case = plain(15, H=4, gain=gain)
    attended = attend(case.heads, case.x)
    values_HDC = case.heads.w_v_GDF @ case.heads.w_o_HFD
    blocks = torch.einsum("HQK,HDC->QKDC", attended.p_HQK, values_HDC)
    truth_Q = torch.linalg.matrix_norm(blocks, ord=2).sum(-1)
    found_Q = value_path(attended)
    assert (truth_Q <= found_Q * (1 + 1e-9)).all()
    assert (found_Q <= 4 * truth_Q).all()
