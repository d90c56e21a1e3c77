"""The Python API: one function for each command, with typed keyword arguments. The package `xgpt` offers all of them.

Functions print nothing, never exit, and raise only `XgptError`. Times are in seconds, rates are per second, lengths are
in tokens, and prices are per device and hour. A plan is a `Plan` or the path of its plan.json; models, clusters and
workloads are shipped names, paths of files, or objects of `xgpt.core.schema`.
"""

from __future__ import annotations

import inspect
import json
import os
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from xgpt.checkpoints import hub
from xgpt.core.documents import read_json
from xgpt.core.errors import InputError
from xgpt.core.io import FIELDS_OF_FILES, load_json, read_text
from xgpt.core.policies import Rule as Rule
from xgpt.core.schema import EngineKind, Pinned, Plan, Profile
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.workload import ArrivalProcess
from xgpt.requests import (
    REQUESTS,
    BenchRequest,
    CalibrateRequest,
    CheckRequest,
    CompareRequest,
    FleetRequest,
    LoadFields,
    PlanRequest,
    ProfileRequest,
    ReplanRequest,
    ReportRequest,
    RequestBase,
    ServeFields,
    SimulateRequest,
    TuneRequest,
    WatchRequest,
    as_plan_request,
    parse_arguments,
    plan_request,
    request_of,
)
from xgpt.rules import load_rule

if TYPE_CHECKING:
    from threading import Event

    from xgpt.benchmark import Benched
    from xgpt.calibrating import CalibratedLoads
    from xgpt.comparing.compare import Compared
    from xgpt.core.progress import Progress
    from xgpt.core.schema.tuning import CheckOutput, TuneOutput, WatchAlarm
    from xgpt.diagnosis import Finding
    from xgpt.exporting.export import Exported, Target
    from xgpt.keywords import (
        BenchKeywords,
        CalibrateKeywords,
        CheckKeywords,
        CompareKeywords,
        FleetKeywords,
        PlanKeywords,
        ProfileKeywords,
        ReplanKeywords,
        ReportKeywords,
        ServeKeywords,
        SimulateKeywords,
        TuneKeywords,
        WatchKeywords,
    )
    from xgpt.sessions import SimulatedSessions
    from xgpt.solving import Planned
    from xgpt.tuning.check import LoadToSend
    from xgpt.tuning.tune import Told
    from xscheduler.fleet.following import FollowedFleet
    from xscheduler.replanning.replanner import Replanned
    from xsimulator.run import Simulated

PathLike = str | os.PathLike[str]
FIELDS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("options.json").read_bytes())
"""The fields of each command's request, with their descriptions."""
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
ALL_REQUESTS = 10**12
"""A number larger than the number of requests of any trace."""
ONLY_OF_PLANS = {
    "profile": "only a plan file can have a profile: leave it out for a server at a URL",
    "calibrate": "only a plan file has a profile to calibrate: leave it out for a URL",
    "batching": "it applies only to a plan file: a server at a URL already runs its own plan",
    "rule": "it applies only to a plan file: a server at a URL already runs its own",
}
"""Arguments of `bench` that a URL cannot have."""


def _takes(request: type[RequestBase]) -> Callable[[F], F]:
    """Return a decorator that adds the fields of a request to a function's signature and docstring."""
    command = next(name for name, each in REQUESTS.items() if each is request)

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        known = {one.name for one in parameters}
        named = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty
                if field.is_required()
                else field.get_default(call_default_factory=True),
                annotation=field.annotation,
            )
            for name, field in request.model_fields.items()
            if name not in known
        ]
        function.__signature__ = signature.replace(parameters=[*parameters, *named])  # type: ignore[attr-defined]
        function.__doc__ = (function.__doc__ or "").replace("        **asked\n", _documented(command, known))
        return function

    return decorate


def _documented(command: str, known: Collection[str]) -> str:
    """Return docstring lines that describe the fields of a command's request, except the fields in `known`."""
    lines = []
    for field in FIELDS.get(command, ()):
        if field["name"] not in known:
            unset = f" None: {field['unset']}." if field["unset"] else ""
            text = f"{field['name']}: {field['text']}{unset}"
            lines.append(textwrap.fill(text, 120, initial_indent=8 * " ", subsequent_indent=12 * " "))
    return "\n".join(lines) + "\n"


