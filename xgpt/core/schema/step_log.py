"""The engine's log: which steps it executed and when, enough to replay the schedule."""

from __future__ import annotations

from typing import Literal, NamedTuple

LaneName = Literal["both", "encode", "transfer", "decode"]
"""The worker group that executes a step; "both" where one group does it all."""

Chain = tuple[bytes, ...]
"""Keys of a sequence's full K/V blocks, in order: equal keys, equal tokens up to there, of the same account."""


class Account(NamedTuple):
    """The account that a request runs for: what the operator has granted its API key.

    Attributes:
        name: the key's, empty where the server has no keys; behind it `/` and a class, for requests of a class.
        share: weight of this account in dividing the engine's tokens among accounts with requests waiting.
        priority: a higher one enters first.
        ttft_ns, tpot_ns: bounds that the rule goes by for its requests; None: the plan's.
    """

    name: str = ""
    share: float = 1.0
    priority: int = 0
    ttft_ns: int | None = None
    tpot_ns: int | None = None

    @property
    def key(self) -> str:
        """Name of the API key; empty: the server has none."""
        return self.name.partition("/")[0]

    @property
    def of_class(self) -> str:
        """Name of the class of requests; empty: it is of none."""
        return self.name.partition("/")[2]


ANYONE = Account()


class Arrival(NamedTuple):
    """A request as the engine took it in.

    Attributes:
        promised_output: output tokens that K/V memory is set aside for as it enters; None: for `max_output`.
        chain: keys of the prompt's blocks; empty where nothing is reused.
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
    """One executed step. Steps may overlap on the stages of a pipeline; they are logged in the order of their ends.

    Attributes:
        start_ns: the engine's clock when the step was scheduled; arrivals up to then had been taken in, and
            requests waiting beyond their deadline had been dropped.
        end_ns: the clock after the step was settled.
        encode: (request, first prompt token, number of tokens) triples.
        decode: requests that decoded one token.
        finished: requests that ended in this step.
        arrivals: requests taken in before this step was scheduled.
        cancelled: requests taken out before this step was scheduled.
        preempted: requests that lost their K/V for this step and wait again.
        transfer: requests whose K/V moved from the encode to the decode lane.
        lane: the worker group that executed it.
        microbatch: the micro-batch within the lane.
        number: its place in the order in which steps were scheduled, from 0.
        settled: steps that had been settled when it was scheduled. With `number` it gives the order of all events.
        outputs: (request, keys) pairs: of requests that ended here, the blocks behind those of the prompt.
        failed: requests that ended here in an error; what their blocks hold is not shared any more.
        cancelled_after: of each in `cancelled`, how many steps had been settled when it was taken out. Of a log
            without it: as many as when this step was scheduled.
        replica: which one executed it; each numbers its own steps.
        core_wait_ns: the longest time for which one of the threads that compute was ready to run while other threads
            had the cores; None: not known.
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
