"""Predict rra. It encodes B_E requests, runs N_D decode iterations, and repeats this."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy as sp

from xgpt.core.policies.rule import ADJUSTMENT
from xgpt.core.schema import PlanDraft, RraSettings
from xgpt.core.workload import decoding_share
from xsimulator.costs.curves import Array
from xsimulator.forecast.base import Columns, Forecast, Ints, Performance, PlacementLimits, Stations, column, stack
from xsimulator.forecast.one_lane import OneLaneModel, PhaseColumns, phases_of
from xsimulator.forecast.pipeline import Pipeline, expected_max_deviate
from xsimulator.forecast.placements import BoundTerms, LeastSteps
from xsimulator.lengths import Lengths, steady_decode_batch

AT_ONCE = 2000
"""Number of candidates that are predicted together, so that their tables stay in the processor's caches."""


class Rra(Forecast[OneLaneModel]):
    settings = RraSettings
    model = OneLaneModel
    line = load = "encode_batch"
    num_curves = 12
    stations = Stations(admits_each_step=False, frees_together=True)
    swaps_between_steps = True

    def values(self, name: str, room: PlacementLimits) -> Ints:
        if name == "decode_iterations":
            return np.arange(1, max(2, room.lengths.max_output))
        return super().values(name, room)

    def line_counts(self, outer: Ints, inner: Ints, room: PlacementLimits) -> Array:
        phases = _phases(room.lengths)
        most = np.floor(room.capacity / np.maximum(phases[np.minimum(outer, len(phases)) - 1], 1.0) + 1e-9)
        return most + room.between - inner[0] + 1

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        iterations = columns["decode_iterations"].astype(int)
        return _predict(model, columns["encode_batch"], iterations, column(columns, "microbatches"))

    def reestimate(self, plan: PlanDraft, model: OneLaneModel, inside: float) -> dict[str, float]:
        settings = plan.policy
        assert isinstance(settings, RraSettings)

        def predicted(encode_batch: float) -> dict[str, float]:
            columns = {"decode_iterations": settings.decode_iterations, "microbatches": settings.microbatches}
            return self.evaluate(model, encode_batch=encode_batch, **columns).at(0)

        # With the planned prompt tokens, a phase encodes this number of requests under the new lengths. If more or
        # fewer requests than planned decode, the rule adjusts its target (ExeGPT sec. 5.2). Then the encode batch
        # settles where the deviation is at the threshold, or at the largest adjustment.
        estimate = plan.estimate
        batch = estimate.encode_tokens / model.lengths.mean_input
        carried_each = max(predicted(batch)["decode_batch"] / batch - model.lengths.survival[0], 1e-9)
        planned = estimate.decode_batch - settings.encode_batch * decoding_share(plan.workload)
        slack = ADJUSTMENT * estimate.decode_batch
        low, high = ((planned + sign * slack) / carried_each for sign in (-1, 1))
        batch = float(np.clip(np.clip(batch, low, high), (1 - ADJUSTMENT) * batch, (1 + ADJUSTMENT) * batch))
        return predicted(min(batch, batch * inside / predicted(batch)["peak_requests"]))

    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        lane = steps.iterations
        turn = steps.first + steps.phase / lane.mean_decodes
        working = [steps.each * (steps.decode + steps.encode / lane.mean_decodes), steps.passing, turn[:, None]]
        # Iterations in which no request decodes take no time.
        return BoundTerms(working, [seconds * lane.busy for seconds in working], busy=lane.busy)