@_takes(PlanRequest)
def plan(*, latency_bound_s: float | None, progress: Progress | None = None, **asked: Unpack[PlanKeywords]) -> Plan:
    """Return the plan with the highest throughput under a latency bound. The plan states its proven gap to the optimum.

    >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> plan.policy.kind, plan.estimate.latency_s <= 8
    ('chunked', True)

    Args:
        latency_bound_s: seconds to a request's last token, from arrival under objective "arrivals" and from admission
            under "saturated". None or inf means no bound.
        progress: called with (done, total, what is being done).
        **asked

    Raises:
        InputError: an argument is not accepted, or cannot be combined with another argument.
        InfeasibleError: no schedule keeps the bounds; the error states bounds that can be kept.
        MachineError: this machine cannot be measured, or cannot run the plan made for it.
    """
    return solve(latency_bound_s=latency_bound_s, progress=progress, **asked).best


@_takes(PlanRequest)
def solve(
    *,
    latency_bound_s: float | None,
    progress: Progress | None = None,
    path: str = "plan.json",
    **asked: Unpack[PlanKeywords],
) -> Planned:
    """Return each policy's best plan, the recommendation, and the clusters that were compared.

    >>> import xgpt
    >>> planned = xgpt.solve(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                      objective="saturated")
    >>> sorted(planned.plans), planned.best == next(iter(planned.plans.values()))
    (['chunked', 'orca', 'rra', 'static'], True)

    Arguments and errors are those of `plan`.

    Args:
        path: where the plan will be written, for commands in the recommendation.

    Raises:
        XgptError: as `plan` does.
    """
    from xgpt import solving

    return solving.solve(plan_request(latency_bound_s=latency_bound_s, **asked), progress, path)


@_takes(FleetRequest)
def fleet(
    trace: PathLike, *, latency_bound_s: float | None, progress: Progress | None = None, **asked: Unpack[FleetKeywords]
) -> FleetPlan:
    """Return the replicas that serve each interval of a day's load at the lowest cost.

        day = xgpt.fleet("day.csv", model="llama-3.1-8b", among={"h100x8": 2.9, "a100x16": 1.4}, latency_bound_s=15)
        day.planned.cost, day.constant.figures.cost, day.gap

    Args:
        trace: CSV or JSON lines with times, or YAML of rates and workloads over hours.
        latency_bound_s: seconds from arrival to a request's last token. None or inf means no bound.
        progress: called with (done, total, what is being done).
        **asked

    Raises:
        InputError: an argument is not accepted, or the trace is malformed.
        InfeasibleError: no replica keeps the bounds, or the devices cannot serve the load.
        MachineError: this machine cannot be measured.
    """
    from xgpt.solving import plan_fleet_of
    from xscheduler.fleet.day_load import read_day

    request = request_of(FleetRequest, trace=trace, latency_bound_s=latency_bound_s, **asked)
    return plan_fleet_of(read_day(request.trace, request.seed, request.growth), request, progress)


def simulate_autoscale(fleet: FleetPlan | PathLike, trace: PathLike) -> FollowedFleet:
    """Simulate a day on which a fleet follows the rule and the schedule that `export` writes, and return the result.

        xgpt.simulate_autoscale("fleet.json", "tomorrow.csv")

    Args:
        trace: a day's load, as for `fleet`.

    Raises:
        InputError: the trace is malformed, or a plan's profile is not on this machine.
    """
    from xgpt.solving import follow_day

    return follow_day(_fleet(fleet), Path(trace))


