"""Define the counts on which a step's cost depends, and the parts of that cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StepParts(NamedTuple):
    """Seconds of each part of a step on one stage.

    Attributes:
        tokens: layers without attention, and embedding.
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
        encode: (start, end, 1 if the piece ends its prompt else 0) of each prompt piece.
        decodes: number of requests that decode.
        context: number of tokens to which the decoding requests attend, summed over requests (for an encoder-decoder,
            output tokens only).
        sampled: number of rows that go through the output head.
        num_tokens: number of prompt tokens, plus one for each decode.
        mean_input: for cross-attention, the mean input length of the requests that go through the decoder.
        joining_tokens: number of input tokens of requests in their first decode step that another lane encoded.
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
        """Return the counts of a step of a decoder-only model, which samples for each decode and each prompt that ends.

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
