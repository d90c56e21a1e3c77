"""Write JSON schemas from the code's types with `python -m tools.make_schema`: plan.json's to configs/schema, and those
of the commands' --json to docs/reference/schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

from tools.fields import descriptions, reachable
from xgpt.core.schema import Plan, Profile
from xgpt.core.schema.documents import CalibrateOutput, CompareOutput, SessionsOutput, SimulateOutput
from xgpt.core.schema.fleet import FleetPlan
from xgpt.core.schema.replan import Decision
from xgpt.core.schema.report import BenchReport, UrlReport
from xgpt.core.schema.tuning import CheckOutput, TuneOutput
from xgpt.diagnosis import Finding

ROOT = Path(__file__).parent.parent
PATH = ROOT / "configs" / "schema" / "plan.schema.json"
FOLDER = ROOT / "docs" / "reference" / "schemas"
OUTPUTS: dict[str, Any] = {
    "bench": BenchReport | UrlReport | SessionsOutput,
    "calibrate": CalibrateOutput,
    "check": CheckOutput,
    "compare": CompareOutput,
    "doctor": list[Finding],
    "fleet": FleetPlan,
    "plan": Plan,
    "profile": Profile,
    "replan": Decision,
    "simulate": SimulateOutput | SessionsOutput,
    "tune": TuneOutput,
}
"""The type of each command's output with --json."""


def text(type_: Any = Plan) -> str:
    """Return the schema of a type, with the descriptions of its fields."""
    schema = TypeAdapter(type_).json_schema(mode="serialization")
    for root in _models(type_):
        for model in reachable(root):
            definition = schema.get("$defs", {}).get(model.__name__, schema)
            for name, description in descriptions(model).items():
                definition["properties"][name]["description"] = description
    return json.dumps(schema, indent=1) + "\n"


def files() -> dict[Path, str]:
    """Return the content of each file."""
    return {PATH: text()} | {FOLDER / f"{command}.json": text(type_) for command, type_ in OUTPUTS.items()}


def _models(type_: Any) -> Iterator[type[BaseModel]]:
    if isinstance(type_, type) and issubclass(type_, BaseModel):
        yield type_
    for argument in get_args(type_):
        yield from _models(argument)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, content in files().items():
        path.write_text(content)
