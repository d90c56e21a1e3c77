"""Define the engine's log of executed steps, from which the schedule can be replayed."""

from __future__ import annotations

from typing import Literal, NamedTuple

LaneName = Literal["both", "encode", "transfer", "decode"]
"""The group of workers that executes a step, which is "both" if there is only one group."""

Chain = tuple[bytes, ...]
"""Keys of a sequence's full K/V blocks, in order. Equal keys mean equal tokens up to this block, in the same
account.
"""


class Account(NamedTuple):
    """The account of a request: its API key and class, with their rights and bounds.

    Attributes:
        name: name of the API key (empty without keys), followed by `/` and the class if the request has one.
        share: weight by which the engine's tokens are divided among accounts with waiting requests.
        priority: requests of accounts with higher priority enter first.
        ttft_ns, tpot_ns: the scheduling rule's bounds on TTFT and on the time per token. None means the plan's bounds.
    """

    name: str = ""
    share: float = 1.0
    priority: int = 0
    ttft_ns: int | None = None
    tpot_ns: int | None = None

    @property
    def key(self) -> str:
        """Name of the API key. Empty means that the server has no keys."""
        return self.name.partition("/")[0]

    @property
    def of_class(self) -> str:
        """Name of the class of requests. Empty means no class."""
        return self.name.partition("/")[2]


ANYONE = Account()


class Arrival(NamedTuple):
    """A request as the engine received it.

    Attributes:
        promised_output: number of output tokens for which K/V memory is reserved when the request enters. None means
            `max_output`.
        chain: keys of the prompt's full blocks, or empty without reuse.
        is_scored: whether log probabilities of the prompt's tokens are computed.
    """

    id: int
    input_length: int
    max_output: int
    arrival_ns: int
    deadline_ns: int | None = None
    promised_output: int | None = None
    account: Account = ANYONE
    chain: Chain = ()
    is_scored: bool = False


class StepRecord(NamedTuple):
    """One executed step, with requests given by id. Steps may overlap in a pipeline, and are logged in the order of
    their ends.

    Attributes:
        start_ns: the engine's clock, in nanoseconds, when the step was scheduled. Just before, the engine received all
            requests that had arrived, and dropped waiting requests past their deadline.
        end_ns: the engine's clock, in nanoseconds, after the step's results were processed.
        encode: (request, first prompt token, number of tokens) triples.
        decode: requests that decoded one token.
        finished: requests that ended in this step.
        arrivals: requests received between the scheduling of the previous step and of this step.
        cancelled: requests removed before this step was scheduled.
        preempted: requests that lost their K/V for this step and wait again.
        transfer: requests whose K/V moved from the encode lane to the decode lane.
        lane: the group of workers that executed the step.
        microbatch: number of the micro-batch within the lane.
        number: the step's position in the order in which steps were scheduled, from 0.
        settled: number of steps whose results had been processed when this step was scheduled. This number and `number`
            give the order of all events.
        outputs: (request, keys) pairs for requests that ended in this step, with the keys of the blocks after the
            prompt's blocks.
        failed: requests that ended in this step with an error. Their blocks are no longer shared.
        cancelled_after: for each request in `cancelled`, the value of `settled` when it was removed. In logs without
            this field, that is the step's own `settled`.
        replica: the replica that executed the step. Each replica numbers its own steps.
        core_wait_ns: the longest time, over the computing threads, for which a thread was ready to run but had no core.
            None means not known.
    """

    start_ns: int
    end_ns: int
    encode: tuple[tuple[int, int, int], ...]
    decode: tuple[int, ...]
    finished: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    cancelled: tuple[int, ...]
    preempted: tuple[int, ...] = ()
    transfer: tuple[int, ...] = ()
    lane: LaneName = "both"
    microbatch: int = 0
    number: int = 0
    settled: int = 0
    outputs: tuple[tuple[int, Chain], ...] = ()
    failed: tuple[int, ...] = ()
    cancelled_after: tuple[int, ...] = ()
    replica: int = 0
    core_wait_ns: int | None = None
