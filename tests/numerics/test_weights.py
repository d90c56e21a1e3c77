"""Checkpoints in every accepted layout load alike; everything else is refused in one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.numerics.checkpoints import load_checkpoint
from tests.rings import few
from xgpt.checkpoints.files import read_spec, sampling_defaults
from xgpt.core.errors import InputError
from xprofiler import measure
from xrunner import weights
from xrunner.build import WorkerSettings, build_worker
from xrunner.models import family_of
from xrunner.models.layers import Linear
from xrunner.packing.choice import layouts_of
from xrunner.weights import SeededWeights, load_model


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


@pytest.mark.parametrize("name", ["gpt2-tied", "llama-tied-biased", "opt-tied", "qwen2-tied", "qwen3-tied-biased"])
def test_checkpoint_of_the_bare_model_loads(checkpoint, tmp_path, name):
    directory, model = checkpoint(name)
    model.base_model.save_pretrained(tmp_path)
    single, bare = weights_of(directory), weights_of(tmp_path)
    assert all(torch.equal(single[name], bare[name]) for name in single)


def test_the_language_model_of_a_checkpoint_that_takes_images_loads(checkpoint, tmp_path):
    import transformers

    directory, model = checkpoint("gemma3_text-grouped")
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    ids = {"image_token_index": 200, "boi_token_index": 201, "eoi_token_index": 202}
    vision |= {"image_size": 14, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=model.config.to_dict(), vision_config=vision, **ids)
    config.tie_word_embeddings = False
    whole = transformers.Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    text, both = weights_of(directory), weights_of(tmp_path)
    assert all(torch.equal(text[name], both[name]) for name in text)


def test_tied_head_shares_the_embedding(small_opt):
    model = load_checkpoint(small_opt[0])
    assert model.lm_head.weight is model.token_embedding.weight


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "nonesuch"}, "xgpt plans only these families: afmoe, .*, qwen3_moe, .*, t5"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before: False is not accepted"),
        ({"word_embed_proj_dim": 32}, "word_embed_proj_dim: 32 is not accepted; it must equal hidden_size"),
        ({"activation_function": "mish"}, "xgpt supports only"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_hidden_layers": 3}, r"must contain model\.decoder\.layers\.2\."),
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
    with pytest.raises(InputError, match="ffn_dim is missing"):
        read_spec(directory)


def test_pickled_weights_are_refused(small_opt, tmp_path):
    directory = copy_with(small_opt[0], tmp_path / "pickled")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickled weights, which xgpt does not load"):
        load_checkpoint(directory)


@pytest.fixture
def sharded(small_opt, tmp_path):
    """A checkpoint in several files that a test may break."""
    small_opt[1].save_pretrained(tmp_path, max_shard_size="100KB")
    return tmp_path


def shards_of(directory):
    return sorted(directory.glob("*.safetensors"))


def rewrite(path, name, change):
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path, metadata={"format": "pt"})


def refused(directory, *parts, monkeypatch):
    """Loading ends in one line that names all of `parts`, before any model is allocated."""

    def allocate(*_, **options):
        assert options["device"] == "meta", "allocated before the checkpoint was checked"
        return torch_empty(*_, **options)

    torch_empty = torch.empty
    monkeypatch.setattr(torch, "empty", allocate)
    with pytest.raises(InputError) as caught:
        load_checkpoint(directory)
    assert caught.value.exit_code == 2
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_missing_shard(sharded):
    gone = shards_of(sharded)[1]
    inside = list(load_file(gone))
    gone.unlink()
    with pytest.raises(InputError, match=gone.name) as caught:
        load_checkpoint(sharded)
    assert any(name in str(caught.value) for name in inside)


@pytest.mark.parametrize("kept", [5, 40, -1], ids=["length", "header", "tensors"])
def test_truncated_shard(sharded, monkeypatch, kept):
    path = shards_of(sharded)[1]
    path.write_bytes(path.read_bytes()[:kept])
    refused(sharded, path.name, "incomplete", monkeypatch=monkeypatch)


def test_tensor_of_another_shape(sharded, monkeypatch):
    path = shards_of(sharded)[1]
    name = next(name for name, tensor in load_file(path).items() if tensor.dim() > 1)
    rewrite(path, name, lambda tensor: tensor[:-1].clone())
    refused(sharded, path.name, name, "must have the shape", monkeypatch=monkeypatch)


def test_tensor_of_integers(sharded, monkeypatch):
    path = shards_of(sharded)[1]
    name = next(iter(load_file(path)))
    rewrite(path, name, lambda tensor: tensor.to(torch.int8))
    refused(sharded, path.name, name, "I8", "F32, F16, BF16", monkeypatch=monkeypatch)


def rewrite_all(directory, change):
    """Change the tensors of a checkpoint's one file."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "float32"), (float("inf"), "float32"), (1e5, "float16"), (-1e5, "float16")]
)
def test_weights_that_are_not_finite(small_opt, tmp_path, value, dtype):
    directory = copy_with(small_opt[0], tmp_path / "changed")
    name = "model.decoder.layers.1.fc1.weight"
    rewrite_all(directory, lambda tensors: tensors[name].view(-1)[77:78].fill_(value))
    with pytest.raises(InputError, match=f"{name}.*it contains NaN or infinity in {dtype}"):
        load_checkpoint(directory, dtype)


