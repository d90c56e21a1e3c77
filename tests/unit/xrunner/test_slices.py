"""A large step runs in slices: the same tokens, in order, no slice above the limit."""

from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.policies import Chunk, Step
from xrunner.worker import slices


@given(
    decodes=st.integers(0, 12),
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=6),
    most=st.integers(1, 30),
)
def test_slices_cover_a_step(decodes, lengths, most):
    step = Step(tuple(Chunk(100 + i, *piece) for i, piece in enumerate(lengths)), tuple(range(decodes)))
    parts = list(slices(step, most))
    assert [id_ for part in parts for id_ in part.decode] == list(step.decode)
    tokens = [(c.id, t) for part in parts for c in part.encode for t in range(c.start, c.start + c.length)]
    assert tokens == [(c.id, t) for c in step.encode for t in range(c.start, c.start + c.length)]
    for i, part in enumerate(parts):
        size = len(part.decode) + sum(c.length for c in part.encode)
        assert 0 < size <= (most if i or decodes < most else decodes + 1)
