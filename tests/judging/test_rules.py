"""Every rule fires just beyond its threshold, and not just within it."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from equipoise.judging.judge import Judge
from equipoise.judging.rules import RULES
from equipoise.records import Reading
from equipoise.text.render import render
from tests.judging.histories import (
    BLOCKS,
    DETAILS,
    SITES,
    falling,
    healthy,
    judged,
    names,
    per_site,
)

Course = Callable[[float], Iterator[Reading]]
SAMPLES = 24


def heads(
    quantity: str, late: Callable[[float], Sequence[float]], early: float
) -> Course:
    """Return a course of one quantity of four heads a layer, changed from sample 8."""

    def course(value: float) -> Iterator[Reading]:
        for n in range(SAMPLES):
            row = late(value) if n >= 8 else [early] * 4
            yield per_site(10 * n, quantity, [row] * len(SITES), SITES)

    return course


def blocks(quantity: str, early: float, late: Callable[[float, int], float]) -> Course:
    def course(value: float) -> Iterator[Reading]:
        for n in range(SAMPLES):
            rows = [[late(value, i) if n >= 8 else early] for i in range(len(BLOCKS))]
            yield per_site(10 * n, quantity, rows, BLOCKS)

    return course


def scalar(quantity: str, late: Callable[[float], float], early: float) -> Course:
    def course(value: float) -> Iterator[Reading]:
        for n in range(SAMPLES):
            yield per_site(10 * n, "gradient.norm", [[1.0]], BLOCKS[:1])
            yield Reading.scalar(10 * n, quantity, late(value) if n >= 16 else early)

    return course


def losses(loss: Callable[[float, int], float], steps: int = 300) -> Course:
    def course(value: float) -> Iterator[Reading]:
        return (Reading.scalar(s, "loss", loss(value, s)) for s in range(steps))

    return course


def _logits(value: float, theta: float = 0.3) -> Iterator[Reading]:
    for n in range(SAMPLES):
        logit = 10.0 if n < 16 else 10.0 * value
        yield per_site(n, "attention.max_logit", [[1.0, logit]], SITES[:1])
        yield per_site(n, "attention.theta.p5", [[0.9, theta, theta]], SITES[:1])


def _dead(value: float) -> Iterator[Reading]:
    row = [1e-4 if head < value else 0.9 for head in range(8)]
    for n in range(SAMPLES):
        yield per_site(n, "attention.theta.p100", [row], SITES[:1])


def _projections(apart: float) -> Course:
    """Layers whose projections differ by this factor, the same at every sample."""

    def course(value: float) -> Iterator[Reading]:
        gains = [[value**4], [(value * apart) ** 4]]
        for n in range(SAMPLES):
            yield per_site(n, "projection.G", gains, SITES[:2])

    return course


def _stream(start: float, normed: float, block: int) -> Course:
    """One block's stream changes from sample 8; norms bring all to one size."""

    def course(value: float) -> Iterator[Reading]:
        for n in range(SAMPLES):
            late = [start * (value if i == block and n >= 8 else 1.0) for i in range(4)]
            yield per_site(n, "residual.B", [[size] for size in late], BLOCKS)
            yield per_site(n, "attention.B", [[normed]] * 4, SITES)

    return course


def _starved(value: float) -> Iterator[Reading]:
    """All gradients shrink tenfold, those of Q and K by the value more."""
    for n in range(SAMPLES):
        scale = 1.0 if n < 8 else 0.1
        qk = [[0.5 * scale * (1.0 if n < 8 else value)]] * 4
        yield per_site(n, "gradient.norm", [[scale]] * 4, BLOCKS)
        yield per_site(n, "gradient.qk", qk, SITES)


def _updates(value: float) -> Iterator[Reading]:
    for n in range(SAMPLES):
        rate = 1e-3 if n < 12 else 1e-4
        moved = rate * (1.0 if n < 16 else value)
        yield Reading.scalar(n, "learning_rate", rate)
        yield per_site(n, "gradient.norm", [[1.0]] * 4, BLOCKS)
        yield per_site(n, "update.norm", [[moved]] * 4, BLOCKS)


