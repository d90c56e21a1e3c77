"""The published JSON schema is the code's."""

from tools import make_schema


def test_the_published_schema_of_plan_json_is_current():
    assert make_schema.PATH.read_text() == make_schema.text(), "run python -m tools.make_schema"
