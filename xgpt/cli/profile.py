"""Run `xgpt profile`, and print a summary of the profile."""

from __future__ import annotations

from typing import Any

import click

from xgpt import api
from xgpt.cli import options, render
from xgpt.cli.outputs import output_file, write
from xgpt.core.errors import InputError
from xgpt.core.io import dump_json, sha256


def run(output: str | None, force: bool, as_json: bool, engine: str, import_from: str | None, **_: Any) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    if engine == "vllm" and import_from is None and output is None and not as_json:
        raise InputError("output", None, "give -o FILE, then plan for vLLM with `xgpt plan --profile FILE`")
    file = None if output is None else output_file(output)
    with render.progress_bar() as progress:
        profile = api.profile(**options.given(), progress=progress)
    if file is not None:
        write(file, dump_json(profile))
    if as_json:
        click.echo(dump_json(profile), nl=False)
        return
    layer, num_layers = profile.layers[0], profile.model.num_layers
    rows = [
        [str(n), f"{1000 * num_layers * s:.2f}", f"{n / (num_layers * s):.0f}" if s else "-"]
        for n, s in zip(layer.rest.points, layer.rest.seconds, strict=True)
    ]
    render.show(
        render.table("all layers except attention", ["tokens", "ms", "tokens/s"], rows),
        f"{profile.source} on {profile.device}, {profile.num_threads or '-'} threads, spread "
        f"{100 * profile.spread:.1f}%, sha256 {sha256(profile)[:12]}",
        *(
            [f"warning: {profile.unrest}; measure again when the machine is idle"]
            if profile.is_restless and profile.source == "measured"
            else []
        ),
        *(f"{part}: {source}" for part, source in profile.provenance.items()),
    )
