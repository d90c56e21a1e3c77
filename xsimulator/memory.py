"""Compute what fits: the K/V blocks that weights leave room for, and the requests that those blocks hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import InfeasibleError
from xgpt.core.schema import (
    BYTES_PER_ELEMENT,
    SLICE_TOKENS,
    ClusterSpec,
    DType,
    EngineSpec,
    KvPromise,
    ModelSpec,
    Precision,
)
from xsimulator.costs.curves import Array
from xsimulator.lengths import Lengths
from xsimulator.stages import Lane

WORKSPACE_BYTES = 256 * 2**20
"""Buffers of libraries and of the engine itself, activations not included."""


def activation_bytes_per_token(spec: ModelSpec, dtype: DType) -> int:
    """Peak of a step's intermediate tensors, in this dtype: the widest layer's inputs and outputs live together."""
    ffn = spec.ffn_size
    if spec.experts is not None:
        ffn = max(ffn, spec.experts.active * spec.experts.ffn_size + spec.experts.shared_ffn_size)
    wide = 2 * spec.hidden_size + max((2 if spec.gated_ffn else 1) * ffn, 3 * spec.num_heads * spec.head_dim)
    return wide * BYTES_PER_ELEMENT[dtype]


class LaneMemory:
    """Memory of the devices of one lane's stages.

    Every stage keeps its layers' K/V of every request in the lane, so the stage with the fewest blocks decides. The
    encode lane of an encoder-decoder has no decoder layer: its last stage keeps what the encoder has read, a hidden
    state a token, until the decode lane has received it. Arrays have an entry for each stage; the devices of its group
    hold the same.

    Args:
        precision: types of what lies in memory.
        keeps: what is known of the engine: the memory that it keeps for itself.
        kept_blocks: blocks that hold prompts, of requests that run and of earlier ones, for later ones to find.

    Raises:
        InfeasibleError: not even the weights fit on some stage.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cluster: ClusterSpec,
        precision: Precision,
        lane: Lane,
        block_size: int,
        keeps: EngineSpec | None = None,
        kept_blocks: int = 0,
    ) -> None:
        size, state = BYTES_PER_ELEMENT[precision.weights], BYTES_PER_ELEMENT[precision.state]
        spec = spec.unpacked if precision.packs else spec
        self.lane = lane
        self.kept_blocks = kept_blocks
        self._usable = int(cluster.device.memory_bytes * cluster.device.usable_memory)
        tp = np.asarray([stage.tp for stage in lane], float)
        decoder = np.asarray([stage.decoder_layers for stage in lane], float)
        encoder = np.asarray([stage.encoder_layers for stage in lane], float)
        table = spec.vocab_size * spec.hidden_size
        # A tied matrix stands on both ends of a pipeline, and where they are one stage once, unless heads are packed.
        shared = spec.tie_embeddings and not precision.packs
        embeds, heads = (np.asarray([getattr(stage, end) for stage in lane], float) for end in ("embeds", "heads"))
        tables = embeds * state + heads * (1 - shared * embeds) * size
        if precision.screens:  # in eight bits, with two norms of each token, and as it was read: a tied embedding's
            of_screen = 1 + 2 * BYTES_PER_ELEMENT["float32"] / spec.hidden_size
            tables += heads * (of_screen + (1 - spec.tie_embeddings * embeds) * state)
        last = np.cumsum(decoder)
        of_decoder = [
            spec.layer_weight_bytes(precision.weights, int(end - count), int(end))
            for end, count in zip(last, decoder, strict=True)
        ]
        unshared = decoder * spec.unshared_bytes(precision.weights)
        shared = np.asarray(of_decoder) - unshared + encoder * spec.encoder_layer_params * size
        self.weight_bytes: Array = (shared + tables * table) / tp + unshared
        """Of one device of each stage."""
        kept = [spec.kv_bytes_per_layer(precision.kv, max(spec.num_kv_heads / of, 1.0)) for of in tp]
        self._block_bytes: Array = block_size * decoder * np.asarray(kept)
        if not decoder.any():
            self._block_bytes[-1] = block_size * spec.hidden_size * state
        self._activation_bytes = activation_bytes_per_token(spec, precision.state)
        kept_bytes, group_bytes = WORKSPACE_BYTES, 0
        if keeps is not None:
            kept_bytes = WORKSPACE_BYTES if keeps.kept_bytes is None else keeps.kept_bytes
            group_bytes = keeps.group_bytes
        self.fixed_bytes: Array = self.weight_bytes + kept_bytes + group_bytes * (tp > 1)
        occupied = self.fixed_bytes
        if keeps is not None and keeps.shares_rest:  # the share of the weights is theirs, too
            occupied = occupied - (1 - cluster.device.usable_memory) * self.weight_bytes
        kinds = dict.fromkeys(zip(occupied.tolist(), self._block_bytes.tolist(), strict=True))
        self._distinct = np.asarray(list(kinds)).T[:, :, None]
        """What K/V cannot have of `_usable`, and _block_bytes, of stages that differ. # [2, distinct, 1]"""
        worst = int(np.argmax(occupied))
        if occupied[worst] >= self._usable:
            needed, offered = self.fixed_bytes[worst] / 2**30, self._usable / 2**30
            raise InfeasibleError(
                f"memory: {spec.name} needs {needed:.1f} GiB in {precision.weights} on a device of stage {worst} "
                f"before any K/V, {cluster.name} offers {offered:.1f} GiB; take more devices, larger ones or a smaller "
                f"model",
                nearest_bound_s=None,
                binding="memory",
            )

    def blocks_beside(self, step_tokens: npt.ArrayLike) -> Array:
        """Blocks for which every stage has room once a step of `step_tokens` has its activations. # [n] -> [n]"""
        at_once = np.minimum(np.atleast_1d(np.asarray(step_tokens, float)), SLICE_TOKENS)
        fixed, block = self._distinct
        free = self._usable - fixed - at_once * self._activation_bytes
        with np.errstate(divide="ignore"):
            blocks = np.where(block > 0, free / block, np.inf)
        return np.floor(np.maximum(blocks.min(axis=0), 0.0))

    def device_bytes(self, blocks: float, step_tokens: float) -> tuple[int, ...]:
        """Bytes in use on each device, stage by stage, with these K/V blocks and the largest step's activations."""
        activations = min(step_tokens, SLICE_TOKENS) * self._activation_bytes
        by_stage = self.fixed_bytes + activations + blocks * self._block_bytes
        return tuple(int(used) for stage, used in zip(self.lane, by_stage, strict=True) for _ in range(stage.tp))


