"""Compute the times of steps on the stages of a lane: tables for the closed forms, and times of single steps.

A step has n tokens, samples k of them, and has r requests. A stage with d decoder layers and e encoder layers takes

    d (rest(n) + attention) + e (encoder's rest + attention) + embedding(n) + head(k) + overhead(r)

with the tables of the stage's tensor-parallel degree. The embedding is on the first stage, the head on the last stage.
The last layer computes only keys and values for all n tokens (`last`), and its work for the k sampled tokens counts as
head. Every stage has the overhead, since each worker assembles its own batch. In an encoder-decoder, prompts go through
the encoder layers, and in the same step their start tokens go through the decoder. Source: ExeGPT sec. 3, 6.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from xgpt.core.errors import InputError
from xgpt.core.schema import BYTES_PER_ELEMENT, EngineSpec, ModelSpec, PlanDraft, Precision, Profile, StageLane
from xsimulator.costs.curves import MOST_KNOWN, Array, Degrees, Grid, GroupTables, Line, Table
from xsimulator.costs.speculating import speculating
from xsimulator.lengths import Lengths
from xsimulator.stages import Lane, StageShape, is_grouped, lane_of

T = TypeVar("T")


class LaneCost:
    """Step times of the stages of one lane.

    Stages with equal costs form one kind. Arrays have an entry for each kind.

    Args:
        engine: the engine that runs the steps. None means an engine about which only the profile is known.
        is_floor: whether the tables of `profile` are lower bounds (`xscheduler.lower_tables`).

    Attributes:
        mixing: extra time of a mixed step, as a share of the time of a step with only its decodes.
        apart: whether prompts are encoded in separate steps, before the decode step.
        is_grouped: whether each stage runs steps of its own (`xsimulator.stages.is_grouped`).

    Raises:
        InputError: `profile` lacks a tensor-parallel degree or the transfer times between stages.
    """

    def __init__(
        self,
        spec: ModelSpec,
        profile: Profile,
        stages: Lane,
        degrees: Degrees | None = None,
        engine: EngineSpec | None = None,
        *,
        is_floor: bool = False,
    ) -> None:
        self.is_grouped = is_grouped(stages)
        is_pipeline = len(stages) > 1 and not self.is_grouped
        if is_pipeline and (profile.hop is None or (any(s.far for s in stages) and profile.inter_node_hop is None)):
            says = (
                "a pipeline needs times of transfers, which this profile lacks: plan with one stage, or profile again"
            )
            raise InputError("profile", profile.model.name, says)
        self.spec = spec
        self.profile = profile
        self.stages = stages
        self.mixing = 0.0 if engine is None else engine.mixing
        self.is_floor = is_floor
        self.ahead = engine is not None and engine.schedules_ahead and len(stages) == 1
        self.apart = engine is not None and not engine.mixes
        self.whole_prompts = engine is not None and not engine.cuts_prompts
        self.token_budget = None if engine is None else engine.token_budget
        each = [(stage, is_pipeline and i > 0) for i, stage in enumerate(stages)]
        self.kinds: tuple[tuple[StageShape, bool], ...] = tuple(dict.fromkeys(each))
        order = {kind: number for number, kind in enumerate(self.kinds)}
        self.kind_of = np.asarray([order[kind] for kind in each])
        self.counts = np.bincount(self.kind_of).astype(float)
        tables = Degrees(profile) if degrees is None else degrees
        self._degrees = {stage.group: tables[stage.group] for stage, _ in self.kinds}
        self._embedding = Line.of(profile.embedding)
        self._overhead = Line.of(profile.overhead)
        if engine is not None and not engine.schedules_ahead and profile.source != "measured":
            self._overhead += Line([1, 2], [engine.waiting_step_s + n * engine.waiting_request_s for n in (1, 2)])
        self._near = None if profile.hop is None else Line.of(profile.hop)
        self._far = None if profile.inter_node_hop is None else Line.of(profile.inter_node_hop)
        self.has_encoder = bool(profile.encoder_layers)
        self._hops_ns: dict[int, list[int]] = {}

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def tables_of(self, stage: StageShape) -> GroupTables:
        return self._degrees[stage.group]

    @cached_property
    def tokens(self) -> Table:
        """Seconds of the layers without attention, and of the embedding, by number of decoder tokens. # [kinds]"""
        lines = []
        for stage, _ in self.kinds:
            line = self._degrees[stage.group].layers(stage.decoder_layers, with_last=stage.heads)
            lines.append(line + self._embedding if stage.embeds else line)
        return Table.of(lines)

    @cached_property
    def samples(self) -> Table:
        """Seconds of the output head, by number of sampled tokens. # [kinds]"""
        return Table.of([self._degrees[stage.group].head.scaled(float(stage.heads)) for stage, _ in self.kinds])

    @cached_property
    def overhead(self) -> Table:
        """Seconds of the engine's loop, by number of requests in the step. # [kinds]"""
        return Table(self._overhead.points, [self._overhead.values] * len(self.kinds))

    @cached_property
    def hop(self) -> Table:
        """Seconds of the hop from the previous stage, by number of tokens. # [kinds]"""
        zero = Line([1, 2], [0.0, 0.0])
        lines = []
        for stage, follows in self.kinds:
            line = self._far if stage.far else self._near
            lines.append(line if follows and line is not None else zero)
        return Table.of(lines)

    def decode(self, contexts: Array, inputs: float) -> Table:
        """Return the seconds of steps that only decode, by number of requests. # [kinds, contexts]

        Args:
            contexts: mean number of tokens to which each request attends (for an encoder-decoder, output tokens only).
        """
        parts = [self.tokens.points, self.samples.points, self.overhead.points]
        points = np.unique(np.concatenate([*parts, *(degree.decode.batches for degree in self._degrees.values())]))
        base = self.tokens(points) + self.samples(points) + self.overhead(points)  # [kinds, points]
        attention = self._attention(points, np.asarray(contexts, float)[:, None], inputs)
        return Table(points, [base_s + attention_s for base_s, attention_s in zip(base, attention, strict=True)])

    def contexts_between(self, first: float, last: float) -> Array:
        """Return `first`, `last`, and the points of the decode attention tables that lie between them."""
        inside = np.concatenate([degree.decode.lengths for degree in self._degrees.values()])
        return np.unique(np.concatenate([[first, last], inside[(inside > first) & (inside < last)]]))

    def decode_attention(self, context: float, inputs: float) -> Table:
        """Return the seconds of attention of a decode batch, by number of requests. # [kinds]"""
        points = np.unique(np.concatenate([degree.decode.batches for degree in self._degrees.values()]))
        return Table(points, self._attention(points, context, inputs))

    def _attention(self, requests: Array, contexts: float | Array, inputs: float) -> list[Array]:
        def of_layer(degree: GroupTables) -> Array:
            seconds = degree.decode(requests, contexts)
            return seconds if degree.cross is None else seconds + degree.cross(requests, inputs)

        return [stage.decoder_layers * seconds for stage, seconds in self._by_kind(of_layer)]

    def _by_kind(self, of_degree: Callable[[GroupTables], T]) -> list[tuple[StageShape, T]]:
        found = {group: of_degree(degree) for group, degree in self._degrees.items()}
        return [(stage, found[stage.group]) for stage, _ in self.kinds]

    def cross_kv(self, tokens: Array) -> Array:
        """Return the seconds to compute keys and values from an encoder's output. # [...] -> [kinds, ...]"""

        def of_layer(degree: GroupTables) -> Array:
            assert degree.cross_kv is not None
            return degree.cross_kv(tokens)

        return np.asarray([stage.decoder_layers * seconds for stage, seconds in self._by_kind(of_layer)])

    def prompts(self, lengths: Lengths) -> Table:
        """Return the seconds of encoding, without those in `tokens`, `samples` and `overhead`, by prompts. # [kinds]"""
        tokens, degrees = lengths.mean_input, self._degrees.values()
        points = [degree.encode.batches for degree in degrees]
        if self.has_encoder:
            points += [degree.encoder_rest.points / tokens for degree in degrees]
            points += [degree.encoder.batches for degree in degrees]
        x = np.unique(np.concatenate([[0.0], *points]))

        def of_layers(degree: GroupTables) -> tuple[Array | float, Array]:
            attention = degree.of_prompts(lengths)(x)
            if degree.cross is None or degree.cross_kv is None:
                return 0.0, attention
            return degree.encoder_rest(x * tokens) + attention, degree.cross_kv(x * tokens) + degree.cross(x, tokens)

        values = []
        for stage, (of_encoder, of_decoder) in self._by_kind(of_layers):
            seconds = stage.encoder_layers * of_encoder
            if self.has_encoder and stage.embeds:
                seconds = seconds + self._embedding(x * tokens)
            values.append(seconds + stage.decoder_layers * of_decoder)
        return Table(x, values)

    def encode(self, lengths: Lengths) -> Table:
        """Return the seconds of steps that only encode whole prompts, by number of prompts. # [kinds]"""
        prompts = self.prompts(lengths)
        each = 1.0 if self.has_encoder else lengths.mean_input
        others = [self.tokens.points / each, self.samples.points, self.overhead.points]
        x = np.unique(np.concatenate([prompts.points, *others]))
        return Table(x, prompts(x) + self.tokens(x * each) + self.samples(x) + self.overhead(x))

    # Single steps ----------------------------------------------------------------------------------------------

    def step(self, step: StepCounts) -> list[float]:
        by_kind = self._by_kind_of(step)
        if len(by_kind) == self.num_stages:
            return by_kind
        return [by_kind[k] for k in self._kinds_in_order]

    def step_ns(self, step: StepCounts) -> list[int]:
        by_kind = [max(1, round(seconds * 1e9)) for seconds in self._by_kind_of(step)]
        if len(by_kind) == self.num_stages:
            return by_kind
        return [by_kind[k] for k in self._kinds_in_order]

    def _by_kind_of(self, step: StepCounts) -> list[float]:
        if self.has_encoder or step.encode:
            return [sum(parts) for parts in self._parts_by_kind(step)]
        return [cost(step.decodes, step.context) for cost in self._decoding]

    def parts(self, step: StepCounts) -> list[StepParts]:
        by_kind = self._parts_by_kind(step)
        return [by_kind[k] for k in self._kinds_in_order]

    def _parts_by_kind(self, step: StepCounts) -> list[StepParts]:
        if self.has_encoder:
            return [self._parts_with_encoder(stage, step) for stage, _ in self.kinds]
        # A layer takes the same time on all stages with the same degree, so it is computed once for each degree.
        decodes, num_tokens = step.decodes, step.num_tokens
        context = step.context / decodes if decodes else 0.0
        layers = {
            group: (
                degree.rest.at(num_tokens),
                degree.last.at(num_tokens),
                _ragged(degree.encode, step.encode) if step.encode else 0.0,
                degree.decode.at(decodes, context) if decodes else 0.0,
                degree.head.at(step.sampled),
            )
            for group, degree in self._degrees.items()
        }
        embedding_s = self._embedding.at(num_tokens)
        overhead_s = self._overhead.at(decodes + len(step.encode))
        found = []
        for stage, _ in self.kinds:
            (rest_s, last_s, encode_s, decode_s, head_s), number = layers[stage.group], stage.decoder_layers
            tokens_s = number * rest_s + (last_s - rest_s if stage.heads else 0.0)
            tokens_s += embedding_s if stage.embeds else 0.0
            found.append(
                StepParts(tokens_s, number * encode_s, number * decode_s, head_s if stage.heads else 0.0, overhead_s)
            )
        if self.mixing and step.encode and decodes:
            alone = [cost(decodes, step.context) for cost in self._decoding]
            found = [
                parts._replace(decode_attention=parts.decode_attention + self.mixing * seconds)
                for parts, seconds in zip(found, alone, strict=True)
            ]
        return found

    @cached_property
    def _decoding(self) -> list[_DecodeSteps]:
        return [_DecodeSteps(self, kind) for kind in range(len(self.kinds))]

    @cached_property
    def _kinds_in_order(self) -> list[int]:
        order: list[int] = self.kind_of.tolist()
        return order

    def hops(self, num_tokens: int) -> list[float]:
        """Return for each stage the seconds of the hop from the previous stage, in a step of `num_tokens`."""
        if self.num_stages == 1:
            return [0.0]
        lines = (self._near, self._far)
        seconds = {far: line.at(num_tokens) for far, line in enumerate(lines) if line is not None}
        return [0.0, *(seconds[int(stage.far)] for stage in self.stages[1:])]

    def hops_ns(self, num_tokens: int) -> list[int]:
        """Return `hops` in rounded nanoseconds. Results are cached, since steps have few different sizes."""
        found = self._hops_ns.get(num_tokens)
        if found is None:
            found = [round(seconds * 1e9) for seconds in self.hops(num_tokens)]
            if len(self._hops_ns) < MOST_KNOWN:
                self._hops_ns[num_tokens] = found
        return found

    def _parts_with_encoder(self, stage: StageShape, step: StepCounts) -> StepParts:
        degree, layers, decodes = self._degrees[stage.group], stage.decoder_layers, step.decodes
        assert degree.cross is not None and degree.cross_kv is not None
        prompt_tokens = step.num_tokens - decodes
        decoder_tokens = decodes + (sum(done for _, _, done in step.encode) if layers else 0)
        tokens_s = layers * degree.cross_kv.at(prompt_tokens + step.joining_tokens)
        encode_s = decode_s = 0.0
        if decoder_tokens:
            decode_s += layers * degree.cross.at(decoder_tokens, step.mean_input)
        if step.encode:
            tokens_s += stage.encoder_layers * degree.encoder_rest.at(prompt_tokens)
            encode_s += stage.encoder_layers * _ragged(degree.encoder, step.encode)
        tokens_s += layers * degree.rest.at(decoder_tokens)
        if stage.embeds:
            tokens_s += self._embedding.at(decoder_tokens + prompt_tokens)
        if decodes:
            decode_s += layers * degree.decode.at(decodes, step.context / decodes)
        head_s = degree.head.at(step.sampled) if stage.heads else 0.0
        return StepParts(tokens_s, encode_s, decode_s, head_s, self._overhead.at(decodes + len(step.encode)))


