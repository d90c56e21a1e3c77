"""Compute how many K/V blocks fit in memory beside a model's weights, and how many requests these blocks hold."""

from __future__ import annotations

import re
from typing import NamedTuple

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
    Speculation,
)
from xsimulator.costs.curves import Array
from xsimulator.costs.speculating import Draft
from xsimulator.lengths import Lengths
from xsimulator.stages import Lane, StageShape

MIB = 2**20
WORKSPACE_BYTES = 256 * MIB
"""Buffers of libraries and of the engine itself, without activations."""


PADDED = "mxfp4"
"""Weight format of experts whose sizes engines pad. Its kernels need no buffers between the matrix products of
experts."""
OWN_KERNELS = re.compile(r"^g?h(100|20|200)|^g?b[23]00")
"""Names of devices for which engines have special kernels for this format. On other devices they use Marlin's
kernels."""


def activation_bytes_per_token(spec: ModelSpec, dtype: DType) -> int:
    """Return the peak bytes of a step's intermediate tensors per token: the widest layer's inputs and outputs
    together."""
    ffn = spec.ffn_size
    if spec.experts is not None:
        ffn = max(ffn, spec.experts.active * spec.experts.ffn_size + spec.experts.shared_ffn_size)
    wide = 2 * spec.hidden_size + max((2 if spec.gated_ffn else 1) * ffn, 3 * spec.num_heads * spec.head_dim)
    return wide * BYTES_PER_ELEMENT[dtype]


class StepBuffers:
    """Bytes that an engine reserves on a device of each stage for its largest step.

    xgpt's own engine runs a step in slices and frees the memory of each slice before the next one. Other engines run a
    step of the largest size before they allocate K/V memory, and sample for their largest number of requests: they
    reserve the hidden states of all tokens, plus the larger of a layer's tensors and the memory of logits and sampling.
    Some versions also reserve the buffers between the matrix products of experts.

    Args:
        keeps: the engine. None means xgpt's own.
        slots: largest number of requests in its batches.
    """

    def __init__(
        self, spec: ModelSpec, precision: Precision, lane: Lane, keeps: EngineSpec | None = None, slots: int = 0
    ) -> None:
        if keeps is None or keeps.framework == "xgpt":
            self._most = float(SLICE_TOKENS)
            activations = float(activation_bytes_per_token(spec, precision.state))
            self.rows: Array = np.asarray([(activations, 0.0, 0.0)] * len(lane))
            return
        self._most = np.inf
        size = 0 if keeps.shares_only_cache else BYTES_PER_ELEMENT[precision.state]
        has_buffers = keeps.keeps_expert_buffers and getattr(spec.quantization, "kind", None) != PADDED
        rows = []
        for stage in lane:
            layer, between = _widths(spec, stage)
            sampled = stage.heads * keeps.sampling_bytes * slots * spec.vocab_size
            stays = spec.hidden_size + has_buffers * between
            rows.append((size * stays, size * (layer + (not has_buffers) * between), sampled))
        self.rows = np.asarray(rows)

    def of(self, step_tokens: Array, stages: npt.NDArray[np.intp] | slice = slice(None)) -> Array:
        """Return the bytes reserved if the largest step has this many tokens. # [n] -> [stages, n]"""
        stays, layer, sampled = self.rows[stages].T[:, :, None]
        tokens = np.minimum(step_tokens, self._most)
        return stays * tokens + np.maximum(layer * tokens, sampled)


def _widths(spec: ModelSpec, stage: StageShape) -> tuple[float, float]:
    """Return a token's elements in the widest layer on one device, and those between the matrix products of its
    experts."""
    products, layer, between = spec.sizes.products, 0.0, 0.0
    for kind in spec.kinds:
        wide = float(products * kind.ffn_size)
        if kind.attention is not None:
            attention = kind.attention
            heads = attention.num_heads * (attention.head_dim + attention.values)
            wide = max(wide, heads + attention.num_kv_heads * (attention.head_dim + attention.values))
        if kind.recurrent is not None:
            wide = max(wide, kind.recurrent.weights / spec.hidden_size)
        if (experts := kind.experts) is not None:
            width = experts.ffn_size * min(stage.ep, stage.tp) / stage.tp
            inner = experts.width_in(spec.hidden_size)
            wide = max(wide, products * experts.shared_ffn_size)
            between = max(between, experts.active * (max(width, inner) + max((products - 1) * width, inner)))
        layer = max(layer, wide / stage.tp)
    return 5 * spec.hidden_size + layer, between


