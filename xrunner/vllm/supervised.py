"""Run a command for as long as standard input stays open: `python -m xrunner.vllm.supervised COMMAND ...`.

vLLM has several processes, and some of them continue if the first one is killed. Here they form one process group,
which is ended when the command ends or standard input closes. It stays in the front's session: Linux shares cores among
sessions first, and beside a session of vLLM's the front waited for seconds. This process ends last. By then the group's
memory is free, and its CPU time counts towards the process that started this one. Standard input closes when the
process that started this process ends for any reason. If this process itself is killed, the kernel sends the command
SIGHUP, and the command ends the group (`end_group_on_hangup`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial

from xgpt.core.processes import adopt_orphans, end_with_parent, wait_for_children

STOP_S = 20.0
KILL_S = 10.0


def main(command: list[str]) -> int:
    """Run the command until it ends, or until standard input closes.

    Returns:
        The command's exit code or, if a signal ended the command, 128 plus the signal's number, as in a shell.
    """
    adopt_orphans()
    hang_up = partial(end_with_parent, os.getpid(), signal.SIGHUP)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=hang_up)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: process.terminate())
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    code = process.wait()
    _kill_group(process.pid)
    wait_for_children(KILL_S)
    return code if code >= 0 else 128 - code


def end_group_on_hangup() -> None:
    signal.signal(signal.SIGHUP, lambda *_: os.killpg(0, signal.SIGKILL))


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)  # a suspended process would not end
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):  # all processes have ended
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
