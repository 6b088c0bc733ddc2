# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""In a worker: entries of two trees held against each other, byte by byte.

Promises: two files are called the same only if both were regular, were read from end to end, ended where their size
said, and did not move meanwhile. Nothing is written, and access times are left alone where that is allowed.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import direct_io, hashtasks, listing
from mlperf_common.fileio.direct_io import BLOCK_SIZE
from mlperf_common.fileio.hashtasks import Learned, Reading, Unusable, reading_of
from mlperf_common.fileio.words import quote
from mlperf_common.fileio.workers import Worker


class Side(NamedTuple):
    """Where one of two trees is: the operand's key (0: names are paths), the directory below it, links on the way."""

    key: int
    components: Tuple[str, ...]
    links: Tuple[int, ...]


class Pair(NamedTuple):
    """Two entries of one kind: their names, whether they are symbolic links, whether their bytes are to be compared."""

    ours: str
    theirs: str
    is_link: bool
    bytes: bool


class PairBatch(NamedTuple):
    """Pairs of two directories. ``metadata``: mode, owner and mtime are compared too."""

    ours: Side
    theirs: Side
    pairs: Tuple[Pair, ...]
    follow: bool
    metadata: bool


class PairChunk(NamedTuple):
    """The bytes ``start`` to ``end`` of two open files of ``size`` bytes; ``devs``: where they are."""

    start: int
    end: int
    size: int
    devs: Tuple[int, int]


Finding = Tuple[str, str]  # what kind of difference, and more about it

CONTENT, TARGET, METADATA, TROUBLE = "content", "target", "metadata", "trouble"


def compare_batch(worker: Worker, batch: PairBatch, fds: Sequence[int]) -> Tuple[List[List[Finding]], Learned]:
    """For each pair what differs."""
    findings: List[List[Finding]] = []
    places = _Places(worker, batch, fds)
    for pair in batch.pairs:
        worker.check()
        try:
            findings.append(_compare(worker, places, pair, batch))
        except (OSError, Unusable) as exc:
            findings.append([(TROUBLE, hashtasks.reason_of(exc))])
    return findings, reading_of(worker).learned()


class _Places:
    """Both directories of a batch, valid until the next one."""

    def __init__(self, worker: Worker, batch: PairBatch, fds: Sequence[int]) -> None:
        self.ours: Optional[int] = None
        self.theirs: Optional[int] = None
        if batch.ours.key:
            self.ours = _directory(worker, batch.ours, False, fds[0])
            self.theirs = _directory(worker, batch.theirs, True, fds[1])


def _directory(worker: Worker, side: Side, destination: bool, root_fd: int) -> int:
    return listing.kept_chain(worker, side.key, destination, root_fd).open(side.components, side.links)


def _compare(worker: Worker, places: _Places, pair: Pair, batch: PairBatch) -> List[Finding]:
    if pair.is_link:
        return _compare_links(places, pair, batch.metadata)
    ours, one = hashtasks.open_file(pair.ours, places.ours, batch.follow)
    try:
        theirs, other = hashtasks.open_file(pair.theirs, places.theirs, batch.follow)
        try:
            return _compare_files(worker, (ours, theirs), (one, other), pair, batch.metadata)
        finally:
            os.close(theirs)
    finally:
        os.close(ours)


def _compare_links(places: _Places, pair: Pair, metadata: bool) -> List[Finding]:
    found: List[Finding] = []
    ours, theirs = os.readlink(pair.ours, dir_fd=places.ours), os.readlink(pair.theirs, dir_fd=places.theirs)
    if ours != theirs:
        found.append((TARGET, "%s in SOURCE, %s in DEST" % (quote(ours), quote(theirs))))
    if metadata:
        one = os.stat(pair.ours, dir_fd=places.ours, follow_symlinks=False)
        other = os.stat(pair.theirs, dir_fd=places.theirs, follow_symlinks=False)
        found.extend((METADATA, text) for text in metadata_differences(_seen(one), _seen(other)))
    return found


def _compare_files(
    worker: Worker,
    fds: Tuple[int, int],
    before: Tuple[os.stat_result, os.stat_result],
    pair: Pair,
    metadata: bool,
) -> List[Finding]:
    found: List[Finding] = []
    if metadata:
        found.extend((METADATA, text) for text in metadata_differences(_seen(before[0]), _seen(before[1])))
    if not pair.bytes:
        return found
    sizes = [st.st_size for st in before]
    if sizes[0] != sizes[1]:
        return [*found, (TROUBLE, "changed while it was being compared: sizes %d and %d" % (sizes[0], sizes[1]))]
    for fd, st in zip(fds, before):
        reading_of(worker).prepare(fd, st)
    part = PairChunk(0, sizes[0], sizes[0], (before[0].st_dev, before[1].st_dev))
    if not compare_range(worker, fds, part):
        found.append((CONTENT, "bytes 0 to %d" % sizes[0]))
    for fd, st in zip(fds, before):
        hashtasks.check_unchanged(st, os.fstat(fd))
    return found


