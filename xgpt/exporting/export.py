"""Write the files that start a plan or a day's fleet elsewhere, and say what must exist before they are started."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from xgpt.checkpoints import hub
from xgpt.core.documents import LOADER
from xgpt.core.errors import InputError
from xgpt.core.io import configs_dir, dump_json, load_yaml
from xgpt.core.schema import Plan
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.version import __version__
from xgpt.deciding.commands import visible
from xgpt.deciding.phrases import percent
from xgpt.exporting.groups import IN_PODS, Target
from xgpt.exporting.replicas import EngineReplicas, images, name_of, pinned, replicas_of
from xrunner.vllm import TESTED_VERSION
from xscheduler.fleet.scaling import SPARED, Scaling

ROUTER = "vllm-router==0.1.17"
"""The front of several replicas on one machine: vLLM's router, which sends a request again if a replica is lost."""
MAX_OBJECT_BYTES = 262_144
"""Largest object that client-side `kubectl apply` takes: it keeps a copy in an annotation."""
WHEEL = f"xgpt_serve-{__version__}-py3-none-any.whl"
CHART = "oci://ghcr.io/llm-d/charts/llm-d-router-standalone --version v0.10.0"
CALLED = {"pvc": "claim", "crd": "kind"}
SECRET = 'kubectl create secret generic {0} --from-literal={1}="$(openssl rand -hex 32)"'
CLAIM = "# create the volume claim {}, which all pods can read, with the files of {}"
LWS = "https://github.com/kubernetes-sigs/lws/releases/download/v0.7.0/manifests.yaml"


@dataclass(frozen=True)
class Need:
    """What must exist before files are started.

    Attributes:
        probe: a command that succeeds if it exists.
        remedy: a command that creates it, or a comment if only the user can.
    """

    what: str
    probe: Sequence[str]
    remedy: str


@dataclass(frozen=True)
class Exported:
    """Files by name, what must exist before, and the commands that start them in their directory."""

    files: dict[str, str]
    needs: tuple[Need, ...]
    starts: tuple[str, ...]
    notes: tuple[str, ...] = ()


def export(subject: Plan | FleetPlan, target: Target, monitoring: str = "monitoring") -> Exported:
    """Return the files of a plan or a day's fleet for a target.

    Args:
        monitoring: namespace of Prometheus, which may read the pods' metrics.

    Raises:
        InputError: a plan needs more memory than its devices have, or the target cannot run it.
    """
    if isinstance(subject, Plan):
        check_memory(subject)
        all_ = [replicas_of(subject, target)]
    else:
        all_ = of_fleet(subject, target)
    values = {"all": all_, "r": all_[0], "monitoring": monitoring, "target": target}
    files = {name: _render(template, values) for name, template in _templates(all_, target).items()}
    if any(r.scheduler == "xgpt" for r in all_) and target not in IN_PODS:
        files["plan.json"] = dump_json(all_[0].plan)
    for name, text in files.items():
        if target in IN_PODS and name.endswith(".yaml"):
            _check_sizes(name, text)
    notes = tuple(_notes(subject)) if isinstance(subject, Plan) else ()
    return Exported(files, tuple(_needs(all_, target)), tuple(_starts(all_, target, files)), notes)


def _notes(plan: Plan) -> Iterator[str]:
    load = None if plan.recommendation is None or not plan.is_as_written else plan.recommendation.best.at_load
    if load is not None and not load.holds:
        kept = "" if load.share_kept is None else f": {percent(load.share_kept)} of its requests keep the bounds"
        yield f"the plan does not hold the load that it was made for{kept}, so alerts fire when this load arrives"


def check_memory(plan: Plan) -> None:
    """Check that by its estimate a plan fits into the memory of its devices.

    Raises:
        InputError: the plan does not fit.
    """
    device = plan.cluster.device
    usable, needed = device.memory_bytes * device.usable_memory, max(plan.estimate.memory_bytes)
    if needed > usable:
        says = (
            f"the plan needs {needed / 2**30:.2f} GiB on a device, but only {usable / 2**30:.2f} GiB of {device.name} "
            "may be used: plan again for this device"
        )
        raise InputError("plan.estimate.memory_bytes", needed, says)


def of_fleet(fleet: FleetPlan, target: Target) -> list[EngineReplicas]:
    """Return the replicas of each kind of a fleet: scaled by rule and schedule where KEDA can, else the constant fleet.

    Raises:
        InputError: the target cannot run a kind, or has only one kind of device.
    """
    scaling, scaled = Scaling(fleet), target in ("k8s", "llm-d")
    counts = scaling.most if scaled else fleet.constant.replicas
    used = [number for number, count in enumerate(counts) if count]
    if target not in IN_PODS and len(used) > 1:
        accepted = f"the fleet has {len(used)} kinds of replicas, and a machine has one: export `to=k8s`"
        raise InputError("to", target, accepted)
    found = []
    for number in used:
        kind = fleet.kinds[number]
        check_memory(kind.plan)
        name = name_of(fleet.kinds[used[0]].plan) + (f"-{number}" if len(used) > 1 else "")
        follows = scaling.has_schedule or number == scaling.marginal  # others stay at their least number
        first = fleet.intervals[0].replicas[number] if follows else scaling.least[number]
        r = replicas_of(kind.plan, target, name, first if scaled else counts[number])
        given: dict[str, Any] = {"rate_per_s": scaling.rates[number], "load_factor": scaling.factor}
        given |= {"takes_rest": number == scaling.marginal, "lead_s": kind.start_s, "drain_s": kind.drain_s}
        if scaled:
            given |= {"least": scaling.least[number], "most": max(2 * counts[number], r.most)}
            given["schedule"] = tuple(scaling.spans(number))
        found.append(replace(r, **given))
    return found


