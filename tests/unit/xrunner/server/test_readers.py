"""The readers of outputs: whatever a model writes, and wherever the output is cut, a reader ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from xrunner.server.api.harmony import MARKS, HarmonyReader, harmony_of

ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
OUTPUTS = (
    ANALYSIS + '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>',
    ANALYSIS + "<|channel|>final<|message|>Rome.<|return|>",
    "<|channel|>final<|message|>One.<|end|><|start|>" + "assistant" * 80,
    "<|start|><|start|><|channel|><|start|>",
)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt a body that does not end."""

    def interrupt(*_: object) -> None:
        raise AssertionError("the reader does not end")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("is_end", [False, True])
@pytest.mark.parametrize("calls", [False, True])
def test_every_prefix_in_every_split_is_read_to_its_end(output: str, is_end: bool, calls: bool) -> None:
    format_ = harmony_of({mark: number for number, mark in enumerate(MARKS)})
    assert format_ is not None
    with at_most(60):
        for length in range(len(output) + 1):
            for cut in range(length + 1):
                reader = HarmonyReader(format_, calls=calls)
                said = [reader.push(output[:cut]), reader.push(output[cut:length], is_end=is_end)]
                assert sum(len(one.text) + len(one.reasoning) for one in said) <= length
