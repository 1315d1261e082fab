"""Every inequality of theory 2 that is ours."""

from tests.numerics.selection_trials.inequality import Inequality
from tests.numerics.selection_trials.logits import LOGITS
from tests.numerics.selection_trials.sets import SETS
from tests.numerics.selection_trials.sphere import SPHERE

INEQUALITIES: dict[str, Inequality] = {**LOGITS, **SETS, **SPHERE}
