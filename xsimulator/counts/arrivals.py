"""Define the state of a simulation by counts, in which requests arrive one by one.

A decode step gives a token to every request that decodes in the micro-batch. So the cost of a step depends only on the
number of these requests and the total number of tokens to which they attend. For each request, only the number of its
last decode iteration is stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Records = npt.NDArray[np.void]
Ints = Sequence[int] | npt.NDArray[np.int64]

NONE = -1
BOTH, ENCODE, DECODE, TRANSFER = range(4)


def _fields(names: str, kind: type = np.int64) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


NOT_YET = "first_ns end_ns after ends_with admitted_step first_step last_step joined_batch ends_at"
REQUEST = np.dtype(
    _fields("arrival_ns first_ns end_ns admitted_ns")
    + _fields("input output tokens most cached encoded after ends_with", np.int32)  # a run takes as long as its memory
    + _fields("admitted_step first_step last_step joined_batch joined_step joins_at made ends_at turn found", np.int32)
)
"""A request.

- input, output, most, cached: numbers of tokens. Memory is reserved for `most` output tokens. tokens: see `Stream`.
- arrival_ns, first_ns, end_ns: times of its arrival, first token and last token, or NONE before that.
- encoded: number of prompt tokens encoded so far.
- after: the next request in its micro-batch's list of prompts to encode.
- ends_with: the next request that ends in the same iteration.
- admitted_ns: start of the step that begins to encode its prompt.
- admitted_step, first_step, last_step: numbers of the settled steps that began to encode its prompt and that computed
  its first and last token.
- joins_at: under waa, the number of decode steps that must have begun before it joins.
- made: number of its output tokens when it was preempted. They are encoded again with its prompt.
- ends_at: the iteration in which it ends, or NONE if it does not decode.
- joined_batch, joined_step: the micro-batch in which it decodes, and the number of its first decode step there.
"""

NEW = np.zeros(1, REQUEST)
for _name in NOT_YET.split():
    NEW[_name] = NONE

TURN = np.dtype(_fields("arrival_ns pause_ns input output tokens most session child common"))
"""A turn of a session. child: the turn that follows its end after `pause_ns` of that turn, or NONE. common: number of
prompt tokens that the turn before it, or the shared prefix, has computed.
"""

SESSION = np.dtype(_fields("kept before after"))
"""The blocks that are kept of a session, and its neighbours in the queue of least recently used sessions."""

KEY = np.dtype(_fields("uses before after", np.int32))
"""A block with a key. uses: number of requests that use it, or ABSENT. Blocks that are cached but not used are in the
queue of least recently used blocks.
"""
ABSENT = NONE

CHAIN = np.dtype(_fields("prompt said is_own place named"))
"""A request's blocks with keys. Block b has the number `firsts[prompt + i] + b` if it is in the prompt, else
`firsts[said + i] + b`. Here i is the place of the trace's block with its last token, or 0 if the output `is_own`.

- place: of its first block in `keyed`.
- named: number of leading blocks that have a key, or the content of a block with a key.
"""

BATCH = np.dtype(
    _fields("number decoding held ending context inputs iteration granted steps phase since_encode")
    + _fields("waited num_encoding num_issued first last unissued num_decode_steps encode_every token_budget max_batch")
    + _fields("credit encode_tokens carried_batch decode_batch", np.float64)
)
"""The counts and settings of a micro-batch.

- decoding: number of decoding requests. held: number of ended requests that keep their slots (static).
- ending: in schedules that run ahead, number of requests whose last token the running step computes.
- context: prompt and output tokens of decoding and held requests. inputs: their prompt tokens only.
- iteration: number of decode steps begun so far. num_decode_steps: number of decode steps that have ended.
- granted: number of requests that have been given a block in this iteration.
- steps: number of running steps of any kind.
- phase, since_encode, credit: as in the scheduling rule.
- num_encoding, first, last: number of requests whose prompts are not encoded yet, and the first and last of them.
- waited: number of steps for which prompts have waited for more prompts.
- num_issued: number of prompts of this list that are in running steps. unissued: the first prompt that is in no step
  yet.
