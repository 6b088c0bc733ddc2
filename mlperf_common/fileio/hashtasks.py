# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a worker does to hash: files of one batch from end to end, or one chunk of a large file.

Promises: a digest is given only for a file that was regular, that ended where its size said, and whose size and
times did not move from before the first byte was read until after the last (on one descriptor). Errors of single
files are part of a result, in words.

Does not promise that two files that change together are seen at one moment, nor that a name still means the file
that was listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from mlperf_common.fileio import direct_io, listing, words
from mlperf_common.fileio.digest import md5_constructor
from mlperf_common.fileio.direct_io import BLOCK_SIZE, ShortFile
from mlperf_common.fileio.manifest import Chunk
from mlperf_common.fileio.workers import Worker

# From this many bytes on, files are read with O_DIRECT. Hashing 512 MiB of files of 256 KiB, cold, 8 processes on
# 2 cores, ext4: 0.76 s and 0.09 s of system time, against 1.07 s and 0.27 s through the page cache (medians of 5).
# At 16 and 64 KiB the two were alike; then what is cached already should count.
DIRECT_MINIMUM = 256 << 10

# Places of a file at which the page cache is asked for it. From memory, 4 GiB took 0.69 of md5sum's time with O_DIRECT,
# which reads the storage all the same, and less than 0.55 without (2 cores; medians of 5).
PROBES = 9

# O_NONBLOCK: a FIFO that has taken a file's place must not hang us; fstat tells what it is.
OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC

class Unusable(Exception):
    """A file that gets no digest, as it is not regular; the message says so."""


class Changed(Unusable):
    """A file that gets no digest, as it changed while it was read; the message names the field."""


class TooLarge(NamedTuple):
    """Instead of a digest: the file has more than one chunk, so that the parent should share it out."""

    size: int


class Unread(NamedTuple):
    """Instead of a digest: why there is none, the system's number for it or 0, and whether the file changed."""

    reason: str
    errno: int = 0
    changed: bool = False


Outcome = Union[List[Chunk], TooLarge, Unread]


class Learned(NamedTuple):
    """Devices (st_dev) that refuse O_DIRECT, with the reason; devices of files that were read with it."""

    refused: Dict[int, str]
    direct: Set[int]


class Reading:
    """What this process has learned of devices."""

    def __init__(self) -> None:
        self.refused: Dict[int, str] = {}
        self.direct: Set[int] = set()

    def learned(self) -> Learned:
        """The same, to be sent to the parent."""
        return Learned(self.refused, self.direct)

    def prepare(self, fd: int, st: os.stat_result, cached: bool = False) -> bool:
        """Switch a file that is worth it to O_DIRECT, unless its device is known to refuse; whether it is.

        ``cached``: neither if the page cache seems to have it all.
        """
        if st.st_size < DIRECT_MINIMUM or st.st_dev in self.refused or (cached and is_cached(fd, st.st_size)):
            return False
        try:
            direct_io.set_direct(fd, True)
        except OSError as exc:
            # Whatever the reason, nothing has been read, and buffered reads give the same bytes.
            self.refused[st.st_dev] = f"O_DIRECT refused: {reason_of(exc)}"
            return False
        return True


