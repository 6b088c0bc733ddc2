# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""MD5 of each chunk of files and trees, on a pool of workers, in an order that does not depend on it.

1. Small files go out in batches, files of more than one chunk as one task a chunk; the parent opens those once, so
   that all their chunks come from one inode.
2. Results wait until everything before them is there, so the events come in the order of the files.

Promises: each file ends in one event, ``hashed`` or ``failed``, and a digest is given only for a file that did not
change while it was read. Nothing is printed here.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any, Deque, Dict, Iterator, Optional, Protocol, Set, Tuple

from mlperf_common.fileio import digest, hashplan, hashtasks, walk
from mlperf_common.fileio.hashplan import HashEvents, Source, Unit
from mlperf_common.fileio.hashtasks import Batch, Learned, Outcome, Range, Reading, TooLarge, Unread, Unusable
from mlperf_common.fileio.listing import AnyPool, Roots
from mlperf_common.fileio.manifest import Chunk
from mlperf_common.fileio.workers import Failure, Task


class Files(Protocol):
    """What is to be hashed: ``Found``, or a manifest, of which nobody knows how many files it names."""

    files: int
    bytes: int
    problems: int

    def sources(self) -> Iterator[Source]:
        """The files in order."""


class HashSummary:
    """What a run did."""

    def __init__(self) -> None:
        self.files_total = 0
        self.bytes_total = 0  # as listed
        self.files = 0  # hashed, empty ones too
        self.bytes = 0
        self.failed = 0
        self.problems = 0
        self.refused: Dict[int, str] = {}
        self.direct: Set[int] = set()

    def is_complete(self) -> bool:
        """Whether every file of every operand has been hashed."""
        return not (self.failed or self.problems) and self.files == self.files_total

    def learn(self, learned: Learned) -> None:
        """Add what a worker has learned of devices."""
        self.refused.update(learned.refused)
        self.direct |= learned.direct

    def io_mode(self) -> str:
        """``direct``, or why it was not."""
        direct = bool(self.direct - set(self.refused))
        if not self.refused:
            return "direct" if direct else "buffered (small or cached files)" if self.bytes else "none (no bytes)"
        why = "; ".join(sorted(set(self.refused.values())))
        return f"{'partly direct' if direct else 'buffered'} ({why})"


