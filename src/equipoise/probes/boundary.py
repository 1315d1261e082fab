"""The one place where an exception of ours meets the user's loop."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from equipoise.anatomy.modes import transformed

log = logging.getLogger("equipoise")

Hook = Callable[..., None]


@dataclass(slots=True)
class Boundary:
    """Runs what is ours: no_grad, out of autocast, silent after its first failure."""

    strict: bool = False
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around every call: whoever keeps the account of what we cost."""
    failed: dict[str, BaseException] = field(default_factory=dict)
    """Name → what it died of. What failed stays silent from then on."""

    def guarded(self, name: str, hook: Hook) -> Hook:
        """Return the hook, safe to call from somebody else's training loop."""

        def call(*args: Any, **kwargs: Any) -> None:
            # Traced into somebody's compiled code, a hook must add nothing to it.
            if torch.compiler.is_compiling() or transformed() or name in self.failed:
                return
            try:
                with self.around(), torch.no_grad(), _full_precision():
                    hook(*args, **kwargs)
            except Exception as failure:
                if self.strict:
                    raise
                self.failed[name] = failure
                log.exception("equipoise: %s failed and was detached", name)

        return call


@contextmanager
def _full_precision() -> Iterator[None]:
    """Leave the patient's autocast: a measurement is made in the dtype it asks for."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
