# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One source file to one destination name: the new file, its bytes, its metadata, the commit.

A destination name holds what it held before or the whole new file, never a part: the bytes go into a file
without a name (O_TMPFILE) in the destination's own directory, or into a named temporary where that cannot be,
and the name is given at the end, without replacing anything that the plan did not see. A name is replaced,
never written through. The source must be the file that the plan saw, before and after it is read.

Not promised: atomicity against other writers where the filesystem has neither RENAME_NOREPLACE nor link (one
warning says so), nor durability beyond what close(2) promises.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import direct_io, serverside
from mlperf_common.fileio.digest import Digest
from mlperf_common.fileio.direct_io import BLOCK_SIZE
from mlperf_common.fileio.facts import ALWAYS, AUTO, NEVER, Facts, Options
from mlperf_common.fileio.manifest import Chunk
from mlperf_common.fileio.metadata import ACCESS_ACL, Notes, Replaced, creation_mode, dress, read_acl
from mlperf_common.fileio.traces import temporary_name
from mlperf_common.fileio.walk import TIME_MASK, FileEntry, is_device
from mlperf_common.fileio.words import kind_of, quote
from mlperf_common.fileio.workers import Worker

FICLONE = 0x40049409  # ioctl_ficlonerange(2): _IOW(0x94, 9, int) on x86 and Arm

NOT_ATOMIC = (
    "the destination's filesystem cannot rename without replacing: a file that another program creates there at "
    "the very moment of a rename would be lost"
)

RENAME_NOREPLACE = 1  # renameat2(2)

# What O_TMPFILE answers where the filesystem has no such files (open(2)): FUSE, NFS, some Lustre.
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
# What says "this kind of rename, or link, is not to be had here", and nothing else.
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class FileChanged(Exception):
    """The source is not, or no longer, what the plan saw; the message names the field that moved."""


class NamelessRefused(Exception):
    """A file without a name could not be given one here; nothing is left of it, a named temporary may do."""


class NameCollision(Exception):
    """The destination name is taken by another name (a case-folding filesystem), or by what is no file."""


# -------------------------------------------------------------------------------------------------- the source


def open_source(
    name: str, dir_fd: Optional[int], entry: FileEntry, facts: Facts, follow: bool
) -> Tuple[int, os.stat_result]:
    """Open a source file and see that it is the one that the plan saw; its descriptor and fstat.

    O_NONBLOCK: a FIFO that has taken its place must not hang us. Raises OSError, FileChanged.
    """
    try:
        fd = _open_existing(name, dir_fd, entry, facts, follow)
    except FileNotFoundError:
        raise FileChanged("vanished since it was listed") from None
    try:
        st = os.fstat(fd)
        check_planned(st, entry, facts.options.ignore_times)
    except BaseException:
        os.close(fd)
        raise
    return fd, st


def _open_existing(name: str, dir_fd: Optional[int], entry: FileEntry, facts: Facts, follow: bool) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    if not facts.wants_direct("source", entry.dev, entry.size):
        return os.open(name, flags, dir_fd=dir_fd)
    fd, direct, reason = direct_io.open_direct(name, flags, dir_fd=dir_fd)
    if not direct:
        _refuse_open(facts, "source", entry.dev, reason, fd)
    return fd


def _refuse_open(facts: Facts, side: str, dev: int, reason: str, fd: int) -> None:
    try:
        facts.refuse(side, dev, reason)
    except OSError:
        os.close(fd)
        raise


def check_planned(st: os.stat_result, entry: FileEntry, ignore_times: bool = False) -> None:
    """Raise FileChanged unless ``st`` is the file, size and time that the plan saw."""
    if not stat.S_ISREG(st.st_mode):
        raise FileChanged("changed since it was listed: it is a %s now" % kind_of(st.st_mode))
    if st.st_ino != entry.ino or not is_device(st.st_dev, entry.dev):
        raise FileChanged("changed since it was listed: another file has taken its name")
    if st.st_size != entry.size:
        raise FileChanged("changed since it was listed: size was %d, is %d" % (entry.size, st.st_size))
    if st.st_mtime_ns & TIME_MASK != entry.mtime and not ignore_times:
        raise FileChanged("changed since it was listed: its modification time has moved")


