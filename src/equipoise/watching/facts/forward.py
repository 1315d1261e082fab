"""Facts of the forward pass: which positions see which, and which targets count.

What an attention call shows is read when it is made, at some queries of every sequence.
Which positions count, and what their targets are, the gradient at the logits says
exactly: that of a cross-entropy is negative at the target alone, and zero in a row that
does not count. So prefixes, ignored labels and losses inside the model need no other
knowledge of the loop.

Axes, in this file:  B sequence · T token · n chosen token · K key · V vocabulary.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.call_stack import Caller
from equipoise.anatomy.calls import AttentionCall, masked_to_infinity
from equipoise.anatomy.sharding import is_dtensor, local_part
from equipoise.anatomy.sites import Anatomy, named, unwrapped
from equipoise.numerics.compiled import to_device
from equipoise.probes.hidden_states import hidden_states
from equipoise.probes.logits import output_logits
from equipoise.probes.protocols import Emit, Guarded
from equipoise.probes.row_sample import chosen_queries
from equipoise.watching.facts.padding import padded_BT

CHOSEN = 64
"""Tokens of each sequence whose rows are looked at."""
LOGITS = 1 << 22
"""Numbers of the gradient at the logits that are looked at, at most."""
SHIFTS = (1, 2)
"""How far ahead of its row a target may lie for its visibility to be read."""
PLACES = re.compile(r"pos(ition)?s?(_|$|\.)|_pos(ition)?s?|wpe", re.IGNORECASE)
"""Names of tables of positions, as models have them."""
ROTARY = re.compile(r"rot(ary|ate)|rope", re.IGNORECASE)
RELATIVE = re.compile(r"rel|bias_table|alibi|slope", re.IGNORECASE)
"""Names of what adds distances to scores."""
FREQUENCIES = re.compile(r"inv_freq|(^|[._])freqs?(_cis)?$")
ANGLES = frozenset({torch.cos, torch.sin, Tensor.cos, Tensor.sin})
HALF = (torch.float16, torch.bfloat16)
ROUNDINGS = 64
"""Roundings that a softmax computed again may be off by."""


@dataclass(slots=True)
class _Stream:
    """The tokens of one embedding call."""

    ids_BT: Tensor
    padding_BT: Tensor
    declared: bool
    """Whether which id is padding was declared, and not seen in the ids."""
    order: int
    """How many attention calls came before the embedding."""
    rows: int = 0
    """Of the table: several tables may be asked for one text (types, segments)."""


@dataclass(slots=True)
class _Site:
    """What one attention call showed, at the chosen queries."""

    kind: str
    name: str
    own: bool | None
    """Whether keys and queries are of one sequence; None where it is not sure."""
    shape: tuple[int, int, int, int]
    facts: dict[str, Any] = field(default_factory=dict)
    ahead_sBn: tuple[Tensor, ...] = ()
    """For each shift, whether the row sees the key so far ahead of it."""
    blind_Bn: Tensor | None = None
    past_Bn: Tensor | None = None
    """Whether the row sees a key before its own."""


@dataclass(slots=True)
class _Targets:
    """What the gradient at the logits said of the chosen tokens."""

    counted_bn: Tensor
    ids_bn: Tensor
    stream: _Stream
    order: int
    """How many attention calls came before the logits."""


@dataclass(slots=True)
class ForwardFacts:
    """State what attends to what, what counts, and where positions go wrong."""

    name: str = "forward"
    operations: frozenset[Any] = ANGLES
    _step: int = 0
    _turns: bool = False
    """Whether the model computes sines or cosines: as all encodings of positions do."""
    _angles: dict[str, str] = field(default_factory=dict)
    """Module that turns queries and keys → the dtype of its angles."""
    _other_axis: dict[str, Tensor] = field(default_factory=dict)
    """Site whose softmax ran over the queries → whether its weights mixed as they are.
    """
    _cuts: "_Cuts" = field(default_factory=lambda: _Cuts())
    _anatomy: Anatomy | None = None
    _streams: list[_Stream] = field(default_factory=list)
    _places: dict[str, dict[str, Any]] = field(default_factory=dict)
    _own: dict[int, bool] = field(default_factory=dict)
    """id of a module that attends → whether it was given one sequence only."""
    _sites: list[_Site] = field(default_factory=list)
    _targets: _Targets | None = None
    _pooled_B: Tensor | None = None
    """Which sequences count, where the model puts out one row for each."""
    _alike: dict[str, Any] = field(default_factory=dict)
    """Scores of places that hold one token, in the first attention of the step."""
    _awaited: bool = False
    """Whether logits were met whose gradient will be looked at."""

    def begin_step(self, step: int) -> None:
        """Forget the last sampled step."""
        self._step, self._targets, self._awaited = step, None, False
        self._pooled_B, self._alike = None, {}
        self._streams, self._sites = [], []
        self._own, self._places = {}, {}
        self._angles, self._other_axis, self._cuts = {}, {}, _Cuts()

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._anatomy = anatomy
        modules = dict(named(anatomy.model))
        yield from self._input_hooks(modules, guarded)
        for name, block in anatomy.blocks.items():
            yield hooks.before(block, guarded(partial(self._cuts.enter, name)))
            yield hooks.after(block, guarded(partial(self._cuts.leave, guarded, name)))
        inside = {id(s.module): s.module for s in anatomy.attention}
        inside |= {id(block): block for block in anatomy.blocks.values()}
        for module in inside.values():
            yield hooks.before(module, guarded(self._on_attending))
        for head in _heads(modules, anatomy):
            yield hooks.after(head, guarded(partial(self._on_logits, guarded)))
        yield hooks.after(anatomy.model, guarded(partial(self._on_output, guarded)))

    def _input_hooks(
        self, modules: Mapping[str, nn.Module], guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        """Yield a hook for each table of tokens or positions, and rotary embedding."""
        for name, module in modules.items():
            if ROTARY.search(type(module).__name__):
                yield hooks.before(module, guarded(partial(self._on_rotary, name)))
            if not isinstance(module, nn.Embedding):
                continue
            yield hooks.after(module, guarded(partial(self._cuts.leave, guarded, "")))
            places = bool(PLACES.search(name))
            listen = self._on_places if places else self._on_tokens
            # A table of positions may make them itself, of a mask that it is given.
            if not places or type(module).forward is nn.Embedding.forward:
                yield hooks.before(module, guarded(partial(listen, name)))

    def _on_tokens(self, name: str, module: nn.Embedding, args: Any, kw: Any) -> None:
        ids = _integers(args, kw)
        if ids is None or ids.ndim != 2 or ids.shape[1] < 2:
            return
        with torch._C.DisableTorchFunction():
            ids_BT = ids.detach()
            declared = self._padding_id(module)
            padding_BT = padded_BT(ids_BT, declared=declared)
        self._streams.append(
            _Stream(
                ids_BT,
                padding_BT,
                declared is not None,
                len(self._sites),
                module.num_embeddings,
            )
        )

    def _padding_id(self, module: nn.Embedding) -> int | None:
        """Return the id that the table, or the model's configuration, says is padding.

        Not where another token shares it: an end that is also padding is a token too.
        """
        if module.padding_idx is not None:
            return module.padding_idx
        config = getattr(self._anatomy and self._anatomy.model, "config", None)
        declared = getattr(config, "pad_token_id", None)
        shared = declared in (getattr(config, "eos_token_id", None), None)
        return None if shared or not isinstance(declared, int) else declared

    def _on_places(self, name: str, module: nn.Embedding, args: Any, kw: Any) -> None:
        places = _integers(args, kw)
        if places is None or places.ndim > 2 or places.shape[-1] < 2:
            return
        with torch._C.DisableTorchFunction():
            lengths = places.amax(-1) - places.amin(-1)
            self._places[name] = {
                "tokens": places.shape[-1],
                "spread": lengths.amax(),
                "last": places.amax(),
                "table": module.num_embeddings,
                "clamped": _clamped(places, module.num_embeddings - 1),
            }

    def _on_rotary(self, name: str, module: nn.Module, args: Any, kw: Any) -> None:
        """Read the positions that a rotary embedding is given, if it is given any."""
        for places in (*args, *kw.values()):
            whole = isinstance(places, Tensor) and not places.is_floating_point()
            if whole and places.ndim == 2 and places.shape[-1] > 1:
                with torch._C.DisableTorchFunction():
                    spread = (places.amax(-1) - places.amin(-1)).amax()
                    last = places.amax()
                told = {"tokens": places.shape[-1], "spread": spread, "last": last}
                self._places[name] = told

    def on_operation(self, caller: Caller, function: Any, args: Any) -> None:
        """Note the dtype of angles by which queries and keys are turned."""
        x = args[0] if args else None
        if not isinstance(x, Tensor) or x.ndim < 1 or x.numel() < 2:
            return
        self._turns |= caller.module is not None and x.ndim < 5
        kind, module = type(caller.module).__name__, caller.module
        anatomy = self._anatomy
        attends = bool(anatomy and module is not None and anatomy.site(module))
        if attends or ROTARY.search(kind) or ROTARY.search(caller.name):
            self._angles[caller.name] = str(x.dtype).removeprefix("torch.")

    def on_other_axis(self, call: AttentionCall) -> None:
        """Read whether weights that sum to 1 over another axis than the keys, queries
        or heads, mixed values as they are.

        Slot attention shares them out again over the keys. Dropout may have scaled
        what it left: the weights are those of the softmax but for one factor. Rounds of
        Sinkhorn normalise over both axes: the scores are then logarithms of shares.
        """
        B, H, Q, K = call.shape
        assert call.scores_BHQK is not None and call.weights_BHQK is not None
        if Q != K or Q < 2 or call.module is None:
            return
        with torch._C.DisableTorchFunction():
            z_HQK, w_HQK = call.scores_BHQK.detach()[0], call.weights_BHQK[0]
            names = self._anatomy.names if self._anatomy else {}
            name = names.get(id(call.module), "")
            total_HQ = masked_to_infinity(z_HQK.float()).exp().sum(-1)
            rounding = ROUNDINGS * torch.finfo(z_HQK.dtype).eps
            shared_out = ((total_HQ - 1).abs() <= rounding).all()
            as_it_is = _is_softmax(z_HQK, w_HQK, axis=-2)
            if H > 1:
                as_it_is = as_it_is | _is_softmax(z_HQK, w_HQK, axis=-3)
            self._other_axis[name] = as_it_is & ~shared_out

    def on_gradients(
        self, anatomy: Anatomy, emit: Emit, *, scale: Tensor | None
    ) -> None:
        """Look at the weights before each place where the graph is cut."""
        self._cuts.look(anatomy)

    def _on_attending(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note whether a module that attends is given one sequence, or more."""
        given = [*args, *kwargs.values()]
        states = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        states = [x for x in states if x.ndim >= 3 and x.shape == states[0].shape]
        once = len({id(x) for x in states}) == 1
        self._own[id(module)] = self._own.get(id(module), True) and once

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        """Read which keys some queries of a call see."""
        B, H, Q, K = call.shape
        own = None if call.module is None else self._own.get(id(call.module))
        if call.cross or Q != K - call.extra_keys:
            own = False
        seen = _Site(call.kind, site, own, (B, H, Q, K))
        self._sites.append(seen)
        if Q < 2:
            return
        with torch._C.DisableTorchFunction():
            self._read_rows(seen, call)
            if len(self._sites) == 1 and own is not False and call.modify is None:
                self._read_alike(call)

    def _read_alike(self, call: AttentionCall) -> None:
        """Compare what the last row makes of two places that hold the same token.

        Positions of whatever kind tell them apart: added to the stream, turned into
        queries and keys, or added to the scores. Only in the first attention: later
        streams know what came before each token.
        """
        B, _, Q, K = call.shape
        stream = self._stream_of(B, Q)
        if stream is None or call.extra_keys or Q < 4 or self._anatomy is None:
            return
        rows = min(B, 4)
        z_BHK = call.scores(slice(Q - 1, Q))[:rows, :, 0, :K].detach().float()
        ids_BK = stream.ids_BT[:rows].to(z_BHK.device)
        seen_BK = z_BHK.isfinite().all(1) & ~stream.padding_BT[:rows].to(z_BHK.device)
        both_BKK = seen_BK[:, :, None] & seen_BK[:, None]
        both_BKK = both_BKK & ~torch.eye(K, dtype=torch.bool, device=z_BHK.device)
        z_BHK = z_BHK.masked_fill(~seen_BK[:, None], 0.0)
        apart_BKK = (z_BHK[..., None] - z_BHK[..., None, :]).abs().amax(1)
        same_BKK = ids_BK[:, :, None] == ids_BK[:, None]
        like = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
        assert like is not None
        rounding = ROUNDINGS * torch.finfo(like.dtype).eps * z_BHK.abs().amax()
        self._alike = {
            "pairs": (same_BKK & both_BKK).sum(),
            "apart": (same_BKK & both_BKK & (apart_BKK > rounding)).sum(),
            "others": (~same_BKK & both_BKK & (apart_BKK > 16 * rounding)).sum(),
        }

    def _read_rows(self, seen: _Site, call: AttentionCall) -> None:
        B, _, Q, K = seen.shape
        like = call.q_BHQD if call.scores_BHQK is None else call.scores_BHQK
        assert like is not None
        i_n = self._chosen(Q, like.device)
        sees_BnK = call.visible_bqK(i_n)
        tokens = sees_BnK.shape[-1]
        # The last row before the first token predicts that token, from nothing: so do
        # all texts without a beginning. A learned sink is a key to other such rows.
        next_BnK = call.visible_bqK((i_n + 1).clamp(max=Q - 1))
        blind_Bn = ~sees_BnK.any(-1) & ~next_BnK.any(-1)
        seen.blind_Bn = blind_Bn & (call.extra_keys == 0)
        seen.facts["blind"] = seen.blind_Bn.sum()
        if K - call.extra_keys != Q:
            return
        mixed_BnK = call.mixed_bqK(i_n)
        sees_BnK = sees_BnK if mixed_BnK is None else sees_BnK & mixed_BnK
        j_K = torch.arange(tokens, device=like.device)
        away_nK = j_K - i_n[:, None]
        seen.facts["ahead"] = (sees_BnK * away_nK).amax()
        seen.facts["behind"] = (sees_BnK * -away_nK).amax()
        seen.facts["last_row"] = i_n.amax()
        seen.past_Bn = (sees_BnK & (away_nK < 0)).any(-1)
        seen.ahead_sBn = tuple((sees_BnK & (away_nK == s)).any(-1) for s in SHIFTS)
        stream = self._stream_of(B, Q)
        if stream is not None:
            padding_BK = stream.padding_BT
            real_Bn = ~padding_BK[:, i_n]
            at_B1K = padding_BK[:, None]
            to_padding_Bn = (sees_BnK & at_B1K).any(-1) & real_Bn
            # Where padding alone is seen, or most of what is hidden is real.
            to_real_Bn = (sees_BnK & ~at_B1K).any(-1) & real_Bn
            seen.facts["padding"] = padding_BK.sum()
            seen.facts["declared"] = stream.declared
            seen.facts["to_padding"] = to_padding_Bn.sum()
            seen.facts["padding_only"] = (to_padding_Bn & ~to_real_Bn).sum()

    def _chosen(self, queries: int, device: torch.device) -> Tensor:
        if queries <= CHOSEN:
            return torch.arange(queries, device=device)
        chosen_n = chosen_queries(queries, CHOSEN, step=self._step, site=self.name)
        return to_device(chosen_n, device)

    def _stream_of(self, sequences: int, tokens: int) -> _Stream | None:
        """Return the tokens that an attention call is over, if only one can be.

        Tables of types or segments are smaller than the one of the tokens.
        """
        most = max((s.rows for s in self._streams), default=0)
        texts = [s for s in self._streams if s.rows == most]
        if len(texts) != 1 or tuple(texts[0].ids_BT.shape) != (sequences, tokens):
            return None
        return texts[0]

    def _on_logits(
        self, guarded: Guarded, module: nn.Module, args: Any, output: Any
    ) -> None:
        """Look at the gradient of these logits, once the backward pass makes it."""
        if self._awaited or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if output.ndim == 2:
            self._await_pooled(guarded, output)
            return
        fitting = [s for s in self._streams[::-1] if _fits(s, output)]
        if not fitting:
            return
        # The table that is as long as the logits are wide, else the last that was read.
        wide = [s for s in fitting if s.rows == output.shape[-1]]
        stream = next(iter(wide or fitting))
        self._awaited = True
        listen = partial(self._on_gradient, stream, len(self._sites))
        output.register_hook(guarded(listen))

    def _on_output(
        self, guarded: Guarded, module: nn.Module, args: Any, output: Any
    ) -> None:
        logits = output_logits(output)
        if logits is not None:
            self._on_logits(guarded, module, args, logits)

    def _await_pooled(self, guarded: Guarded, output: Tensor) -> None:
        """Look at which sequences count, where each has one row of outputs."""
        texts = [s for s in self._streams if len(s.ids_BT) == len(output)]
        if len(texts) == len(self._streams) == 1 or self._one_text(len(output)):
            self._awaited = True
            output.register_hook(guarded(self._on_pooled_gradient))

    def _one_text(self, sequences: int) -> bool:
        most = max((s.rows for s in self._streams), default=0)
        texts = [s for s in self._streams if s.rows == most]
        return len(texts) == 1 and len(texts[0].ids_BT) == sequences

    def _on_pooled_gradient(self, gradient: Tensor) -> None:
        if not is_dtensor(gradient):
            g_BC = gradient.detach()
            self._pooled_B = (g_BC != 0).any(-1) & g_BC.isfinite().all(-1)

    def _on_gradient(self, stream: _Stream, order: int, gradient: Tensor) -> None:
        """Read which of the chosen tokens count, and their targets."""
        if is_dtensor(gradient):  # no rank has a token's whole row
            return
        g_BTV = gradient.detach()
        B, T, V = g_BTV.shape
        i_n = self._chosen(T, g_BTV.device)
        rows = max(1, LOGITS // (V * len(i_n)))
        g_bnV = g_BTV[:rows, i_n]
        counted_bn = (g_bnV != 0).any(-1) & g_bnV.isfinite().all(-1)
        self._targets = _Targets(counted_bn, g_bnV.argmin(-1), stream, order)

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the step; none where no pass was seen."""
        found: dict[str, Any] = {}
        if self._sites:
            # A later pass, without a loss or of other tokens, says nothing of these.
            last = {s.name: s for s in self._sites}
            last |= {s.name: s for s in self._before(self._targets)}
            found["sites"] = {name: self._of_site(s) for name, s in last.items()}
        if self._places:
            found["places"] = {n: self._of_places(x) for n, x in self._places.items()}
        others = {
            "angles": self._angles,
            "alike": self._of_alike(),
            "other_axis": self._other_axis,
            "cuts": self._cuts.starved,
        }
        found |= {name: some for name, some in others.items() if some}
        if self._anatomy is not None:
            found |= _rounded_frequencies(self._anatomy.model)
        if self._targets is not None:
            found["targets"] = self._of_targets(self._targets)
        return found

    def _of_alike(self) -> dict[str, Any]:
        if not self._alike or not (self._turns or has_places(self._anatomy)):
            return {}
        return {**self._alike, "learnt": self._learnt_places()}

    def _learnt_places(self) -> Tensor | bool:
        """Return whether a weight that is named after positions has a gradient."""
        if self._anatomy is None:
            return False
        grads = [
            local_part(p.grad).any()
            for n, p in unwrapped(self._anatomy.model).named_parameters()
            if p.grad is not None and (PLACES.search(n) or RELATIVE.search(n))
        ]
        return torch.stack(grads).any() if grads else False

    def _of_places(self, places: dict[str, Any]) -> dict[str, Any]:
        """Return the facts of positions, and if they are those of a sequence's tokens.

        Positions of a decoding step, one for each sequence, are all alike by design.
        """
        tokens = places["tokens"]
        own = any(s.shape[2] == tokens != s.shape[0] for s in self._sites)
        return {**places, "own": own}

    def _of_targets(self, targets: _Targets) -> dict[str, Any]:
        """Count the targets, and those that are an input some tokens ahead."""
        ids_BT = targets.stream.ids_BT
        i_n = self._chosen(ids_BT.shape[1], ids_BT.device)
        counts_n, last = targets.counted_bn.any(0), ids_BT.shape[1]
        found: dict[str, Any] = {
            "counted": targets.counted_bn.sum(),
            "first": i_n.where(counts_n, last).amin(),
            "last": i_n.where(counts_n, -1).amax(),
        }
        for shift in SHIFTS:
            asked_bn, same_bn = self._met(targets, i_n, shift)
            found[f"asked_{shift}"] = asked_bn.sum()
            found[f"met_{shift}"] = (asked_bn & same_bn).sum()
        return found

    def _met(self, targets: _Targets, i_n: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        """Return which rows count and have such an input, and where it is theirs."""
        ids_BT, counted_bn = targets.stream.ids_BT, targets.counted_bn
        last = ids_BT.shape[1] - 1
        ahead_bn = ids_BT[: len(counted_bn), (i_n + shift).clamp(max=last)]
        asked_bn = counted_bn & (i_n + shift <= last)
        return asked_bn, ahead_bn == targets.ids_bn

    def _of_site(self, site: _Site) -> dict[str, Any]:
        """Return a site's facts, with those that hang on which rows count."""
        found: dict[str, Any] = {"kind": site.kind, "shape": list(site.shape)}
        found |= site.facts
        if site.own is not None:
            found["own"] = site.own
        targets = self._targets
        if site.blind_Bn is None:
            return found
        if targets is None:
            return found | self._of_pooled(site)
        B, T = targets.stream.ids_BT.shape
        if (site.shape[0], site.shape[2]) != (B, T) or not self._leads(site, targets):
            return found
        counted_bn = targets.counted_bn
        found["counted_blind"] = (_rows(site.blind_Bn, counted_bn) & counted_bn).sum()
        if not site.own or site.past_Bn is None:
            return found
        i_n = self._chosen(T, counted_bn.device)
        for shift, ahead_Bn in zip(SHIFTS, site.ahead_sBn, strict=True):
            asked_bn, same_bn = self._met(targets, i_n, shift)
            told_bn = asked_bn & same_bn & _rows(ahead_Bn, counted_bn)
            found[f"sees_target_{shift}"] = told_bn.sum()
            backwards_bn = told_bn & ~_rows(site.past_Bn, counted_bn) & (i_n > 0)
            found[f"sees_no_past_{shift}"] = backwards_bn.sum()
            found[f"has_past_{shift}"] = (told_bn & (i_n > 0)).sum()
        return found

    def _of_pooled(self, site: _Site) -> dict[str, Any]:
        """Count the sequences that count, and of which no token sees any.

        Their output is made of nothing.
        """
        counted_B = self._pooled_B
        if counted_B is None or site.blind_Bn is None or not site.own:
            return {}
        blind_B = site.blind_Bn.all(-1)
        if not site.shape[0] == len(counted_B) == len(blind_B):
            return {}
        return {"counted_blind": (blind_B & counted_B).sum()}

    def _before(self, targets: _Targets | None) -> list[_Site]:
        """Return the calls between the embedding of the tokens and their logits."""
        if targets is None:
            return []
        return self._sites[targets.stream.order : targets.order]

    def _leads(self, site: _Site, targets: _Targets) -> bool:
        """Return whether a site is of the stack of blocks that the logits come from.

        An encoder, or a part that another loss trains, may see all it likes: what
        counts is the stack whose attention was called last before the logits. Where all
        layers of a stack were dropped, it may have been the one.
        """
        before = self._before(targets)
        if not any(one is site for one in before):
            return False
        known = self._anatomy.attention if self._anatomy else ()
        called = {stack_of(one.name) for one in self._sites[: targets.order]}
        if {stack_of(one.name) for one in known} - called:
            return False
        return stack_of(before[-1].name) == stack_of(site.name)


@dataclass(slots=True)
class _Cuts:
    """Blocks whose input is cut off the graph that the part before them belongs to."""

    before: str = ""
    """The block that ran last; nothing before the first."""
    found: dict[str, str] = field(default_factory=dict)
    """Block → the one before it."""
    starved: dict[str, dict[str, Any]] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    """Blocks whose output the backward pass came to, if only with zeros."""

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        states = hidden_states(args, kwargs)
        if states is not None and not states.requires_grad:
            self.found[name] = self.before
        self.before = name

    def leave(
        self, guarded: Guarded, name: str, module: nn.Module, args: Any, output: Any
    ) -> None:
        """Note when the backward pass comes to what a block made.

        Behind a map that starts at zero, gradients are zeros, and no graph is cut.
        """
        made = output if isinstance(output, tuple | list) else (output,)
        for x in made:
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(guarded(lambda _: self.reached.add(name)))

    def look(self, anatomy: Anatomy) -> None:
        """Note the cuts before which no trainable weight has a gradient."""
        for name, before in self.found.items():
            part = anatomy.blocks[before] if before else None
            tables = [m for m in anatomy.model.modules() if isinstance(m, nn.Embedding)]
            modules = [part] if part is not None else tables
            weights = [p for m in modules for p in m.parameters() if p.requires_grad]
            grads = [p.grad for p in weights if p.grad is not None]
            moved = torch.stack([g.detach().any() for g in grads]) if grads else None
            self.starved[name] = {
                "before": before,
                "weights": len(weights),
                "moved": 0 if moved is None else moved.sum(),
                "reached": before in self.reached,
            }


def _is_softmax(z_HQK: Tensor, w_HQK: Tensor, *, axis: int) -> Tensor:
    """Return whether weights are a softmax over an axis, but for one factor."""
    p_HQK = masked_to_infinity(z_HQK.float()).softmax(axis)
    ratio_HQK = w_HQK.float() / p_HQK
    used_HQK = (w_HQK != 0) & (p_HQK > torch.finfo(torch.float16).tiny)
    most = ratio_HQK.where(used_HQK, 0.0).amax()
    least = ratio_HQK.where(used_HQK, torch.inf).amin()
    limit = 1 + ROUNDINGS * torch.finfo(w_HQK.dtype).eps
    return (most <= limit * least) & (most > 0)


def _clamped(places: Tensor, last: int) -> Tensor:
    """Count the tokens that share the table's last row with the one that it is for.

    Places count up by one to the last row, and stay there to the end.
    """
    p_BT = places.reshape(-1, places.shape[-1])
    step_BT = p_BT.diff(dim=-1)
    at_last_BT = p_BT == last
    counts_BT = (step_BT == 1) | ((step_BT == 0) & at_last_BT[:, 1:])
    beyond_B = (at_last_BT.sum(-1) - 1).clamp(min=0)
    return (beyond_B * counts_BT.all(-1)).amin()


def _rounded_frequencies(model: nn.Module) -> dict[str, Any]:
    """Return the rotary frequencies that are stored in half precision, by name.

    Sines and cosines may be: they have two axes, place and frequency.
    """
    rotary = {n for n, m in named(model) if ROTARY.search(type(m).__name__)}
    found = {
        name: str(x.dtype).removeprefix("torch.")
        for name, x in unwrapped(model).named_buffers()
        if x.dtype in HALF and x.ndim == 1 and x.numel() > 1
        if FREQUENCIES.search(name) or name.rpartition(".")[0] in rotary
    }
    return {"frequencies": found} if found else {}


def has_places(anatomy: Anatomy | None) -> bool:
    """Return whether something of a model is named like positions."""
    if anatomy is None:
        return False
    model = anatomy.model
    names = [n for n, _ in named(model)]
    names += [type(m).__name__ for _, m in named(model)]
    names += [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
    return any(
        PLACES.search(n) or ROTARY.search(n) or n.rpartition(".")[2] == "pe"
        for n in names
    )


def _integers(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first argument, if it is a tensor of whole numbers with an axis."""
    first = next(iter((*args, *kwargs.values())), None)
    if not isinstance(first, Tensor) or first.is_floating_point() or not first.ndim:
        return None
    return first


def _heads(modules: Mapping[str, nn.Module], anatomy: Anatomy) -> Iterator[nn.Linear]:
    """Yield the layers outside of blocks that are as wide as a table is long."""
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding)]
    sizes = {table.num_embeddings for table in tables}
    for name, module in modules.items():
        outside = isinstance(module, nn.Linear) and not _within(name, anatomy.blocks)
        if isinstance(module, nn.Linear) and outside and module.out_features in sizes:
            yield module


def _within(name: str, blocks: Mapping[str, nn.Module]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _fits(stream: _Stream, logits: Tensor) -> bool:
    return logits.ndim == 3 and logits.shape[:2] == stream.ids_BT.shape


def _rows(x_Bn: Tensor, like_bn: Tensor) -> Tensor:
    """Return the sequences that were looked at; one mask may serve all of them."""
    return x_Bn[: len(like_bn)].expand_as(like_bn)


def stack_of(name: str) -> str:
    """Return the part of a name before its first number: where its stack is held.

    >>> stack_of("decoder.block.0.layer.1"), stack_of("attention")
    ('decoder.block', '')
    """
    parts = name.partition("#")[0].split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] if numbered else -1])
