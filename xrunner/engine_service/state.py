"""The service `xgpt.engine.State`: what the engine's process knows, as the pages of an admin port show it.

One method, `Get`: the path in UTF-8 in, the content out as it is to be sent: JSON, or Prometheus' text for /metrics. It
needs no messages of its own, so there is nothing to generate.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

import grpc
import msgspec

from xgpt.core.errors import MachineError
from xrunner.server.engine_client import EngineClient

METHOD = "/xgpt.engine.State/Get"


def state_handler(engine: EngineClient) -> grpc.GenericRpcHandler:
    """Return the handler of the service, to be added to a server."""
    values = dict(_values(engine))

    async def get(path: bytes, context: grpc.aio.ServicerContext) -> bytes:
        value_of = values.get(path.decode(errors="replace"))
        if value_of is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such page")
        assert value_of is not None
        try:
            value = value_of()
            if isawaitable(value):
                value = await value
        except MachineError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return value if isinstance(value, bytes) else msgspec.json.encode(value)

    handlers = {"Get": grpc.unary_unary_rpc_method_handler(get)}
    return grpc.method_handlers_generic_handler("xgpt.engine.State", handlers)


def _values(engine: EngineClient) -> list[tuple[str, Callable[[], Any]]]:
    """Return what each path shows."""

    def ready() -> dict[str, str]:
        if engine.failure is not None:
            raise MachineError(engine.failure)
        if engine.is_draining:
            raise MachineError("the engine is shutting down")
        if engine.is_redeploying:
            raise MachineError("another plan is being deployed; requests wait until then")
        return {"status": "ok"}

    values: list[tuple[str, Callable[[], Any]]] = [("/metrics", engine.metrics.render), ("/ready", ready)]
    if (live := engine.live) is not None:
        values += [
            ("/plan", live.plan),
            ("/plan/history", live.history),
            ("/plan/decision", live.decision),
            ("/live", live.now),
        ]
    return values


async def get_state(channel: grpc.aio.Channel, path: str, timeout_s: float = 30.0) -> bytes:
    """Return the content of a path. Raises grpc.aio.AioRpcError."""
    call = channel.unary_unary(METHOD)
    content: bytes = await call(path.encode(), timeout=timeout_s)
    return content
