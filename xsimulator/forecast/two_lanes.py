"""Closed form of WAA: two lanes, asynchronous, at saturation, vectorised over candidates.

With B requests in decode, an iteration of all micro-batches takes T(B), and the lane completes B / (E[S] T(B)) requests
a second. That number is the rate at which requests enter; what limits it is the encode lane, which takes B_E requests
every t_E, the K/V transfers, or the cap on requests inside:

    B_E sum_{j>=0} G(j B_E / X) + X wait <= B_max,   X = B / (E[S] T(B))

as a batch waits until all of it fits, finding there what is left of those that entered j periods of B_E / X before, and
then until the encode lane is free (as in a queue whose arrivals are batches). G(a) is the share of requests that are
inside at the age a: all until they are encoded, then those whose output goes on until they have been transferred, have
joined (after half an iteration in the mean) and run their iterations. Outputs that end together, with the encode lane's
token or after the same number of iterations, so keep whole batches inside; of others half a batch's slots are free in
the mean. Where a device is a CPU core, moving K/V is that core's work: both lanes then do nothing else for as long
(TransferCost.occupies).
Source: ExeGPT sec. 4.1, 6, where B = B_E E[S]: the case in which encode and decode take turns.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from scipy.special import ndtri

from xgpt.core.errors import InputError
from xsimulator.costs.curves import Array, Table
from xsimulator.costs.step_cost import LaneCost
from xsimulator.costs.transfer import TransferCost
from xsimulator.forecast.lane_balance import FINER, GRID, LEVELS, LanePair, Stays, Waiting, at_points, locate, size_for
from xsimulator.forecast.performance import Performance
from xsimulator.forecast.pipeline import Pipeline, RandomSteps, expected_max_deviate
from xsimulator.lengths import Lengths


class TwoLaneModel:
    """Predicts waa for an encode lane, a decode lane and one workload.

    Args:
        quantile: of the output length, for which latency is reported.
        all_requests: not read: that latency is reported whatever the quantile is of.

    Raises:
        InputError: the profile holds no times of K/V transfers, or the cluster states no link to the host.
    """

    def __init__(
        self,
        encode: LaneCost,
        decode: LaneCost,
        lengths: Lengths,
        quantile: float = 0.99,
        *,
        all_requests: bool = False,
    ) -> None:
        if encode.profile.kv_transfer is None and encode.profile.source == "analytic":
            accepted = "waa sends K/V through host memory: give its link to devices, or another policy"
            raise InputError("cluster.host", None, accepted)
        if encode.profile.kv_transfer is None:
            raise InputError("profile", encode.profile.model.name, "it holds no times of K/V transfers: waa needs them")
        self.encode, self.decode, self.lengths = encode, decode, lengths
        self.transfer = TransferCost(encode, decode)
        self._encode_pipeline, self._decode_pipeline = Pipeline(encode), Pipeline(decode)
        self._longest = float(expected_max_deviate(self._encode_pipeline.num_stages))
        self._sd_tokens = np.sqrt(lengths.mean_square_input / 6) / lengths.mean_input
        self._prompt_variance = lengths.mean_square_input / lengths.mean_input**2 - 1
        """Of the tokens of a prompt, relative to their mean's square."""
        first = int(decode.has_encoder)  # an encoder's lane makes no token: the decode lane makes the first, too
        self.mean_decodes = lengths.mean_decodes + first
        self.quantile_decodes = lengths.decodes_at(quantile) + first
        self._stays = Stays(np.concatenate([[1.0], lengths.survival]) if first else lengths.survival)
        self._joined: dict[tuple[float, float, float], Array] = {}
        """Of `_rounds`, by least and largest encode batch and micro-batches."""

    def evaluate(self, encode_batch: Array, cap: Array, microbatches: Array) -> Performance:
        """`cap`: the most requests inside."""
        lengths = self.lengths
        through, interval, moving, sd = self._encoding(encode_batch)
        tokens, stages = encode_batch * lengths.mean_input, self._encode_pipeline.num_stages
        limit = encode_batch / np.maximum(interval, moving)
        rounds = self._rounds(encode_batch, encode_batch, microbatches, size_for(cap / microbatches))
        lanes = LanePair(encode_batch, encode_batch, through, moving, microbatches, rounds)
        batch, step = self._balance(lanes, Waiting(1 / encode_batch, sd * sd, interval, limit), cap)
        mean_decodes = max(self.mean_decodes, 1e-9)
        throughput = np.minimum(batch / (mean_decodes * step), limit)

        met = sd**2
        encoding = through * (1 + met)
        queued = throughput / limit * np.maximum(stages * interval - through, 0.0)
        decodes, emits = self.quantile_decodes, not self.decode.has_encoder
        own, slow = (step, step) if emits else self._with_newcomers(encode_batch, microbatches, batch, step, sd)
        first_gap = moving + step / 2 + own
        ttft = encoding + queued + (0.0 if emits else first_gap)
        latency = encoding + queued + ((first_gap + (decodes - 1) * step) if decodes else 0.0)
        has_first_gap = emits and 1 / mean_decodes > 0.01
        return Performance(
            throughput=throughput,
            latency=latency,
            ttft=ttft,
            tpot=(latency - ttft) / max(decodes - (not emits), 1),
            itl_p99=first_gap if has_first_gap else slow,
            encode_batch=encode_batch,
            encode_tokens=tokens,
            decode_batch=batch,
            peak_requests=cap,
            peak_tokens=1.1 * tokens + lengths.max_input,
            cycle=encode_batch / throughput,
            bubble=self._bubble(encode_batch, throughput, batch / microbatches, step / microbatches),
            filling=np.zeros_like(step),
        )

    def most(
        self, encode_batch: Array, largest_batch: Array, cap: Array, microbatches: Array, latency_s: float | None
    ) -> Array:
        """Requests a second that settings between these do not exceed where they keep a latency.

        The encode lane serves most with its largest batch, and then keeps slots waiting least; what is inside before
        decode, and until its first step, is least with the smallest.

        Args:
            encode_batch, largest_batch: the least and the most requests encoded at once.
            cap: the most requests inside.
        """
        mean_decodes = max(self.mean_decodes, 1e-9)
        through, least_interval, moving, _ = self._encoding(encode_batch)
        _, interval, at_most, sd = self._encoding(largest_batch)
        limit = largest_batch / np.maximum(interval, at_most)
        # Beyond the profile's points a batch may cost more by the prompt than a smaller one.
        limit = np.maximum(limit, encode_batch / np.maximum(least_interval, moving))
        rounds = self._rounds(encode_batch, largest_batch, microbatches, size_for(cap / microbatches))
        lanes = LanePair(encode_batch, largest_batch, through, moving, microbatches, rounds)
        batch, step = self._balance(lanes, Waiting(1 / largest_batch, sd * sd, interval, limit), cap)
        # Where steps take longer by the request in larger batches, fewer requests in decode serve more.
        up_to = np.where(lanes.decoding <= batch[:, None], lanes.decoding / rounds, 0.0).max(axis=1)
        most = np.minimum(np.maximum(batch / step, up_to) / mean_decodes, limit)
        if latency_s is None or not self.quantile_decodes:
            return most
        # Steps as long as the latency allows, to within rounding, and what they serve.
        longest = ((1 + 1e-9) * latency_s - through * (1 + sd**2) - moving) / (self.quantile_decodes + 0.5)
        size, inside = rounds.shape[1], lanes.decoding
        allowed = rounds <= longest[:, None]
        served = np.where(allowed, inside / rounds, 0.0).max(axis=1)
        last = size - 1 - allowed[:, ::-1].argmax(axis=1)  # the last that is allowed, if any is
        rows, after = np.arange(len(last)), np.minimum(last + 1, size - 1)
        start, end = rounds[rows, last], rounds[rows, after]
        share = np.clip((longest - start) / np.maximum(end - start, 1e-300), 0.0, 1.0)
        at_end = inside[rows, last] + share * (inside[rows, after] - inside[rows, last])
        with np.errstate(divide="ignore", invalid="ignore"):
            served = np.maximum(served, np.where(share < 1, at_end / np.maximum(longest, 1e-300), served))
        return np.where(allowed.any(axis=1), np.minimum(most, served / mean_decodes), 0.0)

    def _balance(self, lanes: LanePair, waiting: Waiting, cap: Array) -> tuple[Array, Array]:
        """Requests in decode, and seconds of an iteration, at which as many are inside as the cap allows.

        What is found lies on the chord of a stretch of the last division, so a little low.
        """
        mean_decodes = max(self.mean_decodes, 1e-9)
        rate = lanes.decoding / (mean_decodes * lanes.rounds)
        stays = rate * self._stays.mean(lanes, lanes.rounds)
        # No fewer are inside than the rate's share of the stays, and more than that by one batch at most.
        first, _ = locate(stays + lanes.largest_batch[:, None] + self._forming(lanes) + waiting(rate), cap)
        last, _ = locate(stays, cap + 1)
        low, high = lanes.at(first), np.minimum(lanes.at(last + 1), lanes.serving(waiting.limit, mean_decodes))
        for _ in range(LEVELS):
            points = low[:, None] + np.maximum(high - low, 0.0)[:, None] * FINER
            step = lanes.step(points)
            index, share = locate(self._inside(lanes, points / (mean_decodes * step), step, waiting), cap)
            rows = np.arange(len(cap))
            low, high = points[rows, index], points[rows, index + 1]
        batch = low + share * (high - low)
        return np.maximum(batch, 1e-12), lanes.step(batch[:, None])[:, 0]

    def _inside(self, lanes: LanePair, rate: Array, step: Array, waiting: Waiting) -> Array:
        """Requests inside once a batch has entered, and slots that are free then, at least. # [n, points]"""
        batch, largest = lanes.encode_batch[:, None], lanes.largest_batch[:, None]
        rate = np.maximum(rate, 1e-300)
        left = self._stays.left(lanes, largest / rate, step)
        inside = np.maximum(batch * (1 + left), rate * self._stays.mean(lanes, step))
        # A batch that meets nothing enters whatever the cap, and finds the lane free.
        return inside + np.minimum(self._forming(lanes) + waiting(rate), inside - largest)

    def _forming(self, lanes: LanePair) -> Array:
        """Slots more than the mean batch's that are free as a batch enters. # [n, 1]

        Slots come free one at a time, and a batch's prompts vary in number where they are packed by tokens.
        """
        batch = lanes.encode_batch[:, None]
        forming: Array = (batch - 1) / (2 * batch) * self._prompt_variance - 0.5
        return forming

    def _bubble(self, encode_batch: Array, throughput: Array, each: Array, step: Array) -> Array:
        """Of both lanes' devices.

        Args:
            each, step: requests of a decode micro-batch, and seconds from one's step to the next one's.
        """
        lanes = self._encode_pipeline, self._decode_pipeline
        encode = lanes[0].devices @ self._encode_table(encode_batch)[:-2] * throughput / encode_batch
        decode = np.interp(each, GRID, lanes[1].devices @ self._decode_grid[0]) / step
        return 1 - (encode + decode) / (lanes[0].devices.sum() + lanes[1].devices.sum())

    def least(
        self, encode_batch: Array, largest_batch: Array, decode_batch: Array, microbatches: Array
    ) -> tuple[Array, Array, Array]:
        """Latency, time to first token and time per output token that settings between these do not fall below.

        Args:
            encode_batch, largest_batch: the least and the most requests encoded at once.
            decode_batch: the fewest requests in decode.
        """
        through, _, moving, _ = self._encoding(encode_batch)
        met = self._encoding(largest_batch)[3] ** 2
        each = decode_batch / microbatches
        before = np.minimum(GRID.searchsorted(each, side="right"), len(GRID) - 1) - 1
        rounds = self._rounds(encode_batch, largest_batch, microbatches, int(before.max()) + 2)
        start, end = rounds[np.arange(len(each)), before], rounds[np.arange(len(each)), before + 1]
        step = start + (end - start) * (each - GRID[before]) / (GRID[before + 1] - GRID[before])
        encoding = through * (1 + met)
        decodes, emits = self.quantile_decodes, not self.decode.has_encoder
        ttft = encoding + (0.0 if emits else moving + 1.5 * step)
        latency = encoding + ((moving + step / 2) if decodes else 0.0) + decodes * step
        return latency, ttft, (latency - ttft) / max(decodes - (not emits), 1)

    def _encoding(self, encode_batch: Array) -> tuple[Array, Array, Array, Array]:
        """(seconds through the encode lane, from one batch to the next, of the transfer; deviation of its tokens)."""
        found = self._encode_table(encode_batch)
        te, through, moving = found[:-2], found[-2], found[-1]
        sd = self._sd_tokens / encode_batch
        # As many batches are under way as there are stages: the longest of them sets their pace.
        pace = through * (1 + self._longest * sd) / self._encode_pipeline.num_stages
        return through, np.maximum(np.maximum.reduce(te), pace) + self.transfer.occupies * moving, moving, sd

    def _rounds(self, encode_batch: Array, largest_batch: Array, microbatches: Array, size: int) -> Array:
        """Seconds of an iteration that encode batches between these do not fall below. # [n, grid]

        Args:
            size: the number of the grid's points to evaluate, from the first on.
        """
        own = encode_batch * self._stays.together / microbatches
        reach = max(size, size_for(own))
        _, slowest, through = self._decode_grid
        if self.decode.has_encoder:
            rounds = self._all_with_joining(encode_batch, largest_batch, microbatches, reach)
        else:
            rounds = np.maximum(microbatches[:, None] * slowest[:reach], through[:reach])
        if self.transfer.occupies:  # as often as a batch's worth of requests has ended; least each in the largest
            each = self._encode_table(largest_batch)[-1] / largest_batch / max(self.mean_decodes, 1e-9)
            rounds = rounds + (microbatches * each)[:, None] * GRID[:reach]
        # A batch joins as one: its requests share their steps with each other, however few decode in the mean.
        with_own = at_points(rounds, own[:, None])
        rounds = rounds[:, :size]
        return np.where(GRID[:size] < own[:, None], with_own, rounds)

    def _all_with_joining(self, encode_batch: Array, largest_batch: Array, microbatches: Array, size: int) -> Array:
        columns = encode_batch.tolist(), largest_batch.tolist(), microbatches.tolist()
        keys = list(zip(*columns, strict=True))
        order = {key: i for i, key in enumerate(dict.fromkeys(keys))}  # many candidates share an encode batch
        new = [key for key in order if len(self._joined.get(key, ())) < size]
        if new:
            encode, largest, micro = np.asarray(new).T
            self._joined.update(zip(new, self._with_joining(encode, largest, micro, size), strict=True))
        return np.stack([self._joined[key][:size] for key in order])[[order[key] for key in keys]]

    def _with_joining(self, encode_batch: Array, largest_batch: Array, microbatches: Array, size: int) -> Array:
        """Seconds of an iteration in which some steps make the K/V of an encoder's output. # [n, grid]

        The requests of a batch join together, and no request joins most steps: these layers' weights are read only
        where one joins, and all steps behind such a step wait for it. Of larger batches fewer steps are joined, of
        smaller ones each takes less.
        """
        cost, slowest, through = (of[..., :size] for of in self._decode_grid)
        joining = GRID[:size] / max(self.mean_decodes, 1e-9)
        tokens = joining / _share_joined(joining, encode_batch[:, None]) * self.lengths.mean_input  # [n, grid]
        some = _share_joined(joining, largest_batch[:, None])
        extra = self.decode.cross_kv(tokens)  # [kinds, n, grid]
        long = np.stack([(cost[:, None] + extra).max(axis=0), through + self._decode_pipeline.all_stages(extra)])
        short = np.stack([np.broadcast_to(slowest, some.shape), np.broadcast_to(through, some.shape)])
        steps = np.stack([short, long], axis=1).reshape(2, 2, -1)
        share = np.stack([1 - some, some]).reshape(1, 2, -1)
        rounds = RandomSteps(steps[1], steps[0], share, np.repeat(microbatches, size)).round()
        return np.maximum(rounds[0].reshape(some.shape), 1e-12)

    def _with_newcomers(
        self, encode_batch: Array, microbatches: Array, batch: Array, step: Array, deviation: Array
    ) -> tuple[Array, Array]:
        """Seconds of the iteration with which a request of an encoder joins, and what 99% of all gaps do not exceed.

        Args:
            batch, step: requests in decode, and seconds of an iteration in the mean.
            deviation: of an encode batch's tokens, relative.
        """
        each = batch / microbatches
        joining = each / max(self.mean_decodes, 1e-9)
        some = _share_joined(joining, encode_batch)
        tokens = joining / some * self.lengths.mean_input
        # The share of the joined steps that takes longer than 99% of all steps.
        beyond = np.clip(0.01 / some, 0.01, 0.5)
        cost, slowest, through = (of[..., 1:] for of in self._decode_grid)
        at = np.maximum(each, encode_batch * self._stays.together / microbatches)
        costs = np.stack([np.interp(at, GRID[1:], of) for of in cost])
        slowest, through = np.interp(at, GRID[1:], slowest), np.interp(at, GRID[1:], through)

        def longer(tokens: Array) -> Array:
            extra = self.decode.cross_kv(tokens)
            waiting = (costs + extra).max(axis=0) - slowest
            passing = self._decode_pipeline.all_stages(extra)
            return np.where(microbatches * slowest > through, waiting, passing)

        mean = longer(tokens)
        own = step + (1 - some) * mean
        slow = step - some * mean + longer(tokens * (1 + deviation * -ndtri(beyond)))
        return own, np.where(microbatches * some > 0.01, slow, step)

    @cached_property
    def _encode_table(self) -> Table:
        """An encode step on each kind of stage, through all with its hops, and its transfer, against its prompts."""
        alone, hop, tokens = self.encode.encode(self.lengths), self.encode.hop, self.lengths.mean_input
        moving = self.transfer.line
        sent = tokens * self._stays.transferred
        points = np.unique(np.concatenate([alone.points, hop.points / tokens, moving.points / (sent or tokens)]))
        cost = alone(points)
        through = self._encode_pipeline.through(cost, hop(points * tokens))
        return Table(points, np.concatenate([cost, through[None], moving(points * sent)[None]]))

    @cached_property
    def _decode_grid(self) -> tuple[Array, Array, Array]:
        """Seconds of a decode step on each kind of stage, on the slowest, and through all, against the requests in it.

        # [kinds, grid], [grid], [grid]
        """
        lengths, decode = self.lengths, self.decode
        context = lengths.mean_decode_context - (lengths.mean_input if decode.has_encoder else 0.0)
        table = decode.decode(np.asarray([context]), lengths.mean_input)
        cost = table(GRID)[:, 0]
        # With less than one request in the mean fewer micro-batches run, but each one that runs passes all stages.
        some = np.maximum(GRID, 1.0)
        through = self._decode_pipeline.through(table(some)[:, 0], decode.hop(some))
        return cost, np.maximum(cost.max(axis=0), 1e-12), through


def _share_joined(joining: Array, batch: Array) -> Array:
    """Of steps that requests join, where `joining` do so in the mean, batch by batch at even intervals."""
    return np.clip(joining / batch, 1e-12, 1.0)
