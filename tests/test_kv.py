"""Pages, the cache behind them and packed batches. The page table is driven through random lives of many sequences."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specctl.kv.batch import Batch, Span
from specctl.kv.cache import KVCache, LayerKV
from specctl.kv.pages import PAGE_SIZE, SCRATCH_PAGE, PageTable

NUM_PAGES, SIZE = 24, 4


class Pool(RuleBasedStateMachine):
    """A small pool and a model of it: which pages each sequence holds. The table has to agree after every step."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, SIZE)
        self.held: list[list[int]] = []

    @property
    def free(self) -> set[int]:
        return set(range(1, NUM_PAGES)) - {page for pages in self.held for page in pages}

    @rule(target=sequences)
    def begin(self) -> list[int]:
        pages: list[int] = []
        self.held.append(pages)
        return pages

    @rule(pages=sequences, num_tokens=st.integers(0, NUM_PAGES * SIZE + 3))
    def reserve(self, pages: list[int], num_tokens: int) -> None:
        before, free = list(pages), self.free
        missing = max(0, -(-num_tokens // SIZE) - len(before))
        succeeded = self.table.reserve(pages, num_tokens)
        assert succeeded == (missing <= len(free)), "all that is asked for, exactly when it is there"
        assert pages[: len(before)] == before, "what was held stays, in its order"
        taken = pages[len(before) :]
        assert len(taken) == (missing if succeeded else 0)
        assert set(taken) <= free
        assert len(set(taken)) == len(taken)
        for last, page in zip([*before[-1:], *taken], taken if before else taken[1:], strict=False):
            after = free - set(taken[: taken.index(page)])
            assert page == last + 1 or last + 1 not in after, "the page next to the last one was free"

    @rule(pages=sequences, num_tokens=st.integers(0, NUM_PAGES * SIZE))
    def truncate(self, pages: list[int], num_tokens: int) -> None:
        before = list(pages)
        self.table.truncate(pages, num_tokens)
        assert pages == before[: -(-num_tokens // SIZE)]

    @rule(pages=consumes(sequences))
    def release(self, pages: list[int]) -> None:
        self.table.release(pages)
        assert pages == []
        self.held = [other for other in self.held if other is not pages]

    @invariant()
    def every_page_is_free_or_held_once(self) -> None:
        self.table.check(self.held)
        assert self.table.num_free == len(self.free)
        assert all(SCRATCH_PAGE < page < NUM_PAGES for pages in self.held for page in pages)


Pool.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestPool = Pool.TestCase


def test_an_empty_pool_gives_a_sequence_pages_side_by_side() -> None:
    table, pages = PageTable(100), list[int]()
    for num_tokens in range(1, 99 * PAGE_SIZE + 1, 7):
        assert table.reserve(pages, num_tokens)
    assert pages == list(range(1, len(pages) + 1))


def test_sequences_that_grow_in_turn_keep_their_pages_side_by_side() -> None:
    table = PageTable(129)
    sequences: list[list[int]] = [[] for _ in range(4)]
    for num_tokens in range(1, 10 * PAGE_SIZE):
        for pages in sequences:
            assert table.reserve(pages, num_tokens)
    for pages in sequences:
        assert [page - pages[0] for page in pages] == list(range(10))


def test_every_page_but_the_scratch_page_can_be_held() -> None:
    table, pages = PageTable(8), list[int]()
    assert table.num_usable == 7
    assert not table.reserve(pages, 7 * PAGE_SIZE + 1)
    assert table.reserve(pages, 7 * PAGE_SIZE)
    assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7]
    assert not table.reserve([], 1)
    table.release(pages)
    assert table.num_free == 7


def test_the_check_sees_each_kind_of_fault() -> None:
    table = PageTable(8)
    pages: list[int] = []
    table.reserve(pages, 2 * PAGE_SIZE)
    table.check([pages])
    for held, message in [
        ([pages, pages[:1]], "is held twice"),
        ([pages[:1]], "neither held nor free"),
        ([[*pages, 7]], "is held and free"),
        ([[*pages, SCRATCH_PAGE]], "not one to hand out"),
    ]:
        with pytest.raises(AssertionError, match=message):
            table.check(held)
    copy = list(pages)
    table.release(pages)
    with pytest.raises(AssertionError, match="given back twice"):
        table.release(copy)
    with pytest.raises(AssertionError, match="scratch page"):
        table.release([SCRATCH_PAGE])


def test_a_batch_packs_rows_of_several_sequences_flat() -> None:
    spans = [Span([7, 8, 9], 3, [5, 2], 1), Span([4], 0, [6], 0), Span([1, 2], 8, [9, 1, 3], 4)]
    batch = Batch.pack(spans, page_size=4)
    assert batch.token_T.tolist() == [7, 8, 9, 4, 1, 2]
    assert batch.position_T.tolist() == [3, 4, 5, 0, 8, 9]
    assert batch.slot_T.tolist() == [23, 8, 9, 24, 12, 13]
    assert batch.lane_B.tolist() == [1, 0, 4]
    assert batch.qo_indptr.tolist() == [0, 3, 4, 6]
    assert batch.kv_indptr.tolist() == [0, 2, 3, 6]
    assert batch.kv_indices.tolist() == [5, 2, 6, 9, 1, 3]
    assert batch.kv_len.tolist() == [6, 1, 10]
    assert batch.last_row_B.tolist() == [2, 3, 5]
    assert batch.num_sequences == 3
    assert [span.end for span in batch.spans] == [6, 1, 10]
    assert {x.dtype for x in (batch.token_T, batch.position_T, batch.slot_T, batch.lane_B)} == {torch.int64}
    assert {x.dtype for x in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_len)} == {torch.int32}


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_a_slot_is_its_page_and_its_place_in_it(length: int) -> None:
    pages = [40, 3, 11]
    batch = Batch.pack([Span([0] * length, 0, pages, 0)])
    assert batch.slot_T.tolist() == [pages[i // 16] * 16 + i % 16 for i in range(length)]
    assert batch.kv_indices.tolist() == pages[: -(-length // 16)]


def test_pages_that_no_row_reaches_are_left_out() -> None:
    batch = Batch.pack([Span([1], 3, [5, 6, 7], 0)], page_size=4)
    assert batch.kv_indices.tolist() == [5]
    assert batch.kv_indptr.tolist() == [0, 1]


def test_rows_beyond_the_last_page_go_to_the_scratch_page() -> None:
    batch = Batch.pack([Span([1, 2, 3, 4], 2, [5], 0), Span([6], 0, [8], 1)], page_size=4)
    assert batch.slot_T.tolist() == [22, 23, 0, 1, 32]
    assert batch.kv_indices.tolist() == [5, SCRATCH_PAGE, 8]
    assert batch.kv_indptr.tolist() == [0, 2, 3]


def test_tokens_drawn_on_the_device_stand_in_for_those_of_the_spans() -> None:
    token_T = torch.tensor([11, 12])
    batch = Batch.pack([Span([0, 0], 5, [1], 0)], token_T=token_T)
    assert batch.token_T is token_T
    assert batch.position_T.tolist() == [5, 6]


LAYERS = [
    LayerKV("target", ((2, 3), (2, 5)), torch.float32),
    LayerKV("target", ((4,), (1,)), torch.float64),
    LayerKV("draft", ((2, 3), (2, 5)), torch.bfloat16, "leader"),
]


def test_a_cache_has_its_layers_in_one_page_space() -> None:
    cache = KVCache(LAYERS, num_pages=6, page_size=4)
    shapes = [[tuple(tensor.shape) for tensor in cache.layer(*which)] for which in [("target", 0), ("target", 1)]]
    assert shapes == [[(6, 4, 2, 3), (6, 4, 2, 5)], [(6, 4, 4), (6, 4, 1)]]
    assert cache.layer("draft", 0)[0].dtype == torch.bfloat16
    assert all(not tensor.any() for tensor in cache.layer("draft", 0)), "a masked slot must not hold a NaN"


def test_the_bytes_of_a_page_are_those_of_its_tensors() -> None:
    per_slot = 4 * (6 + 10) + 8 * (4 + 1) + 2 * (6 + 10)
    assert KVCache.bytes_per_page(LAYERS, page_size=4) == 4 * per_slot
    assert KVCache.bytes_per_page(LAYERS) == PAGE_SIZE * per_slot
    cache = KVCache(LAYERS, num_pages=6, page_size=4)
    tensors = [tensor for which in [("target", 0), ("target", 1), ("draft", 0)] for tensor in cache.layer(*which)]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == 6 * 4 * per_slot


def test_moved_slots_are_as_if_all_were_read_before_any_was_written() -> None:
    """The slots of an accepted branch overlap with the place it is brought to."""
    cache, rng = KVCache(LAYERS, num_pages=6, page_size=4), random.Random(0)
    every = [("target", 0), ("target", 1), ("draft", 0)]
    for which in every:
        for tensor in cache.layer(*which):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(rng.randrange(99))))
    before = [[tensor.flatten(0, 1).clone() for tensor in cache.layer(*which)] for which in every]
    cache.move(torch.tensor([5, 6, 9, 20]), torch.tensor([4, 5, 6, 7]))
    for which, tensors in zip(every, before, strict=True):
        for tensor, old in zip(cache.layer(*which), tensors, strict=True):
            expected = old.clone()
            for source, target in ((5, 4), (6, 5), (9, 6), (20, 7)):
                expected[target] = old[source]
            assert torch.equal(tensor.flatten(0, 1), expected)


def test_the_same_rows_some_positions_on() -> None:
    batch = Batch.pack([Span([7], 3, [5, 2], 1), Span([8], 0, [6], 0)], page_size=4)
    later = batch.at(2, torch.tensor([20, 21]))
    assert later.token_T.tolist() == [20, 21]
    assert later.position_T.tolist() == [5, 2]
    assert later.slot_T.tolist() == [9, 26]
    assert later.lane_B.tolist() == [1, 0]
    assert later.kv_len.tolist() == [6, 3]
    assert later.page_size == 4