def _predict(model: OneLaneModel, encode_batch: Array, decode_iterations: Ints, microbatches: Array) -> Performance:
    """Return the predictions for candidates.

    The time of a cycle is the longest of several paths through the cycle. This is exact for equal stages.

    Source: ExeGPT sec. 6 with the exact steady state, extended to unequal stages.
    """
    if len(encode_batch) > AT_ONCE:
        parts = [slice(start, start + AT_ONCE) for start in range(0, len(encode_batch), AT_ONCE)]
        found = [(p, _predict(model, encode_batch[p], decode_iterations[p], microbatches[p])) for p in parts]
        return stack(len(encode_batch), found)
    lengths, pipeline = model.lengths, model.pipeline
    phase = phases_of(lengths, model.quantile_decodes)(decode_iterations)
    each = encode_batch / microbatches  # number of requests that a micro-batch encodes
    tokens = each * lengths.mean_input
    encoding = _encoding(model, each)
    rounds = _rounds(model, phase, each, microbatches)
    # Micro-batches have unequal numbers of tokens. The longest one delays the others at every stage but the slowest.
    raggedness = _sd_phase_tokens(lengths, each, phase.stray) / tokens
    spread = expected_max_deviate(microbatches) * raggedness
    cycle, work = _cycle(pipeline, encoding, rounds, microbatches, spread, decode_iterations)

    # A request with output length at the quantile takes whole cycles, less the rounds of its last phase that it does
    # not need. While it runs, at least one request decodes, so none of its phases ends early.
    decodes = model.quantile_decodes
    num_phases = -(-decodes // decode_iterations)
    whole = cycle + (rounds.seconds * phase.weights).sum(axis=1) - rounds.decoding
    unneeded = (rounds.seconds * phase.unneeded).sum(axis=1)
    stages = rounds.stages[..., -1]
    spacing = np.maximum(np.maximum.reduce(stages), rounds.own_way[:, -1] / microbatches)
    queue = (microbatches - 1) / 2 * np.maximum(np.maximum.reduce(encoding.stages) - spacing, 0.0)

    # The rule carries up to half a prompt over from phase to phase, so the tokens of phases vary, and a request is in a
    # large phase more often than in a small one.
    met = raggedness**2 * encoding.own_way
    ttft = encoding.own_way + met + queue
    latency = num_phases * whole - unneeded + met if decodes else ttft

    tpot = (latency - ttft) / max(decodes, 1)
    # A request has one gap with an encode phase for each of its phases after the first.
    spanning = cycle - (rounds.decoding - rounds.mean(0))
    spanning += np.maximum(phase.boundary_deviate, 0.0) * raggedness * encoding.own_way
    carried = encode_batch * phase.share[:, 0]
    filling = pipeline.all_stages(rounds.ends[:, :, -1]) - np.maximum.reduce(stages)
    variances = _variances(lengths)
    return Performance(
        throughput=encode_batch / cycle,
        latency=latency,
        ttft=ttft,
        tpot=tpot,
        itl_p99=np.where(phase.boundary > 0.01, spanning, np.maximum.reduce(rounds.seconds, axis=1)),
        encode_batch=encode_batch,
        encode_tokens=encode_batch * lengths.mean_input,
        decode_batch=carried,
        peak_requests=carried + encode_batch * (1 - lengths.survival[0]),
        peak_variance=encode_batch * variances[np.minimum(decode_iterations, len(variances)) - 1],
        peak_tokens=1.1 * tokens + lengths.max_input,
        cycle=cycle,
        gate=cycle,
        prompt_s=model.prompt_s(each),
        bubble=pipeline.bubble(work, cycle),
        filling=filling * rounds.anywhere[:, -1],
    )


class _Encoding(NamedTuple):
    """Seconds of a micro-batch's encode step: on each stage, through all, and from each end on, with and without hops.

    # [kinds, n], [n], [ends, n], [ends, n]
    """

    stages: Array
    own_way: Array
    down: Array
    down_without_hops: Array


class _Rounds(NamedTuple):
    """The decode rounds of a phase, by segment. # [.., n, segments]"""

    stages: Array
    own_way: Array
    ends: Array
    anywhere: Array
    """Probability that a round takes place. A round takes place if any micro-batch still has a request."""
    active: Array
    """Seconds on each kind of stage in a round that takes place, for all micro-batches that still have a request."""
    seconds: Array
    times: Array
    decoding: Array

    def mean(self, stretch: int) -> Array:
        """Return the mean seconds of a round in one segment, counting rounds that do not take place as 0. # [n]"""
        return self.seconds[:, stretch] * self.anywhere[:, stretch]


def _encoding(model: OneLaneModel, each: Array) -> _Encoding:
    kinds, encoding = len(model.lane.kinds), model.encode_table(each)
    return _Encoding(encoding[:kinds], encoding[kinds], *encoding[kinds + 1 :].reshape(2, -1, len(each)))


def _rounds(model: OneLaneModel, phase: PhaseColumns, each: Array, microbatches: Array) -> _Rounds:
    # A phase ends early if no request decodes any more. `running` is the probability that a request still decodes, and
    # `present / running` is the batch in this case, which is at least one and at most about one more than at the start.
    kinds, table = len(model.lane.kinds), model.decode_table
    column, m = each[:, None], microbatches[:, None]
    present = column * phase.share
    running = np.maximum(-np.expm1(column * phase.log_empty), present / (np.maximum(present[:, :1], 1.0) + 1))
    running = np.maximum(np.minimum(running, present), 1e-300)
    decode = table(present / running, table.locate(model.self_context + phase.age))
    stages, own_way = decode[:kinds], decode[kinds]
    # Phases begin together, so a round takes place if any micro-batch still has a request.
    anywhere = np.maximum(-np.expm1(m * np.log1p(-np.minimum(running, 1 - 1e-16))), 1e-300)
    active = (m * running / anywhere) * stages
    seconds = np.maximum(np.maximum.reduce(active), own_way)
    times = anywhere * phase.weights
    decoding = (seconds * times).sum(axis=1)
    return _Rounds(stages, own_way, decode[kinds + 1 :], anywhere, active, seconds, times, decoding)


def _cycle(
    pipeline: Pipeline, encoding: _Encoding, rounds: _Rounds, microbatches: Array, spread: Array, iterations: Ints
) -> tuple[Array, Array]:
    """Return the seconds of a cycle, and the seconds in it for which each kind of stage works. # [n], [kinds, n]"""
    at_end, last = rounds.anywhere[:, -1], rounds.stages[..., -1]
    slowest_then = pipeline.slowest_from(encoding.stages)
    at_runs = (microbatches - 1) * np.maximum(pipeline.slowest_until(last * at_end), slowest_then)
    at_runs -= spread * slowest_then
    change = pipeline.before @ (rounds.ends[:, :, -1] * at_end) + encoding.down + spread * encoding.down_without_hops
    change += at_runs[pipeline.run_of_end]
    stage_s = rounds.active * rounds.times  # [kinds, n, segments]
    work = microbatches * encoding.stages + stage_s.sum(axis=2)
    slowest = np.maximum.reduce(encoding.stages)
    own_way = encoding.own_way + spread * (encoding.own_way - slowest) + (rounds.own_way * rounds.times).sum(axis=1)
    until = pipeline.slowest_until(stage_s).sum(axis=2) - pipeline.slowest_until(rounds.active[..., -1] * at_end)
    cycle = np.maximum(
        np.maximum(np.maximum.reduce(work), own_way), np.maximum.reduce(until[pipeline.run_of_end] + change)
    )
    around = rounds.own_way[:, 0] * rounds.anywhere[:, 0] + rounds.decoding - rounds.mean(0) - rounds.mean(-1)
    around += np.maximum.reduce(change)
    return np.where(iterations >= 2, np.maximum(cycle, around), cycle), work


def _sd_phase_tokens(lengths: Lengths, each: Array, stray: Array) -> Array:
    """Return the standard deviation of the prompt tokens in a phase of a micro-batch.

    The tokens vary because up to half a prompt is carried over from phase to phase, and because the target is adjusted
    if the decode batch deviates.
    """
    carried: float | Array = lengths.mean_square_input / 6
    if len(lengths.inputs) == 1:
        # If all prompts have equal lengths, a phase encodes one of the two whole numbers next to the mean number.
        carried = (each % 1) * (1 - each % 1) * lengths.mean_square_input
    strays = 2 * sp.special.ndtr(stray * np.sqrt(each))
    return np.sqrt(carried + strays * (ADJUSTMENT * lengths.mean_input * each) ** 2)


@lru_cache(maxsize=8)
def _variances(lengths: Lengths) -> Array:
    """Return for each N_D the variance of requests at the start of a phase, for each request that a phase encodes. A
    phase encodes a fixed number, of which each decodes in the phase j after with probability P(D > j N_D). # [max D]
    """
    survivals = (lengths.survival[n::n] for n in range(1, max(2, lengths.max_output)))
    return np.asarray([float(p @ (1 - p)) for p in survivals])


@lru_cache(maxsize=8)
def _phases(lengths: Lengths) -> Array:
    """Return for each N_D the mean number of phases in which a request decodes. # [max D]"""
    return np.asarray([steady_decode_batch(lengths, 1.0, n) for n in range(1, max(2, lengths.max_output))])
