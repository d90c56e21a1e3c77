"""A LeaderWorkerSet's commands, started as its pods start them: two Ray nodes on this machine, and a server on one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.attack.target import save_checkpoint
from tests.exports import export
from tests.fakes import eventually
from tests.planned import cpus, problem_of, scored
from xgpt.core.io import dump_json
from xgpt.core.schema import Plan
from xgpt.exporting.groups import PORT, RAY_PORT
from xgpt.resolve import load_cluster

LANES = {
    "tp": ("rra", [[2]], {"encode_batch": 4, "decode_iterations": 2}),
    "pp": ("orca", [[1, 1]], {"max_batch": 8}),
    "waa": ("waa", [[1], [1]], {"encode_batch": 4, "max_decode_batch": 16}),
}
RAY = f"""#!/bin/sh
exec {sys.executable} -m ray.scripts.scripts "$@" --num-cpus=1
"""


def container_of(plan: Plan, role: str) -> dict[str, Any]:
    """The container of a pod of the plan's group, its devices being GPUs on a node each."""
    cluster = load_cluster("h200x8").model_copy(update={"num_nodes": 2, "devices_per_node": 1})
    text = export(plan.model_copy(update={"cluster": cluster}), "k8s")["xgpt.yaml"]
    (group,) = (item for item in yaml.safe_load_all(text) if item["kind"] == "LeaderWorkerSet")
    found: dict[str, Any] = group["spec"]["leaderWorkerTemplate"][f"{role}Template"]["spec"]["containers"][0]
    return found


def end_ray(port: int) -> None:
    """Kill all processes of the Ray cluster whose head listens at a port, as the end of its pods would."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith((f":{port}", f"_port={port}")) for word in words[1:]):
                os.kill(int(process.name), signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", LANES)
def test_the_pods_of_a_group_serve_together(kind: str, tmp_path: Path) -> None:
    policy, degrees, values = LANES[kind]
    directory = save_checkpoint(tmp_path / "model")
    plan = scored(problem_of(directory, 2), policy, degrees, 1, **values)
    plan = plan.model_copy(update={"cluster": cpus(2).model_copy(update={"num_nodes": 2, "devices_per_node": 1})})
    plan = plan.model_copy(update={"profile": plan.profile.model_copy(update={"engine": "xgpt"})})
    (tmp_path / "plan").mkdir()
    (tmp_path / "keys").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(dump_json(plan))
    (tmp_path / "keys" / "key").write_text("0123456789abcdef\n")
    (tmp_path / "ray").write_text(RAY)
    (tmp_path / "ray").chmod(0o755)
    meet, port = free_port(), free_port()
    environment = {"NAMESPACE": "ns", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "localhost"}
    with ExitStack() as at_end:
        log = at_end.enter_context((tmp_path / "log").open("w"))
        at_end.callback(end_ray, meet)
        processes = []
        for role in ("worker", "leader"):  # pods start in any order
            path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
            variables = environment | {"PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
            words = []
            for word in container_of(plan, role)["command"]:
                word = re.sub(r"\$\((\w+)\)", lambda found, variables=variables: variables[found[1]], word)  # type: ignore[misc]
                word = word.replace("/etc/xgpt", str(tmp_path)).replace(str(RAY_PORT), str(meet))
                words.append(word.replace("python3", sys.executable).replace(f"--port {PORT}", f"--port {port}"))
            process = subprocess.Popen(words, env=os.environ | variables, stdout=log, stderr=log)
            at_end.callback(process.wait, 60)
            at_end.callback(process.kill)
            processes.append(process)
        said = (tmp_path / "log").read_text
        assert eventually(lambda: "listening on" in said(), 180), said()
        url, key = f"http://127.0.0.1:{port}", {"Authorization": "Bearer 0123456789abcdef"}
        body = {"model": plan.model.name, "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, trust_env=False, timeout=60)
        assert len(answer.raise_for_status().json()["choices"][0]["token_ids"]) == 6
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
        processes[-1].terminate()
        assert processes[-1].wait(60) == 0, said()
