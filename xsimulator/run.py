"""Run a plan on the simulated engine, and measure its throughput and latencies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, islice
from math import ceil

import numpy as np

from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.load import NO_GROWTH, Growth, KeptByWindow, LogLoad
from xgpt.core.policies import Rule, Schedule
from xgpt.core.schema import JointLengths, PlanDraft, Profile, Workload
from xgpt.core.schema.step_log import Account, StepRecord
from xgpt.core.trace_blocks import TracePrefixes
from xgpt.core.turns import Chains, TraceSessions
from xgpt.core.workload import ArrivalProcess, Ints, TraceLengths, quantile, sample
from xgpt.resolve import load_trace, workload_of
from xsimulator.clock import LaneClock, OnSpan, Span, TwoLaneClock
from xsimulator.costs.step_cost import lanes_of
from xsimulator.counts.arrivals import KeptBounds, Run, Stream
from xsimulator.events import SimulatedClock, SimulatedEngine, SimulatedRequest
from xsimulator.forecast import FORECASTS
from xsimulator.lengths import Lengths, decoded
from xsimulator.measures import Measured, RequestTimes, measure, request_times
from xsimulator.request_law import RequestLaw, SeenSteps, drawn_law, logged_law, request_law
from xsimulator.shares import share_of_replica
from xsimulator.timeline import Timeline, chrome_trace, idle_shares

FULL = 0.95
"""A batch is in the steady state once this share of the mean number of requests decode."""
GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio. The fractional parts of its multiples are evenly spread."""
FROM_ADMISSION = ("latency_s", "request_latency_s", "ttft_s")


def warm_up_requests(plan: PlanDraft) -> int:
    """Return the number of requests that must end before a replica's batch is in its steady state.

    An engine that starts empty has too few long requests at first. Many short requests end before it has the steady
    number of long ones.
    """
    estimate, decodes = plan.estimate, plan.workload.output.mean - 1
    # If a policy refills only an empty batch, most requests may have ended with their first token.
    each_iteration = min(estimate.decode_batch / decodes, estimate.encode_batch) if decodes else 0.0
    ended = each_iteration * (_iterations_until_full(plan.workload) - FULL * decodes)
    return ceil(1.5 * max(estimate.decode_batch, ended) + estimate.encode_batch)


def _iterations_until_full(workload: Workload) -> float:
    decodes, probabilities = np.asarray(workload.output.lengths) - 1.0, np.asarray(workload.output.probabilities)
    # After n iterations the batch has E[min(D, n)] / E[D] of its steady size, which is linear between two lengths.
    after = np.concatenate([[0.0], decodes])
    there = np.minimum(decodes, after[:, None]) @ probabilities
    return float(np.interp(FULL * there[-1], there, after))


def outstanding_requests(plan: PlanDraft) -> int:
    """Return the number of requests that keep a replica saturated: as many as may run, and some that wait."""
    running, encoding = max(1.5 * plan.estimate.decode_batch, _most_running(plan)), 3 * plan.estimate.encode_batch
    return ceil(min(running, _num_blocks(plan)) + min(encoding, _num_blocks(plan))) + 8


def _most_running(plan: PlanDraft) -> int:
    most: int = getattr(plan.policy, FORECASTS[plan.policy.kind].load)
    return min(most, _num_blocks(plan))


def _num_blocks(plan: PlanDraft) -> int:
    return max(stage.kv_blocks for stage in plan.stages)


def requests_to_send(plan: PlanDraft, num_requests: int, *, saturated: bool) -> int:
    """Return the number of requests to replay on one replica so that `num_requests` can be measured.

    A saturated run starts with a warm-up. The measured window closes at a step that encodes, so some requests must
    follow the measured ones.
    """
    return num_requests + outstanding_requests(plan) + (warm_up_requests(plan) if saturated else 0)


def requests_to_end(plan: PlanDraft, num_requests: int) -> int:
    """Return the number of requests that must end before `num_requests` of a saturated run can be measured.

    If requests are admitted together and are equally long, all running requests end together.
    """
    together = max(_most_running(plan), plan.estimate.encode_batch)
    return num_requests + plan.replicas * (warm_up_requests(plan) + ceil(2 * together) + 2)


