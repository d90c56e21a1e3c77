"""Read config.json of families that xgpt plans for other engines but does not run itself. The result lists the model's
kinds of layers with their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xgpt.checkpoints.fields import BOOKKEEPING, COMMON, SEARCH, SIZE, TRAINING, wrong
from xgpt.checkpoints.readers.common import count
from xgpt.checkpoints.readers.renamed import renamed
from xgpt.core.schema import Attention, Block, Experts, Indexer, LatentAttention, Recurrent
from xgpt.core.schema.families import TABLES

Config = dict[str, Any]

SLIDING = ("sliding_attention", "chunked_attention", "hybrid_sliding")
RECURRENT = ("linear_attention", "mamba", "conv", "short_conv")
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
KDA = TABLES["delta"]
"""Families whose linear layers are Kimi Delta Attention."""
PLANNED = frozenset[str](TABLES["planned"])
"""The model_types of the language models that xgpt only plans."""
UNGATED, TIED = (frozenset[str](TABLES[name]) for name in ("ungated", "tied"))
"""Families whose feed-forward blocks have no gate, and those in which embedding and head are tied by default."""
WITHOUT_EFFECT = frozenset[str](TABLES["without_effect"])
"""Sizes that change neither weights nor memory."""


def _size(config: Config, role: str, default: Any = 0) -> Any:
    """Return a size under the first name that config.json gives; of a list, the first layer's."""
    found = next((config[name] for name in TABLES["sizes"][role] if config.get(name)), default)
    return found[0] if isinstance(found, list) else found


def planned(family: str, config: Config, defaults: Config) -> Config:
    """Return the fields of `ModelSpec` for a family in `PLANNED`.

    Raises:
        InputError: a size has an unknown value, or config.json has a size that xgpt does not use.
        KeyError: a size is missing.
    """
    read = ReadFields(defaults | config)
    fields = _fields(family, renamed(family, read))
    read.refuse_unread_sizes(family, config)
    return fields


def _fields(family: str, config: Config) -> Config:
    if "num_hidden_layers" not in config and "num_layers" in config:
        config["num_hidden_layers"] = config["num_layers"]
    number, hidden = count(config, "num_hidden_layers"), count(config, "hidden_size")
    mixers, feeds = _mixers(family, config, number), _feeds(family, config, number)
    layers_of: dict[tuple[Any, ...], list[int]] = {}
    for layer in range(number):
        layers_of.setdefault((*mixers[layer], *feeds[layer]), []).append(layer)
    blocks = [
        Block(layers=tuple(layers), attention=attention, recurrent=recurrent, ffn_size=ffn, experts=experts)
        for (attention, recurrent, ffn, experts), layers in layers_of.items()
    ]
    attentions = [block.attention for block in blocks if block.attention is not None]
    if not attentions:
        raise wrong("layer_types", "no attention", "at least one layer must have attention")
    first = attentions[0]
    dense = tuple(layer for layer in range(number) if feeds[layer][1] is None)
    experts = next((block.experts for block in blocks if block.experts is not None), None)
    return {
        "num_layers": number,
        "hidden_size": hidden,
        "num_heads": first.num_heads,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "latent": first.latent,
        "ffn_size": max(max(block.ffn_size for block in blocks), experts.ffn_size if experts else 0, 1),
        "gated_ffn": family not in UNGATED,
        "activation": "silu" if family not in UNGATED else "relu",
        "max_context": _size(config, "max_context", None),
        "tie_embeddings": config.get("tie_word_embeddings", family in TIED),
        "attention_bias": bool(config.get("attention_bias", False)),
        "experts": experts and experts.but(dense_layers=dense),
        "layer_embedding_params": _layer_embeddings(config, number) if family == "gemma4_text" else 0,
        "blocks": tuple(blocks),
    }


def _layer_embeddings(config: Config, number: int) -> int:
    """Return the number of weights in per-layer embeddings (Gemma 4 E2B, E4B)."""
    width = config.get("hidden_size_per_layer_input") or 0
    return int(
        number * width * (config.get("vocab_size_per_layer_input", config["vocab_size"]) + config["hidden_size"])
    )


# Blocks that mix tokens ----------------------------------------------------------------------------------------------


def _mixers(family: str, config: Config, number: int) -> list[tuple[Attention | None, Recurrent | None]]:
    kinds = _layer_types(family, config, number)
    mixers: list[tuple[Attention | None, Recurrent | None]] = []
    if (searched := config.get("block_configs")) is not None:
        return [(_searched_attention(config, block["attention"]), None) for block in searched]
    for layer, kind in enumerate(kinds):
        if kind in ("moe", "mlp"):
            mixers.append((None, None))
        elif kind in RECURRENT:
            mixers.append((None, _recurrent(family, config)))
        else:
            beside = _recurrent(family, config) if kind == "hybrid" and _size(config, "mamba_heads") else None
            mixers.append((_attention(family, config, layer, kind), beside))
    return mixers


