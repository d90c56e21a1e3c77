"""Ids of the hub whose shape is shipped."""

from __future__ import annotations

import pytest

from xgpt.checkpoints import hub
from xgpt.core.errors import InputError
from xgpt.core.io import config_names, configs_dir, load_yaml
from xgpt.resolve import known_id, load_model

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


@pytest.mark.parametrize(
    "spelling",
    ["meta-llama/Llama-3.3-70B-Instruct", "Llama-3.3-70B-Instruct", "llama-3.3-70b", "Llama-3.3-70B",
     "meta-llama/Llama-3.3-70B", "unsloth/Llama-3.3-70B-Instruct", "Meta-Llama-3.3-70B-Instruct", "llama3.3-70b"],
)  # fmt: skip
def test_usual_spellings_are_one_model(spelling: str) -> None:
    spec, _ = load_model(spelling)
    shipped, _ = load_model("llama-3.1-70b")
    assert spec == shipped.but(name=spec.name)
    if "/" not in spelling:
        assert known_id(spelling) == "meta-llama/Llama-3.3-70B-Instruct"


def test_a_quantised_variant_is_not_taken_for_the_plain_model() -> None:
    for name in ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "Qwen/Qwen3-32B-AWQ"):
        with pytest.raises(InputError, match=r"give its config\.json as `config`"):
            load_model(name)


def test_at_least_fifty_usual_ids_work_by_name() -> None:
    ids = [each for ids in IDS.values() for each in ids if not each.startswith("facebook/")]
    assert len(ids) >= 50 and all(load_model(each)[0].num_layers for each in ids)
    assert all(hub.shipped_as(each.rpartition("/")[2].lower()) for each in ids)


def test_models_of_papers_are_listed_apart() -> None:
    with pytest.raises(InputError, match=r"llama-3.1-70b.*; of papers: gpt3-101b, .*opt-13b"):
        load_model("zzz")
