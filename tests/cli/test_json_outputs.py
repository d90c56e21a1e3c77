"""What each command says with --json keeps to its published schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.attack.target import save_checkpoint
from tests.cli.commands import PROBLEM, Xgpt
from tests.fakes import FakeExecutor, fake_app, fake_engine, running
from tests.planned import planned, problem_of
from tools.make_schema import FOLDER, OUTPUTS
from xgpt.cli import COMMANDS
from xgpt.core.io import dump_json

BOUND = ("--latency-bound", "20")
CURRENT = "vllm serve m --max-num-seqs 64"
WITHOUT = {"serve", "report", "export", "ui", "completion", "autoscale", "watch"}
"""Commands that have no --json."""


def check(xgpt: Xgpt, command: str, *arguments: str) -> None:
    """Run a command and hold what it says to its schema, in which no field is unknown."""
    ran = xgpt(command, *arguments, "--json")
    assert ran.code == 0 and "Warning" not in ran.err, ran.err
    jsonschema.validate(json.loads(ran.out), json.loads((FOLDER / f"{command}.json").read_text()))


def test_every_command_with_json_has_a_schema() -> None:
    assert set(COMMANDS) - WITHOUT == set(OUTPUTS)


def test_planning(xgpt: Xgpt, plan: Path, tmp_path: Path) -> None:
    saturated = (*PROBLEM, *BOUND, "--objective", "saturated")
    check(xgpt, "plan", *saturated, "--policy", "orca", "-o", "orca.json")
    check(xgpt, "compare", *saturated, "--current", CURRENT)
    check(xgpt, "simulate", str(plan), "--requests", "200")
    check(xgpt, "simulate", str(plan), "--requests", "200", "--arrival-rate", "2")
    (tmp_path / "lengths.csv").write_text("input,output\n" + "40,60\n60,100\n" * 200)
    check(xgpt, "replan", "orca.json", "--lengths", str(tmp_path / "lengths.csv"))
    check(xgpt, "profile", *PROBLEM[:4])


@pytest.mark.long
def test_other_searches(xgpt: Xgpt) -> None:
    saturated = (*PROBLEM, *BOUND, "--objective", "saturated")
    check(xgpt, "plan", *PROBLEM, *BOUND, "--policy", "orca", "-o", "orca.json")
    for search in ("exhaustive", "optuna"):
        check(xgpt, "plan", *saturated, "--policy", "orca", "--search", search, "-o", f"{search}.json")
    check(xgpt, "compare", *saturated)


def test_a_day(xgpt: Xgpt, tmp_path: Path) -> None:
    rows = "".join(f"{second},200,50\n" for second in range(600))
    (tmp_path / "day.csv").write_text(f"timestamp,input,output\n{rows}")
    day = ("--trace", str(tmp_path / "day.csv"), "--interval", "300")
    check(xgpt, "fleet", *day, *PROBLEM[:4], *BOUND, "--policy", "orca")


@pytest.mark.long
@pytest.mark.timeout(180)
def test_measuring_a_plan(xgpt: Xgpt, tmp_path: Path) -> None:
    plan = planned(problem_of(save_checkpoint(tmp_path / "model"), 1), "orca")
    (tmp_path / "plan.json").write_text(dump_json(plan))
    check(xgpt, "bench", str(tmp_path / "plan.json"), "--requests", "8")


def test_measuring_an_endpoint(xgpt: Xgpt, tmp_path: Path) -> None:
    with running(fake_app(fake_engine(FakeExecutor()))) as url:
        (tmp_path / "lengths.csv").write_text("input,output\n" + "4,6\n" * 8)
        check(xgpt, "bench", url, "--workload", str(tmp_path / "lengths.csv"), "--requests", "4")
