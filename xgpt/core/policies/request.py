"""The types that engines and rules exchange: requests in, steps out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from xgpt.core.policies.blocks import BlockTable
from xgpt.core.schema import ANYONE, Account, LaneName
from xgpt.core.schema.step_log import Chain


@dataclass(slots=True)
class Request:
    """A request as the rule sees it: its maximum, never its true output length."""

    id: int
    input_length: int
    max_output: int
    arrival_ns: int = 0
    deadline_ns: int | None = None
    """Latest time at which it may enter, on the clock of `arrival_ns`; None: any time."""
    promised_output: int | None = None
    """Output tokens for which K/V memory is set aside when it enters; None: for all that may come."""
    account: Account = ANYONE
    chain: Chain = ()
    """Keys of the full blocks of its prompt; empty: nothing is shared."""
    encoded: int = 0
    """Number of tokens encoded so far."""
    generated: int = 0
    """Number of output tokens computed; the step that ends the encoding computes one."""
    cached: int = 0
    """Number of tokens that were cached when it last entered."""
    first_ns: int | None = None
    """Time at which its first decode step was scheduled, if the rule decides by times: then it had its first token."""
    blocks: int = 0
    """Number of K/V blocks set aside for it now, including blocks that it shares."""
    table: BlockTable | None = field(default=None, repr=False, compare=False)
    """Its blocks in the lane that decodes; None: it waits."""
    prompt_table: BlockTable | None = field(default=None, repr=False, compare=False)
    """Its prompt's blocks in the encode lane of WAA; None: that lane does not hold it."""
    batch: MicroBatch | None = field(default=None, repr=False, compare=False)
    """The micro-batch in which it runs; None: it waits."""

    @property
    def context(self) -> int:
        """Prompt and output tokens so far: encoding must cover them, and the next decode attends to them."""
        return self.input_length + self.generated

    @property
    def longest(self) -> int:
        """Largest number of prompt and output tokens."""
        return self.input_length + self.max_output

    @property
    def promised(self) -> int:
        """Prompt and output tokens for which memory is set aside if it enters now."""
        if self.promised_output is None:
            return self.longest
        return min(self.longest, self.context + self.promised_output)


class Chunk(NamedTuple):
    """Tokens [start, start + length) of a request's prompt, and after a preemption of its output, too."""

    id: int
    start: int
    length: int


class Step(NamedTuple):
    """One iteration of one micro-batch of a lane.

    Attributes:
        encode: the pieces of prompts to encode.
        decode: the requests to decode by one token.
        preempted: the requests preempted for this step; they had no step under way.
        transfer: the requests whose K/V moves from the encode to the decode lane ("transfer" steps alone).
        lane: the worker group that executes it.
        microbatch: the micro-batch within the lane, from 0.
        grown: (request, block) pairs given since the lane's last step, in order.
    """

    encode: tuple[Chunk, ...]
    decode: tuple[int, ...]
    preempted: tuple[int, ...] = ()
    transfer: tuple[int, ...] = ()
    lane: LaneName = "both"
    microbatch: int = 0
    grown: tuple[tuple[int, int], ...] = ()

    @property
    def ids(self) -> Iterator[int]:
        """Yield the ids of all requests that the step touches."""
        yield from (chunk.id for chunk in self.encode)
        yield from self.decode
        yield from self.transfer


class MicroBatch:
    """Requests that run together, and how many of their steps are under way."""

    __slots__ = ("assumed", "decoding", "encoding", "held", "steps_under_way")

    def __init__(self) -> None:
        self.encoding: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.held: dict[int, Request] = {}
        """Finished requests that keep their slot until their whole batch has finished."""
        self.steps_under_way = 0
        self.assumed: Step | None = None
        """A step under way whose tokens are assumed to exist, so that the next step can be decided."""

    @property
    def num_running(self) -> int:
        return len(self.encoding) + len(self.decoding) + len(self.held)
