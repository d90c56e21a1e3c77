"""Weights into a model: from a checkpoint in Hugging Face layout, or drawn from a seed."""

from __future__ import annotations

import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from xgpt.checkpoint import read_spec
from xgpt.errors import InputError
from xgpt.schema import DType, ModelSpec
from xrunner.layers import Linear
from xrunner.models import DecoderModel, family_of

DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class WeightSource(Protocol):
    """Where weights come from, one tensor at a time."""

    def read(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor that a checkpoint calls `name`, converted to its dtype and device."""


class Checkpoint:
    """The *.safetensors of a directory, mapped into memory: nothing is read before it is copied into place.

    Raises:
        InputError: there are none (pickled weights are refused: they can run code), or the index is broken.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in self._paths():
            file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    def read(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor `name`; checkpoints of a bare model lack the leading "model.".

        Raises:
            InputError: there is no such tensor, or its shape differs.
        """
        found = next((n for n in (name, name.removeprefix("model.")) if n in self._files), None)
        if found is None:
            raise InputError("model", str(self._directory), f"its safetensors must hold {name}")
        tensor = self._files[found].get_tensor(found)
        if tensor.shape != out.shape:
            accepted = f"{name} must have the shape {list(out.shape)} that config.json implies"
            raise InputError("model", f"{self._directory}: {list(tensor.shape)}", accepted)
        out.copy_(tensor)

    def _paths(self) -> list[Path]:
        index = self._directory / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError) as error:
                raise InputError("model", str(index), f"it is not a safetensors index: {error!r}") from None
            paths = [self._directory / name for name in sorted(names)]
        else:
            paths = sorted(self._directory.glob("*.safetensors"))
        if not paths or not all(path.is_file() for path in paths):
            missing = next((path.name for path in paths if not path.is_file()), "*.safetensors")
            accepted = f"it must hold {missing} (pickled weights are refused: convert them)"
            raise InputError("model", str(self._directory), accepted)
        return paths


class SeededWeights:
    """Random weights of trained magnitude: activations keep their scale, logits have a deviation of about one.

    Each tensor depends on the seed and its own name only, so that it does not matter who loads what.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def read(self, name: str, out: Tensor) -> None:
        """Matrices N(0, 1 / fan-in), biases N(0, 0.02^2), norms one."""
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(name.encode(), self._seed))
        if out.dim() > 1:
            out.normal_(0.0, out.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            out.normal_(0.0, 0.02, generator=generator)
        else:
            out.fill_(1.0)


def seeded(spec: ModelSpec, dtype: DType, seed: int, device: str = "cpu") -> DecoderModel:
    """A model with random weights.

    Raises:
        InputError: this version does not run the family.
    """
    return load_model(spec, dtype, SeededWeights(seed), device)


def load_checkpoint(directory: Path, dtype: DType | None = None, device: str = "cpu") -> DecoderModel:
    """The model of a directory in Hugging Face layout; `dtype` None: as its config.json says.

    Raises:
        InputError: the directory, its config or its weights are not what this version runs.
    """
    spec = read_spec(directory)
    return load_model(spec, dtype or spec.default_dtype, Checkpoint(directory), device)


def load_model(spec: ModelSpec, dtype: DType, source: WeightSource, device: str = "cpu") -> DecoderModel:
    """Allocate a model on its device and fill each parameter from `source`.

    Raises:
        InputError: this version does not run the family, or the source lacks a weight.
    """
    model = family_of(spec)(spec, partial(torch.empty, dtype=DTYPES[dtype], device=device))
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        names = model.checkpoint_parameters(name)
        owner = modules[name.rpartition(".")[0]]
        parts = owner.parts if isinstance(owner, Linear) else (parameter.shape[0],)
        for part_name, part in zip(names, parameter.data.split(list(parts)), strict=True):
            source.read(part_name, part)
    return model