class _Kept(NamedTuple):
    """The bytes that a device of a stage keeps for requests.

    Attributes:
        grows: bytes of each token.
        constant: bytes of each request of any length.
        windows: bytes of each token within a window, with the window, the shortest first.
    """

    grows: float
    constant: float
    windows: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, spec: ModelSpec, dtype: DType, stage: StageShape, end: int) -> _Kept:
        """Return the bytes that a device keeps for the stage's decoder layers, the last of which is `end - 1`."""
        grows, constant, windows = 0.0, 0.0, list[tuple[int, float]]()
        for kind in spec.kinds:
            count = kind.count(end - stage.decoder_layers, end)
            kept, window = count * spec.kv_bytes_of(kind, dtype, stage.tp), kind.attention and kind.attention.window
            if kind.recurrent is not None:
                constant += count * kind.recurrent.state_bytes / min(stage.tp, kind.recurrent.num_heads)
            compression = 1 if kind.attention is None else kind.attention.compression
            if window and compression > 1:
                constant += kept * compression * window
            if window and compression == 1:
                windows.append((window, kept))
            else:
                grows += kept
        return cls(grows, constant, tuple(sorted(windows)))

    def within(self, context: float | None) -> _Kept:
        """Return the bytes that are kept for requests of this context. Layers whose window is shorter than the context
        keep only the window. If the context is None, every layer keeps every token.
        """
        shorter = [context is not None and window < context for window, _ in self.windows]
        kept = list(zip(self.windows, shorter, strict=True))
        constant = self.constant + sum(window * size for (window, size), is_full in kept if is_full)
        return _Kept(self.grows + sum(size for (_, size), is_full in kept if not is_full), constant, ())

    def longest(self, free: float, in_flight: float) -> float:
        """Return the tokens of the longest request that fits into `free` bytes.

        Args:
            in_flight: tokens that are kept beyond a window.
        """
        # With the k shortest windows full, the bytes are a line in the tokens; the least of the lines holds.
        left, slope, most = free - self.constant, self.grows + sum(size for _, size in self.windows), 0.0
        for window, size in (*self.windows, (0, 0.0)):
            most = max(most, left / slope) if slope > 0 else np.inf if left >= 0 else most
            left, slope = left - (window - 1 + in_flight) * size, slope - size
        return most


