"""Find or make profiles. Each is stored under the hash of its content, which plans contain."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from xgpt.core.errors import InfeasibleError, InputError, MachineError, not_installed
from xgpt.core.io import cache_dir, dump_json, file_sha256, load_json, sha256, write_atomic
from xgpt.core.progress import Progress
from xgpt.core.schema import ClusterSpec, DType, EngineKind, EngineSpec, ModelSpec, Plan, Precision, Profile
from xgpt.resolve import load_cluster, load_engine, load_model
from xprofiler import analytic, imported, libraries, xgpt_version
from xprofiler.compiling import Ahead

CPU_DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "int8")
"""Data types in which models run on a CPU, the default first. They do not include float16, which would be emulated."""


RESTLESS_KEPT_S = 600.0
"""Seconds for which a profile measured on a busy machine is reused. After this time, the profile is measured again."""


AsServed = Callable[[Profile, ModelSpec, Path | None, ClusterSpec, Progress | None], Profile]


def dtype_of(spec: ModelSpec, cluster: ClusterSpec, dtype: DType | None = None, engine: str | None = None) -> DType:
    """Return the data type in which a model runs on a cluster's devices: `dtype`, or else the engine's default."""
    on_cpu = cluster.device.type == "cpu"
    if dtype is None:
        dtype = CPU_DTYPES[0] if on_cpu and engine != "vllm" else spec.dtype_in(engine)
    if on_cpu and dtype not in CPU_DTYPES and engine != "vllm":
        raise InputError("dtype", dtype, f"on a CPU models run only in {', '.join(CPU_DTYPES)}")
    if dtype == "int8" and (not on_cpu or engine == "vllm"):
        raise InputError("dtype", dtype, "this type runs only in xgpt's own engine on CPUs: use another type")
    if dtype not in spec.run_dtypes and (dtype != "float8" or cluster.is_local):
        accepted = f"{spec.name} ({spec.family}) runs in {', '.join(spec.run_dtypes)}: give one as `dtype`"
        raise InputError("dtype", dtype, accepted)
    return dtype


def kv_dtype_of(cluster: ClusterSpec, dtype: DType, kv_dtype: DType | None) -> DType | None:
    """Check the data type of K/V. Return None if it is the one that `dtype` implies on these devices."""
    kind = cluster.device.type
    if kv_dtype is None or kv_dtype == Precision.of(dtype, kind).kv:
        return None
    if kind == "gpu" and cluster.is_local:
        says = "on this machine's GPUs, K/V have the type of `dtype`: leave `kv_dtype` out"
        raise InputError("kv_dtype", kv_dtype, says)
    known = ("float32", "bfloat16", "int8") if kind == "cpu" else ("float32", "float16", "bfloat16", "float8")
    if kv_dtype not in known:
        raise InputError("kv_dtype", kv_dtype, f"on a {kind.upper()}, K/V can only be {', '.join(known)}")
    return kv_dtype


def new_profile(
    model: str | ModelSpec,
    cluster: str | ClusterSpec,
    *,
    config: str | None = None,
    dtype: DType | None = None,
    kv_dtype: DType | None = None,
    engine: EngineKind = "xgpt",
    import_from: str | None = None,
    framework: str | None = None,
    progress: Progress | None = None,
    as_served: AsServed | None = None,
) -> Profile:
    """Make a profile: measure this machine, compute it from a datasheet, or import it.

    Raises:
        InputError: there is no such model, cluster or table, or the arguments contradict each other.
        MachineError: this machine cannot be measured.
    """
    spec, checkpoint = (model, None) if isinstance(model, ModelSpec) else load_model(model, config)
    devices = cluster if isinstance(cluster, ClusterSpec) else load_cluster(cluster)
    if framework is not None and import_from is None:
        raise InputError("framework", framework, "it needs `import_from`")
    if kv_dtype is not None and engine == "vllm":
        raise InputError("kv_dtype", kv_dtype, "vLLM is measured with K/V in the type of `dtype`: leave `kv_dtype` out")
    if engine == "vllm":
        if import_from is not None:
            says = "it cannot be combined with `engine=vllm`, whose steps are measured: leave one of the two out"
            raise InputError("import_from", import_from, says)
        return profile_vllm(spec, checkpoint, devices, dtype, progress, as_served)
    if import_from is not None:
        return import_profile(spec, devices, dtype or spec.default_dtype, import_from, framework or "vllm", kv_dtype)
    if devices.is_local:
        return measured_profile(
            spec, checkpoint, devices, progress, dtype=dtype, kv_dtype=kv_dtype, as_served=as_served
        )
    return obtain_profile(spec, checkpoint, devices, dtype=dtype, kv_dtype=kv_dtype)


def obtain_profile(
    spec: ModelSpec,
    checkpoint: Path | None,
    cluster: ClusterSpec,
    progress: Progress | None = None,
    *,
    dtype: DType | None = None,
    engine: EngineSpec | None = None,
    kv_dtype: DType | None = None,
    as_served: AsServed | None = None,
    shared: int = 0,
) -> Profile:
    """Return the profile of a model on a cluster. This machine is measured once, and the profile is cached. For other
    clusters, the profile is computed from the datasheet.

    A profile from a busy machine is cached for only ten minutes.

    Args:
        dtype: data type. None means the engine's default for the model or, on a CPU, the first of `CPU_DTYPES`.
        kv_dtype: type of K/V. None means the checkpoint's float8 (on GPUs of other machines), or else the type that
            `dtype` implies.
        shared: see `analytic.profile`.
    """
    dtype = dtype_of(spec, cluster, dtype, None if engine is None else engine.framework)
    if kv_dtype is None and not cluster.is_local and spec.quantization is not None and spec.quantization.kv_float8:
        kv_dtype = "float8" if cluster.device.type == "gpu" else None
    kv_dtype = kv_dtype_of(cluster, dtype, kv_dtype)
    if not cluster.is_local:
        return analytic.profile(spec, cluster, dtype, engine, kv_dtype, shared)
    latest = _latest(spec, cluster, dtype, kv_dtype)
    if latest.is_file() and (found := _kept(latest.read_text("utf-8", errors="replace").strip())) is not None:
        age_s = time.time() - latest.stat().st_mtime
        if not found.is_restless or 0 <= age_s < RESTLESS_KEPT_S:
            return found
    try:
        return measured_profile(
            spec, checkpoint, cluster, progress, dtype=dtype, kv_dtype=kv_dtype, as_served=as_served
        )
    except ModuleNotFoundError as error:
        if (missing := not_installed(error)) is None:
            raise
        others = "or plan for another `cluster`, such as `cluster=h100x8`"
        raise MachineError(f"to plan for this machine, xgpt must measure it, but {missing}; {others}") from None


def measured_profile(
    spec: ModelSpec,
    checkpoint: Path | None,
    cluster: ClusterSpec,
    progress: Progress | None = None,
    *,
    dtype: DType | None = None,
    kv_dtype: DType | None = None,
    as_served: AsServed | None = None,
) -> Profile:
    """Measure step times on this machine. The profile is stored, and `obtain_profile` returns it from then on. For
    `as_served`, see `obtain_profile`.

    Raises:
        InfeasibleError: the weights do not fit in this machine's memory.
        InputError: the model does not run here in `dtype`, or not with K/V in `kv_dtype`.
        MachineError: this machine cannot be measured.
    """
    dtype = dtype_of(spec, cluster, dtype)
    kv_dtype = kv_dtype_of(cluster, dtype, kv_dtype)
    needed, offered = spec.weight_bytes(dtype), cluster.device.memory_bytes * cluster.num_devices
    if needed > offered:
        raise InfeasibleError(
            f"memory: the weights of {spec.name} in {dtype} are {needed / 2**30:.1f} GiB, but this machine "
            f"(`cluster={cluster.name}`) has {offered / 2**30:.1f}; give the `cluster` to plan for, such as "
            "`cluster=h100x8`",
            binding="memory",
        )
    with Ahead(spec, dtype, kv_dtype, is_cpu=cluster.device.type == "cpu") as compiling:
        from xprofiler import measure  # importing torch takes long, so the processes start first

        profile = measure.profile(
            spec, cluster, dtype, kv_dtype=kv_dtype, checkpoint=checkpoint, progress=progress, wait=compiling.wait
        )
    if as_served is not None:
        profile = as_served(profile, spec, checkpoint, cluster, progress)
    keep(profile)
    with suppress(MachineError):  # the cache cannot be written: the next plan measures again
        write_atomic(_latest(spec, cluster, dtype, kv_dtype), sha256(profile) + "\n")
    return profile


def _latest(spec: ModelSpec, cluster: ClusterSpec, dtype: DType, kv_dtype: DType | None) -> Path:
    return cache_dir() / "profiles" / f"{_cache_key(spec, cluster, dtype, kv_dtype)}.sha256"


def given_profile(path: str, spec: ModelSpec, cluster: ClusterSpec, dtype: DType | None = None) -> Profile:
    """Read a profile from a user's file, and check that plans for these arguments can use it."""
    profile = load_json(Path(path), Profile, "profile")
    check_belongs(profile, spec, cluster, dtype_of(spec, cluster, dtype, profile.engine))
    return profile


