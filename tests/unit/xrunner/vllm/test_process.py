"""What is said of a vLLM that has ended."""

from __future__ import annotations

import pytest

from xrunner.vllm.process import last_error

REFUSED = [
    "INFO starting\n",
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n",
    "  Value error, max_model_len (4096) is greater than the derived max_model_len (2048)\n",
    "    For further information visit ...\n",
]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (REFUSED, "ModelConfig Value error, max_model_len (4096) is greater"),
        (["RuntimeError: out of memory\n", "bye\n"], "RuntimeError: out of memory"),
        (["first\n", "bye\n"], "bye"),
        ([], "it printed nothing"),
    ],
)
def test_the_reason_is_the_last_error(lines: list[str], words: str) -> None:
    assert words in last_error(lines)
