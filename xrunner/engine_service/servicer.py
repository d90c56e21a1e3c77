"""Answer the calls of `vllm_engine.proto` from an `EngineClient`, and turn the engine's tokens into messages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from xgpt.core.errors import MachineError
from xgpt.core.schema import Account
from xgpt.core.version import __version__
from xrunner.engine_service import METADATA
from xrunner.engine_service.requests import read
from xrunner.generation import Logprobs, Token
from xrunner.server.access.keys import Classes, Key
from xrunner.server.api.errors import ApiError, refuse
from xrunner.server.api.text import ServedModel
from xrunner.server.engine_client import EngineClient
from xrunner.server.request_info import RequestInfo
from xrunner.server.submission import EngineOutputs, Limits, Submitted, check_prompts, check_support


class Output:
    """Turns the tokens of one output into messages.

    Args:
        stop_token_ids: tokens that end the output.
        keep: whether to keep all tokens for `complete`. This is not needed if the gateway reads a stream.
    """

    def __init__(self, index: int, submitted: Submitted, stop_token_ids: frozenset[int], *, keep: bool) -> None:
        self._index = index
        self._stream = submitted.stream
        self._prompt = submitted.prompt.tokens
        self._sampling = submitted.sampling
        self._stop_token_ids = stop_token_ids
        self._keep = keep
        self._kept: list[Token] = []
        self._num_tokens = 0
        self._scores: Sequence[Logprobs] | None = None
        self.finish: str | None = None

    def push(self, tokens: Sequence[Token]) -> list[pb.GenerateResponse]:
        """Return the messages for these tokens."""
        is_first = self._num_tokens == 0
        if is_first and tokens[0].logprobs is not None and self._sampling.prompt_logprobs is not None:
            self._scores = tokens[0].logprobs.prompt
        self._num_tokens += len(tokens)
        self.finish = tokens[-1].finish
        if self._keep:
            self._kept += tokens
            return [] if self.finish is None else [self._complete(self._kept)]
        chunk = pb.GenerateStreamChunk(
            token_ids=[token.token for token in tokens],
            prompt_tokens=len(self._prompt),
            completion_tokens=len(tokens),
            cached_tokens=self._stream.cached_tokens,
            output_logprobs=self._output_logprobs(tokens),
            input_logprobs=self._input_logprobs() if is_first else None,
            index=self._index,
        )
        messages = [pb.GenerateResponse(chunk=chunk)]
        if self.finish is not None:
            messages.append(self._complete(tokens))
        return messages

    def _complete(self, tokens: Sequence[Token]) -> pb.GenerateResponse:
        """Return the last message. In a stream, it has only the tokens of the last chunk, as in vLLM's servicer."""
        last = tokens[-1].token
        whole = pb.GenerateComplete(
            output_ids=[token.token for token in tokens],
            finish_reason=self.finish,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(tokens),
            cached_tokens=self._stream.cached_tokens,
            output_logprobs=self._output_logprobs(tokens),
            input_logprobs=self._input_logprobs() if self._keep else None,
            index=self._index,
        )
        if self.finish == "stop" and last in self._stop_token_ids:
            whole.matched_token_id = last
        return pb.GenerateResponse(complete=whole)

    def _output_logprobs(self, tokens: Sequence[Token]) -> pb.OutputLogProbs | None:
        if self._sampling.logprobs is None:
            return None
        scored = [(token.token, token.logprobs) for token in tokens if token.logprobs is not None]
        return pb.OutputLogProbs(
            token_logprobs=[scores.chosen for _, scores in scored],
            token_ids=[token for token, _ in scored],
            top_logprobs=[_top(scores) for _, scores in scored] if self._sampling.logprobs else None,
        )

    def _input_logprobs(self) -> pb.InputLogProbs | None:
        """Return the log probabilities of the prompt's tokens. The first token has none."""
        if self._scores is None:
            return None
        values = [pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=score.chosen) for score in self._scores)]
        top = [pb.TopLogProbs(), *map(_top, self._scores)] if self._sampling.prompt_logprobs else None
        return pb.InputLogProbs(token_logprobs=values, token_ids=self._prompt, top_logprobs=top)


def _top(scores: Logprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[value for _, value in scores.top], token_ids=[token for token, _ in scores.top])


STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""gRPC's status for each HTTP status of the endpoint. All others become INTERNAL."""


