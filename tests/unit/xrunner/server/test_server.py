"""The endpoint over the real engine with a fake executor, through the clients that users have."""

import gzip
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import httpx
import openai
import pytest

from tests.engine_threads import EngineThreads, in_threads
from tests.fakes import (
    STAGES,
    FakeExecutor,
    byte_codec,
    byte_tokenizer,
    eventually,
    expected_tokens,
    fake_app,
    fake_engine,
    fake_plan,
    running,
)
from tests.rings import few
from xgpt.core.errors import MachineError
from xgpt.core.policies import BlockTable, LaneSettings, OneLane, Pool, Step
from xrunner.channel import EngineLost, remote
from xrunner.channel.ends import EngineEnd, FrontEnd, pair
from xrunner.channel.host import EngineHost
from xrunner.engine import Engine
from xrunner.generation import NO_TOKEN, Generation, SamplingParams
from xrunner.server.api.choices import Delta
from xrunner.server.http.outputs import Outputs
from xrunner.server.http.process import serve
from xrunner.server.observe.watch import Watch
from xrunner.server.submission import Limits

PROMPT = [5, 6, 7]
BODY = {"model": "fake", "prompt": PROMPT}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(fake_app(fake_engine(FakeExecutor()), eos_token_ids=frozenset({30}))) as url:
        yield url


@pytest.fixture(scope="module")
def text_url() -> Iterator[str]:
    with running(fake_app(fake_engine(FakeExecutor()), codec=byte_codec())) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(url: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY | fields, trust_env=False, timeout=10)


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", trust_env=False, timeout=10)


def metric(url: str, name: str) -> float:
    lines = get(url, "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_whole_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=PROMPT, max_tokens=4)
    choice = answer.choices[0]
    assert choice.token_ids == expected_tokens(PROMPT, 4)
    assert (choice.text, choice.finish_reason) == ("", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    times = answer.xgpt
    assert 0 <= times["queued_s"] <= times["ttft_s"] <= times["total_s"]


def test_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="fake", prompt=PROMPT, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    *tokens, end = chunks
    assert [chunk.choices[0].token_ids for chunk in tokens] == [[t] for t in expected_tokens(PROMPT, 4)]
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None, None, None, "length"]
    assert [hasattr(chunk, "xgpt") for chunk in tokens] == [False, False, False, True]
    assert end.choices == []
    assert end.usage.completion_tokens == 4
    assert len({chunk.id for chunk in chunks}) == 1


def test_queueing_ends_with_the_first_piece_of_the_prompt() -> None:
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.01), token_budget=8))) as url:
        times = post(url, prompt=[1] * 40, max_tokens=1).json()["xgpt"]
    assert times["ttft_s"] - times["queued_s"] >= 0.05  # five steps


class _Interrupted(FakeExecutor):
    """Steps run apart from the engine, which goes on with what comes meanwhile: as workers' do."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._each_s = step_s
        self._handed_in = threading.Event()
        self._ends: deque[float] = deque()

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._ends.append(time.perf_counter() + self._each_s)

    def collect(self) -> tuple[Step, dict[int, int]] | None:  # type: ignore[override]
        if self._handed_in.wait(max(self._ends[0] - time.perf_counter(), 0.0)):
            self._handed_in.clear()
            return None
        self._ends.popleft()
        return super().collect()

    def interrupt(self) -> None:
        self._handed_in.set()


def test_no_request_starts_before_it_came() -> None:
    """Its step may begin while the engine waits for another micro-batch's."""
    rule = OneLane(LaneSettings(mix=True, max_batch=16, microbatches=2), Pool(1000, block_size=16), STAGES)
    with running(fake_app(Engine(rule, _Interrupted(0.02)))) as url, ThreadPoolExecutor() as pool:
        long = pool.submit(post, url, max_tokens=40)
        for _ in range(4):
            time.sleep(0.011)
            times = post(url, max_tokens=2).json()["xgpt"]
            assert 0 <= times["queued_s"] <= times["ttft_s"] <= times["total_s"]
        long.result()


def test_default_max_tokens_is_16(url: str) -> None:
    assert len(post(url, ignore_eos=True).json()["choices"][0]["token_ids"]) == 16


