"""Fields of config.json, changed one by one: logits are those of `transformers`, or the checkpoint is refused."""

import json

import numpy as np
import pytest
import torch

from tests.numerics.checkpoints import FAMILIES, VOCABULARY, WITH_EXPERTS
from tests.numerics.steps import start
from tests.numerics.test_families import step_logits
from tests.numerics.test_weights import copy_with
from tests.rings import ALL
from xgpt.checkpoints import fields as config_fields
from xgpt.checkpoints.files import read_spec
from xgpt.core.errors import InputError
from xgpt.core.policies import Chunk, Step
from xrunner.build import WorkerSettings, build_worker
from xrunner.generation import Generation

PROMPT = tuple(np.random.default_rng(5).integers(0, VOCABULARY, 40).tolist())
NUM_DECODES = 3
UNREAD = config_fields.BOOKKEEPING | config_fields.TRAINING | config_fields.SEARCH
VALUES = (True, False, 0, 1, 3, 0.5, None, "gelu", "gelu_new", "silu", "gated-silu", [], {}, ["sliding_attention"] * 2)
OF_FIELDS = {
    "rope_scaling": [
        {"rope_type": "default", "rope_theta": 77.0},
        {"type": "default"},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    "sliding_window": [8],
    "rope_theta": [77.0],
    "partial_rotary_factor": [0.5, 1.0],
    "layer_types": [["full_attention"] * 2],
}
OF_FIELDS["rope_parameters"] = OF_FIELDS["rope_scaling"]
SHORT = {
    ("llama", "rope_scaling"),
    ("qwen2", "use_sliding_window"),
    ("t5", "tie_word_embeddings"),
    ("gpt2", "hidden_size"),
    ("opt", "activation_function"),
    ("deepseek_v3", "topk_group"),
    ("gemma2", "query_pre_attn_scalar"),
    ("gemma3_text", "rope_parameters"),
    ("phi3", "partial_rotary_factor"),
    ("mixtral", "sliding_window"),
    ("qwen3_moe", "norm_topk_prob"),
}


def fields_of(family):
    """All that the tables know, what the class of `transformers` knows, and one that nothing knows."""
    import transformers

    family_fields = config_fields.FIELDS[family]
    known = (
        family_fields.read
        | family_fields.without_effect
        | family_fields.only.keys()
        | family_fields.aliases.keys()
        | config_fields.COMMON
        | UNREAD
    )
    config_class = transformers.CONFIG_MAPPING[family]
    theirs = config_class().to_dict().keys() | config_class.attribute_map.keys()
    return sorted((known | config_fields.NOTHING.keys() | theirs | {"embedding_multiplier"}) - {"model_type"})


def own_logits(directory):
    """Of the end of the prompt and of decodes behind it; None: it is refused. # [1 + decodes, vocab]"""
    try:
        worker = build_worker(
            WorkerSettings(
                spec=read_spec(directory), dtype="float32", checkpoint=directory, num_blocks=16, block_size=8
            )
        )
    except InputError:
        return None
    if worker.model.spec.max_context < len(PROMPT) + NUM_DECODES + 1:
        return None
    start(worker, [Generation(0, PROMPT, NUM_DECODES + 1)])
    records = []
    step_logits(worker, Step((Chunk(0, 0, len(PROMPT)),), ()), records)
    for _ in range(NUM_DECODES):
        step_logits(worker, Step((), (0,)), records)
    return torch.cat(records)


def their_logits(directory, family, inputs):
    """The same of transformers with its own cache, fed with these tokens; None where it refuses the checkpoint."""
    import transformers

    kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    try:
        eager = {"experts_implementation": "eager"} if family in WITH_EXPERTS else {}
        model = kind.from_pretrained(directory, dtype=torch.float32, **eager).eval()
        prompt = torch.tensor([PROMPT])
        first, rest = {"input_ids": prompt}, {}
        if family == "t5":
            first["decoder_input_ids"] = model.generate(prompt, max_new_tokens=1)[:, :1]
        cache, found = None, []
        with torch.inference_mode():
            for fed in [None, *inputs]:
                call = first if fed is None else rest | {"past_key_values": cache}
                if fed is not None:
                    call |= {"decoder_input_ids" if family == "t5" else "input_ids": torch.tensor([[fed]])}
                out = model(**call, use_cache=True, return_dict=True)
                cache = out.past_key_values
                if family == "t5":
                    rest = {"encoder_outputs": (out.encoder_last_hidden_state,)}
                found.append(out.logits[:, -1])
    except Exception:  # whatever it raises, it does not compute anything else
        return None
    return torch.cat(found)


CASES = [(family, name) for family in FAMILIES for name in fields_of(family)] if ALL else sorted(SHORT)
"""All fields take every class of `transformers`, two seconds of each test process."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_changed_field_gives_equal_logits_or_is_refused(checkpoint, tmp_path, family, name):
    directory, _ = checkpoint(next(f"{family}-{shape}" for shape in FAMILIES[family]))
    config = json.loads((directory / "config.json").read_text())
    logits = own_logits(directory)
    assert torch.allclose(logits, their_logits(directory, family, logits[:-1].argmax(-1).tolist()), rtol=0, atol=1e-3)
    values = (True, 3) if name in UNREAD else (*VALUES, *OF_FIELDS.get(name, ()))
    for number, value in enumerate(values):
        if name in config and config[name] == value and type(config[name]) is type(value):
            continue
        changed = copy_with(directory, tmp_path / f"{number}", **{name: value})
        logits = own_logits(changed)
        if logits is None:
            continue
        theirs = their_logits(changed, family, logits[:-1].argmax(-1).tolist())
        if theirs is not None:
            assert torch.allclose(logits, theirs, rtol=0, atol=1e-3), (name, value)
