"""Run `xgpt doctor`, and print its findings."""

from __future__ import annotations

import json

import click

from xgpt import api


def run(as_json: bool) -> None:
    """Run the command. See `xgpt.cli.commands`."""
    findings = api.doctor()
    if as_json:
        click.echo(json.dumps([finding.model_dump() for finding in findings], indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.name:{width}}  {finding.value}")
        if finding.advice is not None:
            click.echo(f"{'':{width}}  -> {finding.advice}")
