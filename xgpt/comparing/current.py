"""Define the settings of a current deployment, in the same form for all engines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xgpt.comparing.flags import VARIABLE, Given, count, tables, value_of
from xgpt.core.documents import read_json
from xgpt.core.errors import InputError
from xgpt.core.schema import DType, EngineSpec
from xgpt.core.schema.speculation import MOST_AHEAD, SpeculativeMethod
from xgpt.requests import PlanRequest


@dataclass(frozen=True)
class CurrentEngine:
    """The settings of a current deployment.

    Attributes:
        num_stages: number of pipeline stages of a replica. Each stage has `tp_degree` devices.
        ep_degree: number of devices among which a layer's experts are divided. The devices may belong to several
            replicas.
        max_num_seqs: largest number of requests in a step.
        max_num_batched_tokens: largest number of tokens in a step.
        usable_memory: share of a device's memory that the engine uses. None means the default of the engine's version.
        max_model_len: length in tokens of the longest request that the engine accepts. None means the model's context.
        shortens: whether the engine lowers `max_model_len` to what fits into K/V memory.
        dtype: data type in which the engine runs. None means the data type in the model's config.
        kv_dtype: data type of K/V. None means `dtype`.
        framework: name of the engine, as in configs/engines.
        version: the engine's version, from the image's tag, or None if not known.
        cuts_prompts: whether a step may prefill a chunk of a prompt.
        drops_windows: whether the engine frees keys and values that have left a layer's attention window.
        text_only: whether the engine leaves out the model's encoders of images and sound.
        kept: options of the command that a plan's command repeats.
        state_copies: number of states that a request takes in each recurrent layer. None means the engine's default.
        schedules_ahead: whether the engine schedules a step while the previous step runs. None means the engine's
            default.
        mixes: whether a step may both encode and decode. None means the engine's default.
        caches_prompts: whether the engine keeps K/V of prompts for later requests. None means that xgpt does not know.
        command: what starts the engine, with its variables, whatever launches it (a container, a pod).
        published: the host's port under which a container publishes the engine's, or None.
    """

    tp_degree: int
    num_stages: int
    replicas: int
    ep_degree: int
    max_num_seqs: int
    max_num_batched_tokens: int
    usable_memory: float | None = None
    max_model_len: int | None = None
    shortens: bool = False
    dtype: DType | None = None
    kv_dtype: DType | None = None
    quantization: str | None = None
    notes: tuple[str, ...] = ()
    framework: str = "vllm"
    version: str | None = None
    model: str | None = None
    cuts_prompts: bool = True
    drops_windows: bool = True
    text_only: bool = False
    state_copies: int | None = None
    schedules_ahead: bool | None = None
    mixes: bool | None = None
    caches_prompts: bool | None = None
    api_servers: int | None = None
    drafts: Drafts | None = None
    kept: Given = field(default_factory=dict, compare=False)
    command: str = field(default="", compare=False)
    published: int | None = field(default=None, compare=False)

    @property
    def num_devices(self) -> int:
        return self.tp_degree * self.num_stages * self.replicas

    def step_tokens(self, context: int) -> int:
        """Return the largest number of tokens in a step. If prompts are not chunked, this is at least the longest
        request.
        """
        longest = 0 if self.cuts_prompts else self.max_model_len or context
        return max(self.max_num_batched_tokens, longest)

    def as_started(self, engine: EngineSpec) -> EngineSpec:
        """Return the engine with the settings that the deployment's command sets."""
        changes: dict[str, Any] = {}
        if self.schedules_ahead is not None:
            changes["schedules_ahead"] = self.schedules_ahead
        if self.mixes is not None:
            changes["mixes"] = self.mixes
        if not self.drops_windows:
            changes["drops_windows"] = False
        sources = engine.sources
        if self.state_copies not in (None, engine.state_copies):
            sources = sources | {"state_copies": "the command's way to keep states of prefixes"}
            changes |= {"state_copies": self.state_copies, "sources": sources}
        if not self.cuts_prompts:
            sources = sources | {"cuts_prompts": "--no-enable-chunked-prefill"}
            changes |= {"cuts_prompts": False, "sources": sources}
        return engine.but(**changes)


def is_model(served: str, name: str) -> bool:
    """Return whether the model `served` may be the model `name`: whether `served` contains all words and numbers of
    `name`.
    """
    parts = set(re.findall(r"[a-z]+|[\d.]+[bmk]?", name.lower().rpartition("/")[2]))
    return parts <= set(re.findall(r"[a-z]+|[\d.]+[bmk]?", served.lower().rpartition("/")[2]))


def check_model(current: CurrentEngine, name: str) -> None:
    """Check that a command names the model of the plans, if it names a model by its Hub id.

    Raises:
        InputError: the command names another model. (A path, or a name without an owner, may be any model.)
    """
    served = current.model or ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", served) and not is_model(served, name):
        raise InputError("current", served, f"the plans are for {name}: give `model={served}` and its `config`")


