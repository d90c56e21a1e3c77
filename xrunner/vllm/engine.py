"""vLLM as the engine behind the channel: one vLLM, or one for each lane of WAA."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from xgpt.core import policies
from xgpt.core.io import dump_json
from xgpt.core.policies import Request
from xgpt.core.schema import Plan
from xrunner.channel.remote import KvLimits, OnStep, RemoteEngine
from xrunner.generation import Generation
from xrunner.vllm.channel import Lanes
from xrunner.vllm.command import Launch, launch
from xrunner.vllm.instance import Instances
from xrunner.vllm.machines import Followers, Machines
from xrunner.vllm.waa import WaaLanes, check_waa, waa_launches


class Memory(NamedTuple):
    """vLLM's K/V memory, as a limit on a single request."""

    kv_blocks: int
    block_size: int

    @property
    def prompt_blocks(self) -> int:
        return self.kv_blocks

    def can_ever_fit(self, request: Request) -> bool:
        return -(-request.longest // self.block_size) <= self.kv_blocks


class VllmEngine(RemoteEngine):
    """A plan in vLLM, whose scheduler follows it (`scheduler`), or a WAA plan in two vLLMs (`waa`).

    Args:
        reuse: whether requests with the same API key share the K/V of common prompt prefixes.
        machines: the machines that the plan's only replica spans, this one first. None means only this one.

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
        """Return whether vLLM continues a request unchanged if its output so far is encoded with the prompt.

        It does not if the request has penalties, since they would ignore that output, or samples at random, since the
        generator would restart from the seed.
        """
        sampling = generation.sampling
        is_penalised = sampling.presence_penalty or sampling.frequency_penalty
        return not is_penalised and not (sampling.temperature and self.takes_seeds)

    def repeats(self, generation: Generation) -> bool:
        """Return whether vLLM generates the same tokens if a request restarts."""
        return self.takes_seeds or not generation.sampling.temperature


def limits_of(plan: Plan) -> KvLimits:
    """Return the limits of a plan on one request's K/V memory in vLLM. Raises InputError if vLLM cannot run the
    plan.
    """
    if len(plan.policy.lanes) > 1:
        check_waa(plan)
        return policies.build(plan).pool
    planned = launch(plan, plan_path="")
    return Memory(planned.kv_blocks, planned.block_size)


def start_vllm(
    plan: Plan, *, reuse: bool, machines: Machines | None = None, is_over: Callable[[], bool] = lambda: False
) -> Instances:
    """Start the processes that run a plan. VLLM accepts requests after its `Ready`.

    Args:
        is_over: returns whether to stop waiting for other machines.

    Raises:
        MachineError: vLLM is not installed, or a machine does not join.
    """
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
        launches, lambda directory, has_ended: Lanes(directory, ("both",), plan.replicas, has_ended), followers
    )
