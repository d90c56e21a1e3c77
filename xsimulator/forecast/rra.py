"""rra: encode B_E requests, run N_D decode iterations, and again."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import ndtr

from xgpt.policies.rule import ADJUSTMENT
from xgpt.schema import Plan, RraSettings
from xgpt.workload import decoding_share
from xsimulator.curves import Array
from xsimulator.forecast.base import Columns, Forecast, Ints, Room, Stations, column
from xsimulator.forecast.one_lane import OneLaneModel
from xsimulator.forecast.performance import Performance, stack
from xsimulator.forecast.phases import phases_of
from xsimulator.forecast.pipeline import expected_max_deviate
from xsimulator.forecast.placements import LeastSteps, Terms
from xsimulator.lengths import Lengths, steady_decode_batch

AT_ONCE = 2000
"""Candidates predicted in one go: their tables stay in the processor's caches."""


class Rra(Forecast[OneLaneModel]):
    settings = RraSettings
    model = OneLaneModel
    line = load = "encode_batch"
    num_curves = 12
    stations = Stations(admits_each_step=False, frees_together=True)
    swaps_between_steps = True

    def values(self, name: str, room: Room) -> Ints:
        if name == "decode_iterations":
            return np.arange(1, max(2, room.lengths.max_output))
        return super().values(name, room)

    def line_counts(self, outer: Ints, inner: Ints, room: Room) -> Array:
        return np.floor(room.capacity / np.maximum(_phases(room.lengths), 1.0) + 1e-9) - inner[0] + 1

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        iterations = columns["decode_iterations"].astype(int)
        return _predict(model, columns["encode_batch"], iterations, column(columns, "microbatches"))

    def reestimate(self, plan: Plan, model: OneLaneModel, inside: float) -> dict[str, float]:
        settings = plan.policy
        assert isinstance(settings, RraSettings)

        def predicted(encode_batch: float) -> dict[str, float]:
            columns = {"decode_iterations": settings.decode_iterations, "microbatches": settings.microbatches}
            return self.evaluate(model, encode_batch=encode_batch, **columns).at(0)

        # Requests a phase that the planned prompt tokens come to under these lengths. Where more or fewer than planned
        # stay in decode, the rule adjusts its target (ExeGPT sec. 5.2): the batch settles at the threshold, or as far
        # from its target as the adjustment reaches.
        estimate = plan.estimate
        batch = estimate.encode_tokens / model.lengths.mean_input
        carried_each = max(predicted(batch)["decode_batch"] / batch - model.lengths.survival[0], 1e-9)
        planned = estimate.decode_batch - settings.encode_batch * decoding_share(plan.workload)
        slack = ADJUSTMENT * estimate.decode_batch
        low, high = ((planned + sign * slack) / carried_each for sign in (-1, 1))
        batch = float(np.clip(np.clip(batch, low, high), (1 - ADJUSTMENT) * batch, (1 + ADJUSTMENT) * batch))
        return predicted(min(batch, batch * inside / predicted(batch)["peak_requests"]))

    def placement_terms(self, steps: LeastSteps) -> Terms:
        of = steps.of
        turn = steps.first + steps.phase / of.mean_decodes
        working = [steps.each * (steps.decode + steps.encode / of.mean_decodes), steps.passing, turn[:, None]]
        # Only iterations in which any request decodes take time.
        return Terms(working, [seconds * of.busy for seconds in working], busy=of.busy)


