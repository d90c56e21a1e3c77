"""Run vLLM's engine without a server: `python -m xrunner.vllm.host DIRECTORY LANE vLLM's flags ...`.

This process receives requests from `xgpt serve` and submits them to vLLM. Engine cores' schedulers report each step to
`xgpt serve` themselves (`channel`). The process listens on no network, unless vLLM runs on several machines (`store`).
With a `--node-rank` above 0, it only runs workers for another machine's engine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.distributed.utils import TCPStore, create_tcp_store
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from xgpt.core.errors import cut
from xgpt.core.network import listen_towards
from xrunner import generation
from xrunner.channel import ALIVE_S
from xrunner.channel.messages import Alive, Cancel, Down, Ready, Stepped, Submit
from xrunner.generation import Generation, Token
from xrunner.vllm.channel import WARM_UP, VllmEnd
from xrunner.vllm.supervised import end_group_on_hangup

if TYPE_CHECKING:
    from xgpt.core.schema import LaneName

SAMPLED = Submit(
    Generation(
        WARM_UP,
        (0, 0),
        2,
        sampling=generation.SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, logprobs=1),
    )
)
"""A request that makes vLLM compile its sampler. Without it, the first request that samples would delay all others by
20 s.
"""


class VllmHost:
    def __init__(self, engine: AsyncLLM, front: VllmEnd) -> None:
        self._engine = engine
        self._front = front
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._has_come = asyncio.Event()

    async def run(self) -> None:
        """Submit the front's requests until vLLM's engine has died."""
        await self._generate(SAMPLED)
        asyncio.get_running_loop().add_reader(self._front.fileno(), self._has_come.set)
        self._front.send(Ready(takes_seeds(), False, True))
        alive_s = 0.0
        while True:
            await self._engine.check_health()
            if time.monotonic() >= alive_s + ALIVE_S:
                alive_s = time.monotonic()
                self._front.send(Alive([]))
            self._has_come.clear()
            for message in self._front.received():  # read all messages, since the descriptor signals only new ones
                self._take(message)
            try:
                await asyncio.wait_for(self._has_come.wait(), ALIVE_S)
            except TimeoutError:
                continue

    def _take(self, message: Down) -> None:
        match message:
            case Submit():
                id_ = message.generation.id
                task = self._tasks[id_] = asyncio.create_task(self._generate(message))
                task.add_done_callback(lambda _: self._tasks.pop(id_))
            case Cancel() if message.id in self._tasks:
                self._tasks[message.id].cancel()  # vLLM aborts the request

    async def _generate(self, message: Submit) -> None:
        request = message.generation
        try:
            # With this salt, no account can reuse another account's K/V, or infer from times to first token what
            # another account has sent.
            prompt = tokens_input(list(request.prompt), cache_salt=request.account.key or None)
            async for _ in self._engine.generate(prompt, sampling_params(message), str(request.id)):
                pass
        except EngineDeadError:
            return  # `run` will report this error
        except Exception as error:
            reason = cut(f"{type(error).__name__}: {error}")
            self._front.send(Stepped([Token(request.id, 0, "error", error=reason)], [], None))


def takes_seeds() -> bool:
    """Return whether vLLM supports a separate random generator for a request.

    If a prompt is executed in chunks, vLLM resets the generator. On CPUs, torch cannot reset a generator, and vLLM's
    engine would end.
    """
    return not current_platform.is_cpu()


def sampling_params(message: Submit) -> SamplingParams:
    """Return vLLM's sampling parameters for a request. vLLM ends the request at stop tokens. The scheduler handles the
    request's other properties.
    """
    request = message.generation
    fields = {
        "id": request.id,
        "deadline_ns": request.deadline_ns,
        "promised_output": request.promised_output,
        "account": list(request.account),
        "output_length": request.output_length,
        "kv_transfer_params": message.transfer,
    }
    sampling = request.sampling
    # Greedy sampling ignores the seed, so no generator is kept for it.
    chosen: dict[str, Any] = {}
    if sampling.temperature:
        chosen = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        chosen |= {"seed": sampling.seed % 2**63} if takes_seeds() else {}
    return SamplingParams(
        max_tokens=request.max_output,
        ignore_eos=True,
        stop_token_ids=sorted(request.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={name: value for name, value in fields.items() if value is not None},
        temperature=sampling.temperature,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        logprobs=sampling.logprobs,
        **chosen,
    )


async def serve(directory: str, lane: LaneName, group: int, arguments: AsyncEngineArgs) -> None:
    front = VllmEnd(directory, lane, group=group)
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        await VllmHost(engine, front).run()
    finally:
        engine.shutdown()
        front.close()


def compute(arguments: AsyncEngineArgs) -> None:
    executor = MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def store(host: str, port: int) -> TCPStore:
    """Return the store through which the workers of all machines find each other. The caller must keep a reference to
    it.

    The store listens only on one address, whereas a store that torch opens in a worker would listen on all interfaces.
    """
    return create_tcp_store(host, port, listen_towards(host, port), is_master=True, wait_for_workers=False)


def parser() -> FlexibleArgumentParser:
    flags = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags.add_argument("directory")
    flags.add_argument("lane", choices=("both", "encode", "decode"))
    flags.add_argument("group", type=int)
    return flags


def main() -> None:
    end_group_on_hangup()
    given = parser().parse_args()
    arguments = AsyncEngineArgs.from_cli_args(given)
    if given.node_rank:
        compute(arguments)
        return
    _kept = store(given.master_addr, given.master_port) if given.nnodes > 1 else None
    try:
        asyncio.run(serve(given.directory, given.lane, given.group, arguments))
    except EngineDeadError as error:
        sys.exit(f"EngineDeadError: {error}")


if __name__ == "__main__":
    main()
