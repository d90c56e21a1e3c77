"""Requests that arrive at a rate: closed form against what is known exactly, and against the simulated engine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.scenarios import problem
from xgpt.core.schema import Constraint, Goal, Histogram, Workload
from xscheduler.arrival_rate import curves_of
from xscheduler.objectives.arrivals import Arrivals
from xscheduler.schedule import Scheduler
from xsimulator.capacity import capacity
from xsimulator.forecast import FORECASTS, Performance
from xsimulator.lengths import Lengths
from xsimulator.queueing import LoadCurves, highest_rates

ONE_LENGTH = Histogram(lengths=(8,), probabilities=(1.0,))


def one_place(seconds: float, bound_s: float, quantile: float = 0.99) -> LoadCurves:
    """One request at a time, the same time for each, admitted at once."""
    ones = np.ones(2)
    rest = dict.fromkeys(Performance.__dataclass_fields__, ones)
    inside = {
        "throughput": ones / seconds,
        "ttft": ones * seconds,
        "tpot": 0 * ones,
        "gate": 1e-9 * ones,
        "prompt_s": ones * seconds,
    }
    lengths = Lengths(Workload(name="one", input=ONE_LENGTH, output=ONE_LENGTH))
    goal = Goal(quantile, latency_bound_s=bound_s)
    return LoadCurves(FORECASTS["orca"].stations, Performance(**(rest | inside)), lengths, goal, num_loads=2)


def late(queue: LoadCurves, rate: float) -> float:
    return float(queue.late(queue.points(np.asarray([0]), np.asarray([1])), np.asarray([rate]))[0])


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
def test_one_place_waits_as_known(load: float) -> None:
    """A mean wait of load / (1 - load) / 2 services (Pollaczek, Khinchine); the diffusion's error vanishes as the load
    goes to 1.
    """
    seconds = 2.0
    bounds = np.linspace(seconds, seconds + 8 * seconds / (1 - load), 400)
    mean = np.trapezoid([late(one_place(seconds, bound), load / seconds) for bound in bounds], bounds)
    assert mean == pytest.approx(seconds * load / (1 - load) / 2, rel=1.5 * (1 - load))


def test_beyond_saturation_nothing_is_in_time() -> None:
    assert late(one_place(2.0, 100.0), 0.6) == 1
    assert highest_rates([one_place(2.0, 1e6)])[0, -1] == pytest.approx(0.5, rel=0.01)
    assert highest_rates([one_place(2.0, 1.9)]).max() == 0


def test_only_the_best_rate_is_exact_if_only_it_is_asked_for() -> None:
    asked = problem("llama-3.1-8b", "h200x1", "azure-conv", 8.0)
    space = Scheduler(asked).candidates.spaces("chunked")[0]
    largest = {"max_batch": np.asarray([8, 64, 256]), "token_budget": np.asarray([256, 1024, 4096])}
    performance = space.evaluate(curves_of(largest, space.forecast)).performance
    (goal,) = asked.constraint.goals
    curves = [LoadCurves(space.forecast.stations, performance, space.lengths, goal)]
    every, best = (highest_rates(curves, only_best=only) for only in (False, True))
    assert best.max() == every.max() > 0
    assert best.argmax() == every.argmax()
    assert (best <= every).all()
    assert (best < every).any()
    points = curves[0].points(*np.nonzero(every))
    for factor in (0.99, 1.01):
        late = curves[0].late(points, factor * every[every > 0])
        assert ((late <= 1 - goal.quantile) == curves[0].keeps(points, factor * every[every > 0])).all()


def test_a_looser_bound_is_kept_at_a_higher_rate() -> None:
    rates = [float(highest_rates([one_place(2.0, bound)])[0, -1]) for bound in (2.5, 4.0, 8.0, 16.0, 64.0)]
    assert rates == sorted(rates) and rates[0] < 0.1 * rates[-1]


@pytest.mark.parametrize("kind", ["rra", "orca", "chunked", "static"])
@pytest.mark.parametrize(
    "case", [("opt-13b", "a40x4", "summarization", 8.0), ("llama-3.1-8b", "h200x1", "azure-conv", 8.0)]
)
def test_rates_agree_with_the_simulated_engine(case: tuple[str, str, str, float], kind: str) -> None:
    asked = problem(*case)
    (plan, predicted), *_ = Arrivals(Scheduler(asked)).of_kind(kind, 1)
    found = capacity(plan, asked.profile, predicted, edges=False)
    assert found is not None
    assert predicted == pytest.approx(found.rate_per_s, rel=0.3 if kind == "static" else 0.1)


@pytest.mark.parametrize(
    "case",
    [
        ("llama-3.1-8b", "h100x8", "azure-conv", 0.064),
        ("llama-3.1-8b", "h100x8", "azure-code", 0.145),
        ("qwen3-14b", "a40x4", "chat-short", 0.25),
    ],
)
def test_prompts_wait_only_while_the_encode_lane_is_busy(case: tuple[str, str, str, float]) -> None:
    model, cluster, workload, ttft_s = case
    asked = problem(model, cluster, workload)
    asked = asked.under(Constraint(ttft_s=ttft_s))
    (plan, predicted), *_ = Arrivals(Scheduler(asked)).of_kind("waa-m", 1)
    found = capacity(plan, asked.profile, predicted, edges=False)
    assert found is not None
    assert predicted == pytest.approx(found.rate_per_s, rel=0.3)


def test_other_bounds_cost_rate() -> None:
    """The time to the first token, and that between tokens, are bounds of the same kind."""
    subject = problem("llama-3.1-8b", "h200x1", "azure-conv", 8.0)

    def rate(**bounds: float) -> float:
        constraint = subject.constraint.model_copy(update=bounds)
        plans = Arrivals(Scheduler(subject).under(constraint)).of_kind("chunked", 1)
        return plans[0][1] if plans else 0.0

    free, ttft, tpot = rate(), rate(ttft_s=0.6), rate(tpot_s=0.008)
    assert 0 < ttft < free
    assert 0 < tpot < free
    assert rate(ttft_s=1e-4) == 0