def is_cached(fd: int, size: int) -> bool:
    """Whether the page cache has a page at each of a few places of a file, as far as it can be asked (preadv2(2))."""
    page = bytearray(1)
    try:
        places = [size * part // (PROBES - 1) for part in range(PROBES - 1)] + [size - 1]
        return all(os.preadv(fd, [page], place, os.RWF_NOWAIT) == 1 for place in places)
    except OSError:  # EAGAIN: it has not; others: the filesystem does not tell
        return False


def reading_of(worker: Worker) -> Reading:
    """The worker's knowledge, kept between tasks."""
    reading: Reading = worker.memory.setdefault("reading", Reading())
    return reading


# ------------------------------------------------------------------------------------------------ one file


def reason_of(exc: Union[OSError, Unusable]) -> str:
    """Why a file has no digest, in words."""
    return words.reason_of(exc) if isinstance(exc, OSError) else str(exc)


def unread(exc: Union[OSError, Unusable]) -> Unread:
    """The outcome of a file that could not be hashed for this reason."""
    number = exc.errno or 0 if isinstance(exc, OSError) else 0
    return Unread(reason_of(exc), number, isinstance(exc, (Changed, ShortFile)))


def check_regular(st: os.stat_result) -> None:
    """Raise Unusable for what is no regular file."""
    if not stat.S_ISREG(st.st_mode):
        raise Unusable(f"it is a {words.kind_of(st.st_mode)}, not a regular file")


def check_unchanged(before: os.stat_result, after: os.stat_result) -> None:
    """Raise Unusable, naming the field, if size, mtime or ctime moved between two fstats of one descriptor."""
    if before.st_size != after.st_size:
        raise Changed(f"changed while it was being read: size was {before.st_size}, is {after.st_size}")
    for field, name in (("st_mtime_ns", "modification time"), ("st_ctime_ns", "status change time")):
        if getattr(before, field) != getattr(after, field):
            raise Changed(f"changed while it was being read: its {name} has moved")


def open_file(name: str, directory: Optional[int], follow: bool) -> Tuple[int, os.stat_result]:
    """Open a regular file for reading; its descriptor and fstat. Raises OSError, Unusable.

    Its access time is left alone where that is allowed, to its owner and to root (fcntl(2)). Asked for with open(2), a
    file of somebody else would have to be opened twice, which on a shared filesystem is the cost.
    """
    fd = os.open(name, OPEN_FLAGS | (0 if follow else os.O_NOFOLLOW), dir_fd=directory)
    try:
        st = os.fstat(fd)
        check_regular(st)
        if os.geteuid() in (0, st.st_uid):
            with contextlib.suppress(OSError):  # root of a container is not root of every file
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_NOATIME)
    except BaseException:
        os.close(fd)
        raise
    return fd, st


def hash_file(
    worker: Worker, name: str, directory: Optional[int], chunk_size: int, follow: bool, cached: bool = False
) -> Outcome:
    """Hash the file ``name`` (in the directory open as ``directory``) if it has no more than one chunk.

    Raises nothing but Interrupted: what goes wrong is ``Unread``.
    """
    try:
        fd, before = open_file(name, directory, follow)
        try:
            if before.st_size > chunk_size:
                return TooLarge(before.st_size)
            return _hash_open_file(worker, fd, before, chunk_size, cached)
        finally:
            os.close(fd)
    except (OSError, Unusable) as exc:
        return unread(exc)


def _hash_open_file(
    worker: Worker, fd: int, before: os.stat_result, chunk_size: int, cached: bool
) -> List[Chunk]:
    try:
        if before.st_size == 0:
            chunks = _hash_to_end(worker, fd, chunk_size)
        else:
            size, dev = before.st_size, before.st_dev
            direct = reading_of(worker).prepare(fd, before, cached)
            chunks = [(0, size, hash_range(worker, fd, Range(0, size, size, dev, direct, True)))]
    except ShortFile:
        check_unchanged(before, os.fstat(fd))  # it shrank; where fstat does not show it, ShortFile's words do
        raise
    check_unchanged(before, os.fstat(fd))
    return chunks


def _hash_to_end(worker: Worker, fd: int, chunk_size: int) -> List[Chunk]:
    """Hash a file whose size says nothing (0, in /proc and on some FUSE), as far as it goes; often nowhere.

    Read in sequence, not by position: not every such file can seek.
    """
    view = worker.buffer()
    chunks: List[Chunk] = []
    start = size = 0
    md5 = md5_constructor()()
    while True:
        got = os.readv(fd, [view[: worker.turn(min(len(view), chunk_size - size))]])
        md5.update(view[:got])
        worker.moved(got)
        size += got
        if size and (not got or size == chunk_size):
            chunks.append((start, size, md5.hexdigest()))
            start, size, md5 = start + size, 0, md5_constructor()()
        if not got:
            return chunks


# ------------------------------------------------------------------------------------------------ a range of one


class Range(NamedTuple):
    """The bytes from ``start`` (a multiple of the block size) to ``end`` of a file of ``size`` bytes.

    ``direct``: its descriptor has O_DIRECT. ``first``: nothing of the file is known to have been read, so that a
    refusal of O_DIRECT is no error yet.
    """

    start: int
    end: int
    size: int
    dev: int
    direct: bool
    first: bool


