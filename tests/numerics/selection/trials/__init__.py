"""Every inequality of theory 2 that is ours."""

from tests.numerics.selection.trials.inequality import Inequality
from tests.numerics.selection.trials.logits import LOGITS
from tests.numerics.selection.trials.sets import SETS
from tests.numerics.selection.trials.sphere import SPHERE

INEQUALITIES: dict[str, Inequality] = {**LOGITS, **SETS, **SPHERE}
