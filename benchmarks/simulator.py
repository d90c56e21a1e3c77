"""Time the simulator: one closed form, a sweep of closed forms, a run on the simulated engine, and a run by counts.

    python -m benchmarks.simulator [--json FILE]

Closed forms are for GPT-3 175B on 32 A40, and the run is for OPT-13B on four A40 (summarization). GPT-3 341B on 48 A40
shows how long a plan's search would take with the simulated engine. Times are CPU seconds of this process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import click
import numpy as np

import xgpt
from xgpt.core.policies import OneLane, Pool, lane_settings
from xgpt.core.schema import ChunkedSettings, OrcaSettings, RraSettings, StaticSettings, WaaSettings
from xgpt.core.schema.plan import rate_of
from xgpt.core.workload import sample
from xgpt.resolve import load_cluster, load_model, load_workload
from xprofiler import analytic
from xsimulator.capacity import Trial
from xsimulator.clock import LaneClock
from xsimulator.costs.step_cost import LaneCost
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.forecast import FORECASTS, OneLaneModel, TwoLaneModel, estimate
from xsimulator.lengths import Lengths
from xsimulator.stages import degrees, lane, spread

NUM_REQUESTS = 10_000
SWEEP = 20_000
Settings = RraSettings | OrcaSettings | ChunkedSettings | StaticSettings


def closed_forms() -> list[dict[str, object]]:
    """Return, for each policy, the microseconds of one warm estimate and the settings a second of a sweep."""
    spec, _ = load_model("gpt3-175b")
    cluster = load_cluster("a40x32")
    profile = analytic.profile(spec, cluster, spec.default_dtype)
    lengths = Lengths(load_workload("summarization", spec))

    def cost(stages: tuple[int, ...], first: int = 0) -> LaneCost:
        layers = spread(spec.num_layers, [profile.layer(degree).rest.seconds[5] for degree in stages])
        return LaneCost(spec, profile, lane(stages, layers, first_device=first, cluster=cluster))

    one_lane = OneLaneModel(cost(degrees(32, 2, 16)), lengths)
    two_lanes = TwoLaneModel(cost((1,) * 12), cost((1,) * 20, 12), lengths)
    m = one_lane.lane.num_stages
    single: tuple[Settings, ...] = (
        RraSettings(encode_batch=64, decode_iterations=13, microbatches=m),
        OrcaSettings(max_batch=96, microbatches=m),
        ChunkedSettings(token_budget=512 * m, max_batch=96, microbatches=m),
        StaticSettings(batch=96, encode_microbatches=m, decode_microbatches=m),
    )
    rng = np.random.default_rng(0)
    count = rng.integers(m, 512, SWEEP)
    parts = np.full(SWEEP, m)
    sweeps: dict[str, dict[str, np.ndarray]] = {
        "rra": {"encode_batch": count, "decode_iterations": rng.integers(1, 80, SWEEP), "microbatches": parts},
        "orca": {"max_batch": count, "microbatches": parts},
        "chunked": {"token_budget": m * rng.integers(32, 2048, SWEEP), "max_batch": count, "microbatches": parts},
        "static": {"batch": count, "encode_microbatches": parts, "decode_microbatches": parts},
    }
    rows: list[dict[str, object]] = []
    for settings in single:
        kind = settings.kind
        rows.append(
            _row(
                kind,
                lambda s=settings: estimate(one_lane, s),
                lambda k=kind: FORECASTS[k].evaluate(one_lane, **sweeps[k]),
            )  # type: ignore[misc]
        )
    waa = WaaSettings(encode_batch=10, max_decode_batch=200, decode_microbatches=20)
    columns = {
        "encode_batch": rng.integers(1, 64, SWEEP),
        "max_decode_batch": rng.integers(64, 512, SWEEP),
        "decode_microbatches": np.full(SWEEP, 20),
    }
    rows.append(_row("waa", lambda: estimate(two_lanes, waa), lambda: FORECASTS["waa"].evaluate(two_lanes, **columns)))
    return rows


def request_level() -> list[dict[str, object]]:
    """Return the seconds of 10,000 requests on one stage of four devices, and on four stages."""
    spec, _ = load_model("opt-13b")
    cluster = load_cluster("a40x4")
    profile = analytic.profile(spec, cluster, spec.default_dtype)
    workload = load_workload("summarization", spec)
    lengths = Lengths(workload)
    rows: list[dict[str, object]] = []
    for stages, m in (((4,), 1), ((1, 1, 1, 1), 4)):
        layers = spread(spec.num_layers, [1.0] * len(stages))
        cost = LaneCost(spec, profile, lane(stages, layers, cluster=cluster))
        settings = RraSettings(encode_batch=52, decode_iterations=13, microbatches=m)
        predicted = estimate(OneLaneModel(cost, lengths), settings)
        inputs, outputs = sample(workload, NUM_REQUESTS, np.random.default_rng(0))
        columns = zip(inputs.tolist(), outputs.tolist(), strict=True)
        requests = [SimulatedRequest(i, n, lengths.max_output, out) for i, (n, out) in enumerate(columns)]
        rule = lane_settings(settings, predicted["encode_tokens"], predicted["decode_batch"])
        started = time.process_time()
        schedule = OneLane(rule, Pool(10**7, 16))
        log = SimulatedEngine(schedule, LaneClock(cost, schedule), requests).run()
        seconds = time.process_time() - started
        rows.append({"stages": len(stages), "requests": NUM_REQUESTS, "steps": len(log), "seconds": seconds})
    return rows


def of_48_devices() -> list[dict[str, object]]:
    """Return the number of runs of a search for the highest arrival rate on 48 devices, and their times by counts and
    on the engine."""
    return [_searched(kind) for kind in ("chunked", "orca", "rra", "waa")]


def _searched(kind: str) -> dict[str, object]:
    asked = {"model": "gpt3-341b", "cluster": "a40x48", "workload": "summarization", "latency_bound_s": 60.0}
    planned = xgpt.solve(**asked, policy=kind)  # compiles the runs, too
    started = time.process_time()
    with mock.patch.object(Trial, "at", autospec=True, side_effect=Trial.at) as run:
        xgpt.solve(**asked, policy=kind)
    found = {"policy": planned.best.policy.kind, "search_s": time.process_time() - started, "runs": run.call_count}
    plan, profile = planned.best, planned.problem.profile
    for name, by_request in (("counts_s", False), ("engine_s", True)):
        trial = Trial(plan, profile, by_request=by_request)
        found[name] = _seconds(partial(trial.at, 0.9 * rate_of(plan)), 1, 1)
    return found


def _row(kind: str, one: Callable[[], object], sweep: Callable[[], object]) -> dict[str, object]:
    return {"policy": kind, "one_us": 1e6 * _seconds(one, 50), "sweep_per_s": SWEEP / _seconds(sweep, 1)}


def _seconds(run: Callable[[], object], times: int, repeats: int = 5) -> float:
    """Return the CPU seconds of a call, the shortest of a few repeats after a warm-up."""
    run()
    found = []
    for _ in range(repeats):
        started = time.process_time()
        for _ in range(times):
            run()
        found.append((time.process_time() - started) / times)
    return min(found)


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(json_path: Path | None) -> None:
    """Measure the figures, and print them with their goals."""
    forms, runs, large = closed_forms(), request_level(), of_48_devices()
    click.echo(f"{'policy':10}{'one estimate, us':>18}{'configurations a second':>26}")
    for row in forms:
        click.echo(f"{row['policy']:10}{row['one_us']:18.0f}{row['sweep_per_s']:26.0f}")
    click.echo("asked for          200 or less            20000 or more\n")
    for run in runs:
        click.echo(f"{run['requests']} requests, {run['stages']} stages: {run['steps']} steps, {run['seconds']:.2f} s")
    click.echo("asked for: 3 s or less\n")
    for row in large:
        click.echo(
            f"48 devices, {row['policy']}: {row['search_s']:.2f} s for a search with {row['runs']} runs; "
            f"a run by counts {1e3 * row['counts_s']:.1f} ms, by the engine {1e3 * row['engine_s']:.0f} ms"  # type: ignore[operator]
        )
    if json_path is not None:
        json_path.write_text(
            json.dumps({"closed_forms": forms, "request_level": runs, "of_48_devices": large}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
