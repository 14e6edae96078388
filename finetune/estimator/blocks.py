"""Blocks of memory in address order, and free ones in order of size: the allocator's lists.

A segment is a run of addresses cut into blocks, each of which knows its neighbours. A free block
stands in one sorted list of its pool besides, where the best fit is a bisection. Splitting and
merging keep both views the same; they decide nothing, `allocator` does.

An expandable segment reserves more addresses than it has memory for. A block of such addresses is
free and not *mapped*, and stands in a list of its own by address.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """A run of addresses within a segment: in use, free, or (expandable only) without memory.

    Attributes:
        address: first byte.
        size: bytes.
        requested: bytes asked for, of a block in use.
        pool: where it goes when it is freed.
        previous, next: neighbours within the segment, None at its ends.
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
        """Stand between two blocks of the segment."""
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
        """Cut the first `size` bytes off, as a block of no list; what is left is kept as free.

        `self` is of no list when this is called.
        """
        first = Block(self.address, size, self.pool)
        first.link(self.previous, self)
        self.address += size
        self.size -= size
        self.pool.put(self)
        return first

    def merge(self) -> None:
        """Take free neighbours in, which leave their list. `self` is of no list."""
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
        spare: what must be left of a block for it to be split, bytes.
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
        """Forget a free block."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]
