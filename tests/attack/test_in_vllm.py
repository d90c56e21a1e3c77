"""`xgpt serve --engine vllm`: the endpoint refuses, limits, drains and counts as with our own engine.

Each case runs against a fake in place of vLLM (`tests.fake_vllm`), and where there is a vLLM against that, too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from benchmarks.lib.served_plans import one_lane, plan
from tests import fake_vllm
from tests.attack import target as attack
from tests.attack.client import ADMIN_KEY
from tests.attack.target import PROBE, Target, attacked, children_of
from tests.fakes import eventually, expected_tokens
from xgpt.core.schema import ModelSpec, Plan
from xrunner.vllm.process import PYTHON_VARIABLE

ENGINE = ("--engine", "vllm")
IS_HERE = PYTHON_VARIABLE in os.environ or find_spec("vllm") is not None
REAL = pytest.param(
    "vllm",
    marks=[
        pytest.mark.long,
        pytest.mark.timeout(900),
        pytest.mark.skipif(not IS_HERE, reason=f"needs vLLM: name its python in {PYTHON_VARIABLE}"),
    ],
)


@pytest.fixture(scope="module", params=["fake", REAL])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Which vLLM `xgpt serve` starts."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "fake":
            patch.setenv(PYTHON_VARIABLE, str(fake_vllm.program(tmp_path_factory.mktemp("fake"))))
            patch.setenv("FAKE_VLLM_STEP_S", "0.005")
        else:
            patch.setenv("OMP_NUM_THREADS", "1")
        yield request.param


@pytest.fixture(scope="module")
def target(kind: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One server for the cases that leave it as it was."""
    options = ("--max-waiting", "20", "--allowed-host", "llm.example")
    with attacked("one", checkpoint, tmp_path_factory.mktemp("served"), *ENGINE, *options) as running:
        running.flavour = attack.VLLM if kind == "vllm" else attack.FAKE_VLLM
        yield running


def timed(model: ModelSpec) -> Plan:
    """A plan that predicts something, which is what lateness is told by."""
    timed_plan = plan(one_lane([1]), model=model)
    update = {"encode_batch": 4.0, "encode_tokens": 8.0, "throughput_rps": 16.0, "latency_s": 1.0}
    return timed_plan.model_copy(update={"estimate": timed_plan.estimate.model_copy(update=update)})


