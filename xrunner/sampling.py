"""Choose tokens from logits: greedy, or at random after temperature, top-k, top-p, min-p and penalties.

If a row of logits contains NaN, or the row's highest value is infinite, only the row's request fails.

A drawn token depends only on its request: each candidate's random number is a hash of the request's seed, the token's
position and the candidate, so equal logits give equal tokens. Other requests in the batch, or a preemption, may change
the last bits of logits, since products of different sizes are rounded differently. A different token is then drawn only
if two candidates differ by no more than this rounding error. Greedy sampling may then also choose a different token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from xrunner.generation import NO_TOKEN, Logprobs, SamplingParams
from xrunner.grammar import Grammars, GrammarState

MIN_TEMPERATURE = 1e-5
"""At lower temperatures, the division would overflow, and the highest logit is chosen anyway."""

HASH = ((16, 0xFFFF, -2048144789), (13, 0x7FFFF, -1028477387), (16, 0xFFFF, 1))
"""Each round's shift, mask (which makes the shift logical) and factor. Source: MurmurHash3's finaliser."""

RACERS = 2**17
"""Number of candidates whose random numbers are computed together, so that they fit into a processor's cache."""

CANDIDATES = 256
"""Number of highest scores that are sorted first. If top-p needs more, all scores are sorted."""

_SETTINGS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i8"),
        ("top_p", "f8"),
        ("min_p", "f4"),
        ("seed", "u8"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("repetition_penalty", "f4"),
        ("num_logprobs", "i2"),
        ("counts", "i4"),
    ]
)
_GREEDY = np.array((0, 0, 1, 0, 0, 0, 0, 1, -1, -1), _SETTINGS)


