"""Run the service of an engine, from its start to the end of its last request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from xgpt.core.errors import MachineError
from xrunner.engine_service.servicer import Servicer
from xrunner.engine_service.state import state_handler
from xrunner.server.access.classes import Classes
from xrunner.server.api.model import ServedModel
from xrunner.server.engine_client import EngineClient
from xrunner.server.http.limits import Limits

BYTES_PER_TOKEN = 64
"""Of a request's largest message: a token id takes 5 bytes, and its text comes with it."""
REST_BYTES = 4 << 20
"""Of a request's largest message, without its prompt."""


async def serve(
    engine: EngineClient,
    model: ServedModel,
    limits: Limits,
    classes: Classes,
    *,
    port: int,
    stopping: asyncio.Event,
    on_ready: Callable[[int], None],
    drain_s: float,
) -> None:
    """Answer calls on this machine until `stopping` is set or the engine fails; then let requests end.

    Args:
        port: 0: any free one.
        on_ready: is called with the port once calls are answered.
        drain_s: seconds that running requests have to end.

    Raises:
        MachineError: the port is taken.
        XgptError: the engine has failed.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", BYTES_PER_TOKEN * model.spec.max_context + REST_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
    )
    pb_grpc.add_VllmEngineServicer_to_server(Servicer(engine, model, limits, classes), server)
    server.add_generic_rpc_handlers((state_handler(engine),))
    try:
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
    except RuntimeError as error:
        raise MachineError(f"port {port} of this machine is not available: {error}") from None
    engine.on_fatal = stopping.set
    engine.start()
    sampling = None if engine.live is None else asyncio.create_task(engine.live.run())
    await server.start()
    gc.collect()
    gc.freeze()
    on_ready(bound)
    try:
        await stopping.wait()
    finally:
        engine.is_draining = True
        await server.stop(drain_s if engine.failure is None else None)
        if sampling is not None:
            sampling.cancel()
        await engine.stop()
    if engine.fatal is not None:
        raise engine.fatal
