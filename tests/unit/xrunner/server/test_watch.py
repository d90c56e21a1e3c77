"""A served plan that is watched: observed on every surface, judged when lengths change, gone over from."""

import asyncio
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.contract.scenarios import problem
from tests.fakes import SPEC, FakeExecutor, eventually, fake_app, fake_engine, fake_plan, running
from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema import Decision, Observation, OrcaSettings, Outcome, Plan, Proposal
from xgpt.observation import observer
from xgpt.observation.windows import observe, observe_lengths
from xrunner.server.observe import watch as watching
from xrunner.server.observe.watch import Ended, Recent, Watch
from xscheduler.replanning import replanner
from xscheduler.replanning.replanner import NICENESS, BackgroundPlanner, observe_server
from xscheduler.schedule import Scheduler


def test_a_batch_that_has_just_ended_is_no_rate_of_thousands_a_second() -> None:
    """Tokens were divided by the microseconds since the end of the first request."""
    recent = Recent()
    for _ in range(8):
        recent.end(Ended(100, 2.0, 0.1, 2.0, None))
    rate, tokens = recent.rate_per_s(), recent.figures()["output_tokens_per_s"]
    assert rate is not None and rate <= 8 and tokens is not None and tokens <= 800


@dataclass
class FakePlanner:
    """Proposes whatever it is told to; notes what it was asked."""

    answers: list[Plan | Exception | None]
    step_s: float = 0.01
    planned_under_s: float | None = None
    asked: list[Observation] = field(default_factory=list)
    is_closed: bool = False

    def predict_s(self, plan: Plan, encode: list[tuple[int, int, int]], decodes: list[tuple[int, int]]) -> float:
        assert all(start < end for start, end, _ in encode) and all(min(tokens) >= 1 for tokens in decodes)
        return self.step_s

    async def propose(self, plan: Plan, observation: Observation) -> Proposal:
        self.asked.append(observation)
        await asyncio.sleep(0.05)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        outcome = Outcome(policy=plan.policy, throughput_rps=1, latency_s=1, keeps_bound=True)
        decision = Decision(
            at="now",
            action="keep" if answer is None else "swap",
            cause=observation.cause,
            reason="<b>because</b>",
            num_requests=observation.num_requests,
            input_mean=1,
            output_mean=1,
            running=outcome,
            best=outcome if answer is None else outcome.but(policy=answer.policy),
            planned_under_s=self.planned_under_s,
            gain=0.1,
            pause_s=0,
            plan_sha256="0",
            planning_s=0.05,
        )
        return Proposal(decision, answer)

    async def close(self) -> None:
        self.is_closed = True


def ask(url: str, num_requests: int, num_tokens: int) -> None:
    body = {"model": "fake", "prompt": [[1, 2, 3]] * num_requests, "max_tokens": num_tokens}
    assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=30).status_code == 200


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, trust_env=False, timeout=10)


@pytest.fixture
def planner() -> FakePlanner:
    wider = fake_plan(policy=OrcaSettings(max_batch=32))
    return FakePlanner([None, RuntimeError("the planner has died"), wider], planned_under_s=13.2)


@pytest.fixture
def url(planner: FakePlanner) -> Iterator[str]:
    engine = fake_engine(FakeExecutor(step_s=0.001))
    with running(fake_app(engine, Watch(fake_plan(), planner))) as url:
        yield url
    assert planner.is_closed


