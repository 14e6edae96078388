"""PyTorch's CUDA caching allocator: what it would have reserved for a list of allocations.

`torch.cuda.max_memory_allocated` counts blocks in use, `max_memory_reserved` what was taken from
the driver, and a run dies of the second. Between them stands the caching allocator, whose rules are
few and fixed, so a list of allocations and frees is replayed through them without a GPU:

1. A request is rounded up to 512 B. At most 1 MiB comes from the *small* pool, more from the
   *large* one.
2. Best fit: the smallest free block of the pool that is large enough is taken, the lowest address
   among equals. It is split when what is left is worth it: 512 B or more in the small pool, *more
   than* 1 MiB in the large one. What is not split off counts as allocated, so *allocated* is more
   than was requested.
3. When none fits, a segment is taken from the driver: 2 MiB for the small pool, 20 MiB for a large
   request below 10 MiB, else the request rounded up to 2 MiB.
4. A freed block is merged with free neighbors of its segment and kept. The driver gets back a
   segment only when all of it is free, and only by `empty_cache()` or when memory has run out: then
   all such segments are given back, the request is tried again, and fails if that was not enough.

An example in the large pool, in MiB, `[]` in use and `()` free:

    request 30, 14, 50   none fits: a segment each, 94 reserved       [30] [14] [50]
    free all three       kept                                         (30) (14) (50)
    request 12           best fit 14; 2 are left, more than 1: split  (30) [12](2) (50)
    request 29.5         best fit 30; 0.5 are left: not split         [30] [12](2) (50)
    request 51           50 is too small: a segment of 52             [30] [12](2) (50) [52]
    free 12              merged with its neighbor                     [30] (14) (50) [52]

So reserved, 146 now, grows with sizes that come once: a free block of 50 MiB is no use to a request
of 51. `expandable_segments:True` has one segment for each pool instead, which grows at its end by
pages of 2 MiB (small) or 20 MiB (large), by exactly what is missing, and splits from 512 B in both
pools. It does not always reserve less: it loses holes between blocks in use as well, and finer
splits can make more of them.

A segment is a run of addresses cut into blocks, each of which knows its neighbors. A free block
stands in one sorted list of its pool besides, where the best fit is a bisection. An expandable
segment reserves more addresses than it has memory for: a block of such addresses is free and not
*mapped*, and stands in a list of its own by address.

Source: `c10/cuda/CUDACachingAllocator.cpp`, the same in this from torch 2.1 to 2.13 with the
default settings (no `max_split_size_mb`, `roundup_power2_divisions` or
`garbage_collection_threshold`).

Limits: one stream (blocks of another are other pools: FSDP's gathers come on top), no CUDA graphs
and private pools. The driver's addresses are taken to grow, without a hole where a segment was.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
# Names in the source: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc and
# kRoundLarge.
GRAIN = 512
SMALL_REQUEST = MIB
SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB
OWN_SEGMENT = 10 * MIB
SEGMENT_GRAIN = 2 * MIB
# Of an expandable segment: more than any GPU has, and a whole number of pages of either size.
ADDRESS_SPACE = LARGE_PAGE << 30

EMPTY_CACHE: tuple[None, int] = (None, 0)
"""An event that stands for `torch.cuda.empty_cache()`."""


def round_request(nbytes: int) -> int:
    """Bytes of the block that a request of `nbytes` asks for: a multiple of 512."""
    return -(-nbytes // GRAIN) * GRAIN


def segment_bytes(size: int) -> int:
    """Bytes taken from the driver for a rounded request that no free block fits."""
    if size <= SMALL_REQUEST:
        return SMALL_PAGE
    if size < OWN_SEGMENT:
        return LARGE_PAGE
    return -(-size // SEGMENT_GRAIN) * SEGMENT_GRAIN


class Block:
    """A run of addresses within a segment: in use, free, or (expandable only) without memory.

    Attributes:
        address: first byte.
        size: bytes.
        requested: bytes that were requested, of a block in use.
        pool: pool that it returns to when it is freed.
        previous, next: neighbors within the segment, None at its ends.
        allocated: in use.
        mapped: has memory behind it.
    """

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "previous", "requested", "size")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.pool = pool
        self.previous: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.mapped = True

    def link(self, before: Block | None, after: Block | None) -> None:
        """Insert it between two blocks of the segment."""
        self.previous, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self

    def reach(self) -> int:
        """Bytes a free block would have if all addresses after it that lack memory got some."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)

    def split(self, size: int) -> Block:
        """Cut off the first `size` bytes of a block that is in no list; the rest is kept free."""
        first = Block(self.address, size, self.pool)
        first.link(self.previous, self)
        self.address += size
        self.size -= size
        self.pool.put(self)
        return first

    def merge(self) -> None:
        """Take in free neighbors, which leave their list. `self` is in no list."""
        before = self.previous
        if before is not None and not before.allocated and before.mapped is self.mapped:
            self.pool.drop(before)
            self.address = before.address
            self.size += before.size
            self.link(before.previous, self.next)
        after = self.next
        if after is not None and not after.allocated and after.mapped is self.mapped:
            self.pool.drop(after)
            self.size += after.size
            self.link(self.previous, after.next)


