"""Compute K/V blocks that fit in memory beside a model's weights, and the number of requests for which they suffice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

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
from xsimulator.kept import Kept
from xsimulator.lengths import Lengths
from xsimulator.stages import Lane, StageShape, last_layers

MIB = 2**20
WORKSPACE_BYTES = 256 * MIB
"""Bytes for buffers of the engine and its libraries, without activations."""


PADDED = "mxfp4"
"""Engines pad the sizes of experts in this weight format. Its kernels need no buffers between the matrix products."""
OWN_KERNELS = re.compile(r"^g?h(100|20|200)|^g?b[23]00")
"""Names of devices on which engines use their own kernels for `PADDED`. On other devices they use Marlin."""


def activation_bytes_per_token(spec: ModelSpec, dtype: DType) -> int:
    """Return the peak bytes of intermediate tensors per token of a step, for inputs and outputs of the widest layer."""
    ffn = spec.ffn_size
    if spec.experts is not None:
        ffn = max(ffn, spec.experts.active * spec.experts.ffn_size + spec.experts.shared_ffn_size)
    wide = 2 * spec.hidden_size + max((2 if spec.gated_ffn else 1) * ffn, 3 * spec.num_heads * spec.head_dim)
    return wide * BYTES_PER_ELEMENT[dtype]


class StepBuffers:
    """Bytes that an engine reserves on a device of each stage for its largest step.

    xgpt's own engine runs a step in slices and frees the memory of each slice before the next slice. Before other
    engines allocate K/V memory, they run a step of the largest size and sample for their largest number of requests. So
    they reserve memory for the hidden states of all tokens, plus the larger of two parts: a layer's tensors, or logits
    and sampling. Some versions also reserve the buffers between the experts' matrix products. vLLM also encodes the
    largest images.
    """

    def __init__(
        self, spec: ModelSpec, precision: Precision, lane: Lane, keeps: EngineSpec | None = None, slots: int = 0
    ) -> None:
        self.slots = slots
        if keeps is None or keeps.framework == "xgpt":
            self._most = float(SLICE_TOKENS)
            activations = float(activation_bytes_per_token(spec, precision.state))
            self.rows: Array = np.asarray([(activations, 0.0, 0.0, 0.0, 0.0, 0.0)] * len(lane))
            return
        self._most = np.inf
        size = 0 if keeps.shares_only_cache else BYTES_PER_ELEMENT[precision.state]
        has_buffers = keeps.keeps_expert_buffers and getattr(spec.quantization, "kind", None) != PADDED
        rows = []
        for stage in lane:
            layer, between = _widths(spec, stage)
            sampled = stage.heads * keeps.sampling_bytes * spec.vocab_size
            stays = spec.hidden_size + has_buffers * between
            inside, outputs, item = _encoded(spec, stage) if keeps.framework == "vllm" else (0.0, 0.0, 0.0)
            of_layer = size * (layer + (not has_buffers) * between)
            rows.append((size * stays, of_layer, sampled, size * inside, size * outputs, item))
        self.rows = np.asarray(rows)

    def of(self, step_tokens: Array, stages: npt.NDArray[np.intp] | slice = slice(None)) -> Array:
        """Return the bytes reserved if the largest step has `step_tokens` tokens. # [n] -> [stages, n]"""
        stays, layer, sampled, inside, outputs, item = self.rows[stages].T[:, :, None]
        tokens = np.minimum(step_tokens, self._most)
        encoded = np.maximum(tokens, item)
        own = stays * tokens + np.maximum(layer * tokens, self.slots * sampled)
        return np.maximum(own + outputs * encoded, inside * encoded)


def _encoded(spec: ModelSpec, stage: StageShape) -> tuple[float, float, float]:
    """Return three numbers for the encoder of images: tensor elements inside it and of its outputs, for each token, and
    the tokens of the largest image. vLLM encodes as many images as a step has room for, and keeps the outputs while it
    runs the largest step.
    """
    if (tower := spec.tower) is None or not stage.embeds or not spec.tower_params:
        return 0.0, 0.0, 0.0
    inside = tower.patches * 2 * (tower.hidden_size + tower.ffn_size / stage.tp)
    return inside, tower.outputs * spec.hidden_size, tower.item_tokens


