"""Load a model's weights from a checkpoint in Hugging Face layout, or draw them from a seed."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xgpt.checkpoints.files import STORED_DTYPES, weight_files
from xgpt.core.errors import InputError
from xgpt.core.schema import DType, ModelSpec, Precision
from xrunner import memory
from xrunner.eight_bits import BLOCK, EIGHT_BITS, fits, name_of_scales, scaled
from xrunner.models import Model
from xrunner.models.layers import Linear
from xrunner.parallel import Cut, Part, build, cuts, materialise, places_of

DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def state_dtype(dtype: DType, device: str) -> torch.dtype:
    """Return the dtype of a model's activations on a device if matrix products are in `dtype`."""
    state = _precision(dtype, device).state
    if state not in DTYPES:
        raise InputError("dtype", dtype, f"on {device} models run in {', '.join(DTYPES)}")
    return DTYPES[state]


def kept_dtype(dtype: DType, device: str, kv_dtype: DType | None = None) -> torch.dtype:
    """Return the dtype in which a device stores K/V: `kv_dtype`, or the default for matrix products in `dtype`.

    Raises:
        InputError: the device does not support keys and values in this dtype.
    """
    kept = _precision(dtype, device, kv_dtype).kv
    known = DTYPES | ({"int8": torch.int8} if torch.device(device).type == "cpu" else {})
    if kept not in known:
        raise InputError("kv_dtype", kept, f"on {device} keys and values are kept in {', '.join(known)}")
    return known[kept]


def _precision(dtype: DType, device: str, kv_dtype: DType | None = None) -> Precision:
    return Precision.of(dtype, "cpu" if torch.device(device).type == "cpu" else "gpu", None, kv_dtype)


BASE_PREFIXES = ("model.", "transformer.")

CONTAINERS = ("language_model.", "model.language_model.")


class Weight(NamedTuple):
    """One tensor of a checkpoint, and its destination.

    Attributes:
        entry: the tensor's index in a stored stack of tensors, and the size of the stack. None means that the tensor is
            stored separately.
    """

    name: str
    out: Tensor
    transposed: bool
    cut: Cut | None = None
    entry: tuple[int, int] | None = None

    @property
    def shape(self) -> list[int]:
        shape = list(self.out.shape)
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.full
        return shape

    @property
    def stored_shape(self) -> list[int]:
        shape = self.shape[:: -1 if self.transposed else 1]
        return shape if self.entry is None else [self.entry[1], *shape]

    @property
    def place(self) -> tuple[slice, ...]:
        index = [slice(None)] * self.out.dim()
        if self.cut is not None:
            index[self.cut.dim] = slice(self.cut.start, self.cut.start + self.out.shape[self.cut.dim])
        return tuple(index)

    @property
    def stored_place(self) -> tuple[slice, ...]:
        place = self.place[:: -1 if self.transposed else 1]
        return place if self.entry is None else (slice(self.entry[0], self.entry[0] + 1), *place)


class WeightSource(Protocol):
    """A source of weights, read one tensor at a time."""

    def check(self, weights: Iterable[Weight], copies: Mapping[str, tuple[str, ...]]) -> None:
        """Refuse weights that cannot be read, before memory is allocated for them.

        Args:
            copies: tensors that may be stored more than once, with the names of the copies. Copies must have equal
                values.
        """

    def read(self, weight: Weight) -> None:
        """Fill `weight.out`, converting to its dtype and device."""


