"""xgpt profile"""

from __future__ import annotations

import click

from xgpt.cli.options import json_option


@click.command("profile")
@click.option("--model", default="opt-125m", show_default=True, help="Name, YAML file, or checkpoint directory.")
@click.option("--cluster", default="local", show_default=True, help="Name or YAML file.")
@click.option("-o", "--output", metavar="FILE", help="Write it here too; the cache gets it in any case.")
@json_option
def command(model: str, cluster: str, output: str | None, as_json: bool) -> None:
    """Measure step times on this machine, or compute them from a datasheet.

    \b
    Example:
      xgpt profile --model opt-125m -o profile.json
    """
    from pathlib import Path

    from xgpt.app.planning import obtain_profile
    from xgpt.cli import render
    from xgpt.io import dump_json, sha256, write_atomic
    from xgpt.resolve import load_cluster, load_model

    spec, checkpoint = load_model(model)
    with render.progress_bar() as progress:
        profile = obtain_profile(spec, checkpoint, load_cluster(cluster), progress, refresh=True)
    if output is not None:
        write_atomic(Path(output), dump_json(profile))
    if as_json:
        click.echo(dump_json(profile), nl=False)
        return
    layer, num_layers = profile.layers[0], spec.num_layers
    rows = [
        [str(n), f"{1000 * num_layers * s:.2f}", f"{n / (num_layers * s):.0f}"]
        for n, s in zip(layer.rest.points, layer.rest.seconds, strict=True)
    ]
    render.show(
        render.table("all layers but attention", ["tokens", "ms", "tokens/s"], rows),
        f"{profile.source} on {profile.device}, {profile.num_threads or '-'} threads, spread "
        f"{100 * profile.spread:.1f}%, sha256 {sha256(profile)[:12]}",
    )
