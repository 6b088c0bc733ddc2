# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A CopyPlan carried out on a pool: directories, then files, then a last look at the source, then a summary.

1. Directories, level by level. One that cannot be made is one error; nothing below it is tried.
2. Files: large ones first, cut into extents, so that a single one keeps every worker busy; then batches.
   A file that fails is an event and the others go on; a full disk ends the job, since all others would fail too.
3. Each source directory is compared with what the walk saw.
4. Directories that this run made get their last mode, deepest first, whatever happened.

Nothing is printed here: what happens goes to ``Events``, in no promised order.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, Iterator, List, Optional, Sequence, Set, Tuple

from mlperf_common.fileio import batches, copyfile, walk
from mlperf_common.fileio.batches import Batches, PlannedFile, Queue
from mlperf_common.fileio.copyfile import Facts, FileChanged, Making, NameCollision, NamelessRefused, Options
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.copytasks import FATAL, Batch, BatchResult, Extent, Learned, reason_of
from mlperf_common.fileio.directories import Directories
from mlperf_common.fileio.largefile import LargeFile
from mlperf_common.fileio.listing import AnyPool, Roots
from mlperf_common.fileio.report import Events, Summary
from mlperf_common.fileio.walk import Directory, DirectoryChain, Identity
from mlperf_common.fileio.workers import AllWorkersDied, Failure, Task

PARENT = 999  # the parent's number in the names of temporaries; workers have smaller ones

_FILE_ERRORS = (OSError, FileChanged, NameCollision, NamelessRefused)


def copy(
    plan: CopyPlan, pool: AnyPool, roots: Roots, options: Options, events: Events, summary: Optional[Summary] = None
) -> Summary:
    """Carry out ``plan``; ``summary`` is filled in as it goes.

    Raises Interrupted when a signal came, after the workers have stopped and cleaned up.
    """
    summary = Summary() if summary is None else summary
    directories = Directories(plan, pool, roots, summary, events)
    files = _Files(plan, roots, options, summary, events)
    try:
        _check_base(plan, roots)
        directories.make()
        files.sort_out(directories)
        pool.run(files.next_task, files.on_result)
        directories.check_sources()
    except AllWorkersDied as exc:
        summary.stop(str(exc))
    except BaseException:
        pool.abort()
        raise
    finally:
        files.close()
        directories.finish()
    summary.not_tried = max(0, len(plan.files) - summary.files - summary.failed)
    return summary


def _check_base(plan: CopyPlan, roots: Roots) -> None:
    """Everything lands below one descriptor: it must be the directory that the plan looked at."""
    now = walk.identity_of(os.fstat(roots.get(plan.base.path, True).fd))
    if not now.is_same(plan.base.identity):
        raise OSError(errno.ESTALE, "another directory has taken its place since it was looked at", plan.base.path)


