"""The shipped configs say what their sources say, and names resolve to them."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tests.planned import num_params
from xgpt.core import machine
from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import config_names, configs_dir, load_json
from xgpt.core.load import NO_GROWTH, Growth
from xgpt.core.schema import ModelSpec, Profile
from xgpt.core.workload import quantile
from xgpt.resolve import load_cluster, load_model, load_of, load_workload, workload_of
from xprofiler import xgpt_version
from xprofiler.store import check_belongs
from xscheduler.fleet.day_load import cut, read_day

# TCB's model of three layers: 0.9e9 follows from its shape.
UNNAMED = {
    "tcb-seq2seq": 0.9e9, "qwen3-14b": 14.8e9, "llama-3.2-1b": 1.24e9, "llama-3.2-3b": 3.21e9, "qwen3-4b-2507": 4.0e9,
    "qwen2.5-7b": 7.6e9, "qwen2.5-14b": 14.7e9, "deepseek-r1-distill-qwen-7b": 7.6e9, "mistral-7b-v0.2": 7.24e9,
    "deepseek-r1-distill-qwen-14b": 14.8e9, "deepseek-r1-distill-qwen-1.5b": 1.78e9, "mistral-7b-v0.3": 7.25e9,
    "phi-4": 14.7e9, "qwen3-vl-2b": 1.72e9,
}  # fmt: skip
"""Parameters as published, of models whose name has another or no number."""
# (All, those that a token passes), as published; gpt-oss counts the active ones without the embedding.
WITH_EXPERTS = {
    "qwen3-30b-a3b": (30.5e9, 3.3e9),
    "qwen3-235b-a22b": (235e9, 22e9),
    "qwen3-30b-a3b-2507": (30.5e9, 3.3e9),
    "qwen3-235b-a22b-2507": (235e9, 22e9),
    "qwen3-coder-480b-a35b": (480e9, 35e9),
    "glm-4.5-air": (106e9, 12e9),
    "gpt-oss-20b": (20.9e9, 3.6e9),
    "gpt-oss-120b": (116.8e9, 5.1e9),
    "mixtral-8x7b": (46.7e9, 12.9e9),
    "mixtral-8x22b": (141e9, 39e9),
    "deepseek-v3": (671e9, 37e9),
    "minimax-m2": (230e9, 10e9),
    "qwen3.6-35b-a3b": (35e9, 3e9),
    "deepseek-v3.2": (671e9, 37e9),
    "deepseek-v4-pro": (1.6e12, 49e9),
    "gemma-4-26b-a4b": (25.2e9, 3.8e9),
    "llama-4-scout": (109e9, 17e9),
    "kimi-k2": (1.04e12, 32e9),
    "glm-5.2": (744e9, 40e9),
    "nemotron-3-nano-30b-a3b": (31.6e9, 3.6e9),
    "qwen3-next-80b-a3b": (80e9, 3e9),
    "glm-4.7-flash": (30e9, 3e9),
}
ROUNDED = ("minimax-m2", "glm-4.5-air", "qwen3.6-35b-a3b", "qwen3-next-80b-a3b", "glm-4.7-flash")
"""Models of which only the whole billions of active parameters are published."""
SHIPPED_CLUSTERS = [name for name in config_names("clusters") if name != "local"]


def spec_of(name: str) -> ModelSpec:
    return load_model(name)[0]


def test_parameters_are_the_published_ones() -> None:
    names = [name for name in config_names("models") if spec_of(name).experts is not None]
    assert sorted(names) == sorted(WITH_EXPERTS)
    for name, (total, active) in WITH_EXPERTS.items():
        spec = spec_of(name)
        params = num_params(spec, active=True) - spec.vocab_size * spec.hidden_size * (spec.family == "gpt_oss")
        assert num_params(spec) == pytest.approx(total, rel=0.02), name
        assert params == pytest.approx(active, rel=0.31 if name in ROUNDED else 0.04), name


@pytest.mark.parametrize("name", sorted(set(config_names("models")) - WITH_EXPERTS.keys()))
def test_parameters_match_the_name(name: str) -> None:
    spec = spec_of(name)
    size = name.rsplit("-", 1)[1]
    said = UNNAMED.get(name) or float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert spec.name == name
    assert num_params(spec) == pytest.approx(said, rel=0.05)


@pytest.mark.parametrize("name", config_names("models"))
def test_only_the_laptop_model_is_single_precision(name: str) -> None:
    assert (spec_of(name).default_dtype == "float32") == (name == "opt-125m")


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads"),
    [
        ("t5-11b", 48, 1024, 128),
        ("opt-13b", 40, 5120, 40),
        ("gpt3-39b", 48, 8192, 64),
        ("gpt3-101b", 80, 10240, 80),
        ("gpt3-175b", 96, 12288, 96),
        ("gpt3-341b", 120, 15360, 120),
    ],
)
def test_exegpt_table_1(name: str, layers: int, hidden: int, heads: int) -> None:
    spec = spec_of(name)
    assert spec.num_layers + spec.num_encoder_layers == layers
    assert (spec.hidden_size, spec.num_heads) == (hidden, heads)


@pytest.mark.parametrize("name", SHIPPED_CLUSTERS)
def test_clusters_are_complete(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_devices == int(name.rsplit("x", 1)[1])
    assert cluster.device.flops_per_s["float16"] and cluster.device.memory_bandwidth_bytes_per_s
    assert cluster.host is not None
    assert (cluster.intra_node is not None) == (cluster.devices_per_node > 1)
    assert (cluster.inter_node is not None) == (cluster.num_nodes > 1)


def test_a_cluster_file_names_a_device_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    (tmp_path / "mine.yaml").write_text("{name: mine, type: gpu, memory_bytes: 80000000000}")
    (tmp_path / "minex2.yaml").write_text("{name: minex2, device: mine.yaml, devices_per_node: 2}")
    assert load_cluster(str(tmp_path / "minex2.yaml")).device.name == "mine"
    (tmp_path / "mine.yaml").unlink()
    with pytest.raises(InputError, match=r"device: 'mine\.yaml' is not accepted; there is no such file"):
        load_cluster(str(tmp_path / "minex2.yaml"))


# Mean and 99th percentile of outputs that ExeGPT Table 3 prints: the mean before the cut, the percentile after it.
@pytest.mark.parametrize(
    ("name", "input_mean", "output_mean", "p99"),
    [
        ("summarization", 256, 32, 63),
        ("translation", 128, 128, 292),
        ("code-generation", 64, 192, 417),
        ("chat-short", 256, 64, 137),
        ("chat-long", 512, 256, 579),
    ],
)
def test_exegpt_table_3(name: str, input_mean: float, output_mean: float, p99: int) -> None:
    workload = load_workload(name)
    assert workload.input.mean == pytest.approx(input_mean, rel=0.05)
    assert workload.output.mean == pytest.approx(output_mean, rel=0.05)
    assert quantile(workload.output, 0.99) == pytest.approx(p99, rel=0.04)


# Statistics of the traces that the compact histograms were made from.
@pytest.mark.parametrize(
    ("name", "side", "mean_", "p50", "p99", "longest"),
    [
        ("azure-code", "input", 2047.8, 1469, 7436, 7437),
        ("azure-code", "output", 27.88, 13, 252, 1899),
        ("azure-conv", "input", 1237.0, 1035, 4122, 14050),
        ("azure-conv", "output", 221.9, 141, 613, 1000),
    ],
)
def test_azure_traces(name: str, side: str, mean_: float, p50: int, p99: int, longest: int) -> None:
    histogram = getattr(load_workload(name), side)
    assert len(histogram.lengths) <= 64
    assert histogram.mean == pytest.approx(mean_, rel=0.001)
    assert quantile(histogram, 0.5) == pytest.approx(p50, rel=0.02)
    assert quantile(histogram, 0.99) == pytest.approx(p99, rel=0.03)
    assert histogram.lengths[-1] == longest


def test_every_workload_loads_and_fits_a_long_context(tmp_path: Path) -> None:
    for name in config_names("workloads"):
        assert load_workload(name, spec_of("llama-3.1-8b")).name == name
        text = (configs_dir() / "workloads" / f"{name}.yaml").read_text()
        assert re.search(r"^source: \S", text, re.M)
    (tmp_path / "mine.yaml").write_text(re.sub(r"^source: .*(\n  .*)*\n", "", text, flags=re.M))
    assert load_workload(str(tmp_path / "mine.yaml")).input.mean > 0, "a file of one's own states no source"


def test_workload_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InputError, match=r"azure-code.*7437.*1899.*the context of opt-125m holds 2048"):
        load_workload("azure-code", spec_of("opt-125m"))


def test_a_log_fits_if_each_of_its_requests_does(tmp_path: Path) -> None:
    """The longest input and the longest output of different requests were added, and a log that the model had served
    was refused.
    """
    path, model = tmp_path / "log.csv", spec_of("opt-125m")
    rows = ["timestamp_s,input,output", "0,1500,100", "5,100,1500", "9,20,30"]
    path.write_text("\n".join(rows) + "\n")
    workload = workload_of(str(path), model)
    assert (workload.input.lengths[-1], workload.output.lengths[-1]) == (548, 1500)
    assert cut(read_day(path), 60.0, model).everything.input.lengths[-1] == 548
    path.write_text("\n".join([*rows, "11,2000,100"]) + "\n")
    says = r"requests of up to 2100 tokens with their outputs exceed the model's context of 2048 \(1 of 4\)"
    with pytest.raises(InputError, match=f"^workload: 'log'.*{says}"):
        workload_of(str(path), model)
    with pytest.raises(InputError, match=f"^trace: 'log'.*{says}"):
        read_day(path).within(model)


def test_the_few_requests_beyond_the_context_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 298,725 requests had a day's log refused. Outputs count as long as they will have grown."""
    path, model = tmp_path / "log.csv", spec_of("opt-125m")
    rows = ["timestamp_s,input,output", "0,2000,100", *(f"{at},1000,600" for at in range(1, 100)), "100,100,1000"]
    path.write_text("\n".join(rows) + "\n")
    load = load_of(str(path), NO_GROWTH, model)
    assert load is not None and load.requests.timestamp_s is not None
    assert (len(load.requests.input), load.requests.timestamp_s[0]) == (100, 0.0)
    assert "log: requests of up to 2100 tokens with their outputs exceed the model's context of 2048 (1 of 101)" in (
        caplog.text
    )
    workload = workload_of(str(path), model)
    assert (workload.input.lengths[-1], workload.output.lengths[-1]) == (1000, 1000)
    assert len(read_day(path).within(model).requests) == 100
    with pytest.raises(InputError, match=r"\(101 of 101\): leave them out"):
        load_of(str(path), Growth(outputs=2.0), model)