def _widths(spec: ModelSpec, stage: StageShape) -> tuple[float, float]:
    """Return two numbers of tensor elements for each token of a step on one device: in the widest layer, and between
    the matrix products of its experts.
    """
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


class LaneMemory:
    """The memory of the devices of one lane.

    Every stage has the K/V of its layers for every request in the lane, so the stage with memory for the fewest blocks
    limits the number of requests. The encode lane of an encoder-decoder has no decoder layer. Its last stage keeps the
    encoder's output, one hidden state per token, until the decode lane has received the output. Arrays have an entry
    for each stage, since all devices of a stage use the same number of bytes.

    Args:
        kept_blocks: number of blocks with prompts of running and earlier requests. Later requests may share them.

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
        last = last_layers(lane)
        self.weight_bytes: Array = _weight_bytes(spec, cluster, precision, lane, keeps)
        self._kept = [
            Kept.of(spec, precision.kv, stage, end, keeps, block_size) for stage, end in zip(lane, last, strict=True)
        ]
        if speculation is not None:
            draft = Draft(spec, speculation)
            self.weight_bytes += draft.bytes(precision.weights) / tp
            drafted = draft.kept_bytes(precision.kv, lane[-1].tp)
            self._kept = [kept.with_draft(drafted, speculation.tokens) for kept in self._kept]
        self._block_bytes: Array = block_size * np.asarray([kept.grows(context) for kept in self._kept])
        self.request_bytes: Array = np.asarray([kept.constant(context) for kept in self._kept])
        self._in_flight: Array = np.asarray([kept.in_flight(context) for kept in self._kept])
        """Bytes on a device of each stage for each token of a running step, beyond windows."""
        if not last[-1]:
            self._block_bytes[-1] = block_size * spec.hidden_size * state
        self._buffers = StepBuffers(spec, precision, lane, keeps, slots)
        kept_bytes, group_bytes, graph_bytes = WORKSPACE_BYTES, 0, 0.0
        if keeps is not None:
            kept_bytes = WORKSPACE_BYTES if keeps.kept_bytes is None else keeps.kept_bytes
            group_bytes, graph_bytes = keeps.group_bytes, keeps.graph_bytes
        graphs = graph_bytes * spec.hidden_size * np.asarray([stage.decoder_layers for stage in lane])
        self.fixed_bytes: Array = self.weight_bytes + kept_bytes + group_bytes * (tp > 1) + graphs
        occupied = self.fixed_bytes
        if keeps is not None and keeps.shares_rest:  # weights may also use memory beyond `usable_memory`
            occupied = occupied - (1 - cluster.device.usable_memory) * self.weight_bytes
        self._occupied: Array = occupied
        # Stages with equal memory need to be computed only once.
        distinct = {
            tuple(row): i
            for i, row in enumerate(
                np.column_stack((occupied, self._block_bytes, self._in_flight, self._buffers.rows)).tolist()
            )
        }
        self._distinct = np.asarray(sorted(distinct.values()))
        """Indices of stages: one for each distinct amount of memory."""
        worst = int(np.argmax(occupied))
        if must_fit and occupied[worst] >= self._usable:
            needed, offered = self.fixed_bytes[worst] / 2**30, self._usable / 2**30
            weights = f"in {precision.weights}" if spec.quantization is None else "with weights as they are stored"
            raise InfeasibleError(
                f"memory: {spec.name} needs {needed:.1f} GiB {weights} on a device of stage {worst} before any K/V, "
                f"but {cluster.name} offers {offered:.1f} GiB; take more devices, larger ones or a smaller model",
                binding="memory",
            )

    def blocks_beside(self, step_tokens: npt.ArrayLike, *, encodes: bool = True) -> Array:
        """Return the number of blocks that fit on every stage while a step of `step_tokens` tokens runs. # [n] -> [n]

        These blocks include the memory that each request needs whatever its length (see `request_blocks`).

        Args:
            encodes: whether the step encodes prompts, whose tokens are kept beyond windows until the step has ended.
        """
        free, block = self.free_bytes(step_tokens), self._block_bytes[self._distinct, None]
        if encodes:
            free = free - self._in_flight[self._distinct, None] * np.atleast_1d(np.asarray(step_tokens, float))
        if self.request_bytes.any():
            block = np.maximum(block, 1.0)
        with np.errstate(divide="ignore"):
            blocks = np.where(block > 0, free / block, np.inf)
        return np.floor(np.maximum(blocks.min(axis=0), 0.0))

    def sampling_for(self, slots: int) -> LaneMemory:
        """Return the memory beside an engine that is started for `slots` requests."""
        other = copy(self)
        other._buffers = copy(self._buffers)
        other._buffers.slots = slots
        return other

    @property
    def request_blocks(self) -> float:
        """Memory, in blocks, that each request needs whatever its length, on the stage where it is largest."""
        if not self.request_bytes.any():
            return 0.0
        return float((self.request_bytes / np.maximum(self._block_bytes, 1.0)).max())

    def longest_request(self, step_tokens: float, in_flight: float) -> float:
        """Return the number of tokens of the longest request that fits in memory by itself."""
        return min(kept.longest(free, in_flight) for kept, free in self._each(step_tokens))

    def logged_tokens(self, step_tokens: float, context: int, in_flight: float, *, by_requests: bool) -> int:
        each = self._each(step_tokens)
        return min(kept.logged(free, context, in_flight, by_requests=by_requests) for kept, free in each)

    def _each(self, step_tokens: float) -> Iterator[tuple[Kept, float]]:
        buffers = self._buffers.of(np.asarray([step_tokens]))[:, 0]
        yield from zip(self._kept, (self._usable - self._occupied - buffers).tolist(), strict=True)

    def free_bytes(self, step_tokens: npt.ArrayLike) -> Array:
        """Return the bytes for K/V on a device of each distinct stage. # [n] -> [distinct stages, n]"""
        tokens, stages = np.atleast_1d(np.asarray(step_tokens, float)), self._distinct
        return self._usable - self._occupied[stages, None] - self._buffers.of(tokens, stages)

    def device_bytes(
        self, blocks: float, step_tokens: float, requests: float = 0.0, *, encodes: bool = True
    ) -> tuple[int, ...]:
        activations = self._buffers.of(np.asarray([float(step_tokens)]))[:, 0]
        kept = blocks * self._block_bytes + requests * self.request_bytes + encodes * step_tokens * self._in_flight
        by_stage = self.fixed_bytes + activations + kept
        return tuple(int(used) for stage, used in zip(self.lane, by_stage, strict=True) for _ in range(stage.tp))