@dataclass(frozen=True)
class Simulated:
    """A run of one replica of a plan on the simulated engine or, if a log was replayed, of all.

    Attributes:
        steps, spans: those of the first replica.
        times: times of each request from its arrival. None means that the run was at saturation.
        windows: shares of requests that kept the bounds in each window of `load`, the part of a log that was replayed.
    """

    plan: PlanDraft
    measured: Measured
    steps: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    times: RequestTimes | None = None
    kept: dict[str, float] = field(default_factory=dict)
    windows: KeptByWindow | None = None
    load: LogLoad | None = None

    @property
    def figures(self) -> dict[str, float]:
        found = {name: value for name, value in asdict(self.measured).items() if name != "latencies_s"}
        found = {name: value for name, value in found.items() if not np.isnan(value)}
        if idle := idle_shares(self.spans):
            found["idle_share"] = sum(idle.values()) / len(idle)
        if any(arrival.chain for record in self.steps for arrival in record.arrivals):
            found["reused_share"] = reused_share(self.steps)
        if self.times is not None:
            found = {name: value for name, value in found.items() if name not in FROM_ADMISSION} | self.times.figures
            classes = self.plan.constraint.classes
            if self.kept:
                found["goodput"] = sum(each.share * self.kept[each.name] for each in classes)
            elif self.plan.constraint.bounds_latency:
                found["goodput"] = self.times.goodput(self.plan.constraint)
        return found

    def requests_csv(self) -> str:
        """Return a replayed log's requests as CSV, in order of arrival, with their times and whether these are within
        the plan's bounds.

        Raises:
            InputError: no log was replayed.
        """
        if self.load is None or self.times is None or self.load.requests.timestamp_s is None:
            raise InputError("output", None, "only a replay of a trace has requests of its own: give `own_times`")
        requests, times = self.load.requests, self.times
        is_kept = times.excess(self.plan.constraint.all_bounds) <= 1
        columns = (requests.timestamp_s, requests.input, requests.output, times.ttft_s, times.tpot_s, times.whole_s)
        rows = map(
            "{:.6f},{},{},{:.6f},{:.6f},{:.6f},{:d}".format,
            *(np.asarray(column).tolist() for column in (*columns, is_kept)),
        )
        return "\n".join(("arrival_s,input_tokens,output_tokens,ttft_s,tpot_s,latency_s,is_kept", *rows, ""))

    def chrome_trace(self) -> str:
        return chrome_trace(Timeline(f"{self.plan.policy.kind}, simulated", self.steps, self.spans))


def run_simulation(
    plan: PlanDraft,
    profile: Profile,
    workload: str | Workload | None = None,
    num_requests: int = 2000,
    arrivals: ArrivalProcess | None = None,
    seed: int = 0,
    *,
    growth: Growth = NO_GROWTH,
    clients: int | None = None,
    rule: Rule | None = None,
) -> Simulated:
    """Run requests of a workload on the simulated engine.

    Args:
        workload: a name, a path, or histograms. None means the plan's workload.
        arrivals: the arrival process. None means that requests are always waiting.
        clients: number of clients that send to all replicas in a closed loop. None means no closed loop.

    Raises:
        InputError: the workload does not exist, or one of its requests can never fit into the plan's K/V memory.
    """
    lengths = plan.workload if workload is None else workload_of(workload, plan.model, growth)
    rng = np.random.default_rng(seed)
    if clients is not None:
        return _closed_loop(plan, profile, lengths, num_requests, clients, rng, rule)
    spans: list[Span] = []
    own_trace = load_trace(workload, plan.model) if isinstance(workload, str) and plan.shares_prompts else None
    if own_trace is not None and own_trace.prefixes is not None:
        requests = _first_of(own_trace, plan, num_requests, rng, arrivals)
    else:
        requests = _drawn(plan, lengths, num_requests, rng, arrivals)
    measured, steps = run_replica(plan, profile, lengths, requests, num_requests, spans.append, rule)
    check_known(plan, profile, steps)
    times = None
    if arrivals is not None:
        times = times_of(plan, steps, num_requests, requests.output).later(plan.request_path_s)
    kept = {} if times is None else kept_by_class(plan, steps, num_requests)
    return Simulated(plan, measured, tuple(steps), tuple(spans), times, kept)


