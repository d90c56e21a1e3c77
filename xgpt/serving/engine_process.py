"""Run the engine of a plan in this process, at its end of the channel: `python -m xgpt.serving.engine_process FD`.

FD is the process's end of the channel (`xrunner.channel`); standard input holds an `EngineOrder`. The process has no
HTTP, tokenizer, metrics or log of steps. It ends when the front closes the channel, as the kernel does when the front
ends; signals that a terminal or a service manager sends to all processes of a server are for the front.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

from xgpt.core.schema import Batching, Frozen, Plan
from xgpt.serving.engines import Nodes, build_engine

if TYPE_CHECKING:
    from xrunner.channel.host import HostedEngine
    from xrunner.channel.remote import OnStep

END_S = 20.0
"""For the step under way, and for the workers, to end once the front has gone."""


class EngineOrder(Frozen):
    """What to run.

    Attributes:
        nodes: machines that run the plan together: their number, this one's, and the rendezvous; None: this one only.
        core_waits: note in the records of steps how long threads waited for a core.
    """

    plan: Plan
    batching: Batching
    reuse: bool
    log_level: str
    nodes: tuple[int, int, str] | None = None
    core_waits: bool = False


def main() -> None:
    """Run the engine until the front has gone, or the engine has failed."""
    from xrunner.channel.ends import EngineEnd
    from xrunner.channel.host import EngineHost
    from xrunner.channel.messages import decode_down
    from xrunner.memory import keep_freed_memory
    from xrunner.server.observe.logs import log_json

    # Not ignored: processes that this one starts would ignore them, too.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    order = EngineOrder.model_validate_json(sys.stdin.buffer.read())
    log_json(order.log_level)
    if _is_alone(order.plan):
        keep_freed_memory()  # before any other thread takes memory: the engine's would have an arena of its own
    host = EngineHost(EngineEnd(socket.socket(fileno=int(sys.argv[1])), decode_down), partial(_build, order))
    engine = threading.Thread(target=host.run, name="engine", daemon=True)
    engine.start()
    host.read()
    engine.join(END_S)
    if engine.is_alive():
        os._exit(1)


def _build(order: EngineOrder, on_step: OnStep) -> HostedEngine:
    from xrunner.core_waits import CoreWaitMeter
    from xrunner.cores import take_cores

    plan, is_alone = order.plan, _is_alone(order.plan)
    nodes = None if order.nodes is None else Nodes.of(*order.nodes)
    listener = CoreWaitMeter(on_step) if order.core_waits and is_alone else on_step
    engine = build_engine(plan, listener, nodes, order.batching, reuse=order.reuse)
    if is_alone:
        take_cores()
    # Loaded modules stay: the garbage collector would go through them in the middle of a step.
    gc.collect()
    gc.freeze()
    return engine


def _is_alone(plan: Plan) -> bool:
    """Return whether this process executes the steps itself, on a CPU."""
    return plan.num_devices == 1 and plan.cluster.device.type == "cpu"


if __name__ == "__main__":
    main()