def figures(target: Target) -> dict[str, float]:
    """What /metrics shows."""
    status, text = target.ask("GET", "/metrics")
    assert status == 200
    lines = (line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def nothing_runs(target: Target) -> bool:
    shown = figures(target)
    return not any(shown[f"xgpt_{name}"] for name in ("requests_running", "requests_waiting", "kv_blocks_used"))


@pytest.mark.point(1)
def test_without_a_key_nothing_is_answered_but_probes(target: Target) -> None:
    body = {"model": target.model, **PROBE}
    for headers in ({}, {"Authorization": "Bearer a-key-of-another-server"}):
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/plan")):
            assert target.ask(method, path, body if method == "POST" else None, headers)[0] == 401
    assert target.ask("GET", "/health", headers={})[0] == 200
    assert target.ask("GET", "/ready", headers={})[0] == 200
    assert len(target.probe()) == 12


@pytest.mark.point(1)
def test_foreign_names_and_origins_are_refused(target: Target) -> None:
    body = {"model": target.model, **PROBE}
    for headers, status in (
        ({"Host": "evil.example"}, 421),
        ({"Host": "llm.example"}, 200),
        ({"Origin": "https://evil.example"}, 403),
    ):
        assert target.ask("POST", "/v1/completions", body, target.headers | headers)[0] == status


def test_requests_are_checked_before_vllm_sees_them(target: Target) -> None:
    alone = target.probe()
    for fields in (
        {"prompt": [10**9], "max_tokens": 2},
        {"prompt": [3], "max_tokens": 10**6},
        {"prompt": [3], "max_tokens": 2, "kv_transfer_params": {"do_remote_decode": True}},
        {"prompt": [3], "max_tokens": 2, "vllm_xargs": {"id": 0}},
        {"prompt": [3], "max_tokens": 2, "prompt_logprobs": 5},
    ):
        status, answer = target.complete(**fields)
        assert status == 400, answer
    assert target.probe() == alone


def test_every_number_that_is_accepted_is_one_that_vllm_takes(target: Target) -> None:
    for fields in (
        {"temperature": 2},
        {"top_k": -1, "temperature": 1},
        {"top_k": 10**9, "temperature": 1},
        {"top_p": 1e-9, "min_p": 1.0, "temperature": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"n": 3, "temperature": 1},
        {"stop_token_ids": list(range(100))},
    ):
        status, answer = target.complete(prompt=[3, 5], max_tokens=3, **fields)
        assert status in (200, 400), (fields, answer)
    status, answer = target.complete(prompt=[3, 5], max_tokens=3, temperature=1, seed=7)
    assert status == 400 and "vLLM does not support seeds on CPUs" in answer["error"]["message"]
    assert len(target.probe()) == 12


@pytest.mark.long
def test_sampled_prompts_in_pieces_are_not_the_end_of_vllm(target: Target) -> None:
    """vLLM sets a seeded request's generator back where a prompt is cut, and torch's on a CPU cannot be."""
    with ThreadPoolExecutor(12) as threads:
        asked = [
            threads.submit(target.complete, prompt=[100 + i] * 250, max_tokens=4, temperature=1.0) for i in range(12)
        ]
        assert [future.result()[0] for future in asked] == [200] * 12
    assert len(target.probe()) == 12


@pytest.mark.long
def test_tokens_do_not_depend_on_what_runs_beside(kind: str, target: Target) -> None:
    alone = target.probe()
    if kind == "fake":
        assert alone == expected_tokens(PROBE["prompt"], 12)
    with target.felt() as felt:
        assert [target.probe() for _ in range(10)] == [alone] * 10
    assert felt.failures == []


def test_openais_client_takes_it_for_openai(target: Target) -> None:
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key=ADMIN_KEY) as client:
        whole = client.completions.create(model=target.model, prompt="text", max_tokens=5, temperature=0)
        chunks = client.completions.create(model=target.model, prompt="text", max_tokens=5, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert whole.usage is not None and whole.usage.completion_tokens == 5
        messages = [{"role": "user", "content": "hello"}]
        chat = client.chat.completions.create(model=target.model, messages=messages, max_tokens=3)  # type: ignore[arg-type]
        assert chat.choices[0].finish_reason == "length"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="a-key-of-another-server").models.list()


@pytest.mark.long
@pytest.mark.point(1)
def test_too_many_are_turned_away(target: Target) -> None:
    """16 run, 20 may wait."""
    body = {"model": target.model, "prompt": [3, 4], "max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(lambda _: target.ask("POST", "/v1/completions", body)[0], range(60)))
    assert set(answers) == {200, 429}
    assert answers.count(200) >= 20
    assert nothing_runs(target)


def test_a_client_that_goes_frees_its_place(target: Target) -> None:
    body = {"model": target.model, "prompt": [3, 4], "max_tokens": 400, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in target.headers.items())
    for _ in range(8):
        with socket.create_connection(target.address) as connection:
            start = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(content)}\r\n\r\n"
            connection.sendall(start.encode() + content)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert eventually(lambda: nothing_runs(target))
    # One may have had all its tokens before the engine learnt that its client had gone.
    ended = figures(target)
    counts = {
        reason: ended.get(f'xgpt_requests_total{{finish_reason="{reason}"}}', 0) for reason in ("cancelled", "length")
    }
    assert counts["cancelled"] >= 4 and sum(counts.values()) >= 8, counts


def test_a_deadline_ends_what_is_too_late(target: Target) -> None:
    status, answer = target.complete(prompt=[3, 4], max_tokens=400, ignore_eos=True, deadline_s=0.05)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert eventually(lambda: nothing_runs(target))


def test_metrics_count_what_came_of_requests(target: Target) -> None:
    target.probe()  # a step under way for a request that has gone has ended then
    before = figures(target)
    target.probe()
    after = figures(target)
    for name, more in (('requests_total{finish_reason="length"}', 1), ("output_tokens_total", 12)):
        assert after[f"xgpt_{name}"] - before.get(f"xgpt_{name}", 0.0) == more
    assert after["xgpt_step_seconds_count"] > before["xgpt_step_seconds_count"]
    assert json.loads(target.ask("GET", "/live")[1])["plan"]["policy"] == "orca"


