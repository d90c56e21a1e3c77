"""Calls in an output's text, and the grammar that a free output keeps to."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.attack.target import save_checkpoint
from xrunner.generation import NO_TOKEN, SamplingParams, Token
from xrunner.grammar import Grammars, json_grammar
from xrunner.sampling import Sampler
from xrunner.server.api.choices import Choice
from xrunner.server.api.form import OutputForm
from xrunner.server.api.formats import call_formats
from xrunner.server.api.parsing import parse_chat
from xrunner.server.api.response_tools import CallItems, Declared, ResponseTool
from xrunner.server.api.tools import Tool
from xrunner.server.api.writers import ChatWriter

PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
TOOLS = msgspec.convert([{"type": "function", "function": {"name": "weather", "parameters": PLACE}}], list[Tool])
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place":"Rome"}}\n</tool_call>'


def test_one_that_must_call_keeps_to_the_key_of_its_format() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": "required"}
    for family, key in (("Hermes", "arguments"), ("Llama 3.1 and later", "parameters")):
        request = parse_chat(json.dumps(body).encode())
        request.form = OutputForm(call_formats()[family])
        assert request.grammar is not None and key in request.grammar


@pytest.mark.parametrize(("parallel", "num"), [(False, 1), (True, 2), (None, 2)])
def test_calls_come_alone_where_they_may_not_be_parallel(parallel: bool | None, num: int) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "tools": tools,
        "parallel_tool_calls": parallel,
    }
    writer = ChatWriter("m", 0, include_usage=False, continuous=False)
    choice = Choice(0, parse_chat(json.dumps(body).encode()), None, frozenset(), writer.new_logprobs)
    assert choice._reader is not None
    choice._reader.push(f"{CALL}\n{CALL}")
    pieces = choice.push(Token(0, 2, "stop")).calls
    assert (
        [piece.name for piece in pieces if piece.name] == ["weather"] * num == [c.function.name for c in choice.calls]
    )


def test_half_a_character_in_a_custom_tools_input_stays_escaped() -> None:
    calls = CallItems([Declared(None, ResponseTool("custom", "f"))])
    item = calls.item("a", "b", "f", '{"input": "\\ud800"}', "completed")
    assert msgspec.json.encode(item) and item["input"] == '{"input": "\\ud800"}'


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_a_schema_refers_to_lies_in_it(tmp_path: Path, choice: str) -> None:
    """As SDKs write schemas: with definitions, and with references to the whole of it."""
    checkpoint = save_checkpoint(tmp_path / "small")
    grammars = Grammars(checkpoint / "tokenizer.json", 2048, {2})
    schema = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/To"}, "then": {"$ref": "#"}},
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"To": {"enum": ["Rome"]}},
    }
    function = {"name": "go", "parameters": schema, "strict": True}
    tools = msgspec.convert([{"type": "function", "function": function}], list[Tool])
    grammar = OutputForm().grammar([*tools, *TOOLS], choice)  # type: ignore[arg-type]
    assert grammar is not None and grammars.why_not(grammar) is None
    opening, end = ("<tool_call>\n", "\n</tool_call>") if choice == "auto" else ("", "")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]

    def ends(arguments: str) -> bool:
        text = f'{opening}{{"name": "go", "arguments": {arguments}}}{end}'
        allowed = grammars.state(grammar, [tokenizer[{"\n": "Ċ", " ": "Ġ"}.get(c, c)] for c in text]).allowed()
        return allowed is not None and bool(allowed[2])

    assert ends('{"to":"Rome"}') and ends('{"to":"Rome","then":{"to":"Rome"}}')
    assert not ends('{"to":"Rome","then":{"name":"go"}}')


def test_a_token_that_ends_an_output_ends_none_in_the_middle(tmp_path: Path) -> None:
    """Though the tokenizer has text for it, as here for token 2: the output would be taken for complete."""
    checkpoint = save_checkpoint(tmp_path / "small")
    grammars = Grammars(checkpoint / "tokenizer.json", 2048, {2})
    vocab = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    assert 2 in vocab.values()
    for text, may_end in (('{"a":"x', False), ('{"a":"x"}', True)):
        grammar = json_grammar(
            {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
        )
        allowed = grammars.state(grammar, [vocab[character] for character in text]).allowed()
        assert allowed is not None and allowed[2] == may_end


def test_a_schema_that_no_output_keeps_is_refused(tmp_path: Path) -> None:
    grammars = Grammars(save_checkpoint(tmp_path / "small") / "tokenizer.json", 2048, {2})
    assert "no output" in (grammars.why_not(json_grammar({"$ref": "#"})) or "")


def test_an_output_that_cannot_be_followed_fails_alone(tmp_path: Path) -> None:
    """Ended as if it were complete, it would be taken for what it was to be."""
    grammars = Grammars(save_checkpoint(tmp_path / "small") / "tokenizer.json", 2048, {2})
    wide = json_grammar({"type": "object", "properties": {f"p{number}": {} for number in range(1500)}})
    assert grammars.why_not(wide) is None
    sampler = Sampler(2048, torch.device("cpu"), grammars)
    sampler.start(0, SamplingParams(temperature=0, grammar=wide))
    sampler.start(1, SamplingParams(temperature=0, grammar=OutputForm().grammar(TOOLS, "required")))
    logits, rows = torch.zeros(2, 2048), np.arange(2)
    for position in range(3):
        tokens, _ = sampler(logits, rows, np.full(2, position, dtype=np.int32))
    assert tokens[0] == NO_TOKEN and "smaller" in sampler.failed[0]
    assert tokens[1] != NO_TOKEN and 1 not in sampler.failed


@pytest.fixture(scope="module")
def many_tokens(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """The grammars of 20,000 tokens of several letters each, as usual tokenizers have them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    drawn = np.random.default_rng(0).choice(list("etaoinshrdlucmfw 0123456789".replace(" ", "\u0120")), (20_000, 6))
    tokens = dict.fromkeys([*letters, *("".join(row[: 2 + number % 5]) for number, row in enumerate(drawn))])
    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path := tmp_path_factory.mktemp("many") / "tokenizer.json"))
    return Grammars(path, len(tokens) + 1, [len(tokens)])