@_takes(CompareRequest)
def compare(
    *,
    latency_bound_s: float | None,
    progress: Progress | None = None,
    path: str | None = None,
    **asked: Unpack[CompareKeywords],
) -> Compared:
    """Return the plan to run, whether it should replace a current deployment, and the plans under looser bounds.

    >>> import xgpt
    >>> found = xgpt.compare(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                      objective="saturated")
    >>> list(found.relaxed)  # factors on the bounds
    [1.25, 1.5, 2.0, None]

    Args:
        latency_bound_s: see `plan`.
        progress: called with (done, total, what is being done).
        path: where the current deployment will be written as a plan, for commands in the recommendation.
        **asked

    Raises:
        InputError: an argument is not accepted, or the current deployment cannot run the same work as the plans.
        InfeasibleError: no schedule keeps the bounds.
        MachineError: this machine cannot be measured.
    """
    from xgpt.comparing import compare as comparing

    request = request_of(CompareRequest, latency_bound_s=latency_bound_s, **asked)
    asks = as_plan_request(request, devices=request.devices)
    return comparing.compare(asks, request.current, request.variables, progress, path)


@_takes(ProfileRequest)
def profile(*, progress: Progress | None = None, **asked: Unpack[ProfileKeywords]) -> Profile:
    """Return a profile. Its step times are measured on this machine, computed from a datasheet, or imported.

    >>> import xgpt
    >>> profile = xgpt.profile(model="llama-3.1-8b", cluster="h200x1")
    >>> profile.source, profile.device
    ('analytic', 'h200')

    Args:
        progress: called with (done, total, what is being done).
        **asked

    Raises:
        InputError: a model, cluster or imported table is not known, or the devices cannot run the model in this dtype.
        MachineError: this machine cannot be measured.
    """
    from xgpt.served_profile import as_served
    from xprofiler.store import new_profile

    return new_profile(**dict(request_of(ProfileRequest, **asked)), progress=progress, as_served=as_served)


def with_settings(plan: Plan | PathLike, *, profile: str | Profile | None = None, **settings: Any) -> Plan:
    """Return a plan on the same stages with other settings of its policy: checked, scored and simulated, not searched.

    >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  policy="orca")
    >>> other = xgpt.with_settings(plan, max_batch=16)
    >>> other.policy.max_batch, other.search.gap is None
    (16, True)

    Args:
        profile: the profile of the plan's step times. None means the one that the plan names.
        **settings: values of fields of `plan.policy`, such as `encode_batch`.

    Raises:
        InputError: the policy has no such setting, or the value is not accepted.
        InfeasibleError: the settings do not fit in memory.
    """
    from xgpt.solving import with_settings
    from xprofiler.store import profile_of

    plan = _plan(plan)
    return with_settings(plan, profile_of(plan, profile), settings)