class LaneMemory:
    """Memory of the devices of one lane's stages.

    Every stage holds its layers' K/V of every request in the lane, so the stage with the fewest blocks decides. The
    encode lane of an encoder-decoder has no decoder layer: its last stage holds the encoder's output, one hidden state
    per token, until the decode lane has received it. Arrays have an entry for each stage. All devices of a stage's
    group hold the same number of bytes.

    Args:
        precision: data types of weights, activations and K/V.
        keeps: the engine, which reserves memory for itself. None means xgpt's own.
        slots: largest number of requests in its batches.
        speculation: the draft, whose weights and K/V are also in memory, or None.
        kept_blocks: blocks that hold the prompts of running and earlier requests for later ones to find.

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
        slots: int = 0,
        context: float | None = None,
        speculation: Speculation | None = None,
        *,
        must_fit: bool = True,
    ) -> None:
        state = BYTES_PER_ELEMENT[precision.state]
        spec = spec.unpacked if precision.packs else spec
        self.lane = lane
        self.kept_blocks = kept_blocks
        self._usable = int(cluster.device.memory_bytes * cluster.device.usable_memory)
        tp = np.asarray([stage.tp for stage in lane], float)
        last = np.cumsum([stage.decoder_layers for stage in lane])
        self.weight_bytes: Array = _weight_bytes(spec, cluster, precision, lane, keeps)
        """Bytes of weights on one device of each stage."""
        kept = [_Kept.of(spec, precision.kv, stage, int(end)) for stage, end in zip(lane, last, strict=True)]
        if keeps is None or not keeps.drops_windows:
            kept = [each.within(None) for each in kept]
        drafted = 0.0
        if speculation is not None:
            draft = Draft(spec, speculation)
            self.weight_bytes += draft.bytes(precision.weights) / tp
            drafted = draft.kept_bytes(precision.kv, lane[-1].tp)
        self._kept = [each._replace(grows=each.grows + drafted) for each in kept]
        kept = [each.within(context) for each in self._kept]
        self._block_bytes: Array = block_size * np.asarray([each.grows for each in kept])
        self.request_bytes: Array = np.asarray([each.constant for each in kept])
        """Bytes on a device of each stage for a request of any length: recurrent states, and K/V within windows."""
        if not last[-1]:
            self._block_bytes[-1] = block_size * spec.hidden_size * state
        self._buffers = StepBuffers(spec, precision, lane, keeps, slots)
        kept_bytes, group_bytes = WORKSPACE_BYTES, 0
        if keeps is not None:
            kept_bytes = WORKSPACE_BYTES if keeps.kept_bytes is None else keeps.kept_bytes
            group_bytes = keeps.group_bytes
        self.fixed_bytes: Array = self.weight_bytes + kept_bytes + group_bytes * (tp > 1)
        occupied = self.fixed_bytes
        if keeps is not None and keeps.shares_rest:  # weights may also use their share of the reserve
            occupied = occupied - (1 - cluster.device.usable_memory) * self.weight_bytes
        self._occupied: Array = occupied
        """The part of `_usable` that is not for K/V, on a device of each stage, without activations."""
        # One block takes at least a byte: a model without growing K/V is limited by its requests.
        distinct = {
            (a, b, *row): i
            for i, (a, b, row) in enumerate(zip(occupied, self._block_bytes, self._buffers.rows.tolist(), strict=True))
        }
        self._distinct = np.asarray(sorted(distinct.values()))
        """Indices of the stages that differ in memory."""
        worst = int(np.argmax(occupied))
        if must_fit and occupied[worst] >= self._usable:
            needed, offered = self.fixed_bytes[worst] / 2**30, self._usable / 2**30
            weights = f"in {precision.weights}" if spec.quantization is None else "with weights as they are stored"
            raise InfeasibleError(
                f"memory: {spec.name} needs {needed:.1f} GiB {weights} on a device of stage {worst} before any K/V, "
                f"but {cluster.name} offers {offered:.1f} GiB; take more devices, larger ones or a smaller model",
                nearest_bound_s=None,
                binding="memory",
            )

    def blocks_beside(self, step_tokens: npt.ArrayLike) -> Array:
        """Return the blocks for which every stage has room beside the activations of a step of `step_tokens`. # [n] ->
        [n]

        They include the memory that each request needs regardless of its length: see `request_blocks`.
        """
        free, block = self.free_bytes(step_tokens), self._block_bytes[self._distinct, None]
        if self.request_bytes.any():
            block = np.maximum(block, 1.0)
        with np.errstate(divide="ignore"):
            blocks = np.where(block > 0, free / block, np.inf)
        return np.floor(np.maximum(blocks.min(axis=0), 0.0))

    @property
    def request_blocks(self) -> float:
        """Number of blocks that take as much memory as each request needs regardless of its length, on the stage where
        it needs most.
        """
        if not self.request_bytes.any():
            return 0.0
        return float((self.request_bytes / np.maximum(self._block_bytes, 1.0)).max())

    def longest_request(self, step_tokens: float, in_flight: float) -> float:
        """Return the tokens of the longest request for which K/V has room while no other request is there.

        Args:
            step_tokens: tokens of the largest step, whose activations lie beside K/V.
            in_flight: tokens, those of the steps in flight, that a layer with a window keeps beyond the window.
        """
        buffers = self._buffers.of(np.asarray([step_tokens]))[:, 0]
        return min(
            each.longest(free, in_flight)
            for each, free in zip(self._kept, self._usable - self._occupied - buffers, strict=True)
        )

    def free_bytes(self, step_tokens: npt.ArrayLike) -> Array:
        """Return the bytes for K/V on a device of each stage that differs. # [n] -> [distinct stages, n]"""
        tokens, stages = np.atleast_1d(np.asarray(step_tokens, float)), self._distinct
        return self._usable - self._occupied[stages, None] - self._buffers.of(tokens, stages)

    def device_bytes(self, blocks: float, step_tokens: float, requests: float = 0.0) -> tuple[int, ...]:
        """Return the bytes in use on each device, stage by stage, with these K/V blocks, requests and this largest
        step."""
        activations = self._buffers.of(np.asarray([float(step_tokens)]))[:, 0]
        by_stage = self.fixed_bytes + activations + blocks * self._block_bytes + requests * self.request_bytes
        return tuple(int(used) for stage, used in zip(self.lane, by_stage, strict=True) for _ in range(stage.tp))


