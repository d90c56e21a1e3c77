"""Blocks are free, in use or kept, never two of these and never none; the one unused for longest is given up first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rings import examples
from xgpt.core.policies import Blocks, BlockTable
from xgpt.core.schema.step_log import Chain

NUM_BLOCKS = 12


def chain_of(words: str) -> Chain:
    """The keys of a sequence of one-letter blocks."""
    return tuple(words[: end + 1].encode() for end in range(len(words)))


def enter(blocks: Blocks, words: str) -> BlockTable:
    """A request for these blocks, the last of which is its own, as the pool lets it in."""
    table = blocks.share(blocks.find(chain_of(words), len(words) - 1).blocks)
    for _ in range(len(words) - table.found):
        blocks.grow(table)
    return table


class Reference:
    """The same without any cleverness: what each block holds, and when it was last used."""

    def __init__(self) -> None:
        self.holds: dict[int, bytes] = {}
        self.released: dict[int, int] = {}
        """When a block that is kept was released."""
        self._clock = 0

    def check(self, blocks: Blocks, inside: list[BlockTable]) -> None:
        uses = Counter(block for table in inside for block in table.blocks)
        assert blocks.num_used == len(uses)
        assert blocks.num_kept == len(self.holds.keys() - uses.keys()) == len(self.released)
        assert blocks.num_used + blocks.num_kept <= blocks.count
        shared = [block for block, count in uses.items() if count > 1]
        assert all(not blocks.count_own(table, ()) or not set(shared) >= set(table.blocks) for table in inside)
        keys = list(self.holds.values())
        assert len(set(keys)) == len(keys)
        for key, block in ((key, block) for block, key in self.holds.items()):
            assert blocks.find((key,), 1)[2:] == ((block,), block in uses)

    def given(self, table: BlockTable, before: int) -> None:
        """Blocks that were handed out: of those kept, the oldest."""
        for block in table.blocks[before:]:
            if block in self.released:
                assert self.released[block] == min(self.released.values())
                del self.released[block], self.holds[block]

    def shared(self, table: BlockTable) -> None:
        for block in table.blocks[: table.found]:
            self.released.pop(block, None)

    def named(self, table: BlockTable, chain: Chain, first: int) -> None:
        for block, key in list(zip(table.blocks, chain, strict=False))[first : table.named]:
            if key not in self.holds.values():
                self.holds[block] = key

    def forgotten(self, chain: Chain) -> None:
        self.holds = {block: key for block, key in self.holds.items() if key not in chain}
        self.released = {block: at for block, at in self.released.items() if block in self.holds}

    def left(self, table_blocks: list[int], inside: list[BlockTable]) -> None:
        uses = {block for table in inside for block in table.blocks}
        for block in reversed(table_blocks):
            self._clock += 1
            if block not in uses and block in self.holds:
                self.released[block] = self._clock


@settings(max_examples=examples(200, 40))
@given(data=st.data())
def test_no_block_is_lost_whatever_comes_and_goes(data: st.DataObject) -> None:
    blocks, reference = Blocks(NUM_BLOCKS), Reference()
    inside: list[tuple[BlockTable, str]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        words = data.draw(st.text("ab", min_size=1, max_size=5))
        found = blocks.find(chain_of(words), len(words) - 1)
        fits = blocks.num_used + len(words) - found.num_used <= NUM_BLOCKS
        action = data.draw(st.sampled_from(["enter", "name", "leave", "fail"]))
        if action == "enter" and fits:
            table = enter(blocks, words)
            assert table.found == len(found.blocks)
            reference.shared(table)
            reference.given(table, table.found)
            inside.append((table, words))
        elif action == "name" and inside:
            table, words = inside[data.draw(st.integers(0, len(inside) - 1))]
            before = table.named
            blocks.name(table, chain_of(words), data.draw(st.integers(0, len(words))))
            reference.named(table, chain_of(words), before)
        elif action in ("leave", "fail") and inside:
            table, words = inside.pop(data.draw(st.integers(0, len(inside) - 1)))
            was = list(table.blocks)
            if action == "fail":
                blocks.forget(chain_of(words))
                reference.forgotten(chain_of(words))
            blocks.release(table)
            reference.left(was, [table for table, _ in inside])
        reference.check(blocks, [table for table, _ in inside])
    for table, _ in inside:
        blocks.release(table)
    assert blocks.num_used == 0


def test_a_prompt_finds_what_another_has_left_and_no_more() -> None:
    blocks = Blocks(6)
    first = enter(blocks, "abc")
    assert enter(blocks, "abd").found == 0, "nothing has been computed yet"
    blocks.name(first, chain_of("abc"), 3)
    assert blocks.find(chain_of("abd"), 3).blocks == tuple(first.blocks[:2])
    assert blocks.find(chain_of("abc"), 2).blocks == tuple(first.blocks[:2]), "the last token is always executed"
    assert blocks.find(chain_of("bc"), 2).blocks == (), "a block is what its tokens and all before them are"


def test_the_end_of_what_was_used_longest_ago_goes_first() -> None:
    blocks = Blocks(4)
    for words in ("ab", "cd"):
        table = enter(blocks, words)
        blocks.name(table, chain_of(words), 2)
        blocks.release(table)
    assert (blocks.num_used, blocks.num_kept) == (0, 4)
    enter(blocks, "abe")  # shares a and b, and takes what was kept last of c and d
    assert blocks.find(chain_of("cd"), 2).blocks == blocks.find(chain_of("c"), 1).blocks != ()
