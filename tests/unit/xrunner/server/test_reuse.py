"""Clients see what of their prompts was there, and only what their own key has left."""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest

from tests.fakes import STAGES, FakeExecutor, eventually, expected_tokens, fake_app, fake_plan, running
from tests.unit.xrunner.server.test_watch import FakePlanner
from xgpt.core.policies import LaneSettings, OneLane, Pool
from xgpt.core.schema import Observation, OrcaSettings, Plan, Proposal
from xrunner.engine import Engine
from xrunner.server.access.keys import ApiKeys
from xrunner.server.observe.watch import Watch

PROMPT = list(range(100, 150))  # three whole blocks of 16, and two tokens
WIDER = fake_plan(policy=OrcaSettings(max_batch=32))
KEYS = "alice sk-alice-0123456789abcdef\nbob sk-bob-0123456789abcdef\n"


def engine(*, reuse: bool = True) -> Engine:
    return Engine(OneLane(LaneSettings(mix=True, max_batch=4), Pool(50, 16)), FakeExecutor(), reuse=reuse)


def ask(url: str, prompt: list[int], key: str | None = None, **fields: object) -> dict:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": "fake", "prompt": prompt, "max_tokens": 4, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_usage_and_metrics_tell_what_was_there() -> None:
    with running(fake_app(engine())) as url:
        first = ask(url, PROMPT)
        again = ask(url, PROMPT)
        assert (cached(first), cached(again)) == (0, 48)
        assert first["choices"][0]["token_ids"] == again["choices"][0]["token_ids"] == expected_tokens(PROMPT, 4)
        assert cached(ask(url, PROMPT[:48])) == 32, "the last token of a prompt is always executed"
        assert cached(ask(url, [*PROMPT[:20], 7, *PROMPT[21:]])) == 16, "a block is known by all tokens before it, too"
        metrics = httpx.get(f"{url}/metrics").text
        assert f"xgpt_prompt_tokens_cached_total {48 + 32 + 16:.1f}" in metrics
        assert "xgpt_kv_blocks_kept 5.0" in metrics


def test_a_conversation_finds_its_own_answers() -> None:
    with running(fake_app(engine())) as url:
        first = ask(url, PROMPT, max_tokens=40)
        turn = [*PROMPT, *first["choices"][0]["token_ids"], 1, 2, 3]
        assert cached(ask(url, turn)) == 16 * ((50 + 39) // 16), "the last token was never fed"


def test_without_reuse_every_prompt_is_computed_whole() -> None:
    with running(fake_app(engine(reuse=False))) as url:
        assert [cached(ask(url, PROMPT)) for _ in range(2)] == [0, 0]


def test_a_stream_tells_it_with_its_usage() -> None:
    with running(fake_app(engine())) as url:
        ask(url, PROMPT)
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": 2, "stream": True}
        body["stream_options"] = {"include_usage": True}
        text = httpx.post(f"{url}/v1/completions", json=body).text
        assert '"prompt_tokens_details":{"cached_tokens":48}' in text.split("\n\n")[-3]


@pytest.mark.parametrize(("other", "found"), [("alice", 48), ("bob", 0)])
def test_a_key_finds_nothing_that_another_has_left(tmp_path, other: str, found: int) -> None:
    """So neither usage nor the time to the first token says what another key's prompts were."""
    path = tmp_path / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    seen = engine()
    with running(fake_app(seen, keys=ApiKeys.read(path))) as url:
        ask(url, PROMPT, "sk-alice-0123456789abcdef")
        answer = ask(url, PROMPT, f"sk-{other}-0123456789abcdef")
        assert cached(answer) == found
        assert seen.pool.kept_blocks == (3 if found else 6)


class CountsOnHits(FakePlanner):
    """Proposes another plan where more than half of all prompt tokens were found."""

    async def propose(self, plan: Plan, observation: Observation) -> Proposal:
        assert observation.reuse is not None
        self.answers = [WIDER if observation.reuse.share > 0.5 else None]
        return await super().propose(plan, observation)


def test_a_server_replans_when_hits_appear() -> None:
    """The planner is told what requests have in common as soon as they have; prompts' lengths stay the same."""
    planner, rng = CountsOnHits([]), np.random.default_rng(0)
    served = Engine(OneLane(LaneSettings(mix=True, max_batch=16), Pool(1000, 16), STAGES), FakeExecutor(), reuse=True)

    def send(prompts: list[list[int]]) -> None:
        body = {"model": "fake", "prompt": prompts, "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200

    def settings() -> dict[str, int]:
        return httpx.get(f"{url}/plan").json()["plan"]["policy"]

    with running(fake_app(served, Watch(fake_plan(block_size=16), planner))) as url:
        send(rng.integers(3, 50, (130, 50)).tolist())
        time.sleep(0.6)  # looks have a distance
        send(rng.integers(3, 50, (32, 50)).tolist())
        assert eventually(lambda: len(planner.asked) > 0), "lengths are not the planned ones"
        assert settings() != WIDER.policy.model_dump()
        for _ in range(20):
            send([[*PROMPT[:48], *tail] for tail in rng.integers(3, 50, (16, 2)).tolist()])
            time.sleep(0.1)
        time.sleep(0.6)
        send([[*PROMPT[:48], *tail] for tail in rng.integers(3, 50, (16, 2)).tolist()])
        assert eventually(lambda: settings()["max_batch"] == 32)
        assert httpx.get(f"{url}/plan").json()["observed"]["reuse"]["share"] > 0.5
