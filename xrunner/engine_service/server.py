"""Run the gRPC service in front of an engine, from the engine's start to the end of its last request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from xgpt.core.errors import MachineError
from xrunner.engine_service.servicer import Servicer
from xrunner.server.access.keys import Classes
from xrunner.server.api.text import ServedModel
from xrunner.server.engine_client import EngineClient
from xrunner.server.submission import Limits

BYTES_PER_TOKEN = 64
"""Largest number of bytes that each prompt token adds to a request's message. These are 5 bytes for the token id, and
the token's text.
"""
REST_BYTES = 4 << 20
"""Largest number of bytes of a request's message without its prompt."""


@asynccontextmanager
async def service(
    engine: EngineClient,
    model: ServedModel,
    limits: Limits,
    classes: Classes,
    *,
    drain_s: float,
) -> AsyncIterator[int]:
    """Answer calls from this machine, and yield the port. When the context ends, let running requests finish.

    Args:
        drain_s: seconds that running requests have to finish after the context ends.

    Raises:
        MachineError: no port is free.
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
    try:
        port = server.add_insecure_port("127.0.0.1:0")
    except RuntimeError as error:
        raise MachineError(f"no port of this machine is available: {error}") from None
    engine.start()
    sampling = None if engine.live is None else asyncio.create_task(engine.live.run())
    await server.start()
    gc.collect()
    gc.freeze()
    try:
        yield port
    finally:
        engine.drain()
        await server.stop(drain_s if engine.failure is None else None)
        if sampling is not None:
            sampling.cancel()
        await engine.stop()
    if engine.fatal is not None:
        raise engine.fatal
