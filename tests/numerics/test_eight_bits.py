"""Checkpoints that store weights in eight bits load as the numbers that they stand for, whole and in parts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.numerics.checkpoints import load_checkpoint
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InputError
from xrunner.parallel import Part
from xrunner.weights import Checkpoint, load_model

BLOCK = 128
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8, "type": "int"}}
    },
}
FORMATS = {
    "matrix": {"quant_method": "fp8"},
    "block": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "row": INT8,
}


def stored(weight, form):
    """Numbers in eight bits, their scales, and what both stand for."""
    rows, columns = weight.shape
    highest, kind = (127.0, torch.int8) if form == "row" else (448.0, torch.float8_e4m3fn)
    spread = {"matrix": (rows, columns), "row": (1, columns), "block": (BLOCK, BLOCK)}[form]
    parts = [[part.abs().amax() / highest for part in row.split(spread[1], 1)] for row in weight.split(spread[0])]
    scales = torch.tensor(parts)
    wide = scales.repeat_interleave(spread[0], 0)[:rows].repeat_interleave(spread[1], 1)[:, :columns]
    numbers = weight / wide
    numbers = (numbers.round() if form == "row" else numbers).to(kind)
    return numbers, scales.reshape(()) if form == "matrix" else scales, numbers.float() * wide


def quantised(directory, form, target):
    """Two copies of a checkpoint: with its projections in eight bits, and with the numbers that these stand for."""
    names = target / "eight", target / "wide"
    for name in names:
        shutil.copytree(directory, name)
    config = json.loads((names[0] / "config.json").read_text()) | {"quantization_config": FORMATS[form]}
    (names[0] / "config.json").write_text(json.dumps(config))
    eight, wide = load_file(directory / "model.safetensors"), load_file(directory / "model.safetensors")
    for name in [name for name in wide if name.endswith("_proj.weight")]:
        eight[name], scales, wide[name] = stored(wide[name], form)
        eight[name + ("_scale_inv" if form == "block" else "_scale")] = scales
    for path, tensors in zip(names, (eight, wide), strict=True):
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return names


@pytest.mark.parametrize("form", FORMATS)
def test_it_loads_as_the_numbers_that_it_stands_for(checkpoint, tmp_path, form):
    eight, wide = quantised(checkpoint("llama-grouped")[0], form, tmp_path)
    expected = dict(load_checkpoint(wide).named_parameters())
    for name, found in load_checkpoint(eight, "float32").named_parameters():
        torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_parts_of_it_load_as_parts_of_the_numbers(checkpoint, tmp_path, form):
    directories = quantised(checkpoint("llama-grouped")[0], form, tmp_path)
    loaded = []
    for path in directories:
        part = Part(read_spec(path), (1, 2), (0, 0), is_first=False, is_last=False, rank=1, degree=2)
        loaded.append(dict(load_model(part.spec, "float32", Checkpoint(path), part=part).named_parameters()))
    found, expected = loaded
    assert found
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=0)


def test_what_it_takes_in_memory_is_what_it_is_unpacked_to(checkpoint, tmp_path):
    eight, wide = (read_spec(path) for path in quantised(checkpoint("llama-grouped")[0], "row", tmp_path))
    assert eight.weight_bytes("float32") < eight.unpacked.weight_bytes("float32") == wide.weight_bytes("float32")


def change(directory, name, change_of):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = change_of(tensors[name.removesuffix("_zero_point").removesuffix("_scale")])
    save_file(tensors, path, {"format": "pt"})


NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        (f"{NAME}_zero_point", lambda weight: torch.ones(len(weight), 1, dtype=torch.int8)),
        (f"{NAME}_scale", lambda weight: torch.ones(len(weight), 2)),
    ],
)
def test_other_ways_to_store_eight_bits_are_refused(checkpoint, tmp_path, name, edit):
    eight, _ = quantised(checkpoint("llama-grouped")[0], "row", tmp_path)
    change(eight, name, edit)
    with pytest.raises(InputError, match=r"I8.*one scale for the whole matrix, each row or each block of 128 x 128"):
        load_checkpoint(eight, "float32")


def test_on_another_device_it_is_refused(checkpoint, tmp_path):
    eight, _ = quantised(checkpoint("llama-grouped")[0], "matrix", tmp_path)
    with pytest.raises(InputError, match=r"fp8.*on CPUs"):
        load_checkpoint(eight, "float32", "meta")