def _predict(model: OneLaneModel, encode_batch: Array, decode_iterations: Ints, microbatches: Array) -> Performance:
    """The cohorts of k phases ago decode together.

    The time of a cycle is the longest of the ways through it (for equal stages this is exact): one stage's work;
    a micro-batch's own steps; decode rounds, then from stage x on the encode round.

    Source: ExeGPT sec. 6 with the exact steady state; MODEL's (2), its form for unequal stages.
    """
    if len(encode_batch) > AT_ONCE:
        parts = [slice(start, start + AT_ONCE) for start in range(0, len(encode_batch), AT_ONCE)]
        found = [(p, _predict(model, encode_batch[p], decode_iterations[p], microbatches[p])) for p in parts]
        return stack(len(encode_batch), found)
    lengths, pipeline, kinds = model.lengths, model.pipeline, len(model.lane.kinds)
    phase = phases_of(lengths, model.quantile_decodes)(decode_iterations)
    weights, table = phase.weights, model.decode_table
    each = encode_batch / microbatches  # requests that a micro-batch encodes
    tokens = each * lengths.mean_input
    encoding = model.encode_table(each)
    te, own = encoding[:kinds], encoding[kinds]  # [kinds, n], [n]
    down, down_without_hops = encoding[kinds + 1 :].reshape(2, -1, len(each))  # [ends, n]

    # A phase ends early where no request is left in decode: the probability that one is, and the batch given that.
    # That is one at least, and hardly over its peak and one more.
    column, m = each[:, None], microbatches[:, None]
    present = column * phase.share
    running = np.maximum(-np.expm1(column * phase.log_empty), present / (np.maximum(present[:, :1], 1.0) + 1))
    running = np.maximum(np.minimum(running, present), 1e-300)
    decode = table(present / running, table.locate(model.self_context + phase.age))  # [.., n, segments]
    td, own_way = decode[:kinds], decode[kinds]
    # Phases begin together: a round takes place where any request is left, with the micro-batches that have one.
    anywhere = np.maximum(-np.expm1(m * np.log1p(-np.minimum(running, 1 - 1e-16))), 1e-300)
    active = (m * running / anywhere) * td  # [kinds, n, segments]
    rounds = np.maximum(np.maximum.reduce(active), own_way)  # [n, segments]
    times = anywhere * weights
    spent = rounds * anywhere
    decoding, first_round, last_round = (rounds * times).sum(axis=1), spent[:, 0], spent[:, -1]

    # Micro-batches of unequal length: the longest of them holds the others up at every stage but the slowest.
    raggedness = _sd_phase_tokens(lengths, each, phase.stray) / tokens
    at_end = anywhere[:, -1]
    slowest_then = pipeline.slowest_from(te)
    held = expected_max_deviate(microbatches) * raggedness
    at_runs = (microbatches - 1) * np.maximum(pipeline.slowest_until(td[..., -1] * at_end), slowest_then)
    at_runs -= held * slowest_then
    change = pipeline.before @ (decode[kinds + 1 :, :, -1] * at_end) + down + held * down_without_hops
    change += at_runs[pipeline.run_of_end]
    stage_s = active * times  # [kinds, n, segments]
    work = microbatches * te + stage_s.sum(axis=2)  # [kinds, n]
    slowest = np.maximum.reduce(te)
    own_cycle = own + held * (own - slowest) + (own_way * times).sum(axis=1)
    until = pipeline.slowest_until(stage_s).sum(axis=2) - pipeline.slowest_until(active[..., -1] * at_end)
    cycle = np.maximum(
        np.maximum(np.maximum.reduce(work), own_cycle), np.maximum.reduce(until[pipeline.run_of_end] + change)
    )
    around = own_way[:, 0] * anywhere[:, 0] + decoding - first_round - last_round + np.maximum.reduce(change)
    cycle = np.where(decode_iterations >= 2, np.maximum(cycle, around), cycle)

    # A request of the quantile's length: whole cycles, less the rounds of its last phase that it does not need.
    # As long as it runs, a request is left in decode: none of its phases ends early.
    decodes = model.quantile_decodes
    num_phases = -(-decodes // decode_iterations)
    whole = cycle + (rounds * weights).sum(axis=1) - decoding
    unneeded = (rounds * phase.unneeded).sum(axis=1)
    spacing = np.maximum(np.maximum.reduce(td[..., -1]), own_way[:, -1] / microbatches)
    queue = (microbatches - 1) / 2 * np.maximum(slowest - spacing, 0.0)

    # The rule carries up to half a prompt from phase to phase, so a phase's tokens vary around their mean; a
    # request meets a large phase more often than a small one.
    met = raggedness**2 * own
    ttft = own + met + queue
    latency = num_phases * whole - unneeded + met if decodes else ttft

    # Gaps that span an encode phase: one for each phase after a request's first.
    spanning = cycle - (decoding - first_round) + np.maximum(phase.boundary_deviate, 0.0) * raggedness * own
    carried = encode_batch * phase.share[:, 0]
    filling = pipeline.all_stages(decode[kinds + 1 :, :, -1]) - np.maximum.reduce(td[..., -1])
    return Performance(
        throughput=encode_batch / cycle,
        latency=latency,
        ttft=ttft,
        tpot=(latency - ttft) / max(decodes, 1),
        itl_p99=np.where(phase.boundary > 0.01, spanning, np.maximum.reduce(rounds, axis=1)),
        encode_batch=encode_batch,
        encode_tokens=encode_batch * lengths.mean_input,
        decode_batch=carried,
        peak_requests=carried + encode_batch * (1 - lengths.survival[0]),
        peak_tokens=1.1 * tokens + lengths.max_input,
        cycle=cycle,
        bubble=pipeline.bubble(work, cycle),
        filling=filling * at_end,
    )


def _sd_phase_tokens(lengths: Lengths, each: Array, stray: Array) -> Array:
    """Standard deviation of the prompt tokens of a micro-batch's phase.

    Up to half a prompt moves from phase to phase, and where the decode batch strays the target follows it.
    """
    carried: float | Array = lengths.mean_square_input / 6
    if len(lengths.inputs) == 1:
        # Prompts all alike: a phase takes either of the two numbers next to its mean.
        carried = (each % 1) * (1 - each % 1) * lengths.mean_square_input
    strays = 2 * ndtr(stray * np.sqrt(each))
    return np.sqrt(carried + strays * (ADJUSTMENT * lengths.mean_input * each) ** 2)


@lru_cache(maxsize=8)
def _phases(lengths: Lengths) -> Array:
    """Mean phases that a request stays in decode, for each N_D. # [max D]"""
    return np.asarray([steady_decode_batch(lengths, 1.0, n) for n in range(1, max(2, lengths.max_output))])