def test_a_change_is_judged_and_every_decision_shown(
    url: str, planner: FakePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "RETRY_S", 0.0)
    assert get(url, "/plan").json()["observed"] is None
    with pytest.raises(MachineError, match="too few requests have ended"):
        observe_server(fake_plan(), url)
    for round_, num_tokens in enumerate((20, 40, 80), start=1):
        # No look while requests run, however slow the machine is: a round is then judged only once.
        monkeypatch.setattr(observer, "LOOK_INTERVAL_S", math.inf)
        ask(url, 130, num_tokens)
        monkeypatch.setattr(observer, "LOOK_INTERVAL_S", 0.0)
        ask(url, 1, num_tokens)
        assert eventually(lambda num=round_: len(get(url, "/plan/history").json()) == num)  # type: ignore[misc]
        assert planner.asked[-1].workload.output.lengths[-1] == num_tokens
        assert get(url, "/live").json()["plan"]["planned_under_s"] == (13.2 if round_ == 3 else None)
    history = get(url, "/plan/history").json()
    assert [decision["action"] for decision in history] == ["keep", "failed", "swap"]
    assert (history[1]["cause"], history[1]["reason"]) == ("lengths", "RuntimeError('the planner has died')")
    plan = get(url, "/plan").json()
    assert plan["plan"]["policy"]["max_batch"] == 32
    assert plan["observed"]["output_distance"] > 0
    running_plan, observed = observe_server(fake_plan(), url)
    assert running_plan == fake_plan(policy=OrcaSettings(max_batch=32))
    assert observed.num_requests == plan["observed"]["num_requests"]
    other = fake_plan(model=SPEC.model_copy(update={"name": "other"}))
    with pytest.raises(InputError, match="it serves fake, but the plan is for other"):
        observe_server(other, url)
    metrics = get(url, "/metrics").text
    for action in ("keep", "failed", "swap"):
        assert f'xgpt_plan_decisions_total{{action="{action}",cause="lengths"}} 1.0' in metrics
    assert "xgpt_planning_seconds_count 3.0" in metrics
    assert "xgpt_observed_output_tokens 8" in metrics
    assert re.search(r"^xgpt_arrival_rate \d+\.\d+$", metrics, re.MULTILINE)
    live = get(url, "/live").json()
    assert live["judging_since"] is None
    assert live["plan"]["settings"] == {"max_batch": 32}
    assert live["now"]["step_ratio"] is not None
    assert sum(live["lengths"]["output"]["observed"]) == pytest.approx(1)


@pytest.mark.long
def test_a_judgement_that_runs_is_shown_and_a_failure_always_has_a_reason() -> None:
    """The live page said that nothing had changed while the plan was judged, and after judging it had failed."""

    @dataclass
    class SlowPlanner(FakePlanner):
        goes_on: threading.Event = field(default_factory=threading.Event)

        async def propose(self, plan: Plan, observation: Observation) -> Proposal:
            await asyncio.to_thread(self.goes_on.wait)
            return await super().propose(plan, observation)

    planner = SlowPlanner([MachineError("")])
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.001)), Watch(fake_plan(), planner))) as url:
        try:
            ask(url, 130, 20)
            time.sleep(0.6)
            ask(url, 32, 20)
            assert eventually(lambda: get(url, "/live").json()["judging_since"])
        finally:
            planner.goes_on.set()
        assert eventually(lambda: bool(get(url, "/plan/history").json()))
        live = get(url, "/live").json()
        assert [(each["action"], each["reason"]) for each in live["decisions"]] == [("failed", "MachineError")]
        assert live["judging_since"] is None
        assert live["failures"] == 1 and "xgpt_plan_failures 1.0" in get(url, "/metrics").text
        ask(url, 130, 60)
        time.sleep(0.6)
        ask(url, 32, 60)
        assert len(get(url, "/plan/history").json()) == 1, "a judgement that failed is not repeated at once"


