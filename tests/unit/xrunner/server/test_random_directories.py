"""Directories of tokenizers drawn at random are read as transformers reads them: token ids, chats, and what stops."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.fakes import byte_tokenizer
from tests.rings import examples
from xgpt.checkpoints.files import read_spec
from xrunner.server.api.text import load_tokenizer

MARKS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<pad>",
    "[X]",
]
TEXTS = [
    "Hello, world",
    " lead  two ",
    "<think>a</think> b<|im_end|>",
    "x </s> y<s>z",
    "é😀\n<tool_call>{}</tool_call>",
    "[X] [X]a[X]",
]
TOOLS = [{"type": "function", "function": {"name": "now", "description": "d", "parameters": {"type": "object"}}}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi <|im_end|>"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " 1 + 1? "},
        {"role": "assistant", "content": "2\n"},
        {"role": "user", "content": "é"},
    ],
]
BEGIN = (
    "{{ bos_token }}",
    "{{- bos_token if bos_token is defined else '' }}",
    "{% if tools %}{{ tools | tojson }}{% endif %}",
    "",
)
LOOP = "{% for m in messages %}"
MESSAGES = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "{%- for m in messages -%}\n  {{ '[' + m['role'] + '] ' + m['content'] | trim + ' ' + (eos_token or '') }}\n"
    "{%- endfor -%}\n",
    LOOP + "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}",
    LOOP
    + "{{ m.role }}: {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}{{ ns.n }}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
)
END = ("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")


def token(rng: random.Random, text: str, *, special: bool) -> AddedToken:
    flags = {name: rng.random() < 0.2 for name in ("single_word", "lstrip", "rstrip")}
    return AddedToken(text, special=special, normalized=rng.random() < 0.2 and not special, **flags)


def metaspace() -> Tokenizer:
    """Pieces with a mark for spaces, and bytes for all else, as in Llama 2."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.ascii_letters, *string.punctuation]
    made = Tokenizer(
        models.BPE({p: n for n, p in enumerate(pieces)}, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def words() -> Tokenizer:
    made = Tokenizer(
        models.WordPiece(
            {w: n for n, w in enumerate(["[UNK]", *string.printable, *(f"##{c}" for c in string.printable)])},
            unk_token="[UNK]",
        )
    )
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def draw_tokenizer(rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Return tokenizer.json, and the marks that it knows."""
    made = rng.choice([byte_tokenizer, byte_tokenizer, metaspace, words])()
    known = rng.sample(MARKS, rng.randint(1, len(MARKS)))
    for text in known:
        special = rng.random() < 0.6
        (made.add_special_tokens if special else made.add_tokens)([token(rng, text, special=special)])
    if rng.random() < 0.4:
        mark = rng.choice(known)
        around = rng.choice([f"{mark} $A", f"$A {mark}", f"{mark} $A {mark}"])
        made.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[(mark, made.token_to_id(mark))]
        )
    written = json.loads(made.to_str())
    if rng.random() < 0.3:
        written["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    if rng.random() < 0.3:
        padding = {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
        written["padding"] = padding | {"strategy": {"Fixed": 64}, "direction": rng.choice(["Left", "Right"])}
    return written, known


def entry(rng: random.Random, text: str, *, special: bool) -> dict[str, Any]:
    made = token(rng, text, special=special)
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(made, name) for name in names}


def draw_settings(rng: random.Random, tokenizer: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """Return tokenizer_config.json without its templates."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if rng.random() < 0.5:
            text = rng.choice(MARKS if rng.random() < 0.5 else known)
            as_object = entry(rng, text, special=True) | {"__type": "AddedToken"}
            settings[name] = rng.choice([text, as_object, None])
    for name in ("add_bos_token", "add_eos_token"):
        if rng.random() < 0.3:
            settings[name] = rng.choice([True, False])
    if rng.random() < 0.4:
        added = {str(each["id"]): {k: v for k, v in each.items() if k != "id"} for each in tokenizer["added_tokens"]}
        last = max((each["id"] for each in tokenizer["added_tokens"]), default=0)
        missing = [text for text in MARKS if text not in known]
        for number, text in enumerate(rng.sample(missing, min(2, len(missing))), last + 1):
            added[str(number)] = entry(rng, text, special=rng.random() < 0.5)
        settings["added_tokens_decoder"] = added
    if rng.random() < 0.4:
        extra = rng.sample(MARKS, 2)
        name = rng.choice(["additional_special_tokens", "extra_special_tokens"])
        as_list = name == "additional_special_tokens" or rng.random() < 0.5
        settings[name] = extra if as_list else {"mark_token": extra[0]}
    if rng.random() < 0.3:
        settings["model_max_length"] = rng.choice([8, 10**30])
    if rng.random() < 0.3:
        settings["clean_up_tokenization_spaces"] = rng.choice([True, False])
    return settings


def draw_template(rng: random.Random) -> str:
    return rng.choice(BEGIN) + rng.choice(MESSAGES) + rng.choice(END)


def write_templates(rng: random.Random, directory: Path, settings: dict[str, Any]) -> None:
    """Put templates in the settings, in files of their own, or in both."""
    if rng.random() < 0.6:
        settings["chat_template"] = draw_template(rng)
        if rng.random() < 0.4:
            names = ["default", *rng.sample(["tool_use", "rag"], rng.randint(0, 2))]
            settings["chat_template"] = [{"name": name, "template": draw_template(rng)} for name in names]
    if rng.random() < 0.4:
        (directory / "chat_template.jinja").write_text(draw_template(rng))
        if rng.random() < 0.5:
            (directory / "additional_chat_templates").mkdir()
            (directory / "additional_chat_templates" / "tool_use.jinja").write_text(draw_template(rng))


def write_directory(rng: random.Random, directory: Path) -> Path:
    tokenizer, known = draw_tokenizer(rng)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = draw_settings(rng, tokenizer, known)
    write_templates(rng, directory, settings)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [2, [2], [2, 7], [9], None]
    config = {"model_type": "opt", "vocab_size": 600, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "word_embed_proj_dim": 16, "max_position_embeddings": 64}
    config |= {"eos_token_id": rng.choice(ends), "bos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["OPTForCausalLM"]}))
    if rng.random() < 0.6:
        generation: dict[str, Any] = {"temperature": 0.5, "do_sample": True}
        if rng.random() < 0.7:
            generation["eos_token_id"] = rng.choice(ends)
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def stops(directory: Path, end: int | None) -> set[int]:
    """Return the tokens that stop an output by transformers: those of generation, and the tokenizer's own."""
    from transformers import AutoConfig, GenerationConfig

    if (directory / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(directory).eos_token_id
    else:
        found = GenerationConfig.from_model_config(AutoConfig.from_pretrained(directory)).eos_token_id
    given = found if isinstance(found, list) else [found]
    return {token for token in (*given, end) if token is not None}


def rendered(render: Callable[[], str]) -> str | None:
    """Return a prompt; None: the template refuses the chat."""
    try:
        return render()
    except Exception:
        return None


def differences(directory: Path) -> list[str]:
    """Return what of a directory is read in another way than by transformers."""
    from transformers import AutoTokenizer

    right, codec = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    assert codec is not None
    found = []
    for text in TEXTS:
        for special in (True, False):
            expected = right(text, add_special_tokens=special, truncation=False, padding=False)["input_ids"]
            if (ids := codec.encode(text, add_special_tokens=special)) != expected:
                found.append(f"ids of {text!r}, {special=}: {ids}, not {expected}")
    spec = read_spec(directory)
    ends = {*spec.eos_token_ids, *(() if codec.eos_token_id is None else (codec.eos_token_id,))}
    if ends != (expected_ends := stops(directory, right.eos_token_id)):
        found.append(f"stops: {ends}, not {expected_ends}")
    if (right.chat_template is None) != (codec.chat_template is None):
        return [*found, f"template: {codec.chat_template}, not {right.chat_template}"]
    template = codec.chat_template
    for chat in CHATS if template is not None else ():
        for tools in (None, TOOLS):
            source = right.get_chat_template(tools=tools)
            in_parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in chat]
            given = in_parts if "m.content %}" in source else chat
            wanted = rendered(
                lambda given=given, tools=tools: right.apply_chat_template(
                    given, tools=tools, add_generation_prompt=True, tokenize=False
                )
            )
            variables = {"tools": tools} if tools else {}
            text = rendered(lambda chat=chat, variables=variables: template.render(chat, variables=variables))
            if text != wanted:
                found.append(f"chat, tools={bool(tools)}: {text!r}, not {wanted!r}")
            elif (
                text is not None
                and codec.encode(text, add_special_tokens=False) != right(text, add_special_tokens=False)["input_ids"]
            ):
                found.append(f"ids of chat {text!r}")
    return found


@pytest.mark.parametrize("seed", range(examples(120, 12)))
def test_a_random_directory_is_read_as_transformers_reads_it(seed: int, tmp_path: Path) -> None:
    assert differences(write_directory(random.Random(seed), tmp_path)) == []