@_takes(SimulateRequest)
def simulate(
    plan: Plan | PathLike, *, keep_steps: bool = False, **asked: Unpack[SimulateKeywords]
) -> Simulated | SimulatedSessions:
    """Run a plan on the simulated engine, request by request, and return the result. A plan for sessions is run with
    sessions, of which `arrival_rate_per_s` begin in a second.

    A replay (`own_times`) of over 20,000 requests is simulated by counts of requests if possible. This takes only
    seconds but returns no steps.

    >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> run = xgpt.simulate(plan, num_requests=300, arrival_rate_per_s=5)
    >>> run.figures["ttft_p50_s"] <= run.figures["ttft_p99_s"], 0 <= run.figures["goodput"] <= 1
    (True, True)

    Args:
        keep_steps: whether to return steps for such a long replay, too. The simulation then takes about 0.6 ms per
            request.
        **asked

    Raises:
        InputError: the requests do not fit into the plan's memory, its profile is not on this machine, or arguments
            cannot be combined.
    """
    from xgpt.core.load import LogLoad
    from xgpt.resolve import log_for, workload_of
    from xgpt.sessions import sessions_of, simulate_sessions
    from xprofiler.store import profile_of
    from xsimulator.replay import simulate_log
    from xsimulator.run import run_simulation

    request = request_of(SimulateRequest, **asked)
    plan = _plan(plan)
    if request.burstiness is not None and request.arrival_rate_per_s is None:
        says = "it needs `arrival_rate_per_s`: give one, or leave `burstiness` out"
        raise InputError("burstiness", request.burstiness, says)
    for name in ("arrival_rate_per_s", "own_times"):
        if request.clients is not None and getattr(request, name):
            raise InputError("clients", request.clients, f"it cannot be combined with `{name}`")
    for name in ("arrival_rate_per_s", "burstiness", "clients", "num_requests", "own_times"):
        if request.bench is not None and getattr(request, name):
            raise InputError(name, getattr(request, name), "`bench` says this: leave one of them out")
    if request.clients is not None and request.clients < plan.replicas:
        says = f"the plan has {plan.replicas} replicas: give at least one client for each"
        raise InputError("clients", request.clients, says)
    if not request.own_times:
        unset = {"num_requests": request.num_requests == "all", "since_s": request.since_s, "rate": request.rate != 1}
        for name in (name for name, is_given in unset.items() if is_given):
            raise InputError(name, getattr(request, name), "it needs `own_times`")
    profile = profile_of(plan, request.profile)
    if (sessions := sessions_of(plan, request.workload)) is not None:
        return simulate_sessions(plan, profile, sessions, request)
    rule = None if request.rule is None else load_rule(request.rule)
    if request.bench is not None:
        from xgpt.bench_command import read_benchmark
        from xsimulator.benchmarked import simulate_benchmark

        benchmark = read_benchmark(request.bench, request.workload, request.seed)
        return simulate_benchmark(plan, profile, benchmark, rule)
    if request.num_requests == "all" or (request.own_times and request.num_requests is None):
        arrivals, num_requests = None, ALL_REQUESTS
    else:
        arrivals, num_requests = _arrivals(request, 2000, request.burstiness or 1.0)
    if request.own_times:
        named = isinstance(request.workload, str) and Path(request.workload).is_file()
        if request.workload is None or not named or arrivals is not None:
            raise InputError("own_times", True, "it needs a trace as `workload`, and no `arrival_rate_per_s`")
        lengths = workload_of(request.workload, plan.model, request.growth)
        log = log_for(Path(str(request.workload)), plan.model, request.growth)
        load = LogLoad.of(lengths.name, log, request.growth).part(request.since_s)
        return simulate_log(plan, profile, lengths, load, num_requests, keep_steps=keep_steps, rule=rule)
    return run_simulation(
        plan,
        profile,
        request.workload,
        num_requests,
        arrivals,
        request.seed,
        growth=request.growth,
        clients=request.clients,
        rule=rule,
    )


@_takes(CalibrateRequest)
def calibrate(
    plan: Plan | PathLike, measured: Sequence[PathLike], **asked: Unpack[CalibrateKeywords]
) -> CalibratedLoads:
    """Fit a plan's profile and engine to benchmarks of a server that ran the plan. Return both, with their prediction
    errors.

        xgpt.calibrate("plan.json", ["vllm-bench.json"]).profile

    Args:
        measured: one or more result files of `vllm bench serve`, AIPerf, guidellm or genai-perf.
        **asked

    Raises:
        InputError: a file is not such a result, its requests do not fit into the plan's memory, or the plan's profile
            is not on this machine.
    """
    from xgpt.calibrating import calibrate as fit
    from xgpt.calibrating import read_loads
    from xprofiler.store import profile_of

    request, plan = request_of(CalibrateRequest, **asked), _plan(plan)
    loads = [load for path in measured for load in read_loads(Path(path))]
    return fit(plan, profile_of(plan, request.profile), loads)


