"""Load models, clusters, engines and workloads, by the name of a shipped config or from the user's file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from xgpt.checkpoints import hub
from xgpt.checkpoints.files import read_config, read_spec, weight_files
from xgpt.core.errors import InputError, nearest_names
from xgpt.core.io import config_names, find_config, load_cluster_yaml, load_yaml, parse
from xgpt.core.load import NO_GROWTH, Growth, LogLoad
from xgpt.core.machine import detect
from xgpt.core.schema import ClusterSpec, EngineSpec, Frozen, ModelSpec, Profile, RequestClass, Workload, WorkloadSpec
from xgpt.core.schema.workload import SessionSpec
from xgpt.core.sessions import law_of, workload_of_law
from xgpt.core.trace_turns import continued
from xgpt.core.traces import SUFFIXES, has_requests, is_trace, read_lengths, read_workload, trace_name
from xgpt.core.workload import TraceLengths, fitting, histogram, workload_of_log

_YAML = (".yaml", ".yml")
FRAMEWORKS = {"trtllm": "tensorrt-llm"}


class DetectedCluster(Frozen):
    name: Literal["local"]
    detect: Literal[True]
    num_devices: PositiveInt | None = None


def load_model(name: str, config: str | None = None) -> tuple[ModelSpec, Path | None]:
    """Return a model, and the absolute path of its weights' directory or None. None means that the weights are not on
    this machine.

    Args:
        name: a shipped model, a YAML file, a config.json, a directory in Hugging Face layout, or a Hugging Face id.
        config: path of the config.json if `name` is an id. None means the file in huggingface_hub's cache, or else a
            shipped config. The network is never used.

    Raises:
        InputError: there is no such model, or the file does not describe a model.
    """
    name = known_id(name)
    if hub.is_id(name) and not Path(name).exists():
        return _load_by_id(name, config)
    if config is not None:
        raise InputError("config", config, f"it needs a Hugging Face id, which {name} is not")
    path = find_config("models", name)
    if path.is_dir():
        # The path is absolute because a plan may be served from another directory.
        return read_spec(path), Path(os.path.abspath(path))
    document = load_yaml(path, "model")
    if isinstance(document, dict) and "model_type" in document:
        return read_config(path), None
    if isinstance(document, dict) and "name" not in document:
        says = "it has neither model_type, as a config.json has, nor name, as a shipped model has"
        raise InputError("model", name, says)
    return parse(document, ModelSpec, "model"), None


def known_id(name: str) -> str:
    """Return the hub id that a model's name means, or the name itself if it is shipped, a path, an id or not known."""
    is_other = "/" in name or name in config_names("models") or Path(name).exists()
    return name if is_other else hub.id_of_name(name) or name


def _load_by_id(model_id: str, config: str | None) -> tuple[ModelSpec, Path | None]:
    cached = hub.cached(model_id)
    if config is not None:
        spec = read_config(Path(config))
    elif cached is not None:
        spec = read_spec(cached)
    elif (shipped := hub.shipped_as(model_id)) is not None:
        spec = load_model(shipped)[0]
    else:
        near = nearest_names(model_id, hub.shipped_ids(), 1, 0.8)
        hint = f"did you mean {near[0]}? Otherwise " if near else ""
        accepted = "it is neither a path nor in the Hugging Face cache: "
        raise InputError("model", model_id, f"{accepted}{hint}give its config.json as `config`")
    has_weights = cached is not None and bool(weight_files(cached))
    return spec.but(name=model_id.partition("/")[2]), cached if has_weights else None


def load_cluster(name: str) -> ClusterSpec:
    """Return a cluster by name or file. `local` is this machine, and `local:N` is N of its devices.

    Raises:
        InputError: there is no such cluster, or the file does not describe a cluster.
        MachineError: this machine has fewer devices than requested.
    """
    kind, _, count = name.partition(":")
    if kind == "local" and count:
        if not count.isdecimal() or int(count) == 0:
            raise InputError("cluster", name, "write local:N with a whole number N of devices, at least 1")
        return detect(int(count))
    data = load_cluster_yaml(find_config("clusters", name))
    if isinstance(data, dict) and "detect" in data:
        return detect(parse(data, DetectedCluster, "cluster").num_devices)
    return parse(data, ClusterSpec, "cluster")


