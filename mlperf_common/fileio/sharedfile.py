# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A large file that several ranks copy together: each writes its part into one named temporary, one commits.

The temporary's name follows from the run and the file's number, so that every rank knows it. Whoever comes first makes
it (O_EXCL) and publishes its inode; the others open it relative to the destination's directory, without following a
link, and compare. A rank has done its part when its source was the planned one before and after, and its close was
checked. The commit is the leader's, when every byte is accounted for.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Callable, List, NamedTuple, Optional, Tuple

from mlperf_common.fileio import batches, claims, copyfile
from mlperf_common.fileio.batches import PlannedFile
from mlperf_common.fileio.copyfile import FileChanged, Making, NewFile
from mlperf_common.fileio.facts import Facts
from mlperf_common.fileio.largefile import LargeFile
from mlperf_common.fileio.manifest import CHUNK_SIZE
from mlperf_common.fileio.metadata import creation_mode
from mlperf_common.fileio.traces import temporary_name
from mlperf_common.fileio.walk import Directory

SHARED = 998  # in the names of temporaries, in the place of a worker's number
WAIT_SECONDS = 0.02  # between looks for what another rank is about to publish


class Done(NamedTuple):
    """What a rank has to say of its part of the file ``number``: nothing more, or why it failed."""

    number: int
    start: int
    end: int
    reason: str = ""
    errno: int = 0


class Shared(NamedTuple):
    """What the parts of a rank have in common: the ranks' directory, what is done, a look at the other ranks."""

    place: int
    done: List[Done]
    check: Callable[[], None]


class SharedFile(LargeFile):
    """The bytes ``part`` of a file, for a rank that does these."""

    def __init__(
        self, directory: Optional[Directory], file: PlannedFile, number: int, part: Tuple[int, int], shared: Shared
    ) -> None:
        super().__init__(directory, file)
        self._number = number
        self._part = part
        self._shared = shared

    def begin(self) -> None:
        """Open the temporary, or make it, and cut this rank's part. Raises OSError, FileChanged."""
        making, st = self.opened()
        new = open_temporary(making, self.file.entry.name, st, self._number, self._shared)
        self._new = new
        new.size, new.source, new.st = st.st_size, self.source, st
        start, end = self._part
        options = making.options
        if options.digests or options.verify:
            extent = CHUNK_SIZE if options.digests else batches.EXTENT
            self.ranges.extend(batches.cut([(start, end)], extent))
        else:
            segments = copyfile.data_segments(self.source, st, options.sparse, start, end)
            self.ranges.extend(batches.cut(segments))

    def _check_digests(self) -> None:
        """As for a whole file, of this part."""
        at = self._part[0]
        for start, size, _ in self.chunks():
            if start != at:
                break
            at += size
        if at != self._part[1]:
            raise FileChanged("only %d of the bytes up to %d were hashed" % (at, self._part[1]))

    def finish(self) -> None:
        """See that the source is unchanged and that what was written has arrived. Raises OSError, FileChanged."""
        making, new = self.opened()[0], self._new
        if new is None:
            raise ValueError("the file was never begun")
        if making.options.digests:
            self._check_digests()
        self.check_source()
        if making.options.fsync:
            os.fsync(new.fd)
        self._new = None
        new.close()
        self._shared.done.append(Done(self._number, *self._part))

    def close(self) -> None:
        """Close what is open. The temporary is the leader's to remove: other ranks may be about to open it."""
        if self._new is not None:
            self._new.temporary = ""
        super().close()

    def keeps_failure(self, reason: str, number: int) -> bool:
        """It is told once for the whole file, by the leader."""
        self._shared.done.append(Done(self._number, *self._part, reason, number))
        return True

    def counts(self) -> Tuple[int, int]:
        """Its part of the bytes; the file counts when it has its name."""
        return 0, self._part[1] - self._part[0]


def shared_name(making: Making, name: str, number: int) -> str:
    """The temporary's name, the same on all ranks."""
    return temporary_name(name, "%s%03d%x" % (making.options.token, SHARED, number))


def open_temporary(making: Making, name: str, st: os.stat_result, number: int, shared: Shared) -> NewFile:
    """The temporary of a shared file, made if it is not there, and of its full size. Raises OSError."""
    temporary = shared_name(making, name, number)
    options = making.options
    flags = (os.O_RDWR if options.verify else os.O_WRONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
    direct = making.facts.wants_direct("destination", making.dev, st.st_size)
    mode = creation_mode(options.kept, st.st_mode)
    if copyfile.standing_at(making.dir_fd, name) is not None:
        mode = 0o600  # until it gets the old file's at the end
    try:
        fd = copyfile.open_new(making, temporary, flags | os.O_CREAT | os.O_EXCL, mode, direct)
    except FileExistsError:
        fd = copyfile.open_new(making, temporary, flags, 0, direct)
        try:
            _compare(fd, number, shared)
        except BaseException:
            os.close(fd)
            raise
        return NewFile(fd, making.dir_fd, name, temporary, making.facts.notes)
    new = NewFile(fd, making.dir_fd, name, temporary, making.facts.notes)
    try:
        os.ftruncate(fd, st.st_size)
        claims.write_json(shared.place, _record(number), os.fstat(fd).st_ino)
    except BaseException:
        new.discard()
        raise
    return new


def _record(number: int) -> str:
    return "file-%d" % number


def _compare(fd: int, number: int, shared: Shared) -> None:
    """See that an open temporary is the one that a rank has made; that may be about to say so."""
    while True:
        try:
            inode = claims.read_json(shared.place, _record(number))
            break
        except FileNotFoundError:
            shared.check()  # the one that makes it may have died, or failed
            time.sleep(WAIT_SECONDS)
    if os.fstat(fd).st_ino != inode:
        raise OSError(errno.ESTALE, "another file has the name of the temporary that the ranks share")


def commit(making: Making, file: PlannedFile, source_dir: Optional[int], follow: bool, number: int) -> None:
    """Give a shared file, all of whose parts are done, its name; in the leader.

    Raises OSError, FileChanged, NameCollision; then nothing of the new file is left.
    """
    name, options = file.entry.name, making.options
    temporary = shared_name(making, name, number)
    flags = (os.O_RDWR if options.verify else os.O_WRONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, dir_fd=making.dir_fd)
    new = NewFile(fd, making.dir_fd, name, temporary, making.facts.notes)
    source = -1
    try:
        source, st = copyfile.open_source(file.name, source_dir, file.entry, making.facts, follow)
        new.size, new.source, new.st = st.st_size, source, st
        os.ftruncate(new.fd, st.st_size)
        (copyfile.replace if file.replaces else copyfile.commit)(making, new)
    except BaseException:
        new.discard()
        raise
    finally:
        if source >= 0:
            os.close(source)


def discard(making: Making, name: str, number: int) -> None:
    """Remove the temporary of a shared file, if it is there. Raises OSError."""
    try:
        os.unlink(shared_name(making, name, number), dir_fd=making.dir_fd)
    except FileNotFoundError:
        pass


def making_for(place: int, facts: Facts) -> Making:
    """What the leader needs to commit in the directory ``place``."""
    return Making(place, os.fstat(place).st_dev, facts.options, facts)
