"""The Python API: a function for each command, with typed keyword arguments; `import xgpt` brings them.

Functions print nothing, never exit, and raise only `XgptError`. Times are in seconds, rates are per second, lengths are
in tokens, prices are for one device and hour. A plan is a `Plan` or the path of its plan.json; models, clusters and
workloads are shipped names, paths of files, or objects of `xgpt.core.schema`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from xgpt.arguments import (
    BenchArguments,
    FleetArguments,
    LoadArguments,
    PathLike,
    PlanArguments,
    ProblemArguments,
    ProfileArguments,
    check,
)
from xgpt.core.errors import InputError
from xgpt.core.schema import EngineKind, Plan, Profile

if TYPE_CHECKING:
    from threading import Event

    from xgpt.autoscaling.recommend import SimulatedFleet
    from xgpt.benchmark import Benched
    from xgpt.comparing.compare import Compared, OnStart
    from xgpt.core.arrival_process import ArrivalProcess
    from xgpt.core.policies.tcb import Batching
    from xgpt.core.progress import Progress
    from xgpt.core.schema.fleet import FleetPlan
    from xgpt.diagnosis import Finding
    from xgpt.exporting.export import Target
    from xgpt.solving import Planned
    from xscheduler.fleet.recommender import Recommendation
    from xscheduler.replanning.replanner import Replanned
    from xsimulator.run import Simulated

T = TypeVar("T")


def plan(*, latency_bound_s: float | None, progress: Progress | None = None, **asked: Unpack[PlanArguments]) -> Plan:
    """Return the plan with the highest throughput under a latency bound, with its proof.

    >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> plan.policy.kind, plan.estimate.latency_s <= 8
    ('chunked', True)

    Args:
        latency_bound_s: seconds to the last token that the quantile of requests must keep: from arrival under objective
            "arrivals", from admission under "saturated". None: no bound.
        progress: is called with (done, total, what is being done).
        model: a name, a YAML file, a checkpoint directory, a Hugging Face id, or a shape. By default opt-125m.
        config: config.json of an id; None: the one in huggingface_hub's cache. Nothing is downloaded.
        cluster: a name, a YAML file, or devices; None: this machine.
        dtype: type that the model runs in; None: its own; float32 on a CPU.
        kv_dtype: type of K/V; None: that of a given profile, or of the dtype.
        workload: a name, a YAML file, a trace (CSV, JSON lines), or histograms of lengths. By default summarization.
        profile: step times, or their file; None: the cached ones; without them this machine is measured, or the
            datasheet of the devices is used.
        engine: the engine that will run the plan, by name or file; None: the profile's.
        price: price of one device for an hour; None: the cluster's.
        objective: "arrivals": the highest rate of Poisson arrivals that keeps the bounds, waiting included;
            "saturated": throughput while requests are always waiting. None: arrivals; saturated with `sla` or `search`.
        quantile: share of requests that must keep the bounds, by default 0.99.
        sla: with "saturated", what must keep the bound: "length", a request whose output has the quantile's length;
            "request", the quantile of all requests.
        ttft_s, tpot_s: bounds on the time to the first token, and on the mean time between tokens.
        ttft_quantile, tpot_quantile: with "arrivals": share of requests that must keep this bound by itself; None:
            `quantile` of them must keep all bounds together.
        headroom: share by which steps may take longer than predicted; None: the known error of the profile's kind.
        arrival_rate_per_s: requests a second that the plan must sustain.
        policy: a policy; "auto", the default: the best of all but slack; "exegpt": the better of rra and
            waa; "waa": the better of waa-c and waa-m.
        search: with "saturated": the method; None: branch-and-bound.
        kv: "reserve", the default: set each request's maximum of K/V memory aside; "quantile": admit as many requests
            as fit 99.9% of the time.
        burstiness: coefficient of variation of the gaps between arrivals, by default 1: a Poisson process.
        order: order in which waiting requests enter, by default fcfs; slack also tries in-time.
        fix: values at which control variables are held, by name (token_budget, max_batch, ...; of the placement: tp,
            ep, pp, replicas).
        devices: use at most this number; "auto": the fewest that sustain the arrival rate.
        among: clusters with their prices, instead of `cluster`: the cheapest that sustains the arrival rate is used.

    Raises:
        InputError: an argument is not accepted, or does not go with another one.
        InfeasibleError: no schedule keeps the bounds; the error has the nearest bound that can be kept.
        MachineError: this machine cannot be measured, or cannot run the plan that was made for it.
    """
    return solve(latency_bound_s=latency_bound_s, progress=progress, **asked).best


def solve(
    *, latency_bound_s: float | None, progress: Progress | None = None, **asked: Unpack[PlanArguments]
) -> Planned:
    """Return the whole result of planning: each policy's best plan, and the clusters that were compared.

    >>> import xgpt
    >>> planned = xgpt.solve(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                      objective="saturated")
    >>> sorted(planned.plans), planned.best == next(iter(planned.plans.values()))
    (['chunked', 'orca', 'rra', 'static'], True)

    Arguments and errors are those of `plan`.

    Raises:
        XgptError: as `plan` does.
    """
    from xgpt import solving
    from xgpt.requests import plan_request

    check(asked, PlanArguments)
    return solving.solve(plan_request(latency_bound_s=latency_bound_s, **asked), progress)


def fleet(
    trace: PathLike,
    *,
    latency_bound_s: float | None,
    attain: float = 0.99,
    among: Mapping[str, float] | None = None,
    progress: Progress | None = None,
    **asked: Unpack[FleetArguments],
) -> FleetPlan:
    """Return how many replicas of which plan hold each interval of a day's load at the least cost.

        day = xgpt.fleet("day.csv", model="llama-3.1-8b", among={"h100x8": 2.9, "a100x16": 1.4}, latency_bound_s=15)
        day.planned.cost, day.constant.figures.cost, day.gap

    Args:
        trace: CSV or JSON lines with times, or YAML of rates and workloads over hours.
        latency_bound_s: time from arrival to the last token; None: no bound on it.
        attain: share of the day's requests that keep the bounds.
        among: clusters with the price of one device for an hour, whose replicas may be mixed; None: `cluster` alone.
        interval_s: seconds in which the fleet does not change, by default 900.
        least_stay_s: least seconds for which a started replica stays, by default 0.
        startup_s: seconds from ordering a replica until it begins to load weights, by default 60.
        devices: largest number of devices of each cluster, one number or one for each name; None: as many as needed.
        least_replicas: least number of replicas at any time, by default 1.
        seed: seed of the requests that are drawn from rates, by default 0.

    `model`, `cluster`, `dtype`, `kv_dtype`, `profile`, `engine`, `price`, `ttft_s`, `tpot_s`, `headroom` and `policy`
    are those of `plan`.

    Raises:
        InputError: an argument is not accepted, or the trace is malformed.
        InfeasibleError: no replica keeps the bounds, or the devices do not hold the load.
        MachineError: this machine cannot be measured.
    """
    from xgpt.fleet_planning import FleetRequest, fleet_request, plan_fleet

    check(asked, FleetArguments)
    of_fleet = {name: value for name, value in asked.items() if name in FleetRequest.model_fields}
    of_plan = {name: value for name, value in asked.items() if name not in of_fleet}
    request = fleet_request(trace=trace, among=among, **of_fleet)
    return plan_fleet(request, {**of_plan, "latency_bound_s": latency_bound_s, "quantile": attain}, progress)


def autoscale(
    fleet: FleetPlan | PathLike,
    *,
    on_note: Callable[[str], None] = lambda line: None,
    stop: Event | None = None,
    **asked: Any,
) -> Recommendation | None:
    """Recommend how many replicas of each kind a fleet should have now, and publish the numbers as a Prometheus metric.

        xgpt.autoscale("fleet.json", scrape=["http://127.0.0.1:8000"], on_note=print)
        xgpt.autoscale("fleet.json", arrival_rate_per_s=12, once=True).replicas

    It runs until `stop` is set, or until SIGTERM or SIGINT in the main thread, and returns the last recommendation;
    None if there is none.

    Args:
        on_note: is called with a line about each look at the load.
        stop: the function returns once it is set; None: on signals only.
        asked: the fields of `xgpt.autoscaling.recommend.AutoscaleRequest`, by name.

    Raises:
        InputError: the plan or an argument is not accepted.
        MachineError: the port cannot be opened, or with `once` no replica answers.
    """
    from xgpt.autoscaling import recommend

    request = recommend.autoscale_request(**asked)
    return recommend.autoscale(_fleet(fleet), request, on_note, stop)


def simulate_autoscale(fleet: FleetPlan | PathLike, trace: PathLike, *, look_s: float = 15.0) -> SimulatedFleet:
    """Return the outcome of a day on which a fleet follows the recommendations of `autoscale`, on the simulated clock.

        The example of `xgpt.fleet` runs the day that it plans: `xgpt.simulate_autoscale(day, load)`.

    Args:
        trace: a day's load, as for `fleet`.
        look_s: seconds between two looks at the load.

    Raises:
        InputError: the trace is malformed, or a plan's profile is not here.
    """
    from xgpt.autoscaling import recommend

    return recommend.simulate(_fleet(fleet), Path(trace), look_s)


def compare(
    *,
    latency_bound_s: float | None,
    current: str | None = None,
    measure: bool = False,
    num_requests: int = 300,
    seed: int = 0,
    progress: Progress | None = None,
    on_start: OnStart = lambda plan: None,
    **asked: Unpack[ProblemArguments],
) -> Compared:
    """Return every policy's best plan under one bound, and the best plans under looser bounds.

    >>> import xgpt
    >>> found = xgpt.compare(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                      objective="saturated")
    >>> list(found.relaxed)
    [10.0, 12.0, 16.0, None]

    Args:
        current: the `vllm serve` command of the current deployment, to be scored as a plan.
        measure: run each plan on this machine.
        num_requests, seed: number and seed of the requests with which each plan is measured.
        on_start: is called with each plan before it is measured.

    The other arguments are those of `plan`, with the same defaults.

    Raises:
        InputError: an argument is not accepted, or the current deployment cannot run the same work as the plans.
        InfeasibleError: no schedule keeps the bounds.
        MachineError: this machine cannot be measured, or a server does not start.
    """
    from xgpt.benchmark import Load
    from xgpt.comparing import compare as comparing
    from xgpt.requests import plan_request

    check(asked, ProblemArguments)
    request = plan_request(latency_bound_s=latency_bound_s, **asked)
    load = Load(num_requests) if measure else None
    return comparing.compare(request, current, load, seed, progress, on_start)


def profile(*, progress: Progress | None = None, **asked: Unpack[ProfileArguments]) -> Profile:
    """Return step times: measured on this machine, computed from a datasheet, or imported.

    >>> import xgpt
    >>> profile = xgpt.profile(model="llama-3.1-8b", cluster="h200x1")
    >>> profile.source, profile.device
    ('analytic', 'h200')

    Args:
        model: a name, a YAML file, a checkpoint directory, or a Hugging Face id; by default opt-125m.
        config: config.json of an id; None: the one in huggingface_hub's cache.
        cluster: "local", the default, is measured; for others the datasheet is used.
        dtype: type that the model runs in; None: its own; float32 on a CPU.
        kv_dtype: type of K/V; None: that of the dtype.
        engine: engine whose steps are measured, by default "native", xgpt's own.
        import_from: "aiconfigurator", or a folder of its tables.
        framework: engine whose kernels are imported; None: vLLM.

    Raises:
        InputError: a model, cluster or table is not known, or the model does not run in that dtype there.
        MachineError: this machine cannot be measured.
    """
    from xprofiler.store import new_profile

    check(asked, ProfileArguments)
    return new_profile(asked, progress)


def simulate(
    plan: Plan | PathLike,
    *,
    burstiness: float | None = None,
    own_times: bool = False,
    profile: PathLike | Profile | None = None,
    **load: Unpack[LoadArguments],
) -> Simulated:
    """Return a run of a plan, request by request, on the simulated engine.

    >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> run = xgpt.simulate(plan, num_requests=300, arrival_rate_per_s=5)
    >>> run.figures["ttft_p50_s"] <= run.figures["ttft_p99_s"], 0 <= run.figures["goodput"] <= 1
    (True, True)

    Args:
        burstiness: coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts.
        own_times: replay the workload, a trace, as recorded: its pairs of lengths and its arrival times.
        profile: the profile that the plan was made from; None: the copy kept on this machine.
        workload: a name, a file, or histograms; None: the plan's own.
        num_requests: requests that are measured, by default 2000; some more run before and after them.
        arrival_rate_per_s: rate of Poisson arrivals; None: requests are always waiting.
        seed: seed of lengths and arrivals, by default 0.

    Raises:
        InputError: the plan cannot hold the requests, its profile is not here, or arguments do not go together.
    """
    from xprofiler.store import profile_of
    from xsimulator.run import run_simulation

    check(load, LoadArguments)
    plan = _plan(plan)
    if burstiness is not None and load.get("arrival_rate_per_s") is None:
        raise InputError("burstiness", burstiness, "it goes with `arrival_rate_per_s`")
    arrivals, num_requests = _arrivals(load, 2000, burstiness or 1.0)
    return run_simulation(
        plan,
        profile_of(plan, _given(profile)),
        _given(load.get("workload")),
        num_requests,
        arrivals,
        load.get("seed", 0),
        own_times=own_times,
    )


def replan(
    plan: Plan | PathLike,
    lengths: PathLike,
    *,
    profile: PathLike | Profile | None = None,
    horizon_s: float = 600.0,
    least_gain: float = 0.05,
) -> Replanned:
    """Return the best plan under other lengths than a running plan was made for, its gain, and the switch's cost.

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
        lengths: a trace (CSV, JSON lines), or the URL of a running server: then the plan that it runs now is judged,
            under the lengths that it has observed.
        profile: the profile that the plan was made from; None: the copy kept on this machine.
        horizon_s: seconds in which a change of placement must repay its pause.
        least_gain: least gain of throughput, as a share, for which the plan is changed.

    Raises:
        InputError: the trace is malformed, or the server runs another model.
        MachineError: the server does not answer, or has seen too few requests.
    """
    from xprofiler.store import profile_of
    from xscheduler.replanning import Terms
    from xscheduler.replanning.replanner import Replanned, observe_source, propose

    running, observation = observe_source(_plan(plan), os.fspath(lengths))
    terms = Terms(least_gain=least_gain, horizon_s=horizon_s)
    decision, then = propose(running, profile_of(running, _given(profile)), observation, terms)
    return Replanned(running, observation, decision, then or running)


def bench(
    target: Plan | PathLike,
    *,
    calibrate: bool = False,
    profile: PathLike | Profile | None = None,
    ca_file: PathLike | None = None,
    engine: EngineKind = "native",
    batching: Batching = "flat",
    **load: Unpack[BenchArguments],
) -> Benched:
    """Return predicted and measured figures of a plan on this machine, or a client's figures of an endpoint.

        report = xgpt.bench("plan.json", num_requests=100).report

    Args:
        target: a plan, which is served in a process of its own while it is measured, or the URL of any endpoint.
        calibrate: fit the plan's profile to the measured steps.
        profile: the profile that the plan was made from; None: the copy kept on this machine.
        ca_file: certificate authorities for an https endpoint (PEM); None: the system's.
        engine: engine that runs the plan.
        batching: layout of a whole batch; the prediction is for a flat one.
        workload: request lengths; None: the plan's own, for an endpoint those of summarization.
        num_requests: requests that are measured, by default 300.
        arrival_rate_per_s: rate of Poisson arrivals; None: the engine is kept saturated.
        concurrency: outstanding requests at an endpoint, by default 32.
        stream: ask for streamed answers; those of an endpoint always are.
        seed: seed of the requests, by default 0.

    Raises:
        InputError: the plan cannot hold the requests, or arguments do not go together.
        MachineError: the server does not start or dies, or nothing answers at the endpoint.
    """
    from xgpt import benchmark as benches
    from xgpt.resolve import workload_of
    from xprofiler.store import profile_of

    check(load, BenchArguments)
    is_url = isinstance(target, str) and target.startswith(("http://", "https://"))
    if profile is not None and is_url:
        raise InputError("profile", str(profile), "it goes with a plan; a URL's steps are not known")
    if is_url and calibrate:
        raise InputError("calibrate", calibrate, "it goes with a plan; a URL's steps are not known")
    if ca_file is not None and not is_url:
        raise InputError("ca_file", str(ca_file), "it goes with an https URL")
    if batching != "flat" and is_url:
        raise InputError("batching", batching, "it goes with a plan; the server behind a URL has its own")
    of = str(target) if is_url else _plan(target)
    given = _given(load.get("workload"))
    workload = None if given is None else workload_of(given, of.model if isinstance(of, Plan) else None)
    arrivals, num_requests = _arrivals(load, 300)
    return benches.bench(
        of,
        benches.Load(
            num_requests,
            workload,
            arrivals,
            load.get("stream", False),
            load.get("concurrency", 32),
            None if ca_file is None else Path(ca_file),
        ),
        load.get("seed", 0),
        engine=engine,
        batching=batching,
        profile=profile_of(of, _given(profile)) if profile is not None and isinstance(of, Plan) else None,
        calibrate=calibrate,
    )


def export(plan: Plan | FleetPlan | PathLike, to: Target) -> dict[str, str]:
    """Return the files, by name, that start a plan or a fleet on another machine or platform.

        >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> for name, text in xgpt.export(plan, "script").items():
    ...     print(name, len(text) > 0)
    plan.json True
    start.sh True

    Args:
        to: "script": xgpt's own engine; "vllm": vLLM; "k8s": either on Kubernetes; "dynamo", "llm-d": vLLM on these
            platforms.

    Raises:
        InputError: the plan does not fit its devices, is for another engine, or the target cannot run it.
    """
    from xgpt.core.schema.fleet import FleetPlan
    from xgpt.exporting.export import export
    from xgpt.exporting.fleet import fleet_files

    if isinstance(plan, FleetPlan) or (not isinstance(plan, Plan) and _is_fleet(plan)):
        if to != "k8s":
            raise InputError("to", to, "a fleet is exported to k8s only")
        return fleet_files(_fleet(plan))
    return export(_plan(plan), to)


def report(plan: Plan | FleetPlan | PathLike, *, profile: PathLike | Profile | None = None, seed: int = 0) -> str:
    """Return a plan, or a day's fleet, as one self-contained HTML page.

    >>> import xgpt
    >>> plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8,
    ...                  objective="saturated")
    >>> xgpt.report(plan).startswith("<!doctype html>")
    True

    Args:
        profile: the profile that the plan was made from; None: the copy kept on this machine.
        seed: seed of the simulated requests.

    Raises:
        InputError: the plan's profile is not here, or its memory cannot hold its own workload.
    """
    import numpy as np

    from xgpt.core.schema.fleet import FleetPlan
    from xgpt.reporting.fleet import fleet_report
    from xgpt.reporting.report import report
    from xprofiler.store import profile_of

    if isinstance(plan, FleetPlan) or (not isinstance(plan, Plan) and _is_fleet(plan)):
        if profile is not None:
            raise InputError("profile", str(profile), "a fleet's page simulates nothing: leave it out")
        return fleet_report(_fleet(plan))
    plan = _plan(plan)
    return report(plan, profile_of(plan, _given(profile)), np.random.default_rng(seed))


def ui(*, port: int = 0, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve the planning page on loopback until SIGTERM or SIGINT; call it in the main thread.

        xgpt.ui(port=8001)

    Args:
        port: port to listen on; 0: any free one.
        on_ready: is called with the page's address, which has a token: whoever knows it may ask.

    Raises:
        MachineError: the port cannot be opened.
    """
    from xgpt.exploring.ui import serve

    serve(port, on_ready)