def check_known(plan: PlanDraft, profile: Profile, steps: Sequence[StepRecord]) -> None:
    """Raise InputError if a step decodes more requests than the profile has times for. The plan of what runs now may
    allow them, and then warns of extrapolated times.
    """
    largest = max((len(step.decode) for step in steps), default=0)
    if largest > max(profile.largest_batch, getattr(plan.policy, "most_running", 0)):
        raise InputError(
            "plan",
            f"a step that decodes {largest} requests",
            f"the times of the profile end at {profile.largest_batch}: lower the plan's batch, or profile larger ones",
        )


def _closed_loop(
    plan: PlanDraft,
    profile: Profile,
    workload: Workload,
    num_requests: int,
    clients: int,
    rng: np.random.Generator,
    rule: Rule | None,
) -> Simulated:
    """Run a closed loop on one replica. Each client sends its next request once its previous request has ended.

    The first request of each client is warm-up. As many further requests follow the measured ones.
    """
    check_fits(plan, workload)
    own_clients, spans = round(clients / plan.replicas), list[Span]()
    inputs, outputs = sample(workload, num_requests + 3 * own_clients + 1, rng)
    requests, longest = TraceLengths(inputs, outputs, None), workload.output.lengths[-1]
    log = run_requests(plan, profile, requests, longest, spans.append, clients=own_clients, rule=rule)
    measured = read_log(plan, workload, log, num_requests, saturated=True, skipped=own_clients)
    times = times_of(plan, log, num_requests + own_clients, outputs).later(plan.request_path_s)
    times = replace(
        times, ttft_s=times.ttft_s[own_clients:], tpot_s=times.tpot_s[own_clients:], whole_s=times.whole_s[own_clients:]
    )
    return Simulated(plan, measured.of_replicas(plan.replicas), tuple(log), tuple(spans), times)


def simulate(
    plan: PlanDraft,
    profile: Profile,
    workload: Workload,
    num_requests: int,
    rng: np.random.Generator,
    arrivals: ArrivalProcess | None = None,
    on_span: OnSpan | None = None,
) -> tuple[Measured, list[StepRecord]]:
    """Return the figures and steps of a simulated run of sampled requests. They arrive over time, or all at the start.

    One replica is simulated with its share of the arrivals, and its throughput is multiplied by the number of replicas.
    """
    requests = _drawn(plan, workload, num_requests, rng, arrivals)
    return run_replica(plan, profile, workload, requests, num_requests, on_span)


def _drawn(
    plan: PlanDraft, workload: Workload, num_requests: int, rng: np.random.Generator, arrivals: ArrivalProcess | None
) -> TraceLengths:
    total = requests_to_send(plan, num_requests, saturated=arrivals is None)
    inputs, outputs = sample(workload, total, rng)
    times = None if arrivals is None else arrivals.times(total, rng, 1 / plan.replicas)
    return TraceLengths(inputs, outputs, times)


def _first_of(
    trace: TraceLengths, plan: PlanDraft, num_requests: int, rng: np.random.Generator, arrivals: ArrivalProcess | None
) -> TraceLengths:
    total = requests_to_send(plan, num_requests, saturated=arrivals is None)
    replica_trace = share_of_replica(trace, plan)
    if len(replica_trace.input) < total:
        raise InputError(
            "requests",
            num_requests,
            f"with those before and after, {total} requests a replica are needed, but the trace has "
            f"{len(replica_trace.input)}: ask for fewer",
        )
    times = None if arrivals is None else arrivals.times(total, rng, 1 / plan.replicas)
    return TraceLengths(replica_trace.input[:total], replica_trace.output[:total], times, replica_trace.prefixes)


def run_replica(
    plan: PlanDraft,
    profile: Profile,
    workload: Workload,
    requests: TraceLengths,
    num_requests: int,
    on_span: OnSpan | None = None,
    rule: Rule | None = None,
) -> tuple[Measured, list[StepRecord]]:
    """Return the figures and steps of a simulated run of one replica's requests. Requests without times all arrive at
    the start. The throughput is multiplied by the number of replicas.
    """
    check_fits(plan, workload)
    log = run_requests(plan, profile, requests, workload.output.lengths[-1], on_span, rule=rule)
    measured = read_log(plan, workload, log, num_requests, saturated=requests.timestamp_s is None)
    return measured.of_replicas(plan.replicas), log


