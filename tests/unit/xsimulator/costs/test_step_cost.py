"""Tables of step times: what lies between their points, beyond them, and what a unit costs at least."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.core.schema import Surface
from xgpt.resolve import load_cluster, load_model
from xprofiler import analytic
from xsimulator.costs.curves import Grid, Line
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.stages import lane, whole

UNEVEN = Line([1, 4, 16, 64, 100], [1.0, 1.5, 7.0, 8.0, 20.0])


def test_line_goes_through_its_points_and_the_origin() -> None:
    assert UNEVEN([0, 0.5, 1, 4, 10, 16]) == pytest.approx([0, 0.5, 1.0, 1.5, 4.25, 7.0])


def test_line_goes_on_along_its_last_segment() -> None:
    assert float(UNEVEN(100 + 36)) == pytest.approx(32.0)


def test_nothing_goes_on_downwards() -> None:
    falling = Line([1, 4, 16], [1.0, 3.0, 2.0])
    assert falling([10, 16, 100, 1e6]) == pytest.approx([2.5, 2.0, 2.0, 2.0])
    assert falling.at(1e6) == 2.0
    grid = Grid(Surface(batches=(1, 4), lengths=(10, 20), seconds=((1.0, 3.0), (5.0, 2.0))))
    assert grid(1, [10, 20, 30, 100]) == pytest.approx([1.0, 3.0, 5.0, 19.0])
    assert grid(4, [20, 30, 100]) == pytest.approx([2.0, 2.0, 2.0])
    assert grid([4, 7, 100], 10) == pytest.approx([5.0, 9.0, 133.0])
    assert grid([4, 7, 100], 20) == pytest.approx([2.0, 2.0, 2.0])


def test_lines_add_and_scale_exactly() -> None:
    other = Line([2, 32, 50], [3.0, 2.0, 9.0])
    x = np.linspace(0, 200, 401)
    assert (UNEVEN + other)(x) == pytest.approx(UNEVEN(x) + other(x))
    assert UNEVEN.scaled(3.0)(x) == pytest.approx(3 * UNEVEN(x))


@pytest.mark.parametrize("seed", range(5))
def test_least_per_unit_is_the_least(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = np.cumsum(rng.integers(1, 20, 8))
    line = Line(points, rng.uniform(0.1, 5.0, 8))
    for up_to in rng.uniform(0.5, 1.0 * points[-1], 30):
        x = np.union1d(np.linspace(up_to / 1000, up_to, 1000), [p for p in points if p <= up_to])
        assert float(line.least_per_unit(up_to)) == pytest.approx(float((line(x) / x).min()), rel=1e-9)
    many = rng.uniform(0.5, points[-1], 10)
    assert line.least_per_unit(many) == pytest.approx([float(line.least_per_unit(u)) for u in many])


def surface() -> Surface:
    return Surface(batches=(1, 4), lengths=(10, 20, 40), seconds=((1.0, 2.0, 3.0), (2.0, 6.0, 8.0)))


def test_grid_is_bilinear_and_zero_without_a_batch() -> None:
    grid = Grid(surface())
    assert float(grid(4, 20)) == 6.0
    assert float(grid(0, 20)) == 0.0
    assert float(grid(0.5, 20)) == pytest.approx(1.0)
    assert float(grid(2.5, 15)) == pytest.approx((1.5 + 4.0) / 2)
    assert grid([1, 4], [10, 40]) == pytest.approx([1.0, 8.0])


def test_grid_goes_on_beyond_its_ends_but_not_below_zero() -> None:
    grid = Grid(surface())
    assert float(grid(7, 20)) == pytest.approx(10.0)
    assert float(grid(1, 60)) == pytest.approx(4.0)
    steep = Grid(Surface(batches=(1,), lengths=(10, 20), seconds=((1.0, 3.0),)))
    assert float(steep(1, 1)) == 0.0


def test_the_last_layer_makes_keys_and_values_alone_of_tokens_that_are_not_sampled() -> None:
    spec, _ = load_model("opt-125m")
    profile = analytic.profile(spec, load_cluster("h200x8"), "float32")
    layer = profile.layer(1)
    cut = profile.model_copy(update={"layers": (layer.model_copy(update={"last": layer.rest.times(0.25)}),)})
    saved = 0.75 * Line.of(layer.rest).at(130)
    step = StepCounts.of([(0, 64, 0), (64, 128, 1)], [100, 300])
    for of_stages in (whole(spec), lane([1, 1], (4, 8))):
        times = [LaneCost(spec, each, of_stages).step(step) for each in (profile, cut)]
        assert np.subtract(*times).tolist() == pytest.approx([0.0] * (len(of_stages) - 1) + [saved])


def test_a_step_costs_the_sum_of_its_parts() -> None:
    spec, _ = load_model("opt-125m")
    profile = analytic.profile(spec, load_cluster("h200x1"), "float32")
    lane, layer = LaneCost(spec, profile, whole(spec)), profile.layers[0]
    step = StepCounts.of([(0, 64, 0), (64, 128, 1)], [100, 300])
    (parts,) = lane.parts(step)
    assert lane.step(step) == [sum(parts)]
    assert (step.sampled, step.num_tokens) == (3, 130)
    encode, decode = Grid(layer.encode_attention), Grid(layer.decode_attention)
    assert parts == pytest.approx(
        (
            spec.num_layers * Line.of(layer.rest).at(130) + Line.of(profile.embedding).at(130),
            spec.num_layers * float(encode(2, 64) + encode(2, 128) - encode(2, 64)) / 2,
            spec.num_layers * float(decode(2, 200)),
            Line.of(profile.head_of(1)).at(3),
            Line.of(profile.overhead).at(4),
        )
    )
