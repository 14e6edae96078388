"""Replay of PyTorch's CUDA caching allocator: memory reserved for a list of allocations and frees.

`torch.cuda.max_memory_allocated` counts blocks in use; `max_memory_reserved` counts memory taken
from the driver, and running out of the second ends a run. The rules between them are fixed, so they
can be replayed without a GPU:

1. A request is rounded up to 512 B. Up to 1 MiB comes from the *small* pool, more from the *large*.
2. Best fit: the smallest sufficient free block of the pool, lowest address first. It is split if
   the remainder is at least 512 B (small pool) or *more than* 1 MiB (large pool); an unsplit
   remainder counts as allocated, so *allocated* exceeds the bytes of tensors.
3. If no block fits, the driver provides a segment: 2 MiB for the small pool, 20 MiB for a large
   request below 10 MiB, else the request rounded up to 2 MiB.
4. A freed block merges with free neighbors of its segment and is cached. Only wholly free segments
   return to the driver, by `empty_cache()` or when memory runs out, which are not replayed here.

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
those without memory are its last block, which is not *mapped*.

Source: `c10/cuda/CUDACachingAllocator.cpp`, unchanged in this from torch 2.1 to 2.13 with default
settings (no `max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`).

Limits: one stream (other streams have pools of their own, so FSDP's gathers come on top), no CUDA
graphs or private pools. The driver's addresses are assumed to grow without reuse.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from finetune.units import MIB

# kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc and kRoundLarge upstream.
GRAIN = 512
SMALL_REQUEST = MIB
SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB
OWN_SEGMENT = 10 * MIB
SEGMENT_GRAIN = 2 * MIB
# Addresses of an expandable segment: more than any GPU has, a whole number of pages of either size.
ADDRESS_SPACE = LARGE_PAGE << 30


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

    def __init__(self, address: int, size: int, pool: Pool, *, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.requested, self.allocated = 0, False
        self.previous: Block | None = None
        self.next: Block | None = None

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
        if before is not None and not before.allocated:
            self.pool.drop(before)
            self.address = before.address
            self.size += before.size
            self.link(before.previous, self.next)
        after = self.next
        if after is not None and not after.allocated and after.mapped:
            self.pool.drop(after)
            self.size += after.size
            self.link(self.previous, after.next)


class Pool:
    """Free blocks of the small or the large pool.

    Attributes:
        page: granularity of an expandable segment, bytes.
        spare: smallest remainder, in bytes, for which a block is split.
        free: (size, address, block), sorted: the first of sufficient size is the best fit.
        tail: addresses without memory at the end of the expandable segment.
    """

    __slots__ = ("free", "page", "spare", "tail")

    def __init__(self, page: int, spare: int) -> None:
        self.page, self.spare = page, spare
        self.free: list[tuple[int, int, Block]] = []
        self.tail: Block | None = None

    def put(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def drop(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class Allocator:
    """Caching allocator of one GPU.

    Attributes:
        allocated: bytes of blocks in use, as `torch.cuda.memory_allocated`.
        reserved: bytes taken from the driver, as `torch.cuda.memory_reserved`.
        peak_allocated, peak_reserved: peak of each so far.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._small = Pool(SMALL_PAGE, GRAIN)
        self._large = Pool(LARGE_PAGE, GRAIN if expandable else SMALL_REQUEST + 1)
        self._end = 0  # addresses given out so far

    def malloc(self, nbytes: int) -> Block:
        """Allocate a block for `nbytes` > 0."""
        size = round_request(nbytes)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block.size - size >= pool.spare:
            block = block.split(size)
        block.allocated = True
        block.requested = nbytes
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block, merge it with free neighbors and cache it."""
        self.allocated -= block.size
        block.allocated = False
        block.merge()
        block.pool.put(block)

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

    def _grow(self, pool: Pool, size: int) -> Block:
        """Create a free block of at least `size`, in no list, from new memory."""
        if self.expandable:
            return self._extend(pool, size)
        block = Block(self._end, segment_bytes(size), pool)
        self._end += block.size
        self._take(block.size)
        return block

    def _extend(self, pool: Pool, size: int) -> Block:
        """Map the pages that are missing after the free block at the segment's end, if any."""
        if pool.tail is None:
            pool.tail = Block(self._end, ADDRESS_SPACE, pool, mapped=False)
            self._end += ADDRESS_SPACE
        tail, last = pool.tail, pool.tail.previous
        missing = size - (last.size if last is not None and not last.allocated else 0)
        block = Block(tail.address, -(-missing // pool.page) * pool.page, pool)
        block.link(last, tail)
        tail.address += block.size
        tail.size -= block.size
        self._take(block.size)
        block.merge()
        return block

    def _take(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def replay_events(events: Iterable[Sequence[Any]], *, expandable: bool = False) -> Allocator:
    """Replay allocations and frees; 100 000 events take about 0.2 s.

    Args:
        events: (id, bytes, ...) in order: positive bytes allocate, the same negative frees.
            Further fields are ignored, as are zero bytes.
        expandable: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    Returns:
        The allocator after the last event.

    Raises:
        ValueError: an id is allocated twice, freed without being alive, or freed with other bytes.
    """
    allocator = Allocator(expandable=expandable)
    alive: dict[Hashable, Block] = {}
    for index, (name, nbytes, *_) in enumerate(events):
        if nbytes > 0:
            if name in alive:
                raise ValueError(f"event {index}: {name!r} is allocated a second time")
            alive[name] = allocator.malloc(nbytes)
        elif nbytes < 0:
            block = alive.pop(name, None)
            if block is None or block.requested != -nbytes:
                held = "nothing" if block is None else f"{block.requested} B"
                raise ValueError(f"event {index}: {name!r} frees {-nbytes} B and holds {held}")
            allocator.free(block)
    return allocator