def check_unchanged(before: os.stat_result, after: os.stat_result, ignore_times: bool = False) -> None:
    """Raise FileChanged unless size and, if they count, mtime and ctime are as when the file was opened."""
    if before.st_size != after.st_size:
        raise FileChanged(
            "changed while it was being copied: size was %d, is %d" % (before.st_size, after.st_size)
        )
    if ignore_times:
        return
    for field, words in (("st_mtime_ns", "modification time"), ("st_ctime_ns", "status change time")):
        if getattr(before, field) != getattr(after, field):
            raise FileChanged("changed while it was being copied: its %s has moved" % words)


def data_segments(
    fd: int, st: os.stat_result, sparse: str = AUTO, start: int = 0, end: Optional[int] = None
) -> List[Tuple[int, int]]:
    """The (start, end) byte ranges between two places that hold data, aligned outwards to ``BLOCK_SIZE``.

    The kernel's word on holes (lseek(2)) is taken only where st_blocks says that there are some, and not when
    it finds no data at all in a file that has blocks: filesystems have been wrong about fresh data. NEVER sparse: all
    of it.
    """
    size = st.st_size
    end = size if end is None else end
    everything = [(start, end)] if start < end else []
    if st.st_blocks * 512 >= size or sparse == NEVER:
        return everything
    found: List[Tuple[int, int]] = []
    at = start
    try:
        while at < end:
            data = os.lseek(fd, at, os.SEEK_DATA)
            if data >= end:
                break
            at = os.lseek(fd, data, os.SEEK_HOLE)
            _extend(found, max(start, data - data % BLOCK_SIZE), min(direct_io.round_up(at, BLOCK_SIZE), end))
    except OSError as exc:
        if exc.errno != errno.ENXIO:  # ENXIO: no data after ``at``
            return everything
    return found if found or st.st_blocks == 0 or _has_data(fd) else everything


def _has_data(fd: int) -> bool:
    try:
        return os.lseek(fd, 0, os.SEEK_DATA) >= 0
    except OSError:
        return False


def _extend(found: List[Tuple[int, int]], start: int, end: int) -> None:
    if found and start <= found[-1][1]:
        start = found.pop()[0]
    found.append((start, end))


# ------------------------------------------------------------------------------------------------ the new file


