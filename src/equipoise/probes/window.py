"""The window: the part of a sampled step in which the forward pass is measured.

Training frameworks do not always call the model itself: a ``training_step`` may call
its parts one by one, some as ``.forward()``. So the window opens at whichever module of
the model is called first. It closes when the model's own call returns; where only parts
are called, when the backward pass begins. What ran once is not measured again in the
same step: later micro-batches, evaluation passes and the recomputed forward of
activation checkpointing find the window closed.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from equipoise.anatomy.hooks import inside_torch_func
from equipoise.anatomy.sites import Anatomy, Reason, unwrapped

EVAL_FRAME = "torch._dynamo.eval_frame"
SLOT = "_compiled_call_impl"
"""Where torch looks for a stand-in of a module's call. It is no hook, so torch's own
layers keep their fast path; copies and pickles leave it out."""

PART_BY_PART = Reason(
    "part_by_part",
    hides=(
        "output.logit_*",
        "curvature.*",
    ),
)
BY_FORWARD = Reason("by_forward")


INLINE = Reason(
    "inline",
    hides=(
        "residual.*",
        "sensitivity.*",
        "norm.*",
    ),
)
NO_GRADIENTS = Reason("no_gradients", hides=("gradient.*",))
CHANGED = Reason("modules_changed")

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module], None]


class Capturing(Protocol):
    """What is opened while the measured forward pass runs."""

    def open(self) -> AbstractContextManager[None]: ...

    def finish_closing(self) -> None:
        """Finish a closing that began where a mode cannot leave the stack."""

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take one call of the model, measured or not: evaluation passes as well."""


class CallWrapper:
    """Calls ``before`` and ``after`` around every call of one module."""

    def __init__(self, module: nn.Module, before: Before, after: After) -> None:
        self._module = weakref.ref(module)
        self._next = module.__dict__.get(SLOT)
        self._before, self._after = before, after
        self._on = True
        module.__dict__[SLOT] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        call = module._call_impl if self._next is None else self._next
        if not self._on or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        self._before(module, args, kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            self._after(module)

    def remove(self) -> None:
        """Leave the module; under another wrapper, do nothing from now on."""
        self._on = False
        module = self._module()
        if module is None:
            return
        top = module.__dict__.get(SLOT)
        while isinstance(top, CallWrapper) and not top._on:
            top = top._next
        if top is None:
            module.__dict__.pop(SLOT, None)
        else:
            module.__dict__[SLOT] = top


def _keep_from_dynamo() -> None:
    """Have dynamo leave our wrapper alone where a compiled caller's graph broke."""
    skip = getattr(sys.modules.get(EVAL_FRAME), "skip_code", None)
    if skip is not None:
        skip(CallWrapper.__call__.__code__)


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called: our wrappers do not count."""
    call = module.__dict__.get(SLOT)
    while isinstance(call, CallWrapper):
        call = call._next
    return call is not None


class _Depth(threading.local):
    """How many wrapped calls the running thread is inside."""

    calls: int = 0


class Window:
    """Opens a capture while the measured forward pass runs, and only then.

    Each thread counts its own calls: another one that evaluates the same model
    meanwhile neither opens the window nor closes it.
    """

    def __init__(
        self, model: nn.Module, capture: Capturing, *, only_training: bool
    ) -> None:
        self._model, self._capture = model, capture
        self._only_training = only_training
        self._depth, self._opener = _Depth(), 0
        self.called: set[int] = set()
        """Ids of the modules whose call was measured."""
        self._inside: ExitStack | None = None

    @property
    def opened(self) -> bool:
        """Whether a forward pass was measured."""
        return bool(self.called)

    @property
    def model_called(self) -> bool:
        """Whether the model itself was called, and not only parts of it."""
        return not self.called.isdisjoint((id(self._model), id(unwrapped(self._model))))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wait for the first call; leave nothing on the model afterwards."""
        _keep_from_dynamo()
        with ExitStack() as stack:
            stack.callback(self._capture.finish_closing)
            stack.callback(self.close)
            for module in _called_in_place(self._model):
                wrapper = CallWrapper(module, self._before, self._after)
                stack.callback(wrapper.remove)
            yield

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth.calls += 1
        if self._depth.calls > 1:
            self._note(module)
            return
        if self._inside is None:
            self._capture.finish_closing()
        if _inside_compiled_function():
            return
        if module is self._model and not inside_torch_func():
            self._capture.called(module, args, kwargs)
        wanted = torch.is_grad_enabled() or not self._only_training
        if not wanted or id(module) in self.called:
            self.close()
            return
        if self._inside is None:
            self._inside, self._opener = ExitStack(), threading.get_ident()
            self._inside.enter_context(self._capture.open())
        self._note(module)

    def _note(self, module: nn.Module) -> None:
        mine = self._inside is not None and self._opener == threading.get_ident()
        # torch.func hides numbers: the pass that can be read may follow.
        if mine and not inside_torch_func():
            self.called.add(id(module))

    def _after(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth.calls -= 1
        if self._depth.calls == 0 and not self._more_may_follow():
            self.close()

    def _more_may_follow(self) -> bool:
        """Return whether a part of the model was called, and others may be next.

        Compiled code may run between the parts, and must not meet a function mode.
        """
        raised = sys.exc_info()[0] is not None
        return not (raised or self.model_called or inside_torch_func() or compiled())

    def close(self) -> None:
        """Close until a module is called that was not measured yet."""
        if self._inside is not None and self._opener == threading.get_ident():
            inside, self._inside = self._inside, None
            inside.close()


def _called_in_place(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are called themselves, and not copies of them."""
    yield model
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        return  # its replicas share what their originals hold
    for child in model.children():
        yield from _called_in_place(child)


def compiled() -> bool:
    """Return whether torch.compile was used in this process."""
    backends = getattr(sys.modules.get(EVAL_FRAME), "cached_backends", {})
    return any(callable(backend) for backend in backends.values())


MOST_NODES = 4096


def from_compiled_code(root: Tensor) -> bool:
    """Return whether compiled code made the graph of a loss, or part of it."""
    waiting: list[Any] = [root.grad_fn]
    seen: set[Any] = set()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in node.name():
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False


def _inside_compiled_function() -> bool:
    """Return whether the call comes from a compiled function whose graph broke.

    Such a function calls the model as Python does, but only until it compiles again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and "_dynamo" in code.co_filename:
            return True
        frame = frame.f_back
    return False


def parts_not_read(window: Window, anatomy: Anatomy) -> Iterator[tuple[str, Reason]]:
    """Yield what was not called itself but part by part: name, and what is not read."""
    if not window.model_called:
        yield "", PART_BY_PART
    for name, block in anatomy.blocks.items():
        if _in_parts(window, block):
            yield name, INLINE


def called_as_forward(window: Window, anatomy: Anatomy) -> Iterator[str]:
    """Yield the attention sites whose parts were called, and they themselves not."""
    for site in anatomy.attention:
        # A ModuleDict cannot be called, only its parts can.
        can_be_called = type(site.module).forward is not nn.Module.forward
        if can_be_called and _in_parts(window, site.module):
            yield site.name


def _in_parts(window: Window, module: nn.Module) -> bool:
    inside = any(id(part) in window.called for part in module.modules())
    return inside and id(module) not in window.called
