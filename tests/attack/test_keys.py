"""Several clients on a running server: shares, floods, starvation, and outputs without an end."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.attack.client import elsewhere, flood, request
from tests.attack.target import FAKE_VLLM, FLAVOURS, REAL_VLLM, Target, attacked
from tests.attack.test_grammars import formatted
from tests.fakes import eventually
from xgpt.core.schema import Admission, Plan

ALICE, BOB = "alices-alices-alices", "bobs-bobs-bobs-bobs-"
PROMPT = [5, 6, 7]


def headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


def batch_of(size: int, **admission: Any) -> Callable[[Plan], Plan]:
    """Return the plan with `size` places and this admission; patience counts in half seconds."""

    def change(plan: Plan) -> Plan:
        name = "max_decode_batch" if plan.policy.kind == "waa" else "max_batch"
        policy = plan.policy.model_copy(update={name: size})
        estimate = plan.estimate.model_copy(update={"latency_s": 0.5})
        return plan.model_copy(update={"policy": policy, "estimate": estimate, "admission": Admission(**admission)})

    return change


@contextmanager
def load(target: Target, in_flight: int, key: str | None = None, **fields: Any) -> Iterator[list[int]]:
    """Keep `in_flight` completions in flight throughout the block; yield statuses, as they come."""
    statuses: list[int] = []
    stop = threading.Event()
    body = json.dumps({"model": target.model, "prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, **fields})

    def run() -> None:
        connection = HTTPConnection(*target.address, timeout=120)
        while not stop.is_set():
            connection.request("POST", "/v1/completions", body, target.headers if key is None else headers(key))
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()

    with ThreadPoolExecutor(in_flight) as pool:
        running = [pool.submit(run) for _ in range(in_flight)]
        try:
            yield statuses
        finally:
            stop.set()
    for one in running:
        one.result()


def tokens_of(target: Target) -> dict[str, float]:
    """Tokens of each key's ended requests."""
    found: dict[str, float] = {}
    for line in target.ask("GET", "/metrics")[1].decode().splitlines():
        if line.startswith("xgpt_key_tokens_total{"):
            name = line.split('key="')[1].split('"')[0]
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found


@pytest.mark.point(18)
@pytest.mark.long
@pytest.mark.parametrize("flavour", [*FLAVOURS, FAKE_VLLM, REAL_VLLM])
def test_shares_of_three_to_one_at_three_times_capacity(flavour: str, checkpoint: Path, tmp_path: Path) -> None:
    """Both keep three times as many requests in flight as there are places; the one with the smaller share asks for
    twice as long outputs. Outputs are so long that clients keep up beside the engine on two cores.
    """
    keys = f"alice {ALICE} share=3\nbob {BOB}\n"
    with (
        attacked(flavour, checkpoint, tmp_path, keys=keys, change=batch_of(8)) as target,
        target.left_as_it_was(memory=False),
    ):
        places = 8 * (2 if flavour == "replicas" else 1)
        with (
            load(target, 3 * places, ALICE, max_tokens=32) as one,
            load(target, 3 * places, BOB, max_tokens=64) as other,
        ):
            time.sleep(3)
            before = tokens_of(target)
            served, end_s = {"bob": 0.0}, time.monotonic() + 150
            while served["bob"] < 9000 and time.monotonic() < end_s:  # those in flight are less than 6% of it
                time.sleep(1)
                after = tokens_of(target)
                served = {name: after[name] - before[name] for name in ("alice", "bob")}
        print(f"{flavour}: {served}, {served['alice'] / served['bob']:.3f} to 1")
        assert {*one, *other} == {200}
        assert served["alice"] / served["bob"] == pytest.approx(3, rel=0.1)


