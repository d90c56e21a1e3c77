"""Attacks by HTTP on a server of each flavour: what they get, and what others feel of it."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Any

import pytest

from tests.attack.client import (
    ADMIN_KEY,
    MIB,
    answers_of,
    connect,
    elsewhere,
    flood,
    read_all,
    request,
    send_and_read_nothing,
    send_unfinished,
    statuses,
    tiny_chunks,
)
from tests.attack.target import EVERYWHERE, FAKE_VLLM, VLLM, Target, Unharmed
from tests.fakes import eventually

pytestmark = pytest.mark.parametrize("target", EVERYWHERE, indirect=True, scope="module")


@pytest.mark.point(1, 17)
def test_other_requests(target: Target, unharmed: Unharmed) -> None:
    """No attack: what is felt of others alone."""
    with unharmed(200):
        alone = target.probe()
        assert [target.probe() for _ in range(10)] == [alone] * 10
        assert target.ask("GET", "/v1/models", headers={})[0] == 401


@pytest.mark.long
@pytest.mark.point(18)
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_a_flood_leaves_the_engine_its_time(path: str, target: Target) -> None:
    """40 clients without a key once slowed each step down thirty times, since the event loop never waited."""
    raw = request(b"", method="GET", path=path, key="no-key")
    with target.felt() as calm:
        time.sleep(1)
    with target.felt() as felt:
        found = elsewhere(flood, target.address, raw, 3.0)
    assert set(found) == {200 if path == "/health" else 401}
    assert felt.failures == []
    assert median(felt.gaps_s) < 10 * median(calm.gaps_s)


NUMBERS: list[dict[str, object]] = [
    {"n": 3, "max_tokens": 4},
    {"n": 128, "max_tokens": 1, "seed": 2**63 - 1},
    {"seed": -(2**63), "temperature": 2},
    {"seed": 2**63},
    {"top_k": 10**20},
    {"top_k": 2**31 - 1},
    {"max_tokens": 10**30},
    {"output_length": 2**64},
    {"stop_token_ids": [2**64]},
    {"prompt": [2**64]},
    {"prompt": [-1]},
    {"temperature": 1e-300, "top_p": 1e-300, "min_p": 1e-300},
    {"temperature": 1e300},
    {"deadline_s": 1e-300},
    {"deadline_s": 1e300},
    {"frequency_penalty": 2, "presence_penalty": -2},
    {"logit_bias": {"5": 1e308}},
    {"repetition_penalty": 1e-30},
]


@pytest.mark.point(2)
def test_numbers_at_the_edge(target: Target, unharmed: Unharmed) -> None:
    with unharmed(200):
        for fields in NUMBERS:
            status, answer = target.complete(**{"prompt": [5, 6, 7], "max_tokens": 4} | fields)
            assert status in (200, 400, 504), (fields, answer)
        nan = f'{{"model": "{target.model}", "prompt": [5], "temperature": NaN}}'.encode()
        assert target.ask("POST", "/v1/completions", nan)[0] == 400


@pytest.mark.long
@pytest.mark.point(4)
def test_idle_sockets(target: Target, record_property: Callable[[str, object], None]) -> None:
    """More than there are files; the system's limit falls below what the server counts on, too."""
    before = resource.prlimit(target.served.process.pid, resource.RLIMIT_NOFILE)
    num_lines = len(target.served.lines)
    with ExitStack() as clients:
        try:
            resource.prlimit(target.served.process.pid, resource.RLIMIT_NOFILE, (256, before[1]))
            with target.felt() as felt:
                idle = [clients.enter_context(connect(target.address)) for _ in range(300)]
                time.sleep(20)  # accepts fail until the first ten seconds are over
        finally:
            resource.prlimit(target.served.process.pid, resource.RLIMIT_NOFILE, before)
        assert all(read_all(client) == b"" for client in idle)
        assert target.ask("GET", "/health", timeout_s=5)[0] == 200
    said = sum(map(len, target.served.lines[num_lines:]))
    record_property("case", "idle sockets")
    record_property("flavour", target.flavour)
    record_property("note", f"/health {felt.slowest_health_s:.1f} s, {said} bytes of log")
    assert felt.slowest_health_s < 20 and said < 300_000


