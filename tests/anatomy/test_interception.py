"""The interceptor as a guest: attribution, repetition, flex, modes, listening."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from equipoise.anatomy import hooks
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.hooks import without_mode
from equipoise.anatomy.interception import Interceptor
from equipoise.anatomy.sites import named
from tests.zoo.odd import Oddly
from tests.zoo.specimens import SPECIMENS


def captured(
    model: nn.Module, *args: Any, **kwargs: Any
) -> list[tuple[str, AttentionCall]]:
    anatomy, found = anatomy_of(model), []

    def listen(call: AttentionCall) -> None:
        found.append((anatomy.names[id(call.module)], call))

    with Interceptor(anatomy, listen):
        model(*args, **kwargs)
    return found


def test_shared_layers_are_read_at_each_pass() -> None:
    albert = next(s for s in SPECIMENS if s.name == "AlbertModel")
    calls = captured(albert.build("sdpa"), **albert.batch())
    assert len({name for name, _ in calls}) == 1 and len(calls) == 2


def test_gradients_and_randomness_are_untouched() -> None:
    torch.manual_seed(0)
    gpt2 = next(s for s in SPECIMENS if s.name == "GPT2LMHeadModel")
    model = gpt2.build("eager").train()

    def step() -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(**gpt2.batch()).logits.square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return grads, torch.get_rng_state()

    alone = step()
    with Interceptor(anatomy_of(model), lambda call: list(call.blocks())):
        watched = step()
    assert all(torch.equal(a, b) for a, b in zip(alone[0], watched[0], strict=True))
    assert torch.equal(alone[1], watched[1])


class Flexible(nn.Module):
    """Flex attention with a mask and a bias that indexes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(16, 48), 4

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        bias = torch.arange(T) * 0.1
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, "cpu")
        identity = torch.eye(T).expand(*q.shape[:2], T, T)
        out: Tensor = flex_attention(
            q, k, identity, score_mod=lambda s, b, h, i, j: s + bias[j], block_mask=mask
        )
        return out


def test_flex_attention_is_read_and_not_disturbed() -> None:
    model, x = Flexible(), torch.randn(2, 6, 16)
    rows: list[Tensor] = []
    with torch.no_grad():
        alone = model(x)
        anatomy = anatomy_of(model)
        listen = lambda c: rows.extend(s.softmax(-1) for _, s in c.blocks())  # noqa: E731
        with Interceptor(anatomy, listen):
            watched = model(x)
    assert torch.equal(alone, watched)
    torch.testing.assert_close(rows[0], alone, rtol=0, atol=1e-6)


class Nosy(TorchFunctionMode):
    """Somebody else's mode, which counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kw: Any = None
    ) -> Any:
        self.seen += 1
        return func(*args, **(kw or {}))


def test_stepping_aside_keeps_other_modes_in_place() -> None:
    below, mine, above, top = Nosy(), Nosy(), Nosy(), Nosy()
    with below, mine, above, top:
        with without_mode(mine):
            assert _get_current_function_mode_stack() == [below, above, top]
            torch.zeros(1) + 1
        assert _get_current_function_mode_stack() == [below, mine, above, top]
        before_ = mine.seen
        torch.zeros(1) + 1
    assert before_ == 0 and mine.seen > 0
    assert below.seen and above.seen


def test_a_mistake_of_ours_stays_ours() -> None:
    failures: list[BaseException] = []

    def guarded(hook: Any) -> Any:
        def safe(*args: Any, **kwargs: Any) -> None:
            try:
                hook(*args, **kwargs)
            except ZeroDivisionError as failure:
                failures.append(failure)

        return safe

    def listen(call: AttentionCall) -> None:
        raise ZeroDivisionError

    model, x = Oddly(), torch.randn(2, 5, 16)
    alone = model(x)
    with Interceptor(anatomy_of(model), listen, guarded=guarded):
        assert torch.equal(model(x), alone)
    assert failures


def test_hooks_see_keywords_order_and_exceptions() -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor, *, fail: bool) -> Tensor:
            if fail:
                raise RuntimeError("subject")
            return x

    part, seen = Part(), []
    asked_for = len(torch_modules._global_forward_hooks_with_kwargs)
    handles = [
        hooks.before(part, lambda m, args, kwargs: seen.append(kwargs["fail"])),
        hooks.after(part, lambda m, args, out: seen.append("quiet")),
        hooks.after(part, lambda m, args, out: seen.append(out), always_call=True),
    ]
    part(torch.ones(1), fail=False)
    with pytest.raises(RuntimeError, match="subject"):
        part(torch.ones(1), fail=True)
    assert seen == [False, "quiet", torch.ones(1), True, None]
    for handle in handles:
        handle.remove()
        handle.remove()
    assert not torch_modules._has_any_global_hook()
    assert len(torch_modules._global_forward_hooks_with_kwargs) == asked_for
    assert not part._forward_pre_hooks_with_kwargs


def test_names_are_the_users_own() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(nn.DataParallel(inner))
    assert [name for name, _ in named(compiled)] == ["", "0"]


class Sunk(Oddly):
    """A sink that is cut off again, over keys of which the last two are padding."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT
        padding = torch.arange(z.shape[-1]) >= z.shape[-1] - 2
        z = z.masked_fill(padding, -torch.inf)
        sink = torch.zeros(1, dtype=q.dtype).expand(*z.shape[:-1], 1)
        return torch.cat([z, sink], -1).softmax(-1)[..., :-1] @ v


class BiasedKeys(nn.Module):
    """``nn.MultiheadAttention`` with a learned key and a zero one; two are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            16, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        padding = (torch.arange(x.shape[1]) >= x.shape[1] - 2).expand(x.shape[:2])
        mixed: Tensor = self.attention(x, x, x, key_padding_mask=padding)[0]
        return mixed


@pytest.mark.parametrize(("kind", "extra"), [(Sunk, 1), (BiasedKeys, 2)])
def test_keys_that_are_no_token_do_not_hide_the_padding(
    kind: type[nn.Module], extra: int
) -> None:
    """Six tokens and more keys: with those taken for tokens no row is padding."""
    torch.manual_seed(0)
    ((_, call),) = captured(kind(), torch.randn(2, 6, 16))
    assert call.extra_keys == extra and call.shape[3] == 6 + extra
    assert call.counted_BQ().tolist() == [[True] * 4 + [False] * 2] * 2
