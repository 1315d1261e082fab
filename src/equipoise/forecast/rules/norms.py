"""Norms: a gain out of range, tokens whose variance is down at ε."""

from equipoise.forecast.history import History, by_site
from equipoise.forecast.rules.registry import Measured, measured, rule

GAIN = "norm.gain"


@rule(
    "norm.gain_high",
    reads=GAIN,
    above=10.0,
    release=6.0,
    persist=3,
    scope="layer",
    source="theory: the gain multiplies every change that passes the norm (Emadi 2026, "
    "App. A); our calibration: python -m benchmarks.rules",
    message="the norm {site} magnifies changes {gain:.3g}-fold at one token, "
    "{value:.3g} times what it did at the start",
    remedies=("layer_norm_epsilon", "learning_rate", "residual_scale"),
)
def gain_high(history: History) -> Measured | None:
    """Largest growth of a norm's gain since the first sample, where above 30."""
    track = history.track(GAIN)
    if track.count < 2:
        return None
    began = {site: row[0] for site, row in by_site(track.first[0])}
    grown = {
        site: row[0] / max(began[site], 3.0)
        for site, row in by_site(track.recent[-1])
        if site in began
    }
    if not grown:
        return None
    site = max(grown, key=lambda name: grown[name])
    gain = dict(by_site(track.recent[-1]))[site][0]
    return measured(grown[site], site, gain=gain, began=began[site])


@rule(
    "norm.epsilon_rules",
    reads="precision.epsilon_dominated",
    above=0.1,
    release=0.05,
    persist=3,
    scope="layer",
    preset="deep",
    source="theory: where the variance is below ε, ε and not the data sets the scale",
    message="at {value:.0%} of the tokens of {site} ε is larger than their variance: "
    "the norm does not normalise them",
    remedies=("layer_norm_epsilon", "residual_scale"),
)
def epsilon_rules(history: History) -> Measured | None:
    """Largest share over norms of tokens whose variance is below ε."""
    reading = history.last("precision.epsilon_dominated")
    if reading is None or not reading.sites:
        return None
    site, row = max(by_site(reading), key=lambda pair: pair[1][0])
    return measured(row[0], site)
