"""The residual stream: tokens that collapse, a stream that grows, outlier channels."""

from statistics import median

from equipoise.forecast.history import History, by_site, finite
from equipoise.forecast.rules.registry import Measured, measured, rule

CALIBRATED = "our calibration: python -m benchmarks.rules"
COSINE, SIZE, KURTOSIS = "residual.token_cosine", "residual.B", "residual.kurtosis"
NORMED = "attention.B"


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
    reads=(SIZE, NORMED),
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
    """Largest growth of a block's stream since the first sample.

    A stream that begins below the size to which norms bring it may grow up to that.
    """
    track, normed = history.track(SIZE), history.track(NORMED)
    if track.count < 2:
        return None
    floor = max(finite([row[0] for row in normed.first[0].values]), default=0.0)
    began = {site: max(row[0], floor) for site, row in by_site(track.first[0])}
    sizes = {site: row[0] for site, row in by_site(track.recent[-1])}
    grown = {s: sizes[s] / began[s] for s in sizes if began.get(s, 0.0) > 0}
    if not grown:
        return None
    site = max(grown, key=lambda name: grown[name])
    return measured(grown[site], site, size=sizes[site], began=began[site])


@rule(
    "residual.embedding_large",
    reads=(SIZE, NORMED),
    above=4.0,
    release=2.0,
    persist=3,
    scope="layer",
    source="theory: a norm divides the gradient by the size of its input, and a branch "
    "adds about the size to which norms bring it; " + CALIBRATED,
    message="embeddings are too large: what enters {site} is {value:.3g} times what "
    "its norm makes of it, so what the layers add hardly counts",
    remedies=("residual_scale", "learning_rate"),
)
def embedding_large(history: History) -> Measured | None:
    """Size of the stream that enters the first block over its size after the norm."""
    sizes, normed = history.last(SIZE), history.last(NORMED)
    if sizes is None or normed is None or not history.blocks:
        return None
    first, after = dict(by_site(sizes)).get(history.blocks[0]), dict(by_site(normed))
    inside = f"{history.blocks[0]}."
    below = [row[0] for site, row in after.items() if f"{site}.".startswith(inside)]
    if first is None or not below or not below[0] > 0:
        return None
    return measured(first[0] / below[0], history.blocks[0], size=first[0])


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