ASSUMED: dict[SpeculativeMethod, float] = {"mtp": 0.8, "eagle": 0.6, "eagle3": 0.6}
"""Assumed probability that a draft token is accepted if all earlier ones are. mtp: DeepSeek-V3 reports 85 to 90% for
the second token (arXiv 2412.19437 sec. 5.4.3). eagle: 0.59 to 0.66 with 2 to 7 draft tokens for Llama-3.1-8B in vLLM
(github vllm-project/vllm issue 20780), and 0.53 to 0.7 with 2 draft tokens of EAGLE-3 for Qwen3 (github
Tencent/AngelSlim).
"""
WITHOUT = "leave drafts out to compare the command without them"


class Drafts(NamedTuple):
    """An engine's speculative decoding: the method, the number of draft tokens in a step, and the draft's checkpoint
    (None: the draft needs no separate checkpoint).
    """

    method: SpeculativeMethod
    tokens: int
    model: str | None = None


def vllm_drafts(given: Given, model: str | None) -> Drafts | None:
    """Return the settings of speculative decoding in a `vllm serve` command, or None if the command uses no drafts.

    Raises:
        InputError: the flags cannot be read, or xgpt does not score drafts of this kind.
    """
    parts = _parts(given)
    if not parts:
        return None
    draft, named = parts.get("model"), str(parts.get("method", ""))
    if not named:  # vLLM then derives the method from the draft
        named = "mtp" if draft == model else next((each for each in ("eagle3", "eagle") if each in str(draft)), "")
    known = tables()["drafts"]
    method: SpeculativeMethod | None = known["methods"].get("mtp" if named.endswith("_mtp") else named)
    field = "current: --speculative-config"
    if method is None:
        raise InputError(field, named or draft, f"xgpt scores only {', '.join(known['methods'])}; {WITHOUT}")
    if other := sorted(set(parts).difference(known["neutral"])):
        says = "xgpt does not score its effect on drafts; leave it out to compare the command without it"
        raise InputError(field, other[0], says)
    if "num_speculative_tokens" not in parts and method != "mtp":
        raise InputError(field, named, "give num_speculative_tokens, which vLLM requires")
    try:
        tokens = count(str(parts.get("num_speculative_tokens", 1)))
    except ValueError as error:
        raise InputError(field, parts["num_speculative_tokens"], f"num_speculative_tokens: {error}") from None
    return _drafts(field, method, tokens, None if method in ("mtp", "ngram") else draft)


def _parts(given: Given) -> dict[str, Any]:
    text = given.get("speculative-config")
    try:
        parts = {} if text is None else read_json(text)
    except ValueError:
        parts = None
    if not isinstance(parts, dict):
        said = VARIABLE if "$" in (text or "") else "write a JSON object"
        raise InputError("current: --speculative-config", text, said)
    return parts | {part: given[flag] for flag, part in tables()["drafts"]["flags"].items() if flag in given}


def sglang_drafts(given: Given) -> Drafts | None:
    """Return the settings of speculative decoding in an SGLang command, or None if the command uses no drafts.

    Raises:
        InputError: xgpt does not score drafts of this kind, or the drafts have branches.
    """
    algorithm = given.get("speculative-algorithm")
    if algorithm is None:
        return None
    draft, field = given.get("speculative-draft-model-path"), "current: --speculative-algorithm"
    # Without a draft model, the model's layer for multi-token prediction makes the drafts.
    known: dict[str, SpeculativeMethod] = {"NEXTN": "mtp", "EAGLE": "eagle" if draft else "mtp", "EAGLE3": "eagle3"}
    if algorithm not in known:
        raise InputError(field, algorithm, f"xgpt scores only {', '.join(known)}; {WITHOUT}")
    steps = value_of(given, "speculative-num-steps", count, None)
    if steps is None or given.get("speculative-eagle-topk") != "1":
        flags = "--speculative-num-steps and --speculative-eagle-topk 1"
        raise InputError(field, algorithm, f"xgpt scores only drafts without branches: give {flags}")
    return _drafts(field, known[algorithm], steps, draft)


def _drafts(field: str, method: SpeculativeMethod, tokens: int, draft: str | None) -> Drafts:
    if tokens > MOST_AHEAD:
        raise InputError(field, tokens, f"xgpt scores at most {MOST_AHEAD} draft tokens")
    return Drafts(method, tokens, draft)


def planned_with(request: PlanRequest, drafts: Drafts) -> tuple[PlanRequest, str]:
    """Return the request with the command's draft added, and a line of text about the draft's acceptance.

    Raises:
        InputError: the request names another draft, or the acceptance of the draft is not known.
    """
    if request.speculative not in (None, drafts.method):
        accepted = f"plans must use the draft of the command: give {drafts.method}, or leave it out"
        raise InputError("speculative", request.speculative, accepted)
    acceptance: Any = request.acceptance
    said = f"given acceptance {acceptance}"
    if acceptance is None:
        acceptance = ASSUMED.get(drafts.method)
        if acceptance is None:
            accepted = "it depends on the text: give the shares of accepted draft tokens, or a server's metrics page"
            raise InputError("acceptance", None, accepted)
        said = f"assumed acceptance {acceptance:g}: give `acceptance`, if you know it"
    note = f"the command and the plans use {drafts.method} with {drafts.tokens} draft tokens a step; {said}"
    drafting = {"speculative": drafts.method, "speculative_tokens": drafts.tokens, "draft_model": drafts.model}
    return request.but(**drafting, acceptance=acceptance), note
