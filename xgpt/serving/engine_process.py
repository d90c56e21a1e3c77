"""Run a plan's engine in this process: `python -m xgpt.serving.engine_process FD`.

FD is a socket, which is this process's end of the channel to the front (`xrunner.channel`). Standard input contains an
`EngineOrder`. HTTP, the tokenizer, metrics and the step log are in the front. This process ends when the front closes
the channel or ends. It ignores signals that a terminal or a service manager sends to all processes of a server, since
the front handles them.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from functools import partial

from xgpt.serving.engine_order import EngineOrder
from xgpt.serving.engines import build_engine
from xrunner.channel.ends import EngineEnd
from xrunner.channel.host import EngineHost, HostedEngine
from xrunner.channel.messages import DecodeDown
from xrunner.channel.remote import OnStep
from xrunner.cores import CoreWaitMeter, take_cores
from xrunner.logs import log_json
from xrunner.memory import keep_freed_memory

END_S = 20.0
"""After the front has ended, the current step and the workers must end within this number of seconds."""


def main() -> None:
    """Run the engine until the front ends or the engine fails."""
    # The handler is not SIG_IGN, which processes started here would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    order = EngineOrder.model_validate_json(sys.stdin.buffer.read())
    log_json(order.log_level)
    if _is_alone(order):
        keep_freed_memory()  # before another thread allocates memory, so that the engine gets no separate arena
    host = EngineHost(EngineEnd(socket.socket(fileno=int(sys.argv[1])), DecodeDown()), partial(_build, order))
    engine = threading.Thread(target=host.run, name="engine", daemon=True)
    engine.start()
    host.read()
    engine.join(END_S)
    if engine.is_alive():
        os._exit(1)


def _build(order: EngineOrder, on_step: OnStep) -> HostedEngine:
    is_alone = _is_alone(order)
    listener = CoreWaitMeter(on_step) if order.core_waits and is_alone else on_step
    engine = build_engine(order.plan, listener, order.batching, order.ray, reuse=order.reuse)
    if is_alone:
        take_cores()
    # Otherwise the garbage collector would scan all loaded modules in the middle of a step.
    gc.collect()
    gc.freeze()
    return engine


def _is_alone(order: EngineOrder) -> bool:
    """Return whether this process executes the steps on a CPU, without worker processes."""
    return order.plan.num_devices == 1 and order.plan.cluster.device.type == "cpu" and order.ray is None


if __name__ == "__main__":
    main()
