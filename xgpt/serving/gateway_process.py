"""Run the Shepherd Model Gateway in this process: `python -m xgpt.serving.gateway_process`.

The arguments are a JSON list in the first line of standard input, since other users of the machine could read a command
line. The process ends when standard input is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading


def main() -> None:
    """Run the gateway until SIGTERM or the end of standard input."""
    arguments = json.loads(sys.stdin.buffer.readline())
    from smg.launch_router import launch_router, parse_router_args

    threading.Thread(target=_end_with_input, daemon=True).start()
    launch_router(parse_router_args(arguments))


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
