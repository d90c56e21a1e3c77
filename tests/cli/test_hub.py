"""Models by their Hugging Face id: planned for from config.json alone, served where weights are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.attack.target import save_checkpoint
from xgpt.cli import cli
from xgpt.core.errors import InputError
from xgpt.resolve import load_model

ID = "maker/small-opt"
ASKED = ["--cluster", "h200x1", "--workload", "translation", "--latency-bound", "20", "--objective", "saturated"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


def keep(home: Path, checkpoint: Path, *, weights: bool) -> None:
    """Put a model where huggingface_hub downloads it to."""
    model = home / "hub" / f"models--{ID.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc123")
    shutil.copytree(checkpoint, model / "snapshots" / "abc123")
    if not weights:
        (model / "snapshots" / "abc123" / "model.safetensors").unlink()


def config_of(checkpoint: Path) -> str:
    """Its config.json with a context that the workload fits."""
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (checkpoint / "wide.json").write_text(json.dumps(config))
    return str(checkpoint / "wide.json")


def test_an_id_is_planned_for_from_a_config_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    out = str(tmp_path / "plan.json")
    asked = ["plan", "--model", ID, "--config", config_of(checkpoint), *ASKED, "-o", out]
    planned = CliRunner().invoke(cli, asked)
    assert planned.exit_code == 0, planned.output
    plan = json.loads(Path(out).read_text())
    assert (plan["checkpoint"], plan["model"]["name"]) == (f"hf://{ID}", "small-opt")
    served = CliRunner().invoke(cli, ["serve", out, "--dry-run"])
    assert isinstance(served.exception, InputError)
    assert f"hf download {ID}" in str(served.exception) and "--checkpoint" in str(served.exception)
    exported = CliRunner().invoke(cli, ["export", out, "--to", "llm-d", "-o", str(tmp_path / "out")])
    assert exported.exit_code == 0, exported.output


def test_the_cache_has_configs_and_weights(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for weights in (False, True):
        home = tmp_path / str(weights)
        monkeypatch.setenv("HF_HOME", str(home))
        keep(home, checkpoint, weights=weights)
        spec, directory = load_model(ID)
        assert spec.name == "small-opt" and (directory is not None) == weights


def test_a_config_is_a_model_by_itself(checkpoint: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "plan.json")
    ran = CliRunner().invoke(cli, ["plan", "--config", config_of(checkpoint), *ASKED, "-o", out])
    assert ran.exit_code == 0, ran.exception
    assert json.loads(Path(out).read_text())["model"]["name"] == "wide"


def test_an_unknown_id_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    refused = CliRunner().invoke(cli, ["plan", "--model", "Qwen/Qwen9-0.5B", *ASKED])
    assert isinstance(refused.exception, InputError) and "--config" in str(refused.exception)
    refused = CliRunner().invoke(cli, ["plan", "--model", "opt-125m", "--config", "config.json", *ASKED])
    assert isinstance(refused.exception, InputError) and "Hugging Face id" in str(refused.exception)