def _templates(all_: Sequence[EngineReplicas], target: Target) -> dict[str, str]:
    named = {"shell": ("serve.sh", "requirements.txt"), "compose": ("compose.yaml",), "llm-d": ("router.values.yaml",)}
    found = {name: name for name in named.get(target, ())}
    if target == "shell":
        found[f"{all_[0].name}@.service"] = "unit.service"
    if target in IN_PODS:
        found |= {"xgpt.yaml": "dynamo.yaml" if target == "dynamo" else "pods.yaml"}
        found |= {"kustomization.yaml": "kustomization.yaml", "monitoring/objects.yaml": "monitoring.yaml"}
        found["monitoring/kustomization.yaml"] = "monitoring-kustomization.yaml"
        if target != "dynamo" and len(all_[0].groups) == 1 and any(r.rate_per_s for r in all_):
            found["keda.yaml"] = "keda.yaml"
    else:
        found |= {"monitoring/prometheus.yml": "prometheus.yml", "monitoring/rules.yaml": "rules.yaml"}
    if target != "shell" and all_[0].scheduler == "xgpt" and all_[0].framework == "vllm":
        found["Dockerfile"] = "Dockerfile"
    if all_[0].framework not in _metrics():
        found = {name: template for name, template in found.items() if "monitoring" not in name and "keda" not in name}
    return found | ({"monitoring/dashboard.json": "dashboard.json"} if all_[0].framework in _metrics() else {})


def _needs(all_: Sequence[EngineReplicas], target: Target) -> list[Need]:
    found: list[Need] = []
    for image in dict.fromkeys(r.image for r in all_) if target != "shell" else ():
        r = next(r for r in all_ if r.image == image)
        context = (
            "." if r.framework == "vllm" else "--build-arg EXTRA=" + ("ray" if r.group.nodes > 1 else "serve") + " XGPT"
        )
        build = f"docker build -t {image} {context}  # Dockerfile's head; then push it to the cluster's registry"
        kind, remedy = ("image", build) if r.scheduler == "xgpt" else ("manifest", f"docker pull {image}")
        found.append(Need(f"image {image}", ["docker", kind, "inspect", image], remedy))
    if target == "shell":
        r = all_[0]
        engine = "vllm" if r.framework == "vllm" and r.scheduler == "own" else r.group.command[0]
        for program in (engine, *["vllm-router"] * (r.count > 1), *["hf"] * (r.fetched is not None)):
            found.append(Need(program, ["sh", "-c", f"command -v {program}"], "pip install -r requirements.txt"))
        return found
    if target == "compose":
        if all_[0].keyed and all_[0].scheduler == "own":
            set_it = 'export API_KEY="$(openssl rand -hex 32)"'
            found.append(Need("API_KEY", ["sh", "-c", 'test -n "$API_KEY"'], set_it))
        if all_[0].scheduler == "xgpt":
            found.append(Need("file key", ["test", "-s", "key"], "openssl rand -hex 32 > key"))
        if gated := _gated(all_[0]):
            set_it = f"export HF_TOKEN=TOKEN  # of an account that may read {gated}"
            found.append(Need("HF_TOKEN", ["sh", "-c", 'test -n "$HF_TOKEN"'], set_it))
        return found
    for r in all_:
        if gated := _gated(r):
            create = f"kubectl create secret generic {r.name}-hub --from-literal=token=TOKEN"
            found.append(_in_cluster("secret", f"{r.name}-hub", f"{create}  # of an account that may read {gated}"))
        if r.keyed:
            found.append(_in_cluster("secret", f"{r.name}-keys", SECRET.format(f"{r.name}-keys", "key")))
        if r.group.nodes > 1 and r.scheduler == "xgpt" and r.framework == "xgpt":
            found.append(_in_cluster("secret", f"{r.name}-cluster", SECRET.format(f"{r.name}-cluster", "token")))
        paths = {"model": None if r.model_id else r.plan.checkpoint, "draft": None if r.draft_id else r.draft}
        for end, path in paths.items():
            if path:
                found.append(_in_cluster("pvc", f"{r.name}-{end}", CLAIM.format(f"{r.name}-{end}", json.dumps(path))))
    if any(group.nodes > 1 for r in all_ for group in r.groups) and target != "dynamo":
        found.append(
            _in_cluster("crd", "leaderworkersets.leaderworkerset.x-k8s.io", f"kubectl apply --server-side -f {LWS}")
        )
    if target == "dynamo":
        found.append(_in_cluster("crd", "dynamographdeployments.nvidia.com", "# install Dynamo's operator"))
    return found


