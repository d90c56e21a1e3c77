"""Predict static. It encodes a batch and decodes it until the longest output ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xgpt.core.schema import StaticSettings
from xsimulator.costs.curves import Array
from xsimulator.forecast.base import Columns, Forecast, Ints, Performance, Stations, column
from xsimulator.forecast.one_lane import OneLaneModel, segments
from xsimulator.forecast.pipeline import expected_max_deviate
from xsimulator.forecast.placements import BoundTerms, LeastSteps
from xsimulator.lengths import Lengths

MOST_SEGMENTS = 24
"""Largest number of segments into which the iterations of a batch are grouped."""


class Static(Forecast[OneLaneModel]):
    settings = StaticSettings
    model = OneLaneModel
    line = load = "batch"
    stations = Stations(admits_each_step=False, frees_together=True)
    reserves_kv = True

    def microbatches(self, counts: Sequence[int]) -> list[dict[str, int]]:
        # FasterTransformer has the same number of micro-batches in encode and decode, DeepSpeed Inference more in
        # encode.
        factors = (1, 2) if len(counts) > 1 else (1,)
        return [
            {"encode_microbatches": factor * count, "decode_microbatches": count}
            for count in counts
            for factor in factors
        ]

    def predict(self, model: OneLaneModel, columns: Columns) -> Performance:
        parts = (column(columns, f"{part}_microbatches") for part in ("encode", "decode"))
        return _predict(model, columns["batch"], *parts)

    def placement_terms(self, steps: LeastSteps) -> BoundTerms:
        # Finished requests keep their slots, so all decode until the longest ends. The first round may overlap with
        # encoding.
        lane, each, decode, passing = steps.iterations, steps.each, steps.decode, steps.passing
        rounds = np.maximum(lane.longest - 1, 0.0) / lane.mean_decodes
        working = [steps.phase[:, None] / lane.mean_decodes + rounds * np.maximum(each * decode, passing)]
        own_rounds = np.maximum(lane.longest_met - 1, 0.0) / lane.decodes
        met = [each * (decode * own_rounds + steps.encode / lane.decodes), passing * (lane.decodes - 1) / lane.decodes]
        return BoundTerms(working, met)


def _predict(model: OneLaneModel, batch: Array, encode_parts: Array, decode_parts: Array) -> Performance:
    """Return the predictions for batches that are encoded and then decode at full size until the longest output ends.

    Source: ExeGPT sec. 2 (FasterTransformer: no early termination; DeepSpeed Inference: more micro-batches in
    encode than in decode).
    """
    lengths = model.lengths
    prompt_variance = lengths.mean_square_input / lengths.mean_input**2 - 1
    each = batch / encode_parts
    kinds = len(model.lane.kinds)
    encode = model.encode_table(each)
    te, own_decode = encode[:kinds], encode[kinds]
    slowest = np.maximum.reduce(te)
    sd = np.sqrt(np.maximum(prompt_variance, 0.0) / each)
    ragged = expected_max_deviate(encode_parts) * sd * np.maximum(own_decode - slowest, 0.0)
    encoding = own_decode + (encode_parts - 1) * slowest + ragged

    place, starts, weights, log_empty = model.part(_rounds)
    together = batch / decode_parts
    decode = model.decode_table(np.broadcast_to(together[:, None], (len(batch), len(starts))), place)
    some = -np.expm1(batch[:, None] * log_empty)
    active = -np.expm1(together[:, None] * log_empty)
    some, active = np.add.reduceat(np.concatenate([some, active]), starts, axis=1).reshape(2, len(batch), -1)
    active = decode_parts[:, None] * active / np.maximum(some, 1e-300)
    own_way = decode[kinds]
    td = active * decode[:kinds]  # [kinds, n, segments]
    rounds = np.maximum(np.maximum.reduce(td), own_way)
    # Every stage encodes all parts before it decodes. The first part begins to decode before the last part is encoded.
    # If decoding takes longer through the stages than encoding, the first round is late.
    other_stages = own_way[:, 0] - np.maximum.reduce(decode[:kinds, :, 0]) - (own_decode - slowest)
    late = np.maximum(np.maximum.reduce(td[:, :, 0]) + other_stages - rounds[:, 0], 0.0)
    cycle = encoding + (rounds * some).sum(axis=1) + late * some[:, 0] / weights[0]
    decodes = model.quantile_decodes
    met = np.minimum(np.maximum(decodes - starts, 0), weights)
    decoding = (rounds * met).sum(axis=1) + late * bool(decodes)
    ttft, tpot = own_decode + (encode_parts - 1) / 2 * slowest, decoding / max(decodes, 1)
    return Performance(
        throughput=batch / cycle,
        latency=encoding + decoding,
        ttft=ttft,
        tpot=tpot,
        itl_p99=np.maximum.reduce(rounds, axis=1),
        encode_batch=batch,
        encode_tokens=batch * lengths.mean_input,
        decode_batch=batch,
        peak_requests=batch,
        peak_variance=np.zeros_like(cycle),
        peak_tokens=_most_tokens(lengths, each),
        cycle=cycle,
        gate=cycle,
        prompt_s=model.prompt_s(each),
        bubble=model.pipeline.bubble(encode_parts * te + (td * some).sum(axis=2), cycle),
        filling=np.zeros_like(cycle),
    )


def _most_tokens(lengths: Lengths, requests: Array) -> Array:
    """Return a number of prompt tokens that `requests` hardly ever exceed (mean plus four standard deviations)."""
    variance = max(lengths.mean_square_input - lengths.mean_input**2, 0.0)
    return np.minimum(requests * lengths.mean_input + 4 * np.sqrt(requests * variance), requests * lengths.max_input)


def _rounds(model: OneLaneModel) -> tuple[tuple[Ints, Array], Ints, Ints, Array]:
    """Return each segment of a static batch's decode steps: its position in the table, first step, and number of steps.

    Also return, for each iteration, the log of the probability that a request has ended before the iteration.
    """
    length = len(model.lengths.survival)
    edges = segments(length, {model.quantile_decodes}, MOST_SEGMENTS)
    weights = np.diff(edges)
    middles = edges[:-1] + (weights + 1) / 2
    with np.errstate(divide="ignore"):
        log_empty = np.log1p(-np.minimum(model.lengths.survival, 1.0))
    return model.decode_table.locate(model.self_context + middles), edges[:-1], weights, log_empty