@pytest.mark.long
@pytest.mark.point(5)
def test_unfinished_bodies(target: Target, unharmed: Unharmed) -> None:
    with unharmed(300):
        elsewhere(send_unfinished, target.address, 60)


@pytest.mark.long
@pytest.mark.point(6)
def test_chats_without_max_tokens(
    target: Target, unharmed: Unharmed, record_property: Callable[[str, object], None]
) -> None:
    """Of which 16 once held all blocks, among requests for two tokens."""
    chat = {"model": target.model, "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    took_s = []
    with unharmed(300), ThreadPoolExecutor(24) as pool:
        chats = [pool.submit(target.ask, "POST", "/v1/chat/completions", chat, None, 600) for _ in range(24)]
        while not any(one.done() for one in chats):
            begin_s = time.monotonic()
            assert target.complete(prompt=[5, 6, 7], max_tokens=2)[0] == 200
            took_s.append(time.monotonic() - begin_s)
        for one in chats:
            status, body = one.result()
            assert (status, json.loads(body)["usage"]["total_tokens"]) == (200, 512)
    record_property("note", f"two tokens within {max(took_s):.2f} s, the median {sorted(took_s)[len(took_s) // 2]:.2f}")
    assert max(took_s) < 10


@pytest.mark.point(11)
def test_long_prompts(target: Target, unharmed: Unharmed) -> None:
    """As long as any that is not refused by its length alone."""
    requests = [request({"prompt": "the quick brown fox " * 7_500}) for _ in range(60)]
    with unharmed(300):
        found = elsewhere(statuses, target.address, requests * 5)
    assert set(found) == {400}


@pytest.mark.long
@pytest.mark.point(12)
def test_clients_that_do_not_read(
    target: Target, unharmed: Unharmed, record_property: Callable[[str, object], None]
) -> None:
    """Their deadline frees what they hold, and their connections end."""
    deadline_s = 4
    fields = {"prompt": [5, 6, 7], "n": 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    raw = request(fields | {"deadline_s": deadline_s}, extra="Connection: close\r\n")
    with unharmed(300), ExitStack() as opened:
        clients = []
        begin_s = time.monotonic()
        for _ in range(12):
            client = opened.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect(target.address)
            client.sendall(raw)
            clients.append(client)
        time.sleep(1)
        # The stream of the other client, and its probe at the most.
        while target.metric("xgpt_requests_running") + target.metric("xgpt_requests_waiting") > 2:
            assert time.monotonic() - begin_s < 60
            time.sleep(0.2)
        freed_s = time.monotonic() - begin_s
        time.sleep(max(0.0, begin_s + 36 - time.monotonic()))  # 30 s to take what was written
        for client in clients:
            read_all(client)  # it ends
        ended_s = time.monotonic() - begin_s
    record_property(
        "note", f"a deadline of {deadline_s} s freed all after {freed_s:.1f} s, all ended at {ended_s:.0f} s"
    )
    assert freed_s < deadline_s + 15 and ended_s < 90


@pytest.mark.long
@pytest.mark.point(13)
def test_a_large_answer(target: Target, unharmed: Unharmed) -> None:
    """As large as any that is not refused; those beyond are."""
    fields: dict[str, Any] = {"prompt": [[1]] * 4, "n": 128, "ignore_eos": True, "temperature": 1}
    if target.flavour != FAKE_VLLM:  # which knows no probabilities
        fields["logprobs"] = 20
    with unharmed(500):
        raw = request({**fields, "max_tokens": 20 if target.flavour == VLLM else 90})
        assert elsewhere(statuses, target.address, [raw]) == [200]
    assert elsewhere(statuses, target.address, [request({**fields, "max_tokens": 400, "logprobs": 20})]) == [400]


@pytest.mark.long
@pytest.mark.point(14)
def test_text_that_never_ends(target: Target, unharmed: Unharmed) -> None:
    """Outputs of bytes that are seldom whole characters."""
    with unharmed(300):
        for stream in (False, True):
            fields = {"prompt": "\u20ac" * 30, "n": 16, "max_tokens": 400, "temperature": 2, "ignore_eos": True}
            assert elsewhere(statuses, target.address, [request({**fields, "stream": stream})]) == [200]


@pytest.mark.long
@pytest.mark.point(21)
@pytest.mark.parametrize("key", ["", ADMIN_KEY])
def test_bodies_in_chunks_of_one_byte(key: str, target: Target, unharmed: Unharmed) -> None:
    """Without a key /health once waited 14 s; a body with one took 15 s."""
    requests = [tiny_chunks(path, key=key) for path in ("/nowhere", "/v1/completions")] * 4
    with unharmed(200):
        found = elsewhere(statuses, target.address, requests, 8)
    assert set(found) <= {0, 400, 401, 404}


@pytest.mark.long
@pytest.mark.point(22)
def test_requests_that_keep_long_fields(target: Target, unharmed: Unharmed) -> None:
    """36 of them once took 2.6 GiB until they had ended."""
    raw = request({"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "user": "\U0001f600" + "x" * (15 * MIB)})
    with unharmed(700):
        found = elsewhere(statuses, target.address, [raw] * 36, 36)
    assert set(found) <= {200, 400, 413, 429, 503}


@pytest.mark.long
@pytest.mark.point(22)
def test_errors_that_are_not_read(target: Target, unharmed: Unharmed) -> None:
    """A model's name of 15 MiB once was an answer of 35 MiB."""
    raw = request({"prompt": [5], "model": "\U0001f600" + "m" * (15 * MIB)})
    num_lines = len(target.served.lines)
    with unharmed(700):
        elsewhere(send_and_read_nothing, target.address, raw, 40, 3.0)
    assert sum(map(len, target.served.lines[num_lines:])) < 100_000


@pytest.mark.long
@pytest.mark.point(22)
def test_lines_of_log_that_strangers_write(target: Target, unharmed: Unharmed) -> None:
    """65 GB a day, once."""
    raw = request(b"", method="GET", path="/" + "p" * 10_000, key="no-key", extra=f"X-Request-Id: {'r' * 120}\r\n")
    num_lines = len(target.served.lines)
    with unharmed(200):
        found = elsewhere(flood, target.address, raw, 2.0, 8)
    lines = target.served.lines[num_lines:]
    assert set(found) <= {400, 401} and max(map(len, lines), default=0) < 1500


@pytest.mark.long
@pytest.mark.point(22)
def test_an_echo_as_large_as_can_be(target: Target, unharmed: Unharmed) -> None:
    """A body of 70 kB once made an answer of 557 MiB."""
    if target.flavour in (FAKE_VLLM, VLLM):
        pytest.skip("log probabilities of prompts are refused there")
    fields = {"prompt": [[5] * 400] * 30, "n": 128, "max_tokens": 1, "logprobs": 20, "echo": True}
    with unharmed(300):
        assert elsewhere(statuses, target.address, [request(fields)]) == [400]
        fields |= {"n": 1, "prompt": [[5] * 400] * 8}
        assert set(elsewhere(statuses, target.address, [request(fields)])) <= {200, 400}


@pytest.mark.long
@pytest.mark.point(22)
def test_long_stop_strings(target: Target, unharmed: Unharmed) -> None:
    """They were said to be quadratic; with them, outputs now cost as much as without."""
    seconds = {}
    with unharmed(200):
        for name, stop in (("without", None), ("with", ["a" * 999 + chr(98 + number) for number in range(16)])):
            fields = {"prompt": "a" * 50, "n": 16, "max_tokens": 400, "ignore_eos": True, "stop": stop}
            begin_s = target.cpu_s()
            assert elsewhere(statuses, target.address, [request(fields)]) == [200]
            seconds[name] = target.cpu_s() - begin_s
    assert seconds["with"] < 2 * seconds["without"] + 1


@pytest.mark.point(20)
def test_half_closed_clients_and_two_lengths(target: Target, unharmed: Unharmed) -> None:
    good = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}
    with unharmed(200):
        for _ in range(5):
            sent = request(good) * 2 + request({**good, "stream": True})
            assert answers_of(target.address, sent) == [200, 200, 200]
        assert answers_of(target.address, request(good, extra="Transfer-Encoding: chunked\r\n")) == [400]
        for value in ("1_0", "nan", "-1", "1e999", "0x10", "\u0661".encode().decode("latin-1")):
            assert answers_of(target.address, request(good, extra=f"X-Deadline-S: {value}\r\n")) == [400], value
    assert eventually(lambda: target.metric("xgpt_requests_running") == 0)