"""

STEP = np.dtype(
    _fields("start_ns end_ns number lane batch does_decode decodes context sampled num_tokens num_ended joining")
    + _fields("first_piece last_piece first_moved last_moved")
    + _fields("mean_input", np.float64)
)
"""A running step, with the counts for its cost (`StepCounts`) and its ranges of prompt pieces and moved requests."""

PIECE = np.dtype(_fields("request start length"))

LOGGED = np.dtype(_fields("start_ns end_ns lane batch decodes left"))
"""A settled step. left: number of requests of its micro-batch that decode after the step."""

LANE = np.dtype(
    _fields("head tail num_inside reserved now_ns num_left is_given_up first_counted last_counted num_sent path_ns")
    + _fields("blocks block_size turn encode_turn num_begun num_settled first_step end_step num_pieces is_logged")
    + _fields("has_assumed assumed_ends mix refills ahead prompts_first whole_prompts reuse_is_planned encode_parts")
    + _fields("max_batch receive_steps batch_wait_steps batch_wait_tokens by_use spare spare_each preempted")
    + _fields("from_host has_turns num_due shared num_used num_kept first_kept last_kept")
    + _fields("has_chains trace_block looked_up num_found num_found_used")
    + _fields(
        "emits encode_blocks most_encode_blocks occupies num_encoded num_moving num_arrived num_joined num_decode"
    )
    + _fields("num_decode_steps buffer_steps encode_steps num_pieces_run decode_steps num_decoded num_skipped")
    + _fields("adjustment decode_batch credit encode_tokens", np.float64)
)
"""The counts and settings of a schedule.

- head, tail, preempted: requests [head, tail) wait behind the list of preempted requests that begins with `preempted`.
- by_use: whether requests take blocks as they grow. spare, spare_each: see `Kv`.
- first_step, end_step: steps [first_step, end_step) are running.
- first_counted, last_counted: requests [first_counted, last_counted) are measured.
- num_sent: number of requests sent. In a closed loop, the next one is sent `path_ns` after a request has ended.
- shared, num_used, num_kept: in sessions, numbers of blocks of the prefix that all share (`blocks` leaves them out), of
  those that running requests have beside it, and of those that are kept between turns.
- from_host: whether turns find all K/V of their sessions in host memory.
- first_kept, last_kept: the least and the most recently used session of which blocks are kept.
- num_due: number of turns in the heap of those that will arrive.
- has_chains: whether requests share blocks by their keys, which num_used, num_kept, first_kept, last_kept then count.
- looked_up: the waiting request that would find num_found cached blocks now, num_found_used of which are in use.
- emits: whether an encode step computes first tokens.
- num_encoded, num_moving, num_arrived, num_joined: under waa, numbers of requests that have been encoded, have begun to
  move to the decode lane, have arrived there, and have joined a micro-batch. Requests do all this in the order in which
  their prompts ended.
- num_decode: under waa, the number of micro-batches of the decode lane.
- encode_steps, decode_steps: numbers of settled steps with prompts and with decodes, in which num_pieces_run pieces of
  prompts and num_decoded tokens were computed. num_skipped of these steps were computed together with others.
- occupies: whether a transfer takes compute time of the devices.
"""


class Stream(NamedTuple):
    """Requests in order of arrival.

    Attributes:
        max_output: number of output tokens for which memory is reserved, for each request or for all.
        cached: numbers of prompt tokens whose K/V is already cached, or empty.
        tokens: numbers of output tokens, if `outputs` counts decode steps with a draft. Empty means the same as
            `outputs`.
    """

    inputs: Ints
    outputs: Ints
    max_output: int | Ints
    arrivals_ns: Ints
    cached: Ints = ()
    tokens: Ints = ()


class TurnStream(NamedTuple):
    """Turns of sessions. First turns have times of arrival. # [turns] each"""

    turns: Records
    shared: int
    from_host: bool = False


class ChainStream(NamedTuple):
    """The blocks that a trace's requests share (see `CHAIN`).

    Attributes:
        num_keys, num_named: numbers of blocks with keys, of all chains together and one by one.
    """

    chains: Records
    firsts: npt.NDArray[np.int64]
    trace_block: int
    num_keys: int
    num_named: int


