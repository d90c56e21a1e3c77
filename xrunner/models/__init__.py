"""The model families. Each family has its own file and consists of the blocks in layers.py."""

from __future__ import annotations

from importlib import import_module

from xgpt.core.errors import InputError
from xgpt.core.schema import ModelSpec
from xgpt.core.schema.families import FAMILIES
from xrunner.models.base import DecoderModel, Model
from xrunner.models.encoder_decoder import EncoderDecoderModel

CLASSES: dict[str, str] = {row["family"]: row["model"] for row in FAMILIES.values() if "model" in row}
"""By family: the class that runs it, as FILE.NAME."""


def family_of(spec: ModelSpec) -> type[Model]:
    if spec.family not in CLASSES:
        raise InputError("model.family", spec.family, f"xgpt's own engine runs only {', '.join(sorted(CLASSES))}")
    if spec.unsupported:
        accepted = "xgpt's own engine does not support this value; remove it if it has no effect, or give `engine=vllm`"
        raise InputError("config.json", "; ".join(spec.unsupported), accepted)
    if spec.quantization is not None and not spec.quantization.computes_in_eight_bits:
        accepted = "xgpt's own engine runs float32, float16, bfloat16 and eight bits: take such a checkpoint, or "
        accepted += "--engine vllm"
        raise InputError("model.quantization", spec.quantization.kind, accepted)
    file, name = CLASSES[spec.family].split(".")
    found: type[Model] = getattr(import_module(f"xrunner.models.{file}"), name)
    return found