class NewFile:
    """A file being made in the directory ``dir_fd``, not yet under its final ``name``.

    ``temporary`` is its name so far, or "" when it has none. ``source`` and ``st``, what metadata is taken from, are
    set by whoever fills it. ``notes`` are told what could not be removed.
    """

    __slots__ = ("fd", "dir_fd", "name", "temporary", "size", "source", "st", "notes")

    def __init__(self, fd: int, dir_fd: int, name: str, temporary: str, notes: Notes) -> None:
        self.notes = notes
        self.size = 0  # bytes, once they are written
        self.source = -1
        self.st: Optional[os.stat_result] = None
        self.fd = fd
        self.dir_fd = dir_fd
        self.name = name
        self.temporary = temporary

    def close(self) -> None:
        """Close the descriptor; an error counts like one of write (NFS reports a full disk only here)."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def discard(self) -> None:
        """Leave nothing behind. What stands at the final name is not touched."""
        try:
            self.close()
        except OSError:  # the file is given up: what the close has to say does not matter any more
            pass
        if self.temporary:
            name, self.temporary = self.temporary, ""
            try:
                os.unlink(name, dir_fd=self.dir_fd)
            except FileNotFoundError:
                pass
            except OSError as exc:  # why the file was given up is what counts
                self.notes.warnings.add("cannot remove the temporary file %s: %s" % (quote(name), exc.strerror))


class Making(NamedTuple):
    """What is needed to make new files in one directory: descriptor, device, the options, what is known."""

    dir_fd: int
    dev: int
    options: Options
    facts: Facts


def create(making: Making, name: str, mode: int, size: int, replaces: bool, item: str = "") -> NewFile:
    """Make the new file: without a name if nothing is to be replaced and the filesystem can, else a temporary.

    ``mode`` is the source's. ``item`` goes into a temporary's name where one worker has several at a time.
    Raises OSError.
    """
    facts = making.facts
    mode = creation_mode(making.options.kept, mode)
    direct = facts.wants_direct("destination", making.dev, size)
    if not replaces and facts.nameless.get(making.dev, True):
        new = _create_nameless(making, name, mode, direct)
        if new is not None:
            return new
    standing = standing_at(making.dir_fd, name) if replaces else None
    if standing is not None and stat.S_ISREG(standing.st_mode):
        mode = 0o600  # until it gets the old file's at the end; a replaced link gives nothing
    return _create_named(making, name, mode, direct, item)


def _create_nameless(making: Making, name: str, mode: int, direct: bool) -> Optional[NewFile]:
    facts = making.facts
    try:
        fd = open_new(making, ".", os.O_TMPFILE | _access(making), mode, direct)
    except OSError as exc:
        if exc.errno not in _NO_NAMELESS:
            raise
        facts.nameless[making.dev] = False
        return None
    if making.dev not in facts.nameless:
        # Only /proc can give it a name without privileges; a container may have none.
        facts.nameless[making.dev] = os.path.exists("/proc/self/fd/%d" % fd)
        if not facts.nameless[making.dev]:
            os.close(fd)
            return None
    return NewFile(fd, making.dir_fd, name, "", facts.notes)


def _create_named(making: Making, name: str, mode: int, direct: bool, item: str) -> NewFile:
    flags = _access(making) | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    for attempt in range(100):
        temporary = temporary_name(name, making.facts.suffix + item + ("%d" % attempt if attempt else ""))
        try:
            fd = open_new(making, temporary, flags, mode, direct)
        except FileExistsError:
            continue  # somebody else's: another name, never an unlink
        return NewFile(fd, making.dir_fd, name, temporary, making.facts.notes)
    raise FileExistsError(errno.EEXIST, "no free name for a temporary file", name)


def _access(making: Making) -> int:
    return os.O_RDWR if making.options.verify else os.O_WRONLY


def open_new(making: Making, name: str, flags: int, mode: int, direct: bool) -> int:
    """Open a file to be written in the new file's directory, with O_DIRECT if it is wanted and to be had."""
    flags |= os.O_CLOEXEC
    if not direct:
        return os.open(name, flags, mode, dir_fd=making.dir_fd)
    fd, direct, reason = direct_io.open_direct(name, flags, mode, dir_fd=making.dir_fd)
    if not direct:
        _refuse_open(making.facts, "destination", making.dev, reason, fd)
    return fd


# --------------------------------------------------------------------------------------------------- the bytes


class Stream(NamedTuple):
    """A source and a new file between which bytes move, and on which devices they are."""

    src: int
    dst: int
    src_dev: int
    dst_dev: int
    digest: Optional[Digest] = None  # of what is read


def move_range(worker: Worker, facts: Facts, stream: Stream, start: int, end: int, first: bool) -> int:
    """Copy the bytes from ``start`` to ``end`` at their place, buffer by buffer; how many.

    ``start`` is aligned to ``BLOCK_SIZE``. While ``first`` (nothing of the file has moved yet), a refusal of
    O_DIRECT means buffered from here on, for that device and side; afterwards every error is real.
    Raises OSError (ShortFile: the source shrank), Interrupted.
    """
    at = _copy_at_server(worker, facts, stream, start, end)
    if start < end <= at:
        return end - start
    view = worker.buffer()
    while at < end:
        count = worker.turn(min(len(view), end - at), BLOCK_SIZE)
        _fall_back(facts, "source", stream.src_dev, stream.src, first, direct_io.pread, view, count, at)
        if stream.digest is not None:
            stream.digest.update(view[:count])
        _fall_back(facts, "destination", stream.dst_dev, stream.dst, first, direct_io.pwrite, view, count, at)
        first = False
        at += count
        worker.moved(count)
    _note_direct(facts, stream)
    return max(0, end - start)


