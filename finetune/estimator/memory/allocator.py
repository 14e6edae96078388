"""Replay of PyTorch's CUDA caching allocator: memory reserved for a list of allocations and frees.

`torch.cuda.max_memory_allocated` counts blocks in use; `max_memory_reserved` counts memory taken
from the driver, and running out of the second ends a run. The rules between them are fixed, so they
can be replayed without a GPU:

1. A request is rounded up to 512 B. Up to 1 MiB comes from the *small* pool, more from the *large*.
2. Best fit: the smallest sufficient free block of the pool, lowest address first. It is split if
   the remainder is at least 512 B (small pool) or *more than* 1 MiB (large pool); an unsplit
   remainder counts as allocated, so *allocated* exceeds *requested*.
3. If no block fits, the driver provides a segment: 2 MiB for the small pool, 20 MiB for a large
   request below 10 MiB, else the request rounded up to 2 MiB.
4. A freed block merges with free neighbors of its segment and is cached. Only wholly free segments
   return to the driver, by `empty_cache()` or when memory runs out; then the request is retried.

An example in the large pool, in MiB, `[]` in use and `()` free:

    request 30, 14, 50   none fits: a segment each, 94 reserved       [30] [14] [50]
    free all three       cached                                       (30) (14) (50)
    request 12           best fit 14; remainder 2 > 1: split          (30) [12](2) (50)
    request 29.5         best fit 30; remainder 0.5: not split        [30] [12](2) (50)
    request 51           50 is too small: a segment of 52             [30] [12](2) (50) [52]
    free 12              merged with its neighbor                     [30] (14) (50) [52]

So reserved, now 146, grows with sizes that occur once. `expandable_segments:True` uses one segment
per pool, which grows at its end by the missing pages of 2 MiB (small) or 20 MiB (large) and splits
from 512 B in both pools. Holes between blocks remain, so it does not always reserve less.

Blocks are linked to their neighbors within a segment; free blocks are also in a sorted list of the
pool, where best fit is a bisection. An expandable segment reserves more addresses than memory:
addresses without memory form free blocks that are not *mapped*, in a list by address.

Source: `c10/cuda/CUDACachingAllocator.cpp`, unchanged in this from torch 2.1 to 2.13 with default
settings (no `max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`).

Limits: one stream (other streams have pools of their own, so FSDP's gathers come on top), no CUDA
graphs or private pools. The driver's addresses are assumed to grow without reuse.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
# kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc and kRoundLarge upstream.
GRAIN = 512
SMALL_REQUEST = MIB
SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB
OWN_SEGMENT = 10 * MIB
SEGMENT_GRAIN = 2 * MIB
# Addresses of an expandable segment: more than any GPU has, a whole number of pages of either size.
ADDRESS_SPACE = LARGE_PAGE << 30

EMPTY_CACHE: tuple[None, int] = (None, 0)
"""Event that stands for `torch.cuda.empty_cache()`."""


def round_request(nbytes: int) -> int:
    """Bytes of a request rounded up to a multiple of 512."""
    return -(-nbytes // GRAIN) * GRAIN


def segment_bytes(size: int) -> int:
    """Bytes of a new segment for a rounded request that no free block fits."""
    if size <= SMALL_REQUEST:
        return SMALL_PAGE
    if size < OWN_SEGMENT:
        return LARGE_PAGE
    return -(-size // SEGMENT_GRAIN) * SEGMENT_GRAIN


class Block:
    """A run of addresses within a segment: in use, free, or (expandable only) without memory.

    Attributes:
        requested: bytes requested, for a block in use.
        pool: pool that it returns to when freed.
        previous, next: neighbors within the segment, None at its ends.
        mapped: True if memory is behind the addresses.
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
        self.previous, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self

    def reach(self) -> int:
        """Bytes of a free block, with the unmapped addresses right after it."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)

    def split(self, size: int) -> Block:
        """Cut `size` bytes off a block that is in no list; return the rest to the pool."""
        first = Block(self.address, size, self.pool)
        first.link(self.previous, self)
        self.address += size
        self.size -= size
        self.pool.put(self)
        return first

    def merge(self) -> None:
        """Absorb free neighbors and remove them from their list. `self` is in no list."""
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
    """Free blocks of the small or the large pool.

    Attributes:
        page: granularity of an expandable segment, bytes.
        spare: smallest remainder, in bytes, for which a block is split.
        free: (size, address, block), sorted: the first of sufficient size is the best fit.
        unmapped: (address, block), sorted: addresses without memory.
    """

    __slots__ = ("free", "page", "spare", "unmapped")

    def __init__(self, page: int, spare: int) -> None:
        self.page = page
        self.spare = spare
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def put(self, block: Block) -> None:
        """Add a free block, mapped or not, to its list."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def drop(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Allocator:
    """Caching allocator of one GPU.

    Attributes:
        allocated: bytes of blocks in use, as `torch.cuda.memory_allocated`.
        requested: bytes requested for them (`requested_bytes.all.current` of `memory_stats`).
        reserved: bytes taken from the driver, as `torch.cuda.memory_reserved`.
        peak_allocated, peak_requested, peak_reserved: peak of each so far.
    """

    def __init__(self, *, limit: int | None = None, expandable: bool = False) -> None:
        """`limit`: bytes that the driver can provide, None for no limit."""
        self.limit = limit
        self.expandable = expandable
        self.allocated = self.requested = self.reserved = 0
        self.peak_allocated = self.peak_requested = self.peak_reserved = 0
        self._small = Pool(SMALL_PAGE, GRAIN)
        self._large = Pool(LARGE_PAGE, GRAIN if expandable else SMALL_REQUEST + 1)
        self._end = 0  # addresses given out so far

    def malloc(self, nbytes: int) -> Block | None:
        """Allocate a block for `nbytes` > 0; None when memory has run out."""
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
        """Free a block, merge it with free neighbors and cache it."""
        self.allocated -= block.size
        self.requested -= block.requested
        block.allocated = False
        block.merge()
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Return wholly free segments, or free pages of an expandable one, to the driver."""
        for pool in (self._large, self._small):
            for _, _, block in tuple(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.drop(block)
                    self.reserved -= block.size

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """Remove and return the smallest free block of at least `size`, lowest address first."""
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
        if self.limit is not None and self.reserved + nbytes > self.limit:
            return False
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Create a free block, in no list, from new memory."""
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
        """The lowest free block from which on `size` bytes are free or unmapped."""
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
        """Map the first `nbytes`, rounded up to pages, of an unmapped block."""
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
        """Return the whole pages of a free block to the driver; its ends stay mapped."""
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
        peak_allocated: peak of blocks in use, rounded and unsplit, as torch counts them.
        peak_requested: peak of the bytes requested: the sum of the tensors.
        peak_reserved: peak of the bytes taken from the driver.
        peak_at: index of the event that first reached `peak_allocated`, -1 without events.
        reserved_timeline: (event index, reserved after it), where reserved changed.
        oom_at: index of the event that ran out of memory and ended the replay; None if all fit.
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
    """Replay allocations and frees; 100 000 events take about 0.2 s.

    Args:
        events: (id, bytes, ...) in order: positive bytes allocate, the same negative frees.
            Further fields are ignored, as are zero bytes. `EMPTY_CACHE` empties the cache.
        limit: bytes that the driver can provide: the GPU's memory less the context and other
            processes.
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
