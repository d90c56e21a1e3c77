"""Read a `vllm serve` command line as a deployment that can be scored."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar, cast

from xgpt.comparing.vllm_flags import ALIASES, REFUSED, TAKES, VERSION
from xgpt.core.errors import InputError, nearest
from xgpt.core.io import load_yaml
from xgpt.core.schema import ClusterSpec, DType

T = TypeVar("T")

LAUNCHERS = (("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server"))
DEFAULTS = ((160, 1024, 16384), (70, 1024, 8192), (0, 256, 2048))
"""Defaults of vLLM's server: (GiB of device memory from which they hold, requests, tokens in a step)."""
A100_LIMIT = 160
"""GiB of memory below which an A100 has the smallest defaults."""
CPU_DEFAULTS = (128, 2048)
"""(requests, tokens) in a step on a CPU; times the devices of a replica."""
GPU_SHARE = 0.92
"""Share of a GPU's memory that vLLM uses by default."""
BLOCK_SIZE = 16
DTYPES: dict[str, DType | None] = {
    "auto": None,
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
EIGHT_BIT_KV = ("fp8", "fp8_e4m3")
MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

Given = dict[str, str]
"""Flags by their long name: the value, "yes" or "no" for a switch, JSON for a value given in parts."""


@dataclass(frozen=True)
class CurrentEngine:
    """The settings of a running vLLM, which cuts prompts into chunks.

    Attributes:
        num_stages: pipeline stages of a replica, `tp_degree` devices each.
        ep_degree: parts into which these devices divide the experts of a layer.
        max_num_seqs: largest number of requests in a step.
        max_num_batched_tokens: largest number of tokens in a step.
        usable_memory: share of a device's memory that it uses; None: the cluster's.
        max_model_len: tokens of the longest request that it accepts; None: the model's context.
        dtype: type that it runs in; None: the one in the model's config.
        notes: assumptions, in words.
    """

    tp_degree: int
    num_stages: int
    replicas: int
    ep_degree: int
    max_num_seqs: int
    max_num_batched_tokens: int
    usable_memory: float | None = None
    max_model_len: int | None = None
    dtype: DType | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.tp_degree * self.num_stages * self.replicas


def read_vllm_command(command: str, cluster: ClusterSpec) -> CurrentEngine:
    """Return the schedule that a `vllm serve` command asks for.

    Raises:
        InputError: the command starts something else, a flag or its value is unknown to vLLM, or it changes
            the speed in a way that is not scored.
    """
    given = _read_flags(_arguments(command))
    for name, value in given.items():
        why, neutral = REFUSED.get(name, ("", ()))
        if why and value not in neutral:
            raise InputError(f"current: --{name}", value, f"{why}; leave it out to compare without it")
    on_gpu = cluster.device.type == "gpu"
    _only(given, "enable-chunked-prefill", ["yes"], "only engines with chunked prompts can be scored")
    _only(given, "block-size", [str(BLOCK_SIZE)], f"K/V blocks are scored with {BLOCK_SIZE} tokens")
    if on_gpu:
        _only(given, "enforce-eager", ["no"], "step times are those of captured graphs")
        _only(given, "async-scheduling", ["yes"], "step times are those of a loop that runs during the device's work")
    stages, degree = _of(given, "pipeline-parallel-size", _count, 1), _of(given, "tensor-parallel-size", _count, 1)
    replicas = _of(given, "data-parallel-size", _count, 1)
    by_experts = given.get("enable-expert-parallel") == "yes"
    if by_experts and replicas > 1:
        accepted = "with it experts would be divided among all replicas, which is not scored; leave one of them out"
        raise InputError("current: --enable-expert-parallel", f"--data-parallel-size {replicas}", accepted)
    default_seqs, default_tokens = _defaults(cluster, degree * stages)
    tokens = _of(given, "max-num-batched-tokens", _whole, default_tokens)
    seqs = _of(given, "max-num-seqs", _count, min(default_seqs, tokens))
    if seqs > tokens:
        raise InputError(
            "current: --max-num-batched-tokens", tokens, f"vLLM wants no fewer than --max-num-seqs, {seqs}"
        )
    notes = [
        f"{name} {value}: vLLM's default on this device"
        for name, value in (("max-num-seqs", seqs), ("max-num-batched-tokens", tokens))
        if name not in given
    ]
    if given.get("enable-prefix-caching") != "no":
        notes.append("prefix caching: no hits are counted, as the workload says lengths alone")
    if not on_gpu and _dtype(given) is None:
        notes.append("dtype: taken to be what the plans are in")
    return CurrentEngine(
        tp_degree=degree,
        num_stages=stages,
        replicas=replicas,
        ep_degree=degree if by_experts else 1,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        usable_memory=_of(given, "gpu-memory-utilization", _share, GPU_SHARE if on_gpu else None),
        max_model_len=_of(given, "max-model-len", _length, None),
        dtype=_dtype(given),
        notes=tuple(notes),
    )


def _arguments(command: str) -> list[str]:
    """Return the words after the launcher and the model."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError("current", command, f"{error}; quote it as a shell would take it") from None
    starts = [i for i, pair in enumerate(pairwise(words)) if pair in LAUNCHERS]
    if not starts:
        raise InputError("current", command, "give a command that starts with vllm serve")
    words = words[starts[0] + 2 :]
    positional = words[:1] if words and not words[0].startswith("-") else []
    return words[len(positional) :]


def _read_flags(words: list[str]) -> Given:
    """Return the flags of words like `--flag value`, `--flag=value`, `-tp 4`, `-O3` and `--flag.field value`."""
    given: Given = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word):
            raise InputError("current", word, "after the model only flags and their values may follow")
        name, equals, value = word.partition("=")
        if word.startswith("-O"):
            name, equals, value = "--optimization-level", "=", word[2:].removeprefix("=")
        name, dot, inner = name.partition(".")
        name, is_on = _flag(name)
        takes = TAKES[name]
        if takes in ("nothing", "switch"):
            if equals or dot:
                raise InputError(f"current: --{name}", value, "it is a switch: give no value")
            given[name] = "yes" if is_on else "no"
            continue
        values = [value] if equals else []
        most = {"value": 1, "optional": 1, "many": len(words)}[takes]
        while not equals and at < len(words) and len(values) < most and not _is_flag(words[at]):
            values.append(words[at])
            at += 1
        if not values and takes != "optional":
            raise InputError(f"current: --{name}", "", "give a value")
        given[name] = json.dumps({inner: " ".join(values)}) if dot else " ".join(values)
    return _read_config(given.pop("config")) | given if "config" in given else given


def _read_config(path: str) -> Given:
    """Return the flags of a YAML file, as `vllm serve --config` takes them."""
    data = load_yaml(Path(path), "current: --config")
    if not isinstance(data, dict):
        raise InputError("current: --config", path, "it must hold flags and their values")
    words: list[str] = []
    for key, value in data.items():
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        else:
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    given = _read_flags(words)
    if "config" in given:
        raise InputError("current: --config", path, "it names another config file; put all flags into one")
    return given


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _flag(word: str) -> tuple[str, bool]:
    """Return the long name, and whether it is switched on.

    Raises:
        InputError: vLLM has no such flag; the message names the nearest.
    """
    word = word.replace("_", "-")
    name = ALIASES.get(word, word.removeprefix("--"))
    if name in TAKES:
        return name, True
    positive = name.removeprefix("no-")
    if name != positive and TAKES.get(positive) == "switch":
        return positive, False
    known = [f"--{flag}" for flag in TAKES]
    known += [f"--no-{flag}" for flag, takes in TAKES.items() if takes == "switch"] + [*ALIASES]
    raise InputError("current", word, f"vLLM {VERSION} has no such flag{nearest(word, known)}")


def _of(given: Given, name: str, read: Callable[[str], T | None], default: T) -> T:
    """Return the value of a flag, or its default.

    Raises:
        InputError: the value cannot be read.
    """
    if name not in given:
        return default
    try:
        return cast(T, read(given[name]))
    except ValueError as error:
        raise InputError(f"current: --{name}", given[name], str(error)) from None


def _only(given: Given, name: str, accepted: list[str], why: str) -> None:
    if given.get(name, accepted[0]) not in accepted:
        shown = {"yes": f"--{name}", "no": f"--no-{name}"}.get(given[name], given[name])
        raise InputError(f"current: --{name}", shown, why)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("give a whole number, at least 1")
    return int(text)


def _whole(text: str) -> int:
    """Return the number in text like 8192, 8k (8,000), 8K (8,192) or 1.5k."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in MULTIPLES else (text, "")
    if unit and unit.islower() and re.fullmatch(r"\d+\.\d+", number):
        return int(float(number) * MULTIPLES[unit])
    return _count(number) * (MULTIPLES[unit] if unit else 1)


def _length(text: str) -> int | None:
    return None if text in ("-1", "auto") else _whole(text)


def _share(text: str) -> float:
    if not re.fullmatch(r"[01]?\.?\d*", text) or not text.strip(".") or not 0 < float(text) <= 1:
        raise ValueError("give a share above 0, at most 1")
    return float(text)


def _dtype(given: Given) -> DType | None:
    """Return the dtype that it runs in; eight bits are accepted only for weights and K/V together, as in profiles."""
    weights, kv = given.get("quantization"), given.get("kv-cache-dtype", "auto")
    if weights not in (None, "fp8"):
        raise InputError("current: --quantization", weights, "step times are known for fp8 alone")
    if kv not in DTYPES and kv not in EIGHT_BIT_KV:
        raise InputError("current: --kv-cache-dtype", kv, f"known: auto, {', '.join(EIGHT_BIT_KV)}, or the dtype")
    if (weights == "fp8") != (kv in EIGHT_BIT_KV):
        name = "kv-cache-dtype" if weights is None else "quantization"
        both = (
            "eight bits are scored for both weights and K/V: give --quantization fp8 --kv-cache-dtype fp8, or neither"
        )
        raise InputError(f"current: --{name}", given[name], both)
    if weights == "fp8":
        return "float8"
    name = given.get("dtype", "auto")
    if name not in DTYPES:
        raise InputError("current: --dtype", name, f"known: {', '.join(DTYPES)}")
    if DTYPES[kv] not in (None, DTYPES[name]):
        raise InputError("current: --kv-cache-dtype", kv, f"K/V are scored in --dtype {DTYPES[kv]}")
    return DTYPES[name]


def _defaults(cluster: ClusterSpec, replica_devices: int) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens) of vLLM's server by default."""
    device = cluster.device
    if device.type == "cpu":
        return CPU_DEFAULTS[0] * replica_devices, CPU_DEFAULTS[1] * replica_devices
    is_a100 = "a100" in device.name.lower()
    gibibytes = device.memory_bytes / 2**30
    for least, seqs, tokens in DEFAULTS:
        if gibibytes >= least and not (is_a100 and 0 < least < A100_LIMIT):
            return seqs, tokens
    raise AssertionError("the last has no least memory")