class Looks(NamedTuple):
    """The metadata that is compared."""

    mode: int
    owner: Tuple[int, int]
    mtime_ns: int


def _seen(st: os.stat_result) -> Looks:
    return Looks(0 if stat.S_ISLNK(st.st_mode) else stat.S_IMODE(st.st_mode), (st.st_uid, st.st_gid), st.st_mtime_ns)


def metadata_differences(ours: Looks, theirs: Looks) -> List[str]:
    """In words what differs."""
    found = []
    if ours.mode != theirs.mode:
        found.append("mode %04o in SOURCE, %04o in DEST" % (ours.mode, theirs.mode))
    if ours.owner != theirs.owner:
        found.append("owner %d:%d in SOURCE, %d:%d in DEST" % (*ours.owner, *theirs.owner))
    if ours.mtime_ns != theirs.mtime_ns:
        seconds = tuple("%d.%09d" % divmod(ns, 1_000_000_000) for ns in (ours.mtime_ns, theirs.mtime_ns))
        found.append("modification time %s in SOURCE, %s in DEST" % seconds)
    return found


def compare_chunk(worker: Worker, part: PairChunk, fds: Sequence[int]) -> Tuple[bool, Learned]:
    """Whether a part of two open files is the same; the last part also sees that both end there."""
    return compare_range(worker, (fds[0], fds[1]), part), reading_of(worker).learned()


def compare_range(worker: Worker, fds: Tuple[int, int], part: PairChunk) -> bool:
    """The same of descriptors. Raises OSError (ShortFile), Changed, Interrupted."""
    reading, half = reading_of(worker), worker.buffer_size // 2
    view = worker.buffer()
    views = (view[:half], view[half : 2 * half])
    same = True
    at = part.start
    while at < part.end:
        count = worker.turn(min(half, part.end - at), BLOCK_SIZE)
        for fd, buffer, dev in zip(fds, views, part.devs):
            _read(reading, fd, buffer, count, at, dev)
        worker.moved(count)
        if bytes(views[0][:count]) != bytes(views[1][:count]):
            same = False
            break
        at += count
    if part.end == part.size:
        for fd in fds:
            if not direct_io.at_end(fd, view, part.size, BLOCK_SIZE):
                raise hashtasks.Changed("changed while it was being compared: it does not end at %d bytes" % part.size)
    return same


def _read(reading: Reading, fd: int, view: memoryview, count: int, at: int, dev: int) -> None:
    """A refusal of O_DIRECT at the first read means buffered from here on; no byte has been judged by then."""
    try:
        direct_io.pread(fd, view, count, at, BLOCK_SIZE)
    except OSError as exc:
        if not direct_io.is_unsupported(exc) or not direct_io.is_direct(fd):
            raise
        reading.refused[dev] = "O_DIRECT refused at the first read: %s" % exc.strerror
        direct_io.set_direct(fd, False)
        direct_io.pread(fd, view, count, at, BLOCK_SIZE)
    if direct_io.is_direct(fd):
        reading.direct.add(dev)


class Census(NamedTuple):
    """Directories of one tree, and how many entries the walk saw in each: (components, links, number)."""

    key: int
    second: bool
    directories: Tuple[Tuple[Tuple[str, ...], Tuple[int, ...], int], ...]


def count_entries(worker: Worker, census: Census, fds: Sequence[int]) -> List[str]:
    """For each directory "" or how its number of entries differs, counted by another way than the walk's."""
    chain = listing.kept_chain(worker, census.key, census.second, fds[0])
    found = []
    for components, links, number in census.directories:
        try:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=chain.open(components, links))
            try:
                there = len(os.listdir(fd))
            finally:
                os.close(fd)
            found.append("" if there == number else "it has %d entries, %d were seen" % (there, number))
        except OSError as exc:
            found.append(hashtasks.reason_of(exc))
    return found


FUNCTIONS: Dict[str, Any] = {
    "list": listing.list_task,
    "pairs": compare_batch,
    "pairchunk": compare_chunk,
    "census": count_entries,
}