def _weight_bytes(
    spec: ModelSpec, cluster: ClusterSpec, precision: Precision, lane: Lane, keeps: EngineSpec | None
) -> Array:
    size, state = BYTES_PER_ELEMENT[precision.weights], BYTES_PER_ELEMENT[precision.state]
    tp, encoder, embeds, heads = (
        np.asarray([getattr(stage, name) for stage in lane], float)
        for name in ("tp", "encoder_layers", "embeds", "heads")
    )
    # A tied matrix is on the first and on the last stage. A stage that is both has it once, unless heads are packed.
    ties = spec.tie_embeddings and not precision.packs
    # If weights have eight bits, embedding and head are in half precision.
    tables = embeds * state + heads * (1 - ties * embeds) * (state if precision.weights == "float8" else size)
    if precision.screens:  # an eight-bit copy with two norms per token, and the loaded head unless it is tied
        of_screen = 1 + 2 * BYTES_PER_ELEMENT["float32"] / spec.hidden_size
        tables += heads * (of_screen + (1 - spec.tie_embeddings * embeds) * state)
    ends = last_layers(lane)
    spans = [(end - stage.decoder_layers, end) for end, stage in zip(ends, lane, strict=True)]
    layers, unshared, experts = (
        np.asarray([bytes_of(precision.weights, *span) for span in spans])
        for bytes_of in (spec.layer_weight_bytes, spec.unshared_bytes, spec.expert_bytes)
    )
    shared = layers - unshared + encoder * spec.encoder_layer_params * size
    tables = tables * spec.vocab_size * spec.hidden_size + embeds * state * spec.layer_embedding_params
    # If replicas share the experts, a device has fewer experts than with its own group alone.
    fewer = 1 / tp - 1 / np.maximum(tp, [stage.ep for stage in lane])
    weights: Array = (shared + tables) / tp + unshared - fewer * experts
    if keeps is not None:
        marlin = None if OWN_KERNELS.match(cluster.device.name) else keeps.marlin_multiples
        multiples = marlin or (1, keeps.expert_multiple)
        weights += _padding(spec, precision.weights, lane, ends, multiples, is_repacked=marlin is not None)
        if keeps.framework != "xgpt":  # such engines also load encoders for images and sound
            weights += embeds * spec.tower_params * state / tp
    return weights


