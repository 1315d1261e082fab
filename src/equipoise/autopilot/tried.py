"""Where the autopilot was tried; elsewhere it only says what it would do.

Its treatments were measured on causal language models that AdamW trains from scratch
(``docs/autopilot.md``). On other optimisers, kinds of models and stages it was seen to
make healthy runs worse.
"""

from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from equipoise.anatomy.sites import unwrapped
from equipoise.judging.history import History

OPTIMIZERS = (Adam, AdamW)
CAUSAL = ("ForCausalLM", "LMHeadModel", "GPT")
"""How the classes of causal language models end."""


def untried(model: nn.Module, optimizer: Optimizer, history: History) -> str:
    """Return what about a run lies outside of what was tried; nothing if all is inside.

    >>> model = nn.Linear(1, 1)
    >>> untried(model, AdamW(model.parameters()), History())
    'a Linear is not known to be a causal language model'
    """
    kind, name = type(optimizer), type(unwrapped(model)).__name__
    if kind not in OPTIMIZERS:
        return f"the optimiser is {kind.__name__}, and only Adam and AdamW were tried"
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and id(p) not in own for p in model.parameters()):
        return "the optimiser does not hold all trained weights: another one may"
    if not name.endswith(CAUSAL):
        return f"a {name} is not known to be a causal language model"
    if history.is_continued:
        return "the weights are trained already, and only new models were tried"
    return ""
