"""Predict how long a batch takes in the encode lane of waa, when the next one follows, and how long transfers take."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from xsimulator.costs.curves import Array, Table
from xsimulator.costs.step_cost import LaneCost
from xsimulator.costs.transfer import TransferCost
from xsimulator.forecast.pipeline import Pipeline, expected_max_deviate
from xsimulator.lengths import Lengths


class Encoding(NamedTuple):
    """The times of encode batches.

    Attributes:
        through, interval, moving: seconds of a batch through the lane, from one batch to the next, and of the transfer.
            # [n] each
        deviation: standard deviation of the tokens in a batch, relative to the mean. # [n]
    """

    through: Array
    interval: Array
    moving: Array
    deviation: Array


class EncodeLane:
    """Predicts how long encode batches take, by number of prompts.

    Args:
        transferred: share of requests whose K/V moves to the decode lane.
    """

    def __init__(self, cost: LaneCost, lengths: Lengths, transfer: TransferCost, transferred: float) -> None:
        self.cost, self.lengths, self.transfer = cost, lengths, transfer
        self.pipeline = Pipeline(cost)
        self.num_stages = self.pipeline.num_stages
        self._transferred = transferred
        self._longest = float(expected_max_deviate(self.num_stages))
        self._sd_tokens = np.sqrt(lengths.mean_square_input / 6) / lengths.mean_input

    def __call__(self, batch: Array) -> Encoding:
        """Return the times of batches of `batch` prompts."""
        times = self._table(batch)
        stages, through, moving = times[:-2], times[-2], times[-1]
        deviation = self._sd_tokens / batch
        # As many batches run as there are stages, and the longest of them delays the others.
        pace = through * (1 + self._longest * deviation) / self.num_stages
        interval = np.maximum(np.maximum.reduce(stages), pace) + self.transfer.occupies * moving
        return Encoding(through, interval, moving, deviation)

    def transfer_s(self, batch: Array) -> Array:
        """Return the seconds that the transfer of a batch takes. # [n]"""
        seconds: Array = self._table(batch)[-1]
        return seconds

    def work(self, batch: Array) -> Array:
        """Return the device seconds of a batch. # [n]"""
        work: Array = self.pipeline.devices @ self._table(batch)[:-2]
        return work

    @cached_property
    def _table(self) -> Table:
        """Seconds of an encode step, by prompts: on each kind of stage, through the lane, and of the transfer."""
        alone, hop, tokens = self.cost.encode(self.lengths), self.cost.hop, self.lengths.mean_input
        moving = self.transfer.line
        sent = tokens * self._transferred
        points = np.unique(np.concatenate([alone.points, hop.points / tokens, moving.points / (sent or tokens)]))
        cost = alone(points)
        through = self.pipeline.through(cost, hop(points * tokens))
        return Table(points, np.concatenate([cost, through[None], moving(points * sent)[None]]))