def request_latencies(
    plan: PlanDraft,
    profile: Profile,
    workload: Workload,
    num_requests: int,
    rng: np.random.Generator,
    *,
    at_once: bool = False,
) -> RequestLaw:
    """Return the distribution of all requests' latencies at saturation, from admission to the last token.

    If requests enter one by one, the first requests begin in the middle of their outputs, as in a running engine. If
    they began at the start of their outputs, they would end nearly together, and so would later requests for a long
    time.
    """
    check_fits(plan, workload)
    lengths = Lengths(workload)
    # Requests are counted when they are admitted, not when they end.
    skipped = warm_up_requests(plan) + ceil(plan.estimate.decode_batch)
    # Requests must keep entering while the last measured request decodes, since a shrinking batch is faster.
    behind = ceil(plan.estimate.decode_batch * lengths.max_output / lengths.mean_output) + outstanding_requests(plan)
    total = skipped + num_requests + behind
    inputs, outputs = sample(workload, total, rng)
    longest = np.full(total, lengths.max_output)
    if not at_once and not FORECASTS[plan.policy.kind].stations.frees_together:
        first = min(round(plan.estimate.decode_batch), total)
        generated, left = lengths.in_the_middle(first, rng)
        inputs[:first] += generated
        outputs[:first], longest[:first] = left, longest[:first] - generated
    if is_drawn(plan) and (run := _counted_at_once(plan, profile, inputs, outputs, longest)) is not None:
        return drawn_law(run, skipped, num_requests)
    seen = seen_at_once(plan, profile, inputs, outputs, longest)
    if is_drawn(plan):
        return logged_law(seen, skipped, num_requests)
    return request_law(seen, lengths, skipped, num_requests, encode_emits=encode_emits(plan))


def seen_at_once(
    plan: PlanDraft, profile: Profile, inputs: Ints, outputs: Ints, longest: Ints, needed: int | None = None
) -> SeenSteps:
    """Return the steps of one replica if all requests arrive at the start and each step takes its mean time."""
    if (run := _counted_at_once(plan, profile, inputs, outputs, longest, is_logged=True)) is None:
        return SeenSteps.of_log(run_requests(plan, profile.of_means, TraceLengths(inputs, outputs, None), longest))
    run.run(KeptBounds((), 0, len(inputs) if needed is None else needed))
    return SeenSteps.of_run(run)


def _counted_at_once(
    plan: PlanDraft, profile: Profile, inputs: Ints, outputs: Ints, longest: Ints, *, is_logged: bool = False
) -> Run | None:
    if plan.estimate.reuse is not None:
        return None
    return counted(plan, profile, Stream(inputs, outputs, longest, np.zeros(len(inputs), int)), is_logged=is_logged)


def counted(
    plan: PlanDraft, profile: Profile, stream: Stream, prefixes: TracePrefixes | None = None, *, is_logged: bool = False
) -> Run | None:
    from xsimulator.counts.counted_run import counted_run  # imported here, since importing numba takes half a second

    return counted_run(plan, lanes_of(plan, profile), stream, prefixes, is_logged=is_logged)


def is_drawn(plan: PlanDraft) -> bool:
    """Return whether latencies can be measured only on requests with drawn lengths (see `xsimulator.request_law`)."""
    return FORECASTS[plan.policy.kind].stations.admits_each_step


