"""Checkpoints in every accepted layout load alike; everything else is refused in one line."""

import json
import shutil

import pytest
import torch

from xgpt.checkpoint import read_spec
from xgpt.errors import InputError
from xrunner.weights import load_checkpoint, seeded


def weights_of(directory):
    return dict(load_checkpoint(directory).named_parameters())


def copy_with(source, target, **changes):
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_spec_of_a_checkpoint(small_opt):
    directory, _ = small_opt
    spec = read_spec(directory)
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.ffn_size) == ("opt", 2, 64, 256)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 16)
    assert (spec.vocab_size, spec.max_context, spec.tie_embeddings) == (211, 128, True)
    assert spec.eos_token_ids == (2,)
    assert spec.default_dtype == "float32"


def test_sharded_checkpoint_loads_as_the_single_file_does(small_opt, tmp_path):
    directory, model = small_opt
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    single, sharded = weights_of(directory), weights_of(tmp_path)
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_checkpoint_of_the_bare_model_loads(small_opt, tmp_path):
    directory, model = small_opt
    model.model.save_pretrained(tmp_path)
    single, bare = weights_of(directory), weights_of(tmp_path)
    assert all(torch.equal(single[name], bare[name]) for name in single)


def test_tied_head_shares_the_embedding(small_opt):
    model = load_checkpoint(small_opt[0])
    assert model.lm_head.weight is model.token_embedding.weight


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mamba"}, "known families: opt"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before: False is not accepted"),
        ({"word_embed_proj_dim": 32}, "word_embed_proj_dim: 32 is not accepted; only 64"),
        ({"activation_function": "mish"}, "known activations"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_hidden_layers": 3}, r"must hold model\.decoder\.layers\.2\."),
        ({"vocab_size": 200}, r"model\.decoder\.embed_tokens\.weight must have the shape \[200, 64\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_checkpoints(small_opt, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        load_checkpoint(copy_with(small_opt[0], tmp_path / "changed", **changes))


def test_config_that_lacks_a_field(small_opt, tmp_path):
    directory = copy_with(small_opt[0], tmp_path / "changed")
    config = json.loads((directory / "config.json").read_text())
    del config["ffn_dim"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="it must set ffn_dim"):
        read_spec(directory)


def test_pickled_weights_are_refused(small_opt, tmp_path):
    directory = copy_with(small_opt[0], tmp_path / "pickled")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickled weights are refused"):
        load_checkpoint(directory)


def test_missing_shard_is_named(small_opt, tmp_path):
    _, model = small_opt
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(InputError, match=gone.name):
        load_checkpoint(tmp_path)


def test_directory_without_config(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        read_spec(tmp_path)


def test_seeded_weights_depend_on_the_seed_alone(small_opt):
    spec = read_spec(small_opt[0])
    first, again, other = (dict(seeded(spec, "float32", seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].dim() > 1]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert len({first[name].flatten()[0].item() for name in matrices}) == len(matrices)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_seeded_logits_have_unit_deviation(small_opt, dtype):
    model = seeded(read_spec(small_opt[0]), dtype, 0)
    hidden = torch.randn(50, model.spec.hidden_size, dtype=model.final_norm.weight.dtype)
    assert 0.8 < model.head(hidden).float().std() < 1.3
