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

from tests.exports import CRDS, DIRECTORY, export
from tests.unit.xgpt.exporting.test_exports import PLANS, REFUSED, deployable
from xgpt.exporting.groups import IN_PODS, Target

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
    group = {
        "LeaderWorkerSet": "leaderworkerset.x-k8s.io",
        "DynamoGraphDeployment": "nvidia.com",
        "ScaledObject": "keda.sh",
    }.get(kind, "monitoring.coreos.com")
    path = DIRECTORY / CRDS[kind]
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


SUBJECTS = {**PLANS, "fleet": deployable}
CASES = [(case, target) for case in SUBJECTS for target in IN_PODS if (case, target) not in REFUSED]


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize(("case", "target"), CASES)
def test_the_server_takes_what_is_exported(
    case: str, target: Target, side: str, namespace: str, tmp_path: Path
) -> None:
    for kind in CRDS:
        define(kind)
    files = export(SUBJECTS[case](), target)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    given = [["-k", str(tmp_path)], ["-k", str(tmp_path / "monitoring")]]
    given += [["-f", str(tmp_path / "keda.yaml")]] if "keda.yaml" in files else []
    for words in given:
        kubectl("apply", "-n", namespace, "--validate=strict", f"--server-side={str(side == 'server').lower()}", *words)
