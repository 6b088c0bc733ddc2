# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One list of checksums, or one comparison, by several ranks: rank 0 lists and publishes, all claim and read.

What came of an item goes into a file beside it; at the end rank 0 tells everything in the order of the list, the same
lines as one process would. A file of many chunks is shared by chunks: its parts count as one file only if every rank
has seen the same inode, size and modification time.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from mlperf_common.fileio import claims, dealing
from mlperf_common.fileio.checksum import Files, HashSummary, hash_files
from mlperf_common.fileio.claims import Claims, Publisher
from mlperf_common.fileio.hashplan import HashEvents, Source
from mlperf_common.fileio.hashtasks import Outcome, Unread
from mlperf_common.fileio.listing import AnyPool, Roots
from mlperf_common.fileio.manifest import Chunk
from mlperf_common.fileio.sharing import IDLE_SECONDS, Crew


def items_of(crew: Crew) -> Iterator[Tuple[int, Any]]:
    """What this rank claims, by its number, until there is no more; between two items it may wait for one."""
    own = Claims(crew.place, crew.rank, crew.ranks)
    while True:
        item = own.next()
        if item is not None:
            yield item
        elif own.is_over():
            return
        else:
            crew.check()
            time.sleep(IDLE_SECONDS)


class _Items:
    """The files of a rank's items, as ``hash_files`` wants them, and where its results go."""

    def __init__(self, crew: Crew) -> None:
        self.files = self.bytes = self.problems = 0
        self._crew = crew
        self._open: List[List[Any]] = []  # items under way: number, how many files are to come, results

    def sources(self) -> Iterator[Source]:
        """The files of all items, in order."""
        for number, values in items_of(self._crew):
            self._open.append([number, len(values), []])
            yield from map(decode, values)

    def took(self, outcome: Any) -> None:
        """What came of the next file: they come in order."""
        item = self._open[0]
        item[2].append(outcome)
        if len(item[2]) == item[1]:
            claims.write_json(self._crew.place, _result_name(item[0]), item[2])
            self._open.pop(0)


class _Ear(HashEvents):
    """Puts what a rank's run tells into its results."""

    def __init__(self, items: _Items) -> None:
        self._items = items

    def hashed(self, path: str, chunks: Sequence[Chunk]) -> None:
        self._items.took([chunks, None])

    def failed(self, path: str, why: Unread) -> None:
        self._items.took([[], why])


def _result_name(number: int) -> str:
    return "out-%d" % number


def work(crew: Crew, pool: AnyPool, roots: Roots, cached: bool, summary: HashSummary) -> None:
    """Hash what is published, as long as there is any; ``summary`` tells how it was read.

    Raises DigestRefused, AllWorkersDied, Interrupted, and what ``crew.check`` does.
    """
    items = _Items(crew)
    hash_files(items, pool, roots, _Ear(items), summary, cached)


# ---------------------------------------------------------------------------------------------------- the leader


def publish(found: Files, crew: Crew, publisher: Publisher) -> int:
    """Put the files of a list, in order, where the ranks find them; how many items these are."""
    total = found.bytes + found.files * dealing.FILE_COST
    number = 0
    for parts in dealing.deal(_units(found.sources()), total, crew.ranks):
        number = publisher.publish([encode(_part_of(part)) for part in parts]) + 1
        crew.check()
    publisher.finish()
    return number


def _units(sources: Iterable[Source]) -> Iterator[dealing.Unit]:
    for source in sources:
        large = source.fixed is None and source.size > source.chunk_size
        yield dealing.Unit(
            _stamped(source) if large else source,
            source.size + dealing.FILE_COST,
            source.size if large else 0,
            source.chunk_size,
        )


def _stamped(source: Source) -> Source:
    """A large file with what tells it from another one of its name."""
    try:
        path = os.path.join(source.root or "", *(source.components or ()), source.name)
        st = os.stat(path)
    except OSError:  # whoever opens it will say so
        return source
    return source._replace(stamp=(st.st_ino, st.st_size, st.st_mtime_ns))


def _part_of(part: dealing.Part) -> Source:
    source: Source = part.work
    if part.start == 0 and part.end in (0, source.size):
        return source
    return source._replace(part=(part.start, part.end))


def encode(source: Source) -> Any:
    """A file as JSON knows it; an operand's path is absolute then."""
    if source.root is None and source.fixed is None:
        source = source._replace(name=os.path.join(os.getcwd(), source.name))
    return source


def decode(value: Sequence[Any]) -> Source:
    """The file again."""
    shown, root, components, links, name, size, fixed, follow, chunk_size, part, stamp = value
    outcome: Optional[Outcome] = None
    if fixed is not None:
        outcome = [(o, s, d) for o, s, d in fixed] if not fixed or isinstance(fixed[0], list) else Unread(*fixed)
    return Source(
        shown,
        root,
        None if components is None else tuple(components),
        tuple(links),
        name,
        size,
        outcome,
        follow,
        chunk_size,
        None if part is None else (part[0], part[1]),
        None if stamp is None else (stamp[0], stamp[1], stamp[2]),
    )


def tell(place: int, count: int, events: HashEvents, summary: HashSummary) -> None:
    """Everything that came of ``count`` items, in the order of the list; parts of a file as one."""
    before: List[Chunk] = []
    why: Optional[Unread] = None
    for number in range(count):
        values = claims.read_json(place, "%s/%d" % (claims.ITEMS, number))
        for value, (chunks, failed) in zip(values, claims.read_json(place, _result_name(number))):
            source = decode(value)
            before += [(offset, size, digest) for offset, size, digest in chunks]
            why = why or (Unread(*failed) if failed else None)
            if source.part is not None and source.part[1] < source.size:
                continue
            _tell(source, before, why, events, summary)
            before, why = [], None


def _tell(
    source: Source, chunks: List[Chunk], why: Optional[Unread], events: HashEvents, summary: HashSummary
) -> None:
    if why is not None:
        summary.failed += 1
        events.failed(source.shown, why)
        return
    if source.fixed is None:
        summary.files += 1
        summary.bytes += sum(size for _, size, _ in chunks)
    events.hashed(source.shown, chunks)


class Read(NamedTuple):
    """How a rank has read, as JSON knows it: why it was not direct, whether any of it was."""

    refused: List[str]
    direct: bool


def how_read(summary: HashSummary) -> Read:
    """The same of a rank's summary."""
    return Read(sorted(set(summary.refused.values())), bool(summary.direct - set(summary.refused)))


def add_reads(summary: HashSummary, reads: Iterable[Any]) -> None:
    """Add how all ranks have read; devices of other nodes get numbers that no device has."""
    known: Dict[str, int] = {}
    direct: Set[int] = set()
    for refused, was_direct in reads:
        for reason in refused:
            known.setdefault(reason, -1 - len(known))
        if was_direct:
            direct.add(0)
    summary.refused = {number: reason for reason, number in known.items()}
    summary.direct = direct
