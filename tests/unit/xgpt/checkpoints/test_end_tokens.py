"""The tokens that end an output: of generation_config.json or config.json, and the tokenizer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xgpt.checkpoints.files import default_output, read_spec

ADDED = [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "</s>"}]


@pytest.mark.parametrize(
    ("settings", "tokenizer", "expected"),
    [
        ({"eos_token": "<|im_end|>"}, {"added_tokens": ADDED}, (5, 7)),
        ({"eos_token": {"content": "</s>"}}, {"added_tokens": ADDED}, (5, 8)),
        ({"eos_token": "</s>", "added_tokens_decoder": {"9": {"content": "</s>"}}}, {"added_tokens": ADDED}, (5, 9)),
        ({"eos_token": "</s>", "added_tokens_decoder": {"x": {"content": "</s>"}, "1": 2}}, {}, (5,)),
        ({"eos_token": "<unknown>"}, {"added_tokens": ADDED}, (5,)),
        ({"eos_token": "</s>"}, {"added_tokens": [{"id": 10**6, "content": "</s>"}]}, (5,)),
        ({"eos_token": 5}, {}, (5,)),
        ({}, {"added_tokens": None}, (5,)),
    ],
)
def test_the_tokenizers_end_token_ends_outputs_too(
    settings: dict[str, Any], tokenizer: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    import transformers

    transformers.OPTConfig(vocab_size=100, eos_token_id=5).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_spec(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("written", "expected"), [("8", 8), ("null", None), ("-1", None), ('"8"', None), ("true", None)]
)
def test_the_default_length_of_generation_config(written: str, expected: int | None, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"max_new_tokens": {written}}}')
    assert default_output(tmp_path) == expected