def _weight_bytes(
    spec: ModelSpec, cluster: ClusterSpec, precision: Precision, lane: Lane, keeps: EngineSpec | None
) -> Array:
    """Return the bytes of weights on one device of each stage."""
    size, state = BYTES_PER_ELEMENT[precision.weights], BYTES_PER_ELEMENT[precision.state]
    tp, decoder, encoder, embeds, heads = (
        np.asarray([getattr(stage, name) for stage in lane], float)
        for name in ("tp", "decoder_layers", "encoder_layers", "embeds", "heads")
    )
    # A tied matrix is on both ends of a pipeline; if these are one stage it is there once, unless heads are packed.
    ties = spec.tie_embeddings and not precision.packs
    # In eight bits, embedding and head stay in half precision.
    tables = embeds * state + heads * (1 - ties * embeds) * (state if precision.weights == "float8" else size)
    if precision.screens:  # an eight-bit copy with two norms for each token, and the head as loaded unless it is tied
        of_screen = 1 + 2 * BYTES_PER_ELEMENT["float32"] / spec.hidden_size
        tables += heads * (of_screen + (1 - spec.tie_embeddings * embeds) * state)
    ends = np.cumsum(decoder)
    spans = [(int(end - count), int(end)) for end, count in zip(ends, decoder, strict=True)]
    layers, unshared, experts = (
        np.asarray([bytes_of(precision.weights, *span) for span in spans])
        for bytes_of in (spec.layer_weight_bytes, spec.unshared_bytes, spec.expert_bytes)
    )
    shared = layers - unshared + encoder * spec.encoder_layer_params * size
    tables = tables * spec.vocab_size * spec.hidden_size + embeds * state * spec.layer_embedding_params
    # If replicas share the experts, a device holds fewer experts than its group's share.
    fewer = 1 / tp - 1 / np.maximum(tp, [stage.ep for stage in lane])
    weights: Array = (shared + tables) / tp + unshared - fewer * experts
    if keeps is not None:
        marlin = None if OWN_KERNELS.match(cluster.device.name) else keeps.marlin_multiples
        multiples = marlin or (1, keeps.expert_multiple)
        weights += _padding(spec, precision.weights, lane, ends, multiples, is_repacked=marlin is not None)
        if keeps.framework != "xgpt":  # such engines also load encoders of images and sound
            weights += embeds * spec.tower_params * state / tp
    return weights


