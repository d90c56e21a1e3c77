"""Compute upper bounds on the throughput of thousands of placements in one call. A bound covers all settings.

Let m be the mean number of requests that an iteration of a micro-batch decodes, and D the number of decode iterations
of a request. By Jensen's inequality, an iteration occupies stage j on average for at least decode_j(m), the largest
convex function below the stage's times. If every iteration decodes m requests, as in the closed form of two lanes,
decode_j(m) is the stage's time. An iteration also encodes m / E[D] prompts on average. Each stage processes M
micro-batches one after the other, and each micro-batch goes through all stages before its next iteration. So an
iteration of all micro-batches takes at least

    t(m) = max( M max_j (decode_j(m) + m encode_j / E[D]),  sum_j decode_j(m) + hops )

If encode and decode steps alternate (rra, static), M encode steps must also go through the pipeline:

    t(m) >= decode_1(m) + m / E[D] (sum_j encode_j + (M - 1) max_j encode_j)

By Little's law the throughput is at most M m / (E[D] t(m)). Two constraints limit m from above. A request of D decode
iterations takes at least D t(m), and this time must keep the latency bound. M m requests must fit in memory. Source:
ExeGPT sec. 4-6, and the closed forms in xsimulator.forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xgpt.core.schema import Constraint, Curve, ModelSpec, Profile
from xscheduler.placement import Placement
from xsimulator.costs.curves import Grid, Line
from xsimulator.forecast import CHOICES
from xsimulator.forecast.placements import BoundTerms, Iterations, LeastSteps
from xsimulator.lengths import Lengths
from xsimulator.stages import Lane, StageShape, is_grouped

Array = npt.NDArray[np.float64]

MANY = 1e9
MAX_KINDS = 5
"""Largest number of distinct kinds of stages in a lane for which `max_j` is computed."""
BELOW_ONE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85)
"""Values of m below 1. The mean is below 1 if a phase continues after its last request has finished."""


class _Stages(NamedTuple):
    """`PlacementBounds` stacks the times of all placements into a `LeastSteps`. # [kinds, m] unless stated"""

    decode_s: Array
    mixed_s: Array
    """A step that also encodes m / E[D] prompts, as many as are needed to keep the decode batch at m."""
    met_s: Array
    """A mixed step in which a given request decodes. Its prompts replace only the other m - 1 requests."""
    encode_s: Array
    passing_s: Array
    """The sum of `decode_s` over all stages, plus the hops between them. # [m]"""
    steady_s: Array
    """As `decode_s`, if every step decodes m requests. `decode_s` assumes only that steps decode m requests on
    average.
    """
    steady_passing_s: Array
    """As `passing_s`, if every step decodes m requests. # [m]"""
    first_s: Array
    """As `decode_s`, for the first stage, but without its embedding. # [m]"""
    through_s: float
    alone_s: float