class Pool:
    """Free blocks for one kind of request.

    Attributes:
        page: granularity of an expandable segment, bytes.
        spare: bytes that must be left of a block for it to be split.
        free: (size, address, block), sorted: the first that is large enough is the best fit.
        unmapped: (address, block), sorted: addresses without memory.
    """

    __slots__ = ("free", "page", "spare", "unmapped")

    def __init__(self, page: int, spare: int) -> None:
        self.page = page
        self.spare = spare
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def put(self, block: Block) -> None:
        """Keep a free block, with memory or without."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def drop(self, block: Block) -> None:
        """Remove a free block from its list."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Allocator:
    """The state of the caching allocator of one GPU.

    Attributes:
        allocated: bytes of blocks in use, as `torch.cuda.memory_allocated`.
        requested: bytes requested for them (`requested_bytes.all.current` of `memory_stats`).
        reserved: bytes taken from the driver, as `torch.cuda.memory_reserved`.
        peak_allocated, peak_requested, peak_reserved: the most of each so far.
    """

    def __init__(self, *, limit: int | None = None, expandable: bool = False) -> None:
        """`limit`: bytes the driver can give, None for no end of them."""
        self.limit = limit
        self.expandable = expandable
        self.allocated = self.requested = self.reserved = 0
        self.peak_allocated = self.peak_requested = self.peak_reserved = 0
        self._small = Pool(SMALL_PAGE, GRAIN)
        self._large = Pool(LARGE_PAGE, GRAIN if expandable else SMALL_REQUEST + 1)
        self._end = 0  # addresses given out so far

    def malloc(self, nbytes: int) -> Block | None:
        """A block for `nbytes` > 0, None when memory has run out."""
        size = round_request(nbytes)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None:
            self.empty_cache()
            block = self._grow(pool, size)
            if block is None:
                return None
        if block.size - size >= pool.spare:
            block = block.split(size)
        block.allocated = True
        block.requested = nbytes
        self.requested += nbytes
        self.allocated += block.size
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give back a block of `malloc`; it is merged with free neighbors and kept."""
        self.allocated -= block.size
        self.requested -= block.requested
        block.allocated = False
        block.merge()
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Return to the driver the segments, or pages of an expandable one, that are all free."""
        for pool in (self._large, self._small):
            for _, _, block in tuple(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.drop(block)
                    self.reserved -= block.size

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block of at least `size`, lowest address first, out of its list."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self.expandable:
            # The free end of the segment counts as large as it can grow, so it is taken last.
            while index + 1 < len(free) and free[index + 1][2].reach() < free[index][2].reach():
                index += 1
        return free.pop(index)[2]

    def _take(self, nbytes: int) -> bool:
        """Take memory from the driver, if it has that much left."""
        if self.limit is not None and self.reserved + nbytes > self.limit:
            return False
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A free block, in no list, out of new memory."""
        if self.expandable:
            return self._extend(pool, size)
        segment = segment_bytes(size)
        if not self._take(segment):
            return None
        block = Block(self._end, segment, pool)
        self._end += segment
        return block

    def _extend(self, pool: Pool, size: int) -> Block | None:
        block = self._extendable(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # has taken in the free block before it
        pool.drop(block)
        return block

    def _extendable(self, pool: Pool, size: int) -> Block:
        """The lowest free block from which on `size` bytes are free or without memory."""
        for _, block in pool.unmapped:
            start = block
            if start.previous is not None and not start.previous.allocated:
                start = start.previous
            room, after = 0, start
            while room < size and after is not None and not after.allocated:
                room += after.size
                after = after.next
            if room >= size:
                return start
        block = Block(self._end, ADDRESS_SPACE, pool)
        self._end += ADDRESS_SPACE
        block.mapped = False
        pool.put(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Put memory behind the first `nbytes`, rounded up to pages, of a block without."""
        pool = block.pool
        nbytes = -(-nbytes // pool.page) * pool.page
        if not self._take(nbytes):
            return False
        pool.drop(block)
        if nbytes < block.size:
            rest = Block(block.address + nbytes, block.size - nbytes, pool)
            rest.mapped = False
            rest.link(block, block.next)
            pool.put(rest)
            block.size = nbytes
        block.mapped = True
        block.merge()
        pool.put(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Return to the driver the whole pages of a free block; its ends stay."""
        pool = block.pool
        end = block.address + block.size
        first, last = -(-block.address // pool.page) * pool.page, end // pool.page * pool.page
        if first >= last:
            return
        pool.drop(block)
        if block.address < first:
            head = Block(block.address, first - block.address, pool)
            head.link(block.previous, block)
            pool.put(head)
        if last < end:
            tail = Block(last, end - last, pool)
            tail.link(block, block.next)
            pool.put(tail)
        block.address, block.size, block.mapped = first, last - first, False
        block.merge()
        pool.put(block)
        self.reserved -= last - first


@dataclass(frozen=True)
class Replay:
    """Memory over a list of events, in bytes.

    Attributes:
        peak_allocated: most in blocks in use, rounded and unsplit as torch counts them.
        peak_requested: most that was requested: the sum of the tensors.
        peak_reserved: most taken from the driver.
        peak_at: index of the event that first reached `peak_allocated`, -1 for no events.
        reserved_timeline: (index of the event, reserved after it), where reserved changed.
        oom_at: index of the event that found no memory; the replay ends there. None: all fitted.
    """

    peak_allocated: int
    peak_requested: int
    peak_reserved: int
    peak_at: int
    reserved_timeline: tuple[tuple[int, int], ...]
    oom_at: int | None


def replay_events(
    events: Iterable[Sequence[Any]], *, limit: int | None = None, expandable: bool = False
) -> Replay:
    """Replay allocations and frees; 100 000 of them take about 0.2 s.

    Args:
        events: (id, bytes, ...) in order: positive bytes allocate, the same negative frees;
            further fields are not looked at. Zero bytes do nothing, as in torch.
            `EMPTY_CACHE` empties the cache.
        limit: bytes the driver can give: the GPU's memory less what the context and others hold.
        expandable: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    Raises:
        ValueError: an id is allocated twice, freed without being alive, or freed with other bytes.
    """
    allocator = Allocator(limit=limit, expandable=expandable)
    alive: dict[Hashable, Block] = {}
    timeline: list[tuple[int, int]] = []
    reserved, peak, peak_at, oom_at = 0, 0, -1, None
    for index, event in enumerate(events):
        name, nbytes = event[0], event[1]
        if nbytes > 0:
            if name in alive:
                raise ValueError(f"event {index}: {name!r} is allocated a second time")
            block = allocator.malloc(nbytes)
            if block is None:
                oom_at = index
                break
            alive[name] = block
            if allocator.allocated > peak:
                peak, peak_at = allocator.allocated, index
        elif nbytes < 0:
            block = alive.pop(name, None)
            if block is None or block.requested != -nbytes:
                held = "nothing" if block is None else f"{block.requested} B"
                raise ValueError(f"event {index}: {name!r} frees {-nbytes} B and holds {held}")
            allocator.free(block)
        elif name is None:
            allocator.empty_cache()
        if allocator.reserved != reserved:
            reserved = allocator.reserved
            timeline.append((index, reserved))
    return Replay(
        peak_allocated=allocator.peak_allocated,
        peak_requested=allocator.peak_requested,
        peak_reserved=allocator.peak_reserved,
        peak_at=peak_at,
        reserved_timeline=tuple(timeline),
        oom_at=oom_at,
    )