def lanes_of(plan: PlanDraft, profile: Profile) -> dict[StageLane, LaneCost]:
    """Return the step costs of each lane of a plan, with the plan's slowdown."""
    found = {}
    profile = speculating(profile.slowed(plan.profile.slowdown), plan.model, plan.speculation)
    for name in dict.fromkeys(stage.lane for stage in plan.stages):
        stages = [stage for stage in plan.stages if stage.lane == name]
        heads = name != "encode" or not plan.model.is_encoder_decoder
        found[name] = LaneCost(plan.model, profile, lane_of(stages, plan.cluster, heads=heads), engine=plan.engine)
    return found


class _DecodeSteps:
    def __init__(self, lane: LaneCost, kind: int) -> None:
        self._lane, self._kind = lane, kind
        self._rows: dict[int, tuple[float, list[float], list[float]]] = {}

    def __call__(self, decodes: int, context: float) -> float:
        row = self._rows.get(decodes)
        if row is None:
            row = self._rows[decodes] = self._row(decodes)
        beside, lengths, seconds = row
        length = context / decodes
        j = bisect_right(lengths, length, 1, len(lengths) - 1) - 1
        start, end = seconds[j], seconds[j + 1]
        return beside + max(start + (length - lengths[j]) / (lengths[j + 1] - lengths[j]) * (end - start), 0.0)

    def _row(self, decodes: int) -> tuple[float, list[float], list[float]]:
        stage, _ = self._lane.kinds[self._kind]
        attention = self._lane._degrees[stage.group].decode
        lengths = attention.lengths.tolist()
        seconds = [stage.decoder_layers * attention.at(decodes, length) for length in lengths]
        counts = StepCounts((), decodes, decodes * lengths[0], decodes, decodes)
        at_first = sum(self._lane._parts_by_kind(counts)[self._kind])
        return at_first - seconds[0], lengths, seconds


