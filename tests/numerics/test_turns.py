"""Chats of several turns through the server: the tokens do not depend on whether K/V was kept between the turns."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.attack.target import Target, attacked, save_checkpoint

KEYS = [f"a-key-of-its-own-for-turn-{turn}" for turn in range(5)]


def chats(target: Target, keys: list[str]) -> tuple[list[str], list[int]]:
    """Return the greedy answers of a chat's turns, each sent with its key, and how many prompt tokens each found."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "answer in one word"}]
    answers, cached = [], []
    for turn, key in enumerate(keys):
        messages.append({"role": "user", "content": f"question {turn}"})
        body = {"model": target.model, "messages": messages, "max_tokens": 20, "temperature": 0.0, "logprobs": True}
        headers = target.headers | {"Authorization": f"Bearer {key}"}
        status, raw = target.ask("POST", "/v1/chat/completions", body, headers)
        assert status == 200, raw
        answer = json.loads(raw)
        choice, found = answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        answers.append("".join(token["token"] for token in choice["logprobs"]["content"]))
        cached.append(found)
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    return answers, cached


@pytest.mark.parametrize("flavour", ["one", *(pytest.param(name, marks=pytest.mark.long) for name in ("tp", "waa"))])
def test_turns_have_the_same_tokens_with_and_without_kept_prefixes(flavour: str, tmp_path: Path) -> None:
    keys = "".join(f"user{i} {key}\n" for i, key in enumerate(KEYS))
    with attacked(flavour, save_checkpoint(tmp_path / "small"), tmp_path, keys=keys) as target:
        kept, found = chats(target, KEYS[:1] * len(KEYS))
        # Keys share no K/V, so turns that each come with another key find nothing. The first key's turns were kept.
        anew, none = chats(target, [KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[1]])
    assert found[0] == 0 and all(later > before for before, later in pairwise(found))
    assert none[:4] == [0, 0, 0, 0] and none[4] < found[4]
    assert anew == kept
