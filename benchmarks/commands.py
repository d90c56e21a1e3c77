"""Score published commands as `xgpt compare --current` does, and list the reasons for refusals.

    python -m benchmarks.commands FOLDER... [--suffix .md] [--configs FOLDER] [--part 1/4] [--markdown]

It scores every distinct command in the Markdown, shell scripts and YAML of the folders (checkouts of
vllm-project/recipes, llm-d/llm-d-benchmark, vllm-project/production-stack, for example) that starts vLLM, SGLang or
TensorRT-LLM: in fenced blocks, in texts of YAML, and as containers or Helm values. Each is compared with the best plan
of the same policy (chunked) for short requests, on eight H200, on as many H200 as the command uses, or on the MI300X or
B200 for which it was written. The model is shipped, or in tests/unit/xgpt/checkpoints/official.json, or in
ORGANISATION--MODEL_config.json of --configs (aiconfigurator's model_configs). Refusals are listed by reason, with one
command each.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from xgpt.comparing.compare import compare
from xgpt.comparing.launched import READERS, Launched, in_manifest, in_shell
from xgpt.core.errors import InputError, XgptError
from xgpt.core.schema.plan import rate_of
from xgpt.requests import plan_request
from xgpt.resolve import load_cluster

STARTS = re.compile(
    r"vllm serve|vllm\.entrypoints|sglang\.launch_server|sglang serve|dynamo\.(vllm|sglang|trtllm)|trtllm-serve|"
    r"docker run"
)
FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.S | re.M)
QUANTISED = "hf_quant_config.json"
LAUNCHERS = {"vllm": "vllm serve", "sglang": "sglang serve", "tensorrt-llm": "trtllm-serve"}
OFFICIAL = Path(__file__).parents[1] / "tests" / "unit" / "xgpt" / "checkpoints" / "official.json"
SAME = {
    "ByteDance-Seed/Seed-OSS-36B-Instruct": "seed_oss",
    "OpenGVLab/InternVL3_5-8B": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3Guard-Gen-0.6B": "Qwen/Qwen3-0.6B",
    "baidu/ERNIE-4.5-21B-A3B-PT": "ernie4_5_moe",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-ai/DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai/DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek-ai/DeepSeek-V3.2",
    "google/gemma-4-26B-A4B-it": "google/gemma-4-26B-A4B",
    "google/gemma-4-31B-it": "nvidia/Gemma-4-31B-IT-NVFP4",
    "internlm/Intern-S1": "Qwen/Qwen3-235B-A22B",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral",
    "moonshotai/Kimi-K2-Thinking": "moonshotai/Kimi-K2.5",
    "nvidia/DeepSeek-R1-FP4": "nvidia/DeepSeek-V3.1-NVFP4",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "stepfun-ai/Step-3.5-Flash": "stepfun-ai/Step-3.7-Flash",
    "zai-org/GLM-4.5-Air": "glm4_moe",
    "zai-org/GLM-4.5V": "glm4_moe",
}
"""Models whose language part has the shape of another model, or of a family's defaults in transformers."""
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


class Outcome(NamedTuple):
    """The result of `xgpt compare --current` for one command.

    Attributes:
        rate: requests per second at saturation, or None if the command was refused.
        gain: the best plan's throughput per device, as a multiple of the command's.
        reason: the reason for the refusal, without the command's values.
    """

    path: Path
    command: str
    rate: float | None
    gain: float | None
    reason: str


def commands(folder: Path, suffix: str = "") -> Iterator[tuple[Path, Launched]]:
    for path in sorted(folder.rglob(f"*{suffix}")):
        if path.is_file() and path.suffix in (".yaml", ".yml", ".md", ".sh"):
            text = path.read_text(encoding="utf-8", errors="replace")
            in_text = _in_yaml(text) if path.suffix in (".yaml", ".yml") else _in_text(text, path.suffix == ".md")
            for launched in in_text:
                yield path.relative_to(folder), launched


def _in_yaml(text: str) -> Iterator[Launched]:
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        return
    for document in documents:
        yield from in_manifest(document)
        for value in _strings(document):
            yield from _in_text(value, "```" in value)


def _in_text(text: str, is_fenced: bool) -> Iterator[Launched]:
    for block in FENCED.findall(text) if is_fenced else [text]:
        if STARTS.search(block):
            try:
                yield from in_shell(block)
            except InputError:  # prose, or a language other than a shell's
                continue


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _strings(each)


@cache
def _official() -> tuple[dict[str, list[Any]], dict[str, Any]]:
    document = json.loads(OFFICIAL.read_text(encoding="utf-8"))
    return document["models"], document["configs"]