def capacity(
    lengths: Lengths, blocks: npt.ArrayLike, block_size: int, kv: KvPromise = "reserve", kept_blocks: int = 0
) -> npt.NDArray[np.float64]:
    """Requests that may be inside at once.

    Each holds blocks of mean r and variance v. Under "reserve" as many are inside as fit, a compound Poisson sum: the
    largest B with B E[r] + z sqrt(B E[r^2]) <= blocks; one that does not fit just waits, so 99 of 100 moments will do.
    Under "quantile" B is the plan's `max_running`, and no more are inside: the sum varies by B v alone; where it does
    not fit one is preempted, so it is 999 of 1000 moments. Both solve a quadratic in sqrt(B).

    Args:
        kept_blocks: blocks for prompts that later ones find; the outputs so far must fit into the others. What is
            promised and not used yet keeps prompts, too.
    """
    if kept_blocks:
        mean, mean_square = lengths.output_blocks(block_size)
        beside = _solve(2.33, mean, mean_square, np.asarray(blocks, float) - kept_blocks)
        return np.minimum(beside, capacity(lengths, blocks, block_size, kv))
    if kv == "reserve":
        z, (mean, mean_square) = 2.33, lengths.reserved_blocks(block_size)
    else:
        z, (mean, mean_square) = 3.09, lengths.occupied_blocks(block_size)
        mean_square -= mean**2
    return _solve(z, mean, mean_square, np.asarray(blocks, float))


def _solve(z: float, mean: float, mean_square: float, blocks: Array) -> Array:
    """The largest B with B mean + z sqrt(B mean_square) <= blocks."""
    available = np.maximum(blocks, 0.0)
    spread = z * np.sqrt(max(mean_square, 0.0))
    root = (np.sqrt(spread**2 + 4 * mean * available) - spread) / (2 * mean)
    return root * root
