"""Run the load of a benchmark: a finite number of requests that start together, at a rate, or as clients allow.

The figures include the start, when all clients send at once, and the end, when the batch runs empty. A steady closed
loop (`run_simulation` with `clients`) has neither."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from xgpt.core.policies import Rule
from xgpt.core.schema import PlanDraft, Profile, Workload
from xgpt.core.workload import ArrivalProcess, Floats, TraceLengths, histogram_of
from xsimulator.clock import Span
from xsimulator.run import Simulated, check_fits, read_log, run_requests, times_of
from xsimulator.shares import share_of_replica

LEAST_CV = 1e-3


class Benchmark(NamedTuple):
    """What a benchmark sends.

    Attributes:
        name: the benchmark, for messages.
        requests: in the order in which they are sent. Without times, they are sent as soon as `clients` allows.
        clients: largest number of outstanding requests. A further one is sent when one has ended. None: no limit."""

    name: str
    requests: TraceLengths
    clients: int | None = None


def variation_of(shape: float) -> float:
    """Return the coefficient of variation of gamma-distributed gaps of this shape, vLLM's burstiness. An infinite shape
    means equal gaps."""
    return max(LEAST_CV, shape**-0.5)


def times_at(rate_per_s: float, variation: float, count: int, rng: np.random.Generator) -> Floats:
    """Return the times at which a benchmark sends its requests. Their mean rate is exact, as in vLLM's benchmark.
    # [count]"""
    drawn = ArrivalProcess.at(rate_per_s, variation).times(count, rng)
    return drawn * (count / rate_per_s / drawn[-1])


def simulate_benchmark(plan: PlanDraft, profile: Profile, benchmark: Benchmark, rule: Rule | None = None) -> Simulated:
    """Run all requests of a benchmark on one replica of a plan, which gets its share of requests and clients.

    Raises:
        InputError: a request can never fit into the plan's K/V memory."""
    requests = benchmark.requests
    lengths = Workload(name=benchmark.name, input=histogram_of(requests.input), output=histogram_of(requests.output))
    check_fits(plan, lengths)
    requests = share_of_replica(requests if plan.shares_prompts else requests._replace(prefixes=None), plan)
    clients = None if benchmark.clients is None else ceil(benchmark.clients / plan.replicas)
    count, spans = len(requests.input), list[Span]()
    log = run_requests(plan, profile, requests, lengths.output.lengths[-1], spans.append, clients=clients, rule=rule)
    measured = read_log(plan, lengths, log, count, saturated=False)
    times = times_of(plan, log, count, requests.output).later(plan.request_path_s)
    return Simulated(plan, measured.of_replicas(plan.replicas), tuple(log), tuple(spans), times)
