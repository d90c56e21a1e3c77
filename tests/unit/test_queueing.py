"""Whole times under load: closed form against what is known exactly, and against the simulated engine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.scenarios import BLOCK_SIZE, one_lane, problem
from xgpt.policies import OneLane, Pool, lane_settings
from xgpt.schema import ChunkedSettings, Histogram, OrcaSettings, RraSettings, StaticSettings, Workload
from xgpt.schema.step_log import Arrival, StepRecord
from xgpt.workload import poisson_arrivals, sample
from xscheduler.space import Settings
from xsimulator.analytic import Performance
from xsimulator.clock import LaneClock
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.lengths import Lengths
from xsimulator.queueing import NUM_LOADS, Array, Queue, verified_max_rate, whole_times

ONE_LENGTH = Histogram(lengths=(8,), probabilities=(1.0,))
MODEL = ("opt-125m", "v100x1", "summarization")


def one_place(seconds: float) -> Queue:
    """One request at a time, the same time for each, admitted at once."""

    def evaluate(kind: str, **columns: Array) -> Performance:
        ones = np.ones(NUM_LOADS)
        rest = dict.fromkeys(Performance.__dataclass_fields__, ones)
        inside = {"throughput": ones / seconds, "ttft": ones * seconds, "tpot": 0 * ones, "cycle": 1e-9 * ones}
        return Performance(**(rest | inside))

    lengths = Lengths(Workload(name="one", input=ONE_LENGTH, output=ONE_LENGTH))
    return Queue(evaluate, lengths, "orca", max_batch=1)


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
def test_one_place_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    """A mean wait of load / (1 - load) / 2 services; the diffusion's error vanishes as load goes to 1."""
    loaded = one_place(2.0).at(load / 2.0, 0.99)
    assert loaded.utilisation[0] == pytest.approx(load)
    assert loaded.wait[0] == pytest.approx(2.0 * load / (1 - load) / 2, rel=1.5 * (1 - load))


def test_beyond_saturation_nobody_is_served_in_time() -> None:
    loaded = one_place(2.0).at([0.6], 0.99)
    assert np.isinf([loaded.whole[0], loaded.wait[0], loaded.ttft[0]]).all()


def test_bursts_wait_longer_and_spread() -> None:
    queue = one_place(2.0)
    waits = [queue.at(0.4, 0.99, cv).whole[0] for cv in (0.5, 1.0, 2.0, 4.0)]
    assert waits == sorted(waits)


def settings_queue(settings: Settings) -> Queue:
    model = one_lane(*MODEL)
    columns = {variable.name: getattr(settings, variable.name) for variable in settings.variables}
    return Queue(model.evaluate, model.lengths, settings.kind, **columns)


ALL = (
    RraSettings(encode_batch=8, decode_iterations=8),
    OrcaSettings(max_batch=24),
    ChunkedSettings(token_budget=256, max_batch=32),
    StaticSettings(batch=16),
)


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings.kind)
def test_whole_times_agree_with_the_simulated_engine(settings: Settings) -> None:
    model, workload, n = one_lane(*MODEL), problem(*MODEL).workload, 2500
    queue = settings_queue(settings)
    estimate = model.estimate(settings)
    rate = 0.6 * float(queue.saturation[0])
    rng = np.random.default_rng(5)
    inputs, outputs = sample(workload, n, rng, stratified=False)
    arrivals = (1e9 * poisson_arrivals(rate, n, rng)).astype(int)
    pool = Pool(10**9, BLOCK_SIZE, hold_finished=settings.kind == "static")
    schedule = OneLane(lane_settings(settings, estimate["encode_tokens"], estimate["decode_batch"]), pool)
    most = model.lengths.max_output
    columns = zip(inputs.tolist(), outputs.tolist(), arrivals.tolist(), strict=True)
    requests = [SimulatedRequest(i, a, most, b, t) for i, (a, b, t) in enumerate(columns)]
    log = SimulatedEngine(schedule, LaneClock(model.lane, schedule), requests).run()
    simulated = np.quantile(whole_times(log, skip_requests=100), 0.95)
    assert queue.at(rate, 0.95).whole[0] == pytest.approx(simulated, rel=0.25)


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: settings.kind)
def test_the_highest_rate_is_where_the_bound_is_met(settings: Settings) -> None:
    queue = settings_queue(settings)
    saturation = float(queue.saturation[0])
    bound = float(queue.at(0.7 * saturation, 0.99).whole[0])
    assert queue.max_rate(bound, 0.99)[0] == pytest.approx(0.7 * saturation, rel=0.02)
    assert queue.max_rate(1e-6, 0.99)[0] == 0
    assert queue.max_rate(1e6, 0.99)[0] == pytest.approx(saturation, rel=0.01)
    assert queue.max_rate(bound, 0.99, cv=3.0)[0] < 0.7 * saturation


def test_candidates_do_not_depend_on_their_neighbours() -> None:
    model = one_lane(*MODEL)
    together = Queue(model.evaluate, model.lengths, "orca", max_batch=[1, 7, 200])
    rates = 0.6 * together.saturation
    alone = [
        Queue(model.evaluate, model.lengths, "orca", max_batch=b).at(rates[i], 0.9).whole[0]
        for i, b in enumerate([1, 7, 200])
    ]
    assert together.at(rates, 0.9).whole == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("predicted", [0.0, 0.1, 3.9, 4.1, 8.0, 50.0])
def test_verification_finds_the_rate_from_any_prediction(predicted: float) -> None:
    tried = []

    def whole(rate: float) -> float:
        tried.append(rate)
        return 1 / (10 - rate)

    assert verified_max_rate(whole, predicted, 10.0, bound_s=1 / 6) == pytest.approx(4.0, rel=0.03)
    assert len(tried) < 20
    assert verified_max_rate(lambda rate: 1.0, predicted, 10.0, bound_s=0.5) == 0


def test_whole_times_count_from_arrival() -> None:
    log = [
        StepRecord(100, 200, ((0, 0, 5),), (), (), (Arrival(0, 5, 9, 30), Arrival(1, 5, 9, 90)), ()),
        StepRecord(200, 400, ((1, 0, 5),), (0,), (0,), (), ()),
        StepRecord(400, 500, (), (1,), (1,), (), ()),
    ]
    assert whole_times(log) == pytest.approx([370e-9, 410e-9])
