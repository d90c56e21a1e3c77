"""Read the model that a checkpoint's config.json describes, without torch. Planning needs no weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from xgpt.checkpoints.families import given_by_default, language_model, tower_of, tower_params
from xgpt.checkpoints.fields import unsupported_fields
from xgpt.checkpoints.readers import common, read
from xgpt.checkpoints.readers.planned import PLANNED, planned
from xgpt.core.documents import read_json
from xgpt.core.errors import InputError
from xgpt.core.io import parse, read_text
from xgpt.core.schema import DType, ModelSpec
from xgpt.core.schema.families import FAMILIES

STORED_DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""xgpt's names for the dtypes in safetensors files."""

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 10),
}
"""Settings of generation_config.json that are defaults for requests, with the accepted ranges."""

MAX_HEADER_BYTES = 100_000_000
"""Largest accepted header of a safetensors file, as in the safetensors library. A sparse file can claim any size."""

ENCODER_DECODERS = ("t5", "mt5")
"""Values of model_type in the family t5."""


def read_spec(directory: Path) -> ModelSpec:
    """Return the model in a directory with Hugging Face's layout. Fields have the same meaning as in `transformers` 5.

    Stop tokens come from generation_config.json or, if it is missing, from config.json. The tokenizer's end token is
    added, as in vLLM. Embedding and head share weights if config.json says so and the weight files have no head.

    Raises:
        InputError: there is no config.json, the family or variant is not supported, a field is not known, or the
            directory contains an adapter.
    """
    if read_object(directory / "config.json") is None:
        raise InputError("model", str(directory), "the directory must contain a config.json; give that of a checkpoint")
    if (adapter := directory / "adapter_config.json").is_file():
        says = "adapters are not supported: merge this one into the weights, or remove it"
        raise InputError("model", str(adapter), says)
    return _read_spec(directory / "config.json", directory)


def read_config(path: Path) -> ModelSpec:
    """Return the model that a config.json alone describes. Stop tokens and tied weights are taken from it, too.

    Raises:
        InputError: as `read_spec` does.
    """
    if not path.exists():
        raise InputError("config", str(path), "there is no such file; check the path")
    return _read_spec(path, None)


def _read_spec(path: Path, directory: Path | None) -> ModelSpec:
    config = read_object(path) or {}
    generation = {} if directory is None else read_object(directory / "generation_config.json") or {}
    headers = [] if directory is None else list(_headers(directory))
    side = read_object(path.parent / "hf_quant_config.json")
    named = directory or (path.parent if path.name == "config.json" else path.with_suffix(""))
    spec = spec_of(config, named.resolve().name, generation, headers, side, str(path))
    end = None if directory is None else _tokenizer_end(directory)
    if end is None or end in spec.eos_token_ids or end >= spec.vocab_size:
        return spec
    return spec.but(eos_token_ids=(*spec.eos_token_ids, end))


def spec_of(
    config: dict[str, Any],
    name: str,
    generation: Mapping[str, Any] = MappingProxyType({}),
    headers: Sequence[str] = (),
    side: Mapping[str, Any] | None = None,
    source: str = "config.json",
) -> ModelSpec:
    """Return the model that a config describes.

    Args:
        generation: content of generation_config.json.
        headers: JSON headers of the weight files.
        side: content of hf_quant_config.json, or None if there is no such file.
        source: name of the config in messages.

    Raises:
        InputError: as `read_spec` does.
    """
    towers, tower = tower_params(config), tower_of(config)
    family, config = language_model(config, source)
    given, defaults = config, given_by_default(family)
    config = defaults | given
    unsupported = () if family in PLANNED else unsupported_fields(family, config)
    try:
        fields = planned(family, given, defaults) if family in PLANNED else read(family, config)
        fields = common(config, generation, side) | fields
        if family in ENCODER_DECODERS:
            fields["bos_token_id"] = _decoder_start(config, generation)
    except KeyError as error:
        raise InputError(f"{source}: {error.args[0]}", None, "a model of this family needs it") from None
    if unsupported := (*unsupported, *fields.pop("unsupported", ())):
        fields["unsupported"] = unsupported
    if "default_dtype" not in fields and (stored := _stored_dtype(headers)) is not None:
        fields["default_dtype"] = stored
    if headers:
        is_stored = any('"lm_head.weight"' in header for header in headers)
        # T5's configs are unreliable: transformers 5 ties the weights if no head is stored.
        fields["tie_embeddings"] = not is_stored and (family in ENCODER_DECODERS or fields["tie_embeddings"])
    fields.setdefault("default_dtype", "bfloat16")  # as in vLLM
    if towers:
        fields |= {"tower_params": towers, "tower": tower}
    fields |= {"name": name, "family": "other" if family in PLANNED else FAMILIES[family]["family"]}
    return parse(fields, ModelSpec, source)


