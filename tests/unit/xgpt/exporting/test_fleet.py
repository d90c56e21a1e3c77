"""A fleet's objects on Kubernetes: valid, and scaled by what the recommender among them says."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

import xgpt
from tests.fleets import fleet_of
from xgpt.autoscaling.recommend import _Metrics
from xgpt.autoscaling.scraping import target_of
from xgpt.core.errors import InputError
from xgpt.core.schema.fleet import FleetPlan
from xscheduler.fleet.recommender import WantedReplicas


def deployable() -> FleetPlan:
    fleet = fleet_of([2.0, 9.0], (2.0, 5.0))
    kinds = tuple(
        kind.model_copy(update={"plan": kind.plan.model_copy(update={"checkpoint": "/weights"})})
        for kind in fleet.kinds
    )
    return fleet.model_copy(update={"kinds": kinds})


def objects(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def test_all_objects_are_valid_and_none_is_named_twice() -> None:
    files = xgpt.export(deployable(), "k8s")
    written = ("recommender.yaml", "hpa.yaml", "xgpt.yaml")
    found = [each for name, text in files.items() if name.endswith(written) for each in objects(text)]
    for one in found:
        kubernetes_validate.validate(one, "1.35", strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(set(names)) == len(names)
    kinds = [kind for kind, _ in names]
    assert kinds.count("Deployment") == 3 and kinds.count("PodDisruptionBudget") == 2
    assert yaml.safe_load(files["kustomization.yaml"])["resources"] == ["recommender.yaml", "kind0", "kind1"]


def deployments(files: dict[str, str]) -> dict[str, dict[str, Any]]:
    found = [each for text in files.values() if "kind: Deployment" in text for each in objects(text)]
    return {one["metadata"]["name"]: one for one in found if one["kind"] == "Deployment"}


def test_the_recommender_reads_the_pods_of_each_kind_by_name() -> None:
    fleet = deployable()
    files = xgpt.export(fleet, "k8s")
    services = {one["metadata"]["name"]: one for one in objects(files["recommender.yaml"]) if one["kind"] == "Service"}
    pod = deployments(files)["xgpt-llama-3-1-8b-recommender"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    scraped = [command[i + 1] for i, word in enumerate(command) if word == "--scrape"]
    targets = [target_of(text, [kind.name for kind in fleet.kinds]) for text in scraped]
    assert [target.kind for target in targets] == [0, 1]
    for target in targets:
        of_pods = services[str(urlsplit(target.url).hostname)]["spec"]
        template = deployments(files)[f"xgpt-llama-3-1-8b-{target.kind}"]["spec"]["template"]
        assert of_pods["clusterIP"] == "None"  # the name resolves to all pods
        assert of_pods["selector"].items() <= template["metadata"]["labels"].items()
        assert urlsplit(target.url).port == template["spec"]["containers"][0]["ports"][0]["containerPort"]
    assert not pod["automountServiceAccountToken"]  # it changes nothing


def test_the_autoscalers_act_on_the_recommended_number_of_their_own_kind() -> None:
    fleet = deployable()
    files = xgpt.export(fleet, "k8s")
    registry = CollectorRegistry()
    _Metrics(fleet, 0, registry)(WantedReplicas((3, 5), 1.0, 1.0), (1, 1))
    pairs = zip(objects(files["hpa.yaml"]), objects(files["keda.yaml"]), strict=True)
    for number, (hpa, scaled) in enumerate(pairs):
        for one in (hpa, scaled):
            assert one["spec"]["scaleTargetRef"]["name"] in deployments(files)
        external = hpa["spec"]["metrics"][0]["external"]
        assert external["target"] == {"type": "AverageValue", "averageValue": "1"}
        labels = external["metric"]["selector"]["matchLabels"]
        value = registry.get_sample_value(external["metric"]["name"], {**labels, "name": fleet.kinds[number].name})
        assert value == (3, 5)[number]
        query = "".join(f'{name}="{text}",' for name, text in labels.items()).removesuffix(",")
        assert scaled["spec"]["triggers"][0]["metadata"]["query"] == f"max(xgpt_replicas_wanted{{{query}}})"
        assert (
            hpa["spec"]["maxReplicas"] == scaled["spec"]["maxReplicaCount"] >= 2 * fleet.intervals[1].replicas[number]
        )


def test_a_fleet_without_weights_or_for_another_target_is_refused() -> None:
    with pytest.raises(InputError, match="checkpoint"):
        xgpt.export(fleet_of([2.0]), "k8s")
    with pytest.raises(InputError, match="a fleet can be exported only to k8s"):
        xgpt.export(deployable(), "script")
