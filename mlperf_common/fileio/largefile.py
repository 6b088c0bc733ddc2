# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A large file, in the parent: opened once, sized, handed out in extents, compared and committed at the end.

All extents come from one inode and go to one, whatever happens to the names, because the parent passes its two
descriptors with each. The parent alone truncates, compares and commits, after every extent has succeeded.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Deque, Optional, Tuple

from mlperf_common.fileio import batches, copyfile
from mlperf_common.fileio.batches import PlannedFile
from mlperf_common.fileio.copyfile import Making, NewFile
from mlperf_common.fileio.walk import Directory


class LargeFile:
    """One large file under way: the planned file, its descriptors, the extents not yet handed out."""

    def __init__(self, directory: Optional[Directory], file: PlannedFile) -> None:
        self.directory = directory
        self.file = file
        self.ranges: Deque[Tuple[int, int]] = deque()
        self.under_way = 0
        self.moved = False
        self.failed = False
        self.source = -1
        self._new: Optional[NewFile] = None
        self._making: Optional[Making] = None
        self.st: Optional[os.stat_result] = None

    def open(self, source_dir: Optional[int], making: Making, item: str) -> None:
        """Open the source, make the new file of its size, cut it. Raises OSError, FileChanged.

        ``making.dir_fd`` becomes this file's own: the commit needs it long after its chain has moved on.
        """
        self._making = making
        name = self.file.name
        self.source, st = copyfile.open_source(name, source_dir, self.file.entry, making.facts)
        self.st = st
        mode = st.st_mode & 0o777
        self._new = copyfile.create(making, self.file.entry.name, mode, st.st_size, self.file.replaces, item)
        self._new.size = st.st_size
        os.ftruncate(self._new.fd, st.st_size)
        self.ranges.extend(batches.cut(copyfile.data_segments(self.source, st)))

    def descriptors(self) -> Tuple[int, int]:
        """The source's and the new file's."""
        return self.source, self._new.fd if self._new is not None else -1

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
        if self._new is None or self._making is None or self.st is None:
            raise ValueError("the file was never opened")
        os.ftruncate(self._new.fd, self.st.st_size)
        copyfile.check_unchanged(self.st, os.fstat(self.source))
        (copyfile.replace if self.file.replaces else copyfile.commit)(self._making, self._new)
        self._new = None

    def close(self) -> None:
        """Close what is open and leave nothing of an uncommitted file."""
        new, self._new = self._new, None
        if new is not None:
            new.discard()
        if self._making is not None:
            os.close(self._making.dir_fd)
            self._making = None
        if self.source >= 0:
            os.close(self.source)
            self.source = -1