def test_encoder_decoder_holds_input_and_output_apart() -> None:
    spec = spec_of("t5-11b").model_copy(update={"max_context": 512})
    assert load_workload("summarization", spec).input.lengths[-1] == 512
    with pytest.raises(InputError):  # inputs reach 1024
        load_workload("chat-long", spec)
    with pytest.raises(InputError):  # outputs reach 480, inputs 128
        load_workload("code-generation", spec.model_copy(update={"max_context": 400}))


def test_workload_from_files(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("input,output\n4,2\n4,6\n")
    assert load_workload(str(trace)).output.mean == 4
    assert load_workload(str(trace)).name == "mine"
    text = tmp_path / "mine.txt"
    text.touch()
    for bad in (str(text), str(tmp_path), "nonsense"):
        with pytest.raises(InputError, match="workload"):
            load_workload(bad)


def test_model_from_files(tmp_path: Path) -> None:
    written = tmp_path / "tiny.yaml"
    fields = spec_of("opt-125m").model_dump(mode="json") | {"name": "tiny", "num_layers": 2}
    written.write_text(json.dumps(fields))
    assert load_model(str(written))[0].num_layers == 2
    written.write_text(json.dumps(fields | {"num_layers": 0}))
    with pytest.raises(InputError, match=r"model\.num_layers: 0"):
        load_model(str(written))
    with pytest.raises(InputError, match="model"):
        load_model(str(tmp_path))


def test_model_from_a_checkpoint_directory(tmp_path: Path) -> None:
    config = {
        "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 256,
        "vocab_size": 512, "max_position_embeddings": 128, "word_embed_proj_dim": 64,
        "do_layer_norm_before": True, "activation_function": "relu", "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, directory = load_model(str(tmp_path))
    assert directory == tmp_path
    assert (spec.family, spec.num_layers, spec.hidden_size) == ("opt", 2, 64)


class TestMachine:
    """Detection against a made-up file system."""

    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
        files = {
            "proc/cpuinfo": "processor: 0\nmodel name\t: Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz\n",
            "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
        }
        self.write(tmp_path, files)
        return tmp_path

    @staticmethod
    def write(root: Path, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def test_one_device_of_all_cores(self, root: Path) -> None:
        cluster = machine.detect(root=root)
        assert (cluster.name, cluster.num_devices) == ("local", 1)
        assert cluster.device.name == "intel-xeon-gold-6130-8c"
        assert cluster.device.type == "cpu"
        assert cluster.device.memory_bytes == 16 * 2**30
        assert cluster.device.usable_memory == 0.5

    def test_several_devices_share_cores_and_memory(self, root: Path) -> None:
        cluster = machine.detect(4, root=root)
        assert (cluster.name, cluster.num_devices, cluster.device.memory_bytes) == ("local:4", 4, 4 * 2**30)
        assert cluster.device.name.endswith("-2c")
        assert cluster.intra_node is not None
        with pytest.raises(MachineError, match="local:9 needs a core for each device; this machine has 8"):
            machine.detect(9, root=root)

    @pytest.mark.parametrize(
        "files",
        [
            {"sys/fs/cgroup/memory.max": "1073741824\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"},
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "1073741824\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
            },
            {
                "proc/self/cgroup": "5:memory:/a\n3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1073741824\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
        ],
    )
    def test_control_groups_limit_memory_and_cores(self, root: Path, files: dict[str, str]) -> None:
        self.write(root, files)
        assert machine.detect(root=root).device.memory_bytes == 2**30
        assert machine.num_cores(root) == 2

    def test_without_proc(self, root: Path) -> None:
        (root / "proc/cpuinfo").unlink()
        (root / "proc/meminfo").unlink()
        device = machine.detect(root=root).device
        assert device.memory_bytes > 0
        assert device.name.endswith("-8c")

    def nvidia_smi(self, root: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.write(root, {"nvidia-smi": f"#!/bin/sh\n{script}\n"})
        (root / "nvidia-smi").chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda _: str(root / "nvidia-smi"))

    def test_gpus_take_rates_and_links_from_their_shipped_kind(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.nvidia_smi(root, monkeypatch, "echo 'NVIDIA H200, 143771'; echo 'NVIDIA H200, 143771'")
        cluster, shipped = machine.detect(root=root), load_cluster("h200x8")
        assert cluster.num_devices == 2
        assert cluster.device.memory_bytes == 143771 * 2**20
        memory = {"memory_bytes": cluster.device.memory_bytes}
        assert cluster.device == shipped.device.model_copy(update=memory), "efficiencies in float8, too"
        assert cluster.intra_node == shipped.intra_node
        assert machine.detect(1, root=root).num_devices == 1
        with pytest.raises(MachineError, match="local:3 needs 3 GPUs; nvidia-smi lists 2: give at most local:2"):
            machine.detect(3, root=root)

    @pytest.mark.parametrize(
        ("script", "mebibytes"),
        [
            ("echo 'NVIDIA H100 80GB HBM3, 81559, 551'", 81008),
            ("echo 'NVIDIA H100 80GB HBM3, 81559, [N/A]'", 81559),
            ("case $1 in *reserved*) echo 'Field is not a valid field'; exit 2;; esac; echo 'H100, 81559'", 81559),
        ],
    )
    def test_memory_that_the_driver_reserves_is_not_planned_with(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, script: str, mebibytes: int
    ) -> None:
        self.nvidia_smi(root, monkeypatch, script)
        assert machine.detect(root=root).device.memory_bytes == mebibytes * 2**20

    def test_gpus_that_no_config_knows(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nvidia_smi(root, monkeypatch, "echo 'NVIDIA GeForce RTX 3060, 12288'")
        device = machine.detect(root=root).device
        assert (device.name, device.type, device.flops_per_s) == ("rtx-3060", "gpu", {})

    @pytest.mark.parametrize(
        "script", ["echo 'NVIDIA A40, 46068'; echo 'NVIDIA H200, 143771'", "echo 'NVIDIA Moon, [N/A]'"]
    )
    def test_gpus_that_no_cluster_describes(self, root: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.nvidia_smi(root, monkeypatch, script)
        with pytest.raises(MachineError):
            machine.detect(root=root)

    def test_memory_that_the_driver_does_not_state(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nvidia_smi(root, monkeypatch, "echo 'NVIDIA GB10, [N/A], [N/A]'")
        assert machine.detect(root=root).device == load_cluster("gb10x1").device

    def test_tool_without_a_driver_leaves_the_cpu(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nvidia_smi(root, monkeypatch, "echo 'NVIDIA-SMI has failed, no driver'; exit 9")
        assert machine.detect(root=root).device.type == "cpu"

    @pytest.mark.parametrize(
        ("product", "kind"),
        [
            ("NVIDIA A40", "a40x4"),
            ("NVIDIA A100-SXM4-80GB", "a100x16"),
            ("NVIDIA A100-SXM4-40GB", "a100-40g-x16"),
            ("Tesla V100-SXM2-16GB", "v100x1"),
            ("NVIDIA H100 80GB HBM3", "h100x8"),
            ("NVIDIA H200", "h200x1"),
            ("NVIDIA GH200 480GB", "gh200-96gb-x1"),
            ("NVIDIA GH200 144G HBM3e", "gh200-144gb-x1"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090x8"),
            ("NVIDIA GeForce RTX 3090", "rtx-3090x8"),
            ("NVIDIA RTX A6000", "rtx-a6000x8"),
            ("Tesla T4", "t4x8"),
            ("NVIDIA H800", "h800x8"),
            ("NVIDIA L20", "l20x8"),
            ("NVIDIA GB10", "gb10x1"),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000x8"),
        ],
    )
    def test_shipped_kinds_are_named_as_their_driver_names_them(self, product: str, kind: str) -> None:
        assert machine.slug(product) == load_cluster(kind).device.name


def test_local_clusters(tmp_path: Path) -> None:
    assert load_cluster("local") == machine.detect()
    one = load_cluster("local:1")
    assert (one.name, one.num_devices) == ("local:1", 1)
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: local\ndetect: true\nnum_devices: 1\n")
    assert load_cluster(str(mine)) == load_cluster("local:1")
    for bad in ("detect: false\nname: local", "detect: true\nname: local\nspeed: 2", "detect: true\nname: mine"):
        mine.write_text(bad)
        with pytest.raises(InputError, match="cluster"):
            load_cluster(str(mine))
    for name in ("local:", "local:0", "local:two", "local:-1", "moon"):
        with pytest.raises(InputError, match="cluster"):
            load_cluster(name)


def test_rates_are_finite() -> None:
    for name in SHIPPED_CLUSTERS:
        for link in (load_cluster(name).intra_node, load_cluster(name).inter_node, load_cluster(name).host):
            assert link is None or (math.isfinite(link.bandwidth_bytes_per_s) and 0 < link.latency_s < 1e-3)


@pytest.mark.parametrize("path", sorted((configs_dir() / "profiles").glob("*.json")), ids=lambda path: path.stem)
def test_measured_profiles_are_of_a_shipped_model_and_device(path: Path) -> None:
    """So that machines without the device can plan with them, as far as the engine is still the one measured."""
    profile = load_json(path, Profile, "profile")
    assert profile.source == "measured"
    assert path.stem == f"{profile.model.name}-{profile.device}-{profile.dtype}"
    clusters = map(load_cluster, SHIPPED_CLUSTERS)
    (cluster,) = (c for c in clusters if c.device.name == profile.device and c.num_devices == profile.devices_per_node)
    current = profile.model_copy(update={"engine_version": xgpt_version(cluster.device.type)})
    check_belongs(current, spec_of(profile.model.name), cluster, profile.dtype)