def read_range(worker: Worker, facts: Facts, stream: Stream, start: int, end: int, first: bool) -> None:
    """Take the digest of a source's bytes, without copying them. As ``move_range``."""
    view = worker.buffer()
    at = start
    while at < end:
        count = worker.turn(min(len(view), end - at), BLOCK_SIZE)
        _fall_back(facts, "source", stream.src_dev, stream.src, first, direct_io.pread, view, count, at)
        if stream.digest is not None:
            stream.digest.update(view[:count])
        first = False
        at += count
        worker.moved(count)


def _copy_at_server(worker: Worker, facts: Facts, stream: Stream, start: int, end: int) -> int:
    """How far the server has copied a range: ``start`` where it copies nothing, or where a digest is wanted."""
    if stream.digest is not None or not facts.copies_at_server(stream.src_dev, stream.dst_dev):
        return start
    at = serverside.copy_range(worker, stream.src, stream.dst, start, end)
    facts.by_server = facts.by_server or at > start
    if at < end:  # reads and writes do the rest, from a whole block on, and the next files
        facts.served[stream.src_dev] = False
        at -= at % BLOCK_SIZE
    return at


def _note_direct(facts: Facts, stream: Stream) -> None:
    """Ask the descriptors, once a side: who opened them knew more (the parent), and sparse files may be small."""
    for side, fd in (("source", stream.src), ("destination", stream.dst)):
        if side not in facts.direct and direct_io.is_direct(fd):
            facts.direct.add(side)


def _fall_back(
    facts: Facts,
    side: str,
    dev: int,
    fd: int,
    first: bool,
    transfer: Callable[[int, memoryview, int, int, int], int],
    view: memoryview,
    count: int,
    offset: int,
) -> None:
    try:
        transfer(fd, view, count, offset, BLOCK_SIZE)
    except OSError as exc:
        if not first or not direct_io.is_unsupported(exc):
            raise
        facts.refuse(side, dev, "%s at the first transfer" % (exc.strerror or exc))
        direct_io.set_direct(fd, False)
        transfer(fd, view, count, offset, BLOCK_SIZE)


def check_end(worker: Worker, fd: int, size: int) -> None:
    """Raise FileChanged unless the source ends exactly at ``size`` bytes."""
    if not direct_io.at_end(fd, worker.buffer(), size, BLOCK_SIZE):
        raise FileChanged("changed while it was being copied: it does not end at %d bytes any more" % size)


def move_small(worker: Worker, stream: Stream, size: int) -> int:
    """Copy a file that fits into the buffer with a byte to spare: one read that asks for more, one write."""
    src, view = stream.src, worker.buffer()
    worker.wait_for(size)
    got = os.preadv(src, [view[: size + 1]], 0)
    while 0 < got < size:  # cut short by a signal or a server, or the end: the next read tells
        more = os.preadv(src, [view[got : size + 1]], got)
        if more == 0:
            break
        got += more
    if got != size:
        raise FileChanged("changed while it was being copied: %d bytes were planned, %d read" % (size, got))
    if stream.digest is not None:
        stream.digest.update(view[:size])
    if size:
        direct_io.pwrite(stream.dst, view, size, 0, 1)
    worker.moved(size)
    return size


def move_to_end(worker: Worker, stream: Stream) -> int:
    """Copy a file whose size says nothing (0, in /proc and on some FUSE) up to its end; how many bytes."""
    view = worker.buffer()
    at = 0
    while True:
        got = os.preadv(stream.src, [view[: worker.turn(len(view))]], at)
        if got == 0:
            return at
        if stream.digest is not None:
            stream.digest.update(view[:got])
        direct_io.pwrite(stream.dst, view, got, at, 1)
        at += got
        worker.moved(got)


