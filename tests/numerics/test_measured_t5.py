"""An encoder-decoder from profile to tokens: measured on this machine, planned from that, served."""

from dataclasses import replace

import numpy as np
import pytest

import xprofiler.measurement_order
from tests.numerics.served import greedy, served_here, served_on
from tests.planned import SHORT, placements_of, planned
from xgpt.checkpoints.files import read_spec
from xgpt.core.machine import detect, num_cores
from xgpt.core.schema import Constraint
from xprofiler import encoder_decoder, measure
from xprofiler.bench import jitter_of
from xrunner.cluster.workers import Workers
from xscheduler.schedule import Problem
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.stages import whole


@pytest.fixture(scope="module")
def measured_problem(checkpoint):
    """Return the planning problem of a T5 on a number of cores, whose steps are measured; each once."""
    found = {}

    def of(name, num_devices):
        if (name, num_devices) not in found:
            directory, _ = checkpoint(name)
            spec, cluster = read_spec(directory).model_copy(update={"max_context": 128}), detect(num_devices)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(xprofiler.measurement_order, "PASSES", 3)
                profile = measure.profile(spec, cluster, "float32", checkpoint=directory)
            found[name, num_devices] = Problem(spec, str(directory), cluster, SHORT, profile, Constraint())
        return found[name, num_devices]

    return of


@pytest.mark.long
def test_a_measured_profile_has_both_halves(measured_problem):
    profile = measured_problem("t5-gated-untied", 1).profile
    assert profile.source == "measured" and profile.engine == "xgpt"
    (layer,), (encoder,) = profile.layers, profile.encoder_layers
    assert encoder.rest.points[-1] == 2048 and layer.rest.points[-1] == 128
    assert encoder.attention.lengths[-1] == layer.cross.attention.lengths[-1] == 120
    assert 0 < layer.cross.keys_values.seconds[0] < layer.cross.keys_values.seconds[-1]
    assert encoder.rest.seconds[-1] > encoder.rest.seconds[0]


def test_parts_add_up_to_the_steps_that_were_measured(checkpoint):
    """Whatever was measured of the parts: what predictions charge for a measured step is the step's own time."""
    spec = read_spec(checkpoint("t5-gated-untied")[0])
    points = encoder_decoder.EncoderDecoderPoints.of(spec)
    rng = np.random.default_rng(3)
    measured = {("spread", 0): 0.0} | jitter_of([0.05])
    sizes = {
        "encode attention": points.encode,
        "own attention": points.own,
        "cross attention": points.cross,
        "head": [(n,) for n in range(1, 129)],
        "overhead": [(n,) for n in measure.BATCHES],
        "keys and values": [(n,) for n in measure.TOKENS],
    }
    for name, at in sizes.items():
        measured |= {(name, *size): rng.uniform(1e-4, 2e-4) for size in at}
    measured |= {("embedding", n): 1e-6 * n for n in range(1, 3000)}
    measured |= {("decode step", n): rng.uniform(0.05, 0.06) for n in points.decodes}
    measured |= {("encode step", n): rng.uniform(0.20, 0.30) for n in points.encodes}
    profile = measure.assembled(spec, detect(1), "float32", 1, {}, {(1, 1): measured})
    cost = LaneCost(spec, profile, whole(spec))

    def predicted(step):
        return sum(cost.parts(step)[0]) - cost.parts(step)[0].overhead

    for n in (1, 2, 4, 8, 16, 32, 64, 128):
        prompt, own_tokens = points.decodes[n]
        decodes = StepCounts((), n, n * own_tokens, n, n, prompt)
        # Between the batches of the table attention is interpolated: whole steps are measured at all of them.
        assert predicted(decodes) == pytest.approx(measured["decode step", n], rel=1e-6)
    for n in (128, 512, 2048):  # batches of the table, whose length lies between two of its lengths
        batch, prompt = points.encodes[n]
        encodes = StepCounts([(0, prompt, 1)] * batch, 0, 0, batch, n, prompt)
        assert predicted(encodes) == pytest.approx(measured["encode step", n], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["rra", "orca", "static"])
def test_measured_plans_on_one_device_give_the_tokens_of_transformers(checkpoint, measured_problem, kind):
    plan = planned(measured_problem("t5-gated-untied", 1), kind)
    assert plan.profile.source == "measured"
    assert served_here(plan) == greedy(checkpoint("t5-gated-untied")[1])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(num_cores() < 2, reason="two devices need a core each")
@pytest.mark.parametrize("name, kinds", [("t5-tied", ("rra", "orca", "static", "waa")), ("t5-few-buckets", ("waa",))])
def test_measured_plans_on_two_devices_give_the_tokens_of_transformers(checkpoint, measured_problem, name, kinds):
    """The second model has one encoder layer and three heads, so that only waa can divide it."""
    problem, expected = measured_problem(name, 2), greedy(checkpoint(name)[1])
    assert problem.profile.kv_transfer is not None and problem.profile.hop is not None
    assert problem.profile.tp_degrees == tuple(layer.tp_degree for layer in problem.profile.encoder_layers)
    with Workers(2) as workers:
        for kind in kinds:
            places = placements_of(problem, kind)
            assert places
            for placement in places:
                plan = planned(replace(problem, placement=placement), kind, placement)
                assert served_on(workers, plan) == expected, (kind, plan.stages)
