"""Replicas on Kubernetes: a Deployment for each kind, scaled through the API server.

A fleet's Deployments have the labels `app.kubernetes.io/part-of` and `xgpt-kind`, by which they and their pods
are found; the number of ordered replicas is a Deployment's own `spec.replicas`, so nothing is lost if the
controller restarts. Deletion costs say which pods leave. A pod drains by itself after SIGTERM.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema.fleet import FleetPlan
from xgpt.operating.drivers.base import Counts, read_counts
from xscheduler.fleet.controller import ReplicaState, State

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory of a pod's token, certificate authority and namespace."""
FLEET_LABEL, KIND_LABEL = "app.kubernetes.io/part-of", "xgpt-kind"
COST = "controller.kubernetes.io/pod-deletion-cost"
LEAVES_FIRST = "-1000"
TIMEOUT_S = 10.0
POD_PORT = 8000
MERGE = {"content-type": "application/merge-patch+json"}

Object = dict[str, Any]


class ApiServer:
    """The API server, accessed with a service account.

    Args:
        url: URL as from `kubectl proxy`; None: the API server of the cluster in which this runs.
        account: directory of token, authority and namespace; the token is read for each request, since it changes.

    Raises:
        InputError: this does not run in a cluster, and no URL is given.
    """

    def __init__(self, url: str | None = None, account: Path = ACCOUNT) -> None:
        if url is None:
            host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
            if not host:
                raise InputError("api_server", None, "this runs outside a cluster: give a URL, as from `kubectl proxy`")
            url = f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
        authority, self._token = account / "ca.crt", account / "token"
        verify: ssl.SSLContext | bool = True
        if url.startswith("https:") and authority.is_file():
            verify = ssl.create_default_context(cafile=authority)
        self._client = httpx.Client(base_url=url, verify=verify, timeout=TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def ask(self, method: str, path: str, body: Object | None = None) -> Object:
        """Send a request, with a body as a merge patch; return the answer.

        Raises:
            MachineError: the API server does not answer, or refuses.
        """
        headers = MERGE if body is not None else {}
        with suppress(OSError):
            headers = {**headers, "authorization": f"Bearer {self._token.read_text().strip()}"}
        try:
            answer = self._client.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise MachineError(f"the API server does not answer: {type(error).__name__}: {error}") from None
        if answer.is_error:
            with suppress(ValueError):
                raise MachineError(f"the API server refuses {method} {path}: {answer.json().get('message')}")
            raise MachineError(f"the API server refuses {method} {path}: HTTP {answer.status_code}")
        found: Object = answer.json()
        return found


class Kubernetes:
    """The world of a fleet on Kubernetes.

    Args:
        name: the fleet's name in the label of its Deployments.
        namespace: namespace; None: that of the pod in which this runs, or `default`.
        api_key: key for the pods' metrics; None: they need none.
    """

    def __init__(
        self,
        fleet: FleetPlan,
        name: str,
        server: ApiServer,
        namespace: str | None = None,
        api_key: str | None = None,
        clock_began_s: float = 0.0,
    ) -> None:
        self._fleet, self._name, self._server = fleet, name, server
        if namespace is None:
            own = ACCOUNT / "namespace"
            namespace = own.read_text().strip() if own.is_file() else "default"
        self._namespace, self._began_s = quote(namespace, safe=""), clock_began_s
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._pods: list[Object] = []

    def replicas(self, now_s: float) -> list[ReplicaState]:
        """See `World`. Ordered replicas without a pod are starting."""
        ordered = self._ordered()
        self._pods = self._list(f"/api/v1/namespaces/{self._namespace}/pods")
        found = []
        for pod in self._pods:
            kind, state = self._kind(pod), _state(pod)
            if kind is not None and state is not None:
                found.append(ReplicaState(pod["metadata"]["name"], kind, state, self._since(pod, state)))
        marked = {pod["metadata"]["name"] for pod in self._pods if COST in pod["metadata"].get("annotations", {})}
        for kind, (name, number) in ordered.items():
            present = sum(replica.kind == kind and replica.state != "draining" for replica in found)
            found += [ReplicaState(f"{name}/{i}", kind, "starting", now_s) for i in range(present, number)]
            going = [one for one in found if one.kind == kind and one.state != "draining"]
            going.sort(key=lambda one: one.name not in marked)
            for one in going[: max(0, present - number)]:  # already ordered to leave
                found[found.index(one)] = one._replace(state="draining")
        return found

    def counts(self) -> dict[str, Counts]:
        """See `World`."""
        found = {}
        for pod in self._pods:
            address = pod.get("status", {}).get("podIP")
            if address is None or _state(pod) not in ("ready", "draining"):
                continue
            host = f"[{address}]" if ":" in address else address
            with suppress(httpx.HTTPError):
                url = f"http://{host}:{_port(pod)}/metrics"
                answer = httpx.get(url, headers=self._headers, timeout=TIMEOUT_S, trust_env=False)
                counts = read_counts(answer.text) if answer.is_success else None
                if counts is not None:
                    found[pod["metadata"]["name"]] = counts
        return found

    def start(self, kind: int, number: int) -> None:
        """See `World`."""
        name, ordered = self._deployment(kind)
        self._scale(name, ordered + number)

    def drain(self, names: Sequence[str]) -> None:
        """See `World`. Leaving pods get a low deletion cost before their Deployment is scaled down."""
        pods = {pod["metadata"]["name"]: pod for pod in self._pods}
        leaving: dict[int, int] = {}
        for name in names:
            if name in pods:
                kind = self._kind(pods[name])
                path = f"/api/v1/namespaces/{self._namespace}/pods/{quote(name, safe='')}"
                self._server.ask("PATCH", path, {"metadata": {"annotations": {COST: LEAVES_FIRST}}})
            else:  # ordered, but without a pod
                of = {deployment: kind for kind, (deployment, _) in self._ordered().items()}
                kind = of.get(name.rpartition("/")[0])
            if kind is not None:
                leaving[kind] = leaving.get(kind, 0) + 1
        for kind, number in leaving.items():
            deployment, ordered = self._deployment(kind)
            self._scale(deployment, max(0, ordered - number))

    def _scale(self, deployment: str, number: int) -> None:
        path = f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{quote(deployment, safe='')}/scale"
        self._server.ask("PATCH", path, {"spec": {"replicas": number}})

    def _deployment(self, kind: int) -> tuple[str, int]:
        """Return a kind's Deployment, and the number of its ordered replicas.

        Raises:
            MachineError: there is none.
        """
        found = self._ordered().get(kind)
        if found is None:
            labels = f"{FLEET_LABEL}={self._name},{KIND_LABEL}={kind}"
            raise MachineError(f"no Deployment with labels {labels}: apply what `xgpt export --to k8s` wrote")
        return found

    def _ordered(self) -> dict[int, tuple[str, int]]:
        """Return each kind's Deployment and its ordered replicas."""
        found = {}
        for deployment in self._list(f"/apis/apps/v1/namespaces/{self._namespace}/deployments"):
            kind = self._kind(deployment)
            if kind is not None:
                found[kind] = deployment["metadata"]["name"], int(deployment.get("spec", {}).get("replicas", 1))
        return found

    def _list(self, path: str) -> list[Object]:
        answer = self._server.ask("GET", f"{path}?labelSelector={quote(f'{FLEET_LABEL}={self._name}')}")
        return list(answer.get("items", []))

    def _kind(self, of: Object) -> int | None:
        """Return the kind in an object's label; None: it is no kind of the plan."""
        text = of["metadata"].get("labels", {}).get(KIND_LABEL, "")
        return int(text) if text.isdecimal() and int(text) < len(self._fleet.kinds) else None

    def _since(self, pod: Object, state: State) -> float:
        """Return when a pod's state began, on the controller's clock."""
        at = pod["metadata"].get("creationTimestamp")
        if state == "ready":
            at = next((one.get("lastTransitionTime") for one in _conditions(pod) if one.get("type") == "Ready"), at)
        return 0.0 if at is None else datetime.fromisoformat(at).timestamp() - self._began_s


def _conditions(pod: Object) -> list[Object]:
    return list(pod.get("status", {}).get("conditions", []))


def _state(pod: Object) -> State | None:
    """Return a pod's state; None: it has ended."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return None
    if pod["metadata"].get("deletionTimestamp"):
        return "draining"
    is_ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in _conditions(pod))
    return "ready" if is_ready else "starting"


def _port(pod: Object) -> int:
    """Return the number of a pod's port named http."""
    containers = pod.get("spec", {}).get("containers", [])
    ports = [port for container in containers for port in container.get("ports", [])]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == "http"), POD_PORT)
