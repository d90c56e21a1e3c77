"""From names on a command line to plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from xgpt.errors import InputError
from xgpt.io import cache_dir, load_json, write_atomic
from xgpt.schema import AdmissionOrder, ClusterSpec, Constraint, DType, KvPromise, ModelSpec, Plan, Profile, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from xscheduler.schedule import Scheduler

Progress = Callable[[int, int, str], None]
"""(done, total, what is being measured)"""

PolicyChoice = Literal["auto", "exegpt", "rra", "waa", "chunked", "orca", "static"]


CPU_DTYPE: DType = "float32"
"""What models run in on a CPU: half precision is emulated there."""

PROFILE_GENERATION = 4
"""To be raised whenever steps are executed, or measured, in another way: older cached profiles are not read then."""


@dataclass(frozen=True)
class Subject:
    """What is planned for, resolved."""

    model: ModelSpec
    checkpoint: Path | None
    cluster: ClusterSpec
    workload: Workload
    profile: Profile


def resolve(
    model: str,
    cluster: str,
    workload: str,
    profile_path: str | None = None,
    progress: Progress | None = None,
    price: float | None = None,
) -> Subject:
    """Look the names up and get a profile: the given file, the cached one, a measurement, or the datasheet's.

    Args:
        price: of one device for an hour; None: what the cluster says.

    Raises:
        InputError: a name that is not there, or a file that is broken.
        MachineError: the machine cannot be measured.
    """
    from pathlib import Path

    from xgpt.resolve import load_cluster, load_model, load_workload

    spec, checkpoint = load_model(model)
    devices = load_cluster(cluster)
    if price is not None:
        devices = devices.model_copy(update={"price_per_device_hour": price})
    lengths = load_workload(workload, spec)
    if profile_path is not None:
        profile = load_json(Path(profile_path), Profile, "profile")
    else:
        profile = obtain_profile(spec, checkpoint, devices, progress)
    return Subject(spec, checkpoint, devices, lengths, profile)


def subject_of(plan: Plan, profile: Profile) -> Subject:
    """What a plan was made for."""
    from pathlib import Path

    checkpoint = None if plan.checkpoint is None else Path(plan.checkpoint)
    return Subject(plan.model, checkpoint, plan.cluster, plan.workload, profile)


def obtain_profile(
    spec: ModelSpec,
    checkpoint: Path | None,
    cluster: ClusterSpec,
    progress: Progress | None = None,
    *,
    dtype: DType | None = None,
    refresh: bool = False,
) -> Profile:
    """The profile of a model on a cluster: measured here (once, then cached), or computed from the datasheet.

    Args:
        dtype: None: the model's own; on a CPU, the one that it runs in.

    Raises:
        InputError: a CPU has no such dtype, or the datasheet no rate for it.
    """
    if dtype is not None:
        spec = spec.model_copy(update={"default_dtype": dtype})
    if not cluster.is_local:
        from xprofiler import analytic

        return analytic.profile(spec, cluster, spec.default_dtype)
    if cluster.device.type == "cpu":
        if dtype not in (None, CPU_DTYPE):
            raise InputError("dtype", dtype, f"on a CPU models run in {CPU_DTYPE}")
        dtype = CPU_DTYPE
    else:
        dtype = spec.default_dtype
    path = cache_dir() / "profiles" / f"{_cache_key(spec, cluster)}.json"
    if path.is_file() and not refresh:
        return load_json(path, Profile, "profile")
    from xprofiler import measure

    profile = measure.profile(spec, cluster, dtype, checkpoint=checkpoint, progress=progress)
    write_atomic(path, profile.model_dump_json() + "\n")
    return profile


def import_profile(spec: ModelSpec, cluster: ClusterSpec, dtype: DType, where: str, framework: str) -> Profile:
    """A profile from others' tables: of the installed wheel (`aiconfigurator`), or in a folder.

    Raises:
        InputError: they are not there, or hold nothing for this model, device, dtype or framework.
    """
    from pathlib import Path

    from xprofiler import imported

    folder = None if where == "aiconfigurator" else Path(where)
    if folder is not None and not folder.is_dir():
        raise InputError("import-from", where, "give aiconfigurator, or a folder of tables")
    return imported.profile(spec, cluster, dtype, folder, framework)


def profile_vllm(
    spec: ModelSpec,
    checkpoint: Path | None,
    cluster: ClusterSpec,
    dtype: DType | None,
    progress: Progress | None = None,
) -> Profile:
    """vLLM's step times on this machine. They are not cached: a plan for vLLM names its profile.

    Raises:
        InputError: vLLM cannot run that model, or the cluster is not this machine.
        MachineError: there is no vLLM here, or it does not run.
    """
    from xprofiler import vllm

    if not cluster.is_local:
        raise InputError("cluster", cluster.name, "vLLM is measured where it runs; take local")
    if dtype is None:
        dtype = spec.default_dtype if cluster.device.type == "gpu" else CPU_DTYPE
    return vllm.profile(spec, cluster, dtype, checkpoint=checkpoint, progress=progress)


def _cache_key(spec: ModelSpec, cluster: ClusterSpec) -> str:
    """Hash of everything that step times depend on: shape, dtype, device, versions, and how they are measured."""
    import hashlib
    from importlib.metadata import version

    shape = spec.model_copy(update={"name": ""}).model_dump_json()
    versions = [f"{name}={version(name)}" for name in ("xgpt", "torch", "numba", "numpy")]
    key = "\n".join([shape, cluster.device.model_dump_json(), *versions, f"generation={PROFILE_GENERATION}"])
    return f"{spec.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def scheduler(
    subject: Subject,
    constraint: Constraint,
    search: str,
    kv: KvPromise = "reserve",
    max_devices: int | None = None,
    *,
    uniform: bool = False,
) -> Scheduler:
    """The scheduler of a subject, its headroom that of the profile.

    Args:
        max_devices: take no more of the cluster's.
        uniform: only replicas of equal stages.
    """
    from typing import cast

    from xscheduler.schedule import Problem, Scheduler
    from xscheduler.search import Method

    constraint = constraint.model_copy(update={"headroom": subject.profile.headroom})
    problem = Problem(
        model=subject.model,
        checkpoint=None if subject.checkpoint is None else str(subject.checkpoint),
        cluster=subject.cluster,
        workload=subject.workload,
        profile=subject.profile,
        constraint=constraint,
        kv=kv,
        max_devices=max_devices,
        uniform=uniform,
    )
    return Scheduler(problem, cast(Method, search))


def plan_each(
    subject: Subject,
    constraint: Constraint,
    policy: PolicyChoice = "auto",
    search: str = "branch-and-bound",
    kv: KvPromise = "reserve",
    order: AdmissionOrder = "fcfs",
    max_devices: int | None = None,
) -> dict[str, Plan]:
    """Each policy's best plan, the best of all first.

    Args:
        order: who of those who wait enters next.

    Raises:
        InfeasibleError: no policy has one.
    """
    from xgpt.app.verifying import best_of_each
    from xscheduler.space import POLICIES

    groups = {"auto": tuple(POLICIES), "exegpt": ("rra", "waa")}
    plans = best_of_each(subject, constraint, groups.get(policy, (policy,)), search, kv, max_devices)
    ordered = sorted(plans.items(), key=lambda item: -item[1].estimate.throughput_rps)
    return {kind: _admitting(plan, order) for kind, plan in ordered}


def plan_uniform(
    subject: Subject, constraint: Constraint, search: str, kv: KvPromise = "reserve", max_devices: int | None = None
) -> Plan | None:
    """The best that other planners offer: replicas of equal stages, without rra and waa; None where nothing fits."""
    from xgpt.app.verifying import best_of_each
    from xgpt.errors import InfeasibleError

    kinds = ("chunked", "orca", "static")
    try:
        plans = best_of_each(subject, constraint, kinds, search, kv, max_devices, uniform=True)
    except InfeasibleError:
        return None
    return max(plans.values(), key=lambda plan: plan.estimate.throughput_rps)


def _admitting(plan: Plan, order: AdmissionOrder) -> Plan:
    """The plan with this order of admission. DAS looks at as many prompt tokens together as run at once."""
    from xgpt.workload import mean

    row_tokens = max(1, round(plan.estimate.decode_batch * mean(plan.workload.input))) if order == "das" else None
    return plan.model_copy(
        update={"admission": plan.admission.model_copy(update={"order": order, "row_tokens": row_tokens})}
    )
