"""Classes of requests at the endpoint: by key and by header, first by priority, refused and counted by class."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.fakes import FakeExecutor, eventually, fake_app, fake_engine, fake_plan, running
from xgpt.core.errors import InputError
from xgpt.core.schema import Account, Constraint, Plan, RequestClass
from xrunner.server.access.keys import ApiKeys, Classes
from xrunner.server.observe.watch import Watch

ALICE, BOB, OPS = "alices-alices-alices", "bobs-bobs-bobs-bobs=", "operators-operators"
NAMES = ("interactive", "batch")
FILE = f"alice {ALICE} class=batch share=2\nbob {BOB}\n{OPS}\n"


def with_classes() -> Plan:
    classes = (
        RequestClass(name="interactive", share=0.5, priority=1, ttft_s=30.0, tpot_s=5.0),
        RequestClass(name="batch", share=0.5),
    )
    # What a phase takes: see the test of a key's own promise.
    estimate = fake_plan().estimate.model_copy(update={"encode_tokens": 0.03, "encode_batch": 0.01})
    return fake_plan(estimate=estimate, constraint=Constraint().with_classes(classes))


class Endpoint:
    """One request at a time runs; the others wait."""

    def __init__(self, url: str, executor: FakeExecutor) -> None:
        self.url, self.executor = url, executor

    def ask(self, key: str | None, of_class: str | None = None, **fields: object) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        headers |= {} if of_class is None else {"x-class": of_class}
        body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 1, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=10)

    def waits(self, count: int) -> bool:
        return f"xgpt_requests_waiting {count}.0" in self.get("/metrics").text

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"authorization": f"Bearer {OPS}"}, trust_env=False, timeout=10)


def opened(text: str | None = FILE, **within: float) -> Iterator[Endpoint]:
    plan, executor = with_classes(), FakeExecutor(step_s=0.02)
    keys = None if text is None else ApiKeys.parse(text, NAMES)
    engine = fake_engine(executor, max_batch=1)
    with running(fake_app(engine, Watch(plan), keys=keys, classes=Classes(plan, within))) as url:
        yield Endpoint(url, executor)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    yield from opened()


@pytest.fixture
def promising() -> Iterator[Endpoint]:
    yield from opened(interactive=2.5)


@pytest.fixture
def without_keys() -> Iterator[Endpoint]:
    yield from opened(None)


def test_a_request_of_the_higher_class_enters_first_and_each_class_is_counted(endpoint: Endpoint) -> None:
    ended: list[str] = []

    def ask(key: str, of_class: str | None, name: str, tokens: int = 1) -> None:
        assert endpoint.ask(key, of_class, max_tokens=tokens).status_code == 200
        ended.append(name)

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, BOB, None, "running", 60)]
        assert eventually(lambda: bool(endpoint.executor.running))
        for key, of_class, name in (
            (ALICE, None, "by key"),
            (BOB, "batch", "by header"),
            (BOB, "interactive", "first"),
        ):
            asked.append(pool.submit(ask, key, of_class, name))
            assert eventually(partial(endpoint.waits, len(asked) - 1))
        for each in asked:
            each.result()
    assert ended[:2] == ["running", "first"] and set(ended[2:]) == {"by key", "by header"}
    live = endpoint.get("/live").json()
    assert live["classes"] == {"batch": {"kept": 2, "broken": 0}, "interactive": {"kept": 1, "broken": 0}}
    assert set(live["keys"]) == {"alice", "bob"}  # a key stays one, whatever the class
    metrics = endpoint.get("/metrics").text
    assert 'xgpt_class_bounds_total{class="batch",kept="yes"} 2.0' in metrics
    assert 'xgpt_class_tokens_total{class="interactive",kind="prompt"} 3.0' in metrics
    assert 'xgpt_key_tokens_total{key="bob",kind="prompt"} 9.0' in metrics


@pytest.mark.parametrize(
    ("key", "of_class", "status", "says"),
    [
        (BOB, "interactiv", 400, "did you mean interactive"),
        (BOB, "", 400, "interactive, batch"),
        (ALICE, "interactive", 403, "of the class batch"),
        (ALICE, "batch", 200, ""),
    ],
)
def test_a_class_that_is_not_the_keys_or_the_plans_is_refused(
    endpoint: Endpoint, key: str, of_class: str, status: int, says: str
) -> None:
    answer = endpoint.ask(key, of_class)
    assert answer.status_code == status
    if status != 200:
        error = answer.json()["error"]
        assert error["param"] == "X-Class" and says in error["message"]


def test_an_answer_is_promised_by_class(promising: Endpoint) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(promising.ask, BOB, None, max_tokens=60)
        assert eventually(lambda: bool(promising.executor.running))
        assert promising.ask(BOB, "interactive", n=2).status_code == 429
        assert [promising.ask(BOB, of_class, n=2).status_code for of_class in ("batch", None)] == [200, 200]
        assert long.result().status_code == 200


def test_a_header_names_a_class_where_there_are_no_keys(without_keys: Endpoint) -> None:
    assert without_keys.ask(None, "interactive").status_code == 200
    assert without_keys.ask(None, "other").status_code == 400
    assert without_keys.get("/live").json()["classes"] == {"interactive": {"kept": 1, "broken": 0}}


def test_a_request_of_a_class_has_its_priority_bounds_and_its_keys_share() -> None:
    keys, classes = ApiKeys.parse(FILE, NAMES), Classes(with_classes(), {"interactive": 2.5})
    alice, bob = (keys.find(f"Bearer {key}".encode()) for key in (ALICE, BOB))
    assert alice is not None and bob is not None
    of_alice = classes.key_of(alice, None)
    assert (of_alice.account.name, of_alice.account.share, of_alice.account.priority) == ("alice/batch", 2.0, 0)
    assert (of_alice.account.key, of_alice.account.of_class, of_alice.name) == ("alice", "batch", "alice")
    first = classes.key_of(bob, "interactive")
    assert (first.account.priority, first.ttft_s, first.tpot_s, first.answer_within_s) == (1, 30.0, 5.0, 2.5)
    assert classes.key_of(bob, None) == bob and bob.account == Account("bob")


@pytest.mark.parametrize(
    ("text", "names", "says"),
    [
        (f"alice {ALICE} class=bath", NAMES, "did you mean batch"),
        (f"alice {ALICE} class=batch", (), "the plan has no classes"),
        (f"alice {ALICE} class=batch priority=1", NAMES, "class= already sets priority"),
        (f"alice {ALICE} class=batch class=batch", NAMES, "given twice"),
    ],
)
def test_a_key_of_no_class_of_the_plan_is_refused(text: str, names: tuple[str, ...], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        ApiKeys.parse(text, names)
    assert ALICE not in str(caught.value)


def test_a_promise_to_a_class_that_the_plan_has_not_is_refused() -> None:
    with pytest.raises(InputError, match=r"answer_within_s.*did you mean batch"):
        Classes(with_classes(), {"bath": 3.0})
    with pytest.raises(InputError, match="has no classes"):
        Classes(fake_plan(), {"batch": 3.0})
