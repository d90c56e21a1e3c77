"""Deadlines at the endpoint: a request that waits beyond its own never runs, and metrics tell how many were met."""

from __future__ import annotations

import threading

import httpx

from tests.fakes import FakeExecutor, eventually, fake_app, fake_engine, running

BODY = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 4, "ignore_eos": True}


def metric(url: str, name: str) -> float:
    text = httpx.get(url + "/metrics", trust_env=False).text
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)


def ask(url: str, **fields: object) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json=BODY | fields, trust_env=False, timeout=10)


def test_deadlines_that_are_met_and_missed() -> None:
    executor = FakeExecutor(step_s=0.02)
    engine = fake_engine(executor, max_batch=1)
    with running(fake_app(engine)) as url:
        assert ask(url, deadline_s=5).status_code == 200
        long = threading.Thread(target=ask, args=(url,), kwargs={"max_tokens": 30})
        long.start()
        assert eventually(lambda: len(executor.running) == 1)
        late = ask(url, deadline_s=0.1, prompt=[1, 2])
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        long.join()
        assert eventually(lambda: engine.pool.is_idle)
        assert metric(url, 'xgpt_deadlines_total{outcome="met"}') == 1
        assert metric(url, 'xgpt_deadlines_total{outcome="missed"}') == 1
        assert metric(url, "xgpt_deadline_utility_total") == 0.25