# What says that two files cannot share blocks, not that something is wrong (ioctl_ficlonerange(2)).
_NO_CLONE = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ETXTBSY)


def clone(facts: Facts, stream: Stream, size: int) -> bool:
    """Let the new file share the source's blocks, if the filesystem can: no byte moves; whether it does.

    A refusal is remembered for the pair of devices, but for EINVAL, which may be of this file. Raises OSError: a real
    error, and any where it is wanted always.
    """
    options, devices = facts.options, (stream.src_dev, stream.dst_dev)
    if size == 0 or options.reflink == NEVER or options.sparse == NEVER or options.digests or options.verify:
        return False
    if options.reflink == AUTO and devices in facts.uncloned:
        return False
    import fcntl

    try:
        fcntl.ioctl(stream.dst, FICLONE, stream.src)
    except OSError as exc:
        if options.reflink == ALWAYS:
            raise OSError(exc.errno, "cannot clone it (--reflink=always): %s" % exc.strerror) from exc
        if exc.errno not in _NO_CLONE:
            raise
        if exc.errno != errno.EINVAL:
            facts.uncloned.add(devices)
        return False
    if os.fstat(stream.dst).st_size != size:
        raise FileChanged("changed while it was being copied: %d bytes were planned" % size)
    facts.cloned = True
    return True


def is_same(
    worker: Worker, fds: Tuple[int, int], devices: Tuple[int, int], part: Tuple[int, int], size: int
) -> bool:
    """Whether a source and another open file of ``size`` bytes have the same in ``part``, and end there if that does.

    Raises OSError, FileChanged, Interrupted.
    """
    from mlperf_common.fileio.hashtasks import Unusable
    from mlperf_common.fileio.pairtasks import PairChunk, compare_range  # most copies compare nothing

    try:
        return compare_range(worker, fds, PairChunk(*part, size, devices))
    except Unusable as exc:
        raise FileChanged(str(exc)) from exc


