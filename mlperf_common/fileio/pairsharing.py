# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One comparison by several ranks: rank 0 lists both trees and says what listing tells; all read what is to be read.

What differs goes to rank 0, which tells it in byte order of the paths, as one process would. Two files of many chunks
are shared by chunks: all ranks must have seen the same inodes, sizes and modification times.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from mlperf_common.fileio import comparing, dealing
from mlperf_common.fileio.claims import Publisher
from mlperf_common.fileio.comparing import Counts, Request, Run, Stamp, Work, is_large, stamp_of
from mlperf_common.fileio.hashsharing import items_of
from mlperf_common.fileio.listing import AnyPool, Roots
from mlperf_common.fileio.pairtasks import Pair
from mlperf_common.fileio.sharing import Crew
from mlperf_common.fileio.walk import Directory, Look, Tree

Difference = Tuple[str, str, str]  # path, kind, text


class Ear(comparing.Events):
    """Keeps what differs."""

    def __init__(self) -> None:
        self.differences: List[Difference] = []

    def differs(self, path: str, kind: str, text: str) -> None:
        self.differences.append((path, kind, text))


class Lead:
    """Rank 0's part; ``gather`` brings it what every rank has found, ``own`` gets what it reads itself."""

    def __init__(
        self, crew: Crew, pool: AnyPool, roots: Roots, gather: Callable[[Any], Any], own: Counts
    ) -> None:
        self._crew = crew
        self._pool = pool
        self._roots = roots
        self._gather = gather
        self._own = own
        self._publisher = Publisher(crew.place)

    def compare_after(self, walked: Callable[[], None]) -> Callable[[Run], None]:
        """The same as ``compare``, once the walk is over, of which ``walked`` tells the other ranks."""

        def compare(run: Run) -> None:
            walked()
            self.compare(run)

        return compare

    def compare(self, run: Run) -> None:
        """Have the entries of a run compared by all ranks, and tell what differs, in order."""
        found = self._publish(run)
        for differences, moved in self._gather(work(run.request, self._crew, self._pool, self._roots, self._own)):
            found += [(path, kind, text) for path, kind, text in differences]
            run.counts.bytes += moved
        for difference in sorted(found, key=lambda difference: os.fsencode(difference[0])):
            run.differs(*difference)

    def _publish(self, run: Run) -> List[Difference]:
        """Put what is to be read where the ranks find it; what is known without reading comes back."""
        known: List[Difference] = []
        total = run.counts.bytes_total + run.counts.files_total * dealing.FILE_COST
        for parts in dealing.deal(_units(run, known), total, self._crew.ranks):
            self._publisher.publish([_encode(part) for part in parts])
            self._crew.check()
        self._publisher.finish()
        return known


def _units(run: Run, known: List[Difference]) -> Iterator[dealing.Unit]:
    for work in run.entries:
        if work.pair is None:
            known.extend((work.path, kind, text) for kind, text in work.findings)
            continue
        chunk = run.request.chunk_size
        large = is_large(work, chunk)
        yield dealing.Unit(
            work._replace(stamps=_stamps(work, work.pair)) if large else work,
            work.size + dealing.FILE_COST,
            work.size if large else 0,
            chunk,
        )


def _stamps(work: Work, pair: Pair) -> Optional[Tuple[Stamp, Stamp]]:
    try:
        ours, theirs = (
            stamp_of(os.stat(os.path.join(directory.path() if directory else "", name)))
            for directory, name in ((work.ours, pair.ours), (work.theirs, pair.theirs))
        )
    except OSError:  # whoever opens them will say so
        return None
    return ours, theirs


def _encode(part: dealing.Part) -> Any:
    work: Work = part.work
    cut = (part.start, part.end) if part.end - part.start not in (0, work.size) else None
    findings = work.findings if part.start == 0 else []
    pair = work.pair
    if pair is not None and work.ours is None:
        pair = pair._replace(ours=os.path.join(os.getcwd(), pair.ours), theirs=os.path.join(os.getcwd(), pair.theirs))
    return work.path, _place(work.ours), _place(work.theirs), pair, work.size, findings, cut, work.stamps


def _place(directory: Optional[Directory]) -> Any:
    if directory is None:
        return None
    request = directory.request()
    return request.root, request.components, request.links


class _Decoder:
    """Entries become what they were, neighbours in one directory with the same directory."""

    def __init__(self, follow: bool) -> None:
        self._follow = follow
        self._trees: Dict[str, Tree] = {}
        self._last: Dict[int, Tuple[Any, Directory]] = {}

    def work(self, value: Sequence[Any]) -> Work:
        """The entry again."""
        path, ours, theirs, pair, size, findings, part, stamps = value
        return Work(
            path,
            self._directory(0, ours),
            self._directory(1, theirs),
            Pair(*pair),
            size,
            [(kind, text) for kind, text in findings],
            None if part is None else (part[0], part[1]),
            None if stamps is None else (_stamp(stamps[0]), _stamp(stamps[1])),
        )

    def _directory(self, side: int, place: Any) -> Optional[Directory]:
        if place is None:
            return None
        if side not in self._last or self._last[side][0] != place:
            root, components, links = place
            tree = self._trees.setdefault(root, Tree(root, root, (), Look(self._follow)))
            directory = Directory(tree, None, "", False)
            for level, name in enumerate(components):
                directory = Directory(tree, directory, name, level in links)
            self._last[side] = (place, directory)
        return self._last[side][1]


def _stamp(value: Sequence[int]) -> Stamp:
    return value[0], value[1], value[2]


def work(
    request: Request, crew: Crew, pool: AnyPool, roots: Roots, counts: Counts
) -> Tuple[List[Difference], int]:
    """Compare what is published, as long as there is any; what differs, and how many bytes were read, as in ``counts``.

    Raises AllWorkersDied, Interrupted, and what ``crew.check`` does.
    """
    ear = Ear()
    run = Run(request, roots, ear, counts)
    decoder = _Decoder(request.follow)
    run.entries = (decoder.work(value) for _, values in items_of(crew) for value in values)
    run.on(pool)
    return ear.differences, counts.bytes
