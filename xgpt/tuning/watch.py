"""Read the metrics of an engine's replicas, plan again when lengths change, and roll the replicas."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable
from threading import Event

from xgpt.connection import Failure, answer_of, parts_of
from xgpt.core.errors import InputError, MachineError, XgptError
from xgpt.core.schema import Observation, Plan, Profile
from xgpt.core.schema.tuning import WatchAlarm
from xgpt.deciding.commands import engine_command
from xgpt.observation.windows import wasserstein
from xgpt.requests import WatchRequest
from xgpt.tuning.engines import READY_S, split, wait_ready
from xgpt.tuning.metrics import Page, read_page
from xgpt.tuning.watching import Watcher
from xscheduler.replanning.replanner import propose

HOOK_S = 10.0


def watch(
    plan: Plan, profile: Profile, request: WatchRequest, on_alarm: Callable[[WatchAlarm], None], stop: Event
) -> None:
    """Compare the replicas of an engine with a plan until `stop` is set. See `xgpt.watch`."""
    if request.apply is not None and "{flags}" not in request.apply:
        raise InputError("apply", request.apply, "it must contain {flags}, where the engine's flags belong")
    for url in request.engine:
        parts_of(url, "engine")
    if request.webhook is not None:
        parts_of(request.webhook, "webhook")
    watchers = {url: Watcher(plan) for url in request.engine}
    if not any(read_page(url) for url in watchers):
        url = next(iter(watchers))
        says = f"{url}/metrics has no metrics of vLLM, SGLang or Dynamo: start the engine, or correct the URL"
        raise MachineError(says)
    while not stop.is_set():
        for url, watcher in watchers.items():
            page: Page | None = read_page(url)
            alarm = None if page is None else watcher.note(time.monotonic(), page)
            if alarm is None:
                continue
            following = None
            if alarm.cause.endswith("lengths"):
                alarm, following = replanned(alarm, watcher, profile)
                for other in watchers.values():
                    other.workload = watcher.workload  # the same shift reaches all replicas, and alarms once
            if request.webhook is not None and not post(request.webhook, alarm):
                alarm = alarm.but(action=f"{alarm.action}; the webhook took no alarm".lstrip("; "))
            on_alarm(alarm)
            if request.apply is not None and following is not None and alarm.command:
                roll(request.apply, alarm.command, list(watchers))
                watchers = {each: Watcher(following) for each in watchers}
                break
        stop.wait(request.look_s)


def replanned(alarm: WatchAlarm, watcher: Watcher, profile: Profile) -> tuple[WatchAlarm, Plan | None]:
    plan, workload = watcher.plan, watcher.observed()
    observation = Observation(
        workload=workload,
        num_requests=alarm.num_requests,
        num_finished=alarm.num_requests,
        weight=float(alarm.num_requests),
        input_distance=wasserstein(workload.input, plan.workload.input),
        output_distance=wasserstein(workload.output, plan.workload.output),
    )
    try:
        decision, following = propose(plan, profile, observation)
    except XgptError as error:
        return alarm.but(action=f"planning again failed: {error}"), None
    if following is None:
        return alarm.but(action=decision.reason), None
    return alarm.but(action=decision.reason, command=engine_command(following) or "", gain=decision.gain), following


def post(url: str, alarm: WatchAlarm) -> bool:
    try:
        return 200 <= answer_of(url, seconds=HOOK_S, body=alarm.model_dump_json().encode())[0] < 300
    except Failure:
        return False


COMMANDS = re.compile(r"[;&|<>()$`\\!\r\n]")
"""Characters by which a word of plan.json could become a command in the user's own shell text, however it quotes."""


def roll(template: str, command: str, urls: list[str]) -> None:
    """Restart one replica after the other with a command's flags.

    Raises:
        MachineError: a restart fails, or a replica does not answer after it. The others keep running as they were.
    """
    _, words = split(shlex.split(command))
    if (odd := next((word for word in words[3:] if COMMANDS.search(word)), None)) is not None:
        raise MachineError(f"`apply` gives {odd!r} to no shell, which might run it; restart the engines yourself")
    for url in urls:
        text = template.replace("{flags}", shlex.join(words[3:])).replace("{url}", url)
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise MachineError(f"{url} could not be restarted (exit code {done.returncode}): {last}; no other was")
        wait_ready(url, time.monotonic() + READY_S)