def followed(grammars: Grammars, schema: dict[str, object], most: int) -> int:
    """Return the number of tokens, drawn among those that are allowed, after which a schema is too large to follow."""
    state, rng = grammars.state(json_grammar(schema)), np.random.default_rng(1)
    for number in range(most):
        if (allowed := state.allowed()) is None:
            return number
        state.take(int(rng.choice(np.flatnonzero(allowed))))
    return most


@pytest.mark.long
def test_a_pattern_that_takes_long_at_each_token_ends_its_own_output(many_tokens: Grammars) -> None:
    """In each of 64 outputs it took 8 ms of every step, and memory for 250,000 states until all had ended."""
    ways = [{"type": "string", "pattern": f"^(.)*{number}.{{300}}$"} for number in range(60)]
    assert followed(many_tokens, {"anyOf": ways}, 25) < 25
    assert followed(many_tokens, {"type": "string", "pattern": "^(.)*[ae].{60}$"}, 800) < 800


def test_a_long_text_without_a_choice_takes_no_time_at_each_token(many_tokens: Grammars) -> None:
    """All of the rest was followed at each token: 9 ms of every step for each of up to 128 outputs."""
    begin_s = time.thread_time()
    assert followed(many_tokens, {"const": "x" * 60_000}, 20) == 20
    assert time.thread_time() - begin_s < 0.1


def test_usual_patterns_and_many_properties_do_not(many_tokens: Grammars) -> None:
    uuid = {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"}
    fields = {"a": uuid, "b": {"type": "array", "items": uuid}, "c": {"type": "string", "maxLength": 200}}
    fields |= {"d": {"type": "string", "format": "date-time"}, "e": {"type": "string", "format": "uri"}}
    assert followed(many_tokens, {"type": "object", "properties": fields, "required": [*fields]}, 150) == 150
    assert (
        followed(many_tokens, {"type": "object", "properties": dict.fromkeys(map(str, range(300)), uuid)}, 150) == 150
    )
    assert followed(many_tokens, {"enum": [f"value number {number}" for number in range(2500)]}, 10) == 10


def test_nothing_is_kept_of_a_schema_that_is_too_long(many_tokens: Grammars) -> None:
    """The answers to 64 of them were remembered with their text, which may be more than a mebibyte each."""
    tracemalloc.start()
    try:
        for number in range(20):
            reason = many_tokens.why_not(json_grammar({"enum": [f"{number} " + "x" * (1 << 20)]}))
            assert reason is not None and reason.startswith("it is longer than")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4 << 20
