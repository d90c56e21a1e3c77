"""Run each policy's best plan on two cores as two devices, and compare it with its prediction.

    python -m benchmarks.two_devices [--layers 6] [--requests 100] [--traces DIR] [--json two_devices.json]

The model has half of OPT-125M's layers and random weights. The engine runs in this process, and each worker in a
separate process, without HTTP. A closed loop keeps the engine saturated. `--traces` writes each plan's simulated and
measured steps side by side as a Chrome trace.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path

import numpy as np

from xgpt.core.io import load_json
from xgpt.core.schema import Constraint, Histogram, Plan, Profile, StepRecord, Workload
from xgpt.core.workload import sample
from xgpt.resolve import load_cluster, load_model
from xgpt.serving.engine_process import build_replica
from xprofiler.others import gflops
from xprofiler.store import obtain_profile, profile_of
from xrunner.cluster.process import ALIVE_S
from xrunner.generation import Generation
from xrunner.replicas import Replicas
from xscheduler.objectives.best_plans import plan_each
from xscheduler.problem import Problem
from xsimulator.run import outstanding_requests, read_log, simulate, warm_up_requests
from xsimulator.timeline import Timeline, chrome_trace

MAX_CONTEXT = 256
"""Context in tokens, the next power of two above the workload's longest request."""


@dataclass
class Row:
    """One policy's best plan: predictions of the search and of simulation, measurements, and idle shares by device."""

    policy: str
    placement: str
    predicted_rps: float
    simulated_rps: float
    measured_rps: float
    predicted_latency_s: float
    measured_latency_s: float
    simulated_idle: list[float]
    measured_idle: list[float]

    @property
    def error(self) -> float:
        return self.predicted_rps / self.measured_rps - 1


def workload() -> Workload:
    """Return a workload of 64 input and 16 output tokens on average, so short that a run takes half a minute."""
    lengths = np.arange(1, 129)

    def histogram(mean: float, deviation: float, most: int) -> Histogram:
        kept = lengths[:most]
        weights = np.exp(-0.5 * ((kept - mean) / deviation) ** 2)
        return Histogram(lengths=tuple(kept.tolist()), probabilities=tuple((weights / weights.sum()).tolist()))

    return Workload(name="short", input=histogram(64, 20, 128), output=histogram(16, 6, 40))


def resolve(model: str, layers: int, profile_path: str | None) -> Problem:
    """Return the problem. A profile is measured only up to the workload's lengths, which halves the time."""
    spec, _ = load_model(model)
    spec = spec.model_copy(update={"max_context": MAX_CONTEXT, "num_layers": layers})
    cluster = load_cluster("local:2")
    if profile_path is not None:
        profile = load_json(Path(profile_path), Profile, "profile")
    else:
        started = time.perf_counter()
        profile = obtain_profile(spec, None, cluster)
        print(f"profile: {time.perf_counter() - started:.0f} s, spread {profile.spread:.1%}", flush=True)
    return Problem(spec, None, cluster, workload(), profile, Constraint())


def placement(plan: Plan) -> str:
    stages = [
        f"{stage.lane} {stage.decode_layers[1] - stage.decode_layers[0]}x{stage.tp}".removeprefix("both ")
        for stage in plan.stages
    ]
    return f"{plan.replicas} replica(s): {', '.join(stages)}"


def run(plan: Plan, num_requests: int, rng: np.random.Generator) -> tuple[list[list[StepRecord]], list[float]]:
    """Return the step log of each replica, and each device's idle share from the first step to the last."""
    logs: list[list[StepRecord]] = [[] for _ in range(plan.replicas)]
    ended = [0] * plan.replicas

    def note(number: int, record: StepRecord) -> None:
        logs[number].append(record)
        ended[number] += len(record.finished)

    engine = Replicas(lambda number, _: build_replica(plan, number, partial(note, number)), plan.replicas)
    try:
        # The window opens and closes at steps that encode, so up to two more batches must end.
        enough = num_requests // plan.replicas + warm_up_requests(plan) + 2 * ceil(plan.estimate.encode_batch) + 2
        total = 2 * plan.replicas * (enough + outstanding_requests(plan))
        inputs, outputs = sample(plan.workload, total, rng)
        waiting = [
            Generation(
                i,
                tuple(rng.integers(3, plan.model.vocab_size, int(inputs[i])).tolist()),
                plan.workload.output.lengths[-1],
                output_length=int(outputs[i]),
            )
            for i in range(total)
        ]
        for _ in range(min(total, plan.replicas * outstanding_requests(plan))):
            engine.submit(waiting.pop())
        while min(ended) < enough:
            tokens = engine.step()
            if tokens is None:
                engine.wait(0.05)
                continue
            for token in tokens:
                if token.finish is not None:
                    engine.submit(waiting.pop())
        time.sleep(2 * ALIVE_S)  # for the workers' last messages
        busy = [use.busy_s for use in engine.uses() if "worker" in use.process]
    finally:
        engine.close()
    seconds = max(log[-1].end_ns for log in logs) - min(log[0].start_ns for log in logs)
    return logs, [round(1 - each / (seconds / 1e9), 3) for each in busy]