class GoalNs(NamedTuple):
    """Bounds in nanoseconds. A request must keep all of them.

    Attributes:
        whole_ns, first_ns: bounds on the time from arrival to the last and to the first token.
        most_broken: the run ends once more requests than this have broken a bound.
    """

    whole_ns: float
    first_ns: float
    gap_ns: float
    most_broken: float


class KeptBounds(NamedTuple):
    """The bounds that the measured requests must keep. These are requests [first, last)."""

    goals: tuple[GoalNs, ...]
    first: int
    last: int


class Kv(NamedTuple):
    """K/V memory of a lane, in blocks of a fixed number of tokens.

    Attributes:
        by_use: if True, requests take blocks as they grow. If no block is free, the request that entered last is
            preempted. If False, each request reserves blocks for its longest output.
        spare, spare_each: see `policies.Pool`.
    """

    blocks: int
    block_size: int
    by_use: bool = False
    spare: int = 0
    spare_each: int = 0

    def of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class RunState(NamedTuple):
    """The state of a run, as arrays for compiled code.

    Attributes:
        batches: the micro-batches. Under waa, those of the decode lane come before those of the encode lane.
        ends: for each iteration, modulo the array's length, the first request that ends in it. # [batches, iterations]
        grows: for each iteration, modulo a block's tokens, the number of requests that take a block in it.
            # [batches, tokens]
        goals: the fields of each `GoalNs`. # [goals, 4]
        keyed: whether a named block of a request is the one with the key. # [blocks of all chains]
    """

    lane: Records
    requests: Records
    batches: Records
    ends: npt.NDArray[np.int64]
    grows: npt.NDArray[np.int64]
    steps: Records
    pieces: Records
    moved: npt.NDArray[np.int64]
    goals: Array
    broken: npt.NDArray[np.int64]
    log: Records
    turns: Records
    due: npt.NDArray[np.int64]
    sessions: Records
    chains: Records
    firsts: npt.NDArray[np.int64]
    keys: Records
    keyed: npt.NDArray[np.bool_]


AT_ONCE = 4096
"""Number of requests whose fields are set together, so that their memory stays in the processor's cache."""


