# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""In a worker: symbolic links copied as links, and further names (hard links) of files that were copied.

Promises: what a link says is copied verbatim; a name is replaced, never written through, and nothing that the plan
did not see is replaced without -f.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import copyfile, digest, listing
from mlperf_common.fileio.copyfile import FileChanged, Making, NameCollision
from mlperf_common.fileio.facts import FATAL, Failed, Learned, Options, facts_of, learned, reason_of
from mlperf_common.fileio.manifest import Chunk
from mlperf_common.fileio.metadata import dress_link
from mlperf_common.fileio.traces import temporary_name
from mlperf_common.fileio.walk import Identity
from mlperf_common.fileio.words import kind_of, quote
from mlperf_common.fileio.workers import Worker

# What link(2) answers where a file cannot have (so many) names; the name gets a file of its own then.
_NO_MORE_NAMES = (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

COPY = "copy"  # the reason of a twin that is to be copied instead


class LinkBatch(NamedTuple):
    """Links of one directory. ``components`` None: operands, whose names are paths of their own."""

    options: Options
    source_key: int
    components: Optional[Tuple[str, ...]]
    links: Tuple[int, ...]
    identity: Identity
    base_key: int
    landing: Tuple[str, ...]
    names: Tuple[Tuple[str, str, bool], ...]  # where to read it, its new name, whether it replaces


class LinkResult(NamedTuple):
    """How many links were made, how many of them lead out of the tree; which were not, after how many tried."""

    made: int
    outside: int
    chunks: Dict[int, Chunk]  # what each says, by position, if digests were asked for
    failures: List[Failed]
    tried: int
    learned: Learned


class TwinBatch(NamedTuple):
    """Names to give to files that are there: (their size, directory and name; the new directory and name; replaces)."""

    options: Options
    base_key: int
    names: Tuple[Tuple[int, Tuple[str, ...], str, Tuple[str, ...], str, bool], ...]


class TwinResult(NamedTuple):
    """What became of each name that was tried: "" or why not; with errno or 0."""

    outcomes: List[Tuple[int, str]]
    learned: Learned


def make_links(worker: Worker, batch: LinkBatch, fds: Sequence[int]) -> LinkResult:
    """Copy the links of a batch; after a fatal error the rest is not tried."""
    facts = facts_of(worker, batch.options)
    source = listing.source_directory(worker, batch.source_key, batch.components, batch.links, batch.identity, fds[0])
    place = listing.kept_chain(worker, batch.base_key, True, fds[-1]).open(batch.landing)
    making = Making(place, os.fstat(place).st_dev, batch.options, facts)
    depth = len(batch.components or ())
    made = outside = tried = 0
    failures: List[Failed] = []
    chunks: Dict[int, Chunk] = {}
    for index, (name, new_name, replaces) in enumerate(batch.names):
        worker.check()
        tried += 1
        try:
            target = _copy_link(making, source, name, new_name, replaces)
            outside += leads_out(target, depth)
            made += 1
            if batch.options.digests:
                chunks[index] = digest.link_chunk(target)
        except (OSError, NameCollision) as exc:
            number = exc.errno or 0 if isinstance(exc, OSError) else 0
            failures.append(Failed(index, number, reason_of(exc)))
            if number in FATAL:
                break
    return LinkResult(made, outside, chunks, failures, tried, learned(facts))


def leads_out(target: str, depth: int) -> bool:
    """Whether a link ``depth`` directories below the top of a tree leads out of it, by its words alone."""
    if target.startswith("/"):
        return True
    for part in target.split("/"):
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            return True
    return False


def _copy_link(making: Making, source: Optional[int], name: str, new_name: str, replaces: bool) -> str:
    """Make the link; what it says. Raises OSError, NameCollision."""
    kept = making.options.kept
    target = os.readlink(name, dir_fd=source)
    st = os.stat(name, dir_fd=source, follow_symlinks=False)
    made = new_name
    try:
        if replaces:
            made = _temporary(making, new_name, lambda free: os.symlink(target, free, dir_fd=making.dir_fd))
        else:
            os.symlink(target, new_name, dir_fd=making.dir_fd)
    except FileExistsError:
        _check_may_replace(making, new_name)
        made = _temporary(making, new_name, lambda free: os.symlink(target, free, dir_fd=making.dir_fd))
    try:
        dress_link(made, making.dir_fd, st, kept, making.facts.notes)
        if made != new_name:
            _rename_over(making, made, new_name)
    except BaseException:
        _give_up(making, made)
        raise
    return target


def _temporary(making: Making, name: str, make: Callable[[str], None]) -> str:
    """Make a link under a temporary name, which is returned; a name that is taken is somebody else's."""
    for attempt in range(100):
        free = temporary_name(name, making.facts.suffix + ("%d" % attempt if attempt else ""))
        try:
            make(free)
        except FileExistsError:
            continue
        return free
    raise FileExistsError(errno.EEXIST, "no free name for a temporary file", name)


def _give_up(making: Making, temporary: str) -> None:
    """Leave nothing of a name that was not made; why it was not is what counts."""
    try:
        os.unlink(temporary, dir_fd=making.dir_fd)
    except OSError as exc:
        making.facts.notes.warnings.add("cannot remove the temporary file %s: %s" % (quote(temporary), exc.strerror))


def _check_may_replace(making: Making, name: str) -> None:
    """A name has appeared: without -f it wins, with -f it must be that very name."""
    listed = copyfile.is_listed(making.dir_fd, name)
    if listed is False:
        raise NameCollision("collides with another name in the destination's directory") from None
    if not making.options.force or listed is None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def _rename_over(making: Making, temporary: str, name: str) -> None:
    """Replace a file or link, looked at again just before, by the temporary."""
    standing = copyfile.standing_at(making.dir_fd, name)
    if standing is not None and not (stat.S_ISREG(standing.st_mode) or stat.S_ISLNK(standing.st_mode)):
        raise NameCollision("cannot replace it: it is a %s now" % kind_of(standing.st_mode))
    os.rename(temporary, name, src_dir_fd=making.dir_fd, dst_dir_fd=making.dir_fd)


# ------------------------------------------------------------------------------------------------ further names


def make_twins(worker: Worker, batch: TwinBatch, fds: Sequence[int]) -> TwinResult:
    """Give files further names; after a fatal error the rest is not tried."""
    facts = facts_of(worker, batch.options)
    chain = listing.kept_chain(worker, batch.base_key, True, fds[0])
    outcomes: List[Tuple[int, str]] = []
    for size, landing, leader, new_landing, name, replaces in batch.names:
        worker.check()
        number, reason = 0, ""
        try:
            first = os.dup(chain.open(landing))
            try:
                place = chain.open(new_landing)
                making = Making(place, os.fstat(place).st_dev, batch.options, facts)
                _check_leader(first, leader, size)
                _give_name(making, first, leader, name, replaces)
            finally:
                os.close(first)
        except (OSError, FileChanged, NameCollision) as exc:
            number = exc.errno or 0 if isinstance(exc, OSError) else 0
            reason = COPY if number in _NO_MORE_NAMES else reason_of(exc)
        outcomes.append((number, reason))
        if number in FATAL:
            break
    return TwinResult(outcomes, learned(facts))


def _check_leader(place: int, name: str, size: int) -> None:
    standing = copyfile.standing_at(place, name)
    if standing is None or (stat.S_ISREG(standing.st_mode) and standing.st_size != size):
        raise FileChanged("the copy of its other name is not there any more")


def _give_name(making: Making, first: int, leader: str, name: str, replaces: bool) -> None:
    """Link ``name`` to the leader. Raises OSError, NameCollision."""

    def link(new: str) -> None:
        os.link(leader, new, src_dir_fd=first, dst_dir_fd=making.dir_fd, follow_symlinks=False)

    try:
        return link(name)
    except FileExistsError:
        own, standing = copyfile.standing_at(first, leader), copyfile.standing_at(making.dir_fd, name)
        if own and standing and (own.st_dev, own.st_ino) == (standing.st_dev, standing.st_ino):
            return None  # rename(2) of one name of a file over another would do nothing
        if not replaces:
            _check_may_replace(making, name)
    temporary = _temporary(making, name, link)
    try:
        _rename_over(making, temporary, name)
    except BaseException:
        _give_up(making, temporary)
        raise
