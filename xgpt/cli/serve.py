"""xgpt serve"""

from __future__ import annotations

import click


@click.command("serve")
@click.argument("plan_path", metavar="PLAN.JSON")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option("--dry-run", is_flag=True, help="Check devices, memory and checkpoint; start nothing.")
@click.option("--step-log", metavar="FILE", help="Write every executed step to FILE, one JSON line each.")
def command(plan_path: str, host: str, port: int, dry_run: bool, step_log: str | None) -> None:
    """Run a plan behind an OpenAI-compatible endpoint.

    \b
    Example:
      xgpt serve plan.json --port 8000
      curl localhost:8000/v1/completions -d '{"model": "opt-125m", "prompt": [2, 100, 200], "max_tokens": 8}'
    """
    from pathlib import Path

    from xgpt.app.serving import check_plan, serve_plan
    from xgpt.io import load_json
    from xgpt.schema import Plan

    plan = load_json(Path(plan_path), Plan, "plan")
    if dry_run:
        check_plan(plan)
        click.echo(f"{plan_path} can be served here", err=True)
        return
    serve_plan(plan, host, port, None if step_log is None else Path(step_log))
