"""``equipoise.watch``: from a model and an optimiser to a running instrument."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, Unpack
from weakref import WeakValueDictionary, ref

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import equipoise
from equipoise.anatomy.discovery import anatomy_of
from equipoise.anatomy.sites import Anatomy, named, unwrapped
from equipoise.errors import InputError, MissingExtraError
from equipoise.judging.checks.expected import check_places
from equipoise.judging.judge import Judge
from equipoise.judging.verdict import STATES
from equipoise.probes.optimizer_kinds import update_kinds
from equipoise.probes.protocols import Probe
from equipoise.records import RunInfo
from equipoise.sinks import IsolatedSink, open_sinks
from equipoise.store import RunWriter, open_run, run_path
from equipoise.watching.facts import fact_probes
from equipoise.watching.facts.secrets import masked
from equipoise.watching.handle import Watch
from equipoise.watching.options import (
    WatchArguments,
    WatchOptions,
    preset_probes,
    read_options,
)
from equipoise.watching.ranks.group import connect_ranks
from equipoise.watching.step.pipeline import StepWriter, log
from equipoise.watching.step.schedule import extra_steps
from equipoise.watching.warmup import compile_kernels

if TYPE_CHECKING:
    from equipoise.sinks.prometheus import Metrics

# id of the user's own module → its handle, and file → its handle, while there is one.
_watched: "WeakValueDictionary[int, Watch]" = WeakValueDictionary()
_written: "WeakValueDictionary[str, Watch]" = WeakValueDictionary()


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    run: str | Path | None = None,
    name: str | None = None,
    info: dict[str, Any] | None = None,
    probes: Sequence[Probe] | None = None,
    **options: Unpack[WatchArguments],
) -> Watch:
    """Attach to a model; every ``optimizer.step()`` from now on is recorded.

    Watching a model that is watched already returns the handle it has if the same was
    asked for, and otherwise closes that one first.

    Args:
        model: Any PyTorch model. Watching changes nothing in it.
        optimizer: With it the loop needs no other edit; without it call ``.step()``.
            A list of several is fine: a step ends when all of them have stepped.
        run: The run file; by default one under ``$EQUIPOISE_RUNS`` or ``./runs``. A
            run that exists is continued after its last step.
        name: What the run is called; by default the model's class.
        info: JSON values to keep with the run, such as the corpus or the commit.
        probes: What to measure in place of the preset's probes.
        options: Fields of :class:`WatchOptions`; ``EQUIPOISE_*`` and ``equipoise.toml``
            are asked for what is not given.

    Raises:
        InputError: If this is no model or no optimiser, or an option makes no sense.
        RunFileError: If the run file cannot be written.
        MissingExtraError: If a sink needs a package that is not installed.
    """
    chosen, optimizers = read_options(options), _check_arguments(model, optimizer)
    if chosen.autopilot and len(optimizers) != 1:
        raise InputError(
            "the autopilot acts on one optimiser: watch(model, optimizer, "
            f"autopilot=…); {len(optimizers) or 'none'} given"
        )
    old = _watched.get(id(unwrapped(model)))
    if old is not None and not old.closed:
        if _same(old, optimizers, run, chosen) and probes is None:
            return old
        log.info(
            "equipoise: %s is watched anew; closing %s", old.anatomy.family, old.path
        )
        old.close()
    _close_writer_of(run)
    ranks = connect_ranks()
    if probes is None:
        probes = preset_probes(chosen.preset, ranks=ranks.count, rows=chosen.rows)
    active = chosen.checks == "active"
    probes = [*probes, *fact_probes(optimizers, active=active)]
    anatomy = anatomy_of(model)
    check_places(chosen.expected, _names(anatomy.model))
    title = name or type(unwrapped(model)).__name__
    about = _run_info(title, anatomy, info or {})
    _name_optimizers(about, optimizers)
    about.details.update(_meant(chosen))
    run_writer, sinks, metrics = None, list[IsolatedSink](), None
    if ranks.rank == 0:
        place = run_path(run, title)
        sinks = open_sinks(chosen.sinks, run=place)  # first: it may refuse
        metrics = _metrics(chosen.metrics_port, place.stem, sinks)
        run_writer = RunWriter(place, about)
    path, step = ranks.broadcast("start", _start(run_writer))
    handle = Watch(
        anatomy,
        probes,
        StepWriter(run_writer, sinks),
        path=Path(path),
        optimizers=optimizers,
        options=chosen,
        ranks=ranks,
        judge=_judge(about, run_writer if ranks.count == 1 else None),
        step=step,
    )
    _watched[id(unwrapped(model))] = handle
    _written[_key(handle.path)] = handle
    _follow(handle, metrics)
    if any(parameter.is_cpu for parameter in model.parameters()):
        compile_kernels(handle.reporter.print_line)
    handle.reporter.print_line(
        f"watching {_describe_sites(anatomy)}; run {handle.path}; "
        f"equipoise report {handle.path}"
    )
    return handle


def _name_optimizers(about: RunInfo, optimizers: Sequence[Optimizer]) -> None:
    if optimizers:
        about.details.setdefault("optimizer", type(optimizers[0]).__name__)
        kinds = sorted({kind for one in optimizers for kind in update_kinds(one)})
        about.details.setdefault("updates", kinds)


def _metrics(port: int | None, run: str, sinks: list[IsolatedSink]) -> "Metrics | None":
    """Add the metrics to the sinks, where a port was given."""
    if port is None:
        return None
    try:
        from equipoise.sinks.prometheus import Metrics  # the extra `metrics`
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise MissingExtraError(
            f"metrics_port needs {missing.name}, which is not installed: "
            'pip install "equipoise[metrics]"'
        ) from missing
    metrics = Metrics(port, run=run, states=STATES)
    sinks.append(IsolatedSink("metrics", metrics))
    return metrics


def _follow(handle: Watch, metrics: "Metrics | None") -> None:
    """Tell the metrics of each step; they keep no handle alive."""
    if metrics is None:
        return
    watching = ref(handle)

    def ended(step: int, sampled: bool) -> None:
        alive = watching()
        metrics.stepped(step, None if alive is None else alive.sampling_share)

    handle.on_step_end(ended)
    handle.reporter.print_line(f"metrics at http://127.0.0.1:{metrics.port}/metrics")


def _key(run: str | Path) -> str:
    # A text: when Python ends, two paths can no longer be compared.
    return str(Path(run).expanduser().resolve())


def _close_writer_of(run: str | Path | None) -> None:
    """Close a handle of this process that still writes the file: a cell run again."""
    stale = None if run is None else _written.get(_key(run))
    if stale is not None and not stale.closed:
        log.warning(
            "equipoise: %s is still written by an earlier watch of this process; that "
            "one is closed now (call its .close() to end a run yourself)",
            stale.path,
        )
        stale.close()


def _check_arguments(model: object, optimizer: object) -> tuple[Optimizer, ...]:
    """Return the optimisers whose steps count: of one that Accelerate wraps, the inner.

    Raises:
        InputError: If the one is no module, or the other no optimiser.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"watch was given a {type(model).__name__} where a model belongs: give it "
            "the torch.nn.Module that you train, then the optimiser"
        )
    if is_several(optimizer) and not optimizer:
        raise InputError(
            "watch was given an empty list of optimisers: name those that step this "
            "model, or leave it out and call .step(loss=…)"
        )
    given = optimizer if is_several(optimizer) else [optimizer]
    for one in given:
        _refuse_deepspeed(model, one)
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has lazy layers whose weights do not exist yet: "
            "run one batch through the model, then watch it"
        )
    inner = [] if optimizer is None else list(map(_step_counted, given))
    if inner and not any(_trains(one, model) for one in inner):
        log.warning(
            "equipoise: the optimiser holds no parameter of %s: is it another model's?",
            type(model).__name__,
        )
    return tuple({id(one): one for one in inner}.values())


