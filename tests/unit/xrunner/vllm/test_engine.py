"""vLLM as the endpoint's engine, on one lane and on WAA's two, with a fake in place of vLLM's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import fake_vllm
from tests.fakes import eventually, expected_tokens, fake_app, fake_plan, running
from tests.rings import few
from tests.unit.xrunner.server.test_watch import FakePlanner, ask, get
from tests.vllm.plans import exportable, here, plan_with, waa_plan
from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema import ChunkedSettings, OrcaSettings, Plan, StaticSettings
from xgpt.core.schema.step_log import StepRecord
from xrunner.channel import remote
from xrunner.generation import Generation, Token
from xrunner.server.observe.watch import Watch
from xrunner.vllm.engine import Instances, VllmEngine
from xrunner.vllm.process import LOCK, PYTHON_VARIABLE, in_use, remove_left_over

pytestmark = pytest.mark.timeout(60)

ORCA = exportable(here(plan_with(OrcaSettings(max_batch=8))), "/weights")
WAA = exportable(here(waa_plan()), "/weights")
GROUPS = exportable(waa_plan(2), "/weights")
PROMPTS = [(number,) * 8 for number in range(20, 40)]

Start = Callable[..., VllmEngine]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the engine of a plan, and ends it with the test."""
    monkeypatch.setenv(PYTHON_VARIABLE, str(fake_vllm.program(tmp_path)))
    started: list[VllmEngine] = []

    def engine_of(plan: Plan, **options: Any) -> VllmEngine:
        engine = VllmEngine(plan, **options)
        started.append(engine)
        return engine

    yield engine_of
    for engine in started:
        engine.close()


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The engine of a plan, started once for all tests that leave it without requests."""
    program, started = str(fake_vllm.program(tmp_path_factory.mktemp("idle"))), dict[str, VllmEngine]()

    def engine_of(plan: Plan) -> VllmEngine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PYTHON_VARIABLE, program)
            if (key := plan.model_dump_json()) not in started:
                started[key] = VllmEngine(plan)
        return started[key]

    yield engine_of
    for engine in started.values():
        engine.close()


def submit(engine: VllmEngine, prompts: list[tuple[int, ...]], max_output: int = 6, **fields: Any) -> None:
    for id_, prompt in enumerate(prompts):
        engine.submit(Generation(id_, prompt, max_output, **fields))


def run(engine: VllmEngine, num_requests: int, within_s: float = 30.0) -> dict[int, list[Token]]:
    """Return the tokens that come until `num_requests` requests have ended."""
    got: dict[int, list[Token]] = {}
    until_s = time.monotonic() + within_s
    while sum(tokens[-1].finish is not None for tokens in got.values()) < num_requests:
        assert time.monotonic() < until_s, got
        for token in engine.step() or []:
            got.setdefault(token.id, []).append(token)
        engine.wait(0.01)
    return got


def ids(tokens: list[Token]) -> list[int]:
    return [token.token for token in tokens]


def check_tokens(engine: VllmEngine) -> None:
    """Every request has its own tokens, and leaves nothing."""
    submit(engine, PROMPTS)
    got = run(engine, len(PROMPTS))
    assert [ids(got[id_]) for id_ in range(len(PROMPTS))] == [expected_tokens(prompt, 6) for prompt in PROMPTS]
    pool = engine.pool
    assert (len(pool.waiting), len(pool.running), pool.room.reserved_blocks) == (0, 0, 0)


@pytest.mark.parametrize("plan", few([ORCA, WAA]), ids=["one lane", "waa"])
def test_a_request_that_vllm_gives_up_fails_alone(plan: Plan, idle: Start) -> None:
    engine = idle(plan)
    prompts = [*PROMPTS[:5], (fake_vllm.FAILS, 1, 2), *PROMPTS[5:10]]
    submit(engine, prompts)
    got = run(engine, len(prompts))
    assert {id_ for id_, tokens in got.items() if tokens[-1].finish == "error"} == {5}
    assert all(ids(got[id_]) == expected_tokens(prompts[id_], 6) for id_ in got if id_ != 5)
    assert len(engine.pool.running) == engine.pool.room.reserved_blocks == 0


@pytest.mark.parametrize("plan", few([ORCA, WAA]), ids=["one lane", "waa"])
def test_cancelled_requests_make_room_for_others(plan: Plan, idle: Start) -> None:
    engine = idle(plan)
    submit(engine, PROMPTS, max_output=100)
    while len(engine.pool.running) < 4:
        engine.step()
    for id_ in range(len(PROMPTS)):
        engine.cancel(id_)
    for id_ in range(100, 110):
        engine.submit(Generation(id_, (5, 6), 3))
    got = run(engine, 10)
    assert all(ids(got[id_]) == expected_tokens((5, 6), 3) for id_ in range(100, 110))


def children(engine: VllmEngine, number: int = 0) -> list[int]:
    """Of the process that supervises a vLLM."""
    far_end = engine._far_end
    assert isinstance(far_end, Instances)
    parent = far_end._readers[number].process.pid
    return [int(child) for child in subprocess.check_output(["pgrep", "-P", str(parent)], text=True).split()]


LOSSES = [(ORCA, signal.SIGKILL, 0), (WAA, signal.SIGSTOP, 1), (ORCA, signal.SIGSTOP, 0), (WAA, signal.SIGKILL, 0)]


def answers(url: str, prompts: list[tuple[int, ...]], max_tokens: int) -> list[Future[httpx.Response]]:
    """Ask for all of them at once."""
    fields = {"model": "fake", "max_tokens": max_tokens, "temperature": 0}
    pool = ThreadPoolExecutor(len(prompts))
    asked = [
        pool.submit(httpx.post, f"{url}/v1/completions", json={**fields, "prompt": p}, timeout=60) for p in prompts
    ]
    pool.shutdown(wait=False)
    return asked


@pytest.mark.parametrize(("plan", "sent", "number"), few(LOSSES))
def test_a_vllm_that_ends_or_hangs_is_started_anew_and_no_request_is_lost(
    plan: Plan, sent: signal.Signals, number: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_STEP_S", "0.03")
    engine = start(plan)
    with running(fake_app(engine, Watch(plan))) as url:
        asked = answers(url, PROMPTS[:8], 60)
        assert eventually(lambda: len(engine.pool.running) == 8)
        vllm, lost = engine._far_end, children(engine, number)
        for child in lost:
            os.kill(child, sent)
        monkeypatch.setattr(remote, "SILENCE_S", 8.0)
        tokens = [one.result().json()["choices"][0]["token_ids"] for one in asked]
        assert tokens == [expected_tokens(prompt, 60) for prompt in PROMPTS[:8]]
        assert engine._far_end is not vllm and children(engine, number)
        assert not any(Path(f"/proc/{child}/cmdline").exists() for child in lost)


@pytest.mark.long
def test_a_request_that_ends_every_vllm_is_found_and_ended(start: Start) -> None:
    """The first end is an accident, the second makes its requests suspects, the third tells which one it is."""
    engine = start(ORCA)
    with running(fake_app(engine, Watch(ORCA))) as url:
        *asked, culprit = answers(url, [*PROMPTS[:8], (fake_vllm.DIES, 1)], 40)
        assert "the engine fails with this request" in culprit.result().text
        tokens = [one.result().json()["choices"][0]["token_ids"] for one in asked]
        assert tokens == [expected_tokens(prompt, 40) for prompt in PROMPTS[:8]]
        (last,) = answers(url, [(fake_vllm.DIES, 1)], 1)
        says = last.result().text
        assert "lost 4 times within 10 minutes, the last time: " in says and "the device has gone" in says


@pytest.mark.long
@pytest.mark.parametrize("plan", few([ORCA, WAA]), ids=["one lane", "waa"])
def test_a_vllm_that_makes_no_step_is_noticed(plan: Plan, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(plan)
    monkeypatch.setattr(remote, "STEP_S", 0.5)
    engine.wait(0.6)  # idle, it has nothing to tell
    submit(engine, PROMPTS[:1])
    assert len(run(engine, 1)) == 1
    submit(engine, [(fake_vllm.HANGS, 1)])
    with pytest.raises(MachineError, match="it has requests, but has completed no step for"):
        run(engine, 1)


def test_a_vllm_that_does_not_start_says_why(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'RuntimeError: no device is here'\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(broken))
    with pytest.raises(MachineError, match="no device is here"):
        start(ORCA)


def test_steps_are_told_as_they_were_executed(idle: Start) -> None:
    log: list[StepRecord] = []
    engine = idle(ORCA)
    engine.listen(log.append)
    check_tokens(engine)
    assert sorted(arrival.id for record in log for arrival in record.arrivals) == list(range(len(PROMPTS)))
    assert sorted(id_ for record in log for id_ in record.finished) == list(range(len(PROMPTS)))
    assert all(record.start_ns <= record.end_ns <= time.perf_counter_ns() for record in log)


@pytest.mark.long
def test_both_lanes_of_waa_tell_a_request_once(start: Start) -> None:
    log: list[StepRecord] = []
    engine = start(WAA, on_step=log.append)
    check_tokens(engine)
    assert sorted(arrival.id for record in log for arrival in record.arrivals) == list(range(len(PROMPTS)))
    assert sorted(id_ for record in log for id_ in record.finished) == list(range(len(PROMPTS)))
    assert {record.lane for record in log} == {"encode", "decode"}
    encoded = [chunk[0] for record in log if record.lane == "encode" for chunk in record.encode]
    assert sorted(encoded) == list(range(len(PROMPTS)))


@pytest.mark.long
def test_prompts_go_to_all_prefill_groups(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_STEP_S", "0.05")
    log: list[StepRecord] = []
    check_tokens(start(GROUPS, on_step=log.append))
    encoded = [record for record in log if record.lane == "encode"]
    assert sorted(chunk[0] for record in encoded for chunk in record.encode) == list(range(len(PROMPTS)))
    assert any(one.start_ns < other.start_ns < one.end_ns for one in encoded for other in encoded)


def test_deadlines_reach_the_rule(start: Start) -> None:
    """By edf a later request with an earlier deadline begins first, and one that is too late never begins."""
    admission = ORCA.admission.model_copy(update={"order": "edf"})
    one_at_a_time = OrcaSettings(max_batch=1)
    log: list[StepRecord] = []
    engine = start(ORCA.model_copy(update={"admission": admission, "policy": one_at_a_time}), on_step=log.append)
    engine.submit(Generation(0, (5,), 300))
    while not engine.pool.running:
        engine.step()
    now_ns = time.perf_counter_ns()
    engine.submit(Generation(1, (6,), 1, deadline_ns=now_ns + 50 * 10**9))
    engine.submit(Generation(2, (7,), 1, deadline_ns=now_ns + 40 * 10**9))
    engine.submit(Generation(3, (8,), 1, deadline_ns=now_ns + 10**7))
    got = run(engine, 3)
    begun = [chunk[0] for record in log for chunk in record.encode]
    assert begun.index(2) < begun.index(1) and 3 not in begun and 3 not in got


@pytest.mark.long
def test_a_plan_changes_between_two_steps(start: Start) -> None:
    engine = start(ORCA)
    submit(engine, PROMPTS, max_output=100)
    log: list[StepRecord] = []
    engine.listen(log.append)
    engine.step()
    engine.go_over_to(ORCA.model_copy(update={"policy": ChunkedSettings(token_budget=16, max_batch=4)}))
    got = run(engine, len(PROMPTS))
    assert all(len(tokens) == 100 for tokens in got.values())
    assert len(log[-1].decode) <= 4


def test_a_better_plan_is_gone_over_to_behind_the_endpoint(start: Start) -> None:
    plan = fake_plan(checkpoint="/weights")
    wider = fake_plan(checkpoint="/weights", policy=OrcaSettings(max_batch=32))
    log: list[StepRecord] = []
    engine = start(plan, on_step=log.append)
    planner = FakePlanner([wider])
    with running(fake_app(engine, Watch(plan, planner))) as url:
        for num_requests in (130, 32):
            ask(url, num_requests, 20)
            time.sleep(0.6)  # looks have a distance
        assert eventually(lambda: get(url, "/plan").json()["plan"]["policy"]["max_batch"] == 32)
        assert max(len(record.decode) for record in log) == 16
        ask(url, 100, 20)
        assert max(len(record.decode) for record in log) == 32
        assert [decision["action"] for decision in get(url, "/plan/history").json()] == ["swap"]


def test_a_directory_too_deep_for_sockets_is_said_to_be(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(MachineError, match="TMPDIR"):
        start(ORCA)


@pytest.mark.long
def test_a_plan_of_another_memory_waits_until_no_request_runs(start: Start) -> None:
    engine = start(ORCA)
    submit(engine, PROMPTS[:8], max_output=50)
    while len(engine.pool.running) < 8:
        engine.step()
    quantile = ORCA.admission.model_copy(update={"kv": "quantile", "max_running": 4})
    engine.go_over_to(ORCA.model_copy(update={"admission": quantile}))
    while not engine.is_emptying:
        assert engine.step() is not None or not engine.wait(0.01)
    for id_ in range(100, 104):
        engine.submit(Generation(id_, (5, 6), 3))
    engine.cancel(103)
    assert not any(id_ in engine.pool.running for id_ in range(100, 104))
    got = run(engine, 11)
    assert not engine.is_emptying
    assert [len(got[id_]) for id_ in range(100, 103)] == [3, 3, 3] and 103 not in got


def test_what_vllm_cannot_run_is_refused_before_it_is_asked(start: Start, idle: Start) -> None:
    with pytest.raises(InputError, match="frees a slot"):
        idle(ORCA).go_over_to(ORCA.model_copy(update={"policy": StaticSettings(batch=4)}))
    for plan, says in (
        (WAA.model_copy(update={"replicas": 2}), "plan for 2 devices"),
        (WAA.model_copy(update={"admission": WAA.admission.model_copy(update={"kv": "quantile"})}), "admission.kv"),
    ):
        with pytest.raises(InputError, match=says):
            start(plan)


@pytest.mark.long
def test_a_prompt_that_the_encode_lane_cannot_hold_fails_alone(start: Start) -> None:
    """200 blocks of 16 tokens hold it in the decode lane alone."""
    stages = tuple(stage.model_copy(update={"kv_blocks": 4 if stage.lane == "encode" else 800}) for stage in WAA.stages)
    engine = start(WAA.model_copy(update={"stages": stages}))
    submit(engine, [(5,) * 100, (6,) * 20])
    got = run(engine, 2)
    assert got[0][-1].finish == "error" and ids(got[1]) == expected_tokens((6,) * 20, 6)


@pytest.mark.parametrize("is_busy", few([False, True]))
def test_a_vllm_that_is_stopped_is_noticed(is_busy: bool, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle, it was never noticed; busy, after two minutes."""
    engine = start(ORCA)
    run_for_s, stopped = time.monotonic() + 1, list[int]()
    while time.monotonic() < run_for_s:
        assert engine.step() is None
        engine.wait(0.1)
    monkeypatch.setattr(remote, "SILENCE_S", 3.0)
    if is_busy:
        submit(engine, PROMPTS[:1], max_output=100_000)
    try:
        stopped = children(engine)
        for child in stopped:
            os.kill(child, signal.SIGSTOP)
        with pytest.raises(MachineError, match="its process has reported nothing for 3 s"):
            while True:
                engine.step()
                engine.wait(0.1)
    finally:
        for child in stopped:
            os.kill(child, signal.SIGCONT)


def test_directories_of_runs_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("xgpt-run-dead", "xgpt-run-alive", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()
    with in_use(tmp_path / "xgpt-run-alive"):
        remove_left_over()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "xgpt-run-alive"]
