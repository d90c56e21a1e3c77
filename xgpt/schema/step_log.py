"""The engine's log: what it executed and when, enough to replay the schedule."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """A request as the engine took it in. `output_length` is what it came to, known once it has finished."""

    id: int
    input_length: int
    max_output: int
    arrival_ns: int


class StepRecord(NamedTuple):
    """One executed step.

    Attributes:
        start_ns: the engine's clock when the step was scheduled; arrivals up to then had been taken in.
        end_ns: the clock after the step was settled.
        encode: (request, first prompt token, number of tokens) triples.
        decode: requests that decoded one token.
        finished: requests that ended in this step.
        arrivals: requests taken in before this step was scheduled.
        cancelled: requests taken out before this step was scheduled.
        preempted: requests that lost their K/V for this step and wait again.
    """

    start_ns: int
    end_ns: int
    encode: tuple[tuple[int, int, int], ...]
    decode: tuple[int, ...]
    finished: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    cancelled: tuple[int, ...]
    preempted: tuple[int, ...] = ()
