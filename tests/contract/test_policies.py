"""What holds of every policy: its estimate is finite, repeatable, as monotone as declared, and what the engine does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.scenarios import VARIED, one_lane, problem, random_profile, random_settings, simulate
from tests.rings import few
from xgpt.core.io import dump_json
from xgpt.core.schema import ChunkedSettings, Histogram, Plan, PolicySettings, RraSettings, Variable, Workload
from xgpt.resolve import load_model
from xscheduler.schedule import Scheduler
from xscheduler.space import POLICIES
from xsimulator.costs.step_cost import LaneCost
from xsimulator.forecast import FORECASTS, OneLaneModel, estimate
from xsimulator.lengths import Lengths, Reused
from xsimulator.stages import whole

KINDS = tuple(kind for kind in POLICIES if kind != "waa")
DEVICES = (("opt-125m", "h200x1"), ("opt-125m", "v100x1"), ("llama-3.1-8b", "h200x1"), ("opt-13b", "a40x4"))
WORKLOADS = ("summarization", "translation", "code-generation", "chat-short", "chat-long", "orca")

NUM_CASES = 25
LARGEST_BATCH = 300

DIRECTION_TOLERANCE = 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_plan_is_finite_repeatable_and_round_trips(kind: str) -> None:
    subject = problem("llama-3.1-8b", "h200x1", "orca", latency_bound_s=4.0)
    plan, again = (Scheduler(subject).best([kind]) for _ in range(2))
    assert np.isfinite([value for value in plan.estimate.model_dump().values() if isinstance(value, float)]).all()
    assert plan.estimate == again.estimate
    assert plan.policy == again.policy
    assert Plan.model_validate_json(dump_json(plan)) == plan


@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction_does_not_depend_on_its_neighbours(kind: str) -> None:
    model, rng = one_lane("opt-125m", "h200x1", "orca"), np.random.default_rng(3)
    drawn = [random_settings(kind, rng) for _ in range(20)]
    names = [variable.name for variable in POLICIES[kind].variables]
    together = FORECASTS[kind].evaluate(model, **{name: [getattr(s, name) for s in drawn] for name in names})
    for i, settings in enumerate(drawn):
        alone = estimate(model, settings)
        assert min(alone.values()) >= 0
        assert np.isfinite(list(alone.values())).all()
        assert together.at(i) == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_no_figure_is_negative_where_prompts_are_cached(kind: str) -> None:
    """Where a measured table falls with the length of prompts, the rest of a cached prompt took less than no time."""
    spec, _ = load_model("opt-125m")
    for seed in range(30):
        rng = np.random.default_rng(seed)
        profile = random_profile(rng, monotone=False)
        layer = profile.layers[0]
        falling = layer.encode_attention.but(seconds=tuple(row[::-1] for row in layer.encode_attention.seconds))
        profile = profile.but(layers=(layer.but(encode_attention=falling, rest=layer.rest.times(0.1), last=None),))
        lengths = np.unique(rng.integers(2, 256, 12))
        prompts = Histogram(lengths=tuple(lengths.tolist()), probabilities=(1 / len(lengths),) * len(lengths))
        workload = Workload(name="repeated", input=prompts, output=Histogram(lengths=(2, 30), probabilities=(0.3, 0.7)))
        share = float(rng.choice([0.5, 0.8, 1.0]))
        found = Lengths(workload, Reused.proportional(workload, share, 1000.0, share))
        model = OneLaneModel(LaneCost(spec, profile, whole(spec)), found)
        for _ in range(5):
            figures = estimate(model, random_settings(kind, rng))
            assert min(figures.values()) >= 0 and np.isfinite(list(figures.values())).all()


@pytest.mark.parametrize("workload", ["tcb", "chat-short"])
def test_no_gap_between_tokens_exceeds_a_phase(workload: str) -> None:
    """Also where hardly any request is left at a phase's end: that share of a phase may be no more than rounding."""
    model = one_lane("opt-125m", "h200x1", workload)
    iterations = [n for n in (1, 3, 10, 30, 60, 85, 99, 400, 1200) for _ in range(3)]
    performance = FORECASTS["rra"].evaluate(model, encode_batch=[1, 30, 300] * 9, decode_iterations=iterations)
    assert (performance.itl_p99 <= 5 * performance.cycle).all()  # a phase of one prompt can be a long one
    assert (performance.latency >= performance.ttft).all()
    # No request stays for 400 iterations: phases may be of any length.
    assert performance.latency[-6:-3] == pytest.approx(performance.latency[-3:], rel=0.02)


