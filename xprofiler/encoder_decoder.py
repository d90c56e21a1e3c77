"""Measure step times of an encoder-decoder: encoder layers, and decoder layers with their cross-attention.

A decoder layer's `rest` is the time of a decode step minus self- and cross-attention, embedding and head, per layer. A
step that encodes also runs the decoder on its start tokens. An encoder layer's `rest` is the time of such a step minus
embedding, head, attention, the decoder's time, and the time to compute the prompts' keys and values, per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from xgpt.core.schema import CrossTimes, EncoderLayerTimes, LayerTimes, ModelSpec, Surface
from xprofiler.bench import (
    BATCHES,
    BLOCK_SIZE,
    CONTEXTS,
    ENCODE_BATCHES,
    MAX_CACHED_TOKENS,
    MAX_STEP_TOKENS,
    PROMPTS,
    STEP_PROMPT,
    TOKENS,
    Bench,
    Jobs,
    Sizes,
    Timings,
    curve,
)
from xrunner.attention import Batch, Sequences, make_batch
from xrunner.kv_cache import write_kv
from xrunner.models import EncoderDecoderModel
from xrunner.models.encoder_decoder import CrossLayer, own_tokens, recalling
from xrunner.models.layers import UNSCALED
from xrunner.worker import Worker

DECODER_TOKENS = tuple(n for n in TOKENS if n <= max(BATCHES))
LEAST_PROMPT = 8


@dataclass(frozen=True)
class EncoderDecoderPoints:
    prompts: list[int]
    contexts: list[int]
    decodes: dict[int, tuple[int, int]]
    encodes: dict[int, tuple[int, int]]
    encode: list[tuple[int, int]]
    own: list[tuple[int, int]]
    cross: list[tuple[int, int]]

    @classmethod
    def of(cls, spec: ModelSpec) -> EncoderDecoderPoints:
        prompts = [n for n in PROMPTS if n <= spec.max_context]
        contexts = [n for n in CONTEXTS if n <= spec.max_context]
        context = contexts[min(1, len(contexts) - 1)]
        prompt = min(STEP_PROMPT, 2 ** (spec.max_context.bit_length() - 1))
        decodes = dict.fromkeys(DECODER_TOKENS, (context, context))
        encodes = {n: (max(1, n // prompt), min(n, prompt)) for n in TOKENS}
        encode = {(b, n) for b in ENCODE_BATCHES for n in prompts if b * n <= MAX_STEP_TOKENS}
        cached = {(b, n) for b in BATCHES for n in contexts if b * n <= MAX_CACHED_TOKENS}
        steps = {(n, context) for n in decodes}
        return cls(
            prompts,
            contexts,
            decodes,
            encodes,
            sorted(encode | set(encodes.values())),
            sorted(cached | steps),
            sorted(cached | steps | set(encodes.values())),
        )


class CrossBench(Bench):
    typical_sequences = ((128, 50),) * 8 + ((128, 0),)
    short_sequences = ((128, 50),)

    def run_products(self) -> None:
        self.head(len(self.typical_sequences))

    def run_attention(self) -> None:
        prompt, own = self.short_sequences[0]
        self.encoder_attention(1, prompt)
        self.own_attention(1, own)
        self.cross_attention(1, prompt)

    def jobs(self) -> Jobs:
        points = EncoderDecoderPoints.of(self.spec)
        jobs: Jobs = {}
        for n, (prompt, own_length) in points.decodes.items():
            jobs["decode step", n] = partial(self.step, [(prompt, own_length - 1)] * n)
        for n, (batch, prompt) in points.encodes.items():
            jobs["encode step", n] = partial(self.step, [(prompt, 0)] * batch)
            jobs["keys and values", n] = partial(self.keys_and_values, n)
            jobs["embedding", n + batch] = partial(self.embedding, n + batch)
        for n in TOKENS:
            jobs["embedding", n] = partial(self.embedding, n)
        for n in sorted({*BATCHES, *points.decodes, *(batch for batch, _ in points.encodes.values())}):
            jobs["head", n] = partial(self.head, n)
        for n in BATCHES:
            jobs["overhead", n] = partial(self.overhead, n)
        for b, n in points.encode:
            jobs["encode attention", b, n] = partial(self.encoder_attention, b, n)
        for b, n in points.own:
            jobs["own attention", b, n] = partial(self.own_attention, b, n)
        for b, n in points.cross:
            jobs["cross attention", b, n] = partial(self.cross_attention, b, n)
        return jobs

    @property
    def model(self) -> EncoderDecoderModel:
        assert isinstance(self.worker.model, EncoderDecoderModel)
        return self.worker.model

    # Points, each in seconds -------------------------------------------------------------------------------------

    def embedding(self, num_tokens: int) -> float:
        tokens = self.batch([(num_tokens, 0)]).token_ids[:num_tokens]
        return self.seconds(lambda: self.model.token_embedding(tokens))

    def encoder_attention(self, num_prompts: int, length: int) -> float:
        layers = self.spec.num_encoder_layers
        q, k, v = self.queries_keys_values(num_prompts * length)
        lengths = torch.full((num_prompts,), length, dtype=torch.int32, device=q.device)

        def run() -> None:
            attend = self.model.encoder_attention(lengths, self.worker.backend, q)
            for _ in range(layers):
                attend(q, k, v, scoring=UNSCALED)

        return self.seconds(run) / layers

    def own_attention(self, num_requests: int, num_own: int) -> float:
        caches, batch = self.worker.cache.layers, self.batch([(LEAST_PROMPT, num_own - 1)] * num_requests)
        q, k, v = self.queries_keys_values(num_requests)

        def run() -> None:
            tokens = own_tokens(batch)
            bias = self.model.own_bias(tokens)
            for cache in caches:
                self.worker.backend.forward(q, k, v, cache, tokens, UNSCALED._replace(bias=bias))

        return self.seconds(run) / len(caches)

    def cross_attention(self, num_requests: int, length: int) -> float:
        caches, batch = self.worker.cache.layers, recalling(self.batch([(length, 1)] * num_requests))
        q, k, v = self.queries_keys_values(num_requests)

        def run() -> None:
            for cache in caches:
                self.worker.backend.forward(q, k[:0], v[:0], cache, batch, UNSCALED)

        return self.seconds(run) / len(caches)

    def keys_and_values(self, num_tokens: int) -> float:
        """Return seconds in which a decoder layer computes and stores keys and values of `num_tokens` prompt tokens."""
        model, caches = self.model, self.worker.cache.layers
        slots = recalling(self.batch([(num_tokens, 0)])).cache_slots
        memory = self.random(num_tokens, self.spec.hidden_size)

        def run() -> None:
            for layer, cache in zip(model.decoder.layers, caches, strict=True):
                assert isinstance(layer, CrossLayer)
                k, v = layer.cross.keys_and_values(memory)
                write_kv(k, v, cache, slots)

        return self.seconds(run) / len(caches)

    def batch(self, sequences: Sizes) -> Batch:
        prompt_len, own_len = np.asarray(sequences, np.int32).T
        query_len = np.where(own_len > 0, 1, prompt_len + 1).astype(np.int32)
        context_len = prompt_len + own_len + 1
        width = -(-int(context_len.max()) // BLOCK_SIZE)
        tables = np.arange(len(sequences) * width, dtype=np.int32).reshape(len(sequences), width)
        return make_batch(
            np.zeros(int(query_len.sum()), np.int64),
            Sequences(query_len, context_len, tables, prompt_len),
            block_size=BLOCK_SIZE,
            num_decodes=int((own_len > 0).sum()),
            device=self.worker.cache.device,
        )


def layers_of(spec: ModelSpec, degree: int, measured: Timings, alone: Timings) -> tuple[LayerTimes, EncoderLayerTimes]:
    """Return the times of a decoder layer and of an encoder layer at one tensor-parallel degree.

    Args:
        alone: times on one device. A profile has only one device's time of the embedding. The group's difference
            from it is included in the layers.
    """
    points = EncoderDecoderPoints.of(spec)

    def rest(step: str, n: int, embedded: int, num_layers: int, beside: float) -> float:
        return max(measured[step, n] - alone["embedding", embedded] - beside, 0.0) / num_layers

    decoder: Timings = {}
    for n, (prompt, own_length) in points.decodes.items():
        attention = measured["own attention", n, own_length] + measured["cross attention", n, prompt]
        beside = measured["head", n] + spec.num_layers * attention
        decoder["rest", n] = rest("decode step", n, n, spec.num_layers, beside)
    encoder: Timings = {}
    for n, (batch, prompt) in points.encodes.items():
        started = decoder["rest", batch] + measured["cross attention", batch, prompt] + measured["keys and values", n]
        attention = measured["encode attention", batch, prompt]
        beside = measured["head", batch] + spec.num_layers * started + spec.num_encoder_layers * attention
        encoder["rest", n] = rest("encode step", n, n + batch, spec.num_encoder_layers, beside)

    def surface(name: str, at: list[tuple[int, int]], batches: tuple[int, ...], lengths: list[int]) -> Surface:
        return Surface.filled({sizes: measured[name, *sizes] for sizes in at}, batches, lengths)

    reading = surface("encode attention", points.encode, ENCODE_BATCHES, points.prompts)
    cross = CrossTimes(
        keys_values=curve(measured, "keys and values", TOKENS),
        attention=surface("cross attention", points.cross, BATCHES, points.contexts),
    )
    layer = LayerTimes(
        tp_degree=degree,
        rest=curve(decoder, "rest", DECODER_TOKENS),
        encode_attention=reading,  # a decoder layer encodes no prompts
        decode_attention=surface("own attention", points.own, BATCHES, points.contexts),
        cross=cross,
        head=None if degree == 1 else curve(measured, "head", BATCHES),
    )
    return layer, EncoderLayerTimes(tp_degree=degree, rest=curve(encoder, "rest", TOKENS), attention=reading)


def bench_of(worker: Worker) -> type[Bench]:
    return CrossBench if worker.model.spec.is_encoder_decoder else Bench
