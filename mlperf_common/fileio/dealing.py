# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""How the work of a job is cut into items that ranks claim: numbers only, nothing here touches a file.

An item is a run of neighbouring units (a batch of small files, a large file, links). The first items are large, so
that there are few claims, and the later ones ever smaller, so that no rank is left with much when the others have
nothing any more: each round gives every rank a part of an equal share of what is left, until that is ``LEAST``. A file
that crosses the end of an item is cut there, so that a single one is shared by all ranks.

Promises: every byte of every unit is in exactly one item, in the order of the units.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, NamedTuple, Tuple

from mlperf_common.fileio import batches

# What a file costs beside its bytes, in bytes: 20,000 files of 32 KiB take as long here as 3 GiB in large files. On a
# shared filesystem files are dearer, so this is rather too little than too much.
FILE_COST = 256 << 10

# No item is smaller, unless the work ends: a batch of small files. Claiming one costs a directory, a small file and a
# few looks, some 5 ms on a shared filesystem, where these files take 0.4 s. With 4 times as much, 5,000 files were 10
# items, and 8 ranks had nothing to share.
LEAST = 32 << 20


# An item of a round is one of this many parts of an equal share. A rank that is three times slower than the others then
# still ends its first item before they have done the rest. With 2 it did not: a simulated job of 1,000 ranks
# (tests/bench, dealt) took 25 s instead of 17.
PARTS = 4


class Unit(NamedTuple):
    """A piece of work that one rank does: what it is (the dealer does not look at it) and what it costs.

    ``cuttable``: the length of a file that may be cut at multiples of ``piece``, else 0.
    """

    work: Any
    cost: int
    cuttable: int = 0
    piece: int = 0


class Part(NamedTuple):
    """The bytes ``start`` to ``end`` of a unit that may be cut; of any other, all (0 to 0)."""

    work: Any
    start: int = 0
    end: int = 0


def targets(total: int, ranks: int) -> Iterator[int]:
    """What the items of a job of this total cost should cost, one after the other, without end."""
    left = total
    while True:
        size = max(LEAST, left // (PARTS * ranks))
        for _ in range(ranks):
            yield size
        left = max(0, left - size * ranks)


def deal(units: Iterable[Unit], total: int, ranks: int) -> Iterator[List[Part]]:
    """Cut ``units``, whose costs sum up to ``total``, into items for ``ranks``."""
    sizes = targets(total, ranks)
    item: List[Part] = []
    room = next(sizes)
    for unit in units:
        start = 0
        while True:
            part, cost = _next_part(unit, start, room)
            item.append(part)
            room -= cost
            if room <= 0:
                yield item
                item, room = [], next(sizes)
            start = part.end
            if start >= unit.cuttable:
                break
    if item:
        yield item


def _next_part(unit: Unit, start: int, room: int) -> Tuple[Part, int]:
    """What of a unit, from ``start`` on, goes into an item that has ``room``; and what that costs."""
    left, piece = unit.cuttable - start, unit.piece or batches.EXTENT
    if left <= room + piece:  # little more than there is room for is not worth a cut
        return Part(unit.work, start, unit.cuttable), unit.cost - start
    length = max(1, room // piece) * piece
    return Part(unit.work, start, start + length), max(length, room)
