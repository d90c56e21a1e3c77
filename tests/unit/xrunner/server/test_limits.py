"""What a key may have: a minute's requests and tokens, its share of the engine and of the waiting room, its time."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import httpx
import numpy as np
import pytest

from tests.fakes import SPEC, FakeExecutor, byte_codec, eventually, fake_app, fake_engine, fake_plan, running
from tests.rings import few
from tests.unit.xgpt.core.policies.test_in_time import nanosecond_a_token
from xgpt.core.errors import InputError
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.policies.admission import make_queue
from xgpt.core.schema import Account, Admission, AdmissionOrder, Histogram, StaticSettings, Workload
from xrunner.server.access.keys import ApiKeys, Key
from xrunner.server.access.quota import Quotas
from xrunner.server.api.allowance import OutputRule, check_tokens
from xrunner.server.api.errors import ApiError
from xrunner.server.api.parsing import parse_chat, parse_completion
from xrunner.server.observe.backlog import Backlog
from xrunner.server.observe.watch import Watch
from xrunner.server.submission import Limits
from xsimulator.events import SimulatedEngine, SimulatedRequest

ALICE, BOB, OPS = "alices-alices-alices", "bobs-bobs-bobs-bobs-", "operators-operators-"
BODY = {"model": "fake", "prompt": [5, 6, 7], "ignore_eos": True}


def post(url: str, key: str = OPS, **fields: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=BODY | fields, headers=headers, trust_env=False, timeout=60)


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# How long an output may be ----------------------------------------------------------------------------------


CHAT = b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}]}'
COMPLETION = b'{"model": "fake", "prompt": [1]}'


@pytest.mark.parametrize(
    ("rule", "chat", "completion"),
    [
        (OutputRule(), (500, None), (16, None)),
        (OutputRule(promised=40), (500, 40), (16, None)),
        (OutputRule(promised=40, may_outgrow=False), (40, None), (16, None)),
        (OutputRule(default=100, promised=40), (100, 40), (100, 40)),
        (OutputRule(default=30, promised=40), (30, None), (30, None)),
        (OutputRule(most=8, promised=40), (8, None), (8, None)),
    ],
)
def test_without_max_tokens(rule: OutputRule, chat: tuple[int, int], completion: tuple[int, int]) -> None:
    for request, expected in ((parse_chat(CHAT), chat), (parse_completion(COMPLETION), completion)):
        assert check_tokens([1] * 12, request, SPEC, Pool(10_000, 1), rule) == expected


def test_more_than_the_server_gives_is_refused() -> None:
    request = parse_completion(b'{"model": "fake", "prompt": [1], "max_tokens": 9}')
    with pytest.raises(ApiError, match="more than this server's limit of 8"):
        check_tokens([1], request, SPEC, Pool(10_000, 1), OutputRule(most=8))
    with pytest.raises(InputError, match="max_max_tokens=8"):
        Limits(default_max_tokens=9, max_max_tokens=8)


def test_the_plan_promises_its_quantile_of_outputs() -> None:
    lengths = Histogram(lengths=(10, 20, 400), probabilities=(0.5, 0.492, 0.008))
    plan = fake_plan(workload=Workload(name="w", input=lengths, output=lengths))
    assert Limits().output_rule(plan) == OutputRule(None, None, 20, True)
    assert plan.model_copy(update={"admission": Admission(promise_quantile=0.995)}).promised_output == 400
    static = plan.model_copy(update={"policy": StaticSettings(batch=4)})
    assert not Limits().output_rule(static).may_outgrow


def test_chats_that_name_no_maximum_do_not_hold_up_a_request_for_two_tokens() -> None:
    """Before, eight of them reserved all memory, and the request waited for one of them to fill its context."""
    engine = fake_engine(FakeExecutor(step_s=0.005), kv_blocks=64, max_batch=16)
    with running(fake_app(engine, Watch(fake_plan()), codec=byte_codec())) as url, ThreadPoolExecutor(8) as pool:
        chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}

        def ask() -> httpx.Response:
            return httpx.post(f"{url}/v1/chat/completions", json=chat, trust_env=False, timeout=60)

        chats = [pool.submit(ask) for _ in range(8)]
        assert eventually(lambda: engine.pool.num_preemptions > 0)  # they have outgrown their promise, and hold all
        assert post(url, max_tokens=2).status_code == 200
        assert not any(one.done() for one in chats)
        usages = [future.result().json()["usage"] for future in chats]
        assert {usage["total_tokens"] for usage in usages} == {SPEC.max_context}  # and still none is cut short


# A minute's requests and tokens -----------------------------------------------------------------------------


def test_a_bucket_holds_a_minute_and_fills_evenly() -> None:
    now = [0.0]
    quotas, key = Quotas(lambda: now[0]), Key(Account("a"), requests_per_minute=6, tokens_per_minute=60)
    for _ in range(6):
        quotas.begin(key)
    with pytest.raises(ApiError, match="6 requests a minute of key 'a'") as caught:
        quotas.begin(key)
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "10")
    now[0] = 10.0
    quota = quotas.begin(key)
    quota.reserve(50)
    quota.settle(20)
    with pytest.raises(ApiError, match="60 tokens a minute"):
        quota.reserve(41)
    quota.reserve(40)
    now[0] = 1000.0
    quota.reserve(1000)  # more than it ever holds: a full one, and a debt
    with pytest.raises(ApiError) as caught:
        quota.reserve(1)
    assert caught.value.headers["retry-after"] == "941"


def test_a_reload_changes_what_a_key_may_have_and_forgets_nothing() -> None:
    quotas = Quotas(lambda: 0.0)
    for _ in range(3):
        quotas.begin(Key(Account("a"), requests_per_minute=3))
    with pytest.raises(ApiError):
        quotas.begin(Key(Account("a"), requests_per_minute=2))
    quotas.begin(Key(Account("b"), requests_per_minute=2))


def test_limits_of_one_key_leave_the_others_alone() -> None:
    keys = ApiKeys.parse(f"alice {ALICE} requests_per_minute=2 \nbob {BOB} tokens_per_minute=20\n{OPS}")
    with running(fake_app(fake_engine(FakeExecutor()), keys=keys)) as url:
        statuses = [post(url, ALICE, max_tokens=1).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        answer = post(url, ALICE, max_tokens=1)
        assert refused(answer) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert post(url, BOB, max_tokens=10).status_code == 200
        assert refused(post(url, BOB, max_tokens=10)) == (429, "rate_limit_exceeded")
        assert post(url, BOB, max_tokens=4).status_code == 200
        assert {post(url, OPS, max_tokens=10).status_code for _ in range(5)} == {200}


# Shares -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", few(get_args(AdmissionOrder), 2))
def test_two_keys_at_three_times_capacity_are_served_by_their_shares(order: AdmissionOrder) -> None:
    """On the simulated clock, by the rule that serves; each sends 1.5 times what the engine can do, b longer outputs.
    Before, both got the half."""
    rng = np.random.default_rng(0)
    capacity_per_s = 8 / 0.010  # tokens: eight places, steps of ten milliseconds
    requests, now_s = [], 0.0
    for id_ in range(6000):
        account, output = (Account("a", 3.0), 10) if id_ % 2 else (Account("b"), 30)
        now_s += rng.exponential(20 / (3 * capacity_per_s))
        size = int(rng.integers(1, 20)), output, output
        requests.append(SimulatedRequest(id_, *size, round(now_s * 1e9), account=account))
    first_tokens = nanosecond_a_token(10**9) if order == "in-time" else None
    pool = Pool(10_000, 16, waiting=make_queue(order, 100 if "das" in order else None, 2 * 10**9, first_tokens))
    lane = OneLane(LaneSettings(mix=True, max_batch=8), pool)
    tokens = {"a": 0, "b": 0}
    engine = SimulatedEngine(lane, lambda start_ns, step: start_ns + 10_000_000, requests)
    while (record := engine.step()) is not None and record.end_ns < now_s * 1e9:
        for id_ in record.finished:
            one = requests[id_]
            tokens[one.account.name] += one.input_length + one.output_length
    assert tokens["a"] / tokens["b"] == pytest.approx(3, rel=0.03)


@pytest.mark.long
def test_a_flood_leaves_the_other_key_its_share_of_the_waiting_room() -> None:
    """One key once filled the room, and all others got 429."""
    keys = ApiKeys.parse(f"alice {ALICE}\nbob {BOB}\n{OPS}")
    engine = fake_engine(FakeExecutor(step_s=0.005), max_batch=1)
    app = fake_app(engine, keys=keys, limits=Limits(max_waiting=8))
    with running(app) as url, ThreadPoolExecutor(16) as pool:
        flood = [pool.submit(post, url, ALICE, max_tokens=40) for _ in range(12)]
        assert eventually(lambda: sum(one.done() for one in flood) >= 3)
        assert post(url, BOB, max_tokens=2).status_code == 200
        assert sum(not one.done() for one in flood) >= 5  # behind the one that ran, not behind the eight
        assert {refused(one.result()) for one in flood if one.result().status_code != 200} == {(429, "queue_full")}


def test_what_an_account_waits_for_is_its_own_and_the_others_share() -> None:
    plan, flood = fake_plan(), Backlog(10.0)
    for id_ in range(90):
        flood.join(id_, 10, 0.0, Account("a"))

    def waits_s(account: Account) -> float:
        return flood.answer_s(0.0, account, 1, plan, 1.0)

    alone = waits_s(Account("a"))
    assert waits_s(Account("b")) < alone / 10
    assert waits_s(Account("b", share=9)) <= waits_s(Account("b")) <= waits_s(Account("b", share=0.1))
    assert waits_s(Account("b", priority=-1)) == pytest.approx(alone, rel=0.05)


# Time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_deadline_has_the_servers(stream: bool) -> None:
    app = fake_app(fake_engine(FakeExecutor(step_s=0.01)), limits=Limits(request_timeout_s=0.2))
    with running(app) as url:
        begin_s = time.monotonic()
        answer = post(url, max_tokens=400, stream=stream)
        assert time.monotonic() - begin_s < 2
        assert '"code":"timeout"' in answer.text and "0.2 s" in answer.text
        assert stream or answer.status_code == 504
        assert refused(post(url, max_tokens=400, deadline_s=0.1)) == (504, "deadline_exceeded")
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        assert 'xgpt_requests_total{finish_reason="timeout"} 1.0' in text
        assert 'xgpt_deadlines_total{outcome="missed"} 1.0' in text  # a client's own alone
