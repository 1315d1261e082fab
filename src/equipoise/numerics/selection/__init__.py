"""Does attention select? Concentration, distance, separability, capacity, sensitivity.

After Mudarisov et al., "Limitations of Normalization in Attention Mechanism", with the
strict metrics of the authors' follow-up and bounds of our own.
"""

from equipoise.numerics.selection.capacity import (
    capacity,
    capacity_at,
    published_sphere_recall,
    sphere_recall,
)
from equipoise.numerics.selection.concentration import (
    concentration,
    entropy_floor,
    logit_range,
    range_needed,
    weight_interval,
    weights_entropy,
)
from equipoise.numerics.selection.critical import (
    CriticalTop,
    critical_top,
    detectable_shift,
    ks_p_value,
    ks_power,
    ks_statistic,
    ks_threshold,
)
from equipoise.numerics.selection.distance import (
    Distance,
    distance,
    distance_of,
    expected_distance,
    published_bound,
)
from equipoise.numerics.selection.heads import (
    selection_of_blocks,
    selection_of_heads,
    selection_of_weights,
)
from equipoise.numerics.selection.readings import AtSizes, Selection, Wanted
from equipoise.numerics.selection.rows import (
    Chosen,
    WeightedTokens,
    chosen,
    ranked_at_random,
    weighted_tokens,
)
from equipoise.numerics.selection.sensitivity import step_bound, step_sensitivity
from equipoise.numerics.selection.separability import (
    Separability,
    random_separability,
    separability,
    separability_of,
)

__all__ = [
    "AtSizes",
    "Chosen",
    "CriticalTop",
    "Distance",
    "Selection",
    "Separability",
    "Wanted",
    "WeightedTokens",
    "capacity",
    "capacity_at",
    "chosen",
    "concentration",
    "critical_top",
    "detectable_shift",
    "distance",
    "distance_of",
    "entropy_floor",
    "expected_distance",
    "ks_p_value",
    "ks_power",
    "ks_statistic",
    "ks_threshold",
    "logit_range",
    "published_bound",
    "published_sphere_recall",
    "random_separability",
    "range_needed",
    "ranked_at_random",
    "selection_of_blocks",
    "selection_of_heads",
    "selection_of_weights",
    "separability",
    "separability_of",
    "sphere_recall",
    "step_bound",
    "step_sensitivity",
    "weight_interval",
    "weighted_tokens",
    "weights_entropy",
]