def broken_directions(model: OneLaneModel, kind: str, variables: tuple[Variable, ...]) -> list[str]:
    """Where throughput or latency falls by over 2% from a value to a faster one, or rises to a slower one."""
    broken = []
    axes = [np.asarray(VARIED[variable.name][1]) for variable in variables]
    grids = np.meshgrid(*axes, indexing="ij")
    performance = FORECASTS[kind].evaluate(model, **{v.name: g.ravel() for v, g in zip(variables, grids, strict=True)})
    for axis, variable in enumerate(variables):
        for name, direction in (("throughput", variable.throughput), ("latency", variable.latency)):
            if direction == "none":
                continue
            lines = np.moveaxis(getattr(performance, name).reshape(grids[0].shape), axis, -1)
            rising = lines if direction == "rises" else lines[..., ::-1]
            highest = np.maximum.accumulate(rising, axis=-1)
            worst = float((rising / highest).min())
            if worst < 1 - DIRECTION_TOLERANCE:
                broken.append(f"{name} {direction} with {variable.name}: broken by {1 - worst:.1%}")
    return broken


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("model", "cluster"), DEVICES)
def test_directions_hold_as_declared(kind: str, workload: str, model: str, cluster: str) -> None:
    assert broken_directions(one_lane(model, cluster, workload), kind, POLICIES[kind].variables) == []


def test_a_wrong_direction_is_caught() -> None:
    encode_batch, decode_iterations = RraSettings.variables
    model = one_lane("opt-13b", "a40x4", "summarization")
    swapped = (encode_batch, decode_iterations._replace(throughput="rises"))
    (message,) = broken_directions(model, "rra", swapped)
    assert message.startswith("throughput rises with decode_iterations: broken by")
    assert len(broken_directions(model, "rra", (encode_batch._replace(latency="falls"), decode_iterations))) == 1


def errors_of(kind: str) -> list[tuple[float, float, str]]:
    """Relative errors of predicted throughput and latency, and which case they are of."""
    rng = np.random.default_rng(0)
    errors: list[tuple[float, float, str]] = []
    while len(errors) < NUM_CASES:
        device, workload = DEVICES[rng.integers(len(DEVICES))], WORKLOADS[rng.integers(len(WORKLOADS))]
        settings, model = random_settings(kind, rng), one_lane(*device, workload)
        predicted = estimate(model, settings)
        if predicted["peak_requests"] > LARGEST_BATCH:
            continue
        num_requests = int(np.clip(20 * predicted["peak_requests"], 300, 1500))
        measured = simulate(model, problem(*device, workload).workload, settings, num_requests, rng)
        latency_s = measured.request_latency_s if alone_in_engine(settings) else measured.latency_s
        errors.append(
            (
                abs(predicted["throughput"] / measured.throughput_rps - 1),
                abs(predicted["latency"] / latency_s - 1),
                f"{settings!r} of {device} on {workload}",
            )
        )
    return errors


def alone_in_engine(settings: PolicySettings) -> bool:
    """`latency_s` extends a stay over the steps that follow it.

    With one slot those encode the slot's next requests, which a longer stay would have kept out: there only the
    requests themselves show what a stay costs. (Static batches: see Measured.)
    """
    return getattr(settings, "max_batch", None) == 1


@pytest.mark.parametrize(("token_budget", "max_batch"), [(128, 8), (512, 8), (1024, 16)])
def test_slots_that_hardly_decode_leave_no_step_without_a_prompt(token_budget: int, max_batch: int) -> None:
    """Most outputs are one token, as azure-code's: nearly all slots wait for their prompt's turn."""
    subject = problem("opt-13b", "a40x4", "chat-short")
    output = Histogram(lengths=(1, 2, 4, 16), probabilities=(0.7, 0.15, 0.1, 0.05))
    workload = Workload(name="short", input=subject.workload.input, output=output)
    model = OneLaneModel(LaneCost(subject.model, subject.profile, whole(subject.model)), Lengths(workload))
    settings = ChunkedSettings(token_budget=token_budget, max_batch=max_batch)
    predicted = estimate(model, settings)
    measured = simulate(model, workload, settings, 1500, np.random.default_rng(0))
    assert predicted["throughput"] == pytest.approx(measured.throughput_rps, rel=0.05)
    assert predicted["latency"] == pytest.approx(measured.latency_s, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("kind", few(KINDS))
def test_closed_form_agrees_with_the_simulated_engine(kind: str) -> None:
    errors = errors_of(kind)
    throughput, latency = np.asarray([error[:2] for error in errors]).T
    assert throughput.max() <= 0.05, errors[int(throughput.argmax())]
    assert latency.max() <= 0.08, errors[int(latency.argmax())]
    assert np.median(throughput) <= 0.02
    assert np.median(latency) <= 0.03


@pytest.mark.parametrize(("encode_batch", "decode_iterations"), few([(1, 40), (2, 300), (6, 300), (20, 100)]))
def test_phases_that_leave_no_request_in_decode(encode_batch: int, decode_iterations: int) -> None:
    """Half of azure-code's outputs have at most 13 tokens, the quantile's has 250: a request that outlasts all others
    meets no phase that ends early."""
    device, settings = (
        ("llama-3.1-8b", "h200x1"),
        RraSettings(encode_batch=encode_batch, decode_iterations=decode_iterations),
    )
    model, rng = one_lane(*device, "azure-code"), np.random.default_rng(0)
    predicted = estimate(model, settings)
    measured = simulate(model, problem(*device, "azure-code").workload, settings, 1000, rng)
    assert predicted["throughput"] == pytest.approx(measured.throughput_rps, rel=0.05)
    assert predicted["latency"] == pytest.approx(measured.latency_s, rel=0.06)