def check_names(among: Iterable[str]) -> None:
    """Check that all names of clusters in `among` are known."""
    for name in among:
        if not name.startswith("local:"):
            find_config("clusters", name, "among")


def load_engine(name: str) -> EngineSpec:
    """Return an engine by name or file. A name without a version means the engine's newest known version.

    `xgpt-vllm`, with or without a version, means vLLM with xgpt's scheduler class.

    Raises:
        InputError: there is no such engine, its version is not known, or the file does not describe an engine.
    """
    if name.startswith("xgpt-vllm"):
        return load_engine(name.removeprefix("xgpt-")).with_xgpt
    stem, version = _named(name)
    document = load_yaml(find_config("engines", stem), "engine")
    if not isinstance(document, dict) or "since" not in document:
        return parse(document, EngineSpec, "engine")
    oldest, newest = next(iter(document["since"])), document["newest"]
    version = version or newest
    if not _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        raise InputError("engine", name, f"{stem} is known from {stem}-{oldest} to {stem}-{newest}: give one of these")
    figures: dict[str, Any] = {"sources": {}}
    for since, changes in document["since"].items():
        if _numbers(since) <= _numbers(version):
            figures |= changes | {"sources": figures["sources"] | changes["sources"]}
    said = {"name": f"{stem}-{version}", "framework": document["framework"], "version": version}
    return parse(said | figures, EngineSpec, "engine")


def nearest_engine(framework: str, version: str | None) -> EngineSpec:
    document = load_yaml(find_config("engines", framework), "engine")
    oldest, newest = next(iter(document["since"])), document["newest"]
    asked = ".".join(map(str, _numbers(document.get("as", {}).get(version, version or newest))))
    return load_engine(f"{framework}-{min(max(oldest, asked, key=_numbers), newest, key=_numbers)}")


def _named(name: str) -> tuple[str, str | None]:
    named = re.fullmatch(r"(.+?)(?:-(\d+(?:\.\d+)*))?", name)
    stem = named and FRAMEWORKS.get(named[1], named[1])
    if not named or stem not in config_names("engines"):
        return name, None
    return stem, named[2] and ".".join(map(str, _numbers(named[2])))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def engine_of(profile: Profile) -> EngineSpec | None:
    """Return the engine whose step times a profile contains, or None if no shipped engine fits.

    If vLLM was measured on this machine, it runs xgpt's schedule, so the description of vLLM's own scheduler does not
    apply.
    """
    if profile.engine is None or (profile.source == "measured" and profile.engine != "xgpt"):
        return None
    if profile.engine == "xgpt":
        return load_engine("xgpt")
    try:
        return load_engine(f"{profile.engine}-{profile.engine_version}")
    except InputError:
        return None


def load_workload(name: str, spec: ModelSpec | None = None) -> Workload:
    """Return the length histograms of a workload, by name or file.

    Args:
        name: a shipped workload, a YAML file, a trace, or a page of Prometheus metrics.
        spec: the model into whose context the lengths must fit.

    Raises:
        InputError: there is no such workload, it is malformed, or its requests do not fit into the model's context.
    """
    path = find_config("workloads", name)
    if is_trace(path):
        workload = read_workload(path)
    elif (of_law := _law(path)) is not None:
        workload = of_law
    elif path.suffix in _YAML:
        written = parse(load_yaml(path, "workload"), WorkloadSpec, "workload")
        workload = Workload(name=written.name, input=histogram(written.input), output=histogram(written.output))
    else:
        if path.is_dir():
            raise InputError("workload", name, "it is a directory: give a file, such as a CSV in it")
        way_out = "save the sheet as CSV" if path.suffix in (".xlsx", ".xls", ".ods") else "give a trace or a workload"
        raise InputError("workload", name, f"{way_out}; its name must end in one of {', '.join(_YAML + SUFFIXES)}")
    if spec is not None:
        _check_context(workload, spec)
    return workload