def _grows(value: float) -> Iterator[Reading]:
    """A hundredth of the weights is moved by each step, ever outwards."""
    for n in range(SAMPLES):
        size = value ** max(0, n - 8)
        yield per_site(n, "weight.norm", [[1.0], [size], [1.0], [1.0]], BLOCKS)
        yield per_site(n, "update.norm", [[0.01], [0.01 * size]] + [[0.01]] * 2, BLOCKS)


def _rate_grows(value: float) -> Iterator[Reading]:
    for n in range(300):
        yield Reading.scalar(n, "learning_rate", 1e-3 * (value if n >= 200 else 1.0))


def _still(value: float) -> Iterator[Reading]:
    for n in range(SAMPLES):
        yield per_site(n, "update.unchanged", [[value]] * 4, BLOCKS)
        yield per_site(n, "update.ratio", [[1e-3]] * 4, BLOCKS)


def _experts(value: float) -> Iterator[Reading]:
    row = [0.005 if expert < value else 0.2 for expert in range(8)]
    for n in range(SAMPLES):
        yield per_site(n, "router.load", [row], ["blocks.0.router"])
        yield per_site(n, "router.tokens", [[4096.0]], ["blocks.0.router"])


def _large_logits(value: float, theta: float = 0.3) -> Iterator[Reading]:
    for n in range(SAMPLES):
        row = [1.0, 2.0, value if n >= 8 else 90.0, 3.0]
        low = [[0.9, 0.9, theta, 0.9]] * len(SITES)
        yield per_site(10 * n, "attention.max_logit", [row] * len(SITES), SITES)
        yield per_site(10 * n, "attention.theta.p5", low, SITES)


def _stops(value: float) -> Iterator[Reading]:
    for step in range(400):
        yield Reading.scalar(step, "loss", falling(step))
        if step % 10 == 0 and step <= value:
            yield per_site(step, "gradient.norm", [[1.0]] * 4, BLOCKS)


def _rises(value: float, step: int) -> float:
    """Three nats are learnt in 40 steps; after 150 some of it is lost."""
    return 6.0 if step < 40 else 3.0 if step < 150 else 3.0 + value


def _spike(value: float, step: int) -> float:
    return value if step == 200 else 3.0 + 0.05 * math.sin(12.9898 * step)


