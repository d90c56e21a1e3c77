"""Draw synthetic traces of requests with shared prefixes: conversations, and prompts after shared system prompts."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterator

import numpy as np

from xgpt.core.trace_blocks import TracePrefixes
from xgpt.core.workload import TraceLengths

BLOCK = 16
"""Number of tokens in a block, the same as in a K/V block, so that no shareable K/V block is missed."""


class _Ids:
    """Ids of blocks. Each block with new text after another block gets a new id."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def fresh(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._next, count))


def conversations(
    num_requests: int,
    rng: np.random.Generator,
    *,
    rate_per_s: float = 2.0,
    mean_turns: float = 4.0,
    think_s: float = 20.0,
    mean_input: float = 120.0,
    mean_output: float = 160.0,
    system_prompts: int = 3,
    system_tokens: int = 256,
    most_tokens: int = 4000,
) -> TraceLengths:
    """Return requests of conversations. Each turn's prompt is the conversation so far plus a new question.

    Conversations begin as a Poisson process. The number of turns is geometric. Think times and lengths are exponential.
    The probabilities of the system prompts are proportional to 1, 1/2, 1/3, ...

    Args:
        rate_per_s: mean requests a second.
        think_s: mean time from a turn's arrival to the next one's.
        most_tokens: largest number of tokens of a conversation.
    """
    ids = _Ids()
    systems = [ids.fresh(system_tokens // BLOCK) for _ in range(system_prompts)]
    popularity = 1 / np.arange(1, system_prompts + 1)
    popularity /= popularity.sum()

    def turns(begin_s: float) -> Iterator[_Request]:
        so_far = systems[rng.choice(system_prompts, p=popularity)]
        tokens, now_s = len(so_far) * BLOCK, begin_s
        for _ in range(rng.geometric(1 / mean_turns)):
            asked, answered = _length(mean_input, rng), _length(mean_output, rng)
            if tokens + asked + answered > most_tokens:
                return
            prompt = tokens + asked
            whole = so_far + ids.fresh(prompt // BLOCK - len(so_far))
            answer = ids.fresh((prompt + answered) // BLOCK - len(whole))
            yield _Request(now_s, prompt, answered, whole, answer)
            so_far, tokens = whole + answer, prompt + answered
            now_s += rng.exponential(think_s)

    records: list[_Request] = []
    begin_s = 0.0
    while len(records) < 2 * num_requests:
        begin_s += rng.exponential(mean_turns / rate_per_s)
        records += turns(begin_s)
    # Later turns of conversations that begin last are left out.
    return _trace(heapq.nsmallest(num_requests, records), ids)


def shared_prompts(
    num_requests: int,
    rng: np.random.Generator,
    *,
    rate_per_s: float = 2.0,
    prompts: int = 60,
    prompt_tokens: int = 1000,
    exponent: float = 0.8,
    mean_input: float = 200.0,
    mean_output: float = 80.0,
) -> TraceLengths:
    """Return requests of agents. Each prompt is one of several long shared prompts, followed by a question.

    Args:
        prompts: number of shared prompts. The probability of the n-th is proportional to n ** -exponent.
        prompt_tokens: mean of the shared prompts' lengths, which are exponentially distributed.
    """
    ids = _Ids()
    shared = [ids.fresh(_length(prompt_tokens, rng) // BLOCK) for _ in range(prompts)]
    popularity = np.arange(1, prompts + 1) ** -exponent
    popularity /= popularity.sum()
    now_s, requests = 0.0, []
    for _ in range(num_requests):
        now_s += rng.exponential(1 / rate_per_s)
        begin = shared[rng.choice(prompts, p=popularity)]
        prompt = len(begin) * BLOCK + _length(mean_input, rng)
        whole = begin + ids.fresh(prompt // BLOCK - len(begin))
        requests.append(_Request(now_s, prompt, _length(mean_output, rng), whole, ()))
    return _trace(requests, ids)


def write(trace: TraceLengths) -> str:
    """Return the trace as JSON lines in Mooncake's format, times in milliseconds."""
    prefixes, times = trace.prefixes, trace.timestamp_s
    assert prefixes is not None and times is not None
    lines = []
    for number, (input_, output) in enumerate(zip(trace.input.tolist(), trace.output.tolist(), strict=True)):
        line: dict[str, object] = {
            "timestamp": round(1000 * float(times[number])),
            "input_length": input_,
            "output_length": output,
            "block_size": prefixes.block_size,
            "hash_ids": list(prefixes.prompts[number]),
        }
        if prefixes.outputs[number]:
            line["output_hash_ids"] = list(prefixes.outputs[number])
        lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"


class _Request(tuple[float, int, int, tuple[int, ...], tuple[int, ...]]):
    """Seconds, prompt tokens, output tokens, and ids of the blocks that the prompt fills and that the output fills."""

    __slots__ = ()

    def __new__(
        cls, seconds: float, prompt: int, output: int, ids: tuple[int, ...], answer: tuple[int, ...]
    ) -> _Request:
        return super().__new__(cls, (seconds, prompt, output, ids, answer))


def _length(mean: float, rng: np.random.Generator) -> int:
    return 1 + int(rng.exponential(mean - 1))


def _trace(requests: list[_Request], ids: _Ids) -> TraceLengths:
    """Return the trace. The last block of each prompt and of each output has a unique id."""
    prompts, outputs = [], []
    for _, prompt, output, whole, answer in requests:
        prompts.append(whole + ids.fresh(-(-prompt // BLOCK) - len(whole)))
        rest = -(-(prompt + output) // BLOCK) - len(whole)
        outputs.append(answer + ids.fresh(rest - len(answer)) if answer else ())
    columns = list(zip(*[request[:3] for request in requests], strict=True))
    times = np.asarray(columns[0]) - columns[0][0]
    return TraceLengths(
        np.asarray(columns[1]), np.asarray(columns[2]), times, TracePrefixes(BLOCK, tuple(prompts), tuple(outputs))
    )