@_takes(ReplanRequest)
def replan(
    plan: Plan | PathLike, lengths: PathLike, *, path: str = "plan.json", **asked: Unpack[ReplanKeywords]
) -> Replanned:
    """Compare a running plan with the best plan for other request lengths, and decide whether to change the plan.

    >>> import tempfile, xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as trace:
    ...     _ = trace.write("input,output\\n" + "300,40\\n500,90\\n" * 500)
    ...     trace.flush()
    ...     found = xgpt.replan(plan, trace.name)
    >>> found.decision.num_requests, found.plan == plan
    (1000, False)

    Args:
        lengths: a trace (CSV, JSON lines), or the URL of a running server. With a URL, the server's current plan and
            the lengths that it has observed are used.
        path: where the new plan will be written, for commands.
        **asked

    Raises:
        InputError: the trace is malformed, or the server runs another model.
        MachineError: the server does not answer, or has seen too few requests.
    """
    from xgpt.core.load import LogLoad
    from xgpt.deciding.again import replan_for
    from xgpt.resolve import log_for
    from xprofiler.store import profile_of
    from xscheduler.replanning.judge import Terms
    from xscheduler.replanning.replanner import Replanned, observe_server, propose

    request, running = request_of(ReplanRequest, lengths=lengths, **asked), _plan(plan)
    log = None
    if request.lengths.startswith(("http://", "https://")):
        running, observation = observe_server(running, request.lengths)
    else:
        path_of = Path(request.lengths)
        log = LogLoad.of(path_of.stem, log_for(path_of, running.model, request.growth, "lengths"), request.growth)
    if request.replan_policies == "all":
        running = running.deployed(pinned=Pinned())
    terms = Terms(least_gain=request.least_gain, horizon_s=request.horizon_s)
    profile = profile_of(running, request.profile)
    if log is not None:
        return replan_for(running, profile, log, terms, path, None if isinstance(plan, Plan) else str(plan))
    decision, then = propose(running, profile, observation, terms)
    return Replanned(running, observation, decision, then or running)


@_takes(BenchRequest)
def bench(target: Plan | PathLike, *, progress: Progress | None = None, **asked: Unpack[BenchKeywords]) -> Benched:
    """Measure a plan on this machine and compare it with the prediction, or measure an endpoint.

        report = xgpt.bench("plan.json", num_requests=100).report

    Args:
        target: a plan, or the URL of an endpoint. A separate process serves the plan during the measurement.
        progress: called with (done, total, what is being done).
        **asked

    Raises:
        InputError: the requests do not fit into the plan's memory, or arguments cannot be combined.
        MachineError: the server does not start or dies, or the endpoint does not answer.
    """
    from xgpt import benchmark as benches
    from xgpt.core.progress import silent
    from xgpt.resolve import workload_of
    from xgpt.sessions import bench_sessions
    from xprofiler.store import profile_of

    request = request_of(BenchRequest, **asked)
    profile = request.profile
    is_url = isinstance(target, str) and target.startswith(("http://", "https://"))
    for name, accepted in ONLY_OF_PLANS.items():
        if is_url and (value := getattr(request, name)) != BenchRequest.model_fields[name].default:
            raise InputError(name, value if isinstance(value, bool) else str(value), accepted)
    if request.ca_file is not None and not is_url:
        raise InputError("ca_file", str(request.ca_file), "only a URL can have one: leave it out for a plan file")
    if request.saturated and request.arrival_rate_per_s is not None:
        raise InputError("arrival_rate_per_s", request.arrival_rate_per_s, "it cannot be combined with `saturated`")
    if isinstance(target, str) and not is_url and ":" in target and not Path(target).exists():
        raise InputError("plan", target, "there is no such file; a URL begins with http:// or https://")
    of_what = str(target) if is_url else _plan(target)
    workload = None
    if request.workload is not None:
        workload = workload_of(request.workload, of_what.model if isinstance(of_what, Plan) else None)
    if workload is not None and workload.sessions is not None:
        if not is_url:
            raise InputError("workload", workload.name, "sessions are sent to a URL: serve the plan, and give its URL")
        return benches.Benched(bench_sessions(str(target), workload, request, progress or silent))
    if request.pauses != 1:
        raise InputError("pauses", request.pauses, "it needs a workload of sessions, and a URL")
    arrivals, num_requests = _arrivals(request, 300)
    return benches.bench(
        of_what,
        benches.Load(
            num_requests,
            workload,
            arrivals,
            request.stream,
            request.concurrency,
            request.ca_file,
            None if request.rule is None else load_rule(request.rule),
        ),
        request.seed,
        engine=request.engine,
        batching=request.batching,
        profile=profile_of(of_what, profile) if profile is not None and isinstance(of_what, Plan) else None,
        calibrate=request.calibrate,
        saturated=request.saturated,
        progress=progress or silent,
    )


