"""Define the types that engines and rules exchange: requests and steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from xgpt.core.policies.blocks import BlockTable
from xgpt.core.schema import ANYONE, Account, LaneName
from xgpt.core.schema.step_log import Arrival, Chain, StepRecord


@dataclass(slots=True)
class Request:
    """What the scheduling rule knows about a request: its maximum output, but never its true output length."""

    id: int
    input_length: int
    max_output: int
    arrival_ns: int = 0
    deadline_ns: int | None = None
    """Latest time at which the request may enter, on the clock of `arrival_ns`. None means any time."""
    promised_output: int | None = None
    """Output tokens for which K/V memory is reserved when the request enters. None means its maximum output."""
    account: Account = ANYONE
    chain: Chain = ()
    """Keys of the full blocks of the prompt. Empty means that the request shares no blocks."""
    is_scored: bool = False
    encoded: int = 0
    """Number of prompt tokens encoded so far. After a preemption, it also counts generated tokens."""
    cached: int = 0
    first_ns: int | None = None
    """Time at which the request's first decode step was scheduled, when its first token was ready. It is set only with
    slack.
    """
    blocks: int = 0
    table: BlockTable | None = field(default=None, repr=False, compare=False)
    prompt_table: BlockTable | None = field(default=None, repr=False, compare=False)
    batch: MicroBatch | None = field(default=None, repr=False, compare=False)
    place: int = field(default=0, repr=False, compare=False)
    base: int = field(default=0, repr=False)
    """The request has `base` output tokens plus one for each iteration of `counter`, if it has a counter."""
    counter: MicroBatch | None = field(default=None, repr=False, compare=False)
    """The micro-batch whose iterations each add a token to the request. None while the request gets no tokens."""

    @property
    def generated(self) -> int:
        return self.base if self.counter is None else self.base + self.counter.iterations

    @generated.setter
    def generated(self, count: int) -> None:
        self.base, self.counter = count, None

    @property
    def context(self) -> int:
        """Number of prompt and output tokens so far. The next decode step attends to all of them. After a preemption,
        all of them are encoded again.
        """
        return self.input_length + self.generated

    @property
    def num_scored(self) -> int:
        return self.input_length if self.is_scored and not self.generated else 0

    @property
    def longest(self) -> int:
        return self.input_length + self.max_output

    @property
    def promised(self) -> int:
        if self.promised_output is None:
            return self.longest
        return min(self.longest, self.context + self.promised_output)


class Chunk(NamedTuple):
    """Tokens [start, start + length) of a request's prompt. After a preemption, the prompt includes generated
    tokens.
    """

    id: int
    start: int
    length: int


class Step(NamedTuple):
    """One iteration of one micro-batch of a lane.

    Attributes:
        grown: (request, block) pairs for the blocks given to requests since the lane's last step, in order.
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
        yield from (chunk.id for chunk in self.encode)
        yield from self.decode
        yield from self.transfer


class Begun(NamedTuple):
    """A step that runs, with what happened before it, from which its record is made.

    Attributes:
        cancelled: pairs of a request and the number of steps settled when it was removed. Other fields are those of
            `StepRecord`.
    """

    step: Step
    number: int
    start_ns: int
    settled: int
    arrivals: tuple[Arrival, ...]
    cancelled: tuple[tuple[int, int], ...]

    def record(
        self,
        end_ns: int,
        finished: Iterable[int],
        outputs: Iterable[tuple[int, Chain]] = (),
        failed: Iterable[int] = (),
    ) -> StepRecord:
        step = self.step
        return StepRecord(
            self.start_ns,
            end_ns,
            step.encode,
            step.decode,
            tuple(finished),
            self.arrivals,
            tuple(id_ for id_, _ in self.cancelled),
            step.preempted,
            step.transfer,
            step.lane,
            step.microbatch,
            self.number,
            self.settled,
            tuple(outputs),
            tuple(failed),
            tuple(after for _, after in self.cancelled),
        )


