"""Plan and serve random checkpoints of every family under every policy, on one device and two, and check their tokens.

    python -m benchmarks.checkpoints [--first 0] [--count 40] [--again]

Each checkpoint has a shape drawn by its number (heads, widths, layers, experts, biases: odd ones on purpose). This
machine is measured for each checkpoint once as `local` and once as `local:2`. From these profiles, `xgpt plan` makes
each policy's plan on the best placement, and on two devices also on each tensor-parallel and pipelined placement. The
engine of every plan runs the same prompts. The plan of `--policy auto` also runs behind the endpoint of `xgpt serve`.
Tokens must equal those of `transformers`. Rows are stored in results/checkpoints, so an interrupted run continues, even
if families have been added since. The exit code is 1 if a token differs, or if a plan that must exist is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

import xgpt
from benchmarks.lib.results import record
from benchmarks.lib.served_plans import served
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.io import write_atomic
from xgpt.reporting.plan_text import placement_in_words
from xprofiler.ranks import degrees

if TYPE_CHECKING:
    from xgpt.core.schema import ModelSpec, Plan
    from xrunner.cluster.workers import Workers

SEED = 7
POLICIES = ("rra", "waa-c", "waa-m", "chunked", "orca", "static")
PLACEMENTS: dict[str, tuple[dict[str, int], ...]] = {"local": ({},), "local:2": ({}, {"tp": 2}, {"pp": 2})}
"""For each cluster, the values of `--fix` for placements."""
RESULTS = Path("results/checkpoints")
EQUAL, REFUSED = "equal", "no such plan"


@dataclass(frozen=True)
class Row:
    """The result of one plan.

    Attributes:
        where: the plan's placement, in words.
        outcome: "equal", "no such plan: ..." if no plan can exist, or the error.
    """

    number: int
    family: str
    cluster: str
    policy: str
    fixed: str
    where: str
    outcome: str

    @property
    def is_right(self) -> bool:
        return self.outcome == EQUAL or self.outcome.startswith(REFUSED)


def family_of(number: int) -> str:
    from tests.numerics.checkpoints import FAMILIES  # imports transformers, which device processes do not need

    return list(FAMILIES)[number % len(FAMILIES)]


def there_is_none(spec: ModelSpec, cluster: str, policy: str, fix: Mapping[str, int]) -> str | None:
    """Return the reason why a policy has no plan on this cluster, or None if it must have one."""
    two_lanes = policy.startswith("waa")
    if two_lanes and cluster == "local":
        return "two lanes need two devices"
    if two_lanes and fix:
        return "each lane has only one of the two devices (so TP or PP within a lane is impossible)"
    if policy == "chunked" and spec.is_encoder_decoder:
        return "an encoder reads whole prompts"
    if fix.get("tp") == 2 and 2 not in degrees(spec, 2):
        return "the number of heads, or of K/V heads, is odd, so two devices cannot divide it"
    layers = min(spec.num_layers, spec.num_encoder_layers or spec.num_layers)
    return "a model of one layer cannot be divided into stages" if fix.get("pp") == 2 and layers < 2 else None


def rows_of(number: int, workers: Workers) -> Iterator[Row]:
    from tests.numerics.checkpoints import random_shape, save
    from tests.numerics.served import greedy

    rng, family = np.random.default_rng([SEED, number]), family_of(number)
    with TemporaryDirectory() as name:
        directory, model = save(Path(name) / "model", family, random_shape(rng, family))
        spec, expected = read_spec(directory), greedy(model)
        for cluster, placements in PLACEMENTS.items():
            for fix in placements:
                for policy in POLICIES if fix else (*POLICIES, "auto"):
                    where, outcome = _outcome(spec, directory, cluster, policy, fix, workers, expected)
                    fixed = ", ".join(f"{name}={value}" for name, value in fix.items())
                    yield Row(number, family, cluster, policy, fixed, where, outcome)


def _outcome(
    spec: ModelSpec,
    directory: Path,
    cluster: str,
    policy: Any,
    fix: Mapping[str, int],
    workers: Workers,
    expected: Sequence[Sequence[int]],
) -> tuple[str, str]:
    from tests.planned import SHORT

    none, where = there_is_none(spec, cluster, policy, fix), ""
    try:
        try:
            plan = xgpt.plan(
                model=directory, cluster=cluster, workload=SHORT, policy=policy, fix=fix, latency_bound_s=None
            )
        except (InputError, InfeasibleError) as error:
            return "", f"refused: {error}" if none is None else f"{REFUSED}: {none}"
        where = placement_in_words(plan)
        found = _served(plan, directory, workers, behind_endpoint=policy == "auto")
    except Exception as error:  # this gets its own row, so that the other plans still run
        traceback.print_exc()
        return where, f"{type(error).__name__}: {str(error)[:200]}"
    wrong = sum(a != list(b) for a, b in zip(found, expected, strict=True))
    return where, f"{wrong} of {len(expected)} outputs differ" if wrong else EQUAL


def _served(plan: Plan, directory: Path, workers: Workers, *, behind_endpoint: bool) -> list[list[int]]:
    from tests.numerics.served import served_here, served_on

    if behind_endpoint:
        return _answered(plan, directory)
    return served_on(workers, plan) if plan.devices_per_replica == 2 else served_here(plan)


def _answered(plan: Plan, directory: Path) -> list[list[int]]:
    from tests.numerics.served import MAX_OUTPUT, PROMPTS

    asked = {"prompt": PROMPTS, "max_tokens": MAX_OUTPUT, "temperature": 0, "ignore_eos": True}
    with served(plan, directory) as server:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
            asked["model"] = json.load(response)["data"][0]["id"]
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            choices = json.load(response)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def kept(number: int) -> list[Row] | None:
    path = RESULTS / f"{number}.json"
    return [Row(**row) for row in json.loads(path.read_text())] if path.is_file() else None


def tables(rows: Sequence[Row]) -> None:
    """Store the numbers of plans by family, and the reasons of combinations without a plan."""
    equal, right = (sum(test(row) for row in rows) for test in (lambda row: row.outcome == EQUAL, lambda r: r.is_right))
    lines = ["| family | checkpoints | plans on one device | on two | combinations without a plan | failed |", ""]
    for family, members in groupby(sorted(rows, key=lambda row: row.family), key=lambda row: row.family):
        members_list = list(members)
        one, two = (sum(r.outcome == EQUAL and r.cluster == cluster for r in members_list) for cluster in PLACEMENTS)
        none = sum(r.is_right and r.outcome != EQUAL for r in members_list)
        failed = sum(not r.is_right for r in members_list)
        lines.append(f"| {family} | {len({r.number for r in members_list})} | {one} | {two} | {none} | {failed} |")
    record(
        "checkpoints/families",
        "{equal} plans of {count} random checkpoints of {families} families, {answered} of them behind the endpoint, "
        "gave the same tokens as transformers for every prompt; {failed} failed.",
        lines,
        equal=equal,
        count=len({row.number for row in rows}),
        families=len({row.family for row in rows}),
        answered=sum(row.policy == "auto" for row in rows),
        failed=len(rows) - right,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of the first checkpoint")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--again", action="store_true", help="run finished checkpoints again")
    options = parser.parse_args()
    import torch

    from xrunner.cluster.workers import Workers

    torch.set_num_threads(1)
    rows: list[Row] = []
    with TemporaryDirectory() as cache, Workers(2) as workers:
        os.environ["XDG_CACHE_HOME"] = cache  # profiles of models that are deleted afterwards
        for number in range(options.first, options.first + options.count):
            kept_row = None if options.again else kept(number)
            if kept_row is None:
                started = time.perf_counter()
                kept_row = list(rows_of(number, workers))
                write_atomic(RESULTS / f"{number}.json", json.dumps([asdict(row) for row in kept_row], indent=1) + "\n")
                right, seconds = sum(row.is_right for row in kept_row), time.perf_counter() - started
                print(
                    f"{number:3} {kept_row[0].family:10} {right} of {len(kept_row)} right, {seconds:.0f} s", flush=True
                )
                print(*(f"    {row}" for row in kept_row if not row.is_right), sep="\n", end="", flush=True)
            rows += kept_row
    tables(rows)
    sys.exit(any(not row.is_right for row in rows))


if __name__ == "__main__":
    main()