class Checkpoint:
    """The weights of a directory, mapped into memory.

    Raises:
        InputError: the directory has no weights (pickled weights are refused, since they can run code), or the index or
            a file is broken.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, tuple[Path, Any]] = {}
        paths = weight_files(directory)
        if not paths:
            accepted = (
                "it must contain model.safetensors or its index; convert pickled weights, which xgpt does not load"
            )
            raise InputError("model", str(directory), accepted)
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                says = f"it is incomplete, or is not a safetensors file: {error}; fetch it again"
                raise InputError("model", str(path), says) from None
            self._files.update(dict.fromkeys(file.keys(), (path, file)))

    def check(self, weights: Iterable[Weight], copies: Mapping[str, tuple[str, ...]]) -> None:
        """Compare names, shapes and dtypes with the headers of the files.

        Raises:
            InputError: a tensor is missing, has another shape or an unsupported dtype, or has a copy with different
                values.
        """
        for weight in weights:
            path, file, found = self._find(weight.name)
            stored = file.get_slice(found)
            if stored.get_shape() != weight.stored_shape:
                accepted = f"{weight.name} must have the shape {weight.stored_shape} that config.json implies"
                raise InputError("model", f"{path}: {stored.get_shape()}", accepted)
            if stored.get_dtype() not in STORED_DTYPES and not self._has_scales(found, stored):
                accepted = f"{weight.name} must be stored as one of {', '.join(STORED_DTYPES)}, or in "
                accepted += (
                    f"{' or '.join(EIGHT_BITS)} with one scale for the whole matrix, each row or each block of {BLOCK} "
                    f"x {BLOCK}"
                )
                raise InputError("model", f"{path}: {stored.get_dtype()}", accepted)

        for name, others in copies.items():
            for other in others:
                if other in self._files and not torch.equal(self._whole(name), self._whole(other)):
                    accepted = f"{other} must equal {name}: models in which they differ are not supported"
                    raise InputError("model", str(self._directory), accepted)

    def read(self, weight: Weight) -> None:
        """Copy a checked tensor, reading only the part that is needed.

        Raises:
            InputError: the tensor contains NaN or infinity, possibly only after conversion to the model's dtype.
        """
        path, file, found = self._find(weight.name)
        is_whole = weight.cut is None and weight.entry is None
        tensor = file.get_tensor(found) if is_whole else file.get_slice(found)[weight.stored_place]
        if weight.entry is not None:
            tensor = tensor[0]
        if tensor.dtype in (torch.float8_e4m3fn, torch.int8):
            scales = self._whole(name_of_scales(self._files, found) or "")
            tensor = scaled(tensor, scales, weight.stored_shape, weight.stored_place)
        weight.out.copy_(tensor.t() if weight.transposed else tensor)
        if weight.out.numel() and not all(bool(end.isfinite()) for end in weight.out.aminmax()):
            dtype = str(weight.out.dtype).removeprefix("torch.")
            says = f"it contains NaN or infinity in {dtype}: give finite weights, or plan with another dtype"
            raise InputError("model", f"{path}: {found}", says)

    def _has_scales(self, name: str, stored: Any) -> bool:
        scales, shape = name_of_scales(self._files, name), stored.get_shape()
        if stored.get_dtype() not in EIGHT_BITS or scales is None or len(shape) != 2:
            return False
        return fits(list(self._whole(scales).shape), shape)

    def _whole(self, name: str) -> Tensor:
        _, file, found = self._find(name)
        tensor: Tensor = file.get_tensor(found)
        return tensor

    def _find(self, name: str) -> tuple[Path, Any, str]:
        """In some checkpoints, names have a shorter or an additional prefix."""
        bare = [name.removeprefix(prefix) for prefix in BASE_PREFIXES]
        for found in (name, *bare, *(prefix + inner for prefix in CONTAINERS for inner in (name, *bare))):
            if found in self._files:
                return *self._files[found], found
        raise InputError("model", str(self._directory), f"its safetensors must contain {name}")


class SeededWeights:
    """Random weights with the magnitudes of trained weights. Activations keep their scale, and logits have a standard
    deviation of about one.

    Each tensor depends only on the seed and its name, and is the same on any rank.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def check(self, weights: Iterable[Weight], copies: Mapping[str, tuple[str, ...]]) -> None:
        """Accept any weight."""

    def read(self, weight: Weight) -> None:
        """Draw matrices from N(0, 1 / fan-in) and biases from N(0, 0.02^2). Set norms to one."""
        whole = weight.out if weight.cut is None else weight.out.new_empty(weight.shape)
        self._draw(weight.name if weight.entry is None else f"{weight.name}.{weight.entry[0]}", whole)
        if weight.cut is not None:
            weight.out.copy_(whole[weight.place])

    def _draw(self, name: str, out: Tensor) -> None:
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(name.encode(), self._seed))
        if out.dim() > 1:
            out.normal_(0.0, out.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            out.normal_(0.0, 0.02, generator=generator)
        else:
            out.fill_(1.0)


def check_weights(spec: ModelSpec, dtype: DType, source: WeightSource) -> None:
    """Refuse a source that lacks a model's weights, before memory is allocated.

    Raises:
        InputError: this version does not run the family in this dtype, or a weight is missing or has another shape.
    """
    _checked(Part.whole(spec), dtype, source)


def load_model(
    spec: ModelSpec, dtype: DType, source: WeightSource, device: str = "cpu", part: Part | None = None
) -> Model:
    """Allocate a model, or a part of it, on its device and fill each parameter from `source`.

    Raises:
        InputError: this version does not run the family in this dtype, or a weight is missing or has another shape.
    """
    return _loaded(part or Part.whole(spec), dtype, source, device, lambda projection: None)


def load_prepacked(
    spec: ModelSpec,
    dtype: DType,
    source: WeightSource,
    device: str,
    part: Part | None,
    layouts: Mapping[str, str] | None,
) -> Model:
    """Load a model like `load_model`, and pack each projection for the device as soon as it is read.

    Only one matrix at a time is in float32, so that a model in eight bits never takes four times its size.
    """

    def prepack(projection: Linear) -> None:
        projection.prepack(dtype, layouts)

    model = _loaded(part or Part.whole(spec), dtype, source, device, prepack)
    model.prepack(dtype, layouts)  # a head that is tied to the embedding
    return model


def _loaded(part: Part, dtype: DType, source: WeightSource, device: str, when_read: Callable[[Linear], None]) -> Model:
    """Return a model's part with its weights. `when_read` is called with each projection that has a separate matrix."""
    if part.spec.quantization is not None and torch.device(device).type != "cpu":
        accepted = (
            "xgpt's own engine runs checkpoints in eight bits only on CPUs: take another checkpoint, or `engine=vllm`"
        )
        raise InputError("model.quantization", part.spec.quantization.kind, accepted)
    model = _checked(part, dtype, source)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    cut = cuts(model, part)
    for name, places in places_of(model).items():
        if torch.device(device).type == "cpu":
            memory.ask_for_heap()
        # In half precision, the nearly equal biases of a router's experts would become equal.
        is_exact = name.endswith(".e_score_correction_bias")
        materialise(places, torch.float32 if is_exact else state_dtype(dtype, device), device)
        for weight in _pieces(model, part, name, cut.get(name)):
            source.read(weight)
        owner, leaf = places[0]
        if isinstance(owner, Linear) and leaf == "weight" and len(places) == 1:
            when_read(owner)
    return model


def _checked(part: Part, dtype: DType, source: WeightSource) -> Model:
    if dtype not in part.spec.run_dtypes:
        raise InputError("dtype", dtype, f"{part.spec.family} runs in {', '.join(part.spec.run_dtypes)}")
    model = build(part)
    source.check(weights_of(model, part), model.checkpoint_copies)
    return model


def weights_of(model: Model, part: Part) -> Iterator[Weight]:
    """A tied head is stored as the embedding."""
    cut = cuts(model, part)
    for name in places_of(model):
        yield from _pieces(model, part, name, cut.get(name))


def _pieces(model: Model, part: Part, name: str, cut: tuple[Cut, ...] | None) -> Iterator[Weight]:
    owner, parameter = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    names = model.checkpoint_parameters(name)
    parts: tuple[Cut | None, ...] = cut or (None,)
    is_split = isinstance(owner, Linear) and max(len(names), len(parts)) > 1
    pieces = parameter.data.split(owner.parts) if is_split else (parameter.data,)
    entry = _entry(model, part, name)
    in_layer = model.checkpoint_transposed and name.startswith("layers.")
    transposed = (in_layer or entry is not None) and parameter.dim() > 1
    if len(names) < len(pieces):  # the checkpoint also fuses the parameter, so each piece is cut out of that tensor
        names, parts = names * len(pieces), _within_one(parts)
    elif len(parts) < len(pieces):
        parts = (None,) * len(pieces)
    for piece_name, piece, piece_cut in zip(names, pieces, parts, strict=True):
        yield Weight(piece_name, piece, transposed, piece_cut, entry)


def _entry(model: Model, part: Part, name: str) -> tuple[int, int] | None:
    """Return an expert's index and the number of experts, if the checkpoint stores this parameter of all experts
    together."""
    expert = re.search(r"\.experts\.(\d+)\.", name)
    if expert is None or not model.checkpoint_stacked or part.spec.experts is None:
        return None
    return int(expert[1]), part.spec.experts.number


def _within_one(parts: tuple[Cut | None, ...]) -> tuple[Cut, ...]:
    whole = [cut for cut in parts if cut is not None]
    full = sum(cut.full for cut in whole)
    starts = accumulate((cut.full for cut in whole[:-1]), initial=0)
    return tuple(Cut(cut.dim, first + cut.start, full) for cut, first in zip(whole, starts, strict=True))
