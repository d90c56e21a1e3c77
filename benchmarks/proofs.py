"""List plans' rates and their proven gaps.

    python -m benchmarks.proofs [--profile FILE]

The cases are those of docs/guide/bounds.md. --profile adds the case of `make demo`, with a measured profile of opt-125m
on this machine.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

import xgpt
from benchmarks.lib.results import record, table

CASES: dict[str, dict[str, Any]] = {
    "llama-3.1-70b, h100x8, azure-conv, 15 s": {"latency_bound_s": 15.0},
    "qwen3-32b, h200x8, azure-conv, 10 s": {"latency_bound_s": 10.0},
    "opt-13b, a40x4, summarization, 8 s": {"latency_bound_s": 8.0},
    "opt-13b, h100x8, summarization, 8 s": {"latency_bound_s": 8.0},
    "llama-3.1-8b, h100x8, azure-code, first token 0.5 s, each token 20 ms": {"ttft_s": 0.5, "tpot_s": 0.02},
}
DEMO = "opt-125m, this machine, summarization, 9.8 s (`make demo`)"


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--profile", type=click.Path(path_type=Path, exists=True))
def main(profile: Path | None) -> None:
    rows = {}
    for case, bounds in CASES.items():
        model, cluster, workload, *_ = case.split(", ")
        rows[case] = stated(model=model, cluster=cluster, workload=workload, **({"latency_bound_s": None} | bounds))
    if profile is not None:
        rows[DEMO] = stated(model="opt-125m", cluster="local", profile=str(profile), latency_bound_s=9.8)
    columns = ("case", "policy", "requests/s", "gap", "found by", "simulated settings", "processor seconds")
    claim = "No other schedule of the searched space serves more than this share above the plan."
    record("scheduler/gaps", claim, table(columns, [[case, *cells] for case, cells in rows.items()]))


def stated(**asked: Any) -> list[str]:
    started = time.process_time()
    plan = xgpt.plan(**asked)
    seconds, found, search = time.process_time() - started, plan.estimate.capacity, plan.search
    assert found is not None
    gap = "not proven" if search.gap is None else f"{search.gap:.1%}"
    cells = [plan.policy.kind, f"{found.rate_per_s:.4g}", gap, search.method, str(search.simulations)]
    return [*cells, f"{seconds:.1f}"]


if __name__ == "__main__":
    main()