CASES: dict[str, tuple[Course, float, float]] = {
    # rule: course, a value at which it must not fire, one at which it must
    "loss.above_chance": (losses(lambda v, s: v if s else 5.5), 5.50, 5.60),
    "loss.not_falling": (losses(lambda v, s: v), 5.48, 5.50),
    "loss.risen": (losses(_rises), 0.17, 0.19),
    "loss.spike_recovered": (losses(_spike), 3.10, 3.60),
    "attention.saturated": (
        heads("attention.theta.p5", lambda v: [1e-7, v, v, 0.9], 0.9), 0.11, 0.09,
    ),
    "attention.logits_large": (_large_logits, 99.0, 101.0),
    "attention.logits_growing": (_logits, 3.9, 4.1),
    "attention.entropy_collapsed": (
        heads("attention.entropy", lambda v: [2 * v] * 4, 2.0), 0.16, 0.14,
    ),
    "attention.sinks": (heads("attention.sink", lambda v: [v] * 4, 0.1), 0.79, 0.81),
    "attention.dead_heads": (_dead, 2, 3),
    "attention.projections_large": (_projections(1.02), 2.85, 2.95),
    "gradient.vanished": (
        blocks("gradient.norm", 1.0, lambda v, i: v if i < 2 else 1.0), 0.021, 0.019,
    ),
    "gradient.exploding": (
        blocks("gradient.norm", 1.0, lambda v, i: v if i < 2 else 1.0), 59.0, 61.0,
    ),
    "gradient.spike": (scalar("gradient.norm.total", lambda v: v, 1.0), 3.9, 4.1),
    "gradient.qk_starved": (_starved, 0.051, 0.049),
    "residual.tokens_collapsed": (
        blocks("residual.token_cosine", 0.3, lambda v, i: v), 0.94, 0.96,
    ),
    "residual.growing": (_stream(2.0, 1.0, block=3), 14.9, 15.1),
    "residual.embedding_large": (_stream(2.0, 2.0, block=0), 3.9, 4.1),
    "residual.outliers": (
        blocks("residual.kurtosis", 3.0, lambda v, i: v if i == 3 else 3.0), 29.0, 31.0,
    ),
    "update.too_large": (blocks("update.ratio", 1e-3, lambda v, i: v), 0.059, 0.061),
    "update.too_small": (_updates, 0.11, 0.09),
    "update.unexplained": (_grows, 1.065, 1.07),
    "setting.beyond_peak": (_rate_grows, 7.9, 8.1),
    "update.lost": (_still, 0.29, 0.31),
    "norm.gain_high": (
        blocks("norm.gain", 5.0, lambda v, i: 5.0 * (v if i == 1 else 1.0)), 9.9, 10.1,
    ),
    "norm.epsilon_rules": (
        blocks("precision.epsilon_dominated", 0.0, lambda v, i: v), 0.09, 0.11,
    ),
    "curvature.beyond_edge": (
        scalar("curvature.edge_ratio", lambda v: v, 1.0), 1.9, 2.1,
    ),
    "precision.error": (
        heads("precision.rms_error.bf16", lambda v: [v, 0, 0, 0], 0.0), 0.049, 0.051,
    ),
    "router.collapsed": (_experts, 3, 4),
    "router.certain": (
        blocks("router.entropy", 1.0, lambda v, i: v), 0.021, 0.019,
    ),
    "mixer.not_written": (
        heads("mixer.closed", lambda v: [v, 1, 1, 1], 0.0), 0.998, 1.0,
    ),
    "mixer.no_memory": (
        heads("mixer.forgets", lambda v: [v, 1, 1, 1], 0.0), 0.998, 1.0,
    ),
    "coverage.stopped": (_stops, 240, 200),
    "ranks.disagree": (scalar("ranks.disagreement", lambda v: v, 0.0), 0.009, 0.011),
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == {r.name for r in RULES.values() if r.of == "run"}


@pytest.mark.parametrize("name", CASES)
def test_fires_beyond_its_threshold_and_not_within(name: str) -> None:
    course, within, beyond = CASES[name]
    assert name not in names(judged(course(within))[1])
    found = [f for f in judged(course(beyond))[1] if f.code == name]
    assert found, name
    message = render(found[0]).message
    assert message and "{" not in message and name not in message
    assert found[0].severity == RULES[name].severity


@pytest.mark.parametrize("name", CASES)
def test_one_reading_is_not_enough(name: str) -> None:
    """A rule that lasts waits for its persistence: all but one reading is quiet."""
    rule = RULES[name]
    if rule.persist == 1:
        assert name in {"loss.spike_recovered", "coverage.stopped"}
        return
    course, _, beyond = CASES[name]
    readings = list(course(beyond))
    first = next(f for f in judged(readings)[1] if f.code == name)
    steps = [r.step for r in readings if r.quantity == rule.reads[-1]]
    waited = [s for s in steps if first.params["since"] <= s <= first.step]
    assert len(waited) == rule.persist


def test_a_constant_on_every_logit_of_a_row_is_not_a_large_logit() -> None:
    """A key bias of 100 moves every logit of a row; weights and θ stay as they are."""
    assert "attention.logits_large" in names(judged(_large_logits(150.0))[1])
    moved = _large_logits(150.0, theta=0.9)
    assert "attention.logits_large" not in names(judged(moved)[1])


def test_logits_that_grow_while_heads_form_do_not_count() -> None:
    """A copy task is solved: logits grow sevenfold, most rows stay unsaturated."""
    assert "attention.logits_growing" not in names(judged(_logits(7.0, theta=0.8))[1])


def test_a_gradient_that_grows_while_a_task_is_solved_is_no_spike() -> None:
    """Doubling every 20 steps, as where a copy task is solved; in 2 steps it is one."""

    def fired(doubling: int) -> bool:
        doubled = [max(0, min(n - 150, 3 * doubling)) / doubling for n in range(300)]
        readings = [
            Reading.scalar(n, "gradient.norm.total", 2.0**times * (1 + math.sin(n) / 9))
            for n, times in enumerate(doubled)
        ]
        return "gradient.spike" in names(judged(readings)[1])

    assert not fired(20) and fired(2)


@pytest.mark.parametrize("tokens", [32, 8192])
def test_routing_that_is_even_has_not_collapsed_however_few_the_tokens(
    tokens: int,
) -> None:
    """Every token draws one of 64 experts; of 32 tokens most experts get none."""
    draw = random.Random(0)
    readings = []
    for n in range(SAMPLES):
        chosen = Counter(draw.randrange(64) for _ in range(tokens))
        row = [chosen[expert] / tokens for expert in range(64)]
        readings.append(per_site(n, "router.load", [row], ["router"]))
        readings.append(per_site(n, "router.tokens", [[float(tokens)]], ["router"]))
    assert "router.collapsed" not in names(judged(readings)[1])


LOSSES: dict[str, Callable[[float], float]] = {
    "as it is": lambda loss: loss,
    "with an offset": lambda loss: loss + 3.0,
    "with a small offset": lambda loss: loss + 0.3,
    "with a factor": lambda loss: 1.2 * loss + 0.5,
}


@pytest.mark.parametrize("change", LOSSES)
def test_a_loss_is_judged_alike_with_an_offset_or_a_factor(change: str) -> None:
    """A slow start at ln V, then a plateau at 0.5 ln V: healthy, however scaled."""

    def loss(step: int) -> float:
        plain = 5.545 if step < 60 else max(2.7, 5.545 - (step - 60) / 40)
        return LOSSES[change](plain)

    found = names(judged(healthy(500, loss=loss))[1])
    assert not {name for name in found if name.startswith("loss")}


@pytest.mark.parametrize(("classes", "best"), [(4, 1.30), (10, 1.9), (256, 2.9)])
def test_a_plateau_at_the_best_loss_there_is_has_not_stopped_falling(
    classes: int, best: float
) -> None:
    """Four classes whose entropy is near ln 4: nothing is left to learn."""
    judge = Judge({**DETAILS, "classes": classes})
    start = math.log(classes)
    found = judge.add(healthy(600, loss=lambda s: max(best, start - s / 100)))
    assert "loss.not_falling" not in names(found)
    stuck = Judge({**DETAILS, "classes": classes})
    found = stuck.add(healthy(600, loss=lambda s: start))
    assert "loss.not_falling" in names(found)


@pytest.mark.parametrize(("times", "fires"), [(3.0, False), (3.5, True)])
def test_an_orthogonalised_step_is_judged_by_its_own_size(
    times: float, fires: bool
) -> None:
    """It is spread over all directions: a step along the gradient has few."""
    course, _, beyond = CASES["update.too_large"]
    details = {**DETAILS, "updates": ["adaptive", "orthogonalised"]}
    found = Judge(details).add(course(times * beyond))
    assert ("update.too_large" in names(found)) is fires


def test_weights_that_are_loaded_once_are_no_growth() -> None:
    """A low-rank update is merged and begun anew, a checkpoint is loaded."""
    readings = []
    for n in range(SAMPLES):
        rows = [[3.0 if n >= 12 else 1.0]] * 4
        readings.append(per_site(n, "weight.norm", rows, BLOCKS))
        readings.append(per_site(n, "update.norm", [[0.01]] * 4, BLOCKS))
    assert "update.unexplained" not in names(judged(readings)[1])


@pytest.mark.parametrize("every", [5, 10])
def test_weights_that_begin_at_zero_may_grow_by_all_of_themselves(every: int) -> None:
    """Equal steps from zero: the n-th is 1/n of what there is."""
    readings = [
        reading
        for step in range(0, 300, every)
        for reading in (
            per_site(step, "gradient.norm", [[1.0]] * 4, BLOCKS),
            per_site(step, "update.ratio", [[1 / (step + 1)]] * 4, BLOCKS),
        )
    ]
    assert "update.too_large" not in names(judged(readings)[1])


def test_healthy_long_trained_heads_do_not_count() -> None:
    """A quarter of the heads saturated, as in healthy models: not a word."""
    row = [1e-8, 0.4, 0.6, 0.9]
    readings = [
        per_site(n, "attention.theta.p5", [row] * 4, SITES) for n in range(SAMPLES)
    ]
    assert not judged(readings)[1]


def test_a_stream_that_begins_small_may_grow_up() -> None:
    """Initialised with 0.02, as GPT-2 is: the stream grows thirtyfold in health."""
    assert not judged(_stream(0.2, 8.0, block=3)(30.0))[1]


def test_frozen_blocks_and_adapters_are_no_vanished_gradients() -> None:
    frozen = [
        per_site(n, "gradient.norm", [[0.3], [0.2]], BLOCKS[2:]) for n in range(SAMPLES)
    ]
    adapters = [
        per_site(n, "gradient.norm", [[1e-6]] * 4, BLOCKS) for n in range(SAMPLES)
    ]
    assert not judged(frozen)[1] and not judged(adapters)[1]


def test_a_model_that_came_saturated_and_works_is_left_alone() -> None:
    """Fine-tuning: the first loss is far below ln V, and θ was low from the start."""
    loss = [Reading.scalar(0, "loss", 2.0)]
    low = [
        per_site(n, "attention.theta.p5", [[0.05] * 4], SITES[:1]) for n in range(12)
    ]
    assert "attention.saturated" not in names(judged([*loss, *low])[1])
    fresh = [Reading.scalar(0, "loss", 5.5)]
    assert "attention.saturated" in names(judged([*fresh, *low])[1])


@pytest.mark.parametrize("apart", [1.0, 1.2])
def test_projections_that_are_shared_or_trained_may_be_large(apart: float) -> None:
    assert "attention.projections_large" not in names(judged(_projections(apart)(4))[1])


def test_an_encoder_and_a_decoder_are_compared_each_with_itself() -> None:
    """Cross-attention passes little to the encoder until it reads something."""
    stacks = [f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(2)]

    def found(norms: Sequence[float]) -> set[str]:
        judge = Judge({**DETAILS, "blocks": stacks})
        rows = [[norm] for norm in norms]
        return names(
            judge.add(
                per_site(n, "gradient.norm", rows, stacks) for n in range(SAMPLES)
            )
        )

    assert "gradient.vanished" not in found([1e-3, 1e-3, 1.0, 1.0])
    assert "gradient.vanished" in found([1.0, 1.0, 1e-3, 1.0])


@pytest.mark.parametrize(("scatter", "fires"), [(0.1, True), (1.0, False)])
def test_a_gradient_that_scatters_by_as_much_is_no_spike(
    scatter: float, fires: bool
) -> None:
    """Batches of one row: the norm varies by factors of e from step to step."""
    draw = random.Random(0)
    norms = [math.exp(draw.gauss(0, scatter)) for _ in range(100)] + [6.0] * 8
    readings = [
        Reading.scalar(n, "gradient.norm.total", norm) for n, norm in enumerate(norms)
    ]
    assert ("gradient.spike" in names(judged(readings)[1])) is fires


def test_a_norm_that_stays_high_is_not_usual_after_a_while() -> None:
    norms = [1.0 + 0.1 * math.sin(n) for n in range(100)]
    norms += [50.0 + 5 * math.sin(n) for n in range(200)]
    readings = [
        Reading.scalar(n, "gradient.norm.total", norm) for n, norm in enumerate(norms)
    ]
    judge, _ = judged(readings)
    assert [f.code for f in judge.firing] == ["gradient.spike"]


def test_small_batches_around_a_guess_are_not_above_it() -> None:
    draw = random.Random(0)
    losses = [5.7 + draw.gauss(0, 1.0) for _ in range(300)]
    readings = [Reading.scalar(n, "loss", loss) for n, loss in enumerate(losses)]
    assert "loss.above_chance" not in names(judged(readings)[1])
    worse = [Reading.scalar(n, "loss", loss + 1.5) for n, loss in enumerate(losses)]
    readings = [Reading.scalar(0, "loss", 5.5), *worse[1:]]
    assert "loss.above_chance" in names(judged(readings)[1])


@pytest.mark.parametrize(("warmup", "fires"), [(20, True), (380, False)])
def test_a_plateau_is_counted_in_what_was_trained_not_in_steps(
    warmup: int, fires: bool
) -> None:
    """400 steps at ln V: of a long warm-up nothing is expected yet."""
    readings = []
    for step in range(400):
        rate = 1e-3 * min(1.0, (step + 1) / warmup)
        readings.append(Reading.scalar(step, "learning_rate", rate))
        readings.append(Reading.scalar(step, "loss", math.log(256)))
    assert ("loss.not_falling" in names(judged(readings)[1])) is fires


@pytest.mark.parametrize(("rises", "fires"), [(True, False), (False, True)])
def test_tokens_that_share_a_direction_are_not_judged_in_a_warm_up(
    rises: bool, fires: bool
) -> None:
    readings = []
    for step in range(200):
        rate = 1e-5 * (step + 1 if rises else 1)
        readings.append(Reading.scalar(step, "learning_rate", rate))
        if step % 5 == 0:
            rows = [[0.97]] * 4
            readings.append(per_site(step, "residual.token_cosine", rows, BLOCKS))
    assert ("residual.tokens_collapsed" in names(judged(readings)[1])) is fires


def test_bad_batches_among_good_ones_raise_the_loss_above_its_own_noise() -> None:
    def loss(step: int) -> float:
        bad = step >= 250 and step * 7 % 10 < 6
        return max(1.0, 5.0 - step / 40) + 0.05 * math.sin(step) + 2.0 * bad

    assert "loss.risen" in names(judged(healthy(500, loss=loss))[1])


@pytest.mark.parametrize(
    ("gradient", "beta1", "updates", "fires"),
    [
        (1.0, 0.9, ["adaptive"], True),
        # The task is solved: the gradient has shrunk as much.
        (0.05, 0.9, ["adaptive"], False),
        # An average over 100 steps of noise is as small.
        (1.0, 0.99, ["adaptive"], False),
        # What does not divide by a second moment follows the gradient, or nothing.
        (1.0, 0.9, ["gradient"], False),
        (1.0, 0.9, ["factored"], False),
        (1.0, 0.9, ["adaptive", "orthogonalised"], False),
    ],
)
def test_an_update_is_small_only_beside_its_gradient_and_its_average(
    gradient: float, beta1: float, updates: list[str], fires: bool
) -> None:
    judge = Judge({**DETAILS, "updates": updates})
    judge.add([Reading.scalar(0, "optimizer.beta1", beta1)])
    readings = []
    for n in range(SAMPLES):
        late = n >= 16
        norm, moved = (gradient, 5e-5) if late else (1.0, 1e-3)
        readings.append(Reading.scalar(n, "learning_rate", 1e-3))
        readings.append(per_site(n, "gradient.norm", [[norm]] * 4, BLOCKS))
        readings.append(per_site(n, "update.norm", [[moved]] * 4, BLOCKS))
    assert ("update.too_small" in names(judge.add(readings))) is fires


def test_samples_of_a_dense_start_do_not_shorten_a_wait() -> None:
    """Adam's first updates are large: three samples in a row are thirty steps."""
    steps = [0, 1, 2, 5, 8, *range(10, 200, 10)]

    def readings(large_until: int) -> list[Reading]:
        return [
            reading
            for step in steps
            for reading in (
                Reading.scalar(step, "loss", falling(step)),
                per_site(step, "gradient.norm", [[1.0]] * 4, BLOCKS),
                per_site(
                    step,
                    "update.ratio",
                    [[0.1 if step <= large_until else 1e-3]] * 4,
                    BLOCKS,
                ),
            )
        ]

    def fired(large_until: int, details: dict[str, object]) -> list[int]:
        judge = Judge({**DETAILS, **details})
        found = judge.add(readings(large_until))
        return [f.step for f in found if f.code == "update.too_large"]

    extra = {"extra_samples": [1, 2, 5, 8]}
    assert not fired(12, extra) and fired(200, extra)
