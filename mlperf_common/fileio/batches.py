# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Which files go together, and who gets them next: placement only, nothing here touches a file.

Small files are cut into batches along directories. A worker stays in its directory, so that creates do not
fight over a directory's lock; when no directory is left untouched, it helps where most is left. Large files
are cut into extents.
"""

from __future__ import annotations

import os
from collections import deque
from typing import AbstractSet, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio.landing import LooseFile
from mlperf_common.fileio.walk import Directory, FileEntry

EXTENT = 64 << 20  # bytes of a large file in one task; what is larger than this is cut

# A batch ends at any of these. With more files in one, workers are idle at the end; names are bounded by the size
# of a message.
BATCH_FILES = 128
LEAST_FILES = 32  # towards the end of a job batches get as small as this, so that all workers end together
BATCH_BYTES = EXTENT
BATCH_NAMES = 16 << 10

NOTHING: AbstractSet[bytes] = frozenset()


class PlannedFile(NamedTuple):
    """A file to copy: its name in its directory (an operand: its path), what was seen of it, whether it replaces.

    ``shown`` is an operand as the user gave it. ``compare``: nothing is done if the same bytes stand there.
    """

    name: str
    entry: FileEntry
    replaces: bool
    shown: str = ""
    compare: bool = False


class Queue:
    """The files of one directory (None: the operands) that one worker can copy, in order."""

    def __init__(self, directory: Optional[Directory], files: Iterator[PlannedFile], count: int) -> None:
        self.directory = directory
        self.left = count
        self._files = files

    def take(self, most: int = BATCH_FILES) -> List[PlannedFile]:
        """The next batch, of at most so many files; empty when there are no more."""
        taken: List[PlannedFile] = []
        size = names = 0
        while len(taken) < most and size < BATCH_BYTES and names < BATCH_NAMES:
            file = next(self._files, None)
            if file is None:
                self.left = 0
                break
            self.left -= 1
            taken.append(file)
            size += file.entry.size
            names += 2 * len(file.name.encode("utf-8", "surrogateescape")) + 32
        return taken


def files_of(directory: Directory) -> Iterator[PlannedFile]:
    """The files of a walked directory that are to be copied."""
    existing, left = directory.existing or NOTHING, directory.left
    for entry in directory.files():
        if not existing and not left:  # nearly always
            yield PlannedFile(entry.name, entry, False)
            continue
        raw = entry.name.encode("utf-8", "surrogateescape")
        if raw not in left:
            yield PlannedFile(entry.name, entry, raw in existing, "", raw in directory.compare)


def files_of_operands(loose: Sequence[LooseFile]) -> Iterator[PlannedFile]:
    """The operands that are files."""
    for file in loose:
        if not (file.is_link or file.left):
            yield PlannedFile(file.source, file.entry, file.standing is not None, file.shown, file.compare)


def files_named(
    directory: Optional[Directory], names: AbstractSet[str], loose: Sequence[LooseFile]
) -> Iterator[PlannedFile]:
    """Those of a directory's files (None: of the operands) that have one of these names."""
    if directory is None:
        for file in loose:
            if file.name in names and not file.is_link:
                yield PlannedFile(file.source, file.entry, file.standing is not None, file.shown)
        return
    existing = directory.existing or NOTHING
    for entry in directory.files():
        if entry.name in names:
            yield PlannedFile(entry.name, entry, os.fsencode(entry.name) in existing)


def is_large(file: PlannedFile) -> bool:
    """Whether a file is cut into extents."""
    return file.entry.size > EXTENT


class Batches:
    """The queues of a job and who is at which."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._untouched: Deque[Queue] = deque(queues)
        self._at: Dict[int, Queue] = {}
        self._touched: List[Queue] = []
        self._left = sum(queue.left for queue in queues)

    def add(self, queues: Sequence[Queue]) -> None:
        """More queues, after those that there are."""
        self._untouched.extend(queues)
        self._left += sum(queue.left for queue in queues)

    def next(self, worker: int, ahead: bool) -> Optional[Tuple[Queue, List[PlannedFile]]]:
        """The next batch for ``worker``, or None.

        ``ahead``: the worker is busy, so it gets nothing from a directory that others could help with now.
        """
        while True:
            queue = self._choose(worker, ahead)
            if queue is None:
                return None
            taken = queue.take(self._share())
            self._left -= len(taken)
            if taken:
                return queue, taken

    def _share(self) -> int:
        """How many files the next batch may have: half of a worker's share of what is left."""
        return max(LEAST_FILES, min(BATCH_FILES, self._left // (2 * max(1, len(self._at)))))

    def _choose(self, worker: int, ahead: bool) -> Optional[Queue]:
        at = self._at.get(worker)
        if at is not None and at.left and not (ahead and not self._untouched):
            return at
        if self._untouched:
            queue = self._untouched.popleft()
            self._at[worker] = queue
            self._touched.append(queue)
            return queue
        self._touched = [queue for queue in self._touched if queue.left]
        if ahead or not self._touched:
            return None
        self._at[worker] = max(self._touched, key=lambda queue: queue.left)
        return self._at[worker]


def cut(segments: Sequence[Tuple[int, int]], extent: int = 0) -> List[Tuple[int, int]]:
    """The data of a large file in extents: no longer than ``extent`` bytes (0: EXTENT), cut at multiples of it."""
    extent = extent or EXTENT
    pieces = []
    for start, end in segments:
        while start < end:
            stop = min(end, (start // extent + 1) * extent)
            pieces.append((start, stop))
            start = stop
    return pieces
