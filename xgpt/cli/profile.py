"""xgpt profile"""

from __future__ import annotations

from typing import Any

import click

from xgpt.cli.options import DTYPES, config_option, json_option


@click.command("profile")
@click.option(
    "--model", default="opt-125m", show_default=True, help="Name, YAML file, checkpoint directory, or Hugging Face id."
)
@config_option
@click.option("--cluster", default="local", show_default=True, help="Name or YAML file.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Type to plan for. Default: the model's own; float32 on a CPU."
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["float16", "bfloat16", "float8"]),
    help="Type of keys and values on other devices than this machine's. Default: the dtype.",
)
@click.option(
    "--engine",
    type=click.Choice(["native", "vllm"]),
    default="native",
    show_default=True,
    help="The engine whose steps are measured.",
)
@click.option(
    "--import-from",
    metavar="aiconfigurator|FOLDER",
    help="Read tables that others measured: those of the aiconfigurator wheel, or of a folder.",
)
@click.option(
    "--framework",
    help="The engine whose kernels are imported: vllm (default), sglang, trtllm, or one version, as vllm-0.15.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write the profile here, too. The cache keeps profiles of xgpt's own engine by itself.",
)
@json_option
def command(output: str | None, as_json: bool, **asked: Any) -> None:
    """Measure step times on this machine, compute them from a datasheet, or import what others measured.

    \b
    Example:
      xgpt profile --model opt-125m -o profile.json
      xgpt profile --model ./opt-125m --engine vllm -o vllm.json
      xgpt profile --model llama-3.1-70b --cluster h100x8 --dtype float8 --import-from aiconfigurator -o profile.json
    """
    from pathlib import Path

    from xgpt import api
    from xgpt.cli import render
    from xgpt.errors import InputError
    from xgpt.io import check_writable, dump_json, sha256, write_atomic

    if asked["engine"] == "vllm" and asked["import_from"] is None and output is None and not as_json:
        raise InputError("output", None, "say with -o where: `xgpt plan --profile FILE` then plans for vLLM")
    if output is not None:
        check_writable(Path(output))
    with render.progress_bar() as progress:
        profile = api.profile(**asked, progress=progress)
    if output is not None:
        write_atomic(Path(output), dump_json(profile))
    if as_json:
        click.echo(dump_json(profile), nl=False)
        return
    layer, num_layers = profile.layers[0], profile.model.num_layers
    rows = [
        [str(n), f"{1000 * num_layers * s:.2f}", f"{n / (num_layers * s):.0f}" if s else "-"]
        for n, s in zip(layer.rest.points, layer.rest.seconds, strict=True)
    ]
    render.show(
        render.table("all layers but attention", ["tokens", "ms", "tokens/s"], rows),
        f"{profile.source} on {profile.device}, {profile.num_threads or '-'} threads, spread "
        f"{100 * profile.spread:.1f}%, sha256 {sha256(profile)[:12]}",
        *(
            ["warning: measured in restless minutes: its worst points were repeated; measure again in quiet ones"]
            if profile.is_restless and profile.source == "measured"
            else []
        ),
        *(f"{part}: {source}" for part, source in profile.provenance.items()),
    )