def joint_lengths(
    plan: PlanDraft, profile: Profile, trace: TraceLengths, num_requests: int = 500
) -> JointLengths | None:
    """Return the error from treating input and output lengths as independent, or None if lengths do not vary."""
    if min(np.ptp(trace.input), np.ptp(trace.output)) == 0:
        return None
    rng = np.random.default_rng(0)
    total = requests_to_send(plan, num_requests, saturated=True)
    rounds = [rng.permutation(len(trace.input)) for _ in range(-(-total // len(trace.input)))]
    chosen = np.concatenate(rounds)[:total]
    inputs, outputs = trace.input[chosen], trace.output[chosen]
    found = []
    for paired in (outputs, rng.permutation(outputs)):
        requests = trace._replace(input=inputs, output=paired, timestamp_s=None, prefixes=None)
        log = run_requests(plan, profile, requests, plan.workload.output.lengths[-1])
        found.append(read_log(plan, plan.workload, log, num_requests, saturated=True))
    pairs, apart = found
    return JointLengths(
        correlation=float(np.corrcoef(trace.input, trace.output)[0, 1]),
        throughput=pairs.throughput_rps / apart.throughput_rps - 1,
        latency=pairs.latency_s / apart.latency_s - 1,
    )


def run_requests(
    plan: PlanDraft,
    profile: Profile,
    trace: TraceLengths,
    max_output: int | Ints,
    on_span: OnSpan | None = None,
    *,
    clients: int | None = None,
    rule: Rule | None = None,
) -> list[StepRecord]:
    """Simulate requests on one replica, and return the steps.

    Args:
        trace: the requests. Without times, all arrive at the start. If the plan expects reuse but the trace has no
            prefixes, the planned share of each prompt is a common prefix.
        clients: largest number of outstanding requests. A further one arrives when one has ended, not before its time.
    """
    schedule = policies.build(plan, rule)
    size = plan.block_size
    outputs = decoded(trace.output, plan.speculation, np.random.default_rng(0))
    most = np.maximum(max_output, outputs) if plan.speculation else np.broadcast_to(max_output, len(trace.input))
    arrivals_s = np.zeros(len(most)) if trace.timestamp_s is None else trace.timestamp_s
    columns = zip(
        *(values.tolist() for values in (trace.input, most, outputs, (1e9 * arrivals_s).astype(int))), strict=True
    )
    requests = [SimulatedRequest(i, *column) for i, column in enumerate(columns)]
    if plan.constraint.classes and trace.timestamp_s is not None:
        accounts = accounts_of(plan, len(requests))
        requests = [r._replace(account=account) for r, account in zip(requests, accounts, strict=True)]
    if (prefixes := trace.prefixes) is not None:
        requests = [
            request._replace(
                chain=prefixes.chain(request.id, request.input_length, size),
                output_chain=prefixes.output_chain(request.id, request.input_length, request.output_length, size),
            )
            for request in requests
        ]
    elif trace.sessions is not None:
        chains = Chains(trace.sessions, trace.input, outputs, size)
        requests = [r._replace(chain=chains.prompt(r.id), output_chain=chains.output(r.id)) for r in requests]
    elif plan.estimate.reuse is not None:
        share, longest = plan.estimate.reuse.share, int(trace.input.max()) // size
        common = [block.to_bytes(4, "big") for block in range(longest)]
        requests = [r._replace(chain=tuple(common[: round(share * r.input_length / size)])) for r in requests]
    clock = clock_of(plan, profile, schedule, on_span)
    if trace.sessions is not None:
        return _in_sessions(plan, schedule, clock, requests, trace.sessions)
    if clients is None:
        return SimulatedEngine(schedule, clock, requests).run()
    engine, steps, later = SimulatedEngine(schedule, clock, requests[:clients]), [], iter(requests[clients:])
    path_ns = round(1e9 * plan.request_path_s)
    while (step := engine.step()) is not None:
        steps.append(step)
        for request in islice(later, len(step.finished)):
            engine.submit(request._replace(arrival_ns=max(request.arrival_ns, step.end_ns + path_ns)))
    return steps


def _in_sessions(
    plan: PlanDraft,
    schedule: Schedule,
    clock: SimulatedClock,
    requests: list[SimulatedRequest],
    sessions: TraceSessions,
) -> list[StepRecord]:
    """Run turns of sessions. The first ones arrive at their times, each other one a pause after the turn before it."""
    path_ns, steps, children = round(1e9 * plan.request_path_s), list[StepRecord](), sessions.children()
    first = sorted((requests[i] for i in sessions.first.tolist()), key=lambda request: request.arrival_ns)
    engine = SimulatedEngine(schedule, clock, first)
    while (step := engine.step()) is not None:
        steps.append(step)
        for id_ in step.finished:
            for child in children.get(id_, ()):
                pause_ns = path_ns + int(1e9 * sessions.pause_s[child])
                engine.submit(requests[child]._replace(arrival_ns=step.end_ns + pause_ns))
    return steps


def accounts_of(plan: PlanDraft, num_requests: int) -> list[Account]:
    """Return an account for each request. Each class gets about its planned share of any consecutive requests."""
    classes = plan.constraint.classes
    accounts = [plan.account_of(each) for each in classes]
    ends = list(accumulate(each.share for each in classes))
    places = (GOLDEN * i % 1 for i in range(num_requests))
    return [accounts[min(bisect_right(ends, place), len(accounts) - 1)] for place in places]


def reused_share(log: Sequence[StepRecord]) -> float:
    """Return the share of prompt tokens that were cached when their requests first entered."""
    asked = {arrival.id: arrival.input_length for record in log for arrival in record.arrivals}
    found: dict[int, int] = {}
    for record in log:
        for id_, start, _ in record.encode:
            found.setdefault(id_, start)
    return sum(found.values()) / max(1, sum(asked[id_] for id_ in found))


def clock_of(plan: PlanDraft, profile: Profile, schedule: Schedule, on_span: OnSpan | None = None) -> SimulatedClock:
    lanes = lanes_of(plan, profile)
    if "both" in lanes:
        return LaneClock(lanes["both"], schedule, on_span, lanes["both"].profile.jitter)
    return TwoLaneClock(lanes["encode"], lanes["decode"], schedule, on_span, lanes["decode"].profile.jitter)


def check_fits(plan: PlanDraft, workload: Workload) -> None:
    """Raise InputError if a workload's longest request does not fit into the plan's K/V memory or model's context."""
    longest = workload.input.lengths[-1] + workload.output.lengths[-1]
    blocks = min(stage.kv_blocks for stage in plan.stages if stage.lane != "encode")
    room, context = blocks * plan.block_size, plan.model.max_context
    if longest > min(room, context):
        has = f"its longest request has {longest} tokens, but the"
        of_plan = f"{has} plan's K/V memory holds {room}: plan for this workload, or give shorter requests"
        accepted = f"{has} model's context is {context}: give shorter requests" if context <= room else of_plan
        raise InputError("workload", workload.name, accepted)
    prompt = workload.input.lengths[-1]
    encoders = [stage.kv_blocks * plan.block_size for stage in plan.stages if stage.lane == "encode"]
    if encoders and prompt > min(encoders):
        accepted = f"its longest prompt has {prompt} tokens, but the plan's encode lane holds at most {min(encoders)}"
        raise InputError("workload", workload.name, accepted)


def read_log(
    plan: PlanDraft,
    workload: Workload,
    log: list[StepRecord],
    num_requests: int,
    *,
    saturated: bool,
    skipped: int | None = None,
) -> Measured:
    """Return the figures of a log of the plan's replicas, without the warm-up of a saturated run.

    If requests arrived over time, the log may end with the last measured request. A saturated log must go on after the
    measured requests, because a batch that is running empty is not in the steady state.

    Args:
        skipped: number of warm-up requests. None means as many as a saturated run needs.
    """
    if skipped is None:
        skipped = warm_up_of(plan, log) if saturated else 0
    return measure(
        log,
        quantile=plan.constraint.quantile,
        quantile_output=quantile(workload.output, plan.constraint.quantile),
        skip_requests=skipped,
        num_requests=num_requests,
        encode_emits=encode_emits(plan),
        has_encoder=plan.model.is_encoder_decoder,
        may_end=not saturated,
    )


def warm_up_of(plan: PlanDraft, log: Sequence[StepRecord]) -> int:
    return len({record.replica for record in log}) * warm_up_requests(plan)


def times_of(plan: PlanDraft, log: Sequence[StepRecord], num_requests: int, tokens: Ints | None = None) -> RequestTimes:
    """Return the times, from arrival, of the first requests in a log of this plan."""
    tokens = None if plan.speculation is None else tokens
    return request_times(log, num_requests, encode_emits=encode_emits(plan), tokens=tokens)


def kept_by_class(plan: PlanDraft, log: Sequence[StepRecord], num_requests: int) -> dict[str, float]:
    """Return, for each class, the share of its requests that kept the bounds, among the first requests of a log."""
    found = {}
    for each in plan.constraint.classes:
        times = request_times(log, num_requests, encode_emits=encode_emits(plan), of_class=each.name)
        found[each.name] = times.later(plan.request_path_s).share_kept(plan.constraint.of_class(each.name))
    return found


def encode_emits(plan: PlanDraft) -> bool:
    """Return whether the step that ends a prompt also computes its first output token."""
    return plan.policy.lanes == ("both",) or not plan.model.is_encoder_decoder
