"""Run vLLM's engine without a server: `python -m xrunner.vllm.host DIRECTORY LANE vLLM's flags ...`.

Takes requests from `xgpt serve` and hands them to vLLM. It listens on no network: what comes of the requests the
engine cores' schedulers tell `xgpt serve` themselves, step by step (`channel`).
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from xrunner.channel.messages import Cancel
from xrunner.vllm.channel import WARM_UP, Down, HostSide, VllmAlive, VllmFailed, VllmReady, VllmSubmit

if TYPE_CHECKING:
    from xgpt.core.schema import LaneName

HEALTH_S = 1.0
"""Between two looks at whether the engine lives."""


SAMPLED = VllmSubmit(
    WARM_UP, (0, 0), 2, sampling={"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "seed": 0, "logprobs": 1}
)
"""A request that has vLLM compile what samples: otherwise the first one to ask for it holds up all others for 20 s."""


class VllmHost:
    """One vLLM, and the requests that it has."""

    def __init__(self, engine: AsyncLLM, front: HostSide) -> None:
        self._engine = engine
        self._front = front
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._has_come = asyncio.Event()

    async def run(self, lane: LaneName) -> None:
        """Until vLLM's engine has died.

        Raises:
            EngineDeadError: it has.
        """
        await self._generate(SAMPLED)
        asyncio.get_running_loop().add_reader(self._front.fd, self._has_come.set)
        self._front.send(VllmReady(lane))
        while True:
            await self._engine.check_health()
            self._front.send(VllmAlive(lane))
            self._has_come.clear()
            for message in self._front.requests():  # all: the descriptor tells of new ones alone
                self._take(message)
            try:
                await asyncio.wait_for(self._has_come.wait(), HEALTH_S)
            except TimeoutError:
                continue

    def _take(self, message: Down) -> None:
        match message:
            case VllmSubmit():
                task = self._tasks[message.id] = asyncio.create_task(self._generate(message))
                task.add_done_callback(lambda _: self._tasks.pop(message.id))
            case Cancel() if message.id in self._tasks:
                self._tasks[message.id].cancel()  # vLLM aborts the request

    async def _generate(self, request: VllmSubmit) -> None:
        try:
            # So no account finds, or learns from the time to its first token, what another one has asked.
            prompt = tokens_input(list(request.prompt), cache_salt=request.account.key or None)
            async for _ in self._engine.generate(prompt, sampling_params(request), str(request.id)):
                pass
        except EngineDeadError:
            return  # `run` tells
        except Exception as error:
            self._front.send(VllmFailed(request.id, f"{type(error).__name__}: {error}"))


def sampling_params(request: VllmSubmit) -> SamplingParams:
    """A request in vLLM's words: what ends it stands in its stop tokens, the rest is for the scheduler."""
    fields = {
        "id": request.id,
        "deadline_ns": request.deadline_ns,
        "promised_output": request.promised_output,
        "account": list(request.account),
        "output_length": request.output_length,
        "kv_transfer_params": request.transfer,
    }
    return SamplingParams(
        max_tokens=request.max_output,
        ignore_eos=True,
        stop_token_ids=list(request.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={name: value for name, value in fields.items() if value is not None},
        **request.sampling,
    )


async def serve(directory: str, lane: LaneName, arguments: AsyncEngineArgs) -> None:
    """Start vLLM, and give it what comes."""
    front = HostSide(directory, lane)
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        await VllmHost(engine, front).run(lane)
    finally:
        engine.shutdown()
        front.close()


def parser() -> FlexibleArgumentParser:
    """vLLM's own flags, and what is ours."""
    flags = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags.add_argument("directory")
    flags.add_argument("lane", choices=("both", "encode", "decode"))
    return flags


def main() -> None:
    """Serve until vLLM has died, or `supervised` ends us."""
    given = parser().parse_args()
    try:
        asyncio.run(serve(given.directory, given.lane, AsyncEngineArgs.from_cli_args(given)))
    except EngineDeadError as error:
        sys.exit(f"EngineDeadError: {error}")


if __name__ == "__main__":
    main()
