"""Turn the engine's tokens into the messages of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from xrunner.generation import Logprobs, Token
from xrunner.server.submission import Submitted


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
        """Return the scores of the prompt's tokens. The first token has none."""
        if self._scores is None:
            return None
        values = [pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=score.chosen) for score in self._scores)]
        top = [pb.TopLogProbs(), *map(_top, self._scores)] if self._sampling.prompt_logprobs else None
        return pb.InputLogProbs(token_logprobs=values, token_ids=self._prompt, top_logprobs=top)


def _top(scores: Logprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[value for _, value in scores.top], token_ids=[token for token, _ in scores.top])
