"""Between `xgpt serve` and the schedulers of its vLLM: new plans down, what requests came to up.

ZeroMQ carries msgpack; nothing that arrives is executed. An engine reads between two steps, so an idle one answers
when its next request has come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from xgpt.io import sha256
from xgpt.schema import Plan


class Arrived(msgspec.Struct, tag="arrived", array_like=True):
    """A request has come; lengths in tokens. Engine cores number theirs from 0 each."""

    number: int
    input_length: int
    max_output: int


class Running(msgspec.Struct, tag="running", array_like=True):
    """Output tokens so far of the requests that run: long outputs end last, and are to be known of before."""

    generated: dict[int, int]


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """A request has ended by itself, after so many output tokens."""

    number: int
    output_length: int


class Gone(msgspec.Struct, tag="gone", array_like=True):
    """A request was taken out: its client has gone."""

    number: int


class Accepted(msgspec.Struct, tag="accepted", array_like=True):
    """Steps follow this plan from now on."""

    plan_sha256: str


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """This plan cannot be changed to while requests run; the one before goes on."""

    plan_sha256: str
    reason: str


Message = Arrived | Running | Ended | Gone | Accepted | Refused

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class EngineSide:
    """The end in an engine core. Never waits: what cannot be sent is dropped."""

    def __init__(self, address: str, plan: Plan) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self.accept(plan)

    def accept(self, plan: Plan) -> None:
        self.send(Accepted(sha256(plan)))

    def refuse(self, plan: Plan, reason: str) -> None:
        self.send(Refused(sha256(plan), reason))

    def plans(self) -> Iterator[Plan]:
        """The plans that have come since the last call."""
        while True:
            try:
                yield Plan.model_validate_json(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def send(self, message: Message) -> None:
        try:
            self._socket.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        self._socket.close()


class ServerSide:
    """The end in `xgpt serve`: one for all engine cores of a plan."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._engines: dict[bytes, int] = {}

    @property
    def num_engines(self) -> int:
        """Engine cores that have made themselves known."""
        return len(self._engines)

    def send(self, plan: Plan) -> None:
        """Have every engine core go over to this plan."""
        for engine in self._engines:
            self._socket.send_multipart([engine, plan.model_dump_json().encode()])

    def receive(self, timeout_s: float) -> tuple[int, Message] | None:
        """(which engine core, from 0; its message), or None where none comes within the time."""
        if not self._socket.poll(round(1000 * timeout_s)):
            return None
        engine, message = self._socket.recv_multipart()
        number = self._engines.setdefault(engine, len(self._engines))
        decoded: Any = _decode(message)
        return number, decoded

    def close(self) -> None:
        self._socket.close()
