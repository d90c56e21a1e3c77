"""What starts the workers of one machine, and starts them anew when one dies: torch's elastic launcher.

Run as a process of its own, because the launcher wants a main thread for signals and ends with its workers. It ends
when its standard input does, that is, when whoever has started it ends, however that comes about.

Workers are forked off a server that has imported all they need, so that starting them anew takes no second.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import msgspec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from xrunner.cluster.agent_settings import AgentSettings
from xrunner.cluster.process import Settings, main

MAX_RESTARTS = 10**6
"""The engine counts restarts; the launcher must not."""
SHUTDOWN_S = 1
"""From SIGTERM to SIGKILL: a worker has nothing to tidy up."""


def run() -> None:
    settings = msgspec.json.decode(sys.stdin.readline(), type=AgentSettings)
    threading.Thread(target=_end_with_input, daemon=True).start()
    if not os.environ.get("XGPT_DEBUG"):
        logging.disable(logging.CRITICAL)  # the launcher would report every restart and its own end at length
    multiprocessing.set_forkserver_preload(["xrunner.cluster.process"])
    config = LaunchConfig(
        min_nodes=settings.num_nodes,
        max_nodes=settings.num_nodes,
        nproc_per_node=settings.num_workers,
        run_id=settings.run,
        rdzv_backend="c10d",
        rdzv_endpoint=settings.rendezvous,
        rdzv_configs={"is_host": settings.is_host},
        max_restarts=MAX_RESTARTS,
        monitor_interval=0.1,
        start_method="forkserver",
        local_addr=settings.host,
        shutdown_timeout=SHUTDOWN_S,
    )
    with tempfile.TemporaryDirectory(prefix="xgpt-") as directory:
        farewell = Path(directory) / "farewell"
        told = Settings(settings.engine, settings.secret, settings.host, settings.first_device, farewell)
        _launch(config, told)


def _launch(config: LaunchConfig, told: Settings) -> None:
    try:
        elastic_launch(config, main)(told)
    except SignalException:
        pass
    except RendezvousError:
        if not told.farewell.exists():
            sys.exit(f"the machine at {config.rdzv_endpoint} cannot be reached any more")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all there is to do now is to end
        # Semaphores go before their tracker, which removes them: each would then complain that it is not there.
        util._run_finalizers(0)  # type: ignore[attr-defined]
        # Not before its children: nobody would wait for them. At their ends these close by themselves, but later.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _end_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    run()
