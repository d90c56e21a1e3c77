"""A LeaderWorkerSet's commands, started as its pods start them: a process for the leader and one for the worker."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.attack.target import save_checkpoint
from tests.fakes import eventually
from tests.planned import cpus, problem_of, scored
from xgpt.core.io import dump_json
from xgpt.core.schema import Plan
from xgpt.exporting.export import export
from xgpt.exporting.kubernetes import RENDEZVOUS_PORT
from xgpt.exporting.packages import PORT
from xgpt.resolve import load_cluster

LANES = {
    "tp": ("rra", [[2]], {"encode_batch": 4, "decode_iterations": 2}),
    "waa": ("waa", [[1], [1]], {"encode_batch": 4, "max_decode_batch": 16}),
}


def container_of(plan: Plan, role: str) -> dict[str, Any]:
    """The container of a pod of the plan's group, its devices being GPUs on a node each."""
    cluster = load_cluster("h200x8").model_copy(update={"num_nodes": 2, "devices_per_node": 1})
    text = export(plan.model_copy(update={"cluster": cluster}), "k8s")["xgpt.yaml"]
    (group,) = (item for item in yaml.safe_load_all(text) if item["kind"] == "LeaderWorkerSet")
    found: dict[str, Any] = group["spec"]["leaderWorkerTemplate"][f"{role}Template"]["spec"]["containers"][0]
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", LANES)
def test_the_pods_of_a_group_serve_together(kind: str, tmp_path: Path) -> None:
    policy, degrees, values = LANES[kind]
    directory = save_checkpoint(tmp_path / "model")
    plan = scored(problem_of(directory, 2), policy, degrees, 1, **values)
    plan = plan.model_copy(update={"cluster": cpus(2)})
    (tmp_path / "plan").mkdir()
    (tmp_path / "keys").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(dump_json(plan))
    (tmp_path / "keys" / "keys").write_text("0123456789abcdef\n")
    meet, port = free_port(), free_port()
    environment = {"NAMESPACE": "ns", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "localhost"}
    with ExitStack() as at_end:
        log = at_end.enter_context((tmp_path / "log").open("w"))
        processes = []
        for rank, role in ((1, "worker"), (0, "leader")):  # pods start in any order
            variables = environment | {"LWS_WORKER_INDEX": str(rank), "XGPT_CLUSTER_SECRET": "s" * 32}
            words = []
            for word in container_of(plan, role)["command"]:
                word = re.sub(r"\$\((\w+)\)", lambda found, variables=variables: variables[found[1]], word)  # type: ignore[misc]
                word = word.replace("/etc/xgpt", str(tmp_path)).replace(str(RENDEZVOUS_PORT), str(meet))
                words.append(str(port) if word == str(PORT) else word)
            words[0] = sys.executable
            process = subprocess.Popen(words, env=os.environ | variables, stderr=log)
            at_end.callback(process.wait, 60)
            at_end.callback(process.kill)
            processes.append(process)
        said = (tmp_path / "log").read_text
        assert eventually(lambda: "listening on" in said(), 90), said()
        url, key = f"http://127.0.0.1:{port}", {"Authorization": "Bearer 0123456789abcdef"}
        body = {"model": plan.model.name, "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, trust_env=False, timeout=60)
        assert len(answer.raise_for_status().json()["choices"][0]["token_ids"]) == 6
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
        processes[-1].terminate()  # the worker follows; a signal while Python ends it would be its code
        assert [process.wait(60) for process in processes] == [0, 0], said()