@_takes(CheckRequest)
def check(
    target: PathLike,
    *,
    latency_bound_s: float | None = None,
    may_send: Callable[[LoadToSend], bool] = lambda sending: True,
    progress: Progress | None = None,
    **asked: Unpack[CheckKeywords],
) -> CheckOutput:
    """Compare a running engine with its prediction by a short load, and return whether to keep its settings.

        found = xgpt.check("http://127.0.0.1:8000", plan="plan.json")
        found.recommendation.action, found.recommendation.confidence

    Args:
        target: URL of the server, or the result file of a benchmark at an arrival rate.
        latency_bound_s: seconds from a request's arrival to its last token. None means no such bound.
        may_send: called with what will be sent. Nothing is sent if it returns False.
        progress: called with (done, total, what is being done).
        **asked

    Raises:
        InputError: the settings are not known, or the server serves another model.
        InfeasibleError: the model does not fit on the devices.
        MachineError: the server does not answer, or is lost meanwhile.
    """
    from xgpt.calibrating import read_loads
    from xgpt.tuning.check import check, served_by
    from xgpt.tuning.problem import EngineProblem, engine_problem
    from xprofiler.store import profile_of
    from xscheduler.problem import Problem

    request = request_of(CheckRequest, latency_bound_s=latency_bound_s, **asked)
    if (request.plan is None) == (request.current is None):
        raise InputError("plan", None, "give the plan that the server runs as `plan`, or its command as `current`")
    now, text = None if request.plan is None else _plan(request.plan), str(target)
    is_url = text.startswith(("http://", "https://"))
    of_what, served = (text, served_by(text)) if is_url else (read_loads(Path(text)), None)
    if now is not None:
        problem = EngineProblem(Problem.of(now, profile_of(now, request.profile)), now=now)
    else:
        problem = engine_problem(request, request.current, progress)
    rate = request.arrival_rate_per_s
    return check(problem, of_what, rate, may_send=may_send, served=served, seed=request.seed)


@_takes(TuneRequest)
def tune(
    *,
    latency_bound_s: float | None = None,
    told: Told | None = None,
    ask: Callable[[str], str] | None = None,
    progress: Progress | None = None,
    **asked: Unpack[TuneKeywords],
) -> TuneOutput:
    """Find the best settings of an engine on the user's own devices with as few measurements as possible.

        found = xgpt.tune(current="vllm serve ./llama", workload="log.csv", ttft_s=1, tpot_s=0.06, budget_s=3600)
        found.recommendation.best.processes[0].command

    Args:
        latency_bound_s: seconds from a request's arrival to its last token. None means no such bound.
        told: functions that are called with each engine that starts, and with each finished measurement.
        ask: with `manual`: shows a command, and returns the URL at which the user has started it.
        progress: called with (done, total, what is being done).
        **asked

    Raises:
        InputError: an argument is not accepted, or the journal is of another search.
        InfeasibleError: the model does not fit on the devices.
        MachineError: no engine starts, another search runs on this machine, or the time is too short.
    """
    from xgpt.tuning.engines import Host, Manual, Own, Template, Vllm
    from xgpt.tuning.journal import alone
    from xgpt.tuning.problem import engine_problem
    from xgpt.tuning.tune import Search
    from xrunner.vllm.process import python

    request = request_of(TuneRequest, latency_bound_s=latency_bound_s, **asked)
    if request.manual and request.start is not None:
        raise InputError("start", request.start, "it cannot be combined with `manual`")
    if request.url is not None and request.start is None:
        raise InputError("url", request.url, "it needs `start`")
    host: Host
    if request.manual:
        if ask is None:
            raise InputError("manual", request.manual, "give `ask`, which shows commands")
        host = Manual(ask)
    elif request.start is not None:
        host = Template(request.start, request.url)
    elif request.engine == "xgpt":
        host = Own()
    else:
        python()
        host = Vllm()
    with alone():
        problem = engine_problem(request, request.current, progress, also=request.also)
        problem = replace(problem, plans=Path(f"{Path(request.journal).with_suffix('')}-plans"))
        if problem.problem.workload.sessions is not None:
            says = "independent requests are sent here: give request lengths, or send sessions by `xgpt check`"
            raise InputError("workload", problem.problem.workload.name, says)
        search = Search(problem, host, Path(request.journal), resume=request.resume, seed=request.seed)
        return search.run(request.budget_s, told)


