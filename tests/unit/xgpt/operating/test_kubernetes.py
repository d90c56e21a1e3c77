"""Replicas on Kubernetes, through a fake API server: scaled, drained by deletion cost, found again after a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fleets import fleet_of
from xgpt.core.errors import InputError, MachineError
from xgpt.operating.drivers.kubernetes import COST, ApiServer, Kubernetes
from xscheduler.fleet.autoscaling import Autoscaler
from xscheduler.fleet.controller import Controller, Look

BASE = "/apis/apps/v1/namespaces/llm/deployments"


class FakeApiServer:
    """A Deployment of `ordered` replicas, whose pods it makes and takes away as a controller manager would."""

    def __init__(self, ordered: int = 1) -> None:
        self.ordered = ordered
        self.pods: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str, str | None]] = []
        self.refuses = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _answer(self, body: Any, status: int = 200) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                fake.asked.append(("GET", self.path, self.headers["authorization"]))
                path = self.path.partition("?")[0]
                if fake.refuses:
                    self._answer({"message": "no"}, 403)
                elif path == BASE:
                    labels = {"app.kubernetes.io/part-of": "xgpt-test", "xgpt-kind": "0"}
                    self._answer(
                        {
                            "items": [
                                {"metadata": {"name": "serve", "labels": labels}, "spec": {"replicas": fake.ordered}}
                            ]
                        }
                    )
                elif path == "/api/v1/namespaces/llm/pods":
                    self._answer({"items": fake.pods})
                else:
                    self._answer({"message": "not found"}, 404)

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.asked.append(("PATCH", self.path, self.headers["authorization"]))
                assert self.headers["content-type"] == "application/merge-patch+json"
                if self.path == f"{BASE}/serve/scale":
                    fake.ordered = body["spec"]["replicas"]
                else:
                    name = self.path.rpartition("/")[2]
                    pod = next(pod for pod in fake.pods if pod["metadata"]["name"] == name)
                    pod["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
                self._answer({})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def pod(self, name: str, *, ready: bool = True, leaving: bool = False) -> None:
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-11-22T10:00:00Z"}
        metadata: dict[str, Any] = {
            "name": name,
            "labels": {"app.kubernetes.io/part-of": "xgpt-test", "xgpt-kind": "0"},
        }
        metadata["creationTimestamp"] = "2026-11-22T09:00:00Z"
        if leaving:
            metadata["deletionTimestamp"] = "2026-11-22T11:00:00Z"
        self.pods.append({"metadata": metadata, "status": {"phase": "Running", "conditions": [condition]}})

    def settle(self) -> None:
        """Make and take away pods until there are as many as ordered; the cheapest to delete go first."""
        while len(self.pods) < self.ordered:
            self.pod(f"pod{len(self.pods)}-{len(self.asked)}")
        self.pods.sort(key=lambda pod: -int(pod["metadata"].get("annotations", {}).get(COST, 0)))
        del self.pods[self.ordered :]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    fake = FakeApiServer()
    yield fake
    fake.close()


def world(server: FakeApiServer, account: Path = Path("/nowhere")) -> Kubernetes:
    return Kubernetes(fleet_of([16.0] * 12), "xgpt-test", ApiServer(server.url, account), "llm")


def test_what_is_ordered_and_has_no_pod_is_starting(server: FakeApiServer) -> None:
    server.pod("a")
    server.pod("b", ready=False)
    server.pod("c", leaving=True)
    server.ordered = 4
    states = {replica.name: replica.state for replica in world(server).replicas(0.0)}
    assert states == {"a": "ready", "b": "starting", "c": "draining", "serve/2": "starting", "serve/3": "starting"}


def test_starting_scales_from_what_is_ordered(server: FakeApiServer) -> None:
    server.ordered = 2
    kubernetes = world(server)
    kubernetes.replicas(0.0)
    kubernetes.start(0, 3)
    assert server.ordered == 5


def test_the_replicas_that_leave_are_those_that_were_named(server: FakeApiServer) -> None:
    for name in ("a", "b", "c"):
        server.pod(name)
    server.ordered = 3
    kubernetes = world(server)
    kubernetes.replicas(0.0)
    kubernetes.drain(["b"])
    assert server.ordered == 2
    server.settle()
    assert sorted(pod["metadata"]["name"] for pod in server.pods) == ["a", "c"]


def test_a_controller_restarted_in_mid_change_leaves_what_is_needed(server: FakeApiServer) -> None:
    """The first one orders, and dies before any pod is there; the next one orders nothing twice, and all come."""
    fleet = fleet_of([16.0] * 12)
    server.pod("a")
    for _ in range(3):
        kubernetes = world(server)
        keeper = Autoscaler(fleet, kubernetes, Controller(fleet, look_s=15.0), 15.0, 0.0, clock=lambda: 900.0)
        present = [replica for replica in kubernetes.replicas(900.0) if replica.state != "draining"]
        keeper.carry_out(keeper.controller.decide(Look(900.0, 15.0, 240, 0.0, present)))
    assert 8 <= server.ordered <= 10
    server.settle()
    assert len(server.pods) == server.ordered


def test_the_token_is_read_for_each_request(server: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    kubernetes = world(server, tmp_path)
    kubernetes.replicas(0.0)
    (tmp_path / "token").write_text("second\n")
    kubernetes.replicas(0.0)
    assert {key for _, _, key in server.asked} == {"Bearer first", "Bearer second"}


def test_a_refusal_is_said(server: FakeApiServer) -> None:
    server.refuses = True
    with pytest.raises(MachineError, match=r"refuses GET .*: no"):
        world(server).replicas(0.0)


def test_outside_of_a_cluster_a_url_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InputError, match="kubectl proxy"):
        ApiServer()


def test_a_dry_run_changes_nothing(server: FakeApiServer) -> None:
    fleet, notes = fleet_of([16.0] * 12), []
    server.ordered = 0
    keeper = Autoscaler(fleet, world(server), Controller(fleet), 15.0, 0.0, dry_run=True, on_note=notes.append)
    keeper.look()
    assert server.ordered == 0
    assert notes == ["would start 8 of kind0"]