def _layer_types(family: str, config: Config, number: int) -> list[str]:
    """Return the kind of each layer's token-mixing block, such as full_attention or linear_attention."""
    given = config.get("layers_block_type") or config.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != number or not all(isinstance(kind, str) for kind in given):
            raise wrong("layer_types", given, f"it must name a kind for each of {number} layers")
        return list(given)
    row, kind, whole = TABLES["interleaved"].get(family, {}), "linear_attention", list[int]()
    if (size := config.get("layer_group_size")) is not None:  # and all layers after the last whole group
        whole = [i for i in range(number) if (i + 1) % size == 0 or i >= number // size * size]
    elif (numbers := config.get("full_attn_layers")) is not None:
        whole = [layer - 1 for layer in numbers]
    else:
        every = config.get("full_attention_interval")
        if every is None:
            kind = row.get("kind", "sliding_attention")
            stated = config.get("sliding_window_pattern", config.get("global_attn_every_n_layers"))
            every = config.get("no_rope_layer_interval") or (row.get("every") if stated is None else stated or None)
        if every is None or not config.get(WINDOWS.get(kind, "num_hidden_layers")):
            return ["full_attention"] * number
        first = row.get("first", every - 1)
        whole = [i for i in range(number) if every and i % every == first]
        if kind == "chunked_attention" and (turned := config.get("no_rope_layers")):
            whole = [i for i in range(number) if not turned[i]]
    return ["full_attention" if i in whole else kind for i in range(number)]


def _attention(family: str, config: Config, layer: int, kind: str) -> Attention:
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    value_dim, has_values, keeps, slides = config.get("v_head_dim") or None, True, True, kind in SLIDING
    window = config.get("attention_chunk_size") if kind == "chunked_attention" else _size(config, "window", None)
    if slides and "swa_num_attention_heads" in config:
        heads, kv_heads = config["swa_num_attention_heads"], config["swa_num_key_value_heads"]
        head_dim, value_dim = config.get("swa_head_dim", head_dim), config.get("swa_v_head_dim", value_dim)
    if (of_layers := config.get("num_attention_heads_per_layer")) is not None:
        heads = of_layers[layer]
    if family == "gemma4_text" and not slides:
        head_dim = config.get("global_head_dim") or 512
        if config.get("attention_k_eq_v"):
            has_values, kv_heads = False, config.get("num_global_key_value_heads") or kv_heads
    if family == "gemma4_text":
        keeps = layer < count(config, "num_hidden_layers") - (config.get("num_kv_shared_layers") or 0)
    latent = indexer = None
    if family == "deepseek_v4":
        return _compressed(config, kind)
    if config.get("kv_lora_rank"):
        rope_dim = config["qk_rope_head_dim"]
        head_dim = count(config, "qk_nope_head_dim") + rope_dim
        latent = LatentAttention(
            kv_rank=count(config, "kv_lora_rank"),
            q_rank=config.get("q_lora_rank"),
            rope_head_dim=rope_dim,
            value_head_dim=count(config, "v_head_dim"),
        )
        kv_heads, value_dim = heads, None
    eight_bit_entry = None
    types = config.get("indexer_types")
    if config.get("index_topk") and family != "deepseek_v4" and kind != "full_attention_without_index":
        indexer = Indexer(
            num_heads=count(config, "index_n_heads"),
            head_dim=count(config, "index_head_dim"),
            top_k=count(config, "index_topk"),
            is_shared=types is not None and types[layer] == "shared",
            pool=config.get("index_kpool") or 1,
        )
        if latent is not None:  # one scale in float32 for each 128 elements, and rotated elements in 16 bits
            eight_bit_entry = latent.kv_rank + latent.kv_rank // 128 * 4 + 2 * latent.rope_head_dim
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        window=window if slides else None,
        latent=latent,
        indexer=indexer,
        eight_bit_entry=eight_bit_entry,
        is_gated=bool(config.get("attn_output_gate", family in TABLES["gated_attention"]))
        or bool(config.get("mla_use_output_gate")),
        has_values=has_values,
        keeps=keeps,
        other_params=_other_weights(family, config, heads),
    )


def _searched_attention(config: Config, block: Config) -> Attention | None:
    """Return a layer's attention in a model from an architecture search (Llama-Nemotron), or None if it has no
    attention.
    """
    if block.get("no_op") or block.get("replace_with_linear"):
        return None
    heads = count(config, "num_attention_heads")
    head_dim = config.get("head_dim") or count(config, "hidden_size") // heads
    kv_heads, window = heads // count(block, "n_heads_in_group"), block.get("window_length")
    return Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window)


