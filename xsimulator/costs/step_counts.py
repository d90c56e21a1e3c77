"""Define the counts on which a step's cost depends, and the parts of that cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StepParts(NamedTuple):
    """Seconds of a step on a stage, by part.

    Attributes:
        tokens: token-wise work of layers and embedding.
        encode_attention: attention of prompts.
        decode_attention: attention of decodes, with cross-attention and the cost of mixing.
        head: output head and sampling.
        overhead: the engine's loop.
    """

    tokens: float
    encode_attention: float
    decode_attention: float
    head: float
    overhead: float


class StepCounts(NamedTuple):
    """The counts on which a step's cost depends.

    Attributes:
        encode: (start, end, 1 if it ends its prompt else 0) of each prompt piece.
        decodes: requests that decode a token.
        context: number of tokens to which the decoding requests attend, summed over requests (for an encoder-decoder,
            output tokens only).
        sampled: rows that go through the output head.
        num_tokens: prompt tokens, plus one for each decode.
        mean_input: mean input length of the requests that go through the decoder; for cross-attention.
        joining_tokens: input tokens of requests in their first decode step, if another lane encoded them.
    """

    encode: Sequence[tuple[int, int, int]]
    decodes: int
    context: float
    sampled: int
    num_tokens: int
    mean_input: float = 0.0
    joining_tokens: int = 0

    @classmethod
    def of(cls, encode: Sequence[tuple[int, int, int]], contexts: Sequence[int]) -> StepCounts:
        """Return the counts of a decoder-only model's step, which samples for each decode and each ended prompt.

        Args:
            contexts: number of tokens to which each decoding request attends.
        """
        sampled = len(contexts) + sum(done for _, _, done in encode)
        num_tokens = len(contexts) + sum(end - start for start, end, _ in encode)
        return cls(encode, len(contexts), sum(contexts), sampled, num_tokens)

    @classmethod
    def of_requests(
        cls, encode: Sequence[tuple[int, int, int]], decodes: Sequence[tuple[int, int]], *, has_encoder: bool
    ) -> StepCounts:
        """Return the counts of a step on a lane that both encodes and decodes.

        Args:
            decodes: (input tokens, output tokens so far) of each decoding request.
        """
        counts = cls.of(encode, [sum(tokens) for tokens in decodes])
        if not has_encoder:
            return counts
        inputs = [tokens for tokens, _ in decodes] + [end for _, end, done in encode if done]
        own_tokens = sum(1 + generated for _, generated in decodes)
        return counts._replace(context=own_tokens, mean_input=sum(inputs) / max(len(inputs), 1))
