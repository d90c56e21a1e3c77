"""The channel between `xgpt serve` and its vLLMs: requests and plans go down, steps and tokens come up.

ZeroMQ carries msgpack over sockets in a directory that is ours alone; nothing that arrives is executed. Three kinds of
socket: requests go to the host of each lane (`host`), plans to all engine cores, and whatever hosts and cores tell
comes back on one. An engine core reads plans between two steps, so an idle one answers when its next request has come.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from xgpt.core.io import sha256
from xgpt.core.schema import ANYONE, Account, LaneName, Plan
from xgpt.core.schema.step_log import StepRecord

WARM_UP = -1
"""The number of a request that is a host's own."""


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """A request for a host.

    Attributes:
        sampling: vLLM's names of how tokens are chosen, and the values.
        output_length: benchmarks only: end after this number of tokens, unknown to the schedule.
        deadline_ns, promised_output, account: as of `Arrival`.
        transfer: what the encode lane's connector has told of the prompt's K/V.
    """

    id: int
    prompt: tuple[int, ...]
    max_output: int
    stop_token_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = {}
    output_length: int | None = None
    deadline_ns: int | None = None
    promised_output: int | None = None
    account: Account = ANYONE
    transfer: dict[str, Any] | None = None


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Its client has gone."""

    id: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """A lane's host takes requests."""

    lane: LaneName


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """A lane's host runs; sent regularly once it takes requests."""

    lane: LaneName


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """vLLM does not take this request, or has lost it."""

    id: int
    reason: str


class Output(msgspec.Struct, array_like=True):
    """What a step added to a request.

    Attributes:
        finish: "stop" and "length" as in OpenAI's API; anything else is a failure of vLLM's.
        logprobs: of each token: its own, and the most probable ones with theirs.
        transfer: where its K/V is, as the lane's connector tells it.
    """

    id: int
    tokens: list[int]
    finish: str | None = None
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    transfer: dict[str, Any] | None = None


class Began(msgspec.Struct, tag="began", array_like=True):
    """A step of the plan's schedule has begun with these requests' prompts."""

    ids: list[int]


class Stepped(msgspec.Struct, tag="stepped", array_like=True):
    """A step of vLLM's has been executed.

    Attributes:
        core: which engine core, by a number of its own.
        records: the steps of the plan's schedule that ended with it: none while a step is executed in pieces.
        reserved_blocks, num_preemptions, kept_blocks: as the core's schedule stands now.
    """

    lane: LaneName
    core: int
    outputs: list[Output]
    records: list[StepRecord]
    reserved_blocks: int = 0
    num_preemptions: int = 0
    kept_blocks: int = 0


class Accepted(msgspec.Struct, tag="accepted", array_like=True):
    """Steps of this core follow this plan from now on."""

    core: int
    plan_sha256: str


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """This plan cannot be changed to while requests run; the one before goes on."""

    core: int
    plan_sha256: str
    reason: str


Down = Submit | Cancel
Up = Ready | Alive | Failed | Began | Stepped | Accepted | Refused

_encode = msgspec.msgpack.Encoder().encode
_decode_down = msgspec.msgpack.Decoder(Down).decode
_decode_up = msgspec.msgpack.Decoder(Up).decode


def _socket(kind: int) -> zmq.Socket[bytes]:
    """Holds whatever is sent until it is read, for as long as both ends live."""
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        made.setsockopt(option, 0)
    return made


class Reports:
    """What hosts and cores have in common: they tell, and never wait."""

    def __init__(self, address: str) -> None:
        self._up = _socket(zmq.PUSH)
        self._up.connect(f"{address}/reports")

    def send(self, message: Up) -> None:
        self._up.send(_encode(message))

    def close(self) -> None:
        self._up.close()


class HostSide(Reports):
    """The end in the host of a lane."""

    def __init__(self, address: str, lane: LaneName) -> None:
        super().__init__(address)
        self._down = _socket(zmq.PULL)
        self._down.connect(f"{address}/{lane}")

    @property
    def fd(self) -> int:
        """Readable when something may have come."""
        return int(self._down.getsockopt(zmq.FD))

    def requests(self) -> Iterator[Down]:
        """Those that have come since the last call."""
        while True:
            try:
                yield _decode_down(self._down.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def close(self) -> None:
        self._down.close()
        super().close()


class CoreSide(Reports):
    """The end in the scheduler of an engine core.

    Args:
        follows_plans: or is vLLM's own scheduler.
    """

    def __init__(self, address: str, *, follows_plans: bool) -> None:
        super().__init__(address)
        self.core = os.getpid()
        self._plans = _socket(zmq.SUB)
        if follows_plans:
            self._plans.setsockopt(zmq.SUBSCRIBE, b"")
            self._plans.connect(f"{address}/plans")

    def accept(self, plan: Plan) -> None:
        self.send(Accepted(self.core, sha256(plan)))

    def refuse(self, plan: Plan, reason: str) -> None:
        self.send(Refused(self.core, sha256(plan), reason))

    def plans(self) -> Iterator[Plan]:
        """The plans that have come since the last call."""
        while True:
            try:
                yield Plan.model_validate_json(self._plans.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def close(self) -> None:
        self._plans.close()
        super().close()


class FrontSide:
    """The end in `xgpt serve`, of all lanes. Any thread may send; one receives."""

    def __init__(self, address: str, lanes: Sequence[LaneName]) -> None:
        self._lock = threading.Lock()
        self._reports = _socket(zmq.PULL)
        self._reports.bind(f"{address}/reports")
        self._plans = _socket(zmq.XPUB)
        self._plans.setsockopt(zmq.XPUB_VERBOSE, 1)  # each subscription is told
        self._num_subscribed = 0
        self._plans.bind(f"{address}/plans")
        self._requests = {lane: _socket(zmq.PUSH) for lane in lanes}
        for lane, socket in self._requests.items():
            socket.bind(f"{address}/{lane}")

    def reaches(self, lanes: Sequence[LaneName], num_cores: int) -> bool:
        """Whether the hosts of these lanes, and `num_cores` engine cores, would get what is sent now."""
        with self._lock:
            while self._plans.poll(0):
                self._num_subscribed += self._plans.recv()[0]  # 1: one more, 0: one has gone
            hosts = all(self._requests[lane].poll(0, zmq.POLLOUT) for lane in lanes)
            return hosts and self._num_subscribed >= num_cores

    def send(self, lane: LaneName, message: Down) -> None:
        """A host that has gone takes nothing any more; that it has gone is told elsewhere."""
        with self._lock:
            try:
                self._requests[lane].send(_encode(message), zmq.NOBLOCK)
            except zmq.Again:
                return

    def send_plan(self, plan: Plan) -> None:
        """Have every engine core go over to this plan."""
        with self._lock:
            self._plans.send(plan.model_dump_json().encode())

    @property
    def fd(self) -> int:
        """Readable when something may have come: only once until all of it has been received."""
        return int(self._reports.getsockopt(zmq.FD))

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, or when the time is over."""
        self._reports.poll(round(1000 * timeout_s))

    def receive(self) -> Up | None:
        """The next that has come; None: nothing has."""
        try:
            return _decode_up(self._reports.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        for socket in (self._reports, self._plans, *self._requests.values()):
            socket.close()
