"""Implement a torch.distributed store, through which workers find each other. It is in the engine's process.

Calls use the control plane's encrypted sockets. torch's own stores listen on all interfaces of a machine and answer any
client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
import zmq

from xgpt.core.errors import MachineError
from xrunner.cluster import messages as m
from xrunner.cluster.sockets import Secret, Sockets

WAIT_S = 300.0
ANSWER_S = 30.0


@dataclass
class EpochKeys:
    answer: Callable[[bytes, m.StoreAnswer], object]
    epoch: int = 0
    _values: dict[str, bytes] = field(default_factory=dict)
    _waiting: list[tuple[bytes, m.StoreCall]] = field(default_factory=list)

    def begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._values.clear()
        self._waiting.clear()

    def call(self, caller: bytes, call: m.StoreCall) -> None:
        if call.epoch != self.epoch:
            return
        if call.waits:
            self._waiting.append((caller, call))
        else:
            self.answer(caller, m.StoreAnswer(call.number, self._do(call)))
        still = []
        for waiting, asked in self._waiting:
            if all(key in self._values for key in asked.keys):
                self.answer(waiting, m.StoreAnswer(asked.number, self._do(asked)))
            else:
                still.append((waiting, asked))
        self._waiting = still

    def _do(self, call: m.StoreCall) -> list[bytes | None]:
        values = self._values
        match call.verb:
            case "set":
                values.update(zip(call.keys, call.values, strict=True))
            case "add":
                (key,), (amount,) = call.keys, call.values
                values[key] = str(int(values.get(key, b"0")) + int(amount)).encode()
            case "compare_set":
                (key,), (expected, desired) = call.keys, call.values
                if values.get(key, b"") == expected:
                    values[key] = desired
            case "delete":
                return [values.pop(key, None) for key in call.keys]
        return [values.get(key) for key in call.keys]


class EngineStore(dist.Store):
    """A worker's client of the store, as a `torch.distributed.Store`. Each thread that uses it has its own socket.

    The caller must keep this object alive. torch's C++ wrapper does not.
    """

    def __init__(self, secret: Secret, host: str, engine: str, epoch: int) -> None:
        super().__init__()
        self._where = secret, host, engine, epoch
        self._sockets = Sockets(secret, host)
        self._of_thread = threading.local()

    def set(self, key: str, value: bytes | str) -> None:
        self._call("set", [key], [value.encode() if isinstance(value, str) else bytes(value)])

    def get(self, key: str) -> bytes:
        (value,) = self._call("get", [key], waits=True)
        assert value is not None
        return value

    def add(self, key: str, amount: int) -> int:
        (value,) = self._call("add", [key], [str(amount).encode()])
        assert value is not None
        return int(value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        values = [text.encode() if isinstance(text, str) else bytes(text) for text in (expected, desired)]
        (value,) = self._call("compare_set", [key], values)
        return value or values[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call("get", list(keys), waits=True, timeout_s=WAIT_S if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._call("get", list(keys))

    def delete_key(self, key: str) -> bool:
        return self._call("delete", [key]) != [None]

    def clone(self) -> EngineStore:
        return EngineStore(*self._where)

    def close(self) -> None:
        """Close the sockets of all threads. No thread may use the store afterwards."""
        self._sockets.close()

    def _call(
        self,
        verb: m.StoreVerb,
        keys: list[str],
        values: Sequence[bytes] = (),
        *,
        waits: bool = False,
        timeout_s: float | None = None,
    ) -> list[bytes | None]:
        mine, (*_, engine, epoch) = self._of_thread, self._where
        if not hasattr(mine, "socket"):
            mine.socket, mine.number = self._sockets.connect(zmq.DEALER, engine), 0
        mine.number += 1
        mine.socket.send(m.encode(m.StoreCall(epoch, mine.number, verb, keys, list(values), waits)))
        timeout_s = timeout_s or (WAIT_S if waits else ANSWER_S)
        while mine.socket.poll(1000 * timeout_s):
            answer = m.decode_store_answer(mine.socket.recv())
            if answer.number == mine.number:
                return answer.values
        raise MachineError(
            f"no worker has set {', '.join(keys)} in the store within {timeout_s:.0f} s: a worker hangs or has ended; "
            "its log says why"
        )