def doctor() -> list[Finding]:
    """Return what was found of this machine, with advice where something keeps its figures from being trusted.

        >>> import xgpt
    >>> len(xgpt.doctor()) > 0
    True

    It takes a few seconds.

    Raises:
        Nothing: what cannot be examined is a finding, too.
    """
    from xgpt.diagnosis import examine

    return examine()


def serve(
    plan: Plan | PathLike, *, on_note: Callable[[str], None] = lambda line: None, dry_run: bool = False, **asked: Any
) -> None:
    """Serve a plan behind an OpenAI-compatible endpoint until SIGTERM or SIGINT, in the main thread.

        xgpt.serve("plan.json", port=8001, replan=False)

    Args:
        on_note: is called with each line on what is started, and in a dry run on what is missing on this machine.
        dry_run: check all that can be checked, and start nothing.
        asked: the fields of `xgpt.ServeRequest`, by name.

    Raises:
        InputError: the plan or an argument is not accepted.
        MachineError: devices, memory or a port are missing, or the engine does not start.
    """
    from xgpt.core.io import parse_arguments
    from xgpt.serving import serve as serving

    request = parse_arguments(asked, serving.ServeRequest)
    serving.serve(_plan(plan), request, on_note, dry_run=dry_run)


@contextmanager
def served(plan: Plan | PathLike, *, engine: EngineKind = "native", replan: bool = False) -> Iterator[str]:
    """Serve a plan in a process of its own, on a free port of this machine, for as long as the block lasts.

        with xgpt.served("plan.json") as url:
            httpx.post(f"{url}/v1/completions", json={...})

    Args:
        engine: engine that runs the plan.
        replan: switch to better plans when lengths change.

    Yields:
        The server's URL.

    Raises:
        MachineError: the server does not start, or dies.
    """
    from tempfile import TemporaryDirectory

    from xgpt import benchmark as benches

    with (
        TemporaryDirectory() as directory,
        benches.served(_plan(plan), Path(directory), engine=engine, replan=replan) as url,
    ):
        yield url