class _Files:
    """The files of one plan: gives out the tasks, takes the results."""

    def __init__(self, plan: CopyPlan, roots: Roots, options: Options, summary: Summary, events: Events) -> None:
        self._plan = plan
        self._roots = roots
        self._options = options
        self._summary = summary
        self._events = events
        self._facts = Facts(options.token, PARENT)
        self._batches = Batches(())
        self._larges: Iterator[LargeFile] = iter(())
        self._large: Optional[LargeFile] = None
        self._open: Set[LargeFile] = set()
        self._opened = 0
        self._noted: Set[str] = set()

    # ---- giving out

    def sort_out(self, directories: Directories) -> None:
        """Large files, largest first, and queues of small ones; nothing below a directory that is not there."""
        larges: List[LargeFile] = []
        queues: List[Queue] = []
        if self._plan.loose:
            _split(None, list(batches.files_of_operands(self._plan.loose)), larges, queues)
        for directory in walk.breadth_first(self._plan.trees):
            if directories.is_broken(directory) or not directory.count():
                continue
            if max(directory.sizes()) <= batches.EXTENT:  # the rule; its files are made when they are due
                queues.append(Queue(directory, batches.files_of(directory), directory.count()))
            else:
                _split(directory, list(batches.files_of(directory)), larges, queues)
        larges.sort(key=lambda large: -large.file.entry.size)
        self._larges = iter(larges)
        self._batches = Batches(queues)

    def next_task(self, worker: int, ahead: bool) -> Optional[Task]:
        """The next extent or batch; None once the job is to stop."""
        while not self._summary.stopped:
            large = self._with_extents()
            if large is not None:
                return None if ahead else self._extent_task(large)
            found = self._batches.next(worker, ahead)
            if found is None:
                return None
            task = self._batch_task(*found)
            if task is not None:
                return task
        return None

    def _with_extents(self) -> Optional[LargeFile]:
        """The large file at hand, or the next one, opened; files that are only holes are finished here."""
        while self._large is None or self._large.failed or not self._large.ranges:
            self._large = next(self._larges, None)
            if self._large is None:
                return None
            self._open_large(self._large)
        return self._large

    def _open_large(self, large: LargeFile) -> None:
        self._opened += 1
        self._open.add(large)
        try:
            chains: List[DirectoryChain] = []
            try:
                place, source = self._open_directories(large.directory, chains)
                making = Making(os.dup(place), os.fstat(place).st_dev, self._options, self._facts)
                large.open(source, making, "%x" % self._opened)
            finally:
                for chain in chains:
                    chain.close()
        except _FILE_ERRORS as exc:
            self._fail_large(large, reason_of(exc), getattr(exc, "errno", 0) or 0)
        if large.is_done():
            self._end_large(large)

    def _open_directories(
        self, directory: Optional[Directory], chains: List[DirectoryChain]
    ) -> Tuple[int, Optional[int]]:
        """The directory that a file goes to, and the one that it is read from (None: an operand)."""
        base = self._roots.get(self._plan.base.path, True)
        chains.append(walk.open_chain(os.dup(base.fd), True))
        if directory is None:
            return chains[0].open(()), None
        root = self._roots.get(directory.tree.source, False)
        chains.append(walk.open_chain(os.dup(root.fd), False))
        request = directory.request()
        source = chains[1].open(request.components, request.links)
        if not walk.identity_of(os.fstat(source)).is_same(directory.identity):
            raise FileChanged("another directory has taken its place since it was listed")
        return chains[0].open(directory.landing()), source

    def _extent_task(self, large: LargeFile) -> Task:
        start, end = large.ranges.popleft()
        large.under_way += 1
        size = large.file.entry.size
        extent = Extent(self._options, start, end, size, *large.devices(), first=not large.moved)
        return Task("extent", extent, large.descriptors(), large)

    def _batch_task(self, queue: Queue, files: List[PlannedFile]) -> Optional[Task]:
        base = self._roots.get(self._plan.base.path, True)
        wanted = tuple((f.name, f.entry, f.replaces) for f in files)
        context = (queue.directory, files)
        if queue.directory is None:
            batch = Batch(self._options, 0, None, (), Identity(0, 0, 0, 0), base.key, (), wanted)
            return Task("batch", batch, (base.fd,), context)
        directory = queue.directory
        try:
            root = self._roots.get(directory.tree.source, False)
        except OSError as exc:
            self._fail_batch(directory, files, reason_of(exc))
            return None
        _, components, links, _ = directory.request()
        landing = directory.landing()
        batch = Batch(self._options, root.key, components, links, directory.identity, base.key, landing, wanted)
        return Task("batch", batch, (root.fd, base.fd), context)

    # ---- taking results

    def on_result(self, task: Task, result: Any) -> None:
        """A batch or an extent has ended, one way or the other."""
        if task.kind == "extent":
            self._on_extent(task.context, result)
        else:
            directory, files = task.context
            self._on_batch(directory, files, result)

    def _on_extent(self, large: LargeFile, result: Any) -> None:
        large.under_way -= 1
        if isinstance(result, Failure):
            self._events.trace(result.trace)
            self._fail_large(large, _words(result), result.errno)
        else:
            large.moved = True
            self._learn(result[1])
        if large.is_done():
            self._end_large(large)

    def _end_large(self, large: LargeFile) -> None:
        if not large.failed:
            try:
                large.finish()
                self._done(large.directory, large.file, large.file.entry.size)
            except _FILE_ERRORS as exc:
                self._fail_large(large, reason_of(exc), getattr(exc, "errno", 0) or 0)
        large.close()
        self._open.discard(large)

    def _fail_large(self, large: LargeFile, reason: str, number: int) -> None:
        if not large.failed:
            large.failed = True
            self._failed(large.directory, large.file, reason, number)

    def _on_batch(self, directory: Optional[Directory], files: Sequence[PlannedFile], result: Any) -> None:
        if isinstance(result, Failure):
            self._events.trace(result.trace)
            self._remove_temporaries(directory, files, result)
            self._fail_batch(directory, files, _words(result), result.errno)
            return
        outcome: BatchResult = result
        self._learn(outcome.learned)
        self._summary.bytes += outcome.bytes
        self._summary.files += outcome.files
        failed = {failure.position for failure in outcome.failures}
        for failure in outcome.failures:
            self._failed(directory, files[failure.position], failure.reason, failure.errno)
        if self._events.verbose:
            for index in range(outcome.tried):
                if index not in failed:
                    self._events.copied(*self._paths(directory, files[index]))

    def _fail_batch(
        self, directory: Optional[Directory], files: Sequence[PlannedFile], reason: str, number: int = 0
    ) -> None:
        """Each file by name: who reads the log must be able to tell what is missing."""
        for file in files:
            self._failed(directory, file, reason, number)

    def _failed(self, directory: Optional[Directory], file: PlannedFile, reason: str, number: int) -> None:
        self._summary.failed += 1
        self._events.failed(*self._paths(directory, file), reason)
        if number in FATAL:
            self._summary.stop(reason)

    def _done(self, directory: Optional[Directory], file: PlannedFile, size: int) -> None:
        self._summary.files += 1
        self._summary.bytes += size
        if self._events.verbose:
            self._events.copied(*self._paths(directory, file))

    def _paths(self, directory: Optional[Directory], file: PlannedFile) -> Tuple[str, str]:
        """Source and destination as the user knows them."""
        base = self._plan.base.shown
        if directory is None:
            return file.shown, os.path.join(base, file.entry.name)
        return directory.shown(file.name), os.path.join(base, *directory.landing(), file.name)

    def _learn(self, learned: Learned) -> None:
        self._facts.refused.update(learned.refused)
        self._summary.refused.update(learned.refused)
        self._summary.direct.update(learned.direct)
        for note in learned.notes - self._noted:
            self._noted.add(note)
            self._events.warning(note)

    # ---- cleaning up

    def _remove_temporaries(
        self, directory: Optional[Directory], files: Sequence[PlannedFile], failure: Failure
    ) -> None:
        """The named temporaries of a worker that died: their names follow from the files and the worker."""
        if not failure.signum:
            return
        chains: List[DirectoryChain] = []
        try:
            place, _ = self._open_directories(directory, chains)
            suffix = Facts(self._options.token, failure.worker).suffix
            for file in files:
                for ending in ("", "r"):
                    _remove_own(place, copyfile.temporary_name(file.entry.name, suffix + ending))
        except _FILE_ERRORS as exc:
            self._events.warning("cannot look for what a dead worker has left: %s" % reason_of(exc))
        finally:
            for chain in chains:
                chain.close()

    def close(self) -> None:
        """Give up the large files that are under way, and say how the parent's own bytes moved."""
        for large in list(self._open):
            large.close()
        self._open.clear()
        self._learn(Learned(self._facts.refused, set(), self._facts.notes))


def _split(
    directory: Optional[Directory], files: Sequence[PlannedFile], larges: List[LargeFile], queues: List[Queue]
) -> None:
    small = [file for file in files if not batches.is_large(file)]
    larges.extend(LargeFile(directory, file) for file in files if batches.is_large(file))
    if small:
        queues.append(Queue(directory, iter(small), len(small)))


def _words(failure: Failure) -> str:
    return "worker %d %s" % (failure.worker, failure.reason) if failure.signum else failure.reason


def _remove_own(place: int, name: str) -> None:
    standing = copyfile.standing_at(place, name)
    if standing is not None and stat.S_ISREG(standing.st_mode) and standing.st_uid == os.geteuid():
        os.unlink(name, dir_fd=place)