def _compressed(config: Config, kind: str) -> Attention:
    """Return DeepSeek-V4's attention. Each token attends to the latest tokens and to compressed entries. One entry
    stands for several earlier tokens.
    """
    hidden, heads, dim = count(config, "hidden_size"), count(config, "num_attention_heads"), count(config, "head_dim")
    rank, groups, out_rank = count(config, "q_lora_rank"), count(config, "o_groups"), count(config, "o_lora_rank")
    rotated = count(config, "qk_rope_head_dim")
    weights = hidden * rank + rank * heads * dim + hidden * dim + heads * dim * out_rank + groups * out_rank * hidden
    compression, indexer = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}.get(kind, 1), None
    if compression == 4:
        index_heads, index_dim = count(config, "index_n_heads"), count(config, "index_head_dim")
        indexer = Indexer(num_heads=index_heads, head_dim=index_dim, top_k=count(config, "index_topk"))
        weights += (4 * dim + 4 * index_dim + index_heads) * hidden + rank * index_heads * index_dim
        weights += compression * 2 * (dim + index_dim)
    elif compression > 1:
        weights += 2 * dim * hidden + compression * dim
    return Attention(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=dim // 2,  # one vector is both key and value
        window=count(config, "sliding_window"),
        indexer=indexer,
        compression=compression,
        eight_bit_entry=dim + rotated + 8,  # a scale of 8 bits for each 64 others, padded to 8 bytes
        weights=weights,
        other_params=_mixed_streams(config),
    )


def _mixed_streams(config: Config) -> int:
    """Return how many weights of a layer mix its residual streams (hyper-connections)."""
    streams = config.get("hc_mult") or 1
    return 2 * (2 + streams) * streams * streams * count(config, "hidden_size") if streams > 1 else 0


def _other_weights(family: str, config: Config, heads: int) -> int:
    """Return the number of further attention weights: gates of heads, relative positions, embeddings of a layer."""
    of_heads = bool(family in TABLES["gated_heads"] and config.get("gating", True)) + (config.get("d_rel") or 0)
    of_layer = 2 * (config.get("hidden_size_per_layer_input") or 0)
    return int(config["hidden_size"] * (heads * of_heads + of_layer)) + _mixed_streams(config)


def _recurrent(family: str, config: Config) -> Recurrent:
    hidden = count(config, "hidden_size")
    if "conv_L_cache" in config:  # LFM2: a gated short convolution
        width = config["conv_L_cache"]
        return Recurrent(
            num_heads=config["num_attention_heads"],
            weights=4 * hidden * hidden + hidden * width,
            state_elements=hidden * width,
            state_bytes=2 * hidden * width,
            launches=10,  # norm, input, gate, copy, three of indices, convolution, gate, output
        )
    if heads := _size(config, "mamba_heads"):
        inner, states = heads * _size(config, "mamba_head_dim"), _size(config, "mamba_states")
        groups, width = _size(config, "mamba_groups", 1), _size(config, "mamba_width", 4)
        mixed = inner + 2 * groups * states
        return Recurrent(
            num_heads=heads,
            weights=hidden * (inner + mixed + heads) + inner * hidden + mixed * width,
            state_elements=inner * states,
            state_bytes=4 * inner * states + 2 * mixed * (width - 1),
            launches=21,  # norm, input, convolution, six of the scan, state, ten of the norm in groups, output
        )
    if family in KDA:
        heads, size = config["linear_num_heads"], config["linear_head_dim"]
        inner, width = heads * size, _size(config, "delta_width", 4)
        whole, narrow = hidden * inner, hidden * size + size * inner
        gates = 2 * whole if family == "bailing_hybrid" else narrow
        gates += 0 if family == "bailing_hybrid" else whole if config.get("linear_gate_is_whole") else narrow
        return Recurrent(
            num_heads=heads,
            weights=4 * hidden * inner + gates + hidden * heads + 3 * inner * width + _mixed_streams(config),
            state_elements=heads * size * size,
            state_bytes=4 * heads * size * size + 2 * 3 * inner * (width - 1),
        )
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = config["linear_num_value_heads"]
    values, width = heads * config["linear_value_head_dim"], config.get("linear_conv_kernel_dim", 4)
    mixed, elements = 2 * keys + values, heads * config["linear_key_head_dim"] * config["linear_value_head_dim"]
    return Recurrent(
        num_heads=heads,
        weights=hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden + mixed * width,
        state_elements=elements,
        state_bytes=4 * elements + 2 * mixed * (width - 1),
    )