class Sampler:
    """Chooses the next tokens of a batch by the sampling parameters of each row's request.

    If all rows are greedy and ask for nothing else, `is_idle` is true, and the caller may use `highest` instead. If
    `takes_highest` is true, the caller may use `highest` of the sum of logits and `clocks`.

    Attributes:
        failed: the reasons why rows got no token in the last call, by index into the call's `rows`. Rows whose logits
            are not finite are left out.
    """

    def __init__(self, vocab_size: int, device: torch.device, grammars: Grammars | None = None) -> None:
        self._vocab_size = vocab_size
        self._settings = np.full(0, _GREEDY)
        self._active: set[int] = set()
        self.grammars = grammars
        self._states: dict[int, GrammarState] = {}
        self.failed: dict[int, str] = {}
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """How often each token occurs in the output, in one line for each request with a penalty."""
        self._prompted = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        """Whether each token occurs in the prompt, in the same lines."""
        self._free_counts: list[int] = []
        self._noise: Tensor | None = None

    @property
    def is_idle(self) -> bool:
        return not self._active

    def takes_highest(self, rows: np.ndarray) -> bool:
        """Return whether each row's token is the one with the highest sum of logit and `clocks`, because no row has a
        setting other than a temperature.
        """
        if self.is_idle:
            return True
        settings = self._settings_of(rows)
        ruled = (settings["temperature"] > 0) & _is_cut(settings, self._vocab_size)
        ruled |= (settings["counts"] >= 0) | (settings["num_logprobs"] >= 0)
        constrained = self._states.keys() | self._biases.keys()
        return not ruled.any() and constrained.isdisjoint(rows.tolist())

    def clocks(self, rows: np.ndarray, positions: np.ndarray) -> Tensor | None:
        """Return the noise to add to logits, for rows whose only setting is a temperature. Return None if all rows are
        greedy.

        The arguments are those of `__call__`.

        Returns:
            # float32 [sampled, vocab]
        """
        settings = self._settings_of(rows)
        drawn = np.flatnonzero(settings["temperature"])
        if not drawn.size:
            return None
        added = torch.zeros(len(rows), self._vocab_size, device=self._counts.device)
        for index, clocks in zip(drawn, self._clocks_of(settings[drawn], positions[drawn]), strict=True):
            torch.mul(clocks, float(settings["temperature"][index]), out=added[index])
        return added

    def _clocks_of(self, settings: np.ndarray, positions: np.ndarray) -> Iterator[Tensor]:
        if self._noise is None:
            self._noise = token_noise(self._vocab_size).to(self._counts.device)
        for at_once in clocks_of(keys_of(settings["seed"], positions), self._noise):
            yield from at_once

    def start(self, row: int, params: SamplingParams, output: Sequence[int] = (), prompt: Sequence[int] = ()) -> None:
        """Store the sampling parameters of a row's request. `output`: tokens that the request had generated before a
        preemption.
        """
        if params.is_plain:
            return
        if row >= len(self._settings):
            self._settings = np.append(self._settings, np.full(row + 1, _GREEDY))
        if params.grammar is not None:
            assert self.grammars is not None, "the server accepts no grammar without a tokenizer"
            self._states[row] = self.grammars.state(params.grammar, output)
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias, strict=True)
            device = self._counts.device
            self._biases[row] = torch.tensor(tokens, device=device), torch.tensor(values, device=device)
        counts = self._take_counts(output, prompt) if params.has_penalty else -1
        self._active.add(row)
        self._settings[row] = (
            params.temperature if params.temperature >= MIN_TEMPERATURE else 0,
            min(params.top_k, self._vocab_size) or self._vocab_size,
            params.top_p,
            params.min_p,
            params.seed % 2**64,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            -1 if params.logprobs is None else params.logprobs,
            counts,
        )

    def release(self, row: int) -> None:
        if row not in self._active:
            return
        self._active.remove(row)
        self._states.pop(row, None)
        self._biases.pop(row, None)
        if (counts := int(self._settings["counts"][row])) >= 0:
            self._free_counts.append(counts)
        self._settings[row] = _GREEDY

    def __call__(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, dict[int, Logprobs]]:
        """Return the next tokens. A row for which none can be chosen gets NO_TOKEN.

        Args:
            logits: # [sampled, vocab]
            rows: the worker's row of each request. # int64 [sampled]
            positions: position of each next token in its sequence. # int32 [sampled]

        Returns:
            The tokens, # int64 [sampled]
            and log probabilities, by index into `rows`, for the requests that ask for them.
        """
        self.failed = {}
        if not len(rows):
            return np.zeros(0, dtype=np.int64), {}
        try:
            return self._choose(logits, rows, positions)
        except Exception:  # one of the rows is at fault, for whatever reason
            return self._one_by_one(logits, rows, positions)

    def _one_by_one(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, dict[int, Logprobs]]:
        tokens = np.full(len(rows), NO_TOKEN, dtype=np.int64)
        logprobs: dict[int, Logprobs] = {}
        failed: dict[int, str] = {}
        for index in range(len(rows)):
            row, self.failed = slice(index, index + 1), {}
            try:
                tokens[row], of_row = self._choose(logits[row], rows[row], positions[row])
            except Exception as error:
                failed[index] = f"no token can be chosen: {type(error).__name__}: {error}"
            else:
                if 0 in self.failed:
                    failed[index] = self.failed[0]
                if 0 in of_row:
                    logprobs[index] = of_row[0]
        self.failed = failed
        return tokens, logprobs

    def _choose(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, dict[int, Logprobs]]:
        """Choose the tokens of all rows together. The state of rows changes only at the end, when nothing can fail any
        more.
        """
        settings = self._settings_of(rows)
        failed = highest(logits) == NO_TOKEN
        if any_failed := bool(failed.any()):
            logits = logits.masked_fill(failed[:, None], 0)
        scores = logits.float()
        penalised = np.flatnonzero(settings["counts"] >= 0)
        if penalised.size or self._states or self._biases:
            scores = scores.clone()
        if penalised.size:
            scores[penalised] = self._penalise(scores[penalised], settings[penalised])
        self._constrain(scores, rows)
        tokens = scores.argmax(dim=-1)
        drawn = np.flatnonzero(settings["temperature"])
        if drawn.size:
            if self._noise is None:
                self._noise = token_noise(self._vocab_size).to(scores.device)
            tokens[drawn] = _draw(scores[drawn], settings[drawn], positions[drawn], self._noise)
        asking = np.flatnonzero(settings["num_logprobs"] >= 0)
        logprobs = logprobs_of(logits[asking], tokens[asking], settings["num_logprobs"][asking]) if asking.size else []
        if penalised.size:
            self._counts[_lines(settings[penalised]), tokens[penalised]] += 1
        if any_failed:
            tokens[failed] = NO_TOKEN
        picked = tokens.cpu().numpy()
        picked[list(self.failed)] = NO_TOKEN
        for row, token in zip(rows.tolist() if self._states else (), picked.tolist(), strict=False):
            if row in self._states and token != NO_TOKEN:
                self._states[row].take(token)
        return picked, dict(zip(asking.tolist(), logprobs, strict=True))

    def _constrain(self, scores: Tensor, rows: np.ndarray) -> None:
        """Add biases to scores, and rule out what grammars do not allow. # float32 [sampled, vocab], int64 [sampled]"""
        if not (self._biases or self._states):
            return
        for index, row in enumerate(rows.tolist()):
            if row in self._biases:
                tokens, values = self._biases[row]
                scores[index, tokens] += values
            if row in self._states:
                if (allowed := self._states[row].allowed()) is None:
                    self.failed[index] = "its output can no longer follow the schema; send a smaller schema"
                else:
                    scores[index].masked_fill_(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def _settings_of(self, rows: np.ndarray) -> np.ndarray:
        settings = np.full(len(rows), _GREEDY)
        known = rows < len(self._settings)
        settings[known] = self._settings[rows[known]]
        return settings

    def _penalise(self, scores: Tensor, settings: np.ndarray) -> Tensor:
        """Apply the repetition, frequency and presence penalties to scores. # float32 [penalised, vocab] -> same"""
        lines = _lines(settings)
        counts = self._counts[lines].float()
        names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
        frequency, presence, repetition = (_column(settings[name], counts) for name in names)
        is_there = (counts > 0) | self._prompted[lines]
        scores = scores.where(~is_there, torch.where(scores > 0, scores / repetition, scores * repetition))
        return scores - frequency * counts - presence * (counts > 0)

    def _take_counts(self, output: Sequence[int], prompt: Sequence[int]) -> int:
        if not self._free_counts:
            old = len(self._counts)
            self._counts = torch.cat([self._counts, self._counts.new_zeros(max(8, old), self._vocab_size)])
            self._prompted = torch.cat([self._prompted, self._prompted.new_zeros(max(8, old), self._vocab_size)])
            self._free_counts.extend(range(old, len(self._counts)))
        line = self._free_counts.pop()
        counted = np.bincount(np.asarray(output, dtype=np.int64), minlength=self._vocab_size)
        self._counts[line] = torch.from_numpy(counted).to(self._counts)
        self._prompted[line] = False
        self._prompted[line, torch.tensor(prompt, dtype=torch.int64, device=self._prompted.device)] = True
        return line


def highest(logits: Tensor) -> Tensor:
    """Return each row's greedy choice, or NO_TOKEN where the logit is NaN or infinite. # [rows, vocab] -> int64
    [rows]
    """
    # numpy and torch both treat a NaN as the highest number.
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # numpy is two to four times as fast
        tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
        best = logits.gather(-1, tokens[:, None])[:, 0]
    else:
        best, tokens = logits.max(dim=-1)
    return tokens.masked_fill_(~best.isfinite(), NO_TOKEN)


def _draw(scores: Tensor, settings: np.ndarray, positions: np.ndarray, noise: Tensor) -> Tensor:
    """Draw one token per row, after temperature, top-k, top-p and min-p.

    Args:
        scores: # float32 [rows, vocab]

    Returns:
        # int64 [rows]
    """
    # Since the highest score is 0, division by a low temperature can at most turn other scores into -inf.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / _column(settings["temperature"], scores)
    cut = np.flatnonzero(_is_cut(settings, scores.shape[-1]))
    if cut.size:
        kept = scores[cut]
        scores[cut] = kept.masked_fill(kept < _lowest_kept(kept, settings[cut]), -torch.inf)
    first, tokens = 0, []
    for clocks in clocks_of(keys_of(settings["seed"], positions), noise):
        tokens.append(clocks.add_(scores[first : first + len(clocks)]).argmax(dim=-1))
        first += len(clocks)
    return torch.cat(tokens)


def _is_cut(settings: np.ndarray, vocab_size: int) -> np.ndarray:
    """Whether top-k, top-p or min-p leaves tokens out. # bool [rows]"""
    return (settings["top_k"] < vocab_size) | (settings["top_p"] < 1) | (settings["min_p"] > 0)


def _lowest_kept(scores: Tensor, settings: np.ndarray, width: int = CANDIDATES) -> Tensor:
    """Return the lowest score in each row that top-k, top-p and min-p keep. Top-p applies to the scores that top-k
    keeps. Equal scores are all kept.

    Args:
        scores: the highest of each row is 0. # float32 [rows, vocab]

    Returns:
        # float32 [rows, 1]
    """
    vocab = scores.shape[-1]
    top_k, top_p, min_p = (_column(settings[name], scores) for name in ("top_k", "top_p", "min_p"))
    limits = settings["top_k"][settings["top_k"] < vocab]
    width = min(vocab, max(width, int(limits.max(initial=0))))
    best = scores.topk(width, dim=-1).values
    weights = best.double().exp().masked_fill(torch.arange(width, device=best.device) >= top_k, 0)
    total = torch.where(top_k < vocab, weights.sum(-1, keepdim=True), scores.double().exp().sum(-1, keepdim=True))
    reached = weights.cumsum(dim=-1) >= top_p * total
    is_found = reached.any(dim=-1, keepdim=True)
    if width < vocab and not bool((is_found | (top_k < vocab) | (top_p == 1)).all()):
        return _lowest_kept(scores, settings, vocab)
    last = torch.where((top_p < 1) & is_found, reached.int().argmax(dim=-1, keepdim=True), top_k.long() - 1)
    lowest = best.gather(-1, last.clamp(max=width - 1))
    lowest = lowest.masked_fill((top_k == vocab) & (top_p == 1), -torch.inf)
    return torch.maximum(lowest, min_p.log())


def clocks_of(keys: np.ndarray, noise: Tensor) -> Iterator[Tensor]:
    """Return Gumbel noise: the token with the highest sum of log weight and noise is a sample drawn by weight.

    Each number is the negative logarithm of an exponentially distributed time, the token's clock. If a clock's rate is
    the token's weight, the probability that this clock is the shortest is in proportion to the weight. A token's clock
    depends only on the row's key and the token. So if weights differ by rounding errors, a different token is drawn
    only if two clocks differ by no more than these errors. Inverting the cumulative distribution would add up the
    rounding errors of all tokens.

    Args:
        keys: key of each row. # uint64 [rows]
        noise: random bits of each token. # int32 [vocab]

    Returns:
        The numbers, some rows at a time, in order. # float32 [rows, vocab]
    """
    halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2)).to(noise.device)
    for half in halves.split(max(1, RACERS // len(noise))):
        bits = (noise ^ half[:, :1]).mul_(half[:, 1:] | 1)
        for shift, mask, factor in HASH:
            bits ^= (bits >> shift).bitwise_and_(mask)
            bits *= factor
        uniform = bits.bitwise_and_(2**31 - 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
        yield uniform.neg_().log1p_().neg_().log_().neg_()


def token_noise(vocab_size: int) -> Tensor:
    """Return random bits for each token, the same on every machine. # int32 [vocab]"""
    return torch.from_numpy(_mix(np.arange(vocab_size, dtype=np.uint64)).astype(np.uint32).view(np.int32))


def keys_of(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return random bits for each pair of a seed and a position. # uint64 [rows]

    Source: SplitMix64's output function (Steele, Lea, Flood 2014), once over the seed and once with the position.
    """
    return _mix(_mix(seeds) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: np.ndarray) -> list[Logprobs]:
    """Return the log probabilities of each row's token and of the most probable ones, before penalties and temperature.

    Args:
        logits: # [rows, vocab]
        tokens: # int64 [rows]
        num_top: number of most probable tokens to report. # int [rows]
    """
    if not len(tokens):
        return []
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in logprobs.topk(int(num_top.max()), dim=-1))
    return [
        Logprobs(logprob, tuple(zip(top_ids[:count], top[:count], strict=True)))
        for logprob, top_ids, top, count in zip(chosen, ids, values, num_top.tolist(), strict=True)
    ]


def _lines(settings: np.ndarray) -> Tensor:
    """Return the rows of `_counts` to which these settings refer. # int64 [rows]"""
    return torch.from_numpy(settings["counts"].astype(np.int64))


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    """Return a column with one number per row, to broadcast over the vocabulary. # [rows, 1]"""
    return torch.from_numpy(values.astype(np.float64)).to(like)[:, None]
