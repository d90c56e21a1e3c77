"""Run the load of a benchmark: a finite number of requests that start together, at a rate, or as clients allow.

The figures include the start, when all clients send at once, and the end, when the batch runs empty. A steady closed
loop (`run_simulation` with `clients`) has neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from xgpt.core.policies import LaneSettings, Rule
from xgpt.core.schema import PlanDraft, Profile, Workload
from xgpt.core.workload import ArrivalProcess, Floats, TraceLengths, histogram_of
from xsimulator.clock import Span
from xsimulator.costs.step_cost import LaneCost
from xsimulator.counts.arrivals import Kv, Stream
from xsimulator.measures import RequestTimes
from xsimulator.run import Simulated, check_fits, read_log, run_requests, times_of
from xsimulator.shares import share_of_replica

LEAST_CV = 1e-3
NEVER_NS = 2**62


class Benchmark(NamedTuple):
    """What a benchmark sends.

    Attributes:
        name: the benchmark, for messages.
        requests: in the order in which they are sent. Without times, they are sent as soon as `clients` allows.
        clients: largest number of outstanding requests. A further one is sent when one has ended. None: no limit.
    """

    name: str
    requests: TraceLengths
    clients: int | None = None


def variation_of(shape: float) -> float:
    """Return the coefficient of variation of gamma-distributed gaps of this shape, vLLM's burstiness. An infinite shape
    means equal gaps.
    """
    return max(LEAST_CV, shape**-0.5)


def times_at(rate_per_s: float, variation: float, count: int, rng: np.random.Generator) -> Floats:
    """Return the times at which a benchmark sends its requests. Their mean rate is exact, as in vLLM's benchmark.
    # [count]
    """
    drawn = ArrivalProcess.at(rate_per_s, variation).times(count, rng)
    return drawn * (count / rate_per_s / drawn[-1])


def simulate_benchmark(plan: PlanDraft, profile: Profile, benchmark: Benchmark, rule: Rule | None = None) -> Simulated:
    """Run all requests of a benchmark on one replica of a plan, which gets its share of requests and clients.

    Raises:
        InputError: a request can never fit into the plan's K/V memory.
    """
    requests = benchmark.requests
    lengths = Workload(name=benchmark.name, input=histogram_of(requests.input), output=histogram_of(requests.output))
    check_fits(plan, lengths)
    requests = share_of_replica(requests if plan.shares_prompts else requests._replace(prefixes=None), plan)
    clients = None if benchmark.clients is None else ceil(benchmark.clients / plan.replicas)
    count, spans = len(requests.input), list[Span]()
    log = run_requests(plan, profile, requests, requests.output, spans.append, clients=clients, rule=rule)
    measured = read_log(plan, lengths, log, count, saturated=False)
    times = times_of(plan, log, count, requests.output).later(plan.request_path_s)
    return Simulated(plan, measured.of_replicas(plan.replicas), tuple(log), tuple(spans), times)


def closed_loop(
    lane: LaneSettings,
    cost: LaneCost,
    kv: Kv,
    lengths: tuple[Sequence[int], Sequence[int]],
    clients: int,
    path_s: float,
    cached: Sequence[int] = (),
) -> tuple[RequestTimes, float]:
    """Return the times of the requests of a benchmark whose clients start together, and when the last request ends, in
    seconds. It equals `simulate_benchmark` of a plan with these settings, without a plan and by counts.

    Args:
        lengths: input and output lengths. # [requests] each
        path_s: seconds of a request outside of the engine's loop.
        cached: cached tokens of each prompt. Empty means that nothing is cached. # [requests]
    """
    from xsimulator.counts.one_lane_arrivals import OneLaneRun  # late: importing numba takes half a second

    inputs, outputs = lengths
    arrivals = [0] * min(clients, len(inputs)) + [NEVER_NS] * max(len(inputs) - clients, 0)
    stream = Stream(inputs, outputs, outputs, arrivals, cached)
    run = OneLaneRun(lane, cost, kv, stream, clients=clients, path_ns=round(1e9 * path_s))
    run.run()
    arrived, first, end = (each.astype(float) for each in (run.state.requests["arrival_ns"], run.first_ns, run.end_ns))
    times = RequestTimes.of_ns(arrived, first, end, outputs)
    return times.later(path_s), float(run.end_ns.max()) / 1e9