def test_eos_ends_the_output_unless_ignored(url: str) -> None:
    stopped = post(url, max_tokens=20).json()["choices"][0]
    assert stopped["token_ids"] == expected_tokens(PROMPT, 13)  # 18 .. 30
    assert stopped["finish_reason"] == "stop"
    assert len(post(url, max_tokens=20, ignore_eos=True).json()["choices"][0]["token_ids"]) == 20


def test_output_length_ends_the_output_exactly(url: str) -> None:
    choice = post(url, max_tokens=50, output_length=15).json()["choices"][0]
    assert choice["token_ids"] == expected_tokens(PROMPT, 15)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_batch_of_prompts(client: openai.OpenAI, stream: bool) -> None:
    prompts = [[i, i + 1] for i in range(20)]
    answer = client.completions.create(
        model="fake", prompt=prompts, max_tokens=3, stream=stream, extra_body={"ignore_eos": True}
    )
    tokens: dict[int, list[int]] = {i: [] for i in range(20)}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            tokens[choice.index] += choice.token_ids
    assert tokens == {i: expected_tokens(prompt, 3) for i, prompt in enumerate(prompts)}


def test_text_in_text_out(text_url: str) -> None:
    tokenizer = byte_tokenizer()
    with openai.OpenAI(base_url=f"{text_url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="fake", prompt="hé", max_tokens=40)
        chunks = list(client.completions.create(model="fake", prompt="hé", max_tokens=40, stream=True))
    tokens = expected_tokens(tokenizer.encode("hé").ids, 40)
    assert whole.choices[0].token_ids == tokens
    assert whole.choices[0].text == tokenizer.decode(tokens)
    assert "".join(chunk.choices[0].text for chunk in chunks) == tokenizer.decode(tokens)
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == tokens


def test_errors_have_openais_shape(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt=PROMPT, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    assert get(url, "/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert get(url, "/v1/completions").status_code == 405
    assert "no tokenizer; send token ids" in post(url, prompt="text").json()["error"]["message"]


def test_body_too_long(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", content=b" " * (33 << 20), trust_env=False, timeout=10)
    assert response.status_code == 413


def test_more_kv_than_the_pool_holds() -> None:
    with running(fake_app(fake_engine(FakeExecutor(), kv_blocks=4))) as url:
        assert post(url, max_tokens=61).status_code == 200
        error = post(url, max_tokens=62).json()["error"]
    assert error["param"] == "max_tokens"
    assert "K/V memory" in error["message"]


def test_models_plan_health_metrics(url: str) -> None:
    model = get(url, "/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("fake", 512)
    assert get(url, "/plan").json()["plan"]["schema_version"] == 1
    assert get(url, "/plan/history").json() == []
    assert get(url, "/ready").json() == {"status": "ok"}
    assert get(url, "/health").json() == {"status": "ok"}
    names = ("xgpt_output_tokens_total", "xgpt_time_to_first_token_seconds_count", "xgpt_step_seconds_count")
    before = [metric(url, name) for name in names]
    post(url, max_tokens=4)
    assert [metric(url, name) - b for name, b in zip(names, before, strict=True)] == [4, 1, 4]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_slot(stream: bool) -> None:
    executor = FakeExecutor(step_s=0.005)
    engine = fake_engine(executor, max_batch=1)
    with running(fake_app(engine)) as url:
        long = json.dumps(BODY | {"max_tokens": 500, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(long)}\r\n\r\n".encode()
        with socket.create_connection(url.removeprefix("http://").split(":")) as connection:
            connection.sendall(head + long)
            assert eventually(lambda: bool(executor.running))
        assert eventually(lambda: not executor.running)
        assert engine.pool.reserved_blocks == 0
        assert metric(url, 'xgpt_requests_total{finish_reason="cancelled"}') == 1
        assert post(url, max_tokens=2).status_code == 200


def test_disconnect_within_the_body_is_no_error(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(url.removeprefix("http://").split(":")) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert post(url).status_code == 200
    assert caplog.records == []


def test_a_crash_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """A supervisor starts it anew; answering 500 for ever is of no use."""
    with running(fake_app(fake_engine(FakeExecutor(fail_at=20)))) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, trust_env=False) as response:
            begun = response.read().decode()
        assert response.status_code == 200
        assert json.loads(begun.split("data: ")[-1])["error"]["type"] == "server_error"

        def is_gone() -> bool:
            try:
                get(url, "/health")
            except httpx.ConnectError:
                return True
            except httpx.TransportError:  # it ended while it was asked
                return False
            return False

        assert eventually(is_gone)
    assert caplog.records[-1].getMessage() == "the engine has failed: RuntimeError: the device has gone"


def test_a_request_that_fails_its_steps_fails_alone() -> None:
    engine = fake_engine(FakeExecutor(step_s=0.001, fail_at=20, comes_back=True))
    with running(fake_app(engine)) as url, ThreadPoolExecutor() as threads:
        asked = [threads.submit(post, url, prompt=[first], max_tokens=9) for first in (1, 15, 30, 45, 60)]
        statuses = [future.result().status_code for future in asked]
        assert statuses == [200, 500, 200, 200, 200]
        failed = asked[1].result().json()["error"]
        assert (failed["code"], failed["type"]) == ("engine_error", "server_error")
        assert "steps with it fail: RuntimeError: the device has gone" in failed["message"]
        assert get(url, "/health").status_code == 200


def test_tokens_before_a_crash_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    next_tokens = Outputs.next

    async def late(outputs: Outputs) -> list[Delta]:
        time.sleep(0.05)  # the loop is busy: the engine fails before any token is read
        return await next_tokens(outputs)

    monkeypatch.setattr(Outputs, "next", late)
    with running(fake_app(fake_engine(FakeExecutor(fail_at=20)))) as url:
        begun = post(url, stream=True).text
    *events, failure = (json.loads(event) for event in begun.split("data: ")[1:])
    assert [event["choices"][0]["token_ids"] for event in events] == [[18], [19]]
    assert failure["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_before_the_first_token_is_a_500(stream: bool) -> None:
    with running(fake_app(fake_engine(FakeExecutor(fail_at=18)))) as url:
        response = post(url, stream=stream)
    assert response.status_code == 500
    assert "the device has gone" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_ends_what_is_left_with_an_error(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    executor = FakeExecutor(step_s=0.02)
    with ThreadPoolExecutor(1) as pool:
        with running(fake_app(fake_engine(executor))) as url:
            answer = pool.submit(post, url, max_tokens=500, stream=stream)
            assert eventually(lambda: bool(executor.running))
        body = answer.result().text.split("data: ")[-1]
    assert json.loads(body)["error"]["message"] == "the server is shutting down"
    assert [record.exc_info for record in caplog.records] == [None]  # uvicorn's line, no traceback


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_engine_that_hangs_is_noticed(is_stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, while it goes on to report that it is alive; or stopped before it has built anything."""
    if is_stopped:
        monkeypatch.setattr(remote, "START_SILENCE_S", 1.0)
        monkeypatch.setattr(remote, "POLL_S", 0.05)
        monkeypatch.setattr(EngineHost, "read", lambda _: None)
        monkeypatch.setattr(EngineHost, "run", lambda _: time.sleep(3))
        engine = fake_engine(FakeExecutor())
        far_end = EngineThreads(engine)
        with pytest.raises(MachineError, match="does not start: its process has reported and done nothing for"):
            remote.RemoteEngine(far_end, engine.pool, lambda _: far_end, lambda _: engine.pool)
        far_end.end(10)
        return
    with closing(in_threads(fake_engine(FakeExecutor(step_s=3)))) as hanging:
        monkeypatch.setattr(remote, "STEP_S", 1.0)
        hanging.submit(Generation(0, (1, 2), 3))
        with pytest.raises(EngineLost, match="has requests, but has completed no step for"):
            while True:
                hanging.step()
                hanging.wait(0.1)


def test_a_start_is_given_processor_seconds_not_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an overloaded machine, an engine that gets a hundredth of a core starts; one that idles or spins does not."""
    now = 0.0
    # Of this module alone: servers beside it would sleep until the machine has been up for as long.
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now))
    start = remote._Start()
    for second in range(3600):
        now = float(second)
        start.check(second / 100)
    with pytest.raises(EngineLost, match="nothing for 121 s"):
        for second in range(3600, 3800):
            now = float(second)
            start.check(36.0)
    spinning = remote._Start()
    with pytest.raises(EngineLost, match="nothing for 601 processor seconds"):
        for second in range(3800, 4800):
            now = float(second)
            spinning.check(float(second))


def test_a_peer_that_announces_an_endless_message_has_gone() -> None:
    """It would be kept until memory ends."""
    front, engine = pair()
    with front, engine:
        two = FrontEnd(front, bytes), EngineEnd(engine, bytes)
        engine.sendall(b"\xff\xff\xff\xff" + b"x" * 1000)
        front.setblocking(True)
        front.sendall(b"\xff\xff\xff\xff" + b"x" * 1000)
        front.setblocking(False)
        assert two[0].receive() is None and two[0].has_gone
        with pytest.raises(EOFError):
            two[1].receive(1.0)
        two[0].close()


def test_port_in_use(url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    wanted = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    with closing(in_threads(fake_engine(FakeExecutor()))) as engine, pytest.raises(MachineError, match=wanted):
        serve(fake_app(engine), "127.0.0.1", port)


def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    executor = FakeExecutor(step_s=0.02)
    with (
        running(fake_app(fake_engine(executor, max_batch=1), limits=Limits(max_waiting=3))) as url,
        ThreadPoolExecutor(4) as pool,
    ):
        long = pool.submit(post, url, max_tokens=60)
        assert eventually(lambda: bool(executor.running))
        waiting = [pool.submit(post, url, max_tokens=1, n=n) for n in (1, 2)]
        assert eventually(lambda: metric(url, "xgpt_requests_waiting") == 3)
        refused = post(url)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert [answer.result().status_code for answer in (long, *waiting)] == [200, 200, 200]
        assert post(url, max_tokens=1).status_code == 200
        assert "at most 3 choices are accepted" in post(url, n=4).json()["error"]["message"]


def test_who_would_be_answered_too_late_is_a_429() -> None:
    # The plan answers one request of three tokens a second, in many small steps, and takes a second for it.
    estimate = fake_plan().estimate.model_copy(update={"encode_tokens": 0.03, "encode_batch": 0.01})
    watch = Watch(fake_plan(estimate=estimate))
    executor = FakeExecutor(step_s=0.02)
    with (
        running(fake_app(fake_engine(executor, max_batch=1), watch, limits=Limits(answer_within_s=2.5))) as url,
        ThreadPoolExecutor(2) as pool,
    ):
        long = pool.submit(post, url, max_tokens=60)
        assert eventually(lambda: bool(executor.running))
        assert post(url, n=2).status_code == 429
        waiting = pool.submit(post, url, max_tokens=1)
        assert eventually(lambda: metric(url, "xgpt_requests_waiting") == 1)
        refused = post(url)
        assert refused.status_code == 429
        assert "the answer would take 3 s; this server promises 2.5 s" in refused.json()["error"]["message"]
        assert [answer.result().status_code for answer in (long, waiting)] == [200, 200]


def test_a_plan_that_predicts_nothing_promises_no_answer() -> None:
    estimate = fake_plan().estimate.model_copy(
        update={"encode_tokens": 0.0, "encode_batch": 0.0, "throughput_rps": 0.0}
    )
    executor = FakeExecutor(step_s=0.02)
    limits = Limits(answer_within_s=2.5)
    with (
        running(
            fake_app(fake_engine(executor, max_batch=1), Watch(fake_plan(estimate=estimate)), limits=limits)
        ) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        long = pool.submit(post, url, max_tokens=30)
        assert eventually(lambda: bool(executor.running))
        assert post(url, max_tokens=1).status_code == 200
        assert long.result().status_code == 200


def test_openapi_describes_every_route(url: str) -> None:
    document = get(url, "/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/health"} <= set(document["paths"])
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]["properties"]
    assert {"prompt", "temperature", "stop"} <= set(properties)
    schemas = document["components"]["schemas"]  # an answer's once stood in the place of a request's of the same name
    assert schemas["Message"]["properties"]["role"] == {"enum": ["assistant", "system", "user"]}
    assert schemas["MessageAnswer"]["properties"]["role"] == {"const": "assistant"}
    for path, methods in document["paths"].items():
        if "get" in methods:
            assert get(url, path).status_code == 200


class PoisonedExecutor(FakeExecutor):
    """Has no token for requests whose prompt holds 13, from their second token on."""

    def execute(self, step: Step) -> dict[int, int]:
        poisoned = {id_ for id_ in step.decode if 13 in self.running[id_].prompt}
        return {id_: NO_TOKEN if id_ in poisoned else token for id_, token in super().execute(step).items()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_fails_alone(stream: bool) -> None:
    with running(fake_app(fake_engine(PoisonedExecutor(step_s=0.01)))) as url, ThreadPoolExecutor(3) as pool:
        prompts = [PROMPT, [5, 13, 7], PROMPT]
        first, failed, last = pool.map(lambda prompt: post(url, prompt=prompt, max_tokens=8, stream=stream), prompts)
        assert "not_finite" in failed.text and "are NaN or infinite" in failed.text
        assert failed.status_code == (200 if stream else 500)
        assert first.status_code == last.status_code == 200 and "error" not in first.text + last.text
        again = post(url, max_tokens=4).json()["choices"][0]
        assert again["token_ids"] == expected_tokens(PROMPT, 4)
        assert get(url, "/health").status_code == 200
        assert metric(url, 'xgpt_requests_total{finish_reason="failed"}') == 1
        assert metric(url, "xgpt_output_tokens_total") == 8 + 1 + 8 + 4


def test_a_checkpoint_gives_defaults_for_what_requests_leave_out() -> None:
    executor = FakeExecutor(step_s=0.02)
    seen: list[SamplingParams] = []
    start = executor.start

    def note(generation: Generation, table: BlockTable, moves_to: BlockTable | None = None) -> None:
        seen.append(generation.sampling)
        start(generation, table, moves_to)

    executor.start = note  # type: ignore[method-assign]
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    with running(fake_app(fake_engine(executor), sampling_defaults=defaults)) as url:
        for fields in ({}, {"temperature": 0, "top_k": None, "repetition_penalty": 1.0}):
            assert post(url, max_tokens=2, **fields).status_code == 200
    chosen = [(one.temperature, one.top_k, one.top_p, one.repetition_penalty) for one in seen]
    assert chosen == [(0.6, 20, 0.9, 1.1), (0, 20, 0.9, 1.0)]


def test_a_compressed_body_is_refused(url: str) -> None:
    """Its encoding was ignored, so that it was malformed JSON."""
    body = gzip.compress(json.dumps({"model": "m", "prompt": [1], "max_tokens": 1}).encode())
    answer = httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Encoding": "gzip"}, trust_env=False)
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_server_that_ends_does_not_wait_for_an_engine_that_hangs(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 30 s more than its drain timeout."""
    engine = in_threads(fake_engine(FakeExecutor()))
    waited: list[float] = []
    end = engine._far_end.end
    monkeypatch.setattr(engine._far_end, "end", lambda within_s: (waited.append(within_s), end(10))[1])
    if is_silent:
        engine._heard_s -= remote.HUNG_S + 1
    engine.close()
    assert waited == [0.0 if is_silent else remote.END_S]


@pytest.mark.parametrize("path", few(["/metrics", "/plan", "/live"]))
def test_a_page_that_takes_long_delays_no_token(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def working(*_: object, **__: object) -> bytes:
        time.sleep(1.5)
        return b"{}"

    body = BODY | {"stream": True, "max_tokens": 250, "ignore_eos": True}
    with running(fake_app(fake_engine(FakeExecutor(step_s=0.01)), Watch(fake_plan()))) as url:
        with ThreadPoolExecutor(1) as pool, httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            at_s, longest_s = time.monotonic(), 0.0
            for number, _ in enumerate(answer.iter_raw()):
                if number == 10:
                    monkeypatch.setattr("xrunner.server.observe.metrics.generate_latest", working)
                    monkeypatch.setattr("xgpt.core.schema.Plan.model_dump", working)
                    monkeypatch.setattr("xrunner.server.observe.live.causes_of", working)
                    page = pool.submit(httpx.get, f"{url}{path}", timeout=60)
                longest_s, at_s = max(longest_s, time.monotonic() - at_s), time.monotonic()
        assert page.result().status_code == 200
    assert longest_s < 1.2
