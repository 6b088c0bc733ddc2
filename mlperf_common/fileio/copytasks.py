# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a worker does with each kind of task of a copy; everything that it needs comes with the task.

A batch is small files of one directory: both directories are opened once and the files worked relative to
their descriptors. An extent is a part of a large file whose two descriptors the parent has opened. Errors of
single files are part of a result; an error of a directory fails its task.
"""

from __future__ import annotations

import importlib
import os
import stat
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import copyfile, listing, walk, words
from mlperf_common.fileio.copyfile import FileChanged, Job, Making, NameCollision, NamelessRefused, Stream
from mlperf_common.fileio.digest import Digest
from mlperf_common.fileio.facts import FATAL, Failed, Learned, Options, facts_of, learned, reason_of
from mlperf_common.fileio.manifest import Chunk
from mlperf_common.fileio.metadata import creation_mode
from mlperf_common.fileio.walk import FileEntry, Identity
from mlperf_common.fileio.workers import Worker


class Batch(NamedTuple):
    """Files of one directory. ``components`` None: operands, whose names are paths of their own."""

    options: Options
    source_key: int
    components: Optional[Tuple[str, ...]]
    links: Tuple[int, ...]
    identity: Identity
    base_key: int
    landing: Tuple[str, ...]
    files: Tuple[Tuple[str, FileEntry, bool, bool], ...]  # where to read it, what was seen, replaces, compare
    follow: bool


class BatchResult(NamedTuple):
    """How many files and bytes were copied, how many stood there with the same bytes; which were not copied; how many
    were tried before a fatal error."""

    files: int
    bytes: int
    same: List[int]  # positions
    chunks: Dict[int, List[Chunk]]  # by position, if digests were asked for
    failures: List[Failed]
    tried: int
    learned: Learned


class Extent(NamedTuple):
    """The bytes ``start`` to ``end`` of a file of ``size``; ``first``: none of it is known to have moved; ``known``: of
    these ranges, which an earlier run has copied, only the digests are wanted."""

    options: Options
    start: int
    end: int
    size: int
    src_dev: int
    dst_dev: int
    first: bool
    known: Tuple[Tuple[int, int], ...] = ()


class ExtentResult(NamedTuple):
    """The digests of an extent, if they were asked for."""

    chunks: List[Chunk]
    learned: Learned


class Reread(NamedTuple):
    """Chunks of a new file that are to be read back."""

    options: Options
    chunks: Tuple[Chunk, ...]


class Comparison(NamedTuple):
    """The bytes ``start`` to ``end`` of a source and of what stands at its destination, to be compared."""

    start: int
    end: int
    size: int
    devices: Tuple[int, int]


class Level(NamedTuple):
    """Directories to make in one directory: (name, mode)."""

    options: Options
    base_key: int
    landing: Tuple[str, ...]
    directories: Tuple[Tuple[str, int], ...]


class Made(NamedTuple):
    """What became of one directory: its identity and mode, whether it was there already; or errno and reason."""

    dev: int
    ino: int
    mode: int
    existed: bool
    errno: int = 0
    reason: str = ""


class Check(NamedTuple):
    """Source directories to be compared with what the walk saw: (components, links, identity, digest)."""

    source_key: int
    directories: Tuple[Tuple[Tuple[str, ...], Tuple[int, ...], Identity, bytes], ...]


def make_directories(worker: Worker, level: Level, fds: Sequence[int]) -> List[Made]:
    """Make directories in one directory; what is there already is accepted only if it is that very directory."""
    place = listing.kept_chain(worker, level.base_key, True, fds[0]).open(level.landing)
    kept = level.options.kept
    return [_make_directory(place, name, creation_mode(kept, mode, True)) for name, mode in level.directories]


def _make_directory(place: int, name: str, mode: int) -> Made:
    existed = False
    try:
        try:
            os.mkdir(name, mode | 0o700, dir_fd=place)
        except FileExistsError:
            existed = True
        st = os.stat(name, dir_fd=place, follow_symlinks=False)
        if existed:
            _accept(place, name, st)
        elif st.st_mode & 0o700 != 0o700:  # a umask that takes from the owner: as cp, until the end
            _give_owner_bits(place, name, st)
    except (OSError, NameCollision) as exc:
        return Made(0, 0, 0, existed, getattr(exc, "errno", 0) or 0, reason_of(exc))
    return Made(st.st_dev, st.st_ino, stat.S_IMODE(st.st_mode), existed)


def _give_owner_bits(place: int, name: str, st: os.stat_result) -> None:
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    try:
        from mlperf_common.fileio.dressing import open_directory

        own, target = open_directory(fd)
        try:
            os.chmod(target, stat.S_IMODE(st.st_mode) | 0o700)
        finally:
            os.close(own)
    finally:
        os.close(fd)


def _accept(place: int, name: str, st: os.stat_result) -> None:
    """A name that was there: it must be a directory, and listed with exactly these bytes."""
    if not stat.S_ISDIR(st.st_mode):
        raise NameCollision("it is a %s now" % words.kind_of(st.st_mode))
    if copyfile.is_listed(place, name) is False:
        raise NameCollision("collides with another name in the destination's directory")


def copy_batch(worker: Worker, batch: Batch, fds: Sequence[int]) -> BatchResult:
    """Copy the files of a batch, each whole or not at all; after a fatal error the rest is not tried."""
    facts = facts_of(worker, batch.options)
    source = listing.source_directory(worker, batch.source_key, batch.components, batch.links, batch.identity, fds[0])
    place = listing.kept_chain(worker, batch.base_key, True, fds[-1]).open(batch.landing)
    making = Making(place, os.fstat(place).st_dev, batch.options, facts)
    files = moved = tried = 0
    failures: List[Failed] = []
    same: List[int] = []
    chunks: Dict[int, List[Chunk]] = {}
    for index, (name, entry, replaces, compare) in enumerate(batch.files):
        worker.check()
        tried += 1
        try:
            job = Job(name, source, entry, entry.name, replaces, batch.follow, compare)
            copied = copyfile.copy_file(worker, making, job)
            if copied is None:
                same.append(index)
                continue
            moved += copied.size
            files += 1
            if batch.options.digests:
                chunks[index] = copied.chunks
        except (OSError, FileChanged, NameCollision, NamelessRefused) as exc:
            number = exc.errno or 0 if isinstance(exc, OSError) else 0
            failures.append(Failed(index, number, reason_of(exc)))
            if number in FATAL:
                break
    return BatchResult(files, moved, same, chunks, failures, tried, learned(facts))


def copy_extent(worker: Worker, extent: Extent, fds: Sequence[int]) -> ExtentResult:
    """Copy one extent; the one that ends the file also sees that the source ends there."""
    facts, options = facts_of(worker, extent.options), extent.options
    part = (extent.start, extent.end)
    if not (options.digests or options.verify):
        stream = Stream(fds[0], fds[1], extent.src_dev, extent.dst_dev)
        copyfile.move_range(worker, facts, stream, *part, extent.first)
        chunks: List[Chunk] = []
    else:
        digest = Digest(extent.start)
        stream = Stream(fds[0], fds[1], extent.src_dev, extent.dst_dev, digest)
        _move_all(worker, extent, stream)
        chunks = digest.chunks()
    if extent.end == extent.size:
        copyfile.check_end(worker, fds[0], extent.size)
    if options.resume and extent.known != (part,):
        os.fdatasync(fds[1])  # only then the record may say so
    return ExtentResult(chunks, learned(facts))


def _move_all(worker: Worker, extent: Extent, stream: Stream) -> None:
    """Take the digest of an extent: holes are in it, and so is what an earlier run has copied."""
    facts, first = facts_of(worker, extent.options), extent.first
    at = extent.start
    for start, end in (*extent.known, (extent.end, extent.end)):
        if at < start:
            # Which the holes are is asked here, as there may be very many.
            segments = copyfile.data_segments(stream.src, os.fstat(stream.src), extent.options.sparse, at, start)
            copyfile.move_segments(worker, facts, stream, segments, (at, start), first)
            first = False
        if start < end:
            copyfile.read_range(worker, facts, stream, start, end, first)
            first = False
        at = end


def reread_chunks(worker: Worker, task: Reread, fds: Sequence[int]) -> Learned:
    """Read chunks of a new file back from the storage and compare their digests. Raises StorageDiffers."""
    facts = facts_of(worker, task.options)
    copyfile.reread(worker, facts, fds[1], task.chunks)
    return learned(facts)


def compare_extent(worker: Worker, part: Comparison, fds: Sequence[int]) -> bool:
    """Whether a part of a source is what stands at its destination; the last one also sees that both end."""
    return copyfile.is_same(worker, (fds[0], fds[1]), part.devices, (part.start, part.end), part.size)


def check_directories(worker: Worker, check: Check, fds: Sequence[int]) -> List[str]:
    """For each source directory "" or how it has changed since the walk listed it."""
    return [_check_directory(worker, check.source_key, fds[0], *directory) for directory in check.directories]


def _check_directory(
    worker: Worker,
    key: int,
    root_fd: int,
    components: Tuple[str, ...],
    links: Tuple[int, ...],
    identity: Identity,
    digest: bytes,
) -> str:
    worker.check()
    try:
        fd = listing.kept_chain(worker, key, False, root_fd).open(components, links)
        st = os.fstat(fd)
        # A young directory's clock may not have ticked: its names are compared instead.
        if digest:
            same = walk.names_digest([os.fsencode(name) for name in os.listdir(fd)]) == digest
        else:
            same = st.st_mtime_ns == identity.mtime_ns
    except OSError as exc:
        return words.reason_of(exc)
    return "" if same else "directory changed while it was being copied"


def _later(module: str, name: str) -> Callable[[Worker, Any, Sequence[int]], Any]:
    """A function whose module is imported when it is first called: most copies need none of these."""

    def call(worker: Worker, payload: Any, fds: Sequence[int]) -> Any:
        function = getattr(importlib.import_module("mlperf_common.fileio." + module), name)
        return function(worker, payload, fds)

    return call


FUNCTIONS: Dict[str, Any] = {
    "list": listing.list_task,
    "mkdir": make_directories,
    "batch": copy_batch,
    "extent": copy_extent,
    "reread": reread_chunks,
    "compare": compare_extent,
    "check": check_directories,
    "links": _later("linktasks", "make_links"),
    "twins": _later("linktasks", "make_twins"),
    "dress": _later("dressing", "dress_directories"),
    "sync": _later("dressing", "sync_directories"),
    "hash": _later("hashtasks", "hash_batch"),
    "chunk": _later("hashtasks", "hash_chunk"),
}
