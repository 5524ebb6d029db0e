"""Loads from the inbox over several steps: every byte once and in its place, no step without a share, ended once by whatever way."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from disagg.engine.load_room import PIECE_BYTES, SPREAD_STEPS, STEP_SHARE, LoadRoom  # noqa: E402
from disagg.engine.vllm_loads import RankLoads  # noqa: E402 (needs torch)
from disagg.engine.vllm_memory import CacheBlocks, RankBoxes  # noqa: E402
from disagg.engine.vllm_plan import Copy, Load  # noqa: E402
from disagg.kv.layout import KvLayout  # noqa: E402

LAYERS, BLOCKS, BLOCK_BYTES, TOKENS = 2, 40, 64, 32
SLAB_BYTES = LAYERS * BLOCK_BYTES
BOX_BLOCKS = 64
ONE_PIECE_S, FOR_EVER_S = 0.0, 1e9


class Rank:
    """A rank's cache of zeros and an inbox of numbers; its loads go by `piece_blocks` blocks."""

    def __init__(self, piece_blocks: int = 1) -> None:
        self.cache = torch.zeros(LAYERS, BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        inbox = mmap.mmap(-1, BOX_BLOCKS * SLAB_BYTES)
        self.inbox = torch.frombuffer(inbox, dtype=torch.uint8).view(BOX_BLOCKS, LAYERS, BLOCK_BYTES)
        self.inbox.copy_(torch.arange(1, 1 + BOX_BLOCKS, dtype=torch.uint8)[:, None, None])
        layout = KvLayout("m", "b", "uint8", TOKENS, LAYERS, BLOCK_BYTES)
        blocks = CacheBlocks.of({f"layer.{i}": self.cache[i] for i in range(LAYERS)}, BLOCKS)
        boxes = RankBoxes(blocks, layout, 0, mmap.mmap(-1, SLAB_BYTES), inbox, lambda _: None)
        self.loads = RankLoads(boxes, PIECE_BYTES // piece_blocks)

    @property
    def filled(self) -> dict[int, int]:
        """Cache block -> number of the inbox block that lies in it whole, of those that are not empty."""
        firsts = self.cache[0, :, 0]
        assert torch.equal(self.cache, firsts[None, :, None].expand_as(self.cache)), "a block is filled in part"
        return {i: int(n) - 1 for i, n in enumerate(firsts) if n}


def copy_of(name: str, first_block: int, block_ids: Any, box_block: int = 0) -> Copy:
    """A copy to cache blocks `block_ids` from an entry that begins at `box_block` and holds as many blocks as it needs."""
    return Copy(name, box_block * SLAB_BYTES, (first_block + len(block_ids)) * TOKENS, first_block, tuple(block_ids))


def ended(rank: Rank) -> list[tuple[str, str]]:
    return [(request_id, copy.transfer_id) for request_id, copy in rank.loads.take_ended()]


@pytest.mark.parametrize("piece_blocks", [1, 2, 3, 7, 8])
def test_a_load_comes_in_pieces_and_ends_with_its_last_block(piece_blocks: int) -> None:
    rank = Rank(piece_blocks)
    ids = [30, 4, 5, 6, 9, 8, 20]
    rank.loads.begin([Load("r", copy_of("t", 3, ids, box_block=10))])
    for step in range(1, -(-len(ids) // piece_blocks) + 1):
        assert ended(rank) == []
        rank.loads.advance(ONE_PIECE_S)
        done = ids[: step * piece_blocks]
        assert rank.filled == {block: 13 + i for i, block in enumerate(done)}
    assert ended(rank) == [("r", "t")]
    rank.loads.advance(FOR_EVER_S)
    assert ended(rank) == []


def test_a_step_with_time_loads_all_of_them() -> None:
    rank = Rank()
    rank.loads.begin([Load("a", copy_of("ta", 0, range(9))), Load("b", copy_of("tb", 0, range(9, 12), box_block=20))])
    rank.loads.advance(FOR_EVER_S)
    assert ended(rank) == [("a", "ta"), ("b", "tb")]
    assert rank.filled == {**{i: i for i in range(9)}, **{9 + i: 20 + i for i in range(3)}}


def test_what_waits_does_not_grow_without_end() -> None:
    """However little time there is: a load of 20 blocks with every step, and each is over within so many steps."""
    rank = Rank()
    waits: dict[str, int] = {}
    for step in range(120):
        rank.loads.begin([Load(str(step), copy_of("t", 0, range(20)))])
        rank.loads.advance(ONE_PIECE_S)
        for request_id, _ in ended(rank):
            waits[request_id] = step - int(request_id)
    assert len(waits) >= 120 - SPREAD_STEPS - 1
    assert max(waits.values()) <= SPREAD_STEPS + 1
    assert [*waits] == sorted(waits, key=int), "first come, first served"


def test_a_load_that_is_given_up_ends_at_once_and_writes_no_more() -> None:
    rank = Rank()
    rank.loads.begin([Load("a", copy_of("ta", 0, range(5))), Load("b", copy_of("tb", 0, range(5, 10)))])
    rank.loads.advance(ONE_PIECE_S)
    rank.loads.give_up(["a", "never seen"])
    assert ended(rank) == [("a", "ta")]
    rank.loads.advance(FOR_EVER_S)
    assert ended(rank) == [("b", "tb")]
    assert set(rank.filled) == {0, 5, 6, 7, 8, 9}
    rank.loads.give_up(["a", "b"])
    assert ended(rank) == [], "vLLM must be told once: it would not know the request the second time"


@pytest.mark.parametrize("way", ["sliced", "at once"])
def test_a_load_from_outside_the_inbox_fails_its_blocks_alone(way: str) -> None:
    rank = Rank()
    bad, good = copy_of("bad", 0, [1, 2, 3], box_block=BOX_BLOCKS - 2), copy_of("good", 0, [7])
    if way == "sliced":
        rank.loads.begin([Load("b", bad), Load("g", good)])
        assert ended(rank) == [("b", "bad")]
        rank.loads.advance(FOR_EVER_S)
        assert ended(rank) == [("g", "good")]
    else:
        rank.loads.load([bad, good])
        assert ended(rank) == []
    assert rank.loads.take_failed_blocks() == {1, 2, 3}
    assert rank.loads.take_failed_blocks() == set()
    assert rank.filled == {7: 0}


MIB = 1 << 20


def test_a_load_that_one_step_has_time_for_is_made_at_once() -> None:
    room = LoadRoom(on_host=True)
    step_s = 0.1  # 8 ms of copying: 8 MB
    assert room.fits(3 * MIB, step_s)  # a short chat's
    assert not room.fits(90 * MIB, step_s)  # a document's


def test_loads_made_at_once_share_one_step() -> None:
    room = LoadRoom(on_host=True)
    step_s, num_bytes = 0.1, 3 * MIB
    taken = 0
    while room.fits(num_bytes, step_s):
        room.take(num_bytes)
        taken += num_bytes
    assert num_bytes <= taken <= STEP_SHARE * step_s * 1e9
    room.clear()
    assert room.fits(num_bytes, step_s)


def test_what_is_not_worth_slicing_is_made_at_once_whatever_the_step() -> None:
    room = LoadRoom(on_host=True)
    room.take(50 * MIB)
    assert room.fits(PIECE_BYTES, 0.0)
    assert not room.fits(PIECE_BYTES + 1, 0.0)


def test_a_device_copies_more_in_the_same_time() -> None:
    assert LoadRoom(on_host=False).fits(20 * MIB, 0.02)
    assert not LoadRoom(on_host=True).fits(20 * MIB, 0.02)
