"""Connect workers of several machines. A worker proves that it has the replica's secret before anything else is read.

The port of a worker is open until all its peers have come. A stranger can hold one of `MOST_PENDING` places for
`PROVE_S`; peers try again.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xgpt.core.errors import MachineError
from xgpt.core.network import address_text, split_address
from xrunner.cluster.links import NUM_STREAMS

MEET_S = 300.0
PROVE_S, MOST_PENDING = 5.0, 64
AGAIN_S = 0.2
_NONCE, _MAC = 32, 32
_CALL = struct.Struct(">QIIB")


@dataclass
class _Stranger:
    nonce: bytes
    until_s: float
    read: bytes = b""


@dataclass
class Meeting:
    secret: bytes
    host: str
    epoch: int
    worker: int
    _streams: dict[int, dict[int, socket.socket]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, 0), family=family, backlog=MOST_PENDING)
        self._listener.setblocking(False)
        self.address = address_text(*self._listener.getsockname()[:2])

    def join(self, addresses: Mapping[int, str]) -> dict[int, Sequence[socket.socket]]:
        """Connect to the workers at these addresses, and return the streams to each. The port is closed then."""
        until_s = time.monotonic() + MEET_S
        self._streams.update({worker: {} for worker in addresses})
        with self._listener:
            for worker, address in addresses.items():
                if worker < self.worker:
                    for stream in range(NUM_STREAMS):
                        self._streams[worker][stream] = self._call(worker, address, stream, until_s)
            self._await_calls(until_s)
        for streams in self._streams.values():
            for end in streams.values():
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return {worker: [ends[stream] for stream in range(NUM_STREAMS)] for worker, ends in self._streams.items()}

    def _proof(self, *parts: bytes) -> bytes:
        return hmac.digest(self.secret, b"".join(parts), "sha256")

    def _call(self, worker: int, address: str, stream: int, until_s: float) -> socket.socket:
        call, nonce = _CALL.pack(self.epoch, self.worker, worker, stream), secrets.token_bytes(_NONCE)
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                end = socket.create_connection(split_address(address), PROVE_S)
                with contextlib.suppress(OSError):
                    theirs = _read(end, _NONCE)
                    end.sendall(call + nonce + self._proof(b"call", theirs, call, nonce))
                    if hmac.compare_digest(_read(end, _MAC), self._proof(b"answer", theirs, call, nonce)):
                        return end
                end.close()
            time.sleep(AGAIN_S)
        raise MachineError(f"worker {worker} at {address} has not answered within {MEET_S:.0f} s")

    def _await_calls(self, until_s: float) -> None:
        pending: dict[socket.socket, _Stranger] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while missing := [w for w, of in self._streams.items() if w > self.worker and len(of) < NUM_STREAMS]:
                now_s = time.monotonic()
                if now_s > until_s:
                    raise MachineError(f"workers {missing} have not come within {MEET_S:.0f} s")
                ready = [key.fileobj for key, _ in selector.select(AGAIN_S)]
                for end in [end for end, state in pending.items() if end in ready or state.until_s < now_s]:
                    if not self._goes_on(end, pending[end]) or pending[end].until_s < now_s:
                        selector.unregister(end)
                        del pending[end]
                        if not any(end in streams.values() for streams in self._streams.values()):
                            end.close()
                if self._listener in ready:
                    with contextlib.suppress(OSError):
                        end, _ = self._listener.accept()
                        end.setblocking(False)
                        pending[end] = _Stranger(secrets.token_bytes(_NONCE), now_s + PROVE_S)
                        selector.register(end, selectors.EVENT_READ)
                        end.send(pending[end].nonce)
                if len(pending) > MOST_PENDING:
                    oldest = next(iter(pending))
                    selector.unregister(oldest)
                    del pending[oldest]
                    oldest.close()
        for end in pending:
            end.close()

    def _goes_on(self, end: socket.socket, state: _Stranger) -> bool:
        size = _CALL.size + _NONCE + _MAC
        try:
            read = end.recv(size - len(state.read))
        except BlockingIOError:
            return True
        except OSError:
            return False
        state.read += read
        if not read or len(state.read) < size:
            return bool(read)
        call, nonce, proof = state.read[: _CALL.size], state.read[_CALL.size : -_MAC], state.read[-_MAC:]
        epoch, caller, called, stream = _CALL.unpack(call)
        is_peer = hmac.compare_digest(proof, self._proof(b"call", state.nonce, call, nonce))
        if not is_peer or (epoch, called) != (self.epoch, self.worker) or caller not in self._streams:
            return False
        end.setblocking(True)
        try:
            end.sendall(self._proof(b"answer", state.nonce, call, nonce))
        except OSError:
            return False
        self._streams[caller][stream] = end
        return False


def _read(end: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        if not (more := end.recv(size - len(read))):
            raise ConnectionError
        read += more
    return read