def open_standing(making: Making, name: str, size: int) -> Optional[int]:
    """Open what stands at ``name`` to be compared, if it is a file of that size."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=making.dir_fd)
    except FileNotFoundError:
        return None
    st = os.fstat(fd)
    if stat.S_ISREG(st.st_mode) and st.st_size == size:
        return fd
    os.close(fd)
    return None


def move_segments(
    worker: Worker,
    facts: Facts,
    stream: Stream,
    segments: Sequence[Tuple[int, int]],
    part: Tuple[int, int],
    first: bool,
) -> int:
    """Copy those of the ``segments`` that hold data in a part of a file; what is between them counts as zeros."""
    at, moved = part[0], 0
    for start, end in segments:
        start, end = max(start, part[0]), min(end, part[1])
        if start >= end:
            continue
        if stream.digest is not None:
            stream.digest.zeros(start - at)
        moved += move_range(worker, facts, stream, start, end, first and moved == 0)
        at = end
    if stream.digest is not None:
        stream.digest.zeros(part[1] - at)
    return moved


class StorageDiffers(OSError):
    """What is read back from the storage is not what was written to it."""


def reread(worker: Worker, facts: Facts, fd: int, chunks: Sequence[Chunk]) -> None:
    """See that the storage has, in a new file open for reading too, bytes of these digests.

    fsync, then reads past the page cache: with O_DIRECT, else after the pages were dropped; if they cannot be, that
    is noted. Raises OSError (StorageDiffers), Interrupted.
    """
    os.fsync(fd)
    _read_past_cache(worker, facts, fd)
    view = worker.buffer()
    for start, size, wanted in chunks:
        digest = Digest(start, max(size, 1))
        at, end = start, start + size
        while at < end:
            count = worker.turn(min(len(view), end - at), BLOCK_SIZE)
            try:
                direct_io.pread(fd, view, count, at, BLOCK_SIZE)
            except OSError as exc:
                if not direct_io.is_unsupported(exc) or not direct_io.is_direct(fd):
                    raise
                direct_io.set_direct(fd, False)
                _drop_pages(worker, facts, fd)
                direct_io.pread(fd, view, count, at, BLOCK_SIZE)
            digest.update(view[:count])
            at += count
        if digest.chunks() != [(start, size, wanted)]:
            text = "the storage does not have what was copied, bytes %d to %d" % (start, start + size)
            raise StorageDiffers(errno.EIO, text)


def _read_past_cache(worker: Worker, facts: Facts, fd: int) -> None:
    if facts.options.direct != NEVER:
        try:
            return direct_io.set_direct(fd, True)
        except OSError:  # whatever the reason, there is the other way
            pass
    _drop_pages(worker, facts, fd)


def _drop_pages(worker: Worker, facts: Facts, fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        # Answers only from the page cache (preadv2(2)); a filesystem in memory has nothing else.
        facts.from_cache = facts.from_cache or os.preadv(fd, [worker.buffer()[:1]], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        pass
    except OSError:  # it cannot be asked
        facts.from_cache = True


def move_all(worker: Worker, facts: Facts, stream: Stream, st: os.stat_result) -> int:
    """Copy a whole file, holes staying holes unless they are not wanted; how many bytes it holds."""
    size = st.st_size
    if size == 0:
        return move_to_end(worker, stream)
    options = facts.options
    if clone(facts, stream, size):
        return size
    whole = st.st_blocks * 512 >= size or options.sparse == NEVER
    if whole and facts.is_small(size) and size < worker.buffer_size:
        return move_small(worker, stream, size)
    move_segments(worker, facts, stream, data_segments(stream.src, st, options.sparse), (0, size), True)
    check_end(worker, stream.src, size)
    os.ftruncate(stream.dst, size)
    return size


# --------------------------------------------------------------------------------------- metadata and the commit


def standing_at(dir_fd: int, name: str) -> Optional[os.stat_result]:
    """What stands at ``name``, links not followed; None if nothing does."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def commit(making: Making, new: NewFile) -> None:
    """Give the whole, written file its final name where nothing should stand.

    Raises OSError (FileExistsError: somebody was faster), NameCollision, NamelessRefused.
    """
    if making.options.kept.anything():
        _dress(making, new, None)
    if making.options.fsync:
        os.fsync(new.fd)
    try:
        if new.temporary:
            _check_close(new.fd)
            rename_noreplace(new, making.facts)
        else:
            _link_nameless(new, new.name)
    except FileExistsError:
        listed = is_listed(new.dir_fd, new.name)
        if listed is False:
            raise NameCollision("collides with another name in the destination's directory") from None
        if not making.options.force or listed is None:
            raise
        _name_nameless(making, new)
        replace(making, new)
        return
    _close_named(new)


def _dress(making: Making, new: NewFile, old: Optional[Replaced]) -> None:
    if new.st is None:
        raise ValueError("the new file has no source")
    dress(new.fd, new.source, new.st, making.options.kept, making.facts.notes, old)


def _check_close(fd: int) -> None:
    """Have the errors that only close(2) tells before the file gets its name: each close flushes, a duplicate's too."""
    os.close(os.dup(fd))


def _link_nameless(new: NewFile, name: str) -> None:
    # With a dir_fd CPython calls linkat and AT_SYMLINK_FOLLOW; without, link(2), which does not follow (ran).
    try:
        os.link("/proc/self/fd/%d" % new.fd, name, dst_dir_fd=new.dir_fd, follow_symlinks=True)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL):
            raise NamelessRefused(exc.strerror) from exc
        raise


def _close_named(new: NewFile) -> None:
    """Close a file that has its final name; if the close fails the name goes again: the bytes may not be there.

    An fstat of each file, only to know its inode in that case, would be 1 system call in 11. What stands there is
    taken for ours if it is a file with one name, our user's and of our size.
    """
    new.temporary = ""
    try:
        new.close()
    except OSError:
        standing = standing_at(new.dir_fd, new.name)
        if standing is not None and (
            stat.S_ISREG(standing.st_mode)
            and (standing.st_uid, standing.st_nlink, standing.st_size) == (os.geteuid(), 1, new.size)
        ):
            os.unlink(new.name, dir_fd=new.dir_fd)
        raise