def _padding(
    spec: ModelSpec, dtype: DType, lane: Lane, ends: Array, multiples: tuple[int, int], *, is_repacked: bool
) -> Array:
    """Return the bytes by which experts in MXFP4 grow on a device whose kernels take sizes in multiples. # [stages]

    Args:
        multiples: multiples to which the hidden size and the width of an expert are padded.
        is_repacked: whether kernels repack weights and scales into new tensors (Marlin's). Then biases are added, which
            other figures include.
    """
    stored = spec.quantization
    if stored is None or stored.kind != PADDED:
        return np.zeros(len(lane))
    size, grown = spec.bytes_per_weight(dtype, "experts"), []
    for stage, end in zip(lane, ends, strict=True):
        more = 0.0
        for kind in spec.kinds:
            if (experts := kind.experts) is None:
                continue
            number, width = experts.number / stage.ep, experts.ffn_size * min(stage.ep, stage.tp) / stage.tp
            hidden = _rounded_up(spec.hidden_size, multiples[0])
            wide = _rounded_up(width, multiples[1])
            products = [(spec.sizes.products - 1) * number * hidden * wide, number * hidden * wide]
            layer = size * sum(products)
            if is_repacked:
                layer = sum(_allocated(product * part) for product in products for part in (0.5, size - 0.5))
                layer += (
                    experts.bias * BYTES_PER_ELEMENT["bfloat16"] * number * ((spec.sizes.products - 1) * wide + hidden)
                )
            layers = kind.count(int(end) - stage.decoder_layers, int(end))
            more += layers * (layer - size * number * width * spec.hidden_size * spec.sizes.products)
        grown.append(more)
    return np.asarray(grown)


def _rounded_up(size: float, multiple: int) -> float:
    return float(-(-size // multiple) * multiple)


def _allocated(size: float) -> float:
    """Return the bytes that PyTorch's allocator uses for a tensor. The allocator does not split off a rest of up to 1
    MiB from the last 2 MiB.
    """
    rest = -size % (2 * MIB)
    return size + rest if size >= 10 * MIB and rest <= MIB else size


def capacity(
    lengths: Lengths,
    blocks: npt.ArrayLike,
    block_size: int,
    kv: KvPromise = "reserve",
    kept_blocks: int = 0,
    request_blocks: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Return the number of requests that may run at the same time.

    Each holds r blocks, with variance v. Under "reserve", requests enter as long as they fit, so the sum of their
    blocks is a compound Poisson sum: the result is the largest B with B E[r] + z sqrt(B E[r^2]) <= blocks. A request
    that does not fit only waits, so it is enough that B requests fit at 99 of 100 moments. Under "quantile", B is the
    plan's `max_running`, so the sum has variance B v. If the sum exceeds memory, a request is preempted, so B requests
    must fit at 999 of 1000 moments. In both cases, a quadratic equation in sqrt(B) is solved.

    Args:
        kept_blocks: blocks for cached prompts. The outputs so far must fit into the others. Blocks that are reserved
            but not used yet also hold cached prompts.
        request_blocks: further blocks that each request takes regardless of its length.
    """
    if kept_blocks:
        mean, mean_square = lengths.output_blocks(block_size)
        mean_square += request_blocks * (2 * mean + request_blocks)
        beside = _solve(2.33, mean + request_blocks, mean_square, np.asarray(blocks, float) - kept_blocks)
        return np.minimum(beside, capacity(lengths, blocks, block_size, kv, request_blocks=request_blocks))
    if kv == "reserve":
        z, (mean, mean_square) = 2.33, lengths.reserved_blocks(block_size)
        mean_square += request_blocks * (2 * mean + request_blocks)
    else:
        z, (mean, mean_square) = 3.09, lengths.occupied_blocks(block_size)
        mean_square -= mean**2
    return _solve(z, mean + request_blocks, mean_square, np.asarray(blocks, float))


def _solve(z: float, mean: float, mean_square: float, blocks: Array) -> Array:
    """Return the largest B with B mean + z sqrt(B mean_square) <= blocks."""
    available = np.maximum(blocks, 0.0)
    spread = z * np.sqrt(max(mean_square, 0.0))
    root = (np.sqrt(spread**2 + 4 * mean * available) - spread) / (2 * mean)
    return root * root
