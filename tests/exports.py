"""Exports for tests: their files, their objects, and the schemas that validate them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils
import yaml

import xgpt
from xgpt.core.documents import LOADER
from xgpt.core.schema import Plan
from xgpt.core.schema.fleet import FleetPlan
from xgpt.exporting.groups import Target

for reads in ("all_versions", "schema_contents"):  # it reads a megabyte anew for each object
    setattr(kubernetes_validate.utils, reads, cache(getattr(kubernetes_validate.utils, reads)))

DIRECTORY = Path(__file__).parent / "unit" / "xgpt" / "exporting" / "crds"
CRDS = {
    "DynamoGraphDeployment": "dynamographdeployment-v1beta1.json",
    "LeaderWorkerSet": "leaderworkerset-v1.json",
    "PodMonitor": "podmonitor-v1.json",
    "PrometheusRule": "prometheusrule-v1.json",
    "ScaledObject": "scaledobject-v1alpha1.json",
}


def export(subject: Plan | FleetPlan, target: Target) -> dict[str, str]:
    return xgpt.export(subject, target).files


def objects_in(files: dict[str, str]) -> list[dict[str, Any]]:
    """Return all Kubernetes objects of exported files, validated, with no name twice."""
    texts = [text for name, text in files.items() if name.endswith((".yaml", ".yml"))]
    found = [each for text in texts for each in yaml.load_all(text, LOADER) if each and "kind" in each]
    items = [each for each in found if each["kind"] != "Kustomization"]
    for item in items:
        validate(item)
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len(set(names)) == len(names)
    return items


def expressions(files: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the expressions of the rules and of the dashboard among exported files."""
    (group,) = yaml.load(files["monitoring/rules.yaml"], LOADER)["groups"]
    panels = json.loads(files["monitoring/dashboard.json"])["panels"]
    return [rule["expr"] for rule in group["rules"]], [each["expr"] for panel in panels for each in panel["targets"]]


def pods_of(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the pod templates of an object."""
    spec = item.get("spec", {})
    yield from (spec["template"] for _ in range("template" in spec))
    group = spec.get("leaderWorkerTemplate", {})
    yield from (group[f"{role}Template"] for role in ("leader", "worker") if group)
    yield from (component["podTemplate"] for component in spec.get("components", ()))


def validate(item: dict[str, Any]) -> None:
    """Check an object against its published schema, its pods as those of a Deployment."""
    if item["kind"] not in CRDS:
        kubernetes_validate.validate(item, "1.31", strict=True)
        return
    validator_of(item["kind"]).validate(item)
    for template in pods_of(item):
        spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": item["metadata"], "spec": spec}
        kubernetes_validate.validate(deployment, "1.31", strict=True)


@cache
def validator_of(kind: str) -> jsonschema.protocols.Validator:
    crd = strict(json.loads((DIRECTORY / CRDS[kind]).read_text())["openAPIV3Schema"])
    return jsonschema.validators.validator_for(crd)(crd)


def strict(schema: Any) -> Any:
    """Return a CRD's schema that refuses the fields that an API server would drop."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict_schema = {key: strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and "type" in schema and not is_open:
        strict_schema["additionalProperties"] = False
    return strict_schema
