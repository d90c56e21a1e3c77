"""A plan's answers to its user: the command to run, what the log asks for, tables that fit the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import sys
import termios
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.cli.commands import Xgpt
from tests.contract.scenarios import problem
from tests.rings import few
from xgpt.cli.render import plans_table
from xgpt.comparing.launched import read_current
from xgpt.comparing.scoring import score_current
from xgpt.core.io import dump_json, load_json
from xgpt.core.schema import ChunkedSettings, Plan
from xgpt.core.schema.plan import rate_of
from xgpt.deciding.commands import engine_command
from xgpt.resolve import load_engine
from xscheduler.schedule import scheduler

ON = ("--model", "llama-3.1-8b", "--cluster", "h100x8", "--policy", "chunked", "--objective", "saturated")


def planned(engine: str, tp: int = 2, dtype: str = "bfloat16") -> Plan:
    subject = problem("llama-3.1-8b", "h200x8", "azure-conv", 6.0)
    subject = replace(subject, engine=load_engine(engine))
    scheduled = scheduler(subject)
    placement = scheduled.candidates.uniform_placement("chunked", tp, 1, 8 // tp, 1)
    settings = ChunkedSettings(token_budget=4096, max_batch=96, **placement.fixed)
    return scheduled.score(settings, placement)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_the_command_is_read_back_as_the_plan(engine: str) -> None:
    plan = planned(engine)
    command = engine_command(plan)
    assert command is not None
    found = read_current(command, plan.cluster)
    assert (found.tp_degree, found.num_stages, found.max_num_batched_tokens, found.max_num_seqs) == (2, 1, 4096, 96)
    assert found.framework == engine and found.model == "meta-llama/Llama-3.1-8B-Instruct"
    if engine == "vllm":
        subject = problem("llama-3.1-8b", "h200x8", "azure-conv", 6.0)
        again = score_current(subject, found)
        assert isinstance(again.policy, ChunkedSettings)
        assert (again.policy.token_budget, again.policy.max_batch) == (4096, 96)
    else:
        assert "vllm" not in command


def test_vllm_runs_at_most_one_request_for_each_token_of_a_step() -> None:
    for engine, most in (("vllm", 64), ("sglang", 300)):
        subject = replace(problem("llama-3.1-8b", "h200x8", "azure-conv", 6.0), engine=load_engine(engine))
        candidates = scheduler(subject).candidates
        space = candidates.space("chunked", candidates.uniform_placement("chunked", 2, 1, 4, 1))
        columns = {"token_budget": np.array([64]), "max_batch": np.array([300])}
        assert space.settings(columns, 0).max_batch == most  # type: ignore[union-attr]


def test_a_plan_for_a_log_says_what_to_run_and_what_the_log_asks_for(xgpt: Xgpt) -> None:
    rows = "".join(f"{0.5 * i},{100 + i % 50},{20 + i % 30}\n" for i in range(500))
    Path("day.csv").write_text("time_s,prompt_tokens,completion_tokens\n" + rows)
    ran = xgpt("plan", "--latency-bound", "8", *ON[:-2], "--workload", "day.csv", "--engine", "vllm")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) <= 80
    text = " ".join(ran.out.replace(" \\\n", " ").split())
    command = re.search(r"(vllm serve .*?--gpu-memory-utilization [\d.]+)", text)
    assert command is not None and shlex.split(command[1])[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    assert re.match(r"Run llama-3.1-8b: chunked, TP1 on 1 x h100-80gb-hbm3, vLLM", text), "the fewest that hold the log"
    assert re.search(r"Your load: 2(\.\d+)?/s at its busiest \(\+\d+:\d\d", text)
    assert "replayed, it keeps the bounds for all of 500 requests" in text and "Devices tried: 1" in text
    plan = load_json(Path("plan.json"), Plan, "plan")
    assert plan.recommendation is not None and plan.recommendation.best.num_devices == plan.num_devices == 1
    assert plan.recommendation.best.rate_per_s.value == rate_of(plan)
    ran = xgpt("simulate", "plan.json", "--workload", "day.csv", "--own-times", "--requests", "50")
    assert ran.code == 0, ran.err
    assert "note: the figures cover only the first 50 of 500 requests; --requests all replays all of these" in ran.err
    ran = xgpt("simulate", "plan.json", "--workload", "day.csv", "--own-times", "--since", "125", "--requests", "50")
    assert "first 50 of 250 requests after --since 125; --requests all replays all of these" in ran.err
    assert "at its busiest (+0:02 to +0:03)" in ran.out, "windows began at +0:00"
    assert "requests/s" in ran.out and "bound" in ran.out and "_" not in ran.out, "words and bounds, no fields' names"
    Path("hour.csv").write_text("time_s,prompt_tokens,completion_tokens\n" + rows[: rows.index("\n30.0,") + 1])
    ran = xgpt("simulate", "plan.json", "--workload", "hour.csv", "--own-times", "--requests", "60", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["num_requests"] == 60 and "were measured" not in ran.err


def test_a_log_does_not_ask_for_fewer_devices_than_one(xgpt: Xgpt) -> None:
    Path("day.csv").write_text("time_s,input,output\n" + "".join(f"{0.5 * i},100,20\n" for i in range(200)))
    on = ("--model", "opt-125m", "--cluster", "h200x1", "--policy", "orca", "--objective", "saturated")
    ran = xgpt("plan", "--latency-bound", "8", *on, "--workload", "day.csv")
    assert ran.code == 0, ran.err
    text = " ".join(ran.out.split())
    assert "Your load: 2" in text and "Devices" not in text


@pytest.mark.long
def test_a_plan_says_what_its_order_of_admission_lacks_in_simulation(xgpt: Xgpt) -> None:
    figures, few = {}, ("--fix", "max_batch=16")
    for order in ("fcfs", "sjf", "lpt", "edf"):
        ran = xgpt(
            "plan",
            "--latency-bound",
            "8",
            *ON,
            "--workload",
            "chat-short",
            "--order",
            order,
            "--force",
            "--explain",
            *few,
        )
        assert ran.code == 0, ran.err
        assert ("the figures are those of fcfs" in " ".join(ran.out.split())) == (order in ("lpt", "edf"))
        ran = xgpt("simulate", "plan.json", "--arrival-rate", "1000", "--requests", "300", "--json")
        assert ran.code == 0, ran.err
        figures[order] = json.loads(ran.out)
    assert figures["lpt"] == figures["edf"] == figures["fcfs"] != figures["sjf"]


def test_long_replays_are_counted_with_the_times_of_the_engine(
    xgpt: Xgpt, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of 100,000 requests took a minute."""
    rows = [f"{0.4 * i + 0.3 * (i % 3)},{100 + i % 50},{20 + i % 30}" for i in range(300)]
    Path("hour.csv").write_text("\n".join(["time_s,prompt_tokens,completion_tokens", *rows]) + "\n")
    replay = ("simulate", "plan.json", "--workload", "hour.csv", "--own-times", "--since", "60", "--json")
    exact, part = (json.loads(xgpt(*replay, "--requests", count).out) for count in ("all", "20"))
    assert (exact["num_requests"], part["num_requests"]) == (sum(float(row.split(",")[0]) >= 60 for row in rows), 20)
    grown = json.loads(xgpt(*replay, "--rate", "x1.25").out)
    assert grown["throughput_rps"] == pytest.approx(1.25 * exact["throughput_rps"], rel=0.1)
    monkeypatch.setattr("xsimulator.replay.MANY_REQUESTS", 10)
    counted = json.loads(xgpt(*replay, "--requests", "all", "-o", "requests.csv").out)
    rows = Path("requests.csv").read_text().splitlines()
    assert rows[0] == "arrival_s,input_tokens,output_tokens,ttft_s,tpot_s,latency_s,is_kept"
    values = np.array([[float(value) for value in row.split(",")] for row in rows[1:]])
    assert len(values) == counted["num_requests"] and values[:, 3].mean() == pytest.approx(counted["ttft_mean_s"])
    assert values[:, 6].mean() == pytest.approx(counted["at_load"]["share_kept"])
    assert (values[:, 5] >= values[:, 3]).all() and set(values[:, 1]) <= set(range(100, 150))
    assert counted.keys() == exact.keys() - {"itl_p99_s", "idle_share"}
    assert counted.pop("at_load") == exact["at_load"]
    assert counted == pytest.approx({name: exact[name] for name in counted}, rel=1e-6)
    with_steps = json.loads(xgpt(*replay, "--requests", "all", "--timeline", "timeline.json").out)
    assert with_steps == exact and Path("timeline.json").stat().st_size > 1000
    for arguments, says in (
        (["--since", "1000", "--own-times", "--workload", "hour.csv"], "its last request comes after"),
        (["--since", "60"], "it needs --own-times"),
        (["--requests", "all"], "it needs --own-times"),
        (["-o", "requests.csv"], "it needs --own-times"),
        (["--rate", "x2"], "it needs --own-times"),
        (["--rate", "2"], "write a factor above 0, such as x2"),
        (["--requests", "many"], "a whole number of at least 1, or all"),
    ):
        ran = xgpt("simulate", "plan.json", *arguments)
        assert ran.code == 2 and says in ran.err, ran.err


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_tables_fit_and_keep_the_settings(width: int) -> None:
    plan = planned("vllm")
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(plans_table({"chunked": plan}))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and "token_budget 4096, max_batch 96" in " ".join(text.split())
    assert ("not shown at this width" in text) == (width < 100)


