"""The channel between `xgpt serve` and its vLLMs, over the sockets of `xrunner.channel`.

The front listens on a socket in a directory that is ours alone. The host of each lane (`host`) connects to it and gets
requests; each engine core connects, tells of its steps, and gets plans. A core reads plans between two steps, so an
idle one answers when its next request has come.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from xgpt.core.io import sha256
from xgpt.core.schema import ANYONE, Account, LaneName, Plan
from xgpt.core.schema.step_log import StepRecord
from xrunner.channel.ends import EngineEnd, FrontEnd
from xrunner.channel.messages import Began, Cancel, Follow

WARM_UP = -1
"""The number of a request that is a host's own."""


class VllmSubmit(msgspec.Struct, tag="submit", array_like=True):
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


class VllmReady(msgspec.Struct, tag="ready", array_like=True):
    """A lane's host takes requests."""

    lane: LaneName


class VllmAlive(msgspec.Struct, tag="alive", array_like=True):
    """A lane's host runs; sent regularly once it takes requests."""

    lane: LaneName


class VllmFailed(msgspec.Struct, tag="failed", array_like=True):
    """vLLM does not take this request, or has lost it."""

    id: int
    reason: str


class VllmOutput(msgspec.Struct, array_like=True):
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


class VllmStepped(msgspec.Struct, tag="stepped", array_like=True):
    """A step of vLLM's has been executed.

    Attributes:
        core: which engine core, by a number of its own.
        records: the steps of the plan's schedule that ended with it: none while a step is executed in pieces.
        reserved_blocks, num_preemptions, kept_blocks: as the core's schedule stands now.
    """

    lane: LaneName
    core: int
    outputs: list[VllmOutput]
    records: list[StepRecord]
    reserved_blocks: int = 0
    num_preemptions: int = 0
    kept_blocks: int = 0


class Accepted(msgspec.Struct, tag="accepted", array_like=True):
    """Steps of this core follow this plan from now on."""

    core: int
    plan_sha256: str


class VllmRefused(msgspec.Struct, tag="refused", array_like=True):
    """This plan cannot be changed to while requests run; the one before goes on."""

    core: int
    plan_sha256: str
    reason: str


class VllmHello(msgspec.Struct, tag="hello", array_like=True):
    """The first message of a connection: a lane's host, or an engine core of it that follows plans or does not.

    Attributes:
        plans: as an engine core; None: it is the host.
    """

    lane: LaneName
    plans: bool | None = None


Down = VllmSubmit | Cancel | Follow
Up = VllmHello | VllmReady | VllmAlive | VllmFailed | Began | VllmStepped | Accepted | VllmRefused

_decode_down = msgspec.msgpack.Decoder(Down).decode
_decode_up = msgspec.msgpack.Decoder(Up).decode
_FRONT = "front"
"""The name of the socket in a run's directory that the front listens on."""


class Reports:
    """What hosts and cores have in common.

    Args:
        directory: of this run.
    """

    def __init__(self, directory: str, hello: VllmHello) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(f"{directory}/{_FRONT}")
        self._end = EngineEnd(connected, _decode_down)
        self.send(hello)

    def send(self, message: Up) -> None:
        """Tell the front."""
        self._end.send(message)

    def _come(self) -> Iterator[Down]:
        """Yield what has come since the last call."""
        with suppress(EOFError):  # the front has gone, and `supervised` ends this process
            while (message := self._end.receive(0)) is not None:
                yield message

    def close(self) -> None:
        self._end.close()


class HostSide(Reports):
    """The end in the host of a lane."""

    def __init__(self, directory: str, lane: LaneName) -> None:
        super().__init__(directory, VllmHello(lane))

    @property
    def fd(self) -> int:
        """Readable when something may have come."""
        return self._end.fileno()

    def requests(self) -> Iterator[Down]:
        """Those that have come since the last call."""
        return self._come()


class CoreSide(Reports):
    """The end in the scheduler of an engine core.

    Args:
        follows_plans: or is vLLM's own scheduler.
    """

    def __init__(self, directory: str, lane: LaneName, *, follows_plans: bool) -> None:
        super().__init__(directory, VllmHello(lane, follows_plans))
        self.core = os.getpid()

    def accept(self, plan: Plan) -> None:
        self.send(Accepted(self.core, sha256(plan)))

    def refuse(self, plan: Plan, reason: str) -> None:
        self.send(VllmRefused(self.core, sha256(plan), reason))

    def plans(self) -> Iterator[Plan]:
        """The plans that have come since the last call."""
        for message in self._come():
            if isinstance(message, Follow):
                yield Plan.model_validate_json(message.plan)


class FrontSide:
    """The end in the front, of all lanes: one connection to each lane's host, and one to each engine core."""

    def __init__(self, directory: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{directory}/{_FRONT}")
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ends: list[FrontEnd[Up]] = []
        self._hosts: dict[LaneName, FrontEnd[Up]] = {}
        self._cores: list[FrontEnd[Up]] = []
        """Engine cores that follow plans."""
        self._received: deque[Up] = deque()

    def reaches(self, lanes: Sequence[LaneName], num_cores: int) -> bool:
        """Return whether the hosts of these lanes, and `num_cores` engine cores, would get what is sent now."""
        self._take_in()
        return set(lanes) <= self._hosts.keys() and len(self._cores) >= num_cores

    def send(self, lane: LaneName, message: Down) -> None:
        """A host that has gone takes nothing any more; that it has gone is told elsewhere."""
        if (host := self._hosts.get(lane)) is not None:
            host.send(message)

    def send_plan(self, plan: Plan) -> None:
        """Have every engine core go over to this plan."""
        for core in self._cores:
            core.send(Follow(plan.model_dump_json()))

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to do."""
        descriptor: int = self._selector.fileno()
        return descriptor

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, or when the time is over."""
        if not self._received:
            self._selector.select(timeout_s)

    def receive(self) -> Up | None:
        """The next that has come; None: nothing has."""
        if not self._received:
            self._take_in()
        return self._received.popleft() if self._received else None

    def _take_in(self) -> None:
        """Accept connections, and read what has come on all of them."""
        with suppress(BlockingIOError):
            while True:
                end = FrontEnd(self._listener.accept()[0], _decode_up)
                self._ends.append(end)
                self._selector.register(end, selectors.EVENT_READ)
        for end in list(self._ends):
            while (message := end.receive()) is not None:
                if isinstance(message, VllmHello):
                    self._greet(end, message)
                else:
                    self._received.append(message)
            if end.has_gone:
                self._leave(end)

    def _greet(self, end: FrontEnd[Up], hello: VllmHello) -> None:
        if hello.plans is None:
            self._hosts[hello.lane] = end
        elif hello.plans:
            self._cores.append(end)

    def _leave(self, end: FrontEnd[Up]) -> None:
        self._ends.remove(end)
        self._hosts = {lane: host for lane, host in self._hosts.items() if host is not end}
        self._cores = [core for core in self._cores if core is not end]
        self._selector.unregister(end)
        end.close()

    def close(self) -> None:
        for end in list(self._ends):
            self._leave(end)
        self._selector.close()
        self._listener.close()