def model_of(model_id: str, configs: Path | None, scratch: Path) -> dict[str, Any]:
    folder = scratch / model_id.replace("/", "--")
    if not folder.is_dir():
        files = _files_of(model_id, configs)
        folder.mkdir()
        for name, config in files.items():
            (folder / name).write_text(json.dumps(config), encoding="utf-8")
    return {"config": str(folder / "config.json")} if (folder / "config.json").is_file() else {}


def _files_of(model_id: str, configs: Path | None) -> dict[str, Any]:
    models, official = _official()
    if configs is not None and (configs / f"{model_id.replace('/', '--')}_config.json").is_file():
        paths = ((name, configs / f"{model_id.replace('/', '--')}_{name}") for name in ("config.json", QUANTISED))
        return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths if path.is_file()}
    base, _, stored = model_id.rpartition("-") if model_id.lower().endswith("-fp8") else (model_id, "", "")
    if stored and (files := _files_of(base, configs)):
        config = files.get("config.json", {})
        stored_as = config.get("quantization_config") or (
            FP8 if model_id.startswith("Qwen/") else {"quant_method": "fp8"}
        )
        return {"config.json": config | {"quantization_config": stored_as}}
    if model_id in models and models[model_id][0] in official:
        return {"config.json": official[models[model_id][0]]}
    same = SAME.get(model_id, "")
    if "/" in same:
        files = _files_of(same, configs)
        if "NVFP4" in same and "FP4" not in model_id:
            files = {"config.json": {k: v for k, v in files["config.json"].items() if k != "quantization_config"}}
        return files
    if same in CONFIG_MAPPING:
        ahead = {"num_nextn_predict_layers": 1} if same == "ernie4_5_moe" else {}
        return {"config.json": json.loads(CONFIG_MAPPING[same]().to_json_string()) | {"model_type": same} | ahead}
    return {}


def cluster_of(path: Path, launched: Launched) -> str:
    text = f"{path} {launched.image} {' '.join(launched.words)}".lower()
    if re.search(r"rocm|aiter|mi3\d\d|amd/", text):
        return "mi300x-x8"
    if re.search(r"blackwell|b200|nvfp4|-fp4", text):
        return "b200x8"
    try:
        devices = READERS[launched.engine](launched.words, load_cluster("h200x8")).num_devices
    except InputError:
        devices = 1
    return "h200x8" if devices <= 8 else "h200x32"


def score(path: Path, launched: Launched, configs: Path | None, scratch: Path) -> Outcome:
    command = f"{LAUNCHERS[launched.engine]} {shlex.join(launched.words)}"
    cluster = cluster_of(path, launched)
    try:
        served = READERS[launched.engine](launched.words, load_cluster(cluster)).model
        model = model_of(served or "", configs, scratch)
        asked = {"cluster": cluster, "workload": "orca", "policy": "chunked", "objective": "saturated"}
        compared = compare(plan_request(**asked, **model), command)
    except XgptError as error:
        return Outcome(path, command, None, None, _reason(error))
    assert compared.current is not None
    now, best = (rate_of(plan) / plan.num_devices for plan in (compared.current, compared.best))
    return Outcome(path, command, rate_of(compared.current), best / now if now else None, "")


def _reason(error: XgptError) -> str:
    if isinstance(error, InputError):
        return f"{error.field}: {error.accepted}"
    return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--suffix", default="", help="read only files with this ending")
    parser.add_argument("--configs", type=Path, help="folder of config.json files")
    parser.add_argument("--part", default="1/1", help="share of the commands: 2/4 is the second quarter")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    edge = "| " if given.markdown else ""
    part, parts = map(int, given.part.split("/"))
    for folder in given.folders:
        distinct = {(each.engine, tuple(each.words)): (path, each) for path, each in commands(folder, given.suffix)}
        some = list(distinct.values())[part - 1 :: parts]
        with TemporaryDirectory() as scratch:
            outcomes = [score(*each, given.configs, Path(scratch)) for each in some]
        refused: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            if outcome.rate is None:
                refused[outcome.reason].append(outcome)
        counts = Counter(outcome.rate is not None for outcome in outcomes)
        print(f"{folder}: {len(outcomes)} distinct commands, {counts[True]} scored, {counts[False]} refused")
        for outcome in outcomes:
            if outcome.rate is not None:
                cells = f"{outcome.rate:.4g}/s | {outcome.gain or 0:.2f} | {outcome.path} | {outcome.command}"
                print(f"{edge}{cells}"[:300] + (" |" if edge else ""))
        for why, rows in sorted(refused.items(), key=lambda item: -len(item[1])):
            print(f"{edge}{len(rows)} | {why} | {rows[0].path}: {rows[0].command}"[:400] + (" |" if edge else ""))


if __name__ == "__main__":
    main()