class PlacementBounds:
    """Bounds for the placements of one problem, under any constraint."""

    def __init__(
        self, model: ModelSpec, profile: Profile, lengths: Lengths, quantile_decodes: int, max_batch: int
    ) -> None:
        self._model = model
        self._profile = profile
        self._lengths = lengths
        self._decodes = max(quantile_decodes, 1)
        self._mean_decodes = max(lengths.mean_decodes, 1e-9)
        layer = profile.layers[0]
        most = float(max_batch)
        tokens = np.asarray(layer.rest.points, float)
        points = np.concatenate([tokens, tokens / self._tokens_per_decode, layer.decode_attention.batches])
        self.batches: Array = np.unique(
            np.concatenate([BELOW_ONE, [1.0], points[(points > 1) & (points < most)], [most]])
        )
        self._iterations = Iterations(lengths, self.batches, self._decodes)
        self._lanes: dict[Lane, _Stages] = {}
        self._degrees: dict[tuple[tuple[int, int], bool], _Degree] = {}
        """Times of a layer by group. The key's second part is True for the model's last layer if that layer takes a
        different time.
        """
        self._of_stages: dict[StageShape, _Degree] = {}

    @property
    def _tokens_per_decode(self) -> float:
        """Mean number of a request's tokens, its prompt included, that go through the model per decode iteration."""
        return 1 + self._lengths.mean_input / self._mean_decodes

    def of(self, kind: str, placements: Sequence[Placement], capacities: npt.ArrayLike) -> PolicyBounds:
        steps = self._steps(placements)
        replicas = np.asarray([float(placement.replicas) for placement in placements])
        terms = CHOICES[kind].placement_terms(steps)
        return PolicyBounds(steps, terms, replicas, np.asarray(capacities, float), self._mean_decodes)

    def least_latency(self, placements: Sequence[Placement]) -> Array:
        """Return a lower bound, in seconds, on the latency of a request of the quantile's length on each placement."""
        lanes = [(self._stages(placement.encode_lane), self._stages(placement.decode_lane)) for placement in placements]
        return np.asarray([encode.through_s + (self._decodes - 1) * decode.passing_s[0] for encode, decode in lanes])

    def least_prompt(self, placement: Placement) -> float:
        return float(self._stages(placement.encode_lane).encode_s.max())

    def _steps(self, placements: Sequence[Placement]) -> LeastSteps:
        lanes = [self._stages(placement.decode_lane) for placement in placements]
        encode = [
            shape if len(placement.layouts) == 1 else self._stages(placement.encode_lane)
            for shape, placement in zip(lanes, placements, strict=True)
        ]
        parts = [placement.fixed.get("encode_microbatches", placement.microbatches) for placement in placements]
        return LeastSteps(
            iterations=self._iterations,
            microbatches=np.asarray([float(placement.microbatches) for placement in placements]),
            parts=np.asarray(parts, float),
            decode=np.stack([lane.decode_s for lane in lanes]),
            mixed=np.stack([lane.mixed_s for lane in lanes]),
            met=np.stack([lane.met_s for lane in lanes]),
            passing=np.stack([lane.passing_s for lane in lanes])[:, None],
            steady=np.stack([lane.steady_s for lane in lanes]),
            steady_passing=np.stack([lane.steady_passing_s for lane in lanes])[:, None],
            first=np.stack([lane.first_s for lane in lanes]),
            encode_each=np.stack([lane.encode_s for lane in lanes]),
            encode_lane=np.stack([lane.encode_s for lane in encode]),
            through=np.asarray([lane.through_s for lane in lanes]),
            alone=np.asarray([lane.alone_s for lane in encode]),
        )

    def _stages(self, lane: Lane) -> _Stages:
        found = self._lanes.get(lane)  # one lookup, since hashing a lane, which is a long tuple, takes time
        if found is None:
            found = self._lanes[lane] = self._stages_of(lane)
        return found

    def _stages_of(self, lane: Lane) -> _Stages:
        if is_grouped(lane):
            one = self._stages(lane[:1])
            return one._replace(encode_s=one.encode_s / len(lane))
        counts: dict[StageShape, int] = {}
        for stage in lane:
            shape = stage._replace(far=False)
            counts[shape] = counts.get(shape, 0) + 1
        size = len(self.batches)
        decode, mixed, met, steady = (np.zeros((MAX_KINDS, size)) for _ in range(4))
        encode, passing, steady_passing = np.zeros(MAX_KINDS), np.zeros(size), np.zeros(size)
        # The slowest kinds come first. Kinds beyond MAX_KINDS are left out, which only loosens the bound.
        shapes = sorted(counts, key=lambda s: -(s.decoder_layers + s.encoder_layers) / s.tp)
        for k, shape in enumerate(shapes):
            of_stage = self._of_stage(shape)
            seconds = of_stage.decode_s + shape.heads * of_stage.head_s + shape.embeds * self._embedding_s
            passing += counts[shape] * seconds
            every = of_stage.steady_s + shape.heads * of_stage.steady_head_s
            every = every + shape.embeds * self._tokens(self._profile.embedding)
            steady_passing += counts[shape] * every
            if k < MAX_KINDS:
                decode[k], steady[k] = seconds, every
                mixed[k] = of_stage.mixed_s + shape.heads * of_stage.head_s
                met[k] = of_stage.met_s + shape.heads * of_stage.head_s
                encode[k] = of_stage.encode_s + shape.encoder_layers * of_stage.encoder_s
        near = sum(not stage.far for stage in lane[1:])
        for hop_s, hops in zip(self._hops, (near, len(lane) - 1 - near), strict=True):
            if hop_s is not None and hops:
                passing += hops * hop_s
                steady_passing += hops * hop_s
        through = alone = 0.0
        for stage in lane:
            of_stage = self._of_stage(stage)
            through += of_stage.encode_s + stage.encoder_layers * of_stage.encoder_s
            alone += of_stage.alone_s + stage.encoder_layers * of_stage.encoder_alone_s
        return _Stages(
            decode_s=decode,
            mixed_s=mixed,
            met_s=met,
            encode_s=encode,
            passing_s=passing,
            steady_s=steady,
            # A running micro-batch has at least one request.
            steady_passing_s=np.interp(np.maximum(self.batches, 1.0), self.batches, steady_passing),
            first_s=self._of_stage(lane[0]).decode_s,
            through_s=through,
            alone_s=alone,
        )

    @cached_property
    def _embedding_s(self) -> Array:
        return self._floor(self._profile.embedding)

    @cached_property
    def _hops(self) -> tuple[Array | None, Array | None]:
        """Seconds of a hop within a node, and between nodes. None means that there are no such links. # [m]"""
        near, far = self._profile.hop, self._profile.inter_node_hop
        return None if near is None else self._floor(near), None if far is None else self._floor(far)

    def _floor(self, curve: Curve) -> Array:
        return _convex_floor(self.batches, self._tokens(curve))

    def _tokens(self, curve: Curve) -> Array:
        seconds: Array = Line.of(curve)(self.batches)
        return seconds

    def _of_stage(self, stage: StageShape) -> _Degree:
        """The times named in `OF_DECODER_LAYERS` are sums over all its decoder layers."""
        if stage not in self._of_stages:
            layer = self._degree(stage.group)
            last = self._degree(stage.group, is_last=stage.heads)
            of_all = {}
            for name in OF_DECODER_LAYERS:
                curve = getattr(layer, name)
                of_all[name] = stage.decoder_layers * curve + (getattr(last, name) - curve)
            self._of_stages[stage] = layer._replace(**of_all)
        return self._of_stages[stage]

    def _degree(self, group: tuple[int, int], *, is_last: bool = False) -> _Degree:
        is_last = is_last and self._profile.layer(*group).last is not None
        if (group, is_last) not in self._degrees:
            self._degrees[group, is_last] = self._degree_of(group, is_last)
        return self._degrees[group, is_last]

    def _degree_of(self, group: tuple[int, int], is_last: bool) -> _Degree:
        profile, lengths, m = self._profile, self._lengths, self.batches
        layer = profile.layer(*group)
        rest = Line.of(layer.last if is_last and layer.last is not None else layer.rest)
        context = lengths.mean_decode_context
        encoder_s = encoder_alone_s = 0.0
        if layer.cross is not None:
            # The encoder's layers encode the prompt, and the decoder reads the encoder's output by cross-attention.
            context -= lengths.mean_input
            encoder = profile.encoder_layer(group[0])
            encoder_s = _least_of_a_prompt(Line.of(encoder.rest), Grid(encoder.attention), lengths)
            encoder_alone_s = _alone(Line.of(encoder.rest), Grid(encoder.attention), lengths)
            encode_s = alone_s = lengths.mean_input * float(Line.of(layer.cross.keys_values).least_per_unit(MANY))
            prompt_tokens, prompt_s = 0.0, encode_s
        else:
            encode_s = _least_of_a_prompt(rest, Grid(layer.encode_attention), lengths)
            alone_s = _alone(rest, Grid(layer.encode_attention), lengths)
            prompt_tokens = lengths.mean_input
            prompt_s = _least_attention(Grid(layer.encode_attention), lengths)
        attentions = [Grid(layer.decode_attention)(m, context)]
        if layer.cross is not None:
            attentions.append(Grid(layer.cross.attention)(m, lengths.mean_input))
        attention = sum(_convex_floor(m, seconds) for seconds in attentions)

        def steps(prompts: Array) -> Array:
            tokens = m + prompts * prompt_tokens
            return _convex_floor(tokens, rest(tokens)) + attention + prompts * prompt_s

        prompts = m / self._mean_decodes
        return _Degree(
            decode_s=steps(np.zeros_like(m)),
            steady_s=rest(m) + sum(attentions),
            steady_head_s=self._tokens(profile.head_of(group[0])),
            mixed_s=steps(prompts),
            met_s=steps(np.maximum(m - 1, 0.0) / self._mean_decodes),
            head_s=self._floor(profile.head_of(group[0])),
            encode_s=encode_s,
            encoder_s=encoder_s,
            alone_s=alone_s,
            encoder_alone_s=encoder_alone_s,
        )


