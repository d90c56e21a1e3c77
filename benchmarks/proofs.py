"""List plans' rates, their proven gaps and the time that they take.

    python -m benchmarks.proofs [--times 3] [--profile FILE]

--profile adds the case of `make demo`, with a measured profile of opt-125m on this machine. Each case is planned
`--times` times; the plans must be equal byte for byte, and the table has the median of their processor seconds.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import yaml

import xgpt
from benchmarks.lib.results import record, table
from benchmarks.same_plans import timeless
from xgpt.resolve import load_cluster

FIRST_TOKEN = {"ttft_s": 0.5, "tpot_s": 0.03}
CASES: dict[tuple[str, str, str], dict[str, float]] = {
    ("llama-3.1-8b", "h100x1", "azure-code"): FIRST_TOKEN,
    ("llama-3.1-8b", "h200x1", "azure-conv"): {"latency_bound_s": 8.0},
    ("opt-13b", "a40x4", "summarization"): {"latency_bound_s": 8.0},
    ("t5-11b", "a40x8", "translation"): {"latency_bound_s": 12.0},
    ("opt-13b", "h100x8", "summarization"): {"latency_bound_s": 8.0},
    ("llama-3.1-8b", "h100x8", "azure-code"): {"ttft_s": 0.5, "tpot_s": 0.02},
    ("qwen3-32b", "h200x8", "azure-conv"): {"latency_bound_s": 10.0},
    ("llama-3.1-70b", "h100x8", "azure-conv"): {"latency_bound_s": 15.0},
    ("gpt3-39b", "a40x16", "chat-short"): {"latency_bound_s": 30.0},
    ("gpt3-175b", "a100x16", "chat-long"): {"latency_bound_s": 60.0},
    ("qwen3-235b-a22b", "h200x32", "chat-long"): {"latency_bound_s": 30.0},
    ("deepseek-v3", "h200x64", "chat-long"): {"latency_bound_s": 30.0},
}


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--times", default=1, show_default=True)
@click.option("--profile", type=click.Path(path_type=Path, exists=True))
def main(times: int, profile: Path | None) -> None:
    rows = []
    with TemporaryDirectory() as folder:
        larger = Path(folder, "h200x64.yaml")
        spec = load_cluster("h200x32").model_copy(update={"name": "h200x64", "num_nodes": 8})
        larger.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))
        for (model, cluster, workload), bounds in CASES.items():
            name = str(larger) if cluster == "h200x64" else cluster
            asked = {"latency_bound_s": None, "model": model, "cluster": name, "workload": workload} | bounds
            rows.append([f"{model}, {cluster}, {workload}, {_words(bounds)}", *stated(times, **asked)])
    seconds = sum(float(row[-1]) for row in rows)
    if profile is not None:
        case = stated(times, model="opt-125m", cluster="local", profile=str(profile), latency_bound_s=9.8)
        rows.append(["opt-125m, this machine, summarization, 9.8 s (`make demo`)", *case])
    columns = ("case", "policy", "requests/s", "gap", "found by", "simulated settings", "processor seconds")
    claim = (
        "No other schedule of the searched space serves more than the gap above the plan. All cases but the demo's "
        "take {seconds} s of a processor together; each was planned {times} times, with equal plans."
    )
    record("scheduler/gaps", claim, table(columns, rows), seconds=f"{seconds:.1f}", times=str(times))


def _words(bounds: dict[str, float]) -> str:
    if (whole := bounds.get("latency_bound_s")) is not None:
        return f"{whole:g} s"
    return f"first token {bounds['ttft_s']:g} s, each token {1e3 * bounds['tpot_s']:g} ms"


def stated(times: int, **asked: Any) -> list[str]:
    seconds, hashes = [], set()
    for _ in range(times):
        started = time.process_time()
        plan = xgpt.plan(**asked)
        seconds.append(time.process_time() - started)
        hashes.add(hashlib.sha256(json.dumps(timeless(plan)).encode()).hexdigest())
    assert len(hashes) == 1, f"{asked}: plans differ"
    found, search = plan.estimate.capacity, plan.search
    assert found is not None
    gap = "not proven" if search.gap is None else f"{search.gap:.1%}"
    click.echo(f"{asked['model']}: {hashes.pop()[:12]} {gap} {' '.join(f'{each:.2f}' for each in seconds)}")
    cells = [plan.policy.kind, f"{found.rate_per_s:.4g}", gap, search.method, str(search.simulations)]
    return [*cells, f"{median(seconds):.1f}"]


if __name__ == "__main__":
    main()