def test_a_single_file_is_taken_before_an_index(small_opt, sharded, tmp_path):
    import transformers

    single = copy_with(small_opt[0], tmp_path / "single")
    for path in (*shards_of(sharded), sharded / "model.safetensors.index.json"):
        (single / path.name).write_bytes(path.read_bytes())
    rewrite_all(single, lambda tensors: tensors["model.decoder.final_layer_norm.weight"].mul_(2))
    expected = transformers.AutoModelForCausalLM.from_pretrained(single).model.decoder.final_layer_norm.weight
    assert torch.equal(load_checkpoint(single).final_norm.weight, expected)


def test_files_of_other_names_are_not_weights(small_opt, tmp_path):
    directory = copy_with(small_opt[0], tmp_path / "changed")
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"it must contain model\.safetensors or its index"):
        load_checkpoint(directory)


def test_an_adapter_is_refused(small_opt, tmp_path):
    directory = copy_with(small_opt[0], tmp_path / "changed")
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="adapters are not supported"):
        read_spec(directory)


@pytest.mark.parametrize("name", ["llama-tied-biased", "gpt2-tied", "t5-tied"])
def test_a_head_that_is_stored_beside_tied_embeddings_is_the_head(checkpoint, tmp_path, name):
    import transformers

    directory = copy_with(checkpoint(name)[0], tmp_path / "changed")
    embedding = read_spec(directory).family
    names = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight", "t5": "shared.weight"}
    rewrite_all(directory, lambda tensors: tensors.update({"lm_head.weight": 1.5 * tensors[names[embedding]]}))
    kind = transformers.AutoModelForSeq2SeqLM if name.startswith("t5") else transformers.AutoModelForCausalLM
    assert torch.equal(load_checkpoint(directory).lm_head.weight, kind.from_pretrained(directory).lm_head.weight)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_an_embedding_of_its_own_in_a_stack_is_refused(checkpoint, tmp_path, stack):
    directory = copy_with(checkpoint("t5-tied")[0], tmp_path / "changed")
    name = f"{stack}.embed_tokens.weight"
    rewrite_all(directory, lambda tensors: tensors.update({name: tensors["shared.weight"].clone()}))
    load_checkpoint(directory)
    rewrite_all(directory, lambda tensors: tensors[name].mul_(1.5))
    with pytest.raises(InputError, match=rf"{stack}\.embed_tokens\.weight must equal shared\.weight"):
        load_checkpoint(directory)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [({}, {"decoder_start_token_id": 9}, 9), ({}, None, 5), ({}, {"bos_token_id": 8}, 8)],
)
def test_what_a_decoder_starts_with(checkpoint, tmp_path, config, generation, expected):
    import transformers

    directory = copy_with(checkpoint("t5-tied")[0], tmp_path / "changed", **config)
    (directory / "generation_config.json").unlink()
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory)
    theirs = model.generate(torch.tensor([[3, 4]]), max_new_tokens=1)[0, 0]
    assert load_checkpoint(directory).decoder_start == (expected,) == (int(theirs),)


