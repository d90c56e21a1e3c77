"""Implement the channel between `xgpt serve` and its vLLM processes: `xrunner.channel` over several connections.

The front listens on a socket in a directory that only this user can enter. The host of each lane (`host`) connects to
this socket to receive requests. Each engine core connects to report its steps and to receive plans. A core reads plans
between two steps, so an idle core replies only after the next request.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from xgpt.core.schema import LaneName, Plan
from xgpt.core.schema.step_log import StepRecord
from xrunner.channel import messages
from xrunner.channel.ends import EngineEnd, FrontEnd
from xrunner.channel.messages import Alive, Down, Follow, Followed, Ready, Rested, Room, Stepped

WARM_UP = -1
_NONE_NOW = (errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""Errors of `accept` after which to try again later. If no file descriptor is free, `accept` fails even if no process
is connecting.
"""
_FRONT = "front"


class VllmHello(msgspec.Struct, tag="hello", array_like=True):
    """The first message of a connection, from a host or from one of its engine cores.

    Attributes:
        group: number of the host's group in its lane, whose groups are vLLMs of their own.
        plans: whether the engine core follows plans. None means that the sender is a host.
    """

    lane: LaneName
    plans: bool | None = None
    group: int = 0


Host = tuple[LaneName, int]
"""A lane, and the number of one of its groups."""
Up = VllmHello | messages.Up
_decode_up = msgspec.msgpack.Decoder(Up).decode


class VllmEnd(EngineEnd[Down]):
    def __init__(self, directory: str, lane: LaneName, *, plans: bool | None = None, group: int = 0) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(f"{directory}/{_FRONT}")
        super().__init__(connected, messages.DecodeDown())
        self.send(VllmHello(lane, plans, group))

    def received(self) -> Iterator[Down]:
        with suppress(EOFError):  # the front has ended, and `supervised` will end this process
            while (message := self.receive(0)) is not None:
                yield message

    def plans(self) -> Iterator[Plan]:
        for message in self.received():
            if isinstance(message, Follow):
                yield Plan.model_validate_json(message.plan)


class Lanes:
    """The front's end of all lanes' connections. It presents hosts and engine cores as one engine
    (`FrontConnection`).
    """

    def __init__(
        self, directory: str, hosts: Sequence[Host], num_cores: int, has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self._hosts, self._num_cores, self._has_ended = frozenset(hosts), num_cores, has_ended
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{directory}/{_FRONT}")
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._hello: dict[FrontEnd[Up], VllmHello | None] = {}
        self._received: deque[tuple[FrontEnd[Up], messages.Up]] = deque()
        self._is_ready = False
        self._ready = Ready(takes_seeds=False, scores_prompts=False, resumes=True)
        self._taking: set[Host] = set()
        self._alive: set[FrontEnd[Up]] = set()
        self._following: set[FrontEnd[Up]] = set()
        self._rooms: dict[FrontEnd[Up], Room] = {}
        self._skipped: Counter[FrontEnd[Up]] = Counter()

    @property
    def has_gone(self) -> bool:
        return self._has_ended()

    @property
    def _cores(self) -> list[FrontEnd[Up]]:
        return [end for end, hello in self._hello.items() if hello is not None and hello.plans]

    def send(self, message: Down, lane: LaneName = "both", group: int = 0) -> None:
        if isinstance(message, Follow):
            self._following.clear()
            for core in self._cores:
                core.send(message)
            return
        for end, hello in self._hello.items():
            if hello == VllmHello(lane, group=group):
                end.send(message)

    def fileno(self) -> int:
        descriptor: int = self._selector.fileno()
        return descriptor

    def wait(self, timeout_s: float) -> None:
        if not self._received:
            self._selector.select(timeout_s)

    def receive(self) -> messages.Up | None:
        if not self._received:
            self._take_in()
        if not self._is_ready and self._taking >= self._hosts and len(self._cores) >= self._num_cores:
            self._is_ready = True
            return self._ready
        while self._received:
            end, message = self._received.popleft()
            hello = self._hello[end]
            if hello is not None and (reply := self._meaning(end, hello, message)) is not None:
                return reply
        # vLLM sends no reports while it imports and loads.
        return None if self._is_ready or self.has_gone else Alive([])

    def _meaning(self, end: FrontEnd[Up], hello: VllmHello, message: messages.Up) -> messages.Up | None:
        match message:
            case Ready():
                self._taking.add((hello.lane, hello.group))
                self._ready = message
                return None
            case Alive():
                self._alive.add(end)
                if not self._alive.issuperset(self._hello):
                    return None
                self._alive.clear()
            case Followed():
                self._following.add(end)
                if not self._following.issuperset(self._cores):
                    return None
            case Stepped():
                message.records = self._without_warm_up(end, message.records)
                if message.room is not None:
                    message.room = self._room(end, message.room)
                return self.stepped(hello.lane, message)
            case Rested():
                message.room = self._room(end, message.room)
        return message

    def stepped(self, lane: LaneName, message: Stepped) -> Stepped | None:
        return message

    def _room(self, core: FrontEnd[Up], room: Room) -> Room:
        self._rooms[core] = room
        reserved, kept, preemptions, emptying = zip(*self._rooms.values(), strict=True)
        return Room(sum(reserved), sum(kept), sum(preemptions), any(emptying))

    def _without_warm_up(self, core: FrontEnd[Up], records: list[StepRecord]) -> list[StepRecord]:
        ours = [record for record in records if not _is_warm_up(record)]
        self._skipped[core] += len(records) - len(ours)
        skipped = self._skipped[core]
        return [record._replace(number=record.number - skipped, settled=record.settled - skipped) for record in ours]

    def _take_in(self) -> None:
        try:
            while True:
                end = FrontEnd(self._listener.accept()[0], _decode_up)
                self._hello[end] = None
                self._selector.register(end, selectors.EVENT_READ)
        except OSError as error:
            if error.errno not in _NONE_NOW:
                raise
        for end in list(self._hello):
            while (message := end.receive()) is not None:
                if isinstance(message, VllmHello):
                    self._hello[end] = message
                else:
                    self._received.append((end, message))
            if end.has_gone and not any(end is sender for sender, _ in self._received):
                self._leave(end)

    def _leave(self, end: FrontEnd[Up]) -> None:
        del self._hello[end]
        self._selector.unregister(end)
        end.close()

    def close(self) -> None:
        for end in list(self._hello):
            self._leave(end)
        self._selector.close()
        self._listener.close()


def _is_warm_up(record: StepRecord) -> bool:
    return WARM_UP in record.decode or any(id_ == WARM_UP for id_, _, _ in record.encode)
