"""The served model's properties that requests are checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xgpt.schema import ModelSpec
from xrunner.grammar import Grammars
from xrunner.server.api.text import TextCodec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What an endpoint says of its model, and what it reads and writes text with.

    Attributes:
        name: what requests must ask for.
        codec: None: prompts are token ids only, and answers carry no text.
        eos_token_ids: tokens that end an output.
        grammars: what outputs can keep to; None: there is no tokenizer, or the engine knows none.
        sampling_defaults: of fields that a request leaves out (`checkpoint.sampling_defaults`).
    """

    name: str
    spec: ModelSpec
    codec: TextCodec | None = None
    eos_token_ids: frozenset[int] = frozenset()
    grammars: Grammars | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