def check_belongs(profile: Profile, spec: ModelSpec, cluster: ClusterSpec, dtype: DType) -> None:
    """Check that a profile is for this model, kind of device and dtype, for enough devices and nodes, and for this
    version of xgpt's engine.

    Raises:
        InputError: one of these differs.
    """
    engine = " --engine vllm" if profile.engine == "vllm" else ""
    command = f"xgpt profile --model {spec.name} --cluster {cluster.name}{engine} -o FILE"
    make = f"make one with `{command}`, or leave `profile` out"
    if (other := spec.differs_from(profile.model)) is not None:
        raise InputError("profile.model", profile.model.name, f"the plan is for {spec.name}, with {other}: {make}")
    if profile.device != cluster.device.name:
        accepted = f"the plan is for {cluster.name}, with {cluster.device.name}: {make}"
        raise InputError("profile.device", profile.device, accepted)
    if profile.dtype != dtype:
        accepted = f"the plan is for {spec.name} in {dtype}: plan with `dtype={profile.dtype}`, or {make}"
        raise InputError("profile.dtype", profile.dtype, accepted)
    if profile.devices_per_node < cluster.devices_per_node:
        accepted = f"{cluster.name} has {cluster.devices_per_node} devices per node: {make}"
        raise InputError("profile.devices_per_node", profile.devices_per_node, accepted)
    if cluster.num_nodes > 1 and cluster.inter_node is not None and profile.inter_node_hop is None:
        accepted = f"{cluster.name} has {cluster.num_nodes} nodes, but the profile has no times between nodes: {make}"
        raise InputError("profile.inter_node_hop", None, accepted)
    here = xgpt_version(cluster.device.type)
    # Older profiles have a version of xgpt before this text, such as "0.1.0, ".
    if profile.engine == "xgpt" and (profile.engine_version or "").rpartition(", ")[2] != here:
        raise InputError("profile.engine_version", profile.engine_version, f"this engine has {here}: {make}")