@_takes(WatchRequest)
def watch(
    plan: Plan | PathLike,
    *,
    on_alarm: Callable[[WatchAlarm], None],
    stop: Event | None = None,
    **asked: Unpack[WatchKeywords],
) -> None:
    """Compare the metrics of a running engine with its plan until `stop` is set, and tell which assumption broke.

        xgpt.watch("plan.json", engine=["http://127.0.0.1:8000"], on_alarm=lambda alarm: print(alarm.text))

    Args:
        on_alarm: called with each alarm.
        stop: ends the watch. None means that it ends only by an exception, such as KeyboardInterrupt.
        **asked

    Raises:
        InputError: the plan's profile is not on this machine, or an argument is not accepted.
        MachineError: no metrics that are known are at a URL, or a command of `apply` fails.
    """
    from threading import Event as NewEvent

    from xgpt.tuning.watch import watch
    from xprofiler.store import profile_of

    request = request_of(WatchRequest, **asked)
    plan = _plan(plan)
    watch(plan, profile_of(plan, request.profile), request, on_alarm, stop or NewEvent())


def export(plan: Plan | FleetPlan | PathLike, to: Target, *, monitoring: str = "monitoring") -> Exported:
    """Return the files that start a plan or a day's fleet elsewhere, what must exist before, and the commands to start.

    >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> found = xgpt.export(plan, "k8s")
    >>> sorted(found.files)[-2:], found.starts[0]
    (['monitoring/objects.yaml', 'xgpt.yaml'], 'kubectl apply -k .')

    Args:
        to: "shell": a script and a systemd unit; "compose": Docker Compose; "k8s": Kubernetes; "llm-d", "dynamo": vLLM
            on these platforms.
        monitoring: namespace of Prometheus, which may read the pods' metrics.

    Raises:
        InputError: the plan needs more memory than its devices have, or the target cannot run it.
    """
    from xgpt.exporting.export import export

    made = plan if isinstance(plan, Plan | FleetPlan) else _made(plan)
    if not isinstance(made, Plan | FleetPlan):
        raise InputError("plan", str(plan), "it is the output of `xgpt tune`: give a plan or a fleet")
    return export(made, to, monitoring)


@_takes(ReportRequest)
def report(plan: Plan | FleetPlan | TuneOutput | PathLike, **asked: Unpack[ReportKeywords]) -> str:
    """Return a self-contained HTML page about a plan, a day's fleet or what `xgpt.tune` found.

    >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> xgpt.report(plan).startswith("<!doctype html>")
    True

    Args:
        **asked

    Raises:
        InputError: the plan's profile is not on this machine, or its memory cannot hold its workload.
    """
    import numpy as np

    from xgpt.core.schema.tuning import TuneOutput
    from xgpt.reporting.fleet import fleet_report
    from xgpt.reporting.report import report
    from xgpt.reporting.tuning import tune_report
    from xprofiler.store import profile_of

    request = request_of(ReportRequest, **asked)
    made = plan if isinstance(plan, Plan | FleetPlan | TuneOutput) else _made(plan)
    if isinstance(made, Plan):
        path = "plan.json" if isinstance(plan, Plan) else str(plan)
        return report(made, profile_of(made, request.profile), np.random.default_rng(request.seed), path)
    if request.profile is not None:
        raise InputError("profile", str(request.profile), "only the page of a plan needs a profile: leave it out")
    return fleet_report(made) if isinstance(made, FleetPlan) else tune_report(made)