def _name_nameless(making: Making, new: NewFile) -> None:
    """Give a nameless file a temporary name, so that it can be renamed over what has appeared."""
    if new.temporary:
        return
    temporary = temporary_name(new.name, making.facts.suffix + "r")
    _link_nameless(new, temporary)
    new.temporary = temporary


def replace(making: Making, new: NewFile) -> None:
    """Rename the temporary over a regular file or a link, with the old file's owner, ACL and mode.

    What stands there is looked at again just before. Raises OSError, NameCollision.
    """
    standing = standing_at(new.dir_fd, new.name)
    if standing is None:
        raise NameCollision("the file that it was to replace has gone meanwhile")
    old = None
    if stat.S_ISREG(standing.st_mode):
        old = _look_at_replaced(new, standing)
    elif not stat.S_ISLNK(standing.st_mode):
        raise NameCollision("cannot replace it: it is a %s now" % kind_of(standing.st_mode))
    if old is not None or making.options.kept.anything():
        _dress(making, new, old)
    if making.options.fsync:
        os.fsync(new.fd)
    _check_close(new.fd)
    os.rename(new.temporary, new.name, src_dir_fd=new.dir_fd, dst_dir_fd=new.dir_fd)
    new.temporary = ""
    new.close()


def _look_at_replaced(new: NewFile, standing: os.stat_result) -> Replaced:
    """The old file's ACL: getxattr(2) has no dir_fd, /proc's path to the directory serves."""
    path = "/proc/self/fd/%d/%s" % (new.dir_fd, new.name)
    try:
        return Replaced(standing, read_acl(path, ACCESS_ACL), True)
    except OSError:  # no /proc, or it may not be asked: the group's bits go then
        return Replaced(standing, None, False)


def rename_noreplace(new: NewFile, facts: Facts) -> None:
    """Rename the temporary to its final name unless something is there (FileExistsError).

    renameat2, else link and unlink, else a look and a rename with a warning that this was not atomic.
    """
    try:
        _renameat2(new.dir_fd, new.temporary, new.name)
        return
    except OSError as exc:
        if exc.errno not in _NO_SUCH_CALL:
            raise
    try:
        _link_over(new)
        return
    except OSError as exc:
        if exc.errno not in _NO_SUCH_CALL:
            raise
    if standing_at(new.dir_fd, new.name) is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new.name)
    facts.notes.warnings.add(NOT_ATOMIC)
    os.rename(new.temporary, new.name, src_dir_fd=new.dir_fd, dst_dir_fd=new.dir_fd)


def _renameat2(dir_fd: int, source: str, destination: str) -> None:
    """renameat2(2) with RENAME_NOREPLACE through libc; ENOSYS where it has none (glibc before 2.28)."""
    function = _libc_renameat2()
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), destination)
    if function(dir_fd, os.fsencode(source), dir_fd, os.fsencode(destination), RENAME_NOREPLACE) != 0:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), destination)


@functools.lru_cache(maxsize=None)
def _libc_renameat2() -> Any:
    """The C library's renameat2, or None; looked for once: each time it would cost more than the call itself."""
    try:
        import ctypes

        return ctypes.CDLL(None, use_errno=True).renameat2
    except (ImportError, OSError, AttributeError):
        return None


def _link_over(new: NewFile) -> None:
    """link and unlink; EEXIST counts as done if the final name is our file (NFS repeats requests)."""
    try:
        os.link(new.temporary, new.name, src_dir_fd=new.dir_fd, dst_dir_fd=new.dir_fd, follow_symlinks=False)
    except FileExistsError:
        own, standing = standing_at(new.dir_fd, new.temporary), standing_at(new.dir_fd, new.name)
        if own is None or standing is None or (own.st_dev, own.st_ino) != (standing.st_dev, standing.st_ino):
            raise
    os.unlink(new.temporary, dir_fd=new.dir_fd)


