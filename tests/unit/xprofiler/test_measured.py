"""Tables of a decoder-only model from times of parts and of whole steps, whatever these were."""

import numpy as np
import pytest

from benchmarks.lib.served_plans import one_lane, plan
from xgpt.core.errors import InputError
from xgpt.core.machine import detect
from xgpt.core.schema import ModelSpec, Profile, ProfileRef
from xgpt.resolve import load_model
from xprofiler import measure, store
from xprofiler.bench import MIXED_CONTEXT, MIXED_DECODES, MIXED_LENGTH, MIXED_PROMPTS, Points, jitter_of
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.stages import whole


def random_timings(spec: ModelSpec, points: Points) -> dict[tuple[str | int, ...], float]:
    rng = np.random.default_rng(4)
    measured: dict[tuple[str | int, ...], float] = {("spread", 0): 0.0} | jitter_of([0.05])
    sizes = {
        "encode attention": points.encode,
        "decode attention": points.decode,
        "head": [(n,) for n in range(1, 129)],
        "overhead": [(n,) for n in measure.BATCHES],
        "last layer": [(n,) for n in measure.TOKENS],
    }
    for name, at in sizes.items():
        measured |= {(name, *size): rng.uniform(1e-4, 2e-4) for size in at}
    measured |= {("embedding", n): 1e-6 * n for n in measure.TOKENS}
    return measured | {("step", n): rng.uniform(0.05, 0.06) for n in points.steps}


def test_parts_add_up_to_the_steps_that_were_measured() -> None:
    spec, _ = load_model("opt-125m")
    points = Points.of(spec, "cpu")
    measured = random_timings(spec, points)
    profile = measure.assembled(spec, detect(1), "float32", 1, {}, {(1, 1): measured})
    cost = LaneCost(spec, profile, whole(spec))

    def predicted(step: StepCounts) -> float:
        (parts,) = cost.parts(step)
        return sum(parts) - parts.overhead

    context = sum(points.steps[1][0])
    for n in measure.BATCHES:
        assert predicted(StepCounts((), n, n * context, n, n)) == pytest.approx(measured["step", n])
    (layer,) = profile.layers
    for n in (512, 2048):  # batches of the table; such a step was measured without a head, all its layers alike
        prompts = StepCounts([(0, 128, 1)] * (n // 128), 0, 0, n // 128, n)
        cut = dict(zip(layer.rest.points, np.subtract(layer.rest.seconds, layer.last.seconds), strict=True))
        expected = measured["step", n] - cut[n] + measured["head", n // 128] + cut[n // 128]
        assert predicted(prompts) == pytest.approx(expected, rel=0.01)


def test_a_step_of_several_slices_takes_as_long_as_its_slices() -> None:
    """On a GPU times rise in stairs; the line through the last two points was flat, and long prompts cost nothing."""
    spec, _ = load_model("opt-125m")
    measured = random_timings(spec, Points.of(spec, "cpu"))
    measured["step", 2048] = measured["step", 1024]
    rest = LaneCost(spec, measure.assembled(spec, detect(1), "float32", 1, {}, {(1, 1): measured}), whole(spec)).tokens
    one, four = rest(np.array([2048.0])).item(), rest(np.array([8192.0])).item()
    assert four == pytest.approx(4 * one)


def test_a_step_with_prompts_takes_as_long_as_in_the_loop_of_a_gpu() -> None:
    spec, _ = load_model("opt-125m")
    measured = random_timings(spec, Points.of(spec, "cpu")) | {("mixed step", 0): 0.1}
    profile = measure.assembled(spec, detect(1), "float32", 1, {}, {(1, 1): measured})
    decodes, context = MIXED_DECODES, MIXED_CONTEXT
    step = StepCounts(
        [(0, MIXED_LENGTH, 1)] * MIXED_PROMPTS,
        decodes,
        decodes * context,
        decodes + MIXED_PROMPTS,
        decodes + MIXED_PROMPTS * MIXED_LENGTH,
    )
    (parts,) = LaneCost(spec, profile, whole(spec)).parts(step)
    assert sum(parts) == pytest.approx(0.1, rel=0.02)


def test_the_profile_of_a_plan_is_never_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan from a datasheet for this machine had `xgpt serve` measure it before each start."""

    def measure(*_: object, **__: object) -> Profile:
        raise AssertionError("it measures")

    monkeypatch.setattr(store, "measured_profile", measure)
    by_datasheet = ProfileRef(source="analytic", sha256="0" * 64, num_threads=1)
    served_plan = plan(one_lane([1])).model_copy(update={"profile": by_datasheet})
    assert served_plan.cluster.is_local
    with pytest.raises(InputError, match="profile is not in"):
        store.profile_of(served_plan)
