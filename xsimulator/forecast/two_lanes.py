"""Predict waa in closed form, as two asynchronous lanes at saturation, for many candidates at once.

While B requests decode, an iteration of all micro-batches takes T(B). So X = B / (E[S] T(B)) requests a second end, and
as many enter. Three things limit this rate: the encode lane, which takes B_E requests every t_E; the K/V transfers; and
the largest number B_max of requests in both lanes:

    B_E sum_{j>=0} G(j B_E / X) + X wait <= B_max,   X = B / (E[S] T(B))

Here batch j entered j periods of B_E / X before. G(a) is the share of requests that are still in the lanes a seconds
after they entered. A batch waits until earlier requests leave room for all of it, and then until the encode lane is
free (as in a queue with batch arrivals). All requests are in the lanes until they are encoded. Requests with further
output are then moved, join (after half an iteration on average) and run their iterations. If all requests of a batch
end together, whole batches are in the lanes. Otherwise, half a batch's slots are free on average. If devices are CPU
cores, moving K/V takes their compute time, so both lanes do nothing else meanwhile (TransferCost.occupies). Source:
ExeGPT sec. 4.1, 6, for the case B = B_E E[S]. Encode and decode then take turns.
"""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InputError
from xsimulator.costs.curves import Array
from xsimulator.costs.step_cost import LaneCost, StepCounts, TransferCost
from xsimulator.forecast.base import Performance, SizesFirst
from xsimulator.forecast.lane_balance import FINER, GRID, LEVELS, LanePair, Stays, Waiting, locate, size_for
from xsimulator.forecast.waa_lanes import DecodeLane, EncodeLane
from xsimulator.lengths import Lengths

FEW_BATCHES = 4
"""The closed form may predict too low a throughput if the limit on requests is smaller than this number of encode
batches, each with one more request.
"""
MOST_LENGTHS = 64
"""Largest number of lengths of prompts whose times are computed. Other prompts count as the next shorter of these."""
Bools = npt.NDArray[np.bool_]


def is_tight(cap: Array, encode_batch: Array) -> Bools:
    """Return whether too few batches fit under the cap. The closed form predicts a throughput too low, by up to 77%.

    A batch enters as soon as enough requests have ended. In the closed form, the batch waits until the mean number of
    requests is low enough. This is accurate only for many requests. If few batches fit, Little's law gives the bound.
    """
    return cap < FEW_BATCHES * (encode_batch + 1)