@pytest.mark.point(18)
@pytest.mark.long
@pytest.mark.parametrize("flavour", [*FLAVOURS, REAL_VLLM])
def test_a_key_cannot_time_anothers_prompts(flavour: str, checkpoint: Path, tmp_path: Path) -> None:
    """A prompt that a key has asked before is answered sooner, so the clock tells; one that another key has asked takes
    as long as one that is new."""
    rng = np.random.default_rng(0)
    keys = f"alice {ALICE}\nbob {BOB}\n"
    seconds: dict[str, list[float]] = {"again": [], "another's": [], "new": []}
    with (
        attacked(flavour, checkpoint, tmp_path, keys=keys, change=batch_of(8)) as target,
        target.left_as_it_was(memory=False),
    ):

        def took_s(prompt: list[int], key: str) -> float:
            body = {"model": target.model, "prompt": prompt, "max_tokens": 1}
            begin_s = time.perf_counter()
            assert target.ask("POST", "/v1/completions", body, headers(key))[0] == 200
            return time.perf_counter() - begin_s

        for _ in range(40):
            prompt, other = rng.integers(3, 200, (2, 480)).tolist()
            took_s(prompt, ALICE)
            asked = {"again": (prompt, ALICE), "another's": (prompt, BOB), "new": (other, BOB)}
            for name in rng.permutation(list(asked)).tolist():  # none is always the one behind another
                seconds[name].append(took_s(*asked[name]))
    again, others, new = (1e3 * float(np.median(seconds[name])) for name in ("again", "another's", "new"))
    print(f"{flavour}: again {again:.2f} ms, another's {others:.2f}, new {new:.2f}")
    assert again < 0.9 * new, "the clock tells nothing here"
    assert abs(others - new) < 0.4 * (new - again)