def sampling_defaults(directory: Path) -> dict[str, float]:
    """Return the sampling settings of generation_config.json. As in vLLM, they are defaults for requests.

    Raises:
        InputError: a value is out of its range.
    """
    path = directory / "generation_config.json"
    generation = read_object(path) or {}
    settings = {name: generation[name] for name in SAMPLING_RANGES if generation.get(name) is not None}
    for name, value in settings.items():
        low, high = SAMPLING_RANGES[name]
        if type(value) not in (int, float) or not low <= value <= high or (name == "top_k" and type(value) is not int):
            raise InputError(f"{path}: {name}", value, f"it must be from {low:g} to {high:g}")
    return settings


def default_output(directory: Path) -> int | None:
    """Return the default limit on output tokens in generation_config.json, or None if it states no limit."""
    most = (read_object(directory / "generation_config.json") or {}).get("max_new_tokens")
    return most if type(most) is int and most > 0 else None


def _tokenizer_end(directory: Path) -> int | None:
    settings = read_object(directory / "tokenizer_config.json") or {}
    end = settings.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if not isinstance(text, str):
        return None
    listed = settings.get("added_tokens_decoder")
    entries = [(id_, entry) for id_, entry in listed.items()] if isinstance(listed, dict) else []
    if not entries:
        added = (read_object(directory / "tokenizer.json") or {}).get("added_tokens")
        entries = [(str(entry.get("id")), entry) for entry in added if isinstance(entry, dict)] if added else []
    ids = (id_ for id_, entry in entries if isinstance(entry, dict) and entry.get("content") == text)
    return next((int(id_) for id_ in ids if id_.isdecimal()), None)


def read_object(path: Path, field: str = "model") -> dict[str, Any] | None:
    """Return the JSON object in a file of a checkpoint, or None if there is no such file.

    Raises:
        InputError: the file is not a JSON object. The error is about `field`.
    """
    if not path.exists():
        return None
    try:
        value = read_json(read_text(path, field))
    except ValueError as error:
        raise InputError(field, str(path), f"it cannot be read as JSON: {error}; fetch the checkpoint again") from None
    if not isinstance(value, dict):
        raise InputError(field, str(path), "it must contain a JSON object")
    return value


def _headers(directory: Path) -> Iterator[str]:
    """Yield the JSON header of each weight file. For a broken file it is empty, and loading reports the error later.

    A safetensors file begins with the length of its header (8 bytes, little-endian) and the header.
    """
    for path in weight_files(directory):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            is_whole = length <= MAX_HEADER_BYTES and 8 + length <= path.stat().st_size
            yield file.read(length).decode(errors="replace") if is_whole else ""


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files that `transformers` would load, or nothing if there are none.

    They are model.safetensors, or the shards that model.safetensors.index.json names in the same directory.

    Raises:
        InputError: the index is broken, or names a file that does not exist.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        weight_map = read_json(read_text(index, "model"))["weight_map"]
        shards = {str(shard): tensor for tensor, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        says = f"it is not a safetensors index ({error!r}); fetch the checkpoint again"
        raise InputError("model", str(index), says) from None
    if not shards:
        raise InputError("model", str(index), "its weight_map names no tensors; fetch the checkpoint again")
    for shard, tensor in shards.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            accepted = f"{tensor} must be in a *.safetensors file in the same directory"
            raise InputError("model", f"{index}: {shard}", accepted)
        if not (directory / shard).is_file():
            says = f"it must contain {shard}, the file of {tensor}; fetch the checkpoint again"
            raise InputError("model", str(directory), says)
    return [directory / shard for shard in sorted(shards)]


def _stored_dtype(headers: Sequence[str]) -> DType | None:
    """Return the dtype of the first weight file, or None if its weights have several."""
    names = re.findall(rf'"dtype":\s*"({"|".join(STORED_DTYPES)})"', headers[0] if headers else "")
    dtypes = {STORED_DTYPES[name] for name in names}
    return dtypes.pop() if len(dtypes) == 1 else None


def _decoder_start(config: Mapping[str, Any], generation: Mapping[str, Any]) -> int:
    for where in (generation, config):
        for field in ("decoder_start_token_id", "bos_token_id"):
            if where.get(field) is not None:
                return cast(int, where[field])
    raise KeyError("decoder_start_token_id")
