"""The steady decode batch of RRA, where the paper's formula is biased: a table of figures to be met.

Source: ExeGPT sec. 6; lengths of its Table 3. The lengths are decode iterations: as the encode pass emits the first
token, outputs are one token longer.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from xgpt.core.policies import LaneSettings, OneLane, Pool, Step
from xgpt.core.schema import Constant, Histogram, TruncatedNormal, Workload
from xgpt.core.workload import histogram, sample
from xsimulator.events import SimulatedEngine, SimulatedRequest
from xsimulator.lengths import Lengths, phases, steady_decode_batch

NUM_PHASES = 400

CASES = pytest.mark.parametrize(
    ("mean", "sd", "longest", "decode_iterations", "encode_batch", "paper", "exact"),
    [
        (32, 13, 80, 13, 52, 131.0, 153.2),
        (32, 13, 80, 7, 49, 203.5, 247.0),
        (128, 68, 320, 16, 20, 123.7, 174.8),
        (192, 93, 480, 64, 20, 57.6, 71.2),
    ],
)


def workload(mean: int, sd: int, longest: int) -> Workload:
    decodes = histogram(TruncatedNormal(mean=mean, sd=sd, max=longest))
    outputs = Histogram(lengths=tuple(d + 1 for d in decodes.lengths), probabilities=decodes.probabilities)
    return Workload(name="golden", input=histogram(Constant(value=8)), output=outputs)


def papers_decode_batch(lengths: Lengths, encode_batch: float, decode_iterations: int, weights: np.ndarray) -> float:
    """B_E / sum_U P_D(U), with P_D(U) = E[1/c]: the share of decoding requests that end in a phase."""
    ends = 1 / phases(lengths.outputs - 1, decode_iterations)
    return float(encode_batch / (weights @ ends))


@CASES
def test_formulas(
    mean: int, sd: int, longest: int, decode_iterations: int, encode_batch: int, paper: float, exact: float
) -> None:
    lengths = Lengths(workload(mean, sd, longest))
    assert steady_decode_batch(lengths, encode_batch, decode_iterations) == pytest.approx(exact, abs=0.06)

    arriving = lengths.output_probabilities
    assert papers_decode_batch(lengths, encode_batch, decode_iterations, arriving) == pytest.approx(paper, abs=0.06)
    # Requests that stay longer are met more often in decode: weighted so, the paper's formula becomes exact.
    staying = arriving * phases(lengths.outputs - 1, decode_iterations)
    staying /= staying.sum()
    assert papers_decode_batch(lengths, encode_batch, decode_iterations, staying) == pytest.approx(exact, abs=0.06)


@pytest.mark.long
@CASES
def test_the_rule_runs_at_the_exact_figure(
    mean: int, sd: int, longest: int, decode_iterations: int, encode_batch: int, paper: float, exact: float
) -> None:
    subject = workload(mean, sd, longest)
    lengths = Lengths(subject)
    inputs, outputs = sample(subject, NUM_PHASES * encode_batch, np.random.default_rng(0))
    pool = Pool(kv_blocks=len(inputs) * (longest + 9), block_size=1)
    settings = LaneSettings(
        mix=False,
        encode_every=decode_iterations,
        encode_tokens=encode_batch * lengths.mean_input,
        carried_batch=exact - encode_batch,
        decode_batch=exact,
    )
    requests = [SimulatedRequest(i, int(n), longest + 1, int(outputs[i])) for i, n in enumerate(inputs)]

    def constant(start_ns: int, _step: Step) -> int:
        return start_ns + 1000

    log = SimulatedEngine(OneLane(settings, pool), constant, requests).run()
    # The first decode iteration after each step that encodes, without the beginning and the end of the run.
    peaks = [len(after.decode) for before, after in pairwise(log) if before.encode]
    simulated = float(np.mean(peaks[NUM_PHASES // 4 : NUM_PHASES * 9 // 10]))
    assert simulated == pytest.approx(exact, rel=0.01)
    assert simulated > 1.1 * paper