def _arrivals(load: LoadArguments, default: int, burstiness: float = 1.0) -> tuple[ArrivalProcess | None, int]:
    """Return the arrivals of a load (None: saturated), and the number of requests to measure."""
    from xgpt.core.arrival_process import ArrivalProcess

    rates, num_requests = load.get("arrival_rate_per_s"), load.get("num_requests")
    arrivals = None if rates is None else ArrivalProcess.at(rates, burstiness)
    of_stages = None if arrivals is None else arrivals.num_requests
    if of_stages is not None and num_requests is not None:
        accepted = f"the stages bring {of_stages}: leave it out, or leave the last stage's seconds out"
        raise InputError("num_requests", num_requests, accepted)
    return arrivals, of_stages or num_requests or default


def _plan(given: Plan | PathLike) -> Plan:
    from xgpt.core.io import load_json

    return given if isinstance(given, Plan) else load_json(Path(given), Plan, "plan")


def _is_fleet(path: PathLike) -> bool:
    """Return whether a file has the fields of a fleet; False if it cannot be read."""
    import json

    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "kinds" in found and "intervals" in found


def _fleet(given: FleetPlan | PathLike) -> FleetPlan:
    from xgpt.core.io import load_json
    from xgpt.core.schema.fleet import FleetPlan

    return given if isinstance(given, FleetPlan) else load_json(Path(given), FleetPlan, "fleet")


def _given(value: PathLike | T | None) -> str | T | None:
    """Return a name or path as text, and anything else as it is."""
    return os.fspath(value) if isinstance(value, str | os.PathLike) else value
