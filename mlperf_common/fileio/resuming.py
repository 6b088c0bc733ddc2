# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""--resume: a large file's named temporary that outlives its run, and the record of what is in it.

The temporary's name has the token of the run that writes to it; whoever goes on renames it first, so one alone does.
The record is replaced by a rename, and names only extents that have been written to the storage (fdatasync). It is
believed if both are this user's and nobody else may write to them, the source is the same file with the same times,
and the temporary the same inode. Else the file is begun anew. A run that still works on it is left alone: by its
process on this machine; on another, unless its record was not touched for ``SILENT_SECONDS``.

Not promised: that nobody but fastcp has changed the temporary in place meanwhile; --verify would notice.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import copyfile, direct_io
from mlperf_common.fileio.copyfile import Making, NewFile
from mlperf_common.fileio.direct_io import BLOCK_SIZE
from mlperf_common.fileio.leftovers import Life, own_life, start_of
from mlperf_common.fileio.metadata import creation_mode

PREFIX = ".fastcp-resume-"

SILENT_SECONDS = 300.0
TOUCH_SECONDS = 60.0
SAVE_SECONDS = 1.0  # between two records: what is lost at most when a run is killed, beside the extents under way
LARGEST_RECORD = 4 << 20  # bytes

Range = Tuple[int, int]


class Record(NamedTuple):
    """What is known of a temporary: whose, of which source, which inode, created how, which bytes are in it."""

    token: str
    life: Life
    source: Tuple[int, int, int, int]  # inode, size, mtime_ns, ctime_ns
    temporary: int  # inode
    mode: Tuple[int, int]  # asked for, and the umask
    done: Tuple[Range, ...]


