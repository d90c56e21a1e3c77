"""List plans' rates and their proven gaps.

    python -m benchmarks.proofs [--profile FILE] [--json FILE] [--before FILE] [--markdown FILE]

The cases are those of docs/guide/bounds.md. --profile adds the case of `make demo`, with a measured profile of opt-125m
on this machine. --before takes the JSON of an earlier version, which this file writes with that version on PYTHONPATH.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

import xgpt

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
@click.option("--json", "path", type=click.Path(path_type=Path))
@click.option("--before", type=click.Path(path_type=Path, exists=True))
@click.option("--markdown", "page", type=click.Path(path_type=Path))
def main(profile: Path | None, path: Path | None, before: Path | None, page: Path | None) -> None:
    rows = {}
    for case, bounds in CASES.items():
        model, cluster, workload, *_ = case.split(", ")
        rows[case] = stated(model=model, cluster=cluster, workload=workload, **({"latency_bound_s": None} | bounds))
    if profile is not None:
        rows[DEMO] = stated(model="opt-125m", cluster="local", profile=str(profile), latency_bound_s=9.8)
    earlier = {} if before is None else json.loads(before.read_text())
    text = table(rows, earlier)
    click.echo(text)
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n")
    if page is not None:
        page.write_text(text + "\n")


def stated(**asked: Any) -> dict[str, Any]:
    started = time.process_time()
    plan = xgpt.plan(**asked)
    seconds, found = time.process_time() - started, plan.estimate.capacity
    assert found is not None
    return {
        "policy": plan.policy.kind,
        "rate": found.rate_per_s,
        "gap": plan.search.gap,
        "method": plan.search.method,
        "simulated": plan.search.simulations,
        "seconds": round(seconds, 1),
    }


def table(rows: dict[str, dict[str, Any]], earlier: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| case | version | plan | requests/s | at most more | found by | simulated | processor seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, row in rows.items():
        for version, row_of_version in (("before", earlier.get(case)), ("now", row)):
            if row_of_version is not None:
                more = "not proven" if row_of_version["gap"] is None else f"{row_of_version['gap']:.1%}"
                cells = (
                    case,
                    version,
                    row_of_version["policy"],
                    f"{row_of_version['rate']:.4g}",
                    more,
                    row_of_version["method"],
                    row_of_version["simulated"],
                )
                lines.append(f"| {' | '.join(map(str, (*cells, row_of_version['seconds'])))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