def hash_range(worker: Worker, fd: int, part: Range) -> str:
    """The MD5 of a part of an open file, in hexadecimal; the part that ends the file also sees that it does.

    Raises OSError (ShortFile: the file ends early), Unusable (it does not end), Interrupted.
    """
    reading, view, md5 = reading_of(worker), worker.buffer(), md5_constructor()()
    at, ended = part.start, False
    may_refuse = part.dev if part.direct and part.first else None
    while at < part.end:
        count = worker.turn(min(len(view), part.end - at), BLOCK_SIZE)
        asked = _asked(view, count, at + count == part.size)
        ended = _read(reading, fd, view[:asked], count, at, may_refuse)
        md5.update(view[:count])
        worker.moved(count)
        at, may_refuse = at + count, None
    if part.direct:
        reading.direct.add(part.dev)
    if part.end == part.size and not ended and not direct_io.at_end(fd, view, part.size, BLOCK_SIZE):
        raise Changed(f"changed while it was being read: it does not end at {part.size} bytes any more")
    return str(md5.hexdigest())


def _asked(view: memoryview, count: int, is_last: bool) -> int:
    """How much to ask for to get ``count`` bytes: at the end of a file at least one more, if there is room."""
    return min(len(view), direct_io.round_up(count + is_last, BLOCK_SIZE))


def _read(reading: Reading, fd: int, view: memoryview, count: int, at: int, may_refuse: Optional[int]) -> bool:
    """Read ``count`` bytes at ``at``; True if that read has shown that the file ends there.

    ``may_refuse`` is the file's device while a refusal of O_DIRECT may still be answered by reading without it.
    """
    try:
        return _read_once(fd, view, count, at)
    except OSError as exc:
        if may_refuse is None or not direct_io.is_unsupported(exc):
            raise
        reading.refused[may_refuse] = f"O_DIRECT refused at the first read: {reason_of(exc)}"
        direct_io.set_direct(fd, False)
        return _read_once(fd, view, count, at)


def _read_once(fd: int, view: memoryview, count: int, at: int) -> bool:
    if len(view) > count and os.preadv(fd, [view], at) == count:
        return True
    # A full buffer; or more, or less, than there should be: the careful way. What is more is seen by the caller.
    direct_io.pread(fd, view, count, at, BLOCK_SIZE)
    return False


# ------------------------------------------------------------------------------------------------ the tasks


class Group(NamedTuple):
    """Files of one directory: its components below the operand, which of those are links that the walk followed,
    the files' names. ``components`` None: the names are operands, paths of their own."""

    components: Optional[Tuple[str, ...]]
    links: Tuple[int, ...]
    names: Tuple[str, ...]


class Batch(NamedTuple):
    """Files to be hashed from end to end, all below one operand (or operands themselves).

    ``cached``: what the page cache has counts, else the storage is read.
    """

    key: int
    chunk_size: int
    follow: bool
    groups: Tuple[Group, ...]
    cached: bool


def hash_batch(worker: Worker, batch: Batch, fds: Sequence[int]) -> Tuple[List[Outcome], Learned]:
    """In a worker: the outcome of each file, in order."""
    outcomes: List[Outcome] = []
    for group in batch.groups:
        try:
            directory = None
            if group.components is not None:
                chain = listing.kept_chain(worker, batch.key, False, fds[0])
                directory = chain.open(group.components, group.links)
        except OSError as exc:
            outcomes.extend(unread(exc) for _ in group.names)
            continue
        for name in group.names:
            worker.check()
            outcomes.append(hash_file(worker, name, directory, batch.chunk_size, batch.follow, batch.cached))
    return outcomes, reading_of(worker).learned()


def hash_chunk(worker: Worker, part: Range, fds: Sequence[int]) -> Tuple[str, Learned]:
    """In a worker: the digest of one chunk of a file that the parent has opened."""
    return hash_range(worker, fds[0], part), reading_of(worker).learned()


FUNCTIONS: Dict[str, Any] = {"list": listing.list_task, "hash": hash_batch, "chunk": hash_chunk}
