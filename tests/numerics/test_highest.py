"""Greedy choices by way of a head in eight bits: the tokens of float32, in every policy and part of a model."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from tests.numerics.served import MAX_OUTPUT, PROMPTS, greedy, run, served_here, served_on
from tests.planned import placements_of, planned, problem_of
from tests.rings import examples, few
from xgpt.core.schema import HEAD
from xgpt.serving.engine_process import build_engine
from xrunner.cpu.highest import MOST_REST, Screen
from xrunner.generation import Generation, SamplingParams
from xrunner.packing import choice
from xrunner.packing.choice import fastest_head
from xsimulator.memory import LaneMemory
from xsimulator.stages import StageShape, whole

LAYOUTS = [name for name in choice.layouts_of("int8") if choice.LAYOUTS[name].pack_highest is not None]
if not LAYOUTS:
    pytest.skip("this processor has none of our products in eight bits", allow_module_level=True)


def screen_of(weight, whole, layout=LAYOUTS[0]):
    return choice.pack_highest(weight, whole, {HEAD: layout})


class Counting:
    """The product in float32, and the rows that it was asked for."""

    def __init__(self, weight):
        self.weight, self.rows = weight, []

    def __call__(self, x, bias):
        self.rows.append(len(x))
        return linear(x, self.weight, bias)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5000, 64), (5003, 70), (4097, 300)])
def test_the_highest_is_that_of_float32(layout, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1)
    whole = Counting(weight)
    screen = screen_of(weight, whole, layout)
    for rows in (1, 2, 17, 130):
        x = torch.randn(rows, shape[1]) * torch.logspace(-6, 6, rows)[:, None]
        exact, found = linear(x.double(), weight.double()), screen(x)
        assert found.argmax(dim=1).equal(exact.argmax(dim=1))
        torch.testing.assert_close(found.amax(dim=1).double(), exact.amax(dim=1), rtol=1e-5, atol=0)
    assert not whole.rows, "these were to be found without the whole product"


@settings(max_examples=examples(60, 15))
@given(
    st.integers(0, 2**32 - 1),
    st.integers(33, 600),
    st.integers(1, 90),
    st.integers(1, 9),
    st.floats(0.0, 1.5),
    st.booleans(),
    st.sampled_from((None, 0.1, 10.0)),
)
def test_the_highest_of_any_weights(seed, num_outputs, depth, rows, spread, alike, more):
    """Of several sizes, inputs with outliers, outputs nearly or wholly the same, or with more added to each."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator) * torch.randn(shape[-1:], generator=generator).mul(spread).exp()

    weight, x = numbers(num_outputs, depth), numbers(rows, depth)
    if alike:
        weight[num_outputs // 2 :] = weight[: num_outputs - num_outputs // 2] * (1 + 1e-4)
    screen = screen_of(weight, lambda x, bias: linear(x, weight, bias))
    exact = linear(x.double(), weight.double())
    added = None if more is None else more * torch.randn(rows, num_outputs, generator=generator)
    if added is not None:
        exact += added
    chosen = exact.gather(1, screen(x, added).argmax(dim=1, keepdim=True))[:, 0]
    slack = 1e-5 * (x.norm(dim=1) * weight.norm(dim=1).amax() + (more or 0))  # what float32 itself may confuse
    assert (chosen >= exact.amax(dim=1) - slack).all()


def test_where_too_many_can_be_the_highest_the_whole_product_is_made_and_screening_rests():
    torch.manual_seed(0)
    weight = torch.randn(1, 40) + torch.randn(2000, 40) * 1e-4
    whole = Counting(weight)
    screen, x, tries = screen_of(weight, whole), torch.randn(3, 40), []
    product = screen._product
    screen._product = lambda x, bias: (tries.append(len(x)), product(x, bias))[1]
    for _ in range(400):
        torch.testing.assert_close(screen(x), linear(x, weight))
    assert len(whole.rows) == 400
    # Of 400 calls it has tried again after 1, 3, 7, ... 63 others.
    assert len(tries) == 5 + -(-(400 - sum((2, 4, 8, 16, 32))) // (MOST_REST + 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_rows_that_are_not_finite_are_those_of_float32_and_touch_no_other(value):
    torch.manual_seed(0)
    weight, x = torch.randn(3000, 32), torch.randn(3, 32)
    screen = screen_of(weight, lambda x, bias: linear(x, weight, bias))
    x[1, 3] = value
    found, expected = screen(x), linear(x, weight)
    torch.testing.assert_close(found[1], expected[1], equal_nan=True)
    assert found[[0, 2]].argmax(dim=1).equal(expected[[0, 2]].argmax(dim=1))


def test_a_weight_that_is_not_finite_is_not_screened():
    weight, x = torch.randn(300, 32), torch.randn(3, 32)
    weight[5, 5] = float("inf")
    screen = screen_of(weight, lambda x, bias: linear(x, weight, bias))
    torch.testing.assert_close(screen(x), linear(x, weight), equal_nan=True)


def test_the_fastest_is_measured(monkeypatch):
    """A large head is found sooner in eight bits; where that takes longer, it is done without."""
    assert fastest_head((64, 64), {}) in ({}, *({HEAD: name} for name in LAYOUTS))
    monkeypatch.setattr(choice, "mean_times", lambda ways, *_, **__: {name: 1.5 if name else 1.0 for name in ways})
    assert fastest_head((64, 64), {}) == {}
    found = {"": 3.0, LAYOUTS[-1]: 1.0}
    monkeypatch.setattr(choice, "mean_times", lambda ways, *_, **__: {name: found.get(name, 1.2) for name in ways})
    assert fastest_head((64, 64), {}) == {HEAD: LAYOUTS[-1]}


def screening(directory, num_devices):
    """The problem of a checkpoint whose profile has found a head in eight bits faster."""
    problem = problem_of(directory, num_devices)
    return replace(problem, profile=problem.profile.model_copy(update={"layouts": {HEAD: LAYOUTS[0]}}))


@pytest.fixture
def screened_rows(monkeypatch):
    """Rows that a screen has been asked for."""
    rows, call = [], Screen.__call__
    monkeypatch.setattr(
        Screen, "__call__", lambda screen, x, added=None: (rows.append(len(x)), call(screen, x, added))[1]
    )
    return rows


@pytest.mark.parametrize("name", few(["t5-tied", "opt-tied", "gemma3_text-tied"]))
@pytest.mark.parametrize("kind", few(["chunked", "rra", "orca", "static"]))
def test_planned_tokens_are_those_of_transformers(checkpoint, screened_rows, name, kind):
    directory, model = checkpoint(name)
    assert served_here(planned(screening(directory, 1), kind)) == greedy(model)
    assert sum(screened_rows) >= MAX_OUTPUT * len(PROMPTS)


@pytest.mark.parametrize("name", few(["opt-tied", "t5-tied"]))
@pytest.mark.parametrize("batching", few(["slots", "rows", "padded"]))
def test_tokens_of_rows_are_those_of_transformers(checkpoint, screened_rows, name, batching):
    directory, model = checkpoint(name)
    assert run(build_engine(planned(screening(directory, 1), "static"), batching=batching)) == greedy(model)
    assert screened_rows


@pytest.mark.long
@pytest.mark.parametrize("kind", ["waa", "static"])
def test_tokens_on_two_devices_are_those_of_transformers(checkpoint, workers, kind):
    """Ranks have a share of the vocabulary each, and last stages a head without an embedding."""
    directory, model = checkpoint("opt-tied")
    problem, expected = screening(directory, 2), greedy(model)
    for placement in {place.layouts: place for place in placements_of(problem, kind)}.values():
        assert served_on(workers, planned(problem, kind, placement)) == expected


@pytest.mark.parametrize(
    ("rules", "is_screened"),
    [({}, True), ({"logprobs": 2}, False), ({"top_p": 0.8}, False), ({"frequency_penalty": 0.5}, False)],
)
@pytest.mark.parametrize(
    ("name", "batching"), few([("opt-tied", "flat"), ("opt-tied", "rows"), ("gemma2-grouped", "flat")])
)
def test_requests_that_draw_get_the_tokens_of_all_logits(checkpoint, screened_rows, name, batching, rules, is_screened):
    directory, _ = checkpoint(name)
    outputs = []
    for problem in (problem_of(directory, 1), screening(directory, 1)):
        engine, tokens = build_engine(planned(problem, "static"), batching=batching), []
        for id_, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=0.8, seed=id_, **rules) if id_ % 2 else SamplingParams()
            engine.submit(Generation(id_, prompt, MAX_OUTPUT, sampling=sampling))
        while (step := engine.step()) is not None:
            tokens += [(t.id, t.token, t.logprobs) for t in step]
        outputs.append(tokens)
    assert outputs[0] == outputs[1]
    assert name != "opt-tied" or (sum(screened_rows) >= MAX_OUTPUT * len(PROMPTS)) == is_screened


def test_memory_counts_the_copy_in_eight_bits(checkpoint):
    directory, _ = checkpoint("opt-tied")
    without, screened = (planned(build(directory, 1), "static") for build in (problem_of, screening))
    assert screened.precision.screens and not without.precision.screens
    spec = without.model
    two_stages = (StageShape(1, 1, 0, embeds=True, heads=False), StageShape(1, 1, 0, embeds=False, heads=True))
    bytes_ = [
        LaneMemory(spec, plan.cluster, plan.precision, lane, plan.block_size).weight_bytes.tolist()
        for lane in (whole(spec), two_stages)
        for plan in (without, screened)
    ]
    table = spec.vocab_size * spec.hidden_size
    more = table + 8 * spec.vocab_size
    assert bytes_[1] == [bytes_[0][0] + more]
    assert bytes_[3] == [bytes_[2][0], bytes_[2][1] + more + 4 * table], "a last stage has no embedding to read from"
    untied = spec.model_copy(update={"tie_embeddings": False})  # of a profile that a model of the same shape shares
    alone, both = (
        LaneMemory(untied, plan.cluster, plan.precision, whole(spec), plan.block_size).weight_bytes.tolist()
        for plan in (without, screened)
    )
    assert both == [alone[0] + more + 4 * table]
