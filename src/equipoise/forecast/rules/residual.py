"""The residual stream: tokens that collapse, a stream that grows, outlier channels."""

from statistics import median

from equipoise.forecast.history import History, by_site, finite
from equipoise.forecast.rules.registry import Measured, measured, rule

CALIBRATED = "our calibration: python -m benchmarks.rules"
COSINE, SIZE, KURTOSIS = "residual.token_cosine", "residual.B", "residual.kurtosis"


@rule(
    "residual.tokens_collapsed",
    reads=COSINE,
    above=0.95,
    release=0.9,
    persist=5,
    scope="layer",
    source="rank collapse (arXiv 2103.03404); " + CALIBRATED,
    message="tokens have collapsed: their mean cosine is {value:.3g} in {site}, so "
    "attention has nothing to select",
    remedies=("learning_rate", "deepnorm_init", "residual_scale"),
)
def tokens_collapsed(history: History) -> Measured | None:
    """Median over blocks of the mean cosine between tokens."""
    reading = history.last(COSINE)
    values = finite([row[0] for row in reading.values]) if reading else []
    if reading is None or not values or history.track(COSINE).count < 10:
        return None
    site = max(by_site(reading), key=lambda pair: pair[1][0])[0]
    return measured(median(values), site, largest=max(values))


@rule(
    "residual.growing",
    reads=SIZE,
    above=15.0,
    release=10.0,
    persist=3,
    scope="layer",
    source=CALIBRATED,
    message="the residual stream has grown {value:.3g}-fold since the start, to "
    "{size:.3g} in {site}",
    remedies=("learning_rate", "residual_scale", "deepnorm_init"),
)
def growing(history: History) -> Measured | None:
    """Largest growth of a block's stream since the first sample."""
    track = history.track(SIZE)
    if track.count < 2:
        return None
    began = {site: row[0] for site, row in by_site(track.first[0])}
    grown = {
        site: row[0] / began[site]
        for site, row in by_site(track.recent[-1])
        if began.get(site, 0.0) > 0
    }
    if not grown:
        return None
    site = max(grown, key=lambda name: grown[name])
    size = dict(by_site(track.recent[-1]))[site][0]
    return measured(grown[site], site, size=size, began=began[site])


@rule(
    "residual.outliers",
    reads=KURTOSIS,
    above=30.0,
    release=20.0,
    persist=3,
    scope="layer",
    source="kurtosis 3 is Gaussian; " + CALIBRATED,
    message="few channels carry the residual stream of {site}: kurtosis {value:.3g}, "
    "{began:.3g} at the start",
    remedies=("learning_rate", "normaliser", "keep_fp32"),
)
def outliers(history: History) -> Measured | None:
    """Largest kurtosis over blocks over its start, where that was not large already."""
    track = history.track(KURTOSIS)
    if track.count < 2:
        return None
    began = {site: max(row[0], 3.0) for site, row in by_site(track.first[0])}
    grown = {s: row[0] for s, row in by_site(track.recent[-1]) if s in began}
    if not grown:
        return None
    site = max(grown, key=lambda name: grown[name] / began[name])
    value = 3.0 * grown[site] / began[site]
    return measured(value, site, kurtosis=grown[site], began=began[site])
