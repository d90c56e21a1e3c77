"""Budgets from slack go by the clock, and run as a user runs them: planned, served, the log replayed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.commands import Xgpt
from tests.numerics.checkpoints import VOCABULARY, save
from tests.planned import cpus
from xgpt.benchmark import served
from xgpt.client import ClientRequest, replay
from xgpt.core import policies
from xgpt.core.io import dump_json, load_json, read_step_log
from xgpt.core.schema import ClusterSpec, Plan, SlackBudget
from xgpt.core.schema.step_log import StepRecord
from xscheduler.objectives import tuning
from xsimulator import events

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, VOCABULARY, n).tolist() for n in RNG.integers(1, 90, 60)]
OUTPUTS = RNG.integers(1, 30, 60).tolist()
ARRIVALS_S = np.cumsum(RNG.exponential(0.01, 60)).tolist()
LENGTHS = {"input": {"kind": "uniform", "min": 1, "max": 90}, "output": {"kind": "uniform", "min": 1, "max": 30}}


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "NUM_TRIALS", 4)
    monkeypatch.setattr(tuning, "DRAWS", (1,))
    monkeypatch.setattr(tuning, "NUM_PROCESSES", 1)


def slow() -> ClusterSpec:
    """A device about as fast as a core of this machine is with so small a model."""
    cluster = cpus(1)
    efficiency = cluster.device.efficiency.model_copy(update={"step_s": 2e-3, "matrix": 0.2})
    device = cluster.device.model_copy(update={"efficiency": efficiency})
    return cluster.model_copy(update={"device": device})


def planned(xgpt: Xgpt, checkpoint: Path, policy: str) -> Plan:
    Path("cluster.yaml").write_text(dump_json(slow()))
    Path("lengths.yaml").write_text(json.dumps({"name": "short", "source": "made up", **LENGTHS}))
    output = f"{policy}.json"
    problem = ("--model", str(checkpoint), "--cluster", "cluster.yaml", "--workload", "lengths.yaml")
    bounds = ("--latency-bound", "inf", "--ttft", "0.1", "--tpot", "0.004")
    ran = xgpt("plan", *problem, *bounds, "--policy", policy, "-o", output)
    assert ran.code == 0, ran.err
    return load_json(Path(output), Plan, "plan")


def run(plan: Plan, directory: Path) -> tuple[list[list[int]], list[StepRecord]]:
    """Serve the plan, send all requests as they arrive: the answers, and the log."""
    requests = [
        ClientRequest(prompt, output, max(OUTPUTS), send_at_s)
        for prompt, output, send_at_s in zip(PROMPTS, OUTPUTS, ARRIVALS_S, strict=True)
    ]
    directory.mkdir()
    with served(plan, directory, directory / "steps.jsonl") as url:
        results = asyncio.run(replay(url, requests, concurrency=None))
    assert not [result.error for result in results if result.error is not None]
    return [result.token_ids for result in results], read_step_log(directory / "steps.jsonl")


@pytest.mark.long
def test_what_goes_by_the_clock_is_served_and_replayed(xgpt: Xgpt, tmp_path: Path) -> None:
    checkpoint, _ = save(tmp_path / "model", "llama", "grouped")
    fixed = planned(xgpt, checkpoint, "chunked")
    expected, _ = run(fixed, tmp_path / "fixed")
    plan = planned(xgpt, checkpoint, "slack")
    if getattr(plan.policy, "slack", None) is None:  # tuning may keep to the fixed budget that it begins with
        budget = SlackBudget(least_tokens=8, most_tokens=256)
        plan = plan.model_copy(update={"policy": plan.policy.model_copy(update={"slack": budget})})
    tokens, log = run(plan, tmp_path / "slack")
    assert tokens == expected
    # The simulated engine, fed with the log's arrivals and times, decides every step alike.
    assert events.replay(policies.build(plan), log) == log
    assert any(step.encode and step.decode for step in log)