def _ragged(grid: Grid, pieces: Sequence[tuple[int, int, int]]) -> float:
    """Return the seconds of attention for prompt pieces [start, end)."""
    count, at = len(pieces), grid.at
    seconds = 0.0
    for start, end, _ in pieces:
        seconds += at(count, end)
        if start:
            seconds -= at(count, start)
    return seconds / count


class StepParts(NamedTuple):
    """Seconds of each part of a step on one stage.

    Attributes:
        decode_attention: attention of decodes, with cross-attention and the cost of mixing.
    """

    tokens: float
    encode_attention: float
    decode_attention: float
    head: float
    overhead: float


class StepCounts(NamedTuple):
    """The counts on which a step's cost depends.

    Attributes:
        context: number of tokens to which the decoding requests attend, summed over requests (for an encoder-decoder,
            output tokens only).
        mean_input: for cross-attention, the mean input length of the requests that go through the decoder.
        joining_tokens: number of input tokens of requests that another lane encoded and that are in their first decode
            step.
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
        """Return counts of a step of a decoder-only model. The step samples for each decode and prompt that ends."""
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


class TransferCost:
    """Seconds for moving a batch's K/V to the decode lane, by number of prompt tokens.

    vLLM, which runs groups, sends K/V from device to device, as fast as hidden states in a pipeline.
    """

    def __init__(self, encode: LaneCost, decode: LaneCost) -> None:
        spec, profile = encode.spec, encode.profile
        assert profile.kv_transfer is not None
        line = Line.of(profile.kv_transfer)
        if encode.is_grouped and profile.hop is not None:
            precision = Precision.of(profile.dtype, "gpu", kv_dtype=profile.kv_dtype)
            hidden_bytes = spec.hidden_size * BYTES_PER_ELEMENT[precision.state]
            line = Line.of(profile.hop)
            line = Line(line.points * (hidden_bytes / spec.kv_bytes_per_token(precision.kv)), line.values)
        if encode.has_encoder:
            share = spec.hidden_size / (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim)
        else:
            stages = (*encode.stages, *decode.stages)
            share = max(stage.decoder_layers / stage.tp for stage in stages) / spec.num_layers
        self.line = Line(line.points / share, line.values)
        """Seconds, by number of tokens of all prompts in the batch."""
        self.occupies = encode.profile.num_threads is not None
        """Whether a transfer takes the devices' compute time. It does on CPUs, since they have no copy engine."""

    def at(self, tokens: float) -> float:
        return self.line.at(tokens)