class Servicer(pb_grpc.VllmEngineServicer):
    """Answers gRPC calls as the package's docstring describes. All methods run in the event loop.

    Args:
        model: the served model, whose `codec` is not used.
        limits: limits on the number of waiting requests, on the time of a request, and on the length of outputs.
        classes: the plan's classes of requests.
    """

    def __init__(self, engine: EngineClient, model: ServedModel, limits: Limits, classes: Classes) -> None:
        self._engine = engine
        self._model = model
        self._limits = limits
        self._classes = classes
        self._calls: dict[str, asyncio.Task[Any]] = {}
        """Running `Generate` calls, by request id."""
        self._since_s = time.monotonic()
        self._last_receive_s = time.time()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yield the tokens of the request's outputs as they are generated. See the package's docstring."""
        self._last_receive_s = time.time()
        received_s = time.perf_counter()
        task = asyncio.current_task()
        assert task is not None
        id_ = request.request_id
        self._calls[id_] = task
        outputs: EngineOutputs | None = None
        left = "cancelled"
        try:
            outputs = await self._read(request, context, received_s)
            answers = {
                each.stream.id: Output(index, each, outputs.stop_token_ids, keep=not request.stream)
                for index, each in enumerate(outputs.submit())
            }
            while any(answer.finish is None for answer in answers.values()):
                tokens = await asyncio.wait_for(outputs.inbox.get(), outputs.seconds_left)
                if isinstance(tokens, ApiError):
                    raise tokens
                for message in answers[tokens[0].id].push(tokens):
                    yield message
        except ApiError as error:
            await _abort(context, STATUS.get(error.status, grpc.StatusCode.INTERNAL), str(error))
        except TimeoutError:
            assert outputs is not None
            left = "timeout" if outputs.is_timeout else "deadline"
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(outputs.late("the answer was not complete")))
        finally:
            if self._calls.get(id_) is task:
                del self._calls[id_]
            if outputs is not None:
                outputs.take_out(left)

    async def _read(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, received_s: float
    ) -> EngineOutputs:
        """Check a request, and return its outputs. They are not submitted yet. Raises ApiError."""
        engine, model, limits = self._engine, self._model, self._limits
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        asked = read(request, metadata, model.name)
        check_support(asked, model, engine)
        prompts = check_prompts(asked, [asked.input_ids], model, engine, limits)
        if asked.grammar is not None:
            await self._check_grammar(asked.grammar)
        if engine.failure is not None:
            raise ApiError(503, engine.failure)  # so that a gateway sends the request to another engine
        account = Key(account=Account(metadata.get(METADATA.account, "")[:64]))
        key = self._classes.key_of(account, metadata.get(METADATA.class_name) or None)
        info = RequestInfo(request.request_id, received_s, None, {}, read_s=received_s, key=key)
        return EngineOutputs(engine, model, limits, asked, prompts, info)

    async def _check_grammar(self, grammar: str) -> None:
        """Compile a grammar in another thread, before the engine needs it. Raises ApiError."""
        if self._model.grammars is None:
            refuse("constraint", "the model has no tokenizer here, so outputs cannot be constrained by a grammar")
        try:
            reason = await asyncio.to_thread(self._model.grammars.why_not, grammar)
        except MachineError as error:
            reason = str(error)
        if reason is not None:
            refuse("constraint", f"it is not accepted: {reason}")

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Remove requests. Unknown ids are ignored."""
        for id_ in request.request_ids:
            if (task := self._calls.get(id_)) is not None:
                task.cancel()
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """Return whether the engine accepts requests."""
        reason = self._engine.failure or ("it is shutting down" if self._engine.is_draining else "")
        return pb.HealthCheckResponse(healthy=not reason, message=reason or "ok")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """Return the model's properties that a gateway needs to render chats, to tokenise, and to refuse requests."""
        spec, model = self._model.spec, self._model
        return pb.GetModelInfoResponse(
            model_path=model.path or model.name,
            is_generation=True,
            max_context_length=spec.max_context,
            vocab_size=spec.vocab_size,
            served_model_name=model.name,
            tokenizer_path=model.path,
            model_type=spec.family,
            eos_token_ids=sorted(model.eos_token_ids),
            bos_token_id=spec.bos_token_id or 0,
            max_req_input_len=spec.max_context - 1,
            default_sampling_params_json=json.dumps(dict(model.sampling_defaults)) if model.sampling_defaults else "",
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Return the state of this process."""
        pool = self._engine.remote.pool
        return pb.GetServerInfoResponse(
            active_requests=len(pool.running) + len(self._engine.backlog),
            last_receive_timestamp=self._last_receive_s,
            uptime_seconds=time.monotonic() - self._since_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=pool.limits.block_size,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        """Return the load of all replicas of the engine together."""
        pool, waiting = self._engine.remote.pool, len(self._engine.backlog)
        used, total = pool.room.reserved_blocks * pool.limits.block_size, self._engine.capacity
        load = pb.SchedulerLoad(
            num_running_reqs=len(pool.running),
            num_waiting_reqs=waiting,
            num_total_reqs=len(pool.running) + waiting,
            num_used_tokens=min(used, total),
            max_total_num_tokens=total,
            token_usage=min(used / max(total, 1), 1.0),
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1, loads=[load]
        )

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        """Refuse: the engine generates only."""
        await _abort(context, grpc.StatusCode.UNIMPLEMENTED, "this engine generates text only")

    async def FlushCache(
        self, request: common.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common.FlushCacheResponse:
        """Decline to flush the cache: shared K/V are kept by account, and are evicted when memory is needed."""
        return common.FlushCacheResponse(success=False, message="shared prompts are kept until memory is needed")


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, says: str) -> NoReturn:
    """End a call with an error. A gateway shows the text `says` to its client."""
    await context.abort(code, says[:500])
    raise AssertionError("abort raises")