@pytest.mark.point(1)
def test_nothing_listens_beyond_this_machine(target: Target) -> None:
    said = subprocess.check_output(["ss", "-ltnpH"], text=True).splitlines()
    family = {target.served.process.pid, *children_of(target.served.process.pid)}
    addresses = [line.split()[3] for line in said if any(f"pid={pid}," in line for pid in family)]
    assert addresses and all(address.startswith(("127.0.0.1:", "[::1]:")) for address in addresses)


@pytest.mark.long
@pytest.mark.point(1)
def test_an_answer_that_would_come_too_late_is_not_begun(
    kind: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attack.FLAVOURS, "timed", timed)
    with attacked("timed", checkpoint, tmp_path, *ENGINE, "--answer-within", "3") as target:
        body = {"model": target.model, "prompt": [3, 4], "max_tokens": 200, "ignore_eos": True}
        with ThreadPoolExecutor(80) as pool:
            answers = list(pool.map(lambda _: target.ask("POST", "/v1/completions", body), range(80)))
    refused = [json.loads(answer)["error"]["message"] for status, answer in answers if status == 429]
    assert {status for status, _ in answers} == {200, 429}
    assert any("promises 3 s" in message for message in refused)


@pytest.mark.long
@pytest.mark.point(1, 20)
def test_what_runs_at_sigterm_ends_and_nothing_begins(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    with attacked("one", checkpoint, tmp_path, *ENGINE) as target:
        ends_what_runs(target)


def ends_what_runs(target: Target) -> None:
    """End a server while a request runs: it is answered, and no process is left."""
    process = target.served.process
    family = children_of(process.pid)
    answers: list[tuple[int, bytes]] = []
    body = {"model": target.model, "prompt": [3, 4], "max_tokens": 400, "ignore_eos": True}
    asking = threading.Thread(target=lambda: answers.append(target.ask("POST", "/v1/completions", body)))
    asking.start()
    assert eventually(lambda: figures(target)["xgpt_requests_running"] == 1)
    process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert process.wait(60) == 0
    ((status, answer),) = answers
    assert status == 200 and len(json.loads(answer)["choices"][0]["token_ids"]) == 400
    assert family and eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in family))


@pytest.mark.point(27)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.long
def test_where_vllm_dies_or_stops_another_takes_over_its_requests(number: signal.Signals, target: Target) -> None:
    """The server once ended, with what it had. A stop is noticed after 15 s; vLLM then starts anew, in some 30 s."""
    fields = {"model": target.model, **PROBE, "max_tokens": 300, "ignore_eos": True}

    def tokens() -> list[int]:
        status, answer = target.ask("POST", "/v1/completions", fields, timeout_s=300)
        assert status == 200, answer
        found: list[int] = json.loads(answer)["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(8) as pool:
        before = tokens()
        family = children_of(target.served.process.pid)
        youngest = max(pid for pid in family if b"sandbox" not in Path(f"/proc/{pid}/cmdline").read_bytes())
        running = [pool.submit(tokens) for _ in range(8)]
        assert eventually(lambda: figures(target)["xgpt_requests_running"] >= 4, 30)
        os.kill(youngest, number)
        assert [one.result() for one in running] == [before] * 8
        assert not Path(f"/proc/{youngest}/cmdline").exists()


@pytest.mark.long
@pytest.mark.point(17)
def test_waa_on_two_vllms_is_the_same_endpoint_to_its_end(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    with attacked("waa", checkpoint, tmp_path, *ENGINE, "--max-waiting", "30") as target:
        assert target.ask("POST", "/v1/completions", {"model": target.model, **PROBE}, {})[0] == 401
        alone = target.probe()
        if kind == "fake":
            assert alone == expected_tokens(PROBE["prompt"], 12)
        prompts = [[20 + number] * 8 for number in range(12)]
        bodies = [{"prompt": prompt, "max_tokens": 6, "temperature": 0} for prompt in prompts]
        one_by_one = [target.complete(**body)[1]["choices"][0]["token_ids"] for body in bodies[:4]]
        with ThreadPoolExecutor(12) as pool:
            together = list(pool.map(lambda body: target.complete(**body), bodies))
        assert [answer["choices"][0]["token_ids"] for _, answer in together][:4] == one_by_one
        assert target.complete(prompt=[3, 4], max_tokens=400, ignore_eos=True, deadline_s=0.05)[0] == 504
        status, answer = target.complete(prompt=[3] * 8, max_tokens=10**6)
        assert status == 400, answer
        assert target.probe() == alone
        assert eventually(lambda: nothing_runs(target))
        ends_what_runs(target)
