"""Directories of checkpoints are read as transformers reads them: tokens, prompts of chats, end tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from tests.fakes import byte_tokenizer
from xrunner.server.api.chat import ChatTemplate
from xrunner.server.api.text import load_tokenizer

TEXTS = ["<think>a</think>", "x <|end|> y", " lead  two", "<call>{}</call>", "é😀", "word " * 60 + "LAST"]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
WITH_TOOLS = "{{ tools | tojson }}" + PLAIN
TOOLS = [{"type": "function", "function": {"name": "now", "description": "d", "parameters": {"type": "object"}}}]


def tokenizer(*, special: tuple[str, ...] = ("<|end|>",), added: tuple[str, ...] = ("<call>", "</call>")) -> Tokenizer:
    built = byte_tokenizer()
    built.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    built.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return built


def surrounded(built: Tokenizer) -> Tokenizer:
    end = built.token_to_id("<|end|>")
    built.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    return built


def entry(text: str, *, special: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False} | {
        "special": special
    }


TRUNCATION = {"direction": "Right", "max_length": 32, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
LISTED = {"261": entry("<think>", special=False), "262": entry("</think>", special=False)}
AS_OBJECT = entry("<|end|>", special=True) | {"__type": "AddedToken"}
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]

KINDS: dict[str, tuple[Tokenizer, dict[str, Any], dict[str, Any]]] = {
    "plain": (tokenizer(), {}, {"eos_token": "<|end|>", "chat_template": PLAIN}),
    "truncation": (tokenizer(), {"truncation": TRUNCATION}, {}),
    "padding": (tokenizer(), {"padding": PADDING | {"pad_token": "!"}}, {}),
    "tokens of the settings only": (tokenizer(), {}, {"added_tokens_decoder": LISTED}),
    "special tokens of the settings only": (tokenizer(added=()), {}, {"eos_token": "</s>", "pad_token": "<pad>"}),
    "an end token of a plain text": (tokenizer(special=()), {}, {"eos_token": "<|end|>"}),
    "an end token as an object": (tokenizer(), {}, {"eos_token": AS_OBJECT}),
    "further special tokens": (tokenizer(), {}, {"additional_special_tokens": ["<think>", "</think>"]}),
    "surrounded": (surrounded(tokenizer()), {}, {"bos_token": "<|end|>"}),
    "surrounded, and told not to be": (surrounded(tokenizer()), {}, {"bos_token": "<|end|>", "add_bos_token": False}),
    "told to be surrounded": (tokenizer(), {}, {"bos_token": "<|end|>", "add_bos_token": True}),
    "named templates": (tokenizer(), {}, {"eos_token": "<|end|>", "chat_template": NAMED}),
}


def write(directory: Path, kind: str) -> Path:
    built, sections, settings = KINDS[kind]
    (directory / "tokenizer.json").write_text(json.dumps(json.loads(built.to_str()) | sections))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_autotokenizer(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = write(tmp_path, kind)
    right, codec = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    assert codec is not None
    for text in TEXTS:
        for special in (True, False):
            # transformers cuts and pads only if it is asked to.
            expected = right(text, add_special_tokens=special, truncation=False, padding=False)["input_ids"]
            assert codec.encode(text, add_special_tokens=special) == expected
    assert codec.eos_token_id == right.eos_token_id


@pytest.mark.parametrize("where", ["settings", "files"])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chats_with_functions_take_the_template_for_them(where: str, tools: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = write(tmp_path, "named templates" if where == "settings" else "plain")
    if where == "files":
        (directory / "chat_template.jinja").write_text(PLAIN)
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    messages = [{"role": "user", "content": "hi"}]
    right = AutoTokenizer.from_pretrained(directory)
    codec = load_tokenizer(directory)
    assert codec is not None and codec.chat_template is not None
    expected = right.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert codec.chat_template.render(messages, variables={"tools": tools} if tools else {}) == expected


PARTS = """{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}
{%- endif %}{% endfor %}{% endfor %}"""


def test_a_template_that_loops_over_parts_gets_parts() -> None:
    template = ChatTemplate(PARTS)
    assert template.render([{"role": "user", "content": "ping"}]) == "[user]ping"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "[user]ab"
    assert ChatTemplate(PLAIN).render([{"role": "user", "content": parts}]) == "[user]a\nb[a]"


CHATML = """{% for m in messages %}{% if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}{% endif %}
{%- endfor %}"""


def test_a_developers_instruction_reaches_the_model() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert ChatTemplate(CHATML).render(messages) == "<system>Be brief.<user>hi"
    assert ChatTemplate(PLAIN).render(messages) == "[developer]Be brief.[user]hi[a]"


STRICT = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}
{%- endfor %}"""


def said(*messages: str) -> list[dict[str, str]]:
    """Messages, each written as "role text"."""
    return [dict(zip(("role", "content"), each.split(" ", 1), strict=True)) for each in messages]


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        # What Codex sends: instructions, then a developer's message; and one that comes later.
        (("system a", "developer b", "user c"), "<system>a\n\nb<user>c"),
        (("system a", "user b", "developer c", "user d"), "<system>a<user>b\n\nc<user>d"),
        # What Claude Code sends: reminders after the user's message or after the result of a tool.
        (("system a", "user b", "assistant c", "user d", "system e"), "<system>a<user>b<assistant>c<user>d\n\ne"),
        (("user a", "assistant b", "tool c", "system d"), "<user>a<assistant>b<tool>c<user>d"),
        (("user a", "assistant b", "system c", "user d"), "<user>a<assistant>b<user>c\n\nd"),
        (("system a", "user b"), "<system>a<user>b"),
    ],
)
def test_system_messages_anywhere_reach_a_template_that_takes_one_at_the_beginning(
    messages: tuple[str, ...], shown: str
) -> None:
    assert ChatTemplate(STRICT).render(said(*messages)) == shown


def test_a_template_that_takes_system_messages_anywhere_gets_them_as_they_are() -> None:
    messages = said("system a", "system b", "user c", "system d")
    assert ChatTemplate(PLAIN).render(messages, add_generation_prompt=False) == "[system]a[system]b[user]c[system]d"


NAMING = """{% for m in messages %}{% if m.role in ('user', 'environment', 'tools') %}<{{ m.role }}>{{ m.content }}
{%- endif %}{% endfor %}"""


def test_roles_that_the_template_shows_are_accepted() -> None:
    messages = [*said("environment 20 degrees", "user hi")]
    assert ChatTemplate(NAMING).render(messages) == "<environment>20 degrees<user>hi"
    assert ChatTemplate(PLAIN).render(messages) == "[environment]20 degrees[user]hi[a]"
    assert ChatTemplate(NAMING).render(said("tools a")) == "<tools>a"


@pytest.mark.parametrize(
    ("source", "role", "says"),
    [
        (NAMING, "critic", "has no messages of the role 'critic'"),
        (CHATML, "environment", "has no messages of the role 'environment'"),
        (PLAIN, "asistant", "did you mean assistant?"),
        (PLAIN, "x" * 65, "has no messages of the role"),
    ],
)
def test_a_message_that_the_model_would_not_see_is_refused(source: str, role: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        ChatTemplate(source).render(said(f"{role} a", "user hi"))


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The"}]
    assert ChatTemplate(PLAIN).render(messages, continue_final_message=True) == "[user]hi[assistant]The"
    with pytest.raises(ValueError, match="cannot be continued"):
        ChatTemplate(CHATML).render(messages, continue_final_message=True)