def is_listed(dir_fd: int, name: str) -> Optional[bool]:
    """Whether a fresh listing of the directory shows exactly these bytes, and no other spelling leads to the same.

    None if it may not be listed.
    """
    try:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    except PermissionError:
        return None
    try:
        names = os.listdir(fd)
    finally:
        os.close(fd)
    return name in names and not _is_folded(dir_fd, name, names)


def _is_folded(dir_fd: int, name: str, names: Sequence[str]) -> bool:
    """Whether a spelling that is not listed leads to the same file.

    A listing does not tell which of two names was there first: lowntfs-3g lists NAME as name (ran).
    """
    standing = standing_at(dir_fd, name)
    for other in {name.upper(), name.lower(), name.swapcase()} - {name}:
        try:
            found = None if other in names else standing_at(dir_fd, other)
        except OSError:  # a spelling may be longer than names can be
            continue
        if standing and found and (standing.st_dev, standing.st_ino) == (found.st_dev, found.st_ino):
            return True
    return False


# ------------------------------------------------------------------------------------------------ the whole thing


class Job(NamedTuple):
    """One file to copy: where to read it (a name, its directory or None), what was seen of it, its new name.

    ``follow``: the name may be a link. ``compare``: nothing is done if the same bytes stand there.
    """

    source: str
    source_dir: Optional[int]
    entry: FileEntry
    name: str
    replaces: bool
    follow: bool = True
    compare: bool = False


class Copied(NamedTuple):
    """What a copied file holds: bytes and, if they were asked for, the digests of its chunks."""

    size: int
    chunks: List[Chunk]


def copy_file(worker: Worker, making: Making, job: Job) -> Optional[Copied]:
    """Copy one file that a single worker handles, completely or not at all.

    None: the same bytes stand there. Raises OSError, FileChanged, NameCollision, Interrupted; then nothing of the
    new file is left.
    """
    try:
        return _copy_once(worker, making, job)
    except NamelessRefused:
        making.facts.nameless[making.dev] = False
        return _copy_once(worker, making, job)


def _copy_once(worker: Worker, making: Making, job: Job) -> Optional[Copied]:
    src, st = open_source(job.source, job.source_dir, job.entry, making.facts, job.follow)
    try:
        if job.compare and _stands(worker, making, job, src, st):
            return None
        new = create(making, job.name, st.st_mode, st.st_size, job.replaces)
        try:
            new.source, new.st = src, st
            digest = Digest() if making.options.digests or making.options.verify else None
            stream = Stream(src, new.fd, st.st_dev, making.dev, digest)
            new.size = moved = move_all(worker, making.facts, stream, st)
            check_unchanged(st, os.fstat(src), making.options.ignore_times)
            chunks = digest.chunks() if digest is not None else []
            if digest is not None and sum(chunk[1] for chunk in chunks) != moved:
                raise FileChanged("not all of its %d bytes were hashed" % moved)
            if making.options.verify:
                reread(worker, making.facts, new.fd, chunks)
            (replace if job.replaces else commit)(making, new)
        except BaseException:
            new.discard()
            raise
    finally:
        os.close(src)
    return Copied(moved, chunks)


def _stands(worker: Worker, making: Making, job: Job, src: int, st: os.stat_result) -> bool:
    """Whether the destination has the source's bytes already."""
    standing = open_standing(making, job.name, st.st_size)
    if standing is None:
        return False
    try:
        size = st.st_size
        if size == 0 and not direct_io.at_end(src, worker.buffer(), 0, BLOCK_SIZE):
            return False  # in /proc a size of 0 says nothing
        same = is_same(worker, (src, standing), (st.st_dev, making.dev), (0, size), size)
    finally:
        os.close(standing)
    check_unchanged(st, os.fstat(src), making.options.ignore_times)
    return same