def _padding(
    spec: ModelSpec, dtype: DType, lane: Lane, ends: list[int], multiples: tuple[int, int], *, is_repacked: bool
) -> Array:
    """Return the bytes that padding adds to MXFP4 experts on a device, since kernels need padded sizes. # [stages]

    Args:
        multiples: numbers to whose multiples the hidden size and the width of an expert are padded.
        is_repacked: whether kernels repack weights and scales into new tensors, as Marlin does.
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
            layers = kind.count(end - stage.decoder_layers, end)
            more += layers * (layer - size * number * width * spec.hidden_size * spec.sizes.products)
        grown.append(more)
    return np.asarray(grown)


def _rounded_up(size: float, multiple: int) -> float:
    return float(-(-size // multiple) * multiple)


def _allocated(size: float) -> float:
    """Return the bytes that PyTorch's allocator uses for a tensor. It rounds a tensor of at least 10 MiB up to a
    multiple of 2 MiB, unless this adds more than 1 MiB. It splits off a larger rest.
    """
    rest = -size % (2 * MIB)
    return size + rest if size >= 10 * MIB and rest <= MIB else size


DEVIATES: dict[KvPromise, float] = {"reserve": 0.5, "quantile": 3.09}
"""By how many standard deviations of the blocks in use, beyond their mean, memory must exceed them. Under "reserve", a
request that does not fit only waits, so blocks may be short 31% of the time, which costs about 1% of throughput. Under
"quantile", a request is preempted, so 0.1% of the time.
"""


@dataclass(frozen=True)
class RequestBlocks:
    """The law of the K/V blocks of running requests.

    A policy holds the number of requests, or states its variance. The blocks of n requests have mean n `mean` and
    variance n `variance` plus `mean`**2 times the variance of n.

    Attributes:
        mean, variance: of the blocks of one request, at a random moment.
        deviate: see `DEVIATES`. With 0, blocks suffice only on average. No engine has more requests on average, so this
            is the law of upper bounds.
        beside: the law of the outputs' blocks, which must fit beside the blocks kept for cached prompts, or None.
        kept: number of blocks kept for cached prompts. Blocks that are reserved but not used yet may also contain
            cached prompts.
    """

    mean: float
    variance: float
    deviate: float
    beside: RequestBlocks | None = None
    kept: int = 0

    @classmethod
    def of(
        cls,
        lengths: Lengths,
        block_size: int,
        kv: KvPromise = "reserve",
        kept_blocks: int = 0,
        request_blocks: float = 0.0,
        *,
        on_average: bool = False,
    ) -> RequestBlocks:
        def law(moments: tuple[float, float]) -> RequestBlocks:
            mean, mean_square = moments
            deviate = 0.0 if on_average else DEVIATES[kv]
            return cls(mean + request_blocks, max(mean_square - mean**2, 0.0), deviate)

        found = law(lengths.reserved_blocks(block_size) if kv == "reserve" else lengths.occupied_blocks(block_size))
        if not kept_blocks:
            return found
        return replace(found, beside=law(lengths.output_blocks(block_size)), kept=kept_blocks)

    def fit(self, requests: Array, variance: Array, blocks: Array) -> npt.NDArray[np.bool_]:
        """Return whether requests fit into blocks. `variance` is that of their number. # [n] -> [n]"""
        spread = np.sqrt(requests * self.variance + variance * self.mean**2)
        fits = requests * self.mean + self.deviate * spread <= blocks
        return fits if self.beside is None else fits & self.beside.fit(requests, variance, blocks - self.kept)

    def most(self, blocks: npt.ArrayLike) -> Array:
        """Return the largest number of requests that fit into blocks if it is constant. # [n] -> [n]"""
        available = np.maximum(np.asarray(blocks, float), 0.0)
        spread = self.deviate * np.sqrt(self.variance)
        root = (np.sqrt(spread**2 + 4 * self.mean * available) - spread) / (2 * self.mean)
        return root**2 if self.beside is None else np.minimum(root**2, self.beside.most(available - self.kept))
