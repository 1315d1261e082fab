"""Products with the Hessian and with Gauss–Newton, on models people have."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.auditing.curvature import gauss_newton, hessian
from equipoise.errors import InputError
from tests.auditing.curvature import subjects
from tests.oracles.hessian import model_products

# Two extrapolated differences of float64 gradients agree to about 1e-9.
DIFFERENCED = 1e-7


def image_pair() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    return torch.randn(3, 1, 4, 4, generator=rng).double(), torch.tensor([0, 2, 1])


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]] = {
    "pre": (subjects.gpt, subjects.pair()),
    "post": (lambda: subjects.gpt(residual="post"), subjects.pair()),
    "swiglu-rope-gqa": (
        lambda: subjects.gpt(
            activation="swiglu", positions="rope", kv_heads=1, norm="rmsnorm", depth=1
        ),
        subjects.pair(),
    ),
    "vit": (subjects.vit, image_pair()),
    "torch-encoder": (subjects.encoder, subjects.images()),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_hessian_is_the_difference_of_gradients(
    name: str, rng: torch.Generator
) -> None:
    build, batch = SUBJECTS[name]
    model = build()
    operator = hessian(model, batch)
    along_DN = torch.randn(4, operator.width, generator=rng, dtype=torch.float64)
    ours = torch.stack([operator(v_N) for v_N in along_DN])
    truth = model_products(
        model.eval(),
        lambda m: subjects.cross_entropy(m, batch),
        operator.names,
        along_DN,
    )
    for name, of in operator.split(torch.arange(operator.width)).items():
        here = of.flatten()
        error = (ours[:, here] - truth[:, here]).norm()
        assert error <= DIFFERENCED * truth.norm(), name
    small_DD = along_DN @ ours.mT
    assert (small_DD - small_DD.mT).norm() <= 1e-12 * small_DD.norm()


@pytest.mark.parametrize("name", ["pre", "vit"])
def test_gauss_newton_is_jacobian_and_softmax(name: str) -> None:
    build, (x, y) = SUBJECTS[name]
    model = build().eval()
    operator = gauss_newton(model, (x, y))
    parameters = dict(model.named_parameters())

    def logits(values: dict[str, Tensor]) -> Tensor:
        out = torch.func.functional_call(model, values, (x,))
        return out.reshape(-1, out.shape[-1])

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        jacobian = torch.func.jacrev(logits)(parameters)
    J_RON = torch.cat([jacobian[n].flatten(2) for n in operator.names], -1)
    p_RO = logits(parameters).softmax(-1)
    B_ROO = (torch.diag_embed(p_RO) - p_RO[:, :, None] * p_RO[:, None]) / len(p_RO)
    truth = torch.einsum("ron,rop,rpm->nm", J_RON, B_ROO, J_RON)
    assert (operator.dense() - truth).norm() <= 1e-10 * truth.norm()


def test_gauss_newton_of_a_linear_model_is_its_hessian() -> None:
    torch.manual_seed(0)
    model, batch = (
        nn.Linear(3, 4).double(),
        (torch.randn(5, 3).double(), torch.arange(5) % 4),
    )
    a, b = hessian(model, batch).dense(), gauss_newton(model, batch).dense()
    assert torch.allclose(a, b, atol=1e-14)


@pytest.mark.parametrize("make", [hessian, gauss_newton])
def test_micro_batches_add_up_though_targets_are_missing(make: Callable) -> None:  # type: ignore[type-arg]
    x, y = subjects.pair(5)
    y[0, 2:] = -100
    y[3] = -100
    model = subjects.gpt()
    whole, cut = make(model, (x, y)), make(model, (x, y), micro_batch=2)
    v_N = torch.randn(whole.width, dtype=torch.float64)
    assert torch.allclose(whole(v_N), cut(v_N), atol=1e-12)


def test_blocks_are_blocks() -> None:
    model, batch = subjects.gpt(), subjects.pair()
    operator = hessian(model, batch)
    whole = operator.dense()
    at = {}
    start = 0
    for name, p in zip(operator.names, operator.at, strict=True):
        at[name] = slice(start, start + p.numel())
        start += p.numel()
    for pattern in ("blocks.1.*", "*_norm.weight", "*.q_proj.*"):
        block = operator.block(pattern)
        rows = torch.cat([torch.arange(whole.shape[0])[at[n]] for n in block.names])
        assert torch.allclose(block.dense(), whole[rows][:, rows], atol=1e-12)
    assert set(operator.split(torch.zeros(operator.width))) == set(operator.names)


def test_frozen_and_unused_parameters() -> None:
    model = subjects.gpt()
    model.unused = nn.Parameter(torch.ones(3).double())
    model.blocks[0].attention.q_proj.weight.requires_grad_(False)
    operator = hessian(model, subjects.pair())
    assert "blocks.0.attention.q_proj.weight" not in operator.names
    product = operator.split(operator(torch.ones(operator.width).double()))
    assert (
        product["unused"].eq(0).all()
        and product["blocks.0.attention.k_proj.weight"].any()
    )


def test_the_model_is_left_alone() -> None:
    torch.manual_seed(5)
    model = subjects.encoder().train()
    norm = nn.BatchNorm1d(3).double()
    model.head = nn.Sequential(model.head, norm)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    hooked: list[int] = []
    model.layer.register_forward_hook(lambda *_: hooked.append(1))
    hessian(model, subjects.images())(
        torch.ones(sum(p.numel() for p in model.parameters())).double()
    )
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert all(p.grad is None for p in model.parameters())
    assert hooked  # the user's own hooks are part of the model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_models_are_read_in_float32(dtype: torch.dtype) -> None:
    model = subjects.gpt().to(dtype)
    operator = hessian(model, subjects.pair())
    assert operator.dtype == torch.float32
    wide = hessian(model.double(), subjects.pair())
    v_N = torch.randn(wide.width)
    truth = wide(v_N.double())
    # float32 products through two blocks: some hundred roundings of 6e-8.
    assert (operator(v_N).double() - truth).norm() <= 3e-5 * truth.norm()


def test_hugging_face_models_bring_their_own_loss() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=4, n_head=2, vocab_size=5, n_positions=6)
    model = GPT2LMHeadModel(config).double()
    ids = subjects.tokens()
    given = hessian(model, {"input_ids": ids, "labels": ids})
    without = hessian(model, {"input_ids": ids})
    alone = hessian(model, ids)
    v_N = torch.randn(given.width).double()
    assert torch.allclose(given(v_N), without(v_N), atol=1e-12)
    assert torch.allclose(given(v_N), alone(v_N), atol=1e-12)
    cut = hessian(model, {"input_ids": ids, "labels": ids}, micro_batch=1)
    assert torch.allclose(given(v_N), cut(v_N), atol=1e-12)


def test_real_targets_mean_squares_and_a_loss_may_be_given() -> None:
    torch.manual_seed(0)
    model, x, y = (
        nn.Linear(2, 1).double(),
        torch.randn(4, 2).double(),
        torch.randn(4, 1),
    )
    mse = hessian(model, {"x": x, "y": y}).dense()
    given = hessian(model, (x, y), loss=lambda z, t: F.mse_loss(z, t)).dense()
    assert torch.equal(mse, given)


def test_compiled_and_wrapped_models() -> None:
    model, batch = subjects.gpt(), subjects.pair()
    plain = hessian(model, batch)
    v_N = torch.randn(plain.width).double()
    wrapped = hessian(torch.compile(model, backend="eager"), batch)
    assert torch.equal(plain(v_N), wrapped(v_N))
    model.compile(backend="eager")
    assert torch.equal(plain(v_N), hessian(model, batch)(v_N))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models(reentrant: bool) -> None:
    """Forgotten activations are remembered: twice, and for several products."""
    from tests.watching.models import TinyModel

    torch.manual_seed(0)
    plain = TinyModel().double()
    forgetful = TinyModel(reentrant=reentrant).double()
    forgetful.load_state_dict(plain.state_dict())
    a, b = hessian(plain, subjects.pair()), hessian(forgetful, subjects.pair())
    for v_N in torch.randn(2, a.width).double():
        assert torch.allclose(a(v_N), b(v_N), atol=1e-14)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor] | Tensor:
        return {"nothing": x}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.ones(2, 2), torch.zeros(2, dtype=torch.long)), "no loss"),
        ("text", "a batch is"),
        ({"x": torch.ones(1), "depth": torch.ones(1)}, "takes no depth"),
    ],
)
def test_what_cannot_be_differentiated(batch: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        hessian(Odd(), batch)(torch.ones(2))


def test_other_wrong_inputs() -> None:
    model, (x, y) = subjects.gpt(), subjects.pair()
    with pytest.raises(InputError, match="no trainable parameter matches"):
        hessian(model, (x, y), parameters=["nope*"])
    with pytest.raises(InputError, match="at least one sample"):
        hessian(model, (x, y), micro_batch=0)
    with pytest.raises(InputError, match="no target that counts"):
        hessian(model, (x, torch.full_like(y, -100)))
    ones_N = torch.ones(hessian(model, (x, y)).width).double()
    with pytest.raises(InputError, match="rows of logits"):
        hessian(model, (x, y[:, :3]))(ones_N)
    with pytest.raises(InputError, match="a vector of"):
        hessian(model, (x, y))(torch.ones(3).double())
    with pytest.raises(InputError, match="does not depend"):
        hessian(model, (x, y), loss=lambda z, t: torch.ones(()))(ones_N)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=4, n_head=2, vocab_size=5, n_positions=6)
    own = gauss_newton(GPT2LMHeadModel(config), {"input_ids": x, "labels": x})
    with pytest.raises(InputError, match="Gauss–Newton needs logits"):
        own(torch.ones(own.width))
