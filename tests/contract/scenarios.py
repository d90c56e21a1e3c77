"""Planning problems on analytic profiles, and the event simulation that judges what is predicted for them."""

from __future__ import annotations

import functools

import numpy as np

from xgpt.core.policies import OneLane, Pool, as_run_by, lane_settings
from xgpt.core.schema import (
    Constraint,
    Curve,
    EngineSpec,
    LayerTimes,
    ModelShape,
    PolicySettings,
    Profile,
    Surface,
    Workload,
)
from xgpt.core.workload import decoding_share, sample
from xgpt.resolve import load_cluster, load_model, load_workload
from xprofiler import analytic
from xscheduler.problem import Problem
from xscheduler.space import POLICIES
from xsimulator.clock import LaneClock
from xsimulator.costs.step_cost import LaneCost
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.forecast import OneLaneModel, estimate
from xsimulator.lengths import Lengths
from xsimulator.measures import Measured, measure
from xsimulator.stages import whole

BLOCK_SIZE = 16
RANDOM = ModelShape(
    name="random",
    family="opt",
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=32,
    vocab_size=64,
    max_context=2048,
)


@functools.cache
def problem(model: str, cluster: str, workload: str, latency_bound_s: float | None = None) -> Problem:
    """A problem on one device of the cluster, profiled from its datasheet."""
    spec, _ = load_model(model)
    devices = load_cluster(cluster)
    profile = analytic.profile(spec, devices, spec.default_dtype)
    constraint = Constraint(latency_bound_s=latency_bound_s)
    return Problem(spec, None, devices, load_workload(workload, spec), profile, constraint)


def one_lane(model: str, cluster: str, workload: str, engine: EngineSpec | None = None) -> OneLaneModel:
    subject = problem(model, cluster, workload)
    return OneLaneModel(
        LaneCost(subject.model, subject.profile, whole(subject.model), engine=engine), Lengths(subject.workload)
    )


def simulate(
    model: OneLaneModel,
    workload: Workload,
    settings: PolicySettings,
    num_requests: int,
    rng: np.random.Generator,
    engine: EngineSpec | None = None,
) -> Measured:
    """Run a saturated engine, and measure requests after its warm-up. K/V memory never binds."""
    predicted = estimate(model, settings)
    warm_up = round(3 * predicted["peak_requests"]) + 50
    total = warm_up + num_requests + round(2 * predicted["peak_requests"]) + 50
    inputs, outputs = sample(workload, total, rng)
    lengths = model.lengths
    static = settings.kind == "static"
    pool = Pool(total * (lengths.max_input + lengths.max_output), BLOCK_SIZE, holds_finished=static)
    share = decoding_share(workload)
    rule = lane_settings(settings, predicted["encode_tokens"], predicted["decode_batch"], share)
    schedule = OneLane(as_run_by(engine, rule, model.lane.num_stages), pool)
    requests = [SimulatedRequest(i, int(inputs[i]), lengths.max_output, int(outputs[i])) for i in range(len(inputs))]
    log = SimulatedEngine(schedule, LaneClock(model.lane, schedule), requests).run()
    return measure(
        log,
        quantile=0.99,
        quantile_output=lengths.decodes_at(0.99) + 1,
        skip_requests=warm_up,
        num_requests=num_requests,
    )


VARIED = {
    "encode_batch": ((1, 64), (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)),
    "decode_iterations": ((1, 60), (1, 2, 3, 5, 8, 13, 21, 34, 55, 79)),
    "max_batch": ((1, 256), (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    "token_budget": ((64, 2048), (32, 64, 128, 256, 512, 1024, 2048, 4096)),
    "batch": ((4, 128), (1, 2, 4, 8, 16, 32, 64, 128)),
}
"""By control variable: between what its random values lie, and the values of a grid."""


def random_settings(kind: str, rng: np.random.Generator) -> PolicySettings:
    """Control variables, drawn evenly on a logarithmic scale."""

    def draw(name: str) -> int:
        (low, high), _ = VARIED[name]
        return round(low * (high / low) ** rng.random())

    settings: PolicySettings = POLICIES[kind](
        **{variable.name: draw(variable.name) for variable in POLICIES[kind].variables}
    )
    return settings


def random_profile(rng: np.random.Generator, *, monotone: bool, degrees: tuple[int, ...] = (1,)) -> Profile:
    """Piecewise linear tables; uneven ones rise and fall by up to 40% around a trend, as noisy measurements do.

    In one of two the model's last layer takes less for tokens whose logits are not wanted.
    """

    def noise(shape: int | tuple[int, int]) -> np.ndarray:
        return np.ones(shape) if monotone else rng.uniform(0.6, 1.4, shape)

    tokens = (1, 4, 16, 64, 256, 1024)
    batches, lengths = (1, 4, 16, 64), (1, 16, 64, 256)

    def curve(points: tuple[int, ...]) -> Curve:
        fixed, each = 1e-3 * rng.random(), 1e-4 * rng.random()
        seconds = (fixed + each * np.asarray(points)) * noise(len(points))
        return Curve(points=points, seconds=tuple(seconds.tolist()))

    def surface(power: int) -> Surface:
        each = 1e-5 * rng.random() / (100 if power == 2 else 1)
        seconds = each * np.outer(batches, np.asarray(lengths, float) ** power) * noise((len(batches), len(lengths)))
        return Surface(batches=batches, lengths=lengths, seconds=tuple(map(tuple, seconds.tolist())))

    layers = tuple(
        LayerTimes(tp_degree=tp, rest=curve(tokens), encode_attention=surface(2), decode_attention=surface(1))
        for tp in degrees
    )
    hops: dict[str, Curve] = {"hop": curve(tokens), "kv_transfer": curve(tokens)} if len(degrees) > 1 else {}
    profile = Profile(
        source="analytic",
        model=RANDOM,
        dtype="float32",
        device="random",
        layers=layers,
        **hops,
        embedding=curve(tokens),
        head=curve(batches),
        overhead=curve(batches),
    )
    (of_last,) = rng.spawn(1)  # what is drawn next stays what it is
    if of_last.random() < 0.5:
        return profile
    share = of_last.random()
    layers = tuple(layer.model_copy(update={"last": layer.rest.times(share)}) for layer in layers)
    return profile.model_copy(update={"layers": layers})