SCRIPT = """
import sys
from pathlib import Path
from xgpt.cli.render import plans_table, show
from xgpt.core.io import load_json
from xgpt.core.schema import Plan
show(plans_table({"chunked": load_json(Path(sys.argv[1]), Plan, "plan")}), "the end")
"""


@pytest.mark.parametrize("width", few([80, 100, 120, 200]))
def test_a_terminal_of_this_width(width: int, tmp_path: Path) -> None:
    """In a pseudo-terminal no line is longer than it, and no digit is cut."""
    (tmp_path / "plan.json").write_text(dump_json(planned("vllm")))
    pid, terminal = pty.fork()
    if pid == 0:
        termios.tcsetwinsize(1, (40, width))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        words = [sys.executable, "-c", SCRIPT, str(tmp_path / "plan.json")]
        os.execve(sys.executable, words, environment | {"TERM": "xterm"})
    shown = b""
    while b"the end" not in shown:
        shown += os.read(terminal, 65536)
    os.waitpid(pid, 0)
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "")
    assert max(len(line.rstrip()) for line in text.split("\n")) <= width
    assert "…" not in text and "chunked: token_budget 4096, max_batch 96" in " ".join(text.split())


def test_a_model_that_does_not_fit_on_this_machine_is_refused_before_it_is_measured(xgpt: Xgpt) -> None:
    ran = xgpt("plan", "--model", "gpt3-341b", "--workload", "orca", "--latency-bound", "15")
    assert ran.code == 1 and "the weights of gpt3-341b in float32 are" in ran.err
    assert "give the --cluster to plan for" in " ".join(ran.err.split())


def test_replan_says_its_decision_first(xgpt: Xgpt, plan: Path) -> None:
    Path("today.csv").write_text("input,output\n" + "128,128\n" * 200)
    lines = xgpt("replan", str(plan), "--lengths", "today.csv").out.splitlines()
    assert lines[0].startswith(("Keep what runs now: ", "Change to ")) and len(lines) <= 8
    assert max(map(len, lines)) <= 80 and "For 200 observed requests: 128 input and 128 output tokens" in " ".join(
        lines
    )
    explained = xgpt("replan", str(plan), "--lengths", "today.csv", "--explain").out
    assert "whole s" in explained and "latency s" not in explained, "times count from arrival, as in other tables"


def test_a_report_has_the_plans_own_whole_time(xgpt: Xgpt, plan: Path) -> None:
    """It said 30.93 s where `xgpt plan --explain` says 31.18 s of the same requests."""
    capacity = load_json(plan, Plan, "plan").estimate.capacity
    assert capacity is not None and xgpt("report", str(plan), "-o", "page.html").code == 0
    row = re.search(r"<td>whole time, s</td>(.*?)</tr>", Path("page.html").read_text(), re.DOTALL)
    assert row is not None and f"{capacity.whole_s:,.3f}" in row[1]
