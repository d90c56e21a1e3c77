"""Closed form of WAA: two lanes, asynchronous, at saturation, vectorised over candidates.

With B requests in decode, an iteration of all micro-batches takes T(B), and the lane completes B / (E[S] T(B)) requests
a second. That number is the rate at which requests enter; what limits it is the encode lane, which takes B_E requests
every t_E, the K/V transfers, or the cap on requests inside:

    B + X (encode + transfer + joining) + (B_E - 1) / 2 <= B_max,   X = B / (E[S] T(B))

as a batch waits until all of it fits. Whoever has been transferred joins after half an iteration in the mean.
Source: ExeGPT sec. 4.1, 6, where B = B_E E[S]: the case in which encode and decode take turns.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from xgpt.errors import InputError
from xgpt.schema import WaaSettings
from xsimulator.analytic.performance import Performance
from xsimulator.analytic.pipeline import Pipeline, expected_max_deviate
from xsimulator.cost import Array, Line
from xsimulator.lane import LaneCost, Table
from xsimulator.lengths import Lengths

GRID = np.unique(np.concatenate([np.linspace(0, 64, 65), np.geomspace(64, 8192, 64)]))
"""Requests of a decode micro-batch at which the closed form looks for its steady state."""


class TwoLaneModel:
    """Predicts waa for an encode lane, a decode lane and one workload.

    Args:
        quantile: of the output length, for which latency is reported.

    Raises:
        InputError: the profile holds no times of K/V transfers.
    """

    def __init__(self, encode: LaneCost, decode: LaneCost, lengths: Lengths, quantile: float = 0.99) -> None:
        if encode.profile.kv_transfer is None:
            raise InputError("profile", encode.profile.model, "it holds no times of K/V transfers: waa needs them")
        self.encode, self.decode, self.lengths = encode, decode, lengths
        self.transfer = Transfer(encode, decode)
        self._encode_pipeline, self._decode_pipeline = Pipeline(encode), Pipeline(decode)
        first = int(decode.has_encoder)  # an encoder's lane makes no token: the decode lane makes the first, too
        self.mean_decodes = lengths.mean_decodes + first
        self.quantile_decodes = lengths.decodes_at(quantile) + first

    def estimate(self, settings: WaaSettings) -> dict[str, float]:
        """Predict one plan's settings."""
        return self.evaluate(
            encode_batch=settings.encode_batch,
            max_decode_batch=settings.max_decode_batch,
            decode_microbatches=settings.decode_microbatches,
        ).at(0)

    def evaluate(self, **columns: npt.ArrayLike) -> Performance:
        """Predict candidates; `columns` are encode_batch, max_decode_batch and decode_microbatches."""
        values = {name: np.atleast_1d(np.asarray(column, float)) for name, column in columns.items()}
        encode_batch, cap = values["encode_batch"], values["max_decode_batch"]
        microbatches = values.get("decode_microbatches", np.ones_like(cap))
        lengths = self.lengths
        through, interval, moving, sd = self._encoding(encode_batch)
        tokens, stages = encode_batch * lengths.mean_input, self._encode_pipeline.num_stages
        limit = encode_batch / np.maximum(interval, moving)
        inside, rate, total = self._decoding(encode_batch, through + moving, microbatches)
        mean_decodes = max(self.mean_decodes, 1e-9)
        batch = np.minimum(_crossing(inside, total, cap), _crossing(inside, rate, limit))
        batch = np.maximum(batch, 1e-9)
        step = self._step(batch, microbatches)
        throughput = np.minimum(batch / (mean_decodes * step), limit) if self.mean_decodes else limit

        met = sd**2
        encoding = through * (1 + met)
        queued = np.where(throughput >= 0.999 * limit, np.maximum(stages * interval - through, 0.0), 0.0)
        first_gap = moving + step / 2 + step
        decodes = self.quantile_decodes
        emits = not self.decode.has_encoder
        ttft = encoding + queued + (0.0 if emits else first_gap)
        latency = encoding + queued + ((moving + step / 2) if decodes else 0.0) + decodes * step
        has_first_gap = emits and 1 / mean_decodes > 0.01
        return Performance(
            throughput=throughput,
            latency=latency,
            ttft=ttft,
            tpot=(latency - ttft) / max(decodes - (not emits), 1),
            itl_p99=first_gap if has_first_gap else step,
            encode_batch=encode_batch,
            encode_tokens=tokens,
            decode_batch=batch,
            peak_requests=cap,
            peak_tokens=1.1 * tokens + lengths.max_input,
            cycle=encode_batch / throughput,
        )

    def limits(self, encode_batch: Array, max_decode_batch: Array, microbatches: Array) -> tuple[Array, Array]:
        """Requests a second that the encode lane, and that the cap, allow: the throughput is at most either.

        The first rises with encode_batch; the second falls with it, and rises with max_decode_batch.
        """
        through, interval, moving, _ = self._encoding(encode_batch)
        inside, _, total = self._decoding(encode_batch, through + moving, microbatches)
        batch = np.maximum(_crossing(inside, total, max_decode_batch), 1e-9)
        decode = batch / (max(self.mean_decodes, 1e-9) * self._step(batch, microbatches))
        return encode_batch / np.maximum(interval, moving), decode

    def _encoding(self, encode_batch: Array) -> tuple[Array, Array, Array, Array]:
        """(seconds through the encode lane, from one batch to the next, of the transfer; deviation of its tokens)."""
        tokens = encode_batch * self.lengths.mean_input
        te = self._encode_table(encode_batch)
        through = self._encode_pipeline.through(te, self.encode.hop(tokens))
        sd = np.sqrt(self.lengths.mean_square_input / 6) / tokens
        stages = self._encode_pipeline.num_stages
        # As many batches are under way as there are stages: the longest of them sets their pace.
        longest = 1 + expected_max_deviate(stages) * sd
        return through, np.maximum(te.max(axis=0), through * longest / stages), self.transfer(tokens), sd

    def _decoding(self, encode_batch: Array, before: Array, microbatches: Array) -> tuple[Array, Array, Array]:
        """(requests in decode, requests a second, requests inside in all) at the grid's points. # [n, grid] each

        Args:
            before: seconds from admission to the decode lane.
        """
        rounds, hops = self._decode_grid  # [grid] of the slowest stage, [grid] through all
        m = microbatches[:, None]
        seconds = np.maximum(m * rounds, hops)
        inside = m * GRID
        rate = inside / (max(self.mean_decodes, 1e-9) * np.maximum(seconds, 1e-12))
        total = inside + rate * (before[:, None] + seconds / 2) + (encode_batch[:, None] - 1) / 2
        return inside, rate, total

    def _step(self, batch: Array, microbatches: Array) -> Array:
        """Seconds of an iteration of all micro-batches."""
        rounds, hops = self._decode_grid
        each = batch / microbatches
        return np.maximum(microbatches * np.interp(each, GRID, rounds), np.interp(each, GRID, hops))

    @cached_property
    def _encode_table(self) -> Table:
        return self.encode.encode(self.lengths)

    @cached_property
    def _decode_grid(self) -> tuple[Array, Array]:
        """Seconds of a decode step on the slowest stage, and through all, against the requests in it. # [grid]"""
        lengths, decode = self.lengths, self.decode
        context = lengths.mean_decode_context - (lengths.mean_input if decode.has_encoder else 0.0)
        cost = decode.decode(np.asarray([context]), lengths.mean_input)(GRID)[:, 0]
        if decode.has_encoder:
            # Whoever decodes for the first time brings the encoder's output: E[I] tokens each, 1 / E[S] of the batch.
            cost = cost + decode.cross_kv(GRID / self.mean_decodes * lengths.mean_input)
        return cost.max(axis=0), self._decode_pipeline.through(cost, decode.hop(GRID))


