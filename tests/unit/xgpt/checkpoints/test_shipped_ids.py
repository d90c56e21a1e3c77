"""Ids of the hub whose shape is shipped."""

from __future__ import annotations

import pytest

from xgpt.checkpoints import hub
from xgpt.core.io import config_names, configs_dir, load_yaml
from xgpt.resolve import load_model

IDS: dict[str, list[str]] = load_yaml(configs_dir() / "hub_ids.yaml", "hub_ids")


def test_every_id_has_one_shipped_shape() -> None:
    assert IDS.keys() <= set(config_names("models"))
    every = [each for ids in IDS.values() for each in ids]
    assert len(every) == len(set(every)) and all(map(hub.is_id, every))
    for name, ids in IDS.items():
        assert hub.id_of_shipped(name) == ids[0]


@pytest.mark.parametrize("model_id", ["meta-llama/Llama-3.1-70B", "Qwen/Qwen3-30B-A3B"])
def test_an_id_is_its_shipped_shape(model_id: str) -> None:
    spec, weights = load_model(model_id)
    shipped, _ = load_model(str(hub.shipped_as(model_id)))
    assert weights is None and spec.name == model_id.partition("/")[2]
    assert spec == shipped.model_copy(update={"name": spec.name})
