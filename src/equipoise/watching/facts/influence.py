"""Influence, tried: one thing of an input is changed, and what moves is measured.

A few forward passes of one micro-batch, in evaluation mode and without gradients, after
a sampled step is over. Buffers are copies, generators and the attributes of modules are
put back. A move is compared with the size of rounding: that of the same batch with its
sequences in another order, and of the narrowest format that the pass itself made
numbers in, since a model may enter autocast within. Fused attention is compared with
what one unit of rounding at its inputs and output moves. What would not be sure is not
tried, and says why.

Axes, in this file:  B sequence · T token · V vocabulary.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from equipoise.anatomy import hooks
from equipoise.anatomy.call_stack import caller
from equipoise.anatomy.calls import AttentionCall
from equipoise.anatomy.operations import FUSED
from equipoise.anatomy.sharding import is_sharded
from equipoise.anatomy.sites import Anatomy, named, unwrapped
from equipoise.probes.capture import autocast_left
from equipoise.probes.hidden_states import hidden_states
from equipoise.probes.logits import output_logits
from equipoise.probes.protocols import Emit, Guarded
from equipoise.watching.facts.forward import PLACES, has_places
from equipoise.watching.facts.padding import padded_BT
from equipoise.watching.step.batch import Autocast, Batch, CallState

TRIED = (2, 8)
"""Samples after which influence is tried: at the very start, parts that begin at zero
let nothing through."""
CUTS = (0.25, 0.5, 0.75)
"""Places in the text at which everything from there on is changed."""
ROUNDINGS = 64
"""Units of the format within which two passes agree."""
DROPS = {F.dropout, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout}
DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal}
DRAWS |= {torch.bernoulli, Tensor.uniform_, Tensor.normal_, Tensor.exponential_}
MASK = "attention_mask"
PLACE_IDS = "position_ids"
QKV = ("query", "key", "value")


class DeclinedError(Exception):
    """Why influence cannot be tried."""


@dataclass(slots=True)
class InfluenceFacts:
    """State how far outputs move when something else of the input changes."""

    name: str = "influence"
    active: bool = False
    _samples: int = 0
    _anatomy: Anatomy | None = None
    _batch: Batch | None = None
    _shapes: set[tuple[int, int]] = field(default_factory=set)
    _streams: int = 0
    """Texts that were looked up: a question and its answer are two."""
    _found: dict[str, Any] = field(default_factory=dict)

    def begin_step(self, step: int) -> None:
        """Forget the batch of the last sampled step."""
        self._batch, self._shapes, self._streams = None, set(), 0

    @property
    def _due(self) -> bool:
        return self.active and self._samples in TRIED

    def attach(
        self, anatomy: Anatomy, emit: Emit, guarded: Guarded
    ) -> Iterator[RemovableHandle]:
        self._anatomy = anatomy
        if self._due:
            for table in _token_tables(anatomy.model):
                yield hooks.before(table, guarded(self._on_tokens))

    def _on_tokens(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._streams += 1

    def on_attention(self, site: str, call: AttentionCall, emit: Emit) -> None:
        """Note over which sequences and tokens the model attends."""
        B, _, Q, _ = call.shape
        self._shapes.add((B, Q))

    def on_call(
        self, module: nn.Module, args: Any, kwargs: Any, *, graded: bool
    ) -> None:
        """Hold the first micro-batch of a step in which influence is tried."""
        if self._due and graded and self._batch is None:
            state = CallState.now(module)
            autocast = Autocast(dict(autocast_left()))
            state = CallState(state.random_state, autocast)
            self._batch = Batch(tuple(args), dict(kwargs), state)

    def facts(self) -> Mapping[str, Any]:
        """Return the facts so far; run the passes where they are due."""
        due, batch = self._due, self._batch
        self._samples += 1
        if not self.active:
            return {"tried": False}
        if due and batch is not None and self._anatomy is not None:
            try:
                trial = InfluenceTrial(self._anatomy, batch, self._shapes)
                trial.one_text = self._streams == 1
                self._found = {"tried": True, **trial.run()}
            except DeclinedError as why:
                self._found = {"tried": False, "declined": str(why)}
        self._batch = None
        return self._found or {"tried": False}


class _Sees(TorchFunctionMode):
    """Notes the formats of a pass, and whether anything dropped or drew numbers."""

    def __init__(self, anatomy: Anatomy | None = None) -> None:
        super().__init__()
        self.dropped = self.jittered = False
        self._anatomy = anatomy
        """To find out what draws random numbers."""
        self.formats: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", args[2] if len(args) > 2 else True)
            self.dropped |= bool(p) and bool(training)
        elif func in DRAWS and self._anatomy is not None:
            self.jittered |= _routes(caller(self._anatomy.names).module, self._anatomy)
        elif func in FUSED:
            self.dropped |= bool(kwargs.get("dropout_p", args[4:5] and args[4]))
        out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.formats.add(x.dtype)
        return out


class _Rounds(TorchFunctionMode):
    """Moves what torch's attention reads and makes by one unit of its format."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.calls = 0
        self._rng = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        given = tuple(self._rounded(x) for x in args[:3]) + tuple(args[3:])
        kwargs |= {k: self._rounded(kwargs[k]) for k in QKV if k in kwargs}
        out: Tensor = F.scaled_dot_product_attention(*given, **kwargs)
        return self._rounded(out)

    def _rounded(self, x: Tensor) -> Tensor:
        """Return every number one unit up or down."""
        up = torch.randint(0, 2, x.shape, generator=self._rng).to(x.device)
        return (x * (1 + (2 * up - 1) * torch.finfo(x.dtype).eps)).to(x.dtype)


