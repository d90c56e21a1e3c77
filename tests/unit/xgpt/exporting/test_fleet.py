"""A fleet's objects on Kubernetes: valid, and found by the controller that is among them."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

import xgpt
from tests.fleets import fleet_of
from xgpt.core.errors import InputError
from xgpt.core.schema.fleet import FleetPlan
from xgpt.operating.drivers.kubernetes import FLEET_LABEL, KIND_LABEL


def deployable() -> FleetPlan:
    fleet = fleet_of([2.0, 9.0], (2.0, 5.0))
    kinds = tuple(
        kind.model_copy(update={"plan": kind.plan.model_copy(update={"checkpoint": "/weights"})})
        for kind in fleet.kinds
    )
    return fleet.model_copy(update={"kinds": kinds})


def objects(text: str) -> list[dict[str, Any]]:
    return [of for of in yaml.safe_load_all(text) if of]


def test_all_objects_are_valid_and_none_is_named_twice() -> None:
    files = xgpt.export(deployable(), "k8s")
    found = [of for name, text in files.items() if name.endswith(("r.yaml", "xgpt.yaml")) for of in objects(text)]
    for one in found:
        kubernetes_validate.validate(one, "1.31", strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)
    kinds = [kind for kind, _ in names]
    assert kinds.count("Deployment") == 3 and kinds.count("PodDisruptionBudget") == 2
    assert yaml.safe_load(files["kustomization.yaml"])["resources"] == ["controller.yaml", "kind0", "kind1"]


def test_the_controller_finds_the_deployments_and_may_scale_them() -> None:
    files = xgpt.export(deployable(), "k8s")
    controller = objects(files["controller.yaml"])
    command = controller[-1]["spec"]["template"]["spec"]["containers"][0]["command"]
    name = command[command.index("--name") + 1]
    for number in range(2):
        deployment = next(one for one in objects(files[f"kind{number}/xgpt.yaml"]) if one["kind"] == "Deployment")
        for labels in (deployment["metadata"]["labels"], deployment["spec"]["template"]["metadata"]["labels"]):
            assert labels[FLEET_LABEL] == name and labels[KIND_LABEL] == str(number)
    role = next(one for one in controller if one["kind"] == "Role")
    allowed = {(of, verb) for rule in role["rules"] for of in rule["resources"] for verb in rule["verbs"]}
    assert {("deployments", "list"), ("deployments/scale", "patch"), ("pods", "list"), ("pods", "patch")} <= allowed


def test_a_fleet_without_weights_or_for_another_target_is_refused() -> None:
    with pytest.raises(InputError, match="checkpoint"):
        xgpt.export(fleet_of([2.0]), "k8s")
    with pytest.raises(InputError, match="a fleet is exported to k8s only"):
        xgpt.export(deployable(), "script")
