"""A fully sampled step of a compiled model beside a plain compiled step, in pairs.

On a sampled step the compiled call is untouched and the micro-batch is run once more,
eagerly and without gradients, with the probes on.

Run: python -m benchmarks.overhead_compiled [inductor | aot_eager] [pairs]
"""

import sys

import torch

from benchmarks import overhead, paired
from benchmarks.monitors import plain, watched
from benchmarks.table import publish


class Compiled(overhead.Contestant):
    """A contestant whose model is compiled before anybody watches it."""

    backend = "inductor"

    def start(self) -> None:
        monitor = self.monitor

        def compiled(model: torch.nn.Module, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]
            self.model = torch.compile(model, backend=self.backend)
            return monitor(self.model, optimizer)

        self.monitor = compiled
        super().start()


def main(backend: str = "inductor", pairs: str = "8") -> None:
    shape = overhead.SHAPES["small"]
    Compiled.backend = backend
    base = Compiled("plain", plain, shape)
    other = Compiled("every step", watched(1), shape)
    for contestant in (base, other):
        contestant.start()
        contestant.step()
        contestant.step()
    found = paired.pairs(base.step, other.step, count=int(pairs))
    other.stop()
    publish("overhead_compiled", [{"backend": backend, **paired.summary(found)}])


if __name__ == "__main__":
    main(*sys.argv[1:])