def check_engine(plan: Plan, engine: str) -> None:
    """Check that a plan's step times are those of `engine`, or of none.

    Raises:
        InputError: they are another engine's.
    """
    profiled_engine = plan.profile.engine
    if profiled_engine in (None, engine):
        return
    run = f"serve it with `xgpt serve --engine {profiled_engine}`, or " if profiled_engine in ("xgpt", "vllm") else ""
    make = f"plan with a profile made by `xgpt profile --engine {engine} -o FILE`"
    says = f"the plan was made from step times of {profiled_engine}, not of {engine}: {run}{make}"
    raise InputError("plan.profile.engine", profiled_engine, says)


def keep(profile: Profile) -> None:
    """Store a profile in the cache. A damaged copy is replaced. Do nothing if the cache cannot be written."""
    path = _path_of(content := sha256(profile))
    if file_sha256(path) != content:
        with suppress(MachineError):
            write_atomic(path, dump_json(profile))


def profile_of(plan: Plan, given: str | Profile | None = None) -> Profile:
    """Return the profile from which a plan was made: the given one, a stored one, or one computed again.

    Nothing is measured, since a second measurement would give other times.

    Raises:
        InputError: `given` is not the plan's profile, or the profile is not on this machine.
    """
    wanted = plan.profile.sha256
    if given is not None:
        profile = given if isinstance(given, Profile) else load_json(Path(given), Profile, "profile")
        found = sha256(profile)
        if wanted not in (found, None if isinstance(given, Profile) else file_sha256(Path(given))):
            accepted = f"the plan was made from profile {wanted[:12]}: give that profile, or plan again with this one"
            where = found[:12] if isinstance(given, Profile) else f"{given} ({found[:12]})"
            raise InputError("profile", where, accepted)
        return profile
    if (kept := _kept(wanted)) is not None:
        keep(kept)  # plans made from this profile contain the hash of this stored version
        return kept
    if plan.profile.source == "analytic" and not plan.cluster.is_local:
        with suppress(InputError):  # the profile may be from another version of this program
            for shared in (0, plan.stages[0].ep):
                computed = obtain_profile(
                    plan.model,
                    None,
                    plan.cluster,
                    dtype=plan.dtype,
                    engine=plan.engine,
                    kv_dtype=plan.kv_dtype,
                    shared=shared,
                )
                if sha256(computed) == wanted:
                    return computed
    accepted = f"the plan's profile is not in {_path_of(wanted).parent}: give it as `profile`"
    raise InputError("plan.profile.sha256", wanted[:12], f"{accepted}, or plan again")


