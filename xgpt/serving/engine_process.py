"""Run the engine of a plan as a gRPC service in this process: `python -m xgpt.serving.engine_process`.

The first line of standard input is an `EngineOrder`. Each line of standard output is a JSON object: {"port": N} once
calls are answered, then {"plan": ...} whenever another plan is followed. The process ends with SIGTERM, or when
standard input is closed, as the kernel does when the process that started this one ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from functools import partial
from typing import Any

import msgspec

from xgpt.core.errors import XgptError
from xgpt.core.schema import Decision, Frozen, Plan
from xgpt.serving.running import running
from xgpt.serving.serve import ServeRequest

DRAIN_S = 30.0


class EngineOrder(Frozen):
    """What to run.

    Attributes:
        port: where to listen on this machine; 0: any free one.
    """

    plan: Plan
    request: ServeRequest
    port: int = 0


def main() -> None:
    """Serve until a signal, the end of input, or a failure of the engine; its exit code is then the error's."""
    order = EngineOrder.model_validate_json(sys.stdin.buffer.readline())
    os.set_inheritable(0, False)
    try:
        asyncio.run(_run(order))
    except XgptError as error:
        sys.exit(f"xgpt: {error}")


async def _run(order: EngineOrder) -> None:
    from xrunner.engine_service.server import serve

    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    threading.Thread(
        target=_wait_for_end, args=(partial(loop.call_soon_threadsafe, stopping.set),), daemon=True
    ).start()
    plan, request = order.plan, order.request
    with running(plan, request, with_text=False) as (engine, model):
        watch = engine.watch
        assert watch is not None

        def tell_plan(decision: Decision) -> None:
            nonlocal plan
            if watch.plan is not plan:
                plan = watch.plan
                _tell({"plan": plan.model_dump(mode="json")})

        watch.on_decision = tell_plan
        await serve(
            engine,
            model,
            request.limits(),
            request.classes(plan),
            port=order.port,
            stopping=stopping,
            on_ready=lambda port: _tell({"port": port}),
            drain_s=request.drain_s or DRAIN_S,
        )


def _wait_for_end(end: Any) -> None:
    while os.read(0, 4096):
        pass
    end()


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
