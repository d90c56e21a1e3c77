"""Compute gains over vLLM's defaults as ranges over assumptions on mixed steps, pace, lengths and bursts.

    python -m benchmarks.gain_ranges [--first 0] [--last 10] [--markdown]

There are ten cases, each with a model, a cluster, a workload and a bound. Each is planned for vLLM's newest version,
and compared with vLLM's defaults on the smallest groups of devices that have memory for the model. The table shows the
plan with the best gain under the worst assumptions, its gain in the arrival rate per device (as planned, under the
worst and under the best assumptions), the worst assumption, and the advice of `xgpt compare` with its least gain.
"""

from __future__ import annotations

import argparse
from math import inf

from benchmarks.gain import default_of
from xgpt.comparing.assumptions import ranges
from xgpt.core.errors import InfeasibleError
from xgpt.core.schema.plan import rate_of
from xgpt.problems import resolve
from xgpt.requests import plan_request
from xscheduler.objectives.best_plans import plan_each
from xscheduler.objectives.capacities import with_capacities

CASES = (
    ("llama-3.1-8b", "h100x1", "azure-conv", 20.0),
    ("llama-3.1-8b", "h100x1", "chat-long", 30.0),
    ("llama-3.1-8b", "h200x1", "code-generation", 30.0),
    ("llama-3.1-8b", "h200x1", "summarization", 15.0),
    ("qwen3-8b", "h100x1", "azure-code", 10.0),
    ("qwen3-8b", "h200x1", "chat-short", 15.0),
    ("qwen3-14b", "h100x1", "azure-conv", 30.0),
    ("qwen3-14b", "h200x1", "translation", 20.0),
    ("mistral-small-24b", "h200x1", "azure-conv", 40.0),
    ("qwen3-30b-a3b", "h200x1", "chat-long", 40.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=len(CASES))
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    edge = "| " if given.markdown else ""
    for model, cluster, workload, bound_s in CASES[given.first : given.last]:
        asked = {"model": model, "cluster": cluster, "workload": workload, "engine": "vllm", "objective": "arrivals"}
        problem = resolve(plan_request(**asked, latency_bound_s=bound_s))
        default = default_of(problem)
        try:
            plans = with_capacities(plan_each(problem), problem.profile)
        except InfeasibleError as error:
            print(f"{model}, {cluster}, {workload}, {bound_s:g} s: {error}", flush=True)
            continue
        assert default is not None
        found = ranges(plans, problem.profile, default, problem.profile, None)
        chosen = max(plans, key=lambda kind: found[kind].least)
        gain = rate_of(plans[chosen]) / plans[chosen].num_devices / (rate_of(default) / default.num_devices)
        best = found[chosen]
        advised = "keep the defaults, 1.00" if best.least < 1 else f"{chosen}, {best.least:.2f}"
        cells = [f"{model}, {cluster}, {workload}, {bound_s:g} s", chosen, f"{gain:.2f}"]
        cells += [f"{best.least:.2f} to {best.most or inf:.2f}", best.worst, advised]
        print(f"{edge}{' | '.join(cells)}{' |' if edge else ''}", flush=True)


if __name__ == "__main__":
    main()