@pytest.mark.parametrize(
    ("share", "says"),
    [(1.0, "it took longer than 0.05 s of a core's time"), (0.0, "it has not run for 0.05 s"), (0.1, None)],
)
def test_a_planner_may_use_so_much_of_a_cores_time(
    share: float, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, where it gets a tenth of a core, it was ended before it could answer."""
    monkeypatch.setattr(replanner, "PATIENCE_S", 0.05)
    monkeypatch.setattr(replanner, "LOOK_S", 0.01)

    def ask(*_: Any) -> dict[str, Any]:
        time.sleep(0.2)
        return {"error": "no plan"}

    monkeypatch.setattr(BackgroundPlanner, "_ask", ask)
    monkeypatch.setattr(BackgroundPlanner, "_used_s", lambda _: share * time.monotonic())
    planner = BackgroundPlanner(fake_plan(), problem("opt-13b", "h200x1", "summarization", 1.5).profile)
    lengths = observe_lengths([3] * 400, [8] * 400, fake_plan().workload)
    with pytest.raises(MachineError, match=f"^planning failed: {re.escape(says or 'no plan')}$"):
        asyncio.run(planner.propose(fake_plan(), lengths))


def test_a_question_whose_planner_was_killed_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as a judgement that failed."""
    asked = iter([OSError("the planning process has ended"), {"error": "no plan"}])

    def ask(*_: Any) -> dict[str, Any]:
        answer = next(asked)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(BackgroundPlanner, "_ask", ask)
    planner = BackgroundPlanner(fake_plan(), problem("opt-13b", "h200x1", "summarization", 1.5).profile)
    lengths = observe_lengths([3] * 400, [8] * 400, fake_plan().workload)
    with pytest.raises(MachineError, match=r"^planning failed: no plan$"):
        asyncio.run(planner.propose(fake_plan(), lengths))


def test_what_would_be_decided_is_told_and_not_done() -> None:
    other = fake_plan(policy=OrcaSettings(max_batch=32))
    planner = FakePlanner([other, MachineError("planning failed: it has ended")])
    with running(fake_app(fake_engine(FakeExecutor()), Watch(fake_plan(), planner))) as url:
        assert get(url, "/plan/decision").json() is None
        ask(url, 3, 4)
        decision = get(url, "/plan/decision")
        assert decision.json()["action"] == "swap" and get(url, "/plan/history").json() == []
        assert get(url, "/plan").json()["plan"]["policy"]["max_batch"] == fake_plan().policy.max_batch
        assert get(url, "/plan/decision").status_code == 503


@pytest.mark.parametrize("path", ["/metrics", "/plan", "/live"])
def test_lengths_are_not_told_in_the_loops_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_loop = []

    def noting(*args: Any) -> Observation:
        in_loop.append(asyncio._get_running_loop() is not None)
        return observe(*args)

    monkeypatch.setattr("xgpt.observation.observer.observe", noting)
    with running(fake_app(fake_engine(FakeExecutor()))) as url:
        ask(url, 3, 4)
        text = get(url, path).text
    assert in_loop == [False]
    assert "xgpt_observed_output_tokens 4" in text or '"num_finished":3' in text


def test_the_page_escapes_and_loads_nothing(url: str) -> None:
    page = get(url, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'; script-src 'sha256-" in page.text
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")


def test_planning_runs_in_a_process_of_its_own() -> None:
    subject = problem("opt-13b", "h200x1", "summarization", 1.5)
    plan = Scheduler(subject).best(("rra",))
    lengths = plan.workload.output.lengths
    longer = observe_lengths([500] * 400, list(lengths[len(lengths) // 2 :]) * 4, plan.workload)

    async def ask_twice() -> list[Proposal]:
        planner = BackgroundPlanner(plan, subject.profile)
        assert (planner.predict_s(plan, [(0, 10, 1)], [(12, 8), (20, 10)]) or 0) > 0
        try:
            proposals = [await planner.propose(plan, longer) for _ in range(2)]
            assert planner._process is not None
            pid = planner._process.pid
            # Niceness counts among the processes of a session.
            assert os.getsid(pid) == os.getsid(0) and os.getpgid(pid) != os.getpgid(0)
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
            return proposals
        finally:
            await planner.close()

    first, second = asyncio.run(ask_twice())
    assert first.decision.action == "swap" and first.plan is not None
    assert second.plan is not None and second.plan.policy == first.plan.policy


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_planner_that_ends_or_hangs_is_replaced(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = problem("opt-13b", "h200x1", "summarization", 1.5)
    plan = Scheduler(subject).best(("rra",))
    lengths = observe_lengths([500] * 400, list(plan.workload.output.lengths) * 4, plan.workload)

    async def lose_one() -> Proposal:
        planner = BackgroundPlanner(plan, subject.profile)
        try:
            await planner.propose(plan, lengths)
            assert planner._process is not None
            lost = planner._process
            os.kill(lost.pid, number)
            with monkeypatch.context() as patch:
                patch.setattr(replanner, "PATIENCE_S", 2.0)
                failing = pytest.raises(MachineError, match="planning failed")
                with failing if number == signal.SIGSTOP else nullcontext():
                    await planner.propose(plan, lengths)
            assert lost.returncode is not None
            return await planner.propose(plan, lengths)
        finally:
            await planner.close()

    assert asyncio.run(lose_one()).decision.plan_sha256


def test_a_plan_that_the_engine_refuses_is_gone_back_from_and_not_tried_again() -> None:
    """The server showed, and judged by, a plan that it did not run."""
    plan, wider = fake_plan(), fake_plan(policy=OrcaSettings(max_batch=32))
    applied: list[Plan] = []
    watch = Watch(plan, FakePlanner([wider]))
    watch.start(applied.append)
    watch._go_over(wider)
    assert watch.plan is wider
    watch.go_back("no memory")
    watch.go_back("another replica has none, either")
    assert watch.plan is plan and applied == [wider, plan]
    assert (wider.policy, wider.stages) in watch._refused
