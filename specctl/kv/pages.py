"""PageTable: hands out page ids and takes them back. It knows nothing about tensors, sequences or models.

A page is `page_size` slots through every attention layer of target *and* draft, so one table, one allocation and one
budget serve both. Page 0 is the scratch page: never handed out, it takes the writes of rows that nobody will read.
"""

from __future__ import annotations

from collections.abc import Iterable

PAGE_SIZE = 16
SCRATCH_PAGE = 0


class PageTable:
    """A pool of `num_pages` pages (the scratch page included) of `page_size` slots each."""

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE) -> None:
        assert num_pages >= 2, "one scratch page and at least one to hand out"
        self.num_pages = num_pages
        self.page_size = page_size
        self._is_free = bytearray([1]) * num_pages
        self._is_free[SCRATCH_PAGE] = 0
        self.num_free = num_pages - 1

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out when nothing is held."""
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, pages: list[int], num_tokens: int) -> bool:
        """Grow `pages` in place to cover `num_tokens` slots. All or nothing: False leaves everything as it was."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            page = self._choose(pages[-1] if pages else None)
            self._is_free[page] = 0
            self.num_free -= 1
            pages.append(page)
        return True

    def truncate(self, pages: list[int], num_tokens: int) -> None:
        """Give back the pages beyond the first `num_tokens` slots."""
        keep = self.pages_for(num_tokens)
        for page in pages[keep:]:
            assert page != SCRATCH_PAGE, "the scratch page is nobody's to give back"
            assert not self._is_free[page], f"page {page} given back twice"
            self._is_free[page] = 1
            self.num_free += 1
        del pages[keep:]

    def release(self, pages: list[int]) -> None:
        self.truncate(pages, 0)

    def check(self, held: Iterable[list[int]]) -> None:
        """Assert that every page is either free or held exactly once."""
        seen = bytearray(self.num_pages)
        for pages in held:
            for page in pages:
                assert SCRATCH_PAGE < page < self.num_pages, f"page {page} is held and is not one to hand out"
                assert not seen[page], f"page {page} is held twice"
                assert not self._is_free[page], f"page {page} is held and free"
                seen[page] = 1
        assert sum(seen) + self.num_free == self.num_usable, "a page is neither held nor free"
        assert sum(self._is_free) == self.num_free

    def _choose(self, last: int | None) -> int:
        """The page after `last` if it is free, else one in the middle of the largest free run.

        Why: a sequence whose pages lie side by side is read by the torch attention as a view, without a copy, so a
        new sequence is put where it has room to grow.
        """
        if last is not None and last + 1 < self.num_pages and self._is_free[last + 1]:
            return last + 1
        start, length = self._largest_free_run()
        at_the_edge = start == SCRATCH_PAGE + 1
        return start if at_the_edge or last is not None else start + length // 2

    def _largest_free_run(self) -> tuple[int, int]:
        best, best_length, at = 0, 0, 0
        while (start := self._is_free.find(1, at)) != -1:
            end = self._is_free.find(0, start)
            at = self.num_pages if end == -1 else end
            if at - start > best_length:
                best, best_length = start, at - start
        return best, best_length