def import_profile(
    spec: ModelSpec, cluster: ClusterSpec, dtype: DType, where: str, framework: str, kv_dtype: DType | None = None
) -> Profile:
    """Return a profile from the tables of the installed package aiconfigurator, or of a folder."""
    folder = None if where == "aiconfigurator" else Path(where)
    if folder is not None and not folder.is_dir():
        raise InputError("import_from", where, "give aiconfigurator, or a folder of tables")
    return imported.profile(spec, cluster, dtype, load_engine(framework), folder, kv_dtype)


def profile_vllm(
    spec: ModelSpec,
    checkpoint: Path | None,
    cluster: ClusterSpec,
    dtype: DType | None,
    progress: Progress | None = None,
    as_served: AsServed | None = None,
) -> Profile:
    """Measure vLLM's step times on this machine. They are not cached. For `as_served`, see `obtain_profile`."""
    from xprofiler import vllm

    if not cluster.is_local:
        raise InputError("cluster", cluster.name, "vLLM is measured on this machine: give local")
    dtype = dtype_of(spec, cluster, dtype, "vllm")
    profile = vllm.profile(spec, cluster, dtype, checkpoint=checkpoint, progress=progress)
    return profile if as_served is None else as_served(profile, spec, checkpoint, cluster, progress)


def _path_of(content: str) -> Path:
    return cache_dir() / "profiles" / f"{content}.json"


def _kept(content: str) -> Profile | None:
    try:
        profile = load_json(_path_of(content), Profile, "profile")
    except InputError:
        return None
    return profile if file_sha256(_path_of(content)) == content else None


def _cache_key(spec: ModelSpec, cluster: ClusterSpec, dtype: DType, kv_dtype: DType | None) -> str:
    shape = spec.shape.but(name="").model_dump_json()
    versions = [xgpt_version(cluster.device.type), *(f"{name}={number}" for name, number in libraries().items())]
    device = f"{cluster.devices_per_node} x {cluster.device.model_dump_json()}"
    key = "\n".join([shape, dtype, kv_dtype or "", device, *versions])
    return f"{spec.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