class Run(ABC):
    """One run of a schedule over a stream.

    Args:
        clients: number of clients of a closed loop. Each client sends its next request `path_ns` after its previous
            request has ended. None means that requests arrive at their own times.
    """

    def __init__(
        self,
        stream: Stream,
        kv: Kv,
        num_batches: int,
        most_steps: int,
        *,
        clients: int | None = None,
        path_ns: int = 0,
        is_logged: bool = False,
    ) -> None:
        count = len(stream.inputs)
        requests, new = np.empty(count, REQUEST), NEW.view(np.int32)
        given = {"input": stream.inputs, "output": stream.outputs, "most": stream.max_output}
        given |= {"tokens": stream.tokens if len(stream.tokens) else stream.outputs, "arrival_ns": stream.arrivals_ns}
        given |= {"cached": stream.cached if len(stream.cached) else 0}
        columns = {name: np.broadcast_to(np.asarray(values), count) for name, values in given.items()}
        for start in range(0, count, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            requests[part].view(np.int32).reshape(-1, len(new))[:] = new  # copying whole records is slower
            for name, values in columns.items():
                requests[name][part] = values[part]
        batches, lane = np.zeros(num_batches, BATCH), np.zeros(1, LANE)
        batches["number"] = np.arange(num_batches)
        for name in ("first", "last", "unissued"):
            batches[name] = NONE
        lane["blocks"], lane["block_size"], lane["by_use"], lane["spare"], lane["spare_each"] = kv
        lane["is_logged"], lane["preempted"] = is_logged, NONE
        lane["num_sent"], lane["path_ns"] = count if clients is None else clients, path_ns
        longest = int(requests["output"].max(initial=1))
        self.state = RunState(
            lane,
            requests,
            batches,
            np.full((num_batches, longest + 2), NONE),
            np.zeros((num_batches, kv.block_size), np.int64),
            np.zeros(most_steps, STEP),
            np.zeros(2 * count + 2, PIECE),
            np.zeros(count, np.int64),
            np.zeros((0, 4)),
            np.zeros(0, np.int64),
            np.zeros(1024 if is_logged else 1, LOGGED),
            np.zeros(1, TURN),
            np.zeros(1, np.int64),
            np.zeros(1, SESSION),
            np.zeros(1, CHAIN),
            np.zeros(1, np.int64),
            np.zeros(1, KEY),
            np.zeros(1, np.bool_),
        )

    def in_sessions(self, stream: TurnStream) -> None:
        """Let requests arrive as turns of sessions instead. The run needs a request for each turn."""
        turns, lane = stream.turns.copy(), self.state.lane[0]
        is_first = np.ones(len(turns) + 1, bool)  # the last entry is that of NONE
        is_first[turns["child"]] = False
        first = np.flatnonzero(is_first[:-1])
        due = np.zeros(len(turns), np.int64)
        due[: len(first)] = first[np.argsort(turns["arrival_ns"][first], kind="stable")]
        sessions = np.zeros(int(turns["session"].max()) + 1, SESSION)
        sessions["before"] = sessions["after"] = NONE
        self.state = self.state._replace(turns=turns, due=due, sessions=sessions)
        lane["has_turns"], lane["num_due"], lane["first_kept"], lane["last_kept"] = True, len(first), NONE, NONE
        lane["from_host"] = stream.from_host
        lane["shared"] = stream.shared // lane["block_size"]
        lane["blocks"] -= lane["shared"]

    def in_chains(self, stream: ChainStream) -> None:
        """Let requests share the K/V of equal blocks."""
        lane, keys = self.state.lane[0], np.zeros(stream.num_keys, KEY)
        keys["uses"], self.state.requests["cached"] = ABSENT, NONE
        keyed = np.zeros(stream.num_named, np.bool_)
        self.state = self.state._replace(chains=stream.chains.copy(), firsts=stream.firsts, keys=keys, keyed=keyed)
        lane["has_chains"], lane["trace_block"] = True, stream.trace_block
        lane["first_kept"] = lane["last_kept"] = lane["looked_up"] = NONE

    def of_turns(self, name: str) -> npt.NDArray[np.int64]:
        requests = self.state.requests
        found = np.full(len(self.state.turns), NONE)
        found[requests["turn"]] = requests[name]
        return found

    def run(self, limits: KeptBounds | None = None) -> bool:
        """Run until all measured requests have ended. Return False if too many of these requests broke a goal."""
        goals, first, last = limits or ((), 0, len(self.state.requests))
        lane = self.state.lane[0]
        lane["first_counted"], lane["last_counted"], lane["num_left"] = first, last, last - first
        self.state = self.state._replace(
            goals=np.asarray(goals, float).reshape(-1, 4), broken=np.zeros(len(goals), np.int64)
        )
        while not self._go_on():
            self.state = self.state._replace(log=np.concatenate([self.state.log, np.zeros_like(self.state.log)]))
        return not lane["is_given_up"]

    @abstractmethod
    def _go_on(self) -> bool:
        """Continue the run, or return False if the log is full."""

    @property
    def first_ns(self) -> npt.NDArray[np.int64]:
        return self.state.requests["first_ns"]

    @property
    def end_ns(self) -> npt.NDArray[np.int64]:
        return self.state.requests["end_ns"]

    @property
    def step_sums(self) -> Ints:
        """The numbers of steps with prompts, of pieces of prompts in them, of steps that decode, of tokens in these."""
        lane = self.state.lane[0]
        return np.array([lane[name] for name in ("encode_steps", "num_pieces_run", "decode_steps", "num_decoded")])

    @property
    def num_events(self) -> int:
        """The number of steps that were computed one by one. The time of a run is proportional to it."""
        lane = self.state.lane[0]
        return int(lane["encode_steps"] + lane["decode_steps"] - lane["num_skipped"])

    @property
    def log(self) -> Any:
        return self.state.log[: self.state.lane[0]["num_settled"]]