def measure(plan: Plan, num_requests: int, traces: Path | None, profile_path: str | None) -> Row:
    kind = plan.policy.kind
    busy_ns: Counter[tuple[str, int]] = Counter()
    simulated, simulated_log = simulate(
        plan,
        profile_of(plan, profile_path),
        plan.workload,
        num_requests,
        np.random.default_rng(3),
        on_span=lambda span: busy_ns.update({(span.lane, span.stage): span.end_ns - span.start_ns}),
    )
    logs, idle = run(plan, num_requests, np.random.default_rng(3))
    each = [read_log(plan, plan.workload, log, num_requests // plan.replicas, saturated=True) for log in logs]
    if traces is not None:
        traces.mkdir(exist_ok=True)
        both = Timeline(f"{kind}, simulated", simulated_log), Timeline(f"{kind}, measured", logs[0])
        (traces / f"{kind}.json").write_text(chrome_trace(*both))
    return Row(
        kind,
        placement(plan),
        plan.estimate.throughput_rps,
        simulated.throughput_rps,
        sum(m.throughput_rps for m in each),
        plan.estimate.latency_s,
        max(m.latency_s for m in each),
        simulated_idle(plan, simulated_log, busy_ns),
        idle,
    )


def simulated_idle(plan: Plan, log: list[StepRecord], busy_ns: Counter[tuple[str, int]]) -> list[float]:
    """Return, for each device, the share of time in which its stage has no step, by replica and stage."""
    total_ns = log[-1].end_ns - log[0].start_ns
    seen: Counter[str] = Counter()
    shares = []
    for stage in plan.stages:
        share = round(1 - busy_ns[stage.lane, seen[stage.lane]] / total_ns, 3)
        shares += [share] * stage.tp
        seen[stage.lane] += 1
    return shares * plan.replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument(
        "--layers",
        type=int,
        default=6,
        help="number of the model's layers to keep; with fewer, profile and runs are shorter",
    )
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--bound", type=float, help="latency bound in seconds; none by default")
    parser.add_argument("--policies", default="rra,waa,orca,chunked,static")
    parser.add_argument("--profile", help="profile of local:2; by default the cached one, or a new one")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    subject = resolve(options.model, options.layers, options.profile)
    plans = plan_each(subject.under(Constraint(latency_bound_s=options.bound)))
    rows = []
    calibration = [gflops()]
    print(
        f"{'policy':8} {'placement':44} {'predicted':>9} {'simulated':>9} {'measured':>9} {'error':>7}  "
        "latency s, idle shares: predicted / measured"
    )
    for kind in options.policies.split(","):
        if kind not in plans:
            print(f"{kind:8} no plan")
            continue
        row = measure(plans[kind], options.requests, options.traces, options.profile)
        rows.append(row)
        calibration.append(gflops())
        print(
            f"{row.policy:8} {row.placement:44} {row.predicted_rps:9.2f} {row.simulated_rps:9.2f} "
            f"{row.measured_rps:9.2f} {row.error:+7.1%}  {row.predicted_latency_s:.2f} / {row.measured_latency_s:.2f}, "
            f"{row.simulated_idle} / {row.measured_idle}",
            flush=True,
        )
        if options.json:
            document = {"calibration_gflops": calibration, "rows": [asdict(each) for each in rows]}
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    chosen = max(rows, key=lambda row: row.predicted_rps)
    best = max(rows, key=lambda row: row.measured_rps)
    behind = chosen.measured_rps / best.measured_rps - 1
    print(f"chosen: {chosen.policy}, measured {behind:+.1%} from the best, {best.policy}")
    print(f"calibration, GFLOP/s of one product: {calibration}")


if __name__ == "__main__":
    main()
