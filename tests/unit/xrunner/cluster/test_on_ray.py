"""What becomes of an engine's process whose Ray cluster is gone."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from xrunner.cluster.launching import LauncherSettings

if TYPE_CHECKING:
    from xrunner.cluster.on_ray import RayLauncher

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
SETTINGS = LauncherSettings("tcp://127.0.0.1:1", b"", "127.0.0.1")


def launcher_if(error: str, monkeypatch: pytest.MonkeyPatch) -> RayLauncher:
    """Return a launcher whose actor cannot be created for this reason."""
    from ray import exceptions
    from ray.util.placement_group import PlacementGroup

    from xrunner.cluster import on_ray

    def fail(*_: Any) -> None:
        raise getattr(exceptions, error)("said by Ray")

    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=fail))
    monkeypatch.setattr(on_ray.ray, "remote", lambda _: options)
    monkeypatch.setattr(on_ray.os, "_exit", exit)
    return on_ray.RayLauncher(PlacementGroup.empty(), 0, 0.0, SETTINGS)


def test_it_ends_if_another_cluster_is_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches workers died of it, and after two minutes the server failed for good."""
    with pytest.raises(SystemExit):
        launcher_if("AuthenticationError", monkeypatch)


def test_it_waits_for_a_head_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launcher_if("RpcError", monkeypatch)
    assert launcher.exited() == [] and launcher.is_at_work()
    launcher.close()