def is_several(optimizer: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return whether several optimisers were given, as a list or a tuple."""
    return isinstance(optimizer, list | tuple)


def _step_counted(optimizer: object) -> Optimizer:
    """Return the optimiser inside what a trainer wrapped around it.

    Raises:
        InputError: If there is none.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise InputError(
            f"{type(inner).__name__} is not a torch.optim.Optimizer, so watch cannot "
            "hook its step: leave it out, and call .step(loss=…) on what watch "
            "returns after each step"
        )
    return inner


def _refuse_deepspeed(model: nn.Module, optimizer: object) -> None:
    """ZeRO's optimisers step flat copies of the weights, each rank some of them.

    Raises:
        InputError: If DeepSpeed holds the weights, or steps them.
    """
    inner = getattr(optimizer, "optimizer", None)
    classes = (type(thing) for thing in (model, optimizer, inner))
    theirs = any(kind.__module__.split(".")[0] == "deepspeed" for kind in classes)
    # ZeRO-3 takes the weights out of the model, and marks each with an id.
    split = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if split:
        raise InputError(
            "the weights of this model are partitioned by DeepSpeed ZeRO-3, which "
            "watch cannot read: use ZeRO-1 or ZeRO-2, or FSDP, which is read"
        )
    if theirs:
        raise InputError(
            "watch cannot follow a DeepSpeed engine or a ZeRO optimiser, whose steps "
            "move flat copies of the weights: give it engine.module without the "
            "optimiser, and call .step(loss=loss) on what it returns after "
            "engine.step(); attention and activations are read then. FSDP is read in "
            "full"
        )


def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
    mine = {id(p) for p in model.parameters()}
    return any(id(p) in mine for g in optimizer.param_groups for p in g["params"])


def _same(
    old: Watch,
    optimizers: Sequence[Optimizer],
    run: str | Path | None,
    chosen: WatchOptions,
) -> bool:
    where = run is None or Path(run).expanduser() == old.path
    same = list(map(id, old.optimizers)) == list(map(id, optimizers))
    same = same and old.options == chosen
    # Apart: options are equal without them, but a sink that is new wants its numbers.
    sinks = list(old.options.sinks) == list(chosen.sinks)
    return where and same and sinks and old.options.on_finding == chosen.on_finding


def _start(writer: RunWriter | None) -> tuple[str, int] | None:
    """Return the file and the step after its last one; None on the other ranks."""
    if writer is None:
        return None
    steps = open_run(writer.path).steps
    return str(writer.path), int(steps[-1]) + 1 if len(steps) else 0


def _judge(about: RunInfo, writer: RunWriter | None) -> Judge:
    """Return a judge that knows what a continued run has recorded so far.

    With several ranks all begin anew: only one of them can be sure to see the file.
    """
    judge = Judge(about.details)
    if writer is not None:
        open_run(writer.path).judged_by(judge)
    return judge


def _meant(chosen: WatchOptions) -> dict[str, Any]:
    """Return details of the run that judging needs: what is meant, extra samples."""
    meant = {key: list(patterns) for key, patterns in chosen.expected.items()}
    extra = extra_steps(chosen.every) if chosen.dense_start else []
    details = {"expect": meant, "extra_samples": extra}
    return {name: value for name, value in details.items() if value}


def _names(model: nn.Module) -> list[str]:
    """Return the names of a model's modules and parameters, as readings have them."""
    model = unwrapped(model)
    return [
        *(name for name, _ in named(model)),
        *(name for name, _ in model.named_parameters()),
    ]


def _classes(model: nn.Module) -> int | None:
    """Return how many classes the model's output has, if it is plain to see."""
    config = getattr(model, "config", None)
    for name in ("vocab_size", "vocabulary", "num_labels", "classes"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    for name in ("lm_head", "head", "classifier", "fc"):
        if isinstance(layer := getattr(model, name, None), nn.Linear):
            return layer.out_features
    return None


def _run_info(name: str, anatomy: Anatomy, given: dict[str, Any]) -> RunInfo:
    model = unwrapped(anatomy.model)
    details = {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "attention": [site.name for site in anatomy.attention],
        "blocks": list(anatomy.blocks),
        "guessed": list(anatomy.guessed),
        "classes": _classes(model),
        **masked(given),
    }
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return RunInfo(
        name=name, created=created, version=equipoise.__version__, details=details
    )


def _describe_sites(anatomy: Anatomy) -> str:
    """Return what was found in a model, in words."""
    count = len(anatomy.attention)
    if not count:
        return f"{anatomy.family}, whose attention, if any, only its calls will show"
    text = f"{count} attention site{'' if count == 1 else 's'} of {anatomy.family}"
    unread = [site.name for site in anatomy.attention if site.projections is None]
    if unread:
        more = f" and {len(unread) - 2} more" if len(unread) > 2 else ""
        text += f" (projections unread: {', '.join(unread[:2])}{more})"
    return text
