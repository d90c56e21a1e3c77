"""The roofline measures a model's steps in every type that a CPU runs."""

import pytest

from benchmarks import roofline
from tests.rings import few
from xgpt.checkpoints.files import read_spec


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "int8"]))
def test_each_step_has_a_floor_in_each_type(checkpoint, monkeypatch, dtype):
    for name in ("BATCHES", "CONTEXTS", "PROMPTS"):
        monkeypatch.setattr(roofline, name, (2, 16))
    monkeypatch.setattr(roofline, "READ", {"cpu": 2**12})
    monkeypatch.setattr(roofline, "PRODUCT", {"cpu": 64})
    spec = read_spec(checkpoint("opt-tied")[0])
    found = roofline.measure(spec, "cpu", dtype, 0.0, context=8, batch=2)
    assert len(found["steps"]) == 6 and all(step["seconds"] > 0 and step["share"] > 0 for step in found["steps"])
    bytes_each = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    assert roofline.matrix_bytes(spec, dtype) == bytes_each * (roofline.layer_params(spec) + 211 * 64)
    lines = roofline.tables(found).splitlines()
    assert dtype in lines[0] and sum("x" in line for line in lines[3:]) >= 6
