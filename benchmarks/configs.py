"""Compare parameter counts read from config.json files with models that transformers builds from the same files.

    python -m benchmarks.configs FOLDER [--markdown]

FOLDER holds files named NAME_config.json and, for some of them, NAME_hf_quant_config.json, as aiconfigurator ships
them (aic-core/src/aiconfigurator_core/model_configs). The columns are: the language model's parameters by the planner's
count, the parameters of the model that transformers builds without memory, and the size of the stored weights.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from xgpt.checkpoints.families import language_model
from xgpt.checkpoints.files import spec_of
from xgpt.core.errors import InputError
from xgpt.core.schema import ModelSpec


class Read(NamedTuple):
    """The result for one config.json.

    Attributes:
        read, built: billions of parameters by the planner's and by transformers' count. None means that transformers
            has no class for this family (`note` states why), or that the file is refused.
        note: the refusal, or the reason why transformers builds no model.
    """

    name: str
    family: str
    read: float | None
    built: float | None
    stored_gib: float | None
    note: str

    @property
    def error(self) -> float | None:
        return None if self.read is None or self.built is None else self.read / self.built - 1


def configs(folder: Path) -> Iterator[Read]:
    for path in sorted(folder.glob("*_config.json")):
        name = path.name.removesuffix("_config.json")
        if name.endswith("_hf_quant"):
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        side = path.with_name(f"{name}_hf_quant_config.json")
        try:
            quantised = json.loads(side.read_text(encoding="utf-8")) if side.is_file() else None
            spec = spec_of(config, name, side=quantised)
        except InputError as error:
            yield Read(name, config.get("model_type", ""), None, None, None, str(error))
            continue
        built, note = built_by_transformers(config)
        read = (spec.decoder_params + spec.embedding_params) / 1e9
        yield Read(name, config["model_type"], read, built, stored_gib(spec), note)


def stored_gib(spec: ModelSpec) -> float:
    """Return the size of the language model's weights as the checkpoint stores them, in GiB."""
    return spec.weight_bytes(spec.default_dtype) / 2**30


def built_by_transformers(config: dict[str, Any]) -> tuple[float | None, str]:
    """Return the billions of parameters of transformers' model for a config.json, or the reason why there is none."""
    family, part = language_model(config, "config.json")
    if family not in CONFIG_MAPPING:
        return None, f"transformers has no class of {family}"
    left = ("quantization_config", "auto_map", "architectures")
    part = {name: value for name, value in part.items() if name not in left}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            config = CONFIG_MAPPING[family](**part)
            try:
                model = AutoModelForCausalLM.from_config(config)
                head = 0
            except ValueError:  # a part of a model that also reads images is built without its head
                model = AutoModel.from_config(config)
                head = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        except Exception as error:  # whatever a class of transformers may raise
            return None, f"transformers builds none: {type(error).__name__}: {error}".splitlines()[0][:80]
    weights = (each for name, each in model.named_parameters() if each.dim() > 1 and "bias" not in name)
    return (sum(each.numel() for each in weights) + head) / 1e9, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    edge = "| " if given.markdown else ""
    for row in configs(given.folder):
        numbers = [f"{row.read:.3f}" if row.read else "refused", f"{row.built:.3f}" if row.built else "-"]
        error = "-" if row.error is None else f"{100 * row.error:+.3f}%"
        size = "-" if row.stored_gib is None else f"{row.stored_gib:.1f}"
        print(f"{edge}{' | '.join([row.name, row.family, *numbers, error, size, row.note])}{' |' if edge else ''}")


if __name__ == "__main__":
    main()