class TwoLaneModel:
    """Predicts waa for an encode lane, a decode lane and one workload."""

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
            accepted = (
                "waa sends K/V through host memory: state the host's link to the devices, or choose another policy"
            )
            raise InputError("cluster.host", None, accepted)
        if encode.profile.kv_transfer is None:
            says = "waa needs times of K/V transfers, which this profile lacks: choose another policy, or profile again"
            raise InputError("profile", encode.profile.model.name, says)
        self.encode, self.decode, self.lengths = encode, decode, lengths
        self.transfer = TransferCost(encode, decode)
        self._prompt_variance = lengths.mean_square_input / lengths.mean_input**2 - 1
        """Variance of prompt lengths, relative to the square of the mean length."""
        first = int(decode.has_encoder)  # an encoder computes no token, so the decode lane computes the first
        self.mean_decodes = lengths.mean_decodes + first
        self.quantile_decodes = lengths.decodes_at(quantile) + first
        self._stays = Stays(np.concatenate([[1.0], lengths.survival]) if first else lengths.survival)
        self._encoding = EncodeLane(encode, lengths, self.transfer, self._stays.transferred)
        self._decoding = DecodeLane(decode, lengths, self._encoding, self._stays, self.mean_decodes)

    def evaluate(self, encode_batch: Array, cap: Array, microbatches: Array) -> Performance:
        """Return the predictions for candidates. `cap` is the largest number of requests in both lanes. # [n] each"""
        tokens = encode_batch * self.lengths.mean_input
        sizes = {
            "encode_batch": encode_batch,
            "encode_tokens": tokens,
            "peak_requests": cap,
            "peak_variance": np.zeros_like(cap),
            "peak_tokens": 1.1 * tokens + self.lengths.max_input,
        }
        return SizesFirst(sizes, partial(self._times, encode_batch, cap, microbatches))

    def _times(self, encode_batch: Array, cap: Array, microbatches: Array) -> dict[str, Array]:
        """Return the fields of `Performance` that the balance of the lanes decides."""
        through, interval, moving, sd = self._encoding(encode_batch)
        stages = self._encoding.num_stages
        limit = encode_batch / np.maximum(interval, moving)
        rounds = self._decoding.rounds(encode_batch, encode_batch, microbatches, size_for(cap / microbatches))
        lanes = LanePair(encode_batch, encode_batch, through, moving, microbatches, rounds)
        waiting = Waiting(1 / encode_batch, sd * sd, interval, limit, self._encoding.num_groups)
        batch, step = self._balance(lanes, waiting, cap)
        mean_decodes = max(self.mean_decodes, 1e-9)
        throughput = np.minimum(batch / (mean_decodes * step), limit)

        queued = throughput / limit * np.maximum(stages * interval - through, 0.0)
        decodes, emits = self.quantile_decodes, not self.decode.has_encoder
        own_cost, slow = (
            (step, step) if emits else self._decoding.with_newcomers(encode_batch, microbatches, batch, step, sd)
        )
        first_gap = moving + step / 2 + own_cost
        encoding = through + queued
        ttft = encoding + (0.0 if emits else first_gap)
        latency = encoding + ((first_gap + (decodes - 1) * step) if decodes else 0.0)
        has_first_gap = emits and 1 / mean_decodes > 0.01
        return {
            "throughput": throughput,
            "latency": latency,
            "ttft": ttft,
            "tpot": (latency - ttft) / max(decodes - (not emits), 1),
            "itl_p99": first_gap if has_first_gap else slow,
            "decode_batch": batch,
            "cycle": encode_batch / throughput,
            "gate": interval,
            "prompt_s": self._encoding(encode_batch + 1).through - through,
            "bubble": self._bubble(encode_batch, throughput, batch / microbatches, step / microbatches),
            "filling": np.zeros_like(step),
        }

    def most(
        self, encode_batch: Array, largest_batch: Array, cap: Array, microbatches: Array, latency_s: Array
    ) -> Array:
        """Return an upper bound on the requests a second of settings that keep the bound on latency.

        The bound combines two extremes. With the largest encode batch, the encode lane has its highest throughput, so
        the fewest slots stay free while the lane is busy. With the smallest encode batch, the fewest requests are in
        the lanes before their first decode step.
        """
        mean_decodes = max(self.mean_decodes, 1e-9)
        through, least_interval, moving, _ = self._encoding(encode_batch)
        _, interval, at_most, sd = self._encoding(largest_batch)
        limit = largest_batch / np.maximum(interval, at_most)
        # Beyond the profile's points, a batch may take longer per prompt than a smaller one.
        limit = np.maximum(limit, encode_batch / np.maximum(least_interval, moving))
        rounds = self._decoding.rounds(encode_batch, largest_batch, microbatches, size_for(cap / microbatches))
        lanes = LanePair(encode_batch, largest_batch, through, moving, microbatches, rounds)
        waiting = Waiting(1 / largest_batch, sd * sd, interval, limit)
        never_waits = is_tight(cap, largest_batch) | (self._encoding.num_groups > 1)
        batch, step = self._balance(lanes, waiting, cap, never_waits)
        # If larger batches take longer per request, fewer decoding requests have a higher throughput.
        up_to = np.where(lanes.decoding <= batch[:, None], lanes.decoding / rounds, 0.0).max(axis=1)
        most = np.minimum(np.maximum(batch / step, up_to) / mean_decodes, limit)
        if np.isinf(latency_s).all() or not self.quantile_decodes:
            return most
        # The throughput of steps that take as long as the bound on latency allows, up to rounding.
        longest = ((1 + 1e-9) * latency_s - through - moving) / (self.quantile_decodes + 0.5)
        size, inside = rounds.shape[1], lanes.decoding
        allowed = rounds <= longest[:, None]
        served = np.where(allowed, inside / rounds, 0.0).max(axis=1)
        last = size - 1 - allowed[:, ::-1].argmax(axis=1)  # the last allowed point, if any
        rows, after = np.arange(len(last)), np.minimum(last + 1, size - 1)
        start, end = rounds[rows, last], rounds[rows, after]
        share = np.clip((longest - start) / np.maximum(end - start, 1e-300), 0.0, 1.0)
        at_end = inside[rows, last] + share * (inside[rows, after] - inside[rows, last])
        with np.errstate(divide="ignore", invalid="ignore"):
            served = np.maximum(served, np.where(share < 1, at_end / np.maximum(longest, 1e-300), served))
        return np.where(allowed.any(axis=1), np.minimum(most, served / mean_decodes), 0.0)

    def _balance(
        self, lanes: LanePair, waiting: Waiting, cap: Array, never_waits: Bools | None = None
    ) -> tuple[Array, Array]:
        """Return the number of decoding requests, and the seconds of an iteration, if both lanes together have as many
        requests as the cap.

        Args:
            never_waits: for which candidates requests count as never waiting, so that the result is an upper bound
                (Little's law).
        """
        mean_decodes = max(self.mean_decodes, 1e-9)
        rate = lanes.decoding / (mean_decodes * lanes.rounds)
        stays = rate * self._stays.mean(lanes, lanes.rounds)
        # By Little's law, at least rate x residence time requests are in the lanes, and at most one batch more.
        first, _ = locate(stays + lanes.largest_batch[:, None] + self._forming(lanes) + waiting(rate), cap)
        last, _ = locate(stays if never_waits is None else rate * self._stays.least(lanes, lanes.rounds), cap + 1)
        low, high = lanes.at(first), np.minimum(lanes.at(last + 1), lanes.serving(waiting.limit, mean_decodes))
        for _ in range(LEVELS):
            points = low[:, None] + np.maximum(high - low, 0.0)[:, None] * FINER
            step = lanes.step(points)
            rate = points / (mean_decodes * step)
            inside = self._inside(lanes, rate, step, waiting)
            if never_waits is not None:
                inside = np.where(never_waits[:, None], rate * self._stays.least(lanes, step), inside)
            index, share = locate(inside, cap)
            rows = np.arange(len(cap))
            low, high = points[rows, index], points[rows, index + 1]
        batch = low + share * (high - low)
        return np.maximum(batch, 1e-12), lanes.step(batch[:, None])[:, 0]

    def _inside(self, lanes: LanePair, rate: Array, step: Array, waiting: Waiting) -> Array:
        """Return the free slots plus a lower bound on the requests in both lanes after a batch has entered."""
        batch, largest = lanes.encode_batch[:, None], lanes.largest_batch[:, None]
        rate = np.maximum(rate, 1e-300)
        left = self._stays.left(lanes, largest / rate, step)
        inside = np.maximum(batch * (1 + left), rate * self._stays.mean(lanes, step))
        # If the lanes are empty, a batch enters without waiting, whatever the cap.
        return inside + np.minimum(self._forming(lanes) + waiting(rate), inside - largest)

    def _forming(self, lanes: LanePair) -> Array:
        """Return the mean number of slots that are free while a batch forms, beyond the batch's own slots. # [n, 1]

        The number of prompts in a batch varies, because batches have equal numbers of tokens.
        """
        batch = lanes.encode_batch[:, None]
        forming: Array = (batch - 1) / (2 * batch) * self._prompt_variance - 0.5
        return forming

    def _bubble(self, encode_batch: Array, throughput: Array, each: Array, step: Array) -> Array:
        """Return the share of time in which the devices of both lanes are idle. # [n]"""
        encode = self._encoding.work(encode_batch) * throughput / encode_batch
        decode = self._decoding.work(each) / step
        encoders, decoders = self._encoding.pipeline.devices.sum(), self._decoding.pipeline.devices.sum()
        return 1 - (encode + decode) / (encoders + decoders)

    def prompt_s(self, encode_batch: Array) -> Array:
        """Return the encode lane's seconds for a prompt of the mean length in batches of up to `encode_batch` prompts.
        # [n], rising -> [n]
        """
        found: Array = np.minimum.accumulate(self._encoding(encode_batch).interval / encode_batch)
        return found

    def through_s(self) -> Array:
        """Return lower bounds on the seconds of a prompt of each length through a lane of stages. # [lengths]"""
        values = np.unique(self.lengths.inputs)
        some = values[np.unique(np.linspace(0, len(values) - 1, MOST_LENGTHS).round().astype(int))]
        steps = (StepCounts.of([(0, int(tokens), 1)], []) for tokens in some)
        times = np.asarray([sum(self.encode.step(step)) for step in steps])
        found: Array = times[np.searchsorted(some, self.lengths.inputs, side="right") - 1]
        return found

    @property
    def moving_s(self) -> float:
        """Lower bound on the seconds to move the K/V of a prompt of the mean length."""
        sizes = np.geomspace(1.0, 1024.0, 32)
        return float((self._encoding.transfer_s(sizes) / sizes).min())

    def group_times(self, encode_batch: Array) -> tuple[Array, Array]:
        """Return lower bounds on the seconds of a prompt of each length on one group: as a part of batches of up to
        `encode_batch` prompts on average, and alone. # [n] -> [n, lengths], [lengths]
        """
        inputs, stage = self.lengths.inputs, self.encode.stages[0]
        tables = self.encode.tables_of(stage)
        batches = tables.encode.batches[1:, None]
        attention = stage.decoder_layers * (tables.encode(batches, inputs) / batches).min(axis=0)
        tokens = tables.layers(stage.decoder_layers, with_last=True)
        least = tokens.least_per_unit(encode_batch * self.lengths.mean_input + inputs.max())[:, None] * inputs
        return least + attention, self._alone_s

    def longest_s(self, encode_batch: Array) -> Array:
        """Return an upper bound on the seconds of a batch of `encode_batch` prompts on average on one group. # [n]

        The rule exceeds the mean number of tokens in a batch by at most one prompt.
        """
        found: Array = self._encoding(encode_batch).through + self._alone_s.max()
        return found

    @cached_property
    def _alone_s(self) -> Array:
        steps = (StepCounts.of([(0, int(tokens), 1)], []) for tokens in self.lengths.inputs)
        return np.asarray([self.encode.step(step)[0] for step in steps])

    def least(
        self, encode_batch: Array, largest_batch: Array, decode_batch: Array, microbatches: Array
    ) -> tuple[Array, Array, Array]:
        """Return lower bounds on the latency, TTFT and TPOT of settings.

        Args:
            decode_batch: the smallest number of decoding requests.
        """
        through, _, moving, _ = self._encoding(encode_batch)
        each = decode_batch / microbatches
        before = np.minimum(GRID.searchsorted(each, side="right"), len(GRID) - 1) - 1
        rounds = self._decoding.rounds(encode_batch, largest_batch, microbatches, int(before.max()) + 2)
        start, end = rounds[np.arange(len(each)), before], rounds[np.arange(len(each)), before + 1]
        step = start + (end - start) * (each - GRID[before]) / (GRID[before + 1] - GRID[before])
        decodes, emits = self.quantile_decodes, not self.decode.has_encoder
        ttft = through + (0.0 if emits else moving + 1.5 * step)
        latency = through + ((moving + step / 2) if decodes else 0.0) + decodes * step
        return latency, ttft, (latency - ttft) / max(decodes - (not emits), 1)