@pytest.mark.parametrize("place", ["../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_index_that_points_outside(sharded, monkeypatch, place):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    content["weight_map"][name] = place
    index.write_text(json.dumps(content))
    refused(sharded, place, name, "same directory", monkeypatch=monkeypatch)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_broken_index(sharded, monkeypatch, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "model.safetensors.index.json", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 6]}, {}, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": 5}, {"temperature": 0.5}, ()),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
    ],
)
def test_stop_tokens_are_those_of_the_generation_config(small_opt, tmp_path, config, generation, expected):
    directory = copy_with(small_opt[0], tmp_path / "changed", **config)
    (directory / "generation_config.json").unlink()
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert read_spec(directory).eos_token_ids == expected


OLDER_ROPE = {
    "rope_parameters": None,
    "rope_theta": 500.0,
    "rope_scaling": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def test_rope_settings_of_older_configs(checkpoint, tmp_path):
    directory, _ = checkpoint("llama-grouped")
    older = copy_with(directory, tmp_path / "same", **OLDER_ROPE)
    same = {"name": "same"}
    assert read_spec(older) == read_spec(directory).model_copy(update=same)


def test_dtype_that_the_config_leaves_out_is_that_of_the_weights(small_opt, tmp_path):
    directory = copy_with(small_opt[0], tmp_path / "changed", dtype=None)
    assert read_spec(directory).default_dtype == "float32"


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("gpt2-tied", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ("llama-grouped", {"mlp_bias": True}, "mlp_bias: True.*own engine"),
        ("llama-grouped", {"head_dim": 15}, "even"),
        ("llama-grouped", {"num_key_value_heads": 3}, "does not divide"),
        ("llama-grouped", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters: .*'dynamic'.*own engine"),
        ("llama-grouped", {"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "rope factor: '4'.*above 0"),
        ("llama-grouped", {"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "rope factor: inf"),
        ("llama-grouped", {"rope_parameters": {"rope_type": "llama3"}}, "factor is missing"),
        (
            "llama-grouped",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 0.5.*own engine",
        ),
        ("llama-grouped", {"rope_parameters": ["yarn"]}, "must be an object"),
        ("llama-grouped", {"hidden_act": ["silu"]}, "xgpt supports only"),
        ("llama-grouped", {"hidden_size": "64"}, "whole number"),
        ("llama-grouped", {"model_type": ["llama"]}, "plans only these families"),
        ("llama-grouped", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama-grouped", {"dtype": "float64"}, "known dtypes"),
        ("qwen2-grouped", {"use_sliding_window": True}, "use_sliding_window: True"),
        ("qwen3-grouped", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("t5-tied", {"feed_forward_proj": "gated-mish"}, "xgpt supports only"),
        ("t5-tied", {"feed_forward_proj": "doubly-gated-gelu"}, "gated-ACTIVATION"),
        ("t5-tied", {"relative_attention_max_distance": 16}, "must exceed half of relative_buckets, 32"),
        ("t5-tied", {"relative_attention_num_buckets": 2}, "relative_buckets"),
        ("t5-tied", {"dense_act_fn": "silu"}, "dense_act_fn: 'silu'.*must be 'relu', as in feed_forward_proj"),
        ("t5-tied", {"hidden_size": 60}, "it must equal d_model"),
        ("llama-grouped", {"sliding_window": 16}, "sliding_window: 16"),
        ("llama-grouped", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("llama-grouped", {"embedding_multiplier": 2.0}, "embedding_multiplier: 2.0.*remove it if"),
        (
            "llama-grouped",
            {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
            "rope_parameters: .*'factor': 2.0",
        ),
        ("t5-tied", {"is_encoder_decoder": False}, "is_encoder_decoder: False"),
    ],
)
def test_refused_variants_of_families(checkpoint, tmp_path, name, changes, message):
    with pytest.raises(InputError, match=message):
        family_of(read_spec(copy_with(checkpoint(name)[0], tmp_path / "changed", **changes)))


def test_sampling_defaults_are_those_of_the_generation_config(small_opt, tmp_path):
    directory = copy_with(small_opt[0], tmp_path / "changed")
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    (directory / "generation_config.json").write_text(json.dumps(given | {"do_sample": True, "min_p": None}))
    assert sampling_defaults(directory) == given
    (directory / "generation_config.json").write_text(json.dumps({"top_p": 1.5}))
    with pytest.raises(InputError, match=r"top_p: 1\.5 is not accepted"):
        sampling_defaults(directory)
    (directory / "generation_config.json").unlink()
    assert sampling_defaults(directory) == {}


def test_directory_without_config(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        read_spec(tmp_path)


def test_seeded_weights_depend_on_the_seed_alone(small_opt):
    spec = read_spec(small_opt[0])
    first, again, other = (
        dict(load_model(spec, "float32", SeededWeights(seed)).named_parameters()) for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].dim() > 1]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert len({first[name].flatten()[0].item() for name in matrices}) == len(matrices)


@pytest.mark.parametrize("name", ["gpt2-tied", "llama-grouped", "opt-tied", "qwen2-grouped", "qwen3-grouped"])
@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float16"]))
def test_seeded_logits_have_unit_deviation(checkpoint, name, dtype):
    model = load_model(read_spec(checkpoint(name)[0]), dtype, SeededWeights(0))
    hidden = torch.randn(50, model.spec.hidden_size, dtype=model.final_norm.weight.dtype)
    assert 0.8 < model.head(hidden).float().std() < 1.3


@pytest.mark.skipif(not layouts_of("int8"), reason="this processor cannot multiply in int8")
@pytest.mark.parametrize("name", ["opt-tied", "llama-grouped", "t5-tied"])
def test_one_matrix_at_a_time_is_there_as_it_was_read(checkpoint, name, monkeypatch):
    """A model in eight bits would take four times its size while it is loaded."""
    kept, pack = [], Linear.prepack

    def prepack(projection, *given):
        kept.append(sum(one.weight is not None and one.weight.device.type == "cpu" for one in model[0].projections()))
        pack(projection, *given)

    model, build = [], weights.build
    monkeypatch.setattr(weights, "build", lambda part: model.append(build(part)) or model[0])
    monkeypatch.setattr(Linear, "prepack", prepack)
    directory = checkpoint(name)[0]
    build_worker(WorkerSettings(spec=read_spec(directory), dtype="int8", checkpoint=directory, num_blocks=8))
    is_tied = model[0].spec.tie_embeddings  # a head that is the embedding stays until all is read
    assert (
        len(kept) > 5 and max(kept) == 1 + is_tied and not any(one.weight is not None for one in model[0].projections())
    )


@pytest.mark.parametrize("name", ["opt-tied", "llama-grouped", "t5-tied"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_rate_of_loading_is_measured(checkpoint, name, dtype, monkeypatch):
    """Bytes of the layers that were loaded, as the device keeps them, over the mean load's seconds."""
    directory = checkpoint(name)[0]
    spec = read_spec(directory)
    clock = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(clock)))
    size = {"float32": 4, "int8": 1}[dtype]
    layers = spec.num_layers * spec.decoder_layer_params + spec.num_encoder_layers * spec.encoder_layer_params
    assert measure.loading_rate(spec, dtype, directory, "cpu") == pytest.approx(size * layers, rel=0.05)


def test_biases_of_experts_stay_in_float32(checkpoint, monkeypatch):
    """As in transformers: biases of trained models differ by less than half precision can tell apart."""
    directory, model = checkpoint("deepseek_v3-grouped")
    monkeypatch.setattr(weights, "state_dtype", lambda *_: torch.bfloat16)  # as on a GPU
    found = load_checkpoint(directory, "bfloat16")
    router, expected = found.layers[1].mlp.router, model.model.layers[1].mlp.gate
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.e_score_correction_bias, expected.e_score_correction_bias)
