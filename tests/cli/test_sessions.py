"""Plans for sessions, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import Xgpt
from xgpt.comparing.assumptions import changes
from xgpt.core.io import load_json
from xgpt.core.schema import Plan
from xprofiler.store import profile_of
from xsimulator.session_rate import SessionTrial

CHAT = ("--model", "llama-3.1-8b", "--cluster", "h100x1", "--workload", "multi-turn-chat")


def test_a_plan_states_its_sessions(xgpt: Xgpt) -> None:
    said = xgpt("plan", *CHAT, "--session-wait", "2", "--ttft", "1", "--quantile", "0.9").out
    assert "session waiting within 2 s" in said and "sessions/s" in said and "at once" in said
    plan = json.loads(Path("plan.json").read_text())
    found, capacity = plan["estimate"]["sessions"], plan["estimate"]["capacity"]
    assert found["rate_per_s"] * found["turns"] == pytest.approx(capacity["rate_per_s"])
    assert found["wait_s"] <= 2 and capacity["share_kept"] >= 0.9
    assert plan["search"]["gap"] > 0


@pytest.mark.parametrize(
    ("code", "options", "says"),
    [
        (2, ("--policy", "rra", "--ttft", "1"), "sessions are planned under chunked or orca"),
        (2, ("--order", "edf", "--ttft", "1"), "enter in order of arrival"),
        (2, ("--latency-bound", "inf"), "sessions need a bound"),
        (2, ("--shared-prefix", "500", "--ttft", "1"), "state it there"),
        (2, ("--outputs", "x2", "--ttft", "1"), "state it there"),
        (2, ("--ttft", "1", "--workload", "azure-conv", "--session-wait", "3"), "it has no sessions"),
        (2, ("--ttft", "1", "--objective", "saturated", "--session-wait", "3"), "session"),
        (1, ("--ttft", "0.0001"), "even for one session at a time"),
    ],
)
def test_what_sessions_cannot_have_is_refused_in_one_line(
    xgpt: Xgpt, code: int, options: tuple[str, ...], says: str
) -> None:
    given = CHAT if "--workload" not in options else CHAT[:4]
    assert says in xgpt.fails(code, "plan", *given, *options)


def test_a_log_is_planned_and_replayed_in_its_sessions(xgpt: Xgpt) -> None:
    rows = [f"{5 * i + 9 * j},u{i},{300 + 150 * j},40,{5 * i + 9 * j + 1}" for i in range(60) for j in range(4)]
    Path("log.csv").write_text("timestamp_s,session_id,prompt_tokens,completion_tokens,end_time_s\n" + "\n".join(rows))
    asked = ("--model", "llama-3.1-8b", "--cluster", "h100x1", "--workload", "log.csv")
    said = xgpt("plan", *asked, "--session-wait", "1", "--quantile", "0.9").out
    assert "Replayed whole" in said
    plan = json.loads(Path("plan.json").read_text())
    assert plan["estimate"]["sessions"]["log_sessions_kept"] == 1
    run = json.loads(xgpt("simulate", "plan.json", "--workload", "log.csv", "--own-times", "--json").out)
    assert run["num_sessions"] == 60 and run["num_turns"] == 240 and run["goodput_of_sessions"] == 1
    # Each later prompt finds the whole blocks of what was said before, and the mean pause is as recorded.
    assert run["reused_by_turn"][1] == pytest.approx(336 / 450, abs=0.01)
    rate = plan["estimate"]["sessions"]["rate_per_s"]
    slow = json.loads(xgpt("simulate", "plan.json", "--arrival-rate", str(rate / 4), "--json").out)
    assert slow["goodput_of_sessions"] >= 0.9 and slow["wait_s"]["p50"] <= plan["estimate"]["sessions"]["wait_s"]
    assert "it applies only to independent requests" in xgpt.fails(2, "simulate", "plan.json", "--clients", "3")


def test_ranges_of_sessions_vary_when_sessions_begin(xgpt: Xgpt) -> None:
    xgpt("plan", *CHAT, "--session-wait", "2", "--ttft", "1", "--quantile", "0.9")
    plan = load_json(Path("plan.json"), Plan, "plan")
    profile, burst = profile_of(plan, None), plan.constraint.but(burstiness=2 * plan.constraint.burstiness)
    assert plan.estimate.sessions is not None
    rate = plan.estimate.sessions.rate_per_s * changes(plan, profile, ())[-1]
    trial = SessionTrial(plan.but(constraint=burst), profile)
    assert trial.keeps(rate) and not trial.keeps(1.03 * rate)


@pytest.mark.long
def test_a_report_states_where_sessions_wait(xgpt: Xgpt) -> None:
    xgpt("plan", *CHAT, "--session-wait", "4", "--ttft", "1", "--quantile", "0.9")
    xgpt("report", "plan.json")
    page = Path("report.html").read_text()
    assert "turn 2, " in page and "session waiting" in page and "sessions/s" in page
