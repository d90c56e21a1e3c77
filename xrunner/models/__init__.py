"""The model families by name. Each family has its own file and consists of the blocks in layers.py."""

from __future__ import annotations

from xgpt.core.errors import InputError
from xgpt.core.schema import ModelSpec
from xrunner.models.base import DecoderModel, Model
from xrunner.models.deepseek import DeepseekModel
from xrunner.models.encoder_decoder import EncoderDecoderModel
from xrunner.models.gemma import Gemma2Model, Gemma3Model
from xrunner.models.gpt2 import Gpt2Model
from xrunner.models.gpt_oss import GptOssModel
from xrunner.models.llama import LlamaModel
from xrunner.models.mixtral import MixtralModel
from xrunner.models.opt import OptModel
from xrunner.models.phi3 import Phi3Model
from xrunner.models.qwen2 import Qwen2Model
from xrunner.models.qwen3 import Qwen3Model
from xrunner.models.qwen3_moe import Qwen3MoeModel
from xrunner.models.t5 import T5Model

FAMILIES: dict[str, type[Model]] = {
    "deepseek_v2": DeepseekModel,
    "deepseek_v3": DeepseekModel,
    "gemma2": Gemma2Model,
    "gemma3": Gemma3Model,
    "gpt2": Gpt2Model,
    "gpt_oss": GptOssModel,
    "llama": LlamaModel,
    "mistral": LlamaModel,
    "mixtral": MixtralModel,
    "opt": OptModel,
    "phi3": Phi3Model,
    "qwen2": Qwen2Model,
    "qwen3": Qwen3Model,
    "qwen3_moe": Qwen3MoeModel,
    "t5": T5Model,
}


def family_of(spec: ModelSpec) -> type[Model]:
    if spec.family not in FAMILIES:
        raise InputError("model.family", spec.family, f"xgpt's own engine runs only {', '.join(sorted(FAMILIES))}")
    if spec.unsupported:
        accepted = "xgpt's own engine does not support this value; remove it if it has no effect, or give `engine=vllm`"
        raise InputError("config.json", "; ".join(spec.unsupported), accepted)
    if spec.quantization is not None and not spec.quantization.computes_in_eight_bits:
        accepted = "xgpt's own engine runs float32, float16, bfloat16 and eight bits: take such a checkpoint, or "
        accepted += "--engine vllm"
        raise InputError("model.quantization", spec.quantization.kind, accepted)
    return FAMILIES[spec.family]