class MicroBatch:
    """Requests whose prefill or decode runs in the same steps.

    Every decode step gives a token to each decoding request, so one counter, `iterations`, serves all requests. A check
    that is due after some tokens of a request is stored under the iteration in which it is due.

    Attributes:
        stopped: requests in `decoding` or `held` that get no further token.
        assumed: the running step whose tokens are already counted, so that the next step can be scheduled.
        context: total number of prompt and output tokens of the requests that get a token in the next decode step.
        input_tokens: total number of prompt tokens of these requests.
        joining_tokens: total number of prompt tokens of those among them that have no output token yet.
        joined: requests that have begun to decode since the last decode step.
    """

    __slots__ = (
        "_decodes",
        "_due",
        "_num_joined",
        "assumed",
        "context",
        "decoding",
        "encoding",
        "held",
        "input_tokens",
        "iterations",
        "joined",
        "joining_tokens",
        "steps_under_way",
        "stopped",
    )

    def __init__(self, *, decodes: bool = True) -> None:
        self.encoding: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.held: dict[int, Request] = {}
        self.stopped: set[int] = set()
        self.steps_under_way = 0
        self.assumed: Step | None = None
        self.iterations = self.context = self.input_tokens = self.joining_tokens = 0
        self.joined: list[Request] = []
        self._decodes = decodes
        self._due: dict[int, list[tuple[int, Request]]] = {}
        self._num_joined = 0

    @property
    def num_running(self) -> int:
        return len(self.encoding) + len(self.decoding) + len(self.held)

    @property
    def num_decoding(self) -> int:
        return len(self.decoding) + len(self.held) - len(self.stopped)

    @property
    def next_to_decode(self) -> tuple[int, ...]:
        """Ids of the requests in the next decode step, including finished requests that keep their slots. Empty once
        all requests have finished.
        """
        ids = tuple(self.decoding)
        if self.stopped:
            ids = tuple(id_ for id_ in ids if id_ not in self.stopped)
        if ids and self.held:
            ids += tuple(id_ for id_ in self.held if id_ not in self.stopped)
        return ids

    def join(self, request: Request, num_spare: int) -> None:
        self._num_joined += 1
        request.batch, request.place = self, self._num_joined
        self.decoding[request.id] = request
        if not self._decodes:
            return
        self.context += request.context
        self.input_tokens += request.input_length
        self.joining_tokens += 0 if request.generated else request.input_length
        self.joined.append(request)
        request.base, request.counter = request.generated - self.iterations, self
        self.recall(request, num_spare)

    def leave(self, request: Request) -> None:
        del (self.held if request.id in self.held else self.decoding)[request.id]
        self._stop_counting(request)
        self.stopped.discard(request.id)
        if not self.decoding and not self.held:
            self.joined.clear()
            self._due.clear()

    def hold(self, request: Request) -> None:
        """Keep the slot of a finished request. Decode steps include it until its maximum output."""
        self.held[request.id] = self.decoding.pop(request.id)
        if request.generated >= request.max_output:
            self.stop(request)
        else:
            self.recall(request, request.max_output - request.generated)

    def stop(self, request: Request) -> None:
        self._stop_counting(request)
        self.stopped.add(request.id)

    def advance(self) -> None:
        self.iterations += 1
        self.context += self.num_decoding
        self.joining_tokens = 0
        self.joined.clear()

    def recall(self, request: Request, num_tokens: int) -> None:
        self._due.setdefault(self.iterations + max(num_tokens, 0), []).append((request.place, request))

    def due(self) -> list[Request]:
        entries = self._due.pop(self.iterations, ())
        return [request for place, request in sorted(entries, key=_place) if self.counts(request, place)]

    def counts(self, request: Request, place: int) -> bool:
        return request.counter is self and request.place == place

    def _stop_counting(self, request: Request) -> None:
        if request.counter is self:
            self.context -= request.context
            self.input_tokens -= request.input_length
            self.joining_tokens -= 0 if request.generated else request.input_length
            request.generated = request.generated


def _place(entry: tuple[int, Request]) -> int:
    return entry[0]
