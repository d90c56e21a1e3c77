"""Predict the times of waa's two lanes: of encode batches, their transfers, and decode iterations."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy as sp

from xsimulator.costs.curves import Array, Table
from xsimulator.costs.step_cost import LaneCost, TransferCost
from xsimulator.forecast.lane_balance import GRID, Stays, at_points, size_for
from xsimulator.forecast.pipeline import Pipeline, RandomSteps, expected_max_deviate
from xsimulator.lengths import Lengths

LONGEST = 0.9
"""A batch that is longer than the others in the lane delays them by this share of the time that it would take if it
delayed them on every stage. Two workloads and three and four stages have shares between 0.82 and 1.05.
"""


class DecodeLane:
    def __init__(self, cost: LaneCost, lengths: Lengths, encode: EncodeLane, stays: Stays, mean_decodes: float) -> None:
        self.cost, self.lengths, self.mean_decodes = cost, lengths, max(mean_decodes, 1e-9)
        self.pipeline = Pipeline(cost)
        self._encode, self._stays = encode, stays
        self._joined: dict[tuple[float, float, float], Array] = {}
        """Seconds of iterations with joining requests, by smallest and largest encode batch and number of
        micro-batches."""

    def work(self, each: Array) -> Array:
        return np.asarray(np.interp(each, GRID, self.pipeline.devices @ self._grid[0]))

    def rounds(self, encode_batch: Array, largest_batch: Array, microbatches: Array, size: int) -> Array:
        """Return the least seconds of an iteration if encode batches have between `encode_batch` and `largest_batch`
        requests. # [n, grid]
        """
        companions = encode_batch * self._stays.together / microbatches
        reach = max(size, size_for(companions))
        _, slowest, through = self._grid
        if self.cost.has_encoder:
            rounds = self._all_with_joining(encode_batch, largest_batch, microbatches, reach)
        else:
            rounds = np.maximum(microbatches[:, None] * slowest[:reach], through[:reach])
        # For each batch of requests that ends, another one is moved. The largest batch takes the least time per
        # request.
        if self._encode.transfer.occupies:
            each = self._encode.transfer_s(largest_batch) / largest_batch / self.mean_decodes
            rounds = rounds + (microbatches * each)[:, None] * GRID[:reach]
        # A batch joins as a whole, so its requests decode together even if few requests decode on average.
        with_companions = at_points(rounds, companions[:, None])
        rounds = rounds[:, :size]
        return np.where(GRID[:size] < companions[:, None], with_companions, rounds)

    def with_newcomers(
        self, encode_batch: Array, microbatches: Array, batch: Array, step: Array, deviation: Array
    ) -> tuple[Array, Array]:
        """For encoder-decoders, return the seconds of the iteration in which a request joins, and the 99th percentile
        of gaps in seconds. # [n], [n]
        """
        each = batch / microbatches
        joining = each / self.mean_decodes
        some = _share_joined(joining, encode_batch)
        tokens = joining / some * self.lengths.mean_input
        # Of the steps in which requests join, the share that take longer than 99% of all steps.
        beyond = np.clip(0.01 / some, 0.01, 0.5)
        cost, slowest, through = (times[..., 1:] for times in self._grid)
        at = np.maximum(each, encode_batch * self._stays.together / microbatches)
        costs = np.stack([np.interp(at, GRID[1:], kind) for kind in cost])
        slowest, through = np.interp(at, GRID[1:], slowest), np.interp(at, GRID[1:], through)

        def longer(tokens: Array) -> Array:
            extra = self.cost.cross_kv(tokens)
            waiting = (costs + extra).max(axis=0) - slowest
            passing = self.pipeline.all_stages(extra)
            return np.where(microbatches * slowest > through, waiting, passing)

        mean = longer(tokens)
        first = step + (1 - some) * mean
        slow = step - some * mean + longer(tokens * (1 + deviation * -sp.special.ndtri(beyond)))
        return first, np.where(microbatches * some > 0.01, slow, step)

    def _all_with_joining(self, encode_batch: Array, largest_batch: Array, microbatches: Array, size: int) -> Array:
        columns = encode_batch.tolist(), largest_batch.tolist(), microbatches.tolist()
        keys = list(zip(*columns, strict=True))
        order = {key: i for i, key in enumerate(dict.fromkeys(keys))}  # many candidates have equal encode batches
        new = [key for key in order if len(self._joined.get(key, ())) < size]
        if new:
            encode, largest, micro = np.asarray(new).T
            self._joined.update(zip(new, self._with_joining(encode, largest, micro, size), strict=True))
        return np.stack([self._joined[key][:size] for key in order])[[order[key] for key in keys]]

    def _with_joining(self, encode_batch: Array, largest_batch: Array, microbatches: Array, size: int) -> Array:
        """Return the seconds of an iteration in which some steps compute the K/V of an encoder's output. # [n, grid]

        The requests of a batch join together, so no request joins in most steps. Only steps in which requests join read
        the weights for this K/V, and later steps wait for such a step. With larger batches, there are fewer such steps.
        With smaller batches, each of them takes less time.
        """
        cost, slowest, through = (times[..., :size] for times in self._grid)
        joining = GRID[:size] / self.mean_decodes
        tokens = joining / _share_joined(joining, encode_batch[:, None]) * self.lengths.mean_input  # [n, grid]
        some = _share_joined(joining, largest_batch[:, None])
        extra = self.cost.cross_kv(tokens)  # [kinds, n, grid]
        long = np.stack([(cost[:, None] + extra).max(axis=0), through + self.pipeline.all_stages(extra)])
        short = np.stack([np.broadcast_to(slowest, some.shape), np.broadcast_to(through, some.shape)])
        steps = np.stack([short, long], axis=1).reshape(2, 2, -1)
        share = np.stack([1 - some, some]).reshape(1, 2, -1)
        rounds = RandomSteps(steps[1], steps[0], share, np.repeat(microbatches, size)).round()
        return np.maximum(rounds[0].reshape(some.shape), 1e-12)

    @cached_property
    def _grid(self) -> tuple[Array, Array, Array]:
        """Seconds of a decode step on each kind of stage, on the slowest, and through all, by number of requests.

        # [kinds, grid], [grid], [grid]
        """
        lengths, lane = self.lengths, self.cost
        context = lengths.mean_decode_context - (lengths.mean_input if lane.has_encoder else 0.0)
        table = lane.decode(np.asarray([context]), lengths.mean_input)
        cost = table(GRID)[:, 0]
        # With less than one request on average, some micro-batches do not run, but those that run go through all
        # stages.
        some = np.maximum(GRID, 1.0)
        through = self.pipeline.through(table(some)[:, 0], lane.hop(some))
        return cost, np.maximum(cost.max(axis=0), 1e-12), through


def _share_joined(joining: Array, batch: Array) -> Array:
    """Return the share of steps in which requests join. A step gets `joining` requests on average, and whole batches of
    `batch` requests join together.
    """
    return np.clip(joining / batch, 1e-12, 1.0)


class Encoding(NamedTuple):
    """The times of encode batches.

    Attributes:
        through, interval, moving: seconds that a batch takes in the lane, seconds from one batch to the next, and
            seconds of a batch's transfer. # [n] each
        deviation: standard deviation of the tokens in a batch, relative to the mean. # [n]
    """

    through: Array
    interval: Array
    moving: Array
    deviation: Array


class EncodeLane:
    """Predicts the times of encode batches from their numbers of prompts."""

    def __init__(self, cost: LaneCost, lengths: Lengths, transfer: TransferCost, transferred: float) -> None:
        self.cost, self.lengths, self.transfer = cost, lengths, transfer
        self.pipeline = Pipeline(cost)
        self.num_stages = self.pipeline.num_stages
        self.num_groups = self.num_stages if cost.is_grouped else 1
        self._transferred = transferred
        self._longest = LONGEST * float(expected_max_deviate(self.num_stages))
        # The prompt at either end of a batch is a long one with a probability in proportion to its length, and extends
        # beyond the batch's target by up to half its length.
        mean_cube = float(lengths.inputs**3.0 @ lengths.input_probabilities)
        self._sd_tokens = np.sqrt(mean_cube / lengths.mean_input / 6) / lengths.mean_input

    def __call__(self, batch: Array) -> Encoding:
        times = self._table(batch)
        stages, through, moving = times[:-2], times[-2], times[-1]
        deviation = self._sd_tokens / batch
        if self.num_groups > 1:
            return Encoding(through, through / self.num_groups + self.transfer.occupies * moving, moving, deviation)
        # As many batches run as there are stages, and the longest of them delays the others.
        pace = through * (1 + self._longest * deviation) / self.num_stages
        interval = np.maximum(np.maximum.reduce(stages), pace) + self.transfer.occupies * moving
        return Encoding(through, interval, moving, deviation)

    def transfer_s(self, batch: Array) -> Array:
        return np.asarray(self._table(batch)[-1])

    def work(self, batch: Array) -> Array:
        return np.asarray(self.pipeline.devices @ self._table(batch)[:-2]) / self.num_groups

    @cached_property
    def _table(self) -> Table:
        """Seconds by prompts: of an encode step on each kind of stage and through the lane, and of the transfer."""
        alone, hop, tokens = self.cost.encode(self.lengths), self.cost.hop, self.lengths.mean_input
        moving = self.transfer.line
        sent = tokens * self._transferred
        points = np.unique(np.concatenate([alone.points, hop.points / tokens, moving.points / (sent or tokens)]))
        cost = alone(points)
        through = cost[0] if self.num_groups > 1 else self.pipeline.through(cost, hop(points * tokens))
        return Table(points, np.concatenate([cost, through[None], moving(points * sent)[None]]))