class _LossInputs(TorchFunctionMode):
    """Keeps what the loss function of a pass compares with its targets."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            self._given.append(args[0] if args else kwargs["input"])
        return func(*args, **kwargs)

    def logits(self, shape: torch.Size) -> Tensor | None:
        """Return one row a token, or None where rows are not the tokens of the batch.

        A model that predicts the next token within leaves out its last row: zeros stand
        there, which nothing moves.
        """
        rows_NV = [z.mT.flatten(0, 1) if z.ndim == 3 else z for z in self._given]
        if not rows_NV or any(z.ndim != 2 for z in rows_NV):
            return None
        B, T = shape
        z_NV = torch.cat(rows_NV)
        if len(z_NV) == B * T:
            return z_NV.view(B, T, -1)
        if len(z_NV) == B * (T - 1):
            return F.pad(z_NV.view(B, T - 1, -1), (0, 0, 0, 1))
        return None


class InfluenceTrial:
    """The passes over one micro-batch."""

    def __init__(
        self, anatomy: Anatomy, batch: Batch, shapes: set[tuple[int, int]]
    ) -> None:
        self._anatomy, self._batch = anatomy, batch
        self._model, self.one_text = anatomy.model, True
        self._formats: set[torch.dtype] = set()
        self._name, self._ids_BT, self._askew = _ids(batch, shapes)
        self._pooled = False
        """Whether the model puts out one row for each sequence."""
        self._inside = False
        """Whether logits are seen only where the model computes its loss."""
        _refuse(self._model)
        self._modes = {m: m.training for m in unwrapped(self._model).modules()}

    def run(self) -> dict[str, Any]:
        """Return the moves, each as a share of the logits' size.

        Raises:
            DeclinedError: If no pass can tell anything.
        """
        with _state_kept(self._model):
            with _Sees() as seen:
                base_BTV = self._pass({})
            self._formats = seen.formats
            again_BTV = self._pass({})
            size = base_BTV.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
            again = (again_BTV - base_BTV).abs().amax() / size
            if bool(again > ROUNDINGS * self._format()):
                raise DeclinedError("state")
            turned_BTV = self._pass({}, order=torch.arange(len(base_BTV)).flip(0))
            turned = (turned_BTV.flip(0) - base_BTV).abs().amax() / size
            # More than rounding: the place in the batch counts, and measures no noise.
            alike = turned <= ROUNDINGS * self._format()
            if self._inside and not bool(alike):
                # Rows of a loss may be of tokens first: then they are not what we take.
                raise DeclinedError("layout")
            noise = torch.maximum(again, turned) if alike else again
            found: dict[str, Any] = {
                "noise": float(noise),
                "order_of_batch": float(turned),
            }
            found["format"] = self._format()

            def moved(z_BTV: Tensor, where: Any) -> float:
                return float((z_BTV - base_BTV).abs()[where].amax() / size)

            if self._askew:
                if not self._rows_are_sequences():
                    raise DeclinedError("layout")
                return found | self._examples(moved)
            # A capacity, or experts that choose, mix tokens by design; and a model
            # that minds the place in the batch may have one that was not found.
            if not self._anatomy.routers:
                found |= self._future(moved) if bool(alike) else {"future": {}}
                found |= self._examples(moved)
                found |= self._padding(moved)
                found |= self._documents(moved)
                found |= self._shorter(base_BTV, size)
            found |= self._places(moved)
            found |= self._repeated(base_BTV, size)
            found |= self._fused(moved)
        return found

    def _format(self) -> float:
        """Return the rounding unit of the narrowest format of the pass."""
        dtypes = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        dtypes |= set(self._batch.call_state.autocast.dtypes.values()) | self._formats
        return max((torch.finfo(d).eps for d in dtypes), default=0.0)

    def _pass(
        self,
        changed: Mapping[str, Tensor],
        *,
        order: Tensor | None = None,
        other_seed: bool = False,
        part: "Part | None" = None,
    ) -> Tensor:
        """Return the logits of the batch with some of its tensors changed."""
        args, kwargs = self._changed(changed)
        shape = self._ids_BT.shape
        if part is not None:
            args = tuple(part.of(x) for x in args)
            kwargs = {k: part.of(x) for k, x in kwargs.items()}
            shape = torch.Size((len(part.rows), part.length))
        if order is not None:
            B = len(self._ids_BT)
            args = tuple(_ordered(x, order, B) for x in args)
            kwargs = {k: _ordered(x, order, B) for k, x in kwargs.items()}
        batch = Batch(args, kwargs, self._batch.call_state)
        random_state = batch.call_state.random_state
        if other_seed:
            own = CallState(_Reseeded(random_state), batch.call_state.autocast)  # type: ignore[arg-type]
            batch = Batch(args, kwargs, own)
        logits = self._logits(batch, shape)
        if logits is None or not logits.is_floating_point():
            raise DeclinedError("no_logits")
        self._pooled = logits.ndim == 2
        # One number for each pair of the batch's rows compares them, by design.
        fits = logits.shape[:2] == shape if logits.ndim == 3 else self._pooled
        if self._pooled:
            fits = len(logits) == shape[0] != logits.shape[1]
        if not fits or not bool(logits.isfinite().all()):
            raise DeclinedError("no_logits")
        return logits.detach().clone()

    def _logits(self, batch: Batch, shape: torch.Size) -> Tensor | None:
        """Return what a pass puts out, or what it gives its own loss function."""
        if not self._inside:
            logits: Tensor | None = output_logits(batch.replay(self._model))
            self._inside = logits is None
            if logits is not None:
                return logits
        given = _LossInputs()
        with given:
            batch.replay(self._model)
        return given.logits(shape)

    def _rows_are_sequences(self) -> bool:
        """Return whether positions run along the second axis of the ids.

        All tokens are made one: what then differs, as the first block is given it, are
        positions. Attention that runs along the other axis mixes sequences.
        """
        block = next(iter(self._anatomy.blocks.values()), None)
        given: list[Tensor] = []

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            states = hidden_states(args, kwargs)
            if states is not None and not given:
                given.append(states.detach().clone())

        if block is None:
            return False
        handle = hooks.before(block, keep)
        try:
            self._with_ids(torch.full_like(self._ids_BT, int(self._ids_BT[0, 0])))
        finally:
            handle.remove()
        if not given or given[0].shape[:2] != self._ids_BT.shape:
            return False
        x_BTD = given[0].float()
        rounding = ROUNDINGS * self._format() * x_BTD.abs().amax()
        along_T = (x_BTD - x_BTD[:, :1]).abs().amax() > rounding
        along_B = (x_BTD - x_BTD[:1]).abs().amax() > rounding
        return bool(along_T & ~along_B)

    def _changed(
        self, changed: Mapping[str, Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors, by name or place."""
        args = tuple(changed.get(str(i), x) for i, x in enumerate(self._batch.args))
        kwargs = {k: changed.get(k, x) for k, x in self._batch.kwargs.items()}
        return args, kwargs

    def _with_ids(self, ids_BT: Tensor) -> Tensor:
        return self._pass({self._name: ids_BT})

    def _others(self) -> Tensor:
        """Return the batch's own tokens in another order: none that it has not."""
        flat = self._ids_BT.flatten()
        return flat.roll(self._ids_BT.shape[1] // 2 + 1).view_as(self._ids_BT)

    def _future(self, moved: Callable[[Tensor, Any], float]) -> dict[str, Any]:
        """Change everything from a place on; measure the row just before it."""
        T, found = self._ids_BT.shape[1], {}
        if (
            self._pooled or not self.one_text
        ):  # what is changed may be a question, seen as a whole
            return {"future": {}}
        for share in CUTS:
            cut = max(1, int(share * T))
            ids_BT = self._ids_BT.clone()
            ids_BT[:, cut:] = self._others()[:, cut:]
            row = cut - 1
            real_B = self._real()[:, row]
            if bool(real_B.any()):  # a row of padding may see anything
                found[str(row)] = moved(self._with_ids(ids_BT), (real_B, row))
        return {"future": found}

    def _real(self) -> Tensor:
        """Return where tokens are real, as far as the loop and the ids tell."""
        real_BT = ~padded_BT(self._ids_BT, declared=None)
        mask = self._batch.kwargs.get(MASK)
        if isinstance(mask, Tensor) and mask.shape == self._ids_BT.shape:
            real_BT = real_BT & mask.detach().bool()
        return real_BT

    def _examples(self, moved: Callable[[Tensor, Any], float]) -> dict[str, Any]:
        """Change the first sequence; measure all others."""
        if len(self._ids_BT) < 2:
            return {}
        ids_BT = self._ids_BT.clone()
        ids_BT[0] = self._others()[0]
        return {"examples": moved(self._with_ids(ids_BT), slice(1, None))}

    def _padding(self, moved: Callable[[Tensor, Any], float]) -> dict[str, Any]:
        """Change tokens that the loop's own mask calls padding; measure the others."""
        mask = self._batch.kwargs.get(MASK)
        if not isinstance(mask, Tensor) or mask.shape != self._ids_BT.shape:
            return {}
        real_BT = mask.detach().bool()
        if not bool(real_BT.any()) or bool(real_BT.all()):
            return {}
        ids_BT = self._others().where(~real_BT, self._ids_BT)
        where = slice(None) if self._pooled else real_BT
        return {"padding": moved(self._with_ids(ids_BT), where)}

    def _shorter(self, base_BTV: Tensor, size: Tensor) -> dict[str, Any]:
        """Pass the shorter sequences alone, without the padding that all of them have.

        So nothing has to be known of how the model finds out what padding is. What a
        convolution makes of it is not told from what it makes of the end.
        """
        real_BT, T = self._real(), self._ids_BT.shape[1]
        length_B = real_BT.sum(1)
        place_T = torch.arange(T, device=real_BT.device)
        to_the_right = bool((real_BT == (place_T < length_B[:, None])).all())
        length = int(length_B.sort().values[(len(length_B) - 1) // 2])
        modules = [m for _, m in named(self._model)]
        convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d) for m in modules)
        part = Part(self._ids_BT.shape, (length_B <= length).nonzero()[:, 0], length)
        given = (*self._batch.args, *self._batch.kwargs.values())
        cut = all(map(part.can_be_cut, given)) and 1 < length < T
        if not to_the_right or convolves or not cut:
            return {}
        z, rows = self._pass({}, part=part), part.rows
        if self._pooled:
            return {"shorter": float((z - base_BTV[rows]).abs().amax() / size)}
        apart_BT = (z - base_BTV[rows, :length]).abs().amax(-1)
        return {"shorter": float(apart_BT[real_BT[rows, :length]].amax() / size)}

    def _documents(self, moved: Callable[[Tensor, Any], float]) -> dict[str, Any]:
        """Change the first document of each pack; measure those after it."""
        places = self._batch.kwargs.get(PLACE_IDS)
        if (
            self._pooled
            or not isinstance(places, Tensor)
            or places.shape != self._ids_BT.shape
        ):
            return {}
        starts_BT = F.pad((places[:, 1:] == 0) & (places[:, :-1] > 0), (1, 0))
        later_BT = starts_BT.cumsum(1) > 0
        if not bool(later_BT.any(1).all()):
            return {}
        ids_BT = self._ids_BT.where(later_BT, self._others())
        evaluated = moved(self._with_ids(ids_BT), later_BT)
        if evaluated == 0:
            return {"documents": evaluated}
        # A model may make another mask while it trains: transformers makes a cache,
        # with which position ids pack nothing, except under checkpointing.
        with _training(self._modes):
            before_BTV, after_BTV = self._pass({}), self._with_ids(ids_BT)
        size = before_BTV.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        trained = (after_BTV - before_BTV).abs()[later_BT].amax() / size
        return {"documents": min(evaluated, float(trained))}

    def _places(self, moved: Callable[[Tensor, Any], float]) -> dict[str, Any]:
        """Exchange two tokens; measure every other row, of a model with positions."""
        if self._pooled or not self.one_text or not has_places(self._anatomy):
            return {}
        ids_BT = self._ids_BT.clone()
        ids_BT[:, [0, 1]] = ids_BT[:, [1, 0]]
        if bool((ids_BT == self._ids_BT).all()):
            return {}
        exchanged = moved(self._with_ids(ids_BT), (slice(None), slice(2, None)))
        ids_BT[:, 0] = self._others()[:, 0]
        other = moved(self._with_ids(ids_BT), (slice(None), slice(2, None)))
        return {"order": exchanged, "content": other}

    def _repeated(self, base_BTV: Tensor, size: Tensor) -> dict[str, Any]:
        """Pass the same input with generators in another state."""
        with _Sees(self._anatomy) as mode:
            other_BTV = self._pass({}, other_seed=True)
        apart = float((other_BTV - base_BTV).abs().amax() / size)
        found = {"repeated": apart, "dropped": mode.dropped}
        return {**found, "jittered": mode.jittered}

    def _fused(self, moved: Callable[[Tensor, Any], float]) -> dict[str, Any]:
        """Pass the same input with torch's attention written out.

        How far it may move is what the model makes of one unit of rounding there: some
        make much of it, of any format.
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        noise = 0.0
        for seed in range(2):
            with _Rounds(seed) as mode:
                noise = max(noise, moved(self._pass({}), slice(None)))
            if not mode.calls:
                return {}
        with sdpa_kernel(SDPBackend.MATH):
            apart = moved(self._pass({}), slice(None))
        return {"eager": apart, "eager_noise": noise}


class Part(NamedTuple):
    """Some rows of a batch, without its last columns."""

    shape: torch.Size
    rows: Tensor
    length: int

    def can_be_cut(self, x: Any) -> bool:
        """Return whether it is clear what a part of an argument is."""
        if not isinstance(x, Tensor):
            return x is None or isinstance(x, bool | int | float | str)
        B, T = self.shape
        rest = x.shape[2:] if x.shape[:2] == self.shape else x.shape[1:]
        return x.ndim == 0 or (len(x) == B and T not in rest)

    def of(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        some = x[self.rows.to(x.device)]
        # Contiguous, as a loader's batch: models take views of what they are given.
        cut = x.shape[:2] == self.shape
        return some[:, : self.length].contiguous() if cut else some


class _Reseeded:
    """Generators as they were, but one draw further."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def restore(self) -> None:
        self._state.restore()
        torch.rand(7)
        for index in self._state.cuda:
            torch.rand(7, device=f"cuda:{index}")


def _ordered(x: Any, order: Tensor, sequences: int) -> Any:
    """Return a tensor of all sequences with these in another order."""
    if isinstance(x, Tensor) and x.ndim and len(x) == sequences:
        return x[order.to(x.device)]
    return x


def _ids(batch: Batch, shapes: set[tuple[int, int]]) -> tuple[str, Tensor, bool]:
    """Return the name and the ids of the argument that holds the tokens, and whether
    attention runs along their first axis.

    Raises:
        DeclinedError: If there is none, or it may be laid out in another way.
    """
    given = {str(i): x for i, x in enumerate(batch.args)} | batch.kwargs
    named_so = [n for n in ("input_ids", "ids", "idx", "tokens", "0") if n in given]
    for name in named_so:
        x = given[name]
        if (
            isinstance(x, Tensor)
            and x.ndim == 2
            and x.dtype in (torch.int64, torch.int32)
        ):
            B, T = x.shape
            if T < 4:
                raise DeclinedError("short")
            along_first = (B, T) not in shapes
            if B == T or (along_first and (T, B) not in shapes):
                raise DeclinedError("layout")
            return name, x.detach(), along_first
    raise DeclinedError("no_ids")


def _routes(module: nn.Module | None, anatomy: Anatomy) -> bool:
    """Return whether a module is a router, or the mixture around one."""
    if module is None or any(module is block for block in anatomy.blocks.values()):
        return False
    routers = {id(router.module) for router in anatomy.routers.values()}
    return module is not anatomy.model and any(
        id(m) in routers for m in module.modules()
    )


def _token_tables(model: nn.Module) -> list[nn.Embedding]:
    """Return the largest tables of the model that are not of positions."""
    tables = {n: m for n, m in named(model) if isinstance(m, nn.Embedding)}
    tables = {n: m for n, m in tables.items() if not PLACES.search(n)}
    most = max((m.num_embeddings for m in tables.values()), default=0)
    return [m for m in tables.values() if m.num_embeddings == most]


def _refuse(model: nn.Module) -> None:
    """Decline where another pass would be seen, or would wait for other ranks.

    Raises:
        DeclinedError: With the reason.
    """
    if any(is_sharded(p) for p in model.parameters()):
        raise DeclinedError("sharded")
    for _, module in named(model):
        if type(module).__name__.startswith("FullyShardedDataParallel"):
            raise DeclinedError("sharded")
        own = (module._forward_hooks, module._forward_pre_hooks)
        if any(own):
            raise DeclinedError("hooks")


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the block; every attribute of every module is put back."""
    modules = [module for module in unwrapped(model).modules()]
    modules += [m for m in model.modules() if all(m is not o for o in modules)]
    own = [(module, _attributes(module)) for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, attributes in own:
            for name in [n for n in vars(module) if n not in attributes]:
                vars(module).pop(name)
            for name, (value, content) in attributes.items():
                vars(module)[name] = value
                if isinstance(content, list):
                    value[:] = content
                elif isinstance(content, dict):
                    value.clear()
                    value.update(content)


@contextmanager
def _training(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Every module in the mode that its loop trains it in, for the block."""
    try:
        for module, mode in modes.items():
            module.training = mode
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # checkpoints warn where nothing is graded
            yield
    finally:
        for module in modes:
            module.training = False


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return name → the value, and what a list or dictionary held."""
    kept = {}
    for name, value in vars(module).items():
        plain = type(value) in (list, dict) and not name.startswith("_")
        kept[name] = (value, value.copy() if plain else None)
    return kept
