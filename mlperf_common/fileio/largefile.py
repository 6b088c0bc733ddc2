# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A large file, in the parent: opened once, sized, handed out in extents, compared and committed at the end.

All extents come from one inode and go to one, whatever happens to the names, because the parent passes its two
descriptors with each. The parent alone truncates, compares and commits, after every extent has succeeded.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Deque, Dict, List, Optional, Sequence, Tuple

from mlperf_common.fileio import batches, copyfile, resuming
from mlperf_common.fileio.batches import PlannedFile
from mlperf_common.fileio.copyfile import Making, NewFile, Stream
from mlperf_common.fileio.manifest import CHUNK_SIZE, Chunk
from mlperf_common.fileio.resuming import Unfinished
from mlperf_common.fileio.walk import Directory


class LargeFile:
    """One large file under way: the planned file, its descriptors, the extents not yet handed out."""

    def __init__(self, directory: Optional[Directory], file: PlannedFile) -> None:
        self.directory = directory
        self.file = file
        self.comparing = file.compare
        self.differs = False
        self.verifying = False
        self.digests: Dict[int, Chunk] = {}
        self._standing = -1
        self._item = ""
        self.ranges: Deque[Tuple[int, int]] = deque()
        self.under_way = 0
        self.moved = False
        self.failed = False
        self.source = -1
        self._new: Optional[NewFile] = None
        self._making: Optional[Making] = None
        self._unfinished: Optional[Unfinished] = None
        self.resumed = 0  # bytes that an earlier run has copied
        self.st: Optional[os.stat_result] = None

    def open(self, source_dir: Optional[int], making: Making, item: str) -> None:
        """Open the source; cut what is to be compared, or begin the new file. Raises OSError, FileChanged.

        ``making.dir_fd`` becomes this file's own: the commit needs it long after its chain has moved on.
        """
        self._making = making
        self._item = item
        name, entry = self.file.name, self.file.entry
        follow = self.directory is None or self.directory.tree.look.follow
        self.source, self.st = copyfile.open_source(name, source_dir, entry, making.facts, follow)
        if self.comparing:
            standing = copyfile.open_standing(making, entry.name, entry.size)
            if standing is not None:
                self._standing = standing
                self.ranges.extend(batches.cut([(0, entry.size)]))
                return
        self.begin()

    def opened(self) -> Tuple[Making, os.stat_result]:
        """What ``open`` has found."""
        if self._making is None or self.st is None:
            raise ValueError("the file was never opened")
        return self._making, self.st

    def begin(self) -> None:
        """Make the new file of its size and cut it; nothing is cut if it shares the source's blocks."""
        making, st = self.opened()
        self.comparing = False
        self._close_standing()
        self._new = new = self._create(making, st)
        new.size, new.source, new.st = st.st_size, self.source, st
        if copyfile.clone(making.facts, Stream(self.source, new.fd, st.st_dev, making.dev), st.st_size):
            return
        os.ftruncate(new.fd, st.st_size)
        done = self._unfinished.done if self._unfinished is not None else []
        self.resumed = sum(end - start for start, end in done)
        if making.options.digests or making.options.verify:
            # Whole chunks, holes included: what is hashed is what a reader of the file would read.
            extent = CHUNK_SIZE if making.options.digests else batches.EXTENT
            self.ranges.extend(batches.cut([(0, st.st_size)], extent))
        else:
            segments = copyfile.data_segments(self.source, st, making.options.sparse)
            self.ranges.extend(batches.cut(resuming.without(segments, done) if done else segments))

    def _create(self, making: Making, st: os.stat_result) -> NewFile:
        name, replaces = self.file.entry.name, self.file.replaces
        if not making.options.resume:
            return copyfile.create(making, name, st.st_mode, st.st_size, replaces, self._item)
        new, self._unfinished = resuming.open_part(making, name, st, replaces)
        return new

    def known(self, start: int, end: int) -> Tuple[Tuple[int, int], ...]:
        """What an earlier run has copied of these bytes: it is only read again."""
        return () if self._unfinished is None else resuming.within(self._unfinished.done, (start, end))

    def note(self, start: int, end: int) -> None:
        """An extent is copied. Raises OSError (the record)."""
        self.moved = True
        if self._unfinished is not None:
            self._unfinished.add(start, end)

    def touch(self) -> None:
        """Say that this run is alive."""
        if self._unfinished is not None:
            self._unfinished.touch()

    def take(self, chunks: Sequence[Chunk]) -> None:
        """The digests of an extent."""
        self.digests.update((chunk[0], chunk) for chunk in chunks)

    def chunks(self) -> List[Chunk]:
        """The digests of all extents, in order."""
        return [self.digests[start] for start in sorted(self.digests)]

    def _check_digests(self) -> None:
        """Raise FileChanged unless there are digests of every byte: what is not known was not read."""
        at = 0
        for start, size, _ in self.chunks():
            if start != at:
                break
            at += size
        if self._new is not None and at != self._new.size:
            raise copyfile.FileChanged("only %d of its %d bytes were hashed" % (at, self._new.size))

    def verify(self) -> bool:
        """Begin to read back what was written, if that is wanted and not done; whether it is begun. Raises OSError."""
        if self.verifying or self._new is None or self._making is None or not self._making.options.verify:
            return False
        self.verifying = True
        self._check_digests()
        os.ftruncate(self._new.fd, self._new.size)
        self.ranges.extend((start, start + size) for start, size, _ in self.chunks())
        return bool(self.ranges)

    def descriptors(self) -> Tuple[int, int]:
        """The source's and the new file's, or that of what it is compared with."""
        return self.source, self._new.fd if self._new is not None else self._standing

    def differ(self) -> None:
        """A part is not the same: the rest need not be compared."""
        self.differs = True
        self.ranges.clear()

    def devices(self) -> Tuple[int, int]:
        """The source's and the destination's."""
        return (self.st.st_dev if self.st else 0), (self._making.dev if self._making else 0)

    def is_done(self) -> bool:
        """Whether no extent is out and none is to come."""
        return not self.under_way and (self.failed or not self.ranges)

    def finish(self) -> None:
        """Cut off the padding, see that the source is unchanged, commit.

        Raises OSError, FileChanged, NameCollision, NamelessRefused.
        """
        making, st = self.opened()
        if self._new is None:
            raise ValueError("the file was never begun")
        os.ftruncate(self._new.fd, st.st_size)
        if making.options.digests:
            self._check_digests()
        self.check_source()
        (copyfile.replace if self.file.replaces else copyfile.commit)(making, self._new)
        self._new = None
        if self._unfinished is not None:
            part, self._unfinished = self._unfinished, None
            part.remove_record()

    def check_source(self) -> None:
        """Raise FileChanged if the source has changed since it was opened. Raises OSError."""
        if self._making is not None and self.st is not None:
            copyfile.check_unchanged(self.st, os.fstat(self.source), self._making.options.ignore_times)

    def keeps_failure(self, reason: str, number: int) -> bool:
        """Whether its failure is told elsewhere; the reason and errno are those of this one."""
        return False

    def counts(self) -> Tuple[int, int]:
        """What has been done when it is finished: files and bytes."""
        return 1, self.file.entry.size

    def _close_standing(self) -> None:
        if self._standing >= 0:
            os.close(self._standing)
            self._standing = -1

    def close(self) -> None:
        """Close what is open and leave nothing of an uncommitted file."""
        new, self._new = self._new, None
        part, self._unfinished = self._unfinished, None
        if new is not None and part is not None:
            part.leave()
            new.temporary = ""  # it stays
        if new is not None:
            new.discard()
        if self._making is not None:
            os.close(self._making.dir_fd)
            self._making = None
        self._close_standing()
        if self.source >= 0:
            os.close(self.source)
            self.source = -1
