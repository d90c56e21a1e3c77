"""Write a plan for vLLM's own scheduler as a Docker Compose file: one service for each replica, on one machine."""

from __future__ import annotations

import shlex

from xgpt.checkpoints import hub
from xgpt.core.errors import InputError
from xgpt.core.schema import Plan
from xgpt.core.version import __version__
from xgpt.exporting.packages import PORT
from xgpt.exporting.pods import MODEL_PATH, Object, shared_memory_gib, to_yaml
from xgpt.reporting.engine_command import engine_command
from xrunner.vllm import TESTED_VERSION
from xrunner.vllm.command import runs_by_itself


def compose_files(plan: Plan) -> dict[str, str]:
    """Return compose.yaml, with a service for each replica.

    Raises:
        InputError: the plan is not for vLLM's own scheduler, or needs several machines.
    """
    command = engine_command(plan)
    if command is None or not runs_by_itself(plan):
        says = (
            "compose starts vLLM with its own scheduler, which runs only plans of chunked for vLLM: plan with "
            "`engine=vllm`, or export `to=vllm`"
        )
        raise InputError("to", "compose", says)
    if plan.num_devices > plan.cluster.devices_per_node:
        says = f"the plan needs {plan.num_devices} devices, but a machine has only {plan.cluster.devices_per_node}: "
        raise InputError("to", "compose", f"{says}export `to=k8s`")
    words = [word.replace("$", "$$") for word in shlex.split(command)]  # Compose replaces variables
    weights: Object = {"type": "volume", "source": "hub", "target": "/root/.cache/huggingface"}
    if plan.checkpoint is not None and hub.id_of(plan.checkpoint) is None:
        words[2] = MODEL_PATH
        source = plan.checkpoint.replace("$", "$$")
        weights = {"type": "bind", "source": source, "target": MODEL_PATH, "read_only": True}
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
            "volumes": [weights],
            "shm_size": f"{shared_memory_gib(devices)}gb",
            "deploy": {"resources": {"reservations": {"devices": [reserved]}}},
        }
    named: Object = {"volumes": {"hub": {}}} if weights["type"] == "volume" else {}
    comment = (
        f"# A plan by xgpt {__version__} for vLLM {TESTED_VERSION} with vLLM's own scheduler. Start:\n"
        "#   VLLM_API_KEY=... docker compose up (HF_TOKEN=... for weights that need a token)"
    )
    return {"compose.yaml": to_yaml([{"services": services, **named}], comment)}