@dataclass(frozen=True)
class PolicyBounds:
    steps: LeastSteps
    terms: BoundTerms
    replicas: Array
    capacities: Array
    mean_decodes: float

    def under(self, constraint: Constraint) -> Array:
        """Return, for each placement, an upper bound on requests a second under all settings, all replicas together."""
        steps, terms, m = self.steps, self.terms, self.steps.iterations.batches
        size, tpot_s = len(self.replicas), (constraint.tpot_s or np.inf) / (1 + constraint.headroom)
        left_s = (constraint.allowed_latency_s - terms.before_s) / steps.iterations.decodes * np.ones(size)
        # The largest m that memory, the latency bound and the bound on ITL allow, or -1 if there is none.
        most = np.minimum(self.capacities / steps.microbatches, m[-1])
        most = np.minimum(most, self._crossing(self._met, left_s).min(axis=1))
        if terms.at_least_one:
            most = np.where((most >= 0) & (most < 1), 1.0, most)
        most = np.minimum(most, self._crossing(self._gaps, np.full(size, tpot_s)).min(axis=1))
        best = self._highest(self._working, most, steps.microbatches, self._busy).min(axis=1)
        best = np.minimum(best, terms.most_rps)
        return np.where(most >= 0, best * self.replicas, 0.0)

    @cached_property
    def _busy(self) -> Array:
        return self.terms.busy * np.ones_like(self.steps.iterations.batches)

    @cached_property
    def _met(self) -> Array:
        return np.concatenate(self.terms.met, axis=1)

    @cached_property
    def _working(self) -> Array:
        return np.concatenate(self.terms.working, axis=1)

    @cached_property
    def _gaps(self) -> Array:
        steps = self.steps
        return np.concatenate([steps.each * steps.decode, steps.passing], axis=1) * self._busy

    def _highest(self, seconds: Array, most: Array, micro: Array, busy: Array) -> Array:
        """Between grid points, times are linear and throughput is monotone. So the maximum is at a grid point or at
        `most`.
        """
        m = self.steps.iterations.batches
        index = np.clip(np.searchsorted(m, most, side="right") - 1, 0, len(m) - 2)
        rows = np.arange(len(most))
        share = np.clip((most - m[index]) / (m[index + 1] - m[index]), 0.0, 1.0)[:, None]
        at_end_s = seconds[rows, :, index] * (1 - share) + seconds[rows, :, index + 1] * share
        least = np.minimum(busy[index], busy[index + 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            at_end = (micro * np.maximum(most, m[0]) / least)[:, None] / (self.mean_decodes * at_end_s)
            throughput = micro[:, None, None] * m / busy / (self.mean_decodes * seconds)
        inside = np.where(m <= most[:, None, None], throughput, 0.0).max(axis=2)
        # Padding stages take no time, so they give no bound.
        return np.where(at_end_s > 0, np.maximum(inside, at_end), np.inf)

    def _crossing(self, seconds: Array, limit_s: Array) -> Array:
        m = self.steps.iterations.batches
        count = (seconds <= limit_s[:, None, None]).sum(axis=2)  # times rise with m
        index = np.clip(count - 1, 0, len(m) - 2)
        start = np.take_along_axis(seconds, index[:, :, None], axis=2)[:, :, 0]
        end = np.take_along_axis(seconds, index[:, :, None] + 1, axis=2)[:, :, 0]
        share = np.clip((limit_s[:, None] - start) / np.where(end > start, end - start, 1.0), 0.0, 1.0)
        found = m[index] + share * (m[index + 1] - m[index])
        return np.where(count == 0, -1.0, np.where(count == len(m), m[-1], found))


class _Degree(NamedTuple):
    """Arrays have an entry for each m. Single numbers are for one prompt."""

    decode_s: Array
    steady_s: Array
    """As `decode_s`, if every step decodes m requests. `decode_s` assumes only that steps decode m requests on
    average.
    """
    steady_head_s: Array
    mixed_s: Array
    met_s: Array
    head_s: Array
    encode_s: float
    encoder_s: float
    alone_s: float
    """The time of a step that encodes a single prompt. `encode_s` is one prompt's share of the largest step."""
    encoder_alone_s: float


OF_DECODER_LAYERS = ("decode_s", "steady_s", "mixed_s", "met_s", "encode_s", "alone_s")


def _convex_floor(x: Array, y: Array) -> Array:
    """Return the largest function below the points that is convex for x >= 1 and constant for x < 1."""
    first = int(np.searchsorted(x, 1.0))
    hull: list[int] = []
    for i in range(first, len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return np.interp(x, x[hull], y[hull])


def _least_of_a_prompt(rest: Line, attention: Grid, lengths: Lengths) -> float:
    """Return the least seconds of one prompt in a layer. A prompt takes least time as a part of the largest step."""
    return lengths.mean_input * float(rest.least_per_unit(MANY)) + _least_attention(attention, lengths)


def _alone(rest: Line, attention: Grid, lengths: Lengths) -> float:
    one = np.ones_like(lengths.inputs, dtype=float)
    return float(rest(lengths.mean_input)) + float(attention(one, lengths.inputs) @ lengths.input_probabilities)


def _least_attention(attention: Grid, lengths: Lengths) -> float:
    batches = attention.batches[1:]
    seconds = attention(batches[:, None], lengths.inputs) @ lengths.input_probabilities
    return float((seconds / batches).min())
