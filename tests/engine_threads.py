"""An engine in threads of this process, as a front sees it: for tests and small servers."""

from __future__ import annotations

import threading
from typing import Protocol

from xgpt.core.errors import MachineError
from xgpt.core.policies import KvLimits
from xgpt.core.schema import Plan
from xrunner.channel.ends import EngineEnd, FrontEnd, pair
from xrunner.channel.host import EngineHost, HostedEngine, HostedPool
from xrunner.channel.messages import DecodeDown, decode_up
from xrunner.channel.remote import FrontConnection, OnStep, RemoteEngine


class MemoryAndLimits(HostedPool, KvLimits, Protocol):
    """The K/V pool of an engine, as the front needs to know it."""


class ListenedEngine(HostedEngine, Protocol):
    """An engine that passes the records of its steps to a listener."""

    @property
    def pool(self) -> MemoryAndLimits: ...
    def listen(self, on_step: OnStep) -> None: ...


class EngineThreads:
    """An engine in two threads of this process, for tests and small servers."""

    def __init__(self, engine: ListenedEngine) -> None:
        ours, self._theirs = pair()
        self.front: FrontConnection = FrontEnd(ours, decode_up)
        end = EngineEnd(self._theirs, DecodeDown())

        def build(on_step: OnStep) -> HostedEngine:
            engine.listen(on_step)
            return engine

        host = EngineHost(end, build)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (host.run, host.read)]
        for thread in self._threads:
            thread.start()

    def why_ended(self) -> str | None:
        return None if self._threads[0].is_alive() else "its thread has ended"

    def is_at_work(self) -> bool:
        return False

    def cpu_s(self) -> float:
        return 0.0

    def end(self, within_s: float) -> None:
        for thread in self._threads:
            thread.join(within_s)
        if self.why_ended() is not None:
            self._theirs.close()


def in_threads(engine: ListenedEngine) -> RemoteEngine:
    """Return an engine that runs in threads of this process and has the interface of `RemoteEngine`, for tests and
    small servers. It cannot be restarted.
    """

    def launch(_: Plan) -> EngineThreads:
        raise MachineError("an engine in this process cannot be restarted")

    return RemoteEngine(EngineThreads(engine), engine.pool, launch, lambda _: engine.pool)
