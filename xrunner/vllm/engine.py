"""Run vLLM as the engine behind the channel, with one instance or, under WAA, one for each lane or prefill group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from xgpt.core import policies
from xgpt.core.errors import MachineError
from xgpt.core.io import dump_json
from xgpt.core.policies import KvLimits, Request
from xgpt.core.processes import children_of, cpu_s, is_at_work
from xgpt.core.schema import Plan
from xrunner.channel.remote import FrontConnection, OnStep, RemoteEngine
from xrunner.generation import Generation
from xrunner.vllm.channel import Lanes
from xrunner.vllm.command import Launch, launch
from xrunner.vllm.machines import Followers, Machines
from xrunner.vllm.process import Reader, package_path, preload, python, run_directory, started
from xrunner.vllm.waa import WaaLanes, check_waa, waa_launches

MAX_PATH = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Largest length of the directory's path in characters. vLLM's sockets are in this directory, and the length of a Unix
socket's path is limited."""


class Instances:
    """The vLLM processes of a plan, from their start until `end`. See
    `xrunner.channel.remote.FarEnd`.

    Args:
        launches: returns how to start each process, given this run's directory. No other user can enter this directory.
        connect: builds the front's end of the channel, given the directory and a function that returns whether a
            process has ended.
        followers: the other machines of a single vLLM, all of which must connect before it starts. None means that
            there are none.
    """

    def __init__(
        self,
        launches: Callable[[Path], Sequence[Launch]],
        connect: Callable[[str, Callable[[], bool]], Lanes],
        followers: Followers | None = None,
    ) -> None:
        self._at_end = ExitStack()
        self._followers = followers
        self._readers: list[Reader] = []
        try:
            self._start(launches, connect)
        except BaseException:
            self.end(0)
            raise

    def _start(
        self, launches: Callable[[Path], Sequence[Launch]], connect: Callable[[str, Callable[[], bool]], Lanes]
    ) -> None:
        if self._followers is not None:
            self._followers.start()
        directory = self._at_end.enter_context(run_directory())
        if len(str(directory)) > MAX_PATH:
            raise MachineError(f"{directory} is too long a path for sockets; set TMPDIR to a shorter one")
        packages = self._at_end.enter_context(package_path(directory))
        self.front: FrontConnection = connect(str(directory), lambda: self.why_ended() is not None)
        vllm_python = python()
        # Other users of this machine must not read the messages between vLLM's processes either.
        environment = {"VLLM_RPC_BASE_PATH": str(directory), "VLLM_HOST_IP": "127.0.0.1"}
        for each in launches(directory):
            variables = environment | each.variables | preload(vllm_python)
            command = each.command(vllm_python, str(directory))
            self._readers.append(Reader(self._at_end.enter_context(started(command, packages, variables))))

    def why_ended(self) -> str | None:
        for reader in self._readers:
            if reader.process.poll() is not None:
                return f"vLLM has ended with exit code {reader.process.returncode}: {reader.last_error()}"
        return None if self._followers is None else self._followers.why_ended()

    def is_at_work(self) -> bool:
        return any(is_at_work(child) for reader in self._readers for child in children_of(reader.process.pid))

    def cpu_s(self) -> float:
        own = [reader.process.pid for reader in self._readers]
        return sum(map(cpu_s, chain(own, chain.from_iterable(map(children_of, own)))))

    def end(self, within_s: float) -> None:
        if self._followers is not None:
            self._followers.close(for_good=within_s > 0)
        self._at_end.close()


class Memory(NamedTuple):
    kv_blocks: int
    block_size: int

    @property
    def prompt_blocks(self) -> int:
        return self.kv_blocks

    def can_ever_fit(self, request: Request) -> bool:
        return -(-request.longest // self.block_size) <= self.kv_blocks


class VllmEngine(RemoteEngine):
    """Runs a plan in one vLLM, whose scheduler follows the plan (`scheduler`), or a WAA plan in several (`waa`).

    Args:
        machines: the machines of the plan's only replica, this machine first. None means only this machine.

    Raises:
        InputError: vLLM cannot run the plan.
        MachineError: vLLM is not installed, or does not start.
    """

    def __init__(
        self, plan: Plan, *, on_step: OnStep | None = None, reuse: bool = True, machines: Machines | None = None
    ) -> None:
        limits = limits_of(plan)
        self._is_over = threading.Event()
        start = partial(start_vllm, reuse=reuse, machines=machines, is_over=self._is_over.is_set)
        super().__init__(start(plan), limits, start, limits_of)
        if on_step is not None:
            self.listen(on_step)

    def close(self) -> None:
        self._is_over.set()
        super().close()

    def resumes(self, generation: Generation) -> bool:
        """Return whether a request continues with the same tokens if its output so far is prefilled with the prompt.

        The tokens would differ if the request has penalties, since these would ignore the output so far, or if it
        samples at random, since the generator would restart from the seed.
        """
        sampling = generation.sampling
        is_penalised = sampling.presence_penalty or sampling.frequency_penalty
        return not is_penalised and not (sampling.temperature and self.takes_seeds)

    def repeats(self, generation: Generation) -> bool:
        return self.takes_seeds or not generation.sampling.temperature


def limits_of(plan: Plan) -> KvLimits:
    """Return the limits on one request's K/V memory when a plan runs in vLLM. Raises InputError if vLLM cannot run
    it.
    """
    if len(plan.policy.lanes) > 1:
        check_waa(plan)
        return policies.build(plan).pool
    planned = launch(plan, plan_path="")
    return Memory(planned.kv_blocks, planned.block_size)


def start_vllm(
    plan: Plan, *, reuse: bool, machines: Machines | None = None, is_over: Callable[[], bool] = lambda: False
) -> Instances:
    """Start the processes that run a plan. They accept requests after they have sent `Ready`."""
    if len(plan.policy.lanes) > 1:
        return Instances(partial(waa_launches, plan), partial(WaaLanes, plan))

    def launches(directory: Path) -> list[Launch]:
        path = directory / "plan.json"
        path.write_text(dump_json(plan), encoding="utf-8")
        config = {"front": str(directory), "lane": "both"}
        launched = launch(plan, plan_path=str(path), config=config, reuse=reuse)
        return [launched if machines is None else machines.spread(launched)]

    followers = None if machines is None else Followers(machines, plan, is_over)
    return Instances(
        launches, lambda directory, has_ended: Lanes(directory, (("both", 0),), plan.replicas, has_ended), followers
    )
