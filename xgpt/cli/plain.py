"""Run those commands of `commands.py` that print lines, not tables."""

from __future__ import annotations

import html
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xgpt import api
from xgpt.cli import options
from xgpt.cli.options import unchecked_file, write
from xgpt.core.errors import MachineError

if TYPE_CHECKING:
    from xgpt.exporting.export import Target


def serve(plan_path: str, answer_within_s: tuple[tuple[str, float], ...], dry_run: bool, force: bool, **_: Any) -> None:
    def note(line: str) -> None:
        click.echo(line, err=True)

    within = dict(answer_within_s)
    if len(within) < len(answer_within_s):
        raise click.UsageError("--answer-within is given twice for the same requests; leave one out")
    asked = options.given() | {"answer_within_s": within.pop("", None), "answer_within_of": within, "force": force}
    api.serve(plan_path, **asked, on_note=note)
    if dry_run:
        note(f"{plan_path} can be served here")


def export(plan_path: str, target: Target, output: str, monitoring: str, check: bool, force: bool) -> None:
    found = api.export(plan_path, target, monitoring=monitoring)
    written = {name: unchecked_file(Path(output) / name) for name in found.files}
    for name, file in written.items():
        file.check(found.files[name])  # no file is written before all files are checked
    for name, file in written.items():
        write(file, found.files[name])
    for text in found.notes:
        click.echo(f"note: {text}", err=True)
    remedies = list(dict.fromkeys(need.remedy for need in found.needs))
    if check:
        from xgpt.exporting.export import missing

        if lines := missing(found, output):
            click.echo("\n".join(["missing:", *(f"  {line}" for line in lines)]))
            must = f"{len(lines)} of what must exist before {found.starts[0]!r}"
            raise MachineError(f"{must} are missing or not known: see above")
        remedies = []
    click.echo("\n".join([f"next, in {output}:", *(f"  {line}" for line in (*remedies, *found.starts))]))


def ui(port: int, no_browser: bool) -> None:
    # The address is in a file that only its owner can read, since all users can see a browser's arguments and the token
    # in them.
    with tempfile.NamedTemporaryFile("w", prefix="xgpt-ui-", suffix=".html") as opening:

        def show(url: str) -> None:
            click.echo(f"planning at {url} (Ctrl-C ends it)", err=True)
            if not no_browser:
                opening.write(f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">\n')
                opening.flush()
                click.launch(opening.name)

        api.ui(port=port, on_ready=show)


def doctor(as_json: bool) -> None:
    findings = api.doctor()
    if as_json:
        click.echo(json.dumps([finding.model_dump() for finding in findings], indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.name:{width}}  {finding.value}")
        if finding.advice is not None:
            click.echo(f"{'':{width}}  -> {finding.advice}")