def ui(*, port: int = 0, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve the planning page on loopback until SIGTERM or SIGINT. Call this function in the main thread.

        xgpt.ui(port=8001)

    Args:
        port: port on which to listen. 0 means any free port.
        on_ready: called with the page's address, which contains a token that grants access.

    Raises:
        MachineError: the port cannot be opened.
    """
    from xgpt.exploring.ui import serve

    serve(port, on_ready)


def doctor() -> list[Finding]:
    """Examine this machine, and return findings. They include problems that make measurements unreliable, with advice.

    >>> import xgpt
    >>> len(xgpt.doctor()) > 0
    True

    This takes a few seconds.

    Raises:
        XgptError: never, since a failed examination is a finding.
    """
    from xgpt.diagnosis import examine

    return examine()


@_takes(ServeFields)
def serve(
    plan: Plan | PathLike, *, on_note: Callable[[str], None] = lambda line: None, **asked: Unpack[ServeKeywords]
) -> None:
    """Serve a plan behind an OpenAI-compatible endpoint until SIGTERM or SIGINT. Call this function in the main thread.

        xgpt.serve("plan.json", port=8001, replan=False)

    Args:
        on_note: called with a line of text about each process that starts or, in a dry run, about what this machine
            lacks.
        **asked

    Raises:
        InputError: the plan or an argument is not accepted.
        MachineError: devices, memory or a port are missing, or the engine does not start.
    """
    from xgpt.serving import serve as serving

    serving.serve(_plan(plan), parse_arguments(dict(asked), serving.ServeRequest), on_note)


@contextmanager
def served(plan: Plan | PathLike, *, engine: EngineKind = "xgpt", replan: bool = False) -> Iterator[str]:
    """Serve a plan in a separate process, on a free port of this machine, until the `with` block ends.

        with xgpt.served("plan.json") as url:
            httpx.post(f"{url}/v1/completions", json={...})

    Args:
        engine: engine that runs the plan.
        replan: whether the server switches to a better plan when request lengths change.

    Yields:
        url: the server's URL.

    Raises:
        MachineError: the server does not start, or dies.
    """
    from xgpt import benchmark as benches

    with (
        TemporaryDirectory() as directory,
        benches.served(_plan(plan), Path(directory), engine=engine, replan=replan) as url,
    ):
        yield url


def _arrivals(load: LoadFields, default: int, burstiness: float = 1.0) -> tuple[ArrivalProcess | None, int]:
    """Return a load's arrival process (None: saturation), and the number of requests to measure."""
    rates = load.arrival_rate_per_s
    arrivals = None if rates is None else ArrivalProcess.at(rates, burstiness)
    of_stages = None if arrivals is None else arrivals.num_requests
    if of_stages is not None and load.num_requests is not None:
        accepted = (
            f"the stages of `arrival_rate_per_s` contain {of_stages} requests: leave `num_requests` out, or leave out "
            "the seconds of the last stage"
        )
        raise InputError("num_requests", load.num_requests, accepted)
    return arrivals, of_stages or load.num_requests or default


def _plan(given: Plan | PathLike) -> Plan:
    if isinstance(given, Plan):
        return given
    name, path = str(given), Path(given)
    if path.is_dir() or (path.suffix != ".json" and hub.is_id(name) and not path.exists()):
        says = f"it is a model or a directory, not a plan: run `xgpt plan --model {name} --latency-bound S` first"
        raise InputError("plan", name, says)
    return load_json(path, Plan, "plan")


def _made(path: PathLike) -> Plan | FleetPlan | TuneOutput:
    """Return the content of a file that `xgpt plan`, `xgpt fleet` or `xgpt tune` wrote, told by its fields."""
    from xgpt.core.schema.tuning import TuneOutput

    try:
        found = read_json(read_text(Path(path), "plan"))
    except (InputError, ValueError):
        found = None
    fields: set[object] = set(found) if isinstance(found, dict) else set()
    kind = next((kind for kind, known in FIELDS_OF_FILES.items() if known <= fields), "plan")
    if kind == "fleet":
        return _fleet(path)
    return load_json(Path(path), TuneOutput, "tune") if kind == "tune" else _plan(path)


def _fleet(given: FleetPlan | PathLike) -> FleetPlan:
    return given if isinstance(given, FleetPlan) else load_json(Path(given), FleetPlan, "fleet")
