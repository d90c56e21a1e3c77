"""Exports and the fleet's driver against a real API server, where one is given: XGPT_KUBECONFIG=admin.conf.

It needs kubectl, a kube-apiserver that checks RBAC, and a kube-controller-manager; no node. What a kubelet would say of
pods is said here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

import xgpt
from tests.unit.xgpt.exporting.test_exports import CRDS, PLANS
from tests.unit.xgpt.exporting.test_fleet import deployable
from xgpt.core.errors import MachineError
from xgpt.exporting.export import export
from xgpt.operating.drivers.kubernetes import ApiServer, Kubernetes
from xscheduler.fleet.autoscaling import Autoscaler
from xscheduler.fleet.controller import Controller

CONFIG = os.environ.get("XGPT_KUBECONFIG")
FLEET = "xgpt-llama-3-1-8b"
WAITS_S = 30.0
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CONFIG is None or shutil.which("kubectl") is None, reason="XGPT_KUBECONFIG names no API server"),
]


def kubectl(*words: str, given: str | None = None) -> str:
    command = ["kubectl", "--kubeconfig", str(CONFIG), *words]
    ran = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr.replace("Warning: version difference", ""), ran.stderr
    return ran.stdout


def apply(directory: Path, files: dict[str, str], namespace: str) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    kubectl("apply", "-n", namespace, "--validate=strict", "-k", str(directory))


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace that takes no pods but such as ask for no rights."""
    name = f"xgpt-{uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    of = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    kubectl("create", "-f", "-", given=json.dumps(of))
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def define(kind: str) -> None:
    """Make the server know a kind whose schema stands among the tests."""
    path = Path(xgpt.__file__).parents[1] / "tests" / "unit" / "xgpt" / "exporting" / "crds" / CRDS[kind]
    group = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io", "DynamoGraphDeployment": "nvidia.com"}[kind]
    version = {"name": path.stem.rpartition("-")[2], "served": True, "storage": True}
    schema = {"openAPIV3Schema": json.loads(path.read_text())["openAPIV3Schema"]}
    plural = f"{kind.lower()}s"
    of = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/lws"},
        },
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural},
            "scope": "Namespaced",
            "versions": [{**version, "schema": schema}],
        },
    }
    kubectl("apply", "-f", "-", given=json.dumps(of))
    kubectl("wait", "--for=condition=Established", f"crd/{plural}.{group}")


@pytest.mark.parametrize("case", PLANS)
def test_the_server_takes_what_is_exported(case: str, namespace: str, tmp_path: Path) -> None:
    for kind in CRDS:
        define(kind)
    plan, target = PLANS[case]
    apply(tmp_path, export(plan, target), namespace)


def until(what: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WAITS_S
    while not what():
        assert time.monotonic() < ends_s
        time.sleep(0.2)


def pods(namespace: str, number: int) -> list[str]:
    listed = json.loads(kubectl("get", "pods", "-n", namespace, "-l", f"xgpt-kind={number}", "-o", "json"))
    return [pod["metadata"]["name"] for pod in listed["items"] if not pod["metadata"].get("deletionTimestamp")]


def make_ready(namespace: str, name: str) -> None:
    """Say of a pod what its kubelet would."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"status": {"phase": "Running", "podIP": "127.0.0.2", "conditions": [ready]}}
    kubectl("patch", "pod", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", json.dumps(status))


World = Callable[[], Kubernetes]


@pytest.fixture
def world(namespace: str, tmp_path: Path) -> Iterator[World]:
    """A fleet that is applied, as its controller's account sees it."""
    apply(tmp_path / "deploy", xgpt.export(deployable(), "k8s"), namespace)
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(kubectl("create", "token", f"{FLEET}-controller", "-n", namespace))
    if "certificate-authority" in cluster():
        shutil.copy(Path(str(CONFIG)).parent / cluster()["certificate-authority"], account / "ca.crt")
    with ExitStack() as servers:

        def seen() -> Kubernetes:
            server = servers.enter_context(closing(ApiServer(cluster()["server"], account)))
            return Kubernetes(deployable(), FLEET, server, namespace)

        yield seen


def cluster() -> dict[str, Any]:
    """The server, as the configuration has it."""
    found: dict[str, Any] = yaml.safe_load(Path(str(CONFIG)).read_text())["clusters"][0]["cluster"]
    return found


def test_the_controllers_account_scales_and_chooses_what_leaves(world: World, namespace: str) -> None:
    kubernetes = world()
    until(lambda: len(pods(namespace, 0)) == 1)
    kubernetes.start(0, 2)
    assert [one.state for one in kubernetes.replicas(0.0) if one.kind == 0] == ["starting"] * 3
    until(lambda: len(pods(namespace, 0)) == 3)
    names = pods(namespace, 0)
    for name in names:
        make_ready(namespace, name)
    assert {one.name: one.state for one in kubernetes.replicas(0.0) if one.kind == 0} == dict.fromkeys(names, "ready")
    again = world()  # the first controller has died
    again.replicas(0.0)
    again.drain([names[1]])
    until(lambda: len(pods(namespace, 0)) == 2)
    assert sorted(pods(namespace, 0)) == sorted({*names} - {names[1]})
    assert [one.state for one in again.replicas(0.0) if one.kind == 0 and one.state != "draining"] == ["ready"] * 2


def test_a_controller_that_dies_between_its_two_changes_is_gone_on_from(world: World, namespace: str) -> None:
    """It has marked the pod that is to leave, and not scaled yet: nothing has left, and the next one may begin anew."""
    kubernetes = world()
    kubernetes.start(0, 1)
    until(lambda: len(pods(namespace, 0)) == 2)
    names = pods(namespace, 0)
    for name in names:
        make_ready(namespace, name)
    kubernetes.replicas(0.0)

    def dies(deployment: str, number: int) -> None:
        raise KeyboardInterrupt

    kubernetes._scale = dies  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        kubernetes.drain(names[:1])
    fleet, notes = deployable(), list[str]()
    again = world()
    states = {one.name: one.state for one in again.replicas(0.0) if one.kind == 0}
    assert states == dict.fromkeys(names, "ready")
    keeper = Autoscaler(fleet, again, Controller(fleet), 15.0, 0.0, on_note=notes.append, clock=lambda: 900.0)
    keeper.look()
    again.drain(names[:1])
    until(lambda: pods(namespace, 0) == names[1:])


def test_the_controllers_account_may_do_nothing_else(world: World, namespace: str) -> None:
    server = world()._server
    for method, path in (
        ("GET", f"/api/v1/namespaces/{namespace}/secrets"),
        ("GET", "/api/v1/nodes"),
        ("DELETE", f"/apis/apps/v1/namespaces/{namespace}/deployments/{FLEET}-0"),
        ("PATCH", f"/apis/apps/v1/namespaces/{namespace}/deployments/{FLEET}-0"),
        ("GET", "/api/v1/namespaces/default/pods"),
    ):
        body: dict[str, Any] | None = {"spec": {"paused": True}} if method == "PATCH" else None
        with pytest.raises(MachineError, match="forbidden"):
            server.ask(method, path, body)
