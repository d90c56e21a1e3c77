"""Closed forms of the single-lane policies on a lane's stages, at saturation, vectorised over candidates.

Assumptions: requests always wait; input and output lengths are independent; step costs are charged at the mean
composition of each iteration; the steps of a micro-batch follow each other through the stages as in
xsimulator.analytic.pipeline.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from xgpt.policies.rule import ADJUSTMENT
from xgpt.schema import SingleLaneSettings
from xsimulator.analytic.all_requests import AllRequests
from xsimulator.analytic.mixed import MixedSteps
from xsimulator.analytic.performance import Performance, stack
from xsimulator.analytic.phases import phases_of, segments
from xsimulator.analytic.pipeline import Pipeline, expected_max_deviate
from xsimulator.curves import Array, ContextTable, Table
from xsimulator.lengths import Lengths
from xsimulator.step_cost import LaneCost

Counts = npt.NDArray[np.int_]

MOST_STATIC_SEGMENTS = 24
"""Stretches into which a static batch's iterations are put at most: within one, costs are linear."""
MICROBATCHES = "microbatches", "encode_microbatches", "decode_microbatches"
AT_ONCE = 2000
"""Candidates of rra predicted in one go: their tables stay in the processor's caches."""


class OneLaneModel:
    """Predicts rra, orca, chunked and static for one lane of stages and one workload.

    Args:
        lane: what steps cost on the lane's stages.
        quantile: of the output length, for which latency is reported.
        all_requests: report the quantile of all requests. Where each request meets the same steps (rra, static), the
            longer one takes longer, and that is the latency of a request of the quantile's length.
    """

    def __init__(self, lane: LaneCost, lengths: Lengths, quantile: float = 0.99, *, all_requests: bool = False) -> None:
        self.lane = lane
        self.lengths = lengths
        self.pipeline = Pipeline(self.lane)
        self.quantile_decodes = lengths.decodes_at(quantile)
        self._of_all = AllRequests(lengths, quantile) if all_requests else None
        self._self_context = 0.0 if self.lane.has_encoder else lengths.mean_input
        """Tokens that self-attention meets before the first output token."""
        self._prompt_variance = lengths.mean_square_input / lengths.mean_input**2 - 1
        """Of the tokens of a prompt, relative to their mean's square."""

    def evaluate(self, kind: str, **columns: npt.ArrayLike) -> Performance:
        """Predict candidates of one policy; `columns` are its control variables, one entry a candidate.

        Micro-batches not named are 1.
        """
        values = {name: np.atleast_1d(np.asarray(column, float)) for name, column in columns.items()}
        size = len(next(iter(values.values())))
        ones = np.ones(size)
        if kind == "static":
            encode, decode = (values.get(f"{part}_microbatches", ones) for part in ("encode", "decode"))
            return self._static(values["batch"], encode, decode)
        microbatches = values.get("microbatches", ones)
        if kind == "rra":
            return self._rra(values["encode_batch"], values["decode_iterations"].astype(int), microbatches)
        return self._mixed.evaluate(values["max_batch"], values.get("token_budget"), microbatches)

    def estimate(self, settings: SingleLaneSettings) -> dict[str, float]:
        """Predict one plan's settings."""
        fields = vars(settings)
        names = [variable.name for variable in settings.variables]
        columns = {name: fields[name] for name in (*names, *MICROBATCHES) if name in fields}
        return self.evaluate(settings.kind, **columns).at(0)

    @cached_property
    def _mixed(self) -> MixedSteps:
        of = self.lane, self.pipeline, self.lengths
        return MixedSteps(*of, self._self_context, self.quantile_decodes, self._of_all)

    # Steps ---------------------------------------------------------------------------------------------------

    @cached_property
    def _encode_table(self) -> Table:
        """A step that encodes whole prompts and nothing else, against their number: on each kind of stage; through all;
        and from each end of a run on, with its hops and without.
        """
        hop, alone = self.lane.hop, self.lane.encode(self.lengths)
        whole = alone + Table(hop.points / self.lengths.mean_input, hop.values)
        alone, after = Table(whole.points, alone(whole.points)), self.pipeline.after
        sums = [self.pipeline.counts[None] @ whole.values, after @ whole.values, after @ alone.values]
        return Table(whole.points, np.concatenate([alone.values, *sums]))

    @cached_property
    def _decode_table(self) -> ContextTable:
        """Steps that decode and nothing else, against the requests in them and their context: on each kind of stage;
        through all; and on each kind with the hop to it. # 2 kinds + 1 functions
        """
        lane, longest = self.lane, len(self.lengths.survival) + 1
        contexts = lane.contexts_between(self._self_context, self._self_context + longest)
        alone, hop = lane.decode(contexts, self.lengths.mean_input), lane.hop
        whole = alone + Table(hop.points, np.repeat(hop.values[:, None], len(contexts), axis=1))
        through = self.pipeline.all_stages(whole.values)[None]
        return ContextTable(whole.points, contexts, np.concatenate([alone(whole.points), through, whole.values]))

    def _most_tokens(self, requests: Array) -> Array:
        """Prompt tokens of so many requests at once, hardly ever exceeded (four standard deviations)."""
        lengths = self.lengths
        variance = lengths.mean_square_input - lengths.mean_input**2
        return np.minimum(
            requests * lengths.mean_input + 4 * np.sqrt(requests * variance), requests * lengths.max_input
        )

    # Policies ------------------------------------------------------------------------------------------------

    def _rra(self, encode_batch: Array, decode_iterations: Counts, microbatches: Array) -> Performance:
        """The cohorts of k phases ago decode together.

        The time of a cycle is the longest of the ways through it (for equal stages this is exact): one stage's work;
        a micro-batch's own steps; decode rounds, then from stage x on the encode round.

        Source: ExeGPT sec. 6 with the exact steady state; MODEL's (2), its form for unequal stages.
        """
        if len(encode_batch) > AT_ONCE:
            parts = [slice(start, start + AT_ONCE) for start in range(0, len(encode_batch), AT_ONCE)]
            found = [(p, self._rra(encode_batch[p], decode_iterations[p], microbatches[p])) for p in parts]
            return stack(len(encode_batch), found)
        lengths, pipeline, kinds = self.lengths, self.pipeline, len(self.lane.kinds)
        phase = phases_of(lengths, self.quantile_decodes)(decode_iterations)
        weights, table = phase.weights, self._decode_table
        each = encode_batch / microbatches  # requests that a micro-batch encodes
        tokens = each * lengths.mean_input
        encoding = self._encode_table(each)
        te, own = encoding[:kinds], encoding[kinds]  # [kinds, n], [n]
        down, down_without_hops = encoding[kinds + 1 :].reshape(2, -1, len(each))  # [ends, n]

        # A phase ends early where nobody is left in decode: P(somebody is), and the batch given that. That is one at
        # least, and hardly over its peak and one more.
        column, m = each[:, None], microbatches[:, None]
        present = column * phase.share
        running = np.maximum(-np.expm1(column * phase.nobody), present / (np.maximum(present[:, :1], 1.0) + 1))
        running = np.maximum(np.minimum(running, present), 1e-300)
        decode = table(present / running, table.locate(self._self_context + phase.age))  # [.., n, segments]
        td, own_way = decode[:kinds], decode[kinds]
        # Phases begin together: a round takes place where anybody is left, with those micro-batches that are.
        anywhere = np.maximum(-np.expm1(m * np.log1p(-np.minimum(running, 1 - 1e-16))), 1e-300)
        active = (m * running / anywhere) * td  # [kinds, n, segments]
        rounds = np.maximum(np.maximum.reduce(active), own_way)  # [n, segments]
        times = anywhere * weights
        spent = rounds * anywhere
        decoding, first_round, last_round = (rounds * times).sum(axis=1), spent[:, 0], spent[:, -1]

        # Micro-batches of unequal length: the longest of them holds the others up at every stage but the slowest.
        raggedness = self._sd_phase_tokens(each, phase.stray) / tokens
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
        # As long as it is there, somebody is left in decode: none of its phases ends early.
        decodes = self.quantile_decodes
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

    def _sd_phase_tokens(self, each: Array, stray: Array) -> Array:
        """Standard deviation of the prompt tokens of a micro-batch's phase.

        Up to half a prompt moves from phase to phase, and where the decode batch strays the target follows it.
        """
        lengths = self.lengths
        carried: float | Array = lengths.mean_square_input / 6
        if len(lengths.inputs) == 1:
            # Prompts all alike: a phase takes either of the two numbers next to its mean.
            carried = (each % 1) * (1 - each % 1) * lengths.mean_square_input
        strays = 2 * ndtr(stray * np.sqrt(each))
        return np.sqrt(carried + strays * (ADJUSTMENT * lengths.mean_input * each) ** 2)

    def _static(self, batch: Array, encode_parts: Array, decode_parts: Array) -> Performance:
        """A batch is encoded, then decodes at full size until its longest member ends.

        Source: ExeGPT sec. 2 (FasterTransformer: no early termination; DeepSpeed Inference: more micro-batches in
        encode than in decode).
        """
        lengths = self.lengths
        each = batch / encode_parts
        kinds = len(self.lane.kinds)
        encode = self._encode_table(each)
        te, own = encode[:kinds], encode[kinds]
        slowest = np.maximum.reduce(te)
        sd = np.sqrt(np.maximum(self._prompt_variance, 0.0) / each)
        ragged = expected_max_deviate(encode_parts) * sd * np.maximum(own - slowest, 0.0)
        encoding = own + (encode_parts - 1) * slowest + ragged

        place, starts, weights, nobody = self._static_rounds
        together = batch / decode_parts
        decode = self._decode_table(np.broadcast_to(together[:, None], (len(batch), len(starts))), place)
        some = -np.expm1(batch[:, None] * nobody)
        active = -np.expm1(together[:, None] * nobody)
        some, active = np.add.reduceat(np.concatenate([some, active]), starts, axis=1).reshape(2, len(batch), -1)
        active = decode_parts[:, None] * active / np.maximum(some, 1e-300)
        own_way = decode[kinds]
        td = active * decode[:kinds]  # [kinds, n, segments]
        rounds = np.maximum(np.maximum.reduce(td), own_way)
        # The first round overlaps with the others' encoding: its last micro-batch just passes through.
        saved = np.maximum(rounds[:, 0] - own_way[:, 0], 0.0) * some[:, 0] / weights[0]
        cycle = encoding + (rounds * some).sum(axis=1) - saved
        decodes = self.quantile_decodes
        met = np.minimum(np.maximum(decodes - starts, 0), weights)
        decoding = (rounds * met).sum(axis=1) - saved * bool(decodes)
        return Performance(
            throughput=batch / cycle,
            latency=encoding + decoding,
            ttft=own + (encode_parts - 1) / 2 * slowest,
            tpot=decoding / max(decodes, 1),
            itl_p99=np.maximum.reduce(rounds, axis=1),
            encode_batch=batch,
            encode_tokens=batch * lengths.mean_input,
            decode_batch=batch,
            peak_requests=batch,
            peak_tokens=self._most_tokens(each),
            cycle=cycle,
            bubble=self.pipeline.bubble(encode_parts * te + (td * some).sum(axis=2), cycle),
            filling=np.zeros_like(cycle),
        )

    @cached_property
    def _static_rounds(self) -> tuple[tuple[Counts, Array], Counts, Counts, Array]:
        """Decode steps of a static batch: each stretch's place in the table, where it starts, how many steps it has.

        And for each iteration the log of the probability that a request has ended before.
        """
        length = len(self.lengths.survival)
        edges = segments(length, {self.quantile_decodes}, MOST_STATIC_SEGMENTS)
        weights = np.diff(edges)
        middles = edges[:-1] + (weights + 1) / 2
        with np.errstate(divide="ignore"):
            nobody = np.log1p(-np.minimum(self.lengths.survival, 1.0))
        return self._decode_table.locate(self._self_context + middles), edges[:-1], weights, nobody