class Transfer:
    """Seconds in which the K/V of a batch of prompts moves to the decode lane, against its tokens.

    Devices move their shares at once, so the one with the largest share of the layers takes longest. An encoder's
    output is its last hidden states alone.
    """

    def __init__(self, encode: LaneCost, decode: LaneCost) -> None:
        assert encode.profile.kv_transfer is not None
        spec = encode.spec
        self._line = Line.of(encode.profile.kv_transfer)
        if encode.has_encoder:
            self._share = spec.hidden_size / (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim)
        else:
            stages = (*encode.stages, *decode.stages)
            self._share = max(stage.decoder_layers / stage.tp for stage in stages) / spec.num_layers

    def __call__(self, tokens: Array) -> Array:
        return self._line(tokens * self._share)

    def at(self, tokens: float) -> float:
        return self._line.at(tokens * self._share)


def _crossing(x: Array, y: Array, level: Array) -> Array:
    """Where a rising row of y reaches its level, by linear interpolation. # [n, grid], [n, grid], [n] -> [n]"""
    below = y <= level[:, None]
    # The smallest root: up to the first point above.
    index = np.where(below.all(axis=1), y.shape[1] - 1, np.argmin(below, axis=1))
    index = np.clip(index, 1, y.shape[1] - 1)
    rows = np.arange(len(level))
    low, high = y[rows, index - 1], y[rows, index]
    share = np.clip((level - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)
    return x[rows, index - 1] + share * (x[rows, index] - x[rows, index - 1])