class Unfinished:
    """A temporary under way in the directory ``making.dir_fd``, and its record. ``done`` is sorted and disjoint."""

    def __init__(self, making: Making, key: str, record: Record) -> None:
        self._making = making
        self._key = key
        self._record = record
        self._saved = time.monotonic()
        self._touched = self._saved
        self._is_new = False
        self.done: List[Range] = list(record.done)

    def add(self, start: int, end: int) -> None:
        """These bytes have been written to the storage; the record knows it soon. Raises OSError."""
        self.done = merged([*self.done, (start, end)])
        self._is_new = True
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Have the record know all of it. Raises OSError."""
        self._saved = self._touched = time.monotonic()
        self._is_new = False
        _write_record(self._making.dir_fd, self._key, self._record._replace(done=tuple(self.done)))

    def touch(self) -> None:
        """Say now and then that this run is alive."""
        if time.monotonic() - self._touched >= TOUCH_SECONDS:
            self._touched = time.monotonic()
            with contextlib.suppress(FileNotFoundError):  # another run thinks it is over: the rename will tell
                os.utime(_record_name(self._key), dir_fd=self._making.dir_fd, follow_symlinks=False)

    def leave(self) -> None:
        """The run ends before the file is whole: the next one goes on from here."""
        if self._is_new:
            with contextlib.suppress(OSError):  # the extents since the last record are copied again
                self.save()

    def remove_record(self) -> None:
        """The file has its name. Raises OSError."""
        found = _read_record(self._making.dir_fd, self._key)
        if found is not None and found[0].token == self._record.token:
            os.unlink(_record_name(self._key), dir_fd=self._making.dir_fd)


def open_part(making: Making, name: str, st: os.stat_result, replaces: bool) -> Tuple[NewFile, Unfinished]:
    """The temporary of a file ``name`` whose source is ``st``: an earlier run's if it may be gone on with, or new.

    Raises OSError (EBUSY: another run is at it; EEXIST: something else has the record's name).
    """
    import hashlib  # 5 ms, which others need not wait for

    key = PREFIX + hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    standing = copyfile.standing_at(making.dir_fd, name) if replaces else None
    mode = creation_mode(making.options.kept, st.st_mode)
    if standing is not None and stat.S_ISREG(standing.st_mode):
        mode = 0o600  # as for any temporary that replaces a file
    source = (st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
    wanted = Record(making.options.token, own_life(), source, 0, (mode, _umask()), ())
    found = _read_record(making.dir_fd, key)
    fd = -1
    if found is not None:
        old, silent = found
        _refuse_busy(old, silent)
        fd = _take_over(making, key, old, wanted)
        with contextlib.suppress(FileNotFoundError):  # killed while it replaced its record
            os.unlink(_fresh_name(key, old.token), dir_fd=making.dir_fd)
        if fd >= 0:
            wanted = wanted._replace(done=old.done)
    elif copyfile.standing_at(making.dir_fd, _record_name(key)) is not None:
        raise FileExistsError(errno.EEXIST, "cannot be resumed: its record is not one of yours", _record_name(key))
    temporary = _part_name(key, wanted.token)
    if fd < 0:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        direct = making.facts.wants_direct("destination", making.dev, st.st_size)
        fd = copyfile.open_new(making, temporary, flags, mode, direct)
        os.ftruncate(fd, st.st_size)
    new = NewFile(fd, making.dir_fd, name, temporary, making.facts.notes)
    part = Unfinished(making, key, wanted._replace(temporary=os.fstat(fd).st_ino))
    try:
        part.save()
    except BaseException:
        new.close()
        raise
    return new, part


def _refuse_busy(record: Record, silent: float) -> None:
    mine, life = own_life(), record.life
    if (life.boot, life.namespace) == (mine.boot, mine.namespace) and life.boot:
        if life.start and start_of(life.pid) == life.start:
            raise OSError(errno.EBUSY, "process %d is copying it (--resume)" % life.pid)
    elif silent < SILENT_SECONDS:
        text = "another machine was copying it %d s ago (--resume); after %d s it may be gone on with"
        raise OSError(errno.EBUSY, text % (silent, SILENT_SECONDS))


def _take_over(making: Making, key: str, old: Record, wanted: Record) -> int:
    """The old temporary under our token, open; -1 if it is not as recorded, or not of this source: then it goes."""
    name = _part_name(key, old.token)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    size = wanted.source[1]
    try:
        fd = copyfile.open_new(making, name, flags, 0, making.facts.wants_direct("destination", making.dev, size))
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return -1
        raise
    try:
        st = os.fstat(fd)
        is_ours = _is_private(st) and st.st_ino == old.temporary
        length = direct_io.round_up(size, BLOCK_SIZE)  # a last write with O_DIRECT, before it is cut
        if is_ours and (old.source, old.mode) == (wanted.source, wanted.mode) and size <= st.st_size <= length:
            os.rename(name, _part_name(key, wanted.token), src_dir_fd=making.dir_fd, dst_dir_fd=making.dir_fd)
            moved = copyfile.standing_at(making.dir_fd, _part_name(key, wanted.token))
            if moved is not None and moved.st_ino == st.st_ino:
                return fd
            raise OSError(errno.EBUSY, "another run has taken its temporary (--resume)")
        if is_ours:
            os.unlink(name, dir_fd=making.dir_fd)
    except FileNotFoundError:
        os.close(fd)
        raise OSError(errno.EBUSY, "another run has taken its temporary (--resume)") from None
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return -1


def _is_private(st: os.stat_result) -> bool:
    """Whether it is a file of this user's that has one name and that nobody else may write to."""
    return (
        stat.S_ISREG(st.st_mode) and st.st_uid == os.geteuid() and st.st_nlink == 1 and not st.st_mode & 0o022
    )


# ------------------------------------------------------------------------------------------------------ the record


def _record_name(key: str) -> str:
    return key + ".json"


def _part_name(key: str, token: str) -> str:
    return "%s-%s.part" % (key, token)


def _fresh_name(key: str, token: str) -> str:
    return "%s-%s.new" % (key, token)


def _write_record(dir_fd: int, key: str, record: Record) -> None:
    name = _record_name(key)
    fresh = _fresh_name(key, record.token)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    with open(fd, "w", encoding="ascii") as stream:
        json.dump(record._replace(life=tuple(record.life)), stream)  # type: ignore[arg-type]
        stream.flush()
        os.fsync(fd)
    os.rename(fresh, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def _read_record(dir_fd: int, key: str) -> Optional[Tuple[Record, float]]:
    """A record that may be believed, and for how many seconds it has been left alone; None if there is none."""
    try:
        fd = os.open(_record_name(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ENXIO):
            return None
        raise
    with open(fd, "rb") as stream:
        st = os.fstat(fd)
        if not _is_private(st) or st.st_size > LARGEST_RECORD:
            return None
        record = _decoded(stream.read())
    return None if record is None else (record, time.time() - st.st_mtime)


def _decoded(data: bytes) -> Optional[Record]:
    try:
        token, life, source, temporary, mode, done = json.loads(data.decode("ascii"))
        record = Record(str(token), Life(*life), tuple(source), temporary, tuple(mode), tuple(map(tuple, done)))
    except (ValueError, TypeError):
        return None
    numbers: List[Any] = [*record.source, record.temporary, *record.mode, *(n for pair in record.done for n in pair)]
    if not all(type(number) is int for number in numbers) or len(record.source) != 4 or len(record.mode) != 2:
        return None
    if len(record.token) != 10 or set(record.token) - set("0123456789abcdef"):
        return None
    return record if _is_sound(record.done, record.source[1]) else None


def _is_sound(done: Sequence[Range], size: int) -> bool:
    at = 0
    for pair in done:
        if len(pair) != 2 or not at <= pair[0] < pair[1] <= size or pair[0] % BLOCK_SIZE:
            return False
        if pair[1] % BLOCK_SIZE and pair[1] != size:
            return False
        at = pair[1]
    return True


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# ------------------------------------------------------------------------------------------------------ the ranges


def merged(ranges: Sequence[Range]) -> List[Range]:
    """The same bytes in as few ranges as possible, in order."""
    found: List[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            start, end = found[-1][0], max(end, found.pop()[1])
        found.append((start, end))
    return found


def without(ranges: Sequence[Range], done: Sequence[Range]) -> List[Range]:
    """What of ``ranges`` is not in ``done``, which is sorted and disjoint."""
    found: List[Range] = []
    for start, end in ranges:
        for low, high in done:
            if high <= start or low >= end:
                continue
            if start < low:
                found.append((start, low))
            start = max(start, high)
        if start < end:
            found.append((start, end))
    return found


def within(done: Sequence[Range], part: Range) -> Tuple[Range, ...]:
    """What of ``done`` is in a range."""
    cut = ((max(start, part[0]), min(end, part[1])) for start, end in done)
    return tuple((start, end) for start, end in cut if start < end)
