"""xgpt doctor"""

from __future__ import annotations

import click

from xgpt.cli.options import json_option


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Describe this machine and what xgpt keeps on it, and list what keeps its figures from being trusted.

    \b
    Example:
      xgpt doctor
    """
    import json

    from xgpt import api

    findings = api.doctor()
    if as_json:
        click.echo(json.dumps([finding.model_dump() for finding in findings], indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.name:{width}}  {finding.value}")
        if finding.advice is not None:
            click.echo(f"{'':{width}}  -> {finding.advice}")
