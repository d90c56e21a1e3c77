"""Read the load in a benchmark's command, such as `vllm bench serve`. `configs/benchmarks.yaml` has the flags."""

from __future__ import annotations

import math
import shlex
from typing import Any

import numpy as np
from scipy.special import ndtri

from xgpt.comparing.flags import parts_of
from xgpt.core.errors import InputError
from xgpt.core.io import configs_dir, load_yaml
from xgpt.core.schema import Workload
from xgpt.core.trace_blocks import TracePrefixes
from xgpt.core.workload import Floats, Ints, TraceLengths, sample
from xgpt.resolve import load_trace, workload_of
from xsimulator.benchmarked import Benchmark, times_at, variation_of

BLOCK = 16
"""Tokens of a block of a shared prefix."""
MOST_TOKENS = 10**8
Flags = dict[str, str]
TOOLS: dict[str, Any] = load_yaml(configs_dir() / "benchmarks.yaml", "benchmarks")


def read_benchmark(command: str, workload: str | Workload | None = None, seed: int = 0) -> Benchmark:
    """Return the requests that a benchmark's command sends. Their lengths have exactly the means of its distributions.

    Args:
        workload: lengths of the data set, by name, by file, or as histograms.

    Raises:
        InputError: the command is none of a known tool, or its load is not known.
    """
    try:
        words = shlex.split(command, comments=True)
    except ValueError as error:
        raise InputError("bench", command, f"{str(error).lower()}: give the whole command in quotes") from None
    name, given = _tool(words, command)
    tool, rng = TOOLS[name], np.random.default_rng(seed)
    if (flag := next((each for each in tool.get("refused", ()) if each in given), None)) is not None:
        raise InputError("bench", f"--{flag}", "a load with it is not simulated: leave it out")
    grouped = tool.get("grouped", {})
    dataset = _text(given, tool, "dataset")
    count, groups, prefix = _number(given, tool, "requests"), 0.0, 0.0
    if dataset is not None and dataset == grouped.get("dataset"):
        groups, prefix = (_number(given, grouped, each) or 0.0 for each in ("groups", "prefix"))
        count = groups * each if (each := _number(given, grouped, "each")) else count
        inputs, outputs = (np.full(_whole(count), _number(given, grouped, each)) for each in ("input", "output"))
    elif workload is not None:
        trace = load_trace(workload) if isinstance(workload, str) else None
        inputs, outputs = sample(workload_of(workload), _whole(count), rng) if trace is None else trace[:2]
        chosen = rng.permutation(len(inputs))[: _whole(count)]
        inputs, outputs = inputs[chosen], outputs[chosen]
    elif dataset in ("random", None):
        groups, prefix = 1.0, _number(given, tool, "prefix") or 0.0
        inputs, outputs = (_drawn(given, tool, each, _whole(count), rng) for each in ("input", "output"))
    else:
        raise InputError("bench", dataset, "lengths of this data set are not in the command: give them as `workload`")
    rate, clients = (_number(given, tool, each) for each in ("rate", "clients"))
    times = None
    if rate is not None and math.isfinite(rate):
        shape = 1.0 if (named := _number(given, tool, "shape")) is None else named
        if not shape:
            raise InputError("bench", f"--{tool['shape']['flags'][0]} 0", "it must be above 0")
        times = times_at(rate, variation_of(shape), len(inputs), rng)
    elif clients is None and name == "aiperf profile":
        clients = 1.0
    if not max(inputs.max(), outputs.max(), prefix) <= MOST_TOKENS:
        raise InputError("bench", command, f"its lengths must be at most {MOST_TOKENS:,} tokens")
    prefixes = None
    if prefix:
        of_request = rng.permutation(np.arange(len(inputs)) % max(1, round(groups)))
        inputs = inputs + prefix
        prefixes = _shared(of_request, np.rint(inputs).astype(int), int(prefix))
    inputs, outputs = (np.maximum(1, np.rint(values)).astype(int) for values in (inputs, outputs))
    return Benchmark(name, TraceLengths(inputs, outputs, times, prefixes), None if clients is None else _whole(clients))


def _tool(words: list[str], command: str) -> tuple[str, Flags]:
    """Return the tool that a command runs, and its flags without dashes."""
    for name, tool in TOOLS.items():
        for begins in (each.split() for each in tool["begins"]):
            for i in range(len(words)):
                found = words[i : i + len(begins)]
                if [found[0].rsplit("/", 1)[-1], *found[1:]] == begins:
                    return name, _flags(words[i + len(begins) :])
    known = ", ".join(f"`{name}`" for name in TOOLS)
    raise InputError("bench", command, f"it is no command of {known}: give one of these")


def _flags(words: list[str]) -> Flags:
    found: Flags = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            flag, has_value, value = word[2:].partition("=")
            follows = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else ""
            found[flag.replace("_", "-")] = value if has_value else follows
    return found


def _text(given: Flags, fields: dict[str, Any], name: str) -> str | None:
    field = fields.get(name)
    if field is None:
        return None
    flag = next((each for each in field["flags"] if each in given), None)
    default = field.get("default")
    return given[flag] if flag is not None else None if default is None else str(default)


def _number(given: Flags, fields: dict[str, Any], name: str) -> float | None:
    text = _text(given, fields, name)
    return None if text is None else _positive(text, fields[name]["flags"][0])


def _positive(text: Any, flag: str) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not value >= 0:
        raise InputError("bench", f"--{flag} {text}", "it must be a number from 0 on")
    return value


def _whole(value: float | None) -> int:
    if value is None or not 1 <= value <= 10**6:
        raise InputError("bench", value, "give the number of requests and of clients, from 1 to 1,000,000")
    return round(value)


def _drawn(given: Flags, tool: dict[str, Any], name: str, count: int, rng: np.random.Generator) -> Floats:
    mean = _number(given, tool, name)
    if mean is None:
        raise InputError("bench", None, f"give --{tool[name]['flags'][0]}: without it, lengths are the model's own")
    strata = (rng.permutation(count) + 0.5) / count
    if tool["range"] == "normal":
        return np.maximum(1.0, mean + (_number(given, tool, f"{name}_deviation") or 0.0) * ndtri(strata))
    text = _text(given, tool, "ratio") or "0"
    ratio = _positive(parts_of(text).get(name, text), tool["ratio"]["flags"][0])
    lowest, highest = (1 - ratio, 1 + ratio) if tool["range"] == "around" else (min(ratio, 1.0), 1.0)
    return mean * (lowest + (highest - lowest) * strata)


def _shared(groups: Ints, inputs: Ints, prefix: int) -> TracePrefixes:
    common, ids, unique = prefix // BLOCK, [], 1 + int(groups.max())
    unique *= common
    for group, tokens in zip(groups.tolist(), inputs.tolist(), strict=True):
        own = -(-tokens // BLOCK) - common
        ids.append((*range(group * common, (group + 1) * common), *range(unique, unique + own)))
        unique += own
    return TracePrefixes(BLOCK, tuple(ids), ((),) * len(ids))
