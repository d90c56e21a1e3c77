"""Classes of requests with bounds of their own: from a workload's file to plan.json, its rule and its simulation."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.schema import Plan
from xgpt.core.schema.plan import rate_of
from xgpt.core.workload import ArrivalProcess
from xgpt.requests import plan_request
from xgpt.solving import Planned, solve
from xsimulator.events import replay
from xsimulator.measures import request_times
from xsimulator.run import accounts_of, run_simulation

TWO = """
classes:
  - {name: interactive, share: 0.3333333333, priority: 1, ttft_s: 1.0, tpot_s: 0.05}
  - {name: batch, share: 0.6666666667}
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """The plan of the two classes, without further options."""
    return planned(tmp_path_factory.mktemp("classes"))


def planned(tmp_path: Path, classes: str = TWO, **asked: object) -> Planned:
    path = tmp_path / "mixed.yaml"
    lengths = "{kind: normal, mean: 600, sd: 300, min: 16, max: 1500}", "{kind: uniform, min: 8, max: 96}"
    path.write_text(f"name: mixed\nsource: made up\ninput: {lengths[0]}\noutput: {lengths[1]}\n{classes}")
    options = {
        "model": "llama-3.1-8b",
        "cluster": "h200x1",
        "workload": str(path),
        "policy": "chunked",
        "headroom": 0.0,
    }
    return solve(plan_request(**(options | asked)))


@pytest.mark.long
@pytest.mark.usefixtures("short_simulations")
def test_the_interactive_class_keeps_its_bounds_beyond_capacity_and_the_batch_does_not_starve(tmp_path: Path) -> None:
    # Beyond capacity steps are full: of batches that keep the same rate the plan has the smallest, with short steps.
    found = planned(tmp_path, order="in-time")
    plan = found.best
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert (plan.constraint.ttft_s, plan.constraint.tpot_s) == (1.0, 0.05)
    rate = 1.5 * rate_of(plan)
    run = run_simulation(plan, found.problem.profile, None, 900, ArrivalProcess.at(rate))
    assert run.kept["interactive"] >= 0.99
    assert run.figures["goodput"] == pytest.approx((run.kept["interactive"] + 2 * run.kept["batch"]) / 3)
    times = {name: request_times(run.steps, 900, encode_emits=True, of_class=name) for name in ("interactive", "batch")}
    # What is left of the capacity, in the time in which requests arrive; the longest waits for what came before it.
    arrives_s = 900 / rate
    num_batch = len(times["batch"].whole_s)
    assert times["batch"].num_lost == 0 and num_batch == pytest.approx(600, rel=0.02)
    assert np.max(times["batch"].whole_s) < 1.2 * arrives_s
    assert replay(policies.build(plan), run.steps) == list(run.steps)


def test_the_report_shows_each_class_with_its_bounds_and_the_share_that_keeps_them(plain: Planned) -> None:
    from xgpt.reporting.report import report

    page = report(plain.best, plain.problem.profile, np.random.default_rng(0))
    table = page[page.index("Classes of requests") :]
    table = re.sub(r"<[^>]+>", " ", table[: table.index("</table>")])
    assert re.search(r"interactive\s+33%\s+1\s+1\s+0.05\s+-\s+(99|100)\.\d%", table)
    assert re.search(r"batch\s+67%\s+0\s+-\s+-\s+-\s+100.0%", table)


def test_requests_are_dealt_out_by_shares(plain: Planned) -> None:
    plan = plain.best
    names = [account.of_class for account in accounts_of(plan, 300)]
    assert all(abs(names[i : i + 60].count("interactive") - 20) <= 2 for i in range(0, 300, 60))
    first = accounts_of(plan, 1)[0]
    assert (first.of_class, first.priority, first.ttft_ns, first.tpot_ns) == ("interactive", 1, 10**9, 5 * 10**7)


@pytest.mark.parametrize(
    ("classes", "asked", "field"),
    [
        (TWO.replace("0.66", "0.33"), {}, "workload.classes"),
        (TWO.replace("batch", "interactive"), {}, "workload"),
        (TWO, {"tpot_s": 0.1}, "tpot_s"),
    ],
)
def test_classes_that_contradict_are_refused(
    tmp_path: Path, classes: str, asked: dict[str, object], field: str
) -> None:
    with pytest.raises(InputError) as error:
        planned(tmp_path, classes, **asked)
    assert str(error.value).startswith(field.split(".")[0])
