import pytest

from turnkv.cache import Extent, PagePool, Writer
from turnkv.config import PAGE_TOKENS
from turnkv.errors import OutOfPagesError


def write(writer: Writer, num_tokens: int) -> list[Extent]:
    """A request as the engine makes it: reserve, fill, trim."""
    writer.reserve(num_tokens)
    extents = writer.fill(num_tokens)
    writer.trim()
    return extents


@pytest.mark.parametrize("first", [1, 15, 16, 17, 32])
def test_a_writer_alone_in_its_pool_continues_right_after_its_last_token(first: int) -> None:
    writer = Writer(PagePool(20))
    (extent,) = write(writer, first)
    assert write(writer, PAGE_TOKENS + 1) == [Extent(extent.stop, extent.stop + PAGE_TOKENS + 1)]


def test_reserving_piece_by_piece_continues_too() -> None:
    writer = Writer(PagePool(20))
    writer.reserve(1)
    writer.reserve(PAGE_TOKENS + 1)
    assert writer.fill(2 * PAGE_TOKENS) == [Extent(0, 2 * PAGE_TOKENS)]


def test_a_message_lies_in_one_run_where_the_pool_has_one() -> None:
    pool = PagePool(12)
    pool.claim(12)
    for page in (0, 2, 3, 5, 6, 7, 8, 10):
        pool.unclaim(page)
    assert write(Writer(pool), 4 * PAGE_TOKENS) == [Extent(5 * PAGE_TOKENS, 9 * PAGE_TOKENS)]


def test_a_failed_reserve_changes_nothing() -> None:
    pool = PagePool(3)
    writer = Writer(pool)
    write(writer, 5)
    before = (writer.room_tokens, pool.num_free_pages, pool.num_free_runs)
    with pytest.raises(OutOfPagesError):
        writer.reserve(11 + 2 * PAGE_TOKENS + 1)
    pool.check()
    assert (writer.room_tokens, pool.num_free_pages, pool.num_free_runs) == before
    writer.reserve(11 + 2 * PAGE_TOKENS)
    assert writer.fill(11 + 2 * PAGE_TOKENS) == [Extent(5, 3 * PAGE_TOKENS)]


def test_room_already_reserved_counts_towards_the_next_request() -> None:
    pool = PagePool(4)
    writer = Writer(pool)
    writer.reserve(PAGE_TOKENS + 1)
    assert writer.num_pages_needed(2 * PAGE_TOKENS) == 0
    assert writer.num_pages_needed(2 * PAGE_TOKENS + 1) == 1
    writer.reserve(2 * PAGE_TOKENS)
    assert pool.num_held_pages == 2


def test_trimming_keeps_the_open_page_and_nothing_else() -> None:
    pool = PagePool(4)
    writer = Writer(pool)
    writer.reserve(4 * PAGE_TOKENS)
    writer.fill(PAGE_TOKENS + 3)
    writer.trim()
    assert writer.room_tokens == PAGE_TOKENS - 3
    assert pool.num_held_pages == 2


def test_an_open_page_stays_its_writers_when_its_tokens_are_released() -> None:
    pool = PagePool(1)
    writer = Writer(pool)
    (extent,) = write(writer, 3)
    pool.release(extent)
    assert pool.num_free_pages == 0
    writer.close()
    assert pool.num_free_pages == 1


def test_a_page_of_a_closed_writer_stays_held_by_its_tokens() -> None:
    pool = PagePool(1)
    writer = Writer(pool)
    (extent,) = write(writer, 3)
    writer.close()
    assert pool.num_free_pages == 0
    pool.release(extent)
    assert pool.num_free_pages == 1


def test_filling_more_than_is_reserved_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="reserve comes first"):
        Writer(PagePool(1)).fill(1)