def load_classes(name: str) -> tuple[RequestClass, ...]:
    """Return the classes in a workload file, or nothing if the file has no classes or is a trace."""
    path = find_config("workloads", name)
    if path.suffix not in _YAML or _law(path) is not None:
        return ()
    return parse(load_yaml(path, "workload"), WorkloadSpec, "workload").classes


def workload_of(given: str | Workload, spec: ModelSpec | None = None, growth: Growth = NO_GROWTH) -> Workload:
    """Return the workload that a name, a file or an object gives, with its outputs grown. With `spec`, check that it
    fits into the model's context. Of a log, it has what `log_for` has, and the longest lengths are shortened as in
    `within_context`.
    """
    path = find_config("workloads", given) if isinstance(given, str) else None
    if spec is not None and path is not None and not spec.is_encoder_decoder and has_requests(path):
        return fitting(growth.workload(workload_of_log(trace_name(path), log_for(path, spec, growth))), spec)
    workload = growth.workload(load_workload(given) if isinstance(given, str) else given)
    if spec is not None:
        _check_context(workload, spec)
    return workload


def load_of(given: object, growth: Growth, spec: ModelSpec) -> LogLoad | None:
    """Return the load of a log, by name or file, or None if the workload is not a log of single requests."""
    path = find_config("workloads", given) if isinstance(given, str) else None
    if path is None or not has_requests(path):
        if growth.rate != 1:
            raise InputError("rate", f"x{growth.rate:g}", "it needs a log with times as the workload")
        return None
    return LogLoad.of(trace_name(path), log_for(path, spec, growth), growth)


def log_for(path: Path, spec: ModelSpec, growth: Growth = NO_GROWTH, field: str = "workload") -> TraceLengths:
    """Return the requests of a log that a model's context can hold once their outputs have grown, as `fits` tells.
    Those of an encoder-decoder, which holds inputs and outputs apart, are all returned.
    """
    return read_lengths(path, field, None if spec.is_encoder_decoder else spec.max_context, growth.outputs)


def in_sessions(name: str) -> Workload:
    trace = load_sessions(name)
    if trace is None:
        says = "it has no sessions: give a law of sessions (YAML), or a log whose rows name their session or blocks"
        raise InputError("workload", name, says)
    return workload_of_law(trace_name(find_config("workloads", name)), law_of(trace))


def _law(path: Path) -> Workload | None:
    if path.suffix not in _YAML:
        return None
    document = load_yaml(path, "workload")
    if not isinstance(document, dict) or "sessions" not in document:
        return None
    spec = parse(document, SessionSpec, "workload")
    return workload_of_law(spec.name, spec.sessions)


def load_trace(name: str, spec: ModelSpec | None = None) -> TraceLengths | None:
    path = find_config("workloads", name)
    if not has_requests(path):
        return None
    return read_lengths(path) if spec is None else log_for(path, spec)


def load_sessions(name: str) -> TraceLengths | None:
    trace = load_trace(name)
    if trace is None or trace.sessions is not None:
        return trace
    return None if trace.prefixes is None else continued(trace)


def _check_context(workload: Workload, spec: ModelSpec) -> None:
    """Check that input and output together fit into the model's context. In encoder-decoders, each must fit by
    itself.
    """
    longest_input, longest_output = workload.input.lengths[-1], workload.output.lengths[-1]
    longest = max(longest_input, longest_output) if spec.is_encoder_decoder else longest_input + longest_output
    if longest > spec.max_context:
        raise InputError(
            "workload",
            workload.name,
            f"its inputs reach {longest_input} tokens and its outputs {longest_output}, but the context of {spec.name} "
            f"holds {spec.max_context}; give shorter requests (a CSV with the header input,output), or another model",
        )