@pytest.mark.long
@pytest.mark.point(18)
def test_a_flood_of_one_key_leaves_the_others_theirs(checkpoint: Path, tmp_path: Path) -> None:
    """A key that fills the waiting room once kept all others out."""
    keys = f"alice {ALICE}\nbob {BOB}\n"
    with (
        attacked("one", checkpoint, tmp_path, "--max-waiting", "16", keys=keys, change=batch_of(4)) as target,
        target.left_as_it_was(memory=False),
    ):
        raw = request({"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True}, key=ALICE)
        with ThreadPoolExecutor(1) as thread:
            flooding = thread.submit(elsewhere, flood, target.address, raw, 3.0)
            assert eventually(lambda: tokens_of(target).get("alice", 0) > 0)
            body = {"model": target.model, "prompt": PROMPT, "max_tokens": 2}
            begin_s = time.monotonic()
            asked = [target.ask("POST", "/v1/completions", body, headers(BOB))[0] for _ in range(5)]
            took_s = (time.monotonic() - begin_s) / 5
            assert set(flooding.result()) == {200, 429}
        assert asked == [200] * 5
        assert took_s < 2


@pytest.mark.long
@pytest.mark.point(18)
@pytest.mark.parametrize(
    ("order", "flood", "victim"),
    [("sjf", {}, {"prompt": PROMPT * 100}), pytest.param("edf", {"deadline_s": 60}, {}, marks=pytest.mark.long)],
)
def test_no_order_starves_a_request(
    order: str, flood: dict[str, Any], victim: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """A long prompt among short ones without end, a request without a deadline among others with one: each once had
    its answer only when the others went away."""
    change = batch_of(4, order=order, patience=4)
    with (
        attacked("one", checkpoint, tmp_path, change=change) as target,
        target.left_as_it_was(memory=False),
        load(target, 24, **flood) as statuses,
    ):
        time.sleep(1)
        begin_s = time.monotonic()
        status, _ = target.complete(**{"prompt": PROMPT, "max_tokens": 2} | victim)
        took_s = time.monotonic() - begin_s
        assert status == 200
        assert took_s < 6, "patience is two seconds"
        assert {*statuses} == {200}


@pytest.mark.long
@pytest.mark.point(6)
def test_outputs_without_an_end_do_not_hold_up_a_request_for_two_tokens(checkpoint: Path, tmp_path: Path) -> None:
    """Before, 16 chats without max_tokens reserved all K/V memory, and a request for two tokens waited for one of them
    to fill its context."""
    with (
        attacked("one", checkpoint, tmp_path, change=batch_of(64)) as target,
        target.left_as_it_was(memory=False),
        ThreadPoolExecutor(24) as pool,
    ):
        chat = {"model": target.model, "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        chats = [pool.submit(target.ask, "POST", "/v1/chat/completions", chat, None, 300) for _ in range(24)]
        took_s = []
        while not any(one.done() for one in chats):
            begin_s = time.monotonic()
            assert target.complete(prompt=PROMPT, max_tokens=2)[0] == 200
            took_s.append(time.monotonic() - begin_s)
            time.sleep(0.2)
        print(f"{len(took_s)} requests beside the chats, the slowest took {max(took_s):.2f} s")
        assert max(took_s) < 1.5
        for one in chats:
            status, body = one.result()
            assert (status, json.loads(body)["usage"]["total_tokens"]) == (200, 512)


@pytest.mark.long
@pytest.mark.point(18)
def test_schemas_of_one_key_do_not_hold_up_another(checkpoint: Path, tmp_path: Path) -> None:
    """Those that were compiled but had to wait for their turn once held up the requests of all other keys."""
    ended: list[str] = []
    with attacked(
        "one", checkpoint, tmp_path, keys=f"alice {ALICE}\nbob {BOB} priority=1\n", change=batch_of(1)
    ) as target:

        def ask(name: str, key: str, schema: Any) -> None:
            body = {"model": target.model, **formatted(schema), "max_tokens": 150}
            assert target.ask("POST", "/v1/chat/completions", body, headers(key))[0] == 200
            ended.append(name)

        with ThreadPoolExecutor(12) as threads:
            schemas = [{"const": f"{number}" + "a" * 60_000} for number in range(10)]
            asked = [threads.submit(ask, "alice", ALICE, schema) for schema in schemas]
            assert eventually(lambda: target.metric("xgpt_requests_waiting") >= 6, 60)
            asked.append(threads.submit(ask, "bob", BOB, {"type": "array", "items": {"enum": [1]}}))
            for one in asked:
                one.result()
    assert len(ended) - ended.index("bob") > 4


@pytest.mark.long
def test_keys_change_while_the_server_runs(checkpoint: Path, tmp_path: Path) -> None:
    with attacked("one", checkpoint, tmp_path, keys=f"alice {ALICE} requests_per_minute=1\n") as target:

        def ask(key: str) -> int:
            body = {"model": target.model, "prompt": PROMPT, "max_tokens": 1}
            return target.ask("POST", "/v1/completions", body, headers(key))[0]

        def reload(lines: str, says: str) -> None:
            count = len(target.served.lines)
            (tmp_path / "keys").write_text(lines)
            target.served.process.send_signal(signal.SIGHUP)
            end_s = time.monotonic() + 10
            while not any(says in line for line in target.served.lines[count:]) and time.monotonic() < end_s:
                time.sleep(0.02)
            assert sum("API keys" in line for line in target.served.lines[count:]) == 1

        assert [ask(ALICE), ask(ALICE), ask(BOB)] == [200, 429, 401]
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [3]})):
            assert target.ask("POST", path, body, headers(ALICE))[0] == 429  # these are requests, too
        assert target.ask("GET", "/metrics", headers=headers(ALICE))[0] == 403
        reload(f"bob {BOB} admin\n", "reloaded")
        assert [ask(ALICE), ask(BOB), target.ask("GET", "/metrics", headers=headers(BOB))[0]] == [401, 200, 200]
        reload(f"bob {BOB} adnim\n", "are unchanged")
        assert [ask(ALICE), ask(BOB)] == [401, 200]
        log_text = "\n".join(target.served.lines)
        assert '"key":"alice"' in log_text and '"key":"bob"' in log_text
        assert ALICE not in log_text and BOB not in log_text
