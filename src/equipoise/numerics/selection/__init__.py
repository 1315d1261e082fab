"""Does attention select? Concentration, distance, separability, capacity, sensitivity.

After Mudarisov et al., "Limitations of Normalization in Attention Mechanism", with the
strict metrics of the authors' follow-up and bounds of our own.
"""

from equipoise.numerics.selection.capacity import (
    CriticalTop,
    capacity,
    capacity_at,
    critical_top,
    detectable_shift,
    ks_p_value,
    ks_power,
    ks_statistic,
    ks_threshold,
    published_sphere_recall,
    sphere_recall,
)
from equipoise.numerics.selection.concentration import (
    concentration,
    entropy_floor,
    logit_range,
    range_needed,
    step_bound,
    step_sensitivity,
    weight_interval,
    weights_entropy,
)
from equipoise.numerics.selection.distance import (
    Distance,
    Separability,
    distance,
    distance_of,
    expected_distance,
    published_bound,
    random_separability,
    separability,
    separability_of,
)
from equipoise.numerics.selection.heads import (
    AtSizes,
    HeadMetricOptions,
    Selection,
    selection_of_blocks,
    selection_of_heads,
    selection_of_weights,
)
from equipoise.numerics.selection.tokens import (
    SelectedTokens,
    WeightedTokens,
    chosen,
    ranked_at_random,
    weighted_tokens,
)

__all__ = [
    "AtSizes",
    "SelectedTokens",
    "CriticalTop",
    "Distance",
    "Selection",
    "Separability",
    "HeadMetricOptions",
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
