# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""In a worker: what directories get at the end, when nothing below them is to be made any more.

Promises: no link is followed on the way; a directory of this run ends with the owner bits of its source, and
otherwise as the kernel made it, unless more is to be kept; one that was there keeps what it has, unless so.
"""

from __future__ import annotations

import os
import stat
from typing import List, NamedTuple, Sequence, Tuple

from mlperf_common.fileio import listing, words
from mlperf_common.fileio.facts import Learned, Options, facts_of, learned
from mlperf_common.fileio.metadata import Notes, Seen, Target, dress
from mlperf_common.fileio.walk import DirectoryChain, Identity
from mlperf_common.fileio.workers import Worker

EXISTED = -1  # instead of the mode of a directory that this run did not make


class Dress(NamedTuple):
    """One directory: where it landed, its source below the operand, which that was, what was seen of it, the mode that
    it was made with."""

    landing: Tuple[str, ...]
    components: Tuple[str, ...]
    links: Tuple[int, ...]
    identity: Identity
    seen: Seen
    made: int


class DressTask(NamedTuple):
    """Directories of one operand that are to be finished."""

    options: Options
    source_key: int
    base_key: int
    directories: Tuple[Dress, ...]


class DressResult(NamedTuple):
    """For each directory "" or what could not be done."""

    reasons: List[str]
    learned: Learned


class SyncTask(NamedTuple):
    """Destination directories to be written to the storage."""

    base_key: int
    landings: Tuple[Tuple[str, ...], ...]


def dress_directories(worker: Worker, task: DressTask, fds: Sequence[int]) -> DressResult:
    """Finish directories; what goes wrong is in the result."""
    facts = facts_of(worker, task.options)
    sources = listing.kept_chain(worker, task.source_key, False, fds[0])
    places = listing.kept_chain(worker, task.base_key, True, fds[1])
    reasons = []
    for directory in task.directories:
        try:
            _dress_one(directory, task.options, sources, places, facts.notes)
            reasons.append("")
        except OSError as exc:
            reasons.append(words.reason_of(exc))
    return DressResult(reasons, learned(facts))


def _dress_one(
    directory: Dress, options: Options, sources: DirectoryChain, places: DirectoryChain, notes: Notes
) -> None:
    existed = directory.made == EXISTED
    kept = options.kept
    if existed and not kept.mode:
        kept = kept._replace(default_mode=True)  # its mode is its own
    fd, target = open_directory(places.open(directory.landing))
    try:
        if kept.anything():
            source = sources.open_listed(directory.components, directory.links, directory.identity)
            dress(target, source, directory.seen, kept, notes)
        if not (existed or kept.mode):
            _narrow(target, directory.made & (0o700 if kept.default_mode else directory.seen.st_mode))
    finally:
        os.close(fd)


def _narrow(target: Target, left: int) -> None:
    """Take the owner bits that the source, or the umask, does not leave: they were needed to fill it."""
    lacking = 0o700 & ~left
    mode = stat.S_IMODE(os.stat(target).st_mode)
    if mode & lacking:
        os.chmod(target, mode & ~lacking)


def open_directory(place: int) -> Tuple[int, Target]:
    """A descriptor of the directory open as ``place`` (O_PATH) through which its inode can be changed, or a path.

    One that may not be read goes by /proc.
    """
    flags = os.O_DIRECTORY | os.O_CLOEXEC
    try:
        fd = os.open(".", os.O_RDONLY | flags, dir_fd=place)
        return fd, fd
    except PermissionError:
        fd = os.dup(place)
        return fd, "/proc/self/fd/%d" % fd


def sync_directories(worker: Worker, task: SyncTask, fds: Sequence[int]) -> List[str]:
    """fsync(2) directories, so that the names in them are on the storage; for each "" or why not."""
    places = listing.kept_chain(worker, task.base_key, True, fds[0])
    reasons = []
    for landing in task.landings:
        worker.check()
        try:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=places.open(landing))
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            reasons.append("")
        except OSError as exc:
            reasons.append(words.reason_of(exc))
    return reasons
