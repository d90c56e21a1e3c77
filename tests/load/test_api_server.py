"""Exports against a real API server, if one is given: XGPT_KUBECONFIG=admin.conf.

It needs kubectl and a kube-apiserver; no node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import xgpt
from tests.unit.xgpt.exporting.test_exports import CRDS, PLANS
from tests.unit.xgpt.exporting.test_fleet import deployable
from xgpt.exporting.export import export

CONFIG = os.environ.get("XGPT_KUBECONFIG")
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
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    kubectl("create", "-f", "-", given=json.dumps(document))
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def define(kind: str) -> None:
    """Make the server know a kind whose schema stands among the tests."""
    path = Path(xgpt.__file__).parents[1] / "tests" / "unit" / "xgpt" / "exporting" / "crds" / CRDS[kind]
    group = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io", "DynamoGraphDeployment": "nvidia.com"}[kind]
    version = {"name": path.stem.rpartition("-")[2], "served": True, "storage": True}
    schema = {"openAPIV3Schema": json.loads(path.read_text())["openAPIV3Schema"]}
    plural = f"{kind.lower()}s"
    definition = {
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
    kubectl("apply", "-f", "-", given=json.dumps(definition))
    kubectl("wait", "--for=condition=Established", f"crd/{plural}.{group}")


@pytest.mark.parametrize("case", PLANS)
def test_the_server_takes_what_is_exported(case: str, namespace: str, tmp_path: Path) -> None:
    for kind in CRDS:
        define(kind)
    plan, target = PLANS[case]
    apply(tmp_path, export(plan, target), namespace)


def test_the_server_takes_a_fleet_and_its_autoscalers(namespace: str, tmp_path: Path) -> None:
    files = xgpt.export(deployable(), "k8s")
    files["kustomization.yaml"] = files["kustomization.yaml"].replace("resources:\n", "resources:\n- hpa.yaml\n")
    apply(tmp_path, files, namespace)