def _gated(r: EngineReplicas) -> str:
    """Return the models that the hub gives only to accounts that have accepted their terms, in words, or ""."""
    return " and ".join(filter(hub.is_gated, r.downloads))


def _in_cluster(kind: str, name: str, remedy: str) -> Need:
    return Need(f"{CALLED.get(kind, kind)} {name}", ["kubectl", "get", kind, name], remedy)


def _starts(all_: Sequence[EngineReplicas], target: Target, files: dict[str, str]) -> list[str]:
    r = all_[0]
    if target == "compose":
        return ["docker compose up"]
    if target == "shell":
        if r.count == 1:
            return ["sh serve.sh"]
        return [*(f"sh serve.sh {i} &" for i in range(len(r.devices_of))), "sh serve.sh front"]
    chart = f"helm install {r.name} {CHART} -f router.values.yaml"
    return [
        "kubectl apply -k .",
        *[chart] * (target == "llm-d"),
        *["kubectl apply -k monitoring  # with the Prometheus operator"] * ("monitoring/objects.yaml" in files),
        *["kubectl apply -f keda.yaml  # with KEDA"] * ("keda.yaml" in files),
    ]


def missing(exported: Exported, directory: str) -> list[str]:
    """Return a line for each need that is not met, as seen from this machine, the line ending with its remedy."""
    lines = []
    for need in exported.needs:
        if shutil.which(need.probe[0]) is None:
            lines.append(f"{need.what}: not checked, since this machine has no {need.probe[0]}; {need.remedy}")
            continue
        ran = subprocess.run(need.probe, cwd=directory, capture_output=True, text=True, check=False, timeout=60)
        if ran.returncode:
            said = ran.stderr.strip().splitlines()
            is_known = not said or "NotFound" in said[-1]
            lines.append(f"{need.what}: {'missing' if is_known else f'not known ({said[-1][:120]})'}; {need.remedy}")
    return lines


def _check_sizes(name: str, text: str) -> None:
    for each in yaml.load_all(text, LOADER):
        size = len(json.dumps(json.dumps(each)))
        if size > MAX_OBJECT_BYTES:
            says = f"{each['kind']} in {name}, and `kubectl apply` takes {MAX_OBJECT_BYTES}: plan with fewer lengths"
            raise InputError("plan.workload", f"{size} bytes", says)


def _render(template: str, values: dict[str, Any]) -> str:
    return _environment().get_template(f"{template}.j2").render(values).lstrip("\n").rstrip() + "\n"


@cache
def _metrics() -> dict[str, dict[str, str]]:
    """Return the names of the engines' own metrics by what they state."""
    rows = [row for kind in load_yaml(configs_dir() / "metrics.yaml", "metrics").values() for row in kind.items()]
    return {
        engine: {
            what: name
            for what, names in rows
            for name in reversed(names)
            if name.startswith((f"{engine}:", f"{engine}_"))
        }
        for engine in ("vllm", "sglang", "xgpt")
    }


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(configs_dir() / "templates")
    made = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    made.filters |= {"q": _quoted, "c": _in_compose, "sh": _in_shell, "j": json.dumps, "g": "{:.6g}".format}
    made.filters |= {"url": "http://{}".format, "visible": visible, "read_from": _read_from}
    made.globals |= {"version": __version__, "tested": TESTED_VERSION, "wheel": WHEEL, "router": ROUTER, "chart": CHART}
    made.globals |= {"torch": pinned("torch"), "spared": SPARED, "images": images(), "metrics": _metrics()}
    return made


def _read_from(name: str, metrics: dict[str, str]) -> str:
    """Return what an engine's metric for a bound states: of tpot, some have only the time between two tokens."""
    return "itl" if "inter_token" in metrics[name] else name


def _quoted(value: object) -> str:
    """Return a text as a YAML scalar of one line that nothing in it can end."""
    return yaml.safe_dump(str(value), default_style='"', width=1 << 30).strip()


def _in_compose(value: object) -> str:
    """Return a text for Compose, in which $$ is a literal $. Only `API_KEY` is a variable."""
    return _quoted(str(value).replace("$(API_KEY)", "\0").replace("$", "$$")).replace("\\0", "${API_KEY:?}")


def _in_shell(value: object) -> str:
    """Return a word for a shell. Only `RANK` and `HEAD` are variables."""
    text = str(value)
    for name in ("RANK", "HEAD"):
        if text.startswith(f"${name}") and text.removeprefix(f"${name}") in ("", ":20000"):
            return f'"${{{name}:?}}{text.removeprefix(f"${name}")}"'
    return shlex.quote(text)