# Feed-forward blocks
# -----------------------------------------------------------------------------------------------------


def _feeds(family: str, config: Config, number: int) -> list[tuple[int, Experts | None]]:
    """Return two values for each layer: the width of its dense feed-forward block (0: no such block), and its experts
    or None.
    """
    if (searched := config.get("block_configs")) is not None:
        return [(_searched_width(config, block["ffn"]), None) for block in searched]
    experts, ffn = _experts(family, config), _ffn_size(family, config)
    kinds = config.get("layers_block_type")
    wide_from = number - (config.get("num_kv_shared_layers") or 0 if config.get("use_double_wide_mlp") else 0)
    feeds: list[tuple[int, Experts | None]] = []
    for layer in range(number):
        if kinds is not None and kinds[layer] not in ("moe", "mlp"):
            feeds.append((0, None))
        elif experts is not None and (kinds[layer] == "moe" if kinds else _is_sparse(family, config, layer, number)):
            feeds.append((ffn if family in ("gemma4_text", "longcat_flash") else 0, experts))
        else:
            feeds.append((2 * ffn if layer >= wide_from else ffn, None))
    return feeds


def _searched_width(config: Config, block: Config) -> int:
    if block.get("no_op") or block.get("replace_with_linear"):
        return 0
    if (size := block.get("intermediate_size")) is not None:
        return int(size)
    width = int(2 * block["ffn_mult"] * count(config, "hidden_size") / 3)
    return -(-width // 256) * 256


def _ffn_size(family: str, config: Config) -> int:
    size = int(_size(config, "dense_size"))
    if family.startswith("lfm2") and config.get("block_auto_adjust_ff_dim"):
        width = int(config.get("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        multiple = config.get("block_multiple_of", 256)
        return -(-width // multiple) * multiple
    if family == "granitemoehybrid":
        return int(config["shared_intermediate_size"])
    return size


def _experts(family: str, config: Config) -> Experts | None:
    number = _size(config, "experts")
    if not number or (family == "gemma4_text" and not config.get("enable_moe_block")):
        return None
    size = _size(config, "expert_size") or config["intermediate_size"]
    several = _size(config, "shared_experts")
    if family == "llama4_text":
        shared = size
    elif each := config.get("moe_shared_expert_intermediate_size"):
        shared = int(each) * int(several or 1)
    else:
        shared = _size(config, "shared_size") or size * several
    return Experts(
        number=number,
        active=min(_size(config, "active_experts", 1), number),
        ffn_size=size,
        shared_ffn_size=shared,
        latent_size=_size(config, "latent_size", None),
    )


def _is_sparse(family: str, config: Config, layer: int, number: int) -> bool:
    if (kinds := config.get("mlp_layer_types")) is not None:
        return kinds[layer] != "dense"
    if (layers := config.get("moe_layers")) is not None:
        return layer in layers
    if isinstance(frequency := config.get("moe_layer_freq"), list):
        return bool(frequency[layer])
    if (every := config.get("interleave_moe_layer_step")) is not None:
        return every > 0 and (layer + 1) % every == 0
    if (start := config.get("moe_layer_start_index")) is not None:
        end = config.get("moe_layer_end_index")
        end = number - 1 if end in (None, -1) else end
        return start <= layer <= end and (layer + 1) % config.get("moe_layer_interval", 1) == 0
    if layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % config.get("decoder_sparse_step", 1):
        return False
    return bool(layer >= _size(config, "first_sparse"))


class ReadFields(dict[str, Any]):
    """The fields of a config.json. The object records which of them have been read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return super().get(name, default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return the value of a field. If the field is missing, set it to `default` first."""
        self._read.add(name)
        return super().setdefault(name, default)

    def refuse_unread_sizes(self, family: str, given: Mapping[str, Any]) -> None:
        """Check that all sizes in `given` have been read. Empty values and zeros need not be read.

        Raises:
            InputError: a size has not been read. The message names the field.
        """
        # Sizes of state-space layers are not read if there is no such layer.
        heads = {
            "mamba_": ("mamba_num_heads", "mamba_n_heads"),
            "linear_": ("linear_num_heads", "linear_num_value_heads"),
        }
        absent = tuple(kind for kind, names in heads.items() if not self._read.intersection(names))
        passed = self._read | BOOKKEEPING | TRAINING | SEARCH | COMMON | WITHOUT_EFFECT
        for name, value in given.items():
            if (
                name in passed
                or name.startswith(absent)
                or not SIZE.search(name)
                or isinstance(value, (bool, str, dict))
                or not value
            ):
                continue
            accepted = (
                f"xgpt does not know this size field of {family}; remove it if it affects neither weights nor K/V"
            )
            raise wrong(name, value, accepted)