class LargeFile:
    """A file of more than one chunk: opened once by the parent, which passes the descriptor with each chunk."""

    def __init__(self, unit: Unit, index: int, chunk_size: int) -> None:
        self.unit = unit
        self.index = index
        self.under_way = 0
        self.why: Optional[Unread] = None  # it gets no digest
        self._chunk_size = chunk_size
        self._fd = -1
        self._before: Optional[os.stat_result] = None
        self._direct = False
        self._chunks: Deque[Range] = deque()
        self._digests: Dict[int, Chunk] = {}

    def open(self, roots: Roots, reading: Reading, cached: bool) -> None:
        """Open the file and cut it into chunks; ``cached`` as for ``hash_files``. Raises OSError, Unusable."""
        source = self.unit.sources[self.index]
        self._fd, before = _open_source(source, roots)
        if source.stamp not in (None, (before.st_ino, before.st_size, before.st_mtime_ns)):
            raise hashtasks.Changed("changed since it was listed")
        direct = reading.prepare(self._fd, before, cached)
        size = before.st_size
        for start in range(*(source.part or (0, size)), self._chunk_size):
            end = min(start + self._chunk_size, size)
            self._chunks.append(Range(start, end, size, before.st_dev, direct, True))
        self._before = before

    def has_chunks(self) -> bool:
        """Whether there are chunks that nobody hashes yet."""
        return bool(self._chunks)

    def next_task(self) -> Task:
        """The next chunk."""
        self.under_way += 1
        part = self._chunks.popleft()._replace(first=not self._digests)
        return Task("chunk", part, (self._fd,), self)

    def take(self, part: Range, digest: str) -> None:
        """A chunk's digest."""
        self._digests[part.start] = (part.start, part.end - part.start, digest)

    def fail(self, why: Unread) -> None:
        """The file gets no digest; what nobody hashes yet is dropped."""
        self._chunks.clear()
        self.why = self.why or why

    def outcome(self) -> Outcome:
        """What came of it, once nothing is under way; of two reasons, a change that fstat shows is the better."""
        try:
            if self._before is not None:
                hashtasks.check_unchanged(self._before, os.fstat(self._fd))
        except (OSError, Unusable) as exc:
            return hashtasks.unread(exc)
        return self.why if self.why else [self._digests[start] for start in sorted(self._digests)]

    def close(self) -> None:
        """Close it, if it is open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_source(source: Source, roots: Roots) -> Tuple[int, os.stat_result]:
    if source.root is None:
        return hashtasks.open_file(source.name, None, source.follow)
    chain = walk.open_chain(os.dup(roots.get(source.root, False).fd), False)
    try:
        directory = chain.open(source.components or (), source.links)
        return hashtasks.open_file(source.name, directory, source.follow)
    finally:
        chain.close()


# ------------------------------------------------------------------------------------------------ the run


def hash_files(
    found: Files,
    pool: AnyPool,
    roots: Roots,
    events: HashEvents,
    summary: HashSummary,
    cached: bool = False,
) -> None:
    """Hash what was found, on a pool that has ``hashtasks.FUNCTIONS``; ``summary`` is filled in as it goes.

    ``cached``: what is in the page cache is taken from there; else large files are read from the storage.

    Raises DigestRefused, AllWorkersDied, Interrupted, and
    whatever the events raise; the caller then aborts the pool.
    """
    digest.md5_constructor()
    summary.files_total, summary.bytes_total = found.files, found.bytes
    summary.problems += found.problems
    run = _Run(hashplan.cut(found.sources()), roots, events, summary, cached)
    try:
        pool.run(run.next_task, run.on_result)
    finally:
        run.close()


class _Run:
    """Gives out the tasks, takes the results, lets them go in order."""

    def __init__(
        self, units: Iterator[Unit], roots: Roots, events: HashEvents, summary: HashSummary, cached: bool
    ) -> None:
        self._cached = cached
        self._units = units
        self._roots = roots
        self._events = events
        self._summary = summary
        self._reading = Reading()
        self._held_back: Optional[Unit] = None  # taken from _units, but too much for a worker that is busy
        self._in_order: Deque[Unit] = deque()
        self._due: Deque[LargeFile] = deque()
        self._large: Optional[LargeFile] = None
        self._open: Set[LargeFile] = set()

    # ---- giving out

    def next_task(self, worker: int, ahead: bool) -> Optional[Task]:
        """The next chunk or batch, or None."""
        while True:
            large = self._with_chunks()
            if large is not None:
                # Behind another task it would wait for seconds, while an idle worker comes for it sooner.
                return None if ahead else large.next_task()
            unit = self._held_back or next(self._units, None)
            self._held_back = None
            if unit is None:
                return None
            if ahead and unit.size > hashplan.BATCH_BYTES:
                self._held_back = unit
                return None
            self._in_order.append(unit)
            task = self._begin(unit)
            if task is not None:
                return task

    def _begin(self, unit: Unit) -> Optional[Task]:
        """The task of a batch; None for a large file, which is due now, and for what cannot or need not be begun."""
        if not unit.due:
            self._let_go()
            return None
        first = unit.sources[unit.due[0]]
        if first.size > first.chunk_size:
            self._due.append(LargeFile(unit, unit.due[0], first.chunk_size))
            return None
        key = 0
        fds: Tuple[int, ...] = ()
        if first.root is not None:
            try:
                root = self._roots.get(first.root, False)
            except OSError as exc:
                unit.settle_all(hashtasks.unread(exc))
                self._let_go()
                return None
            key, fds = root.key, (root.fd,)
        groups = hashplan.groups([unit.sources[index] for index in unit.due])
        return Task("hash", Batch(key, first.chunk_size, first.follow, groups, self._cached), fds, unit)

    def _with_chunks(self) -> Optional[LargeFile]:
        """The large file at hand, or the next one that is due, opened."""
        while self._large is None or not self._large.has_chunks():
            if not self._due:
                return None
            self._large = self._due.popleft()
            self._open_large(self._large)
        return self._large

    def _open_large(self, large: LargeFile) -> None:
        self._open.add(large)
        try:
            large.open(self._roots, self._reading, self._cached)
        except (OSError, Unusable) as exc:
            large.fail(hashtasks.unread(exc))
        self._end_if_done(large)
        self._let_go()

    # ---- taking results

    def on_result(self, task: Task, result: Any) -> None:
        """A batch or a chunk has ended, one way or the other."""
        if task.kind == "chunk":
            self._on_chunk(task.context, task.payload, result)
        else:
            self._on_batch(task.context, result)
        self._let_go()

    def _on_batch(self, unit: Unit, result: Any) -> None:
        if isinstance(result, Failure):
            unit.settle_all(_unread(result))
            return
        outcomes, learned = result
        self._learn(learned)
        for index, outcome in zip(unit.due, outcomes):
            if isinstance(outcome, TooLarge):  # it has grown since it was listed
                self._due.append(LargeFile(unit, index, unit.sources[index].chunk_size))
            else:
                unit.settle(index, outcome)

    def _on_chunk(self, large: LargeFile, part: Range, result: Any) -> None:
        large.under_way -= 1
        if isinstance(result, Failure):
            large.fail(_unread(result))
        else:
            digest, learned = result
            self._learn(learned)
            large.take(part, digest)
        self._end_if_done(large)

    def _end_if_done(self, large: LargeFile) -> None:
        if large.under_way or large.has_chunks():
            return
        large.unit.settle(large.index, large.outcome())
        large.close()
        self._open.discard(large)

    def _learn(self, learned: Learned) -> None:
        self._reading.refused.update(learned.refused)
        self._summary.learn(learned)

    def _let_go(self) -> None:
        """Tell what is complete, as far as everything before it is."""
        while self._in_order and not self._in_order[0].missing:
            unit = self._in_order.popleft()
            for source, outcome in zip(unit.sources, unit.outcomes):
                self._tell(source, outcome)

    def _tell(self, source: Source, outcome: Any) -> None:
        if isinstance(outcome, Unread):
            self._summary.failed += 1
            self._events.failed(source.shown, outcome)
            return
        if source.fixed is None:
            self._summary.files += 1
            self._summary.bytes += sum(size for _, size, _ in outcome)
        self._events.hashed(source.shown, outcome)

    def close(self) -> None:
        """Give up what is open, and say how the parent's own opens went."""
        for large in self._open:
            large.close()
        self._open.clear()
        self._summary.learn(self._reading.learned())


def _unread(failure: Failure) -> Unread:
    return Unread(f"worker {failure.worker} {failure.reason}" if failure.signum else failure.reason, failure.errno)
