"""Compute keys of prompts' blocks, by which the schedule finds K/V that is already cached."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from xgpt.core.policies import Request
from xgpt.core.schema.step_log import Account, Chain
from xrunner.generation import Generation

KEY_BYTES = 16


class Prefixes:
    """Hash chains: a block's key is the hash of its tokens and of the key before it.

    Each account has separate chains, so that no account can infer from times to first token what another account has
    sent. The chains start from a secret of this process, so that no client can construct two prompts with the same key.
    Without `reuse`, prompts and outputs have no keys.
    """

    def __init__(self, reuse: bool = True) -> None:
        self._reuse = reuse
        self._secret = secrets.token_bytes(32)
        self._roots: dict[str, bytes] = {}
        self._last: tuple[Sequence[int], int, str, Chain] = ((), 0, "", ())
        """The last prompt, its block size, account and chain."""

    def of_prompt(self, generation: Generation, block_size: int) -> Chain:
        """Return the keys of a prompt's full blocks. Return () if the prompt is scored, since all its tokens must then
        be computed.
        """
        if generation.is_scored or not self._reuse:
            return ()
        prompt, size, account, chain = self._last
        if not (generation.prompt is prompt and block_size == size and generation.account.key == account):
            chain = self.extend((), generation.prompt, block_size, generation.account)
            self._last = generation.prompt, block_size, generation.account.key, chain
        return chain

    def of_outputs(self, ended: list[Request], tokens: Callable[[int], Sequence[int]], size: int) -> dict[int, Chain]:
        """Return the keys of the full blocks that follow the prompt's. These blocks stay in the cache after the
        requests' ends.

        Args:
            tokens: returns a request's tokens, except for the last, which has no K/V.
        """
        return {one.id: self.extend(one.chain, tokens(one.id), size, one.account) for one in ended if self._reuse}

    def extend(self, chain: Chain, tokens: Sequence[int], block_size: int, account: Account) -> Chain:
        previous = chain[-1] if chain else self._root(account)
        width = 4 * block_size
        ids = array("i", tokens[len(chain) * block_size :]).tobytes()
        keys = []
        for begin in range(0, len(ids) - width + 1, width):
            previous = blake2b(previous + ids[begin : begin + width], digest_size=KEY_BYTES).digest()
            keys.append(previous)
        return tuple(keys)

    def _root(self, account: Account) -> bytes:
        name = account.key
        if name not in self._roots:
            self._roots[name] = blake2b(name.encode(), digest_size=KEY_BYTES, key=self._secret).digest()
        return self._roots[name]
