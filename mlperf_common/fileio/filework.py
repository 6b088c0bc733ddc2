# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""In the parent: the files and symbolic links of one plan. It gives out the tasks and takes the results.

Large files come first, largest first, cut into extents, so that a single one keeps every worker busy; then links,
then batches. A file that fails is an event and the others go on; a full disk ends the job, since all others would
fail too.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from mlperf_common.fileio import batches, copyfile, sharedfile, walk
from mlperf_common.fileio.batches import Batches, PlannedFile, Queue
from mlperf_common.fileio.copyfile import FileChanged, Making, NameCollision, NamelessRefused
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.copytasks import Batch, BatchResult, Comparison, Extent, Reread
from mlperf_common.fileio.facts import FATAL, Facts, Learned, Options, learned, reason_of
from mlperf_common.fileio.largefile import LargeFile
from mlperf_common.fileio.listing import Roots
from mlperf_common.fileio.progress import counted
from mlperf_common.fileio.recording import Recorder
from mlperf_common.fileio.report import Events, Summary
from mlperf_common.fileio.traces import temporary_name
from mlperf_common.fileio.twins import Twin
from mlperf_common.fileio.walk import Directory, DirectoryChain, Identity
from mlperf_common.fileio.workers import Failure, Task
from mlperf_common.fileio.workload import Links, Work, cut_links, links_of, links_of_operands, split

if TYPE_CHECKING:
    from mlperf_common.fileio.linktasks import LinkResult

Place = Tuple[Tuple[str, ...], str]

PARENT = 999  # the parent's number in the names of temporaries; workers have smaller ones

_FILE_ERRORS = (OSError, FileChanged, NameCollision, NamelessRefused)


class FileWork:
    """The files of one plan: gives out the tasks, takes the results."""

    def __init__(
        self,
        plan: CopyPlan,
        roots: Roots,
        options: Options,
        summary: Summary,
        events: Events,
        recorder: Recorder,
    ) -> None:
        self._plan = plan
        self._roots = roots
        self._options = options
        self._summary = summary
        self._events = events
        self._facts = Facts(options, PARENT)
        self._batches = Batches(())
        self._larges: Deque[LargeFile] = deque()
        self._large: Optional[LargeFile] = None
        self._open: Set[LargeFile] = set()
        self._opened = 0
        self._noted: Set[str] = set()
        self._links: Deque[Links] = deque()
        self.recorder = recorder
        self.missing: Set[Place] = set()  # where names were not made
        self.refill: Callable[[], bool] = lambda: False  # asked for more when there is none; whether some was added

    # ---- giving out

    def add(self, work: Work) -> None:
        """More to do, after what there is."""
        self._larges.extend(work.larges)
        self._links.extend(work.links)
        self._batches.add(work.queues)

    def next_task(self, worker: int, ahead: bool) -> Optional[Task]:
        """The next extent or batch; None once the job is to stop."""
        while not self._summary.stopped:
            large = self._with_extents()
            if large is not None:
                return None if ahead else self._extent_task(large)
            if self._links:
                task = self._link_task(self._links.popleft())
            else:
                found = self._batches.next(worker, ahead)
                if found is not None:
                    task = self._batch_task(*found)
                elif ahead or not self.refill():
                    return None
                else:
                    continue
            if task is not None:
                return task
        return None

    def take_refused(self, refused: Sequence[Twin]) -> bool:
        """Have names that no file can get as well copied after all; whether there are any."""
        wanted: Dict[Optional[Directory], Set[str]] = {}
        for twin in refused:
            wanted.setdefault(twin.directory, set()).add(twin.name)
        work = Work([], [], [])
        for directory, names in wanted.items():
            split(directory, list(batches.files_named(directory, names, self._plan.loose)), work)
            links = links_of(directory) if directory is not None else links_of_operands(self._plan.loose)
            work.links.extend(cut_links(directory, [link for link in links if link[1] in names]))
        self.add(work)
        if refused:
            self._events.warning(
                "%s copied as files of their own: the destination allows a file no more names"
                % counted(len(refused), "name")
            )
        return bool(refused)

    def _with_extents(self) -> Optional[LargeFile]:
        """The large file at hand, or the next one, opened; files that are only holes are finished here."""
        while self._large is None or self._large.failed or not self._large.ranges:
            self._large = self._larges.popleft() if self._larges else None
            if self._large is None:
                return None
            if self._large not in self._open:
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
        if large.resumed:
            self._summary.resumed += large.resumed
            self._events.resumed(self._paths(large.directory, large.file)[0], large.resumed)
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
        source = chains[1].open_listed(request.components, request.links, directory.identity)
        return chains[0].open(directory.landing()), source

    def _extent_task(self, large: LargeFile) -> Task:
        start, end = large.ranges.popleft()
        large.under_way += 1
        size = large.file.entry.size
        if large.verifying:
            reread = Reread(self._options, (large.digests[start],))
            return Task("reread", reread, large.descriptors(), large)
        if large.comparing:
            return Task("compare", Comparison(start, end, size, large.devices()), large.descriptors(), large)
        known = large.known(start, end)
        extent = Extent(self._options, start, end, size, *large.devices(), first=not large.moved, known=known)
        return Task("extent", extent, large.descriptors(), large)

    def _batch_task(self, queue: Queue, files: List[PlannedFile]) -> Optional[Task]:
        base = self._roots.get(self._plan.base.path, True)
        wanted = tuple((f.name, f.entry, f.replaces, f.compare) for f in files)
        context = (queue.directory, files)
        if queue.directory is None:
            batch = Batch(self._options, 0, None, (), Identity(0, 0, 0, 0), base.key, (), wanted, True)
            return Task("batch", batch, (base.fd,), context)
        directory = queue.directory
        try:
            root = self._roots.get(directory.tree.source, False)
        except OSError as exc:
            self._fail_batch(directory, files, reason_of(exc))
            return None
        _, components, links, *_ = directory.request()
        landing, follow = directory.landing(), directory.tree.look.follow
        identity = directory.identity
        batch = Batch(self._options, root.key, components, links, identity, base.key, landing, wanted, follow)
        return Task("batch", batch, (root.fd, base.fd), context)

    def _link_task(self, links: Links) -> Optional[Task]:
        from mlperf_common.fileio.linktasks import LinkBatch  # most copies have no links

        base, directory = self._roots.get(self._plan.base.path, True), links.directory
        if directory is None:
            batch = LinkBatch(self._options, 0, None, (), Identity(0, 0, 0, 0), base.key, (), links.names)
            return Task("links", batch, (base.fd,), links)
        try:
            root = self._roots.get(directory.tree.source, False)
        except OSError as exc:
            self._fail_links(links, range(len(links.names)), reason_of(exc), exc.errno or 0)
            return None
        _, components, followed, *_ = directory.request()
        landing, identity = directory.landing(), directory.identity
        batch = LinkBatch(self._options, root.key, components, followed, identity, base.key, landing, links.names)
        return Task("links", batch, (root.fd, base.fd), links)

    # ---- taking results

    def on_result(self, task: Task, result: Any) -> None:
        """A batch or an extent has ended, one way or the other."""
        if task.kind in ("extent", "compare", "reread"):
            self._on_extent(task.context, result, task)
        elif task.kind == "links":
            self._on_links(task.context, result)
        else:
            directory, files = task.context
            self._on_batch(directory, files, result)

    def _on_extent(self, large: LargeFile, result: Any, task: Task) -> None:
        large.under_way -= 1
        if isinstance(result, Failure):
            self._events.trace(result.trace)
            self._fail_large(large, _words(result), result.errno)
        elif large.verifying:
            self.learn(result)
        elif large.comparing:
            if not result:
                large.differ()
        else:
            large.take(result.chunks)
            self.learn(result.learned)
            self._note_extent(large, task.payload)
        if large.is_done():
            self._end_large(large)

    def _note_extent(self, large: LargeFile, extent: Extent) -> None:
        try:
            large.note(extent.start, extent.end)
        except OSError as exc:
            self._fail_large(large, "cannot write its record: %s" % reason_of(exc), exc.errno or 0)

    def ticking(self, tick: Callable[[], None]) -> Callable[[], None]:
        """``tick``, and what is to be done now and then while the pool works."""
        if not self._options.resume:
            return tick

        def both() -> None:
            tick()
            for large in self._open:
                large.touch()

        return both

    def _end_large(self, large: LargeFile) -> None:
        """Nothing of it is out: it is compared, or copied; one that differs is begun, and stays open."""
        try:
            if large.failed:
                pass
            elif large.comparing and not large.differs:
                large.check_source()
                self._summary.same += 1
                self.recorder.add_unread(Twin(large.directory, large.file.entry.name))
            else:
                if large.comparing:
                    large.begin()
                if large.ranges or large.verify():
                    self._resume(large)
                    return
                self._finish_large(large)
        except NamelessRefused:
            # No name for it without one from the start: once more, and no file of that device so any more.
            self._facts.nameless[large.devices()[1]] = False
            self._larges.appendleft(LargeFile(large.directory, large.file))
        except _FILE_ERRORS as exc:
            self._fail_large(large, reason_of(exc), getattr(exc, "errno", 0) or 0)
        large.close()
        self._open.discard(large)

    def _resume(self, large: LargeFile) -> None:
        """It goes on, before any other that is not begun."""
        if self._large is not None and self._large is not large and self._large.ranges:
            self._larges.appendleft(self._large)
        self._large = large

    def _finish_large(self, large: LargeFile) -> None:
        large.finish()
        self.recorder.add(Twin(large.directory, large.file.entry.name), large.chunks())
        self.done(large.directory, large.file, *large.counts())

    def _fail_large(self, large: LargeFile, reason: str, number: int) -> None:
        if large.failed:
            return
        large.failed = True
        if not large.keeps_failure(reason, number):
            self._failed(large.directory, large.file, reason, number)
        elif number in FATAL:
            self._summary.stop(reason)

    def _on_batch(self, directory: Optional[Directory], files: Sequence[PlannedFile], result: Any) -> None:
        if isinstance(result, Failure):
            self._events.trace(result.trace)
            self.remove_temporaries(directory, [file.entry.name for file in files], result)
            self._fail_batch(directory, files, _words(result), result.errno)
            return
        outcome: BatchResult = result
        self.learn(outcome.learned)
        self._summary.bytes += outcome.bytes
        self._summary.files += outcome.files
        self._summary.same += len(outcome.same)
        for index in outcome.same:
            self.recorder.add_unread(Twin(directory, files[index].entry.name))
        for index, chunks in outcome.chunks.items():
            self.recorder.add(Twin(directory, files[index].entry.name), chunks)
        failed = {failure.position for failure in outcome.failures} | set(outcome.same)
        for failure in outcome.failures:
            self._failed(directory, files[failure.position], failure.reason, failure.errno)
        if self._events.verbose:
            for index in range(outcome.tried):
                if index not in failed:
                    self._events.copied(*self._paths(directory, files[index]))

    def _on_links(self, links: Links, result: Any) -> None:
        if isinstance(result, Failure):
            self._events.trace(result.trace)
            self.remove_temporaries(links.directory, [name for _, name, _ in links.names], result)
            self._fail_links(links, range(len(links.names)), _words(result), result.errno)
            return
        outcome: LinkResult = result
        self.learn(outcome.learned)
        self._summary.links += outcome.made
        for index, chunk in outcome.chunks.items():
            self.recorder.add(Twin(links.directory, links.names[index][1]), [chunk])
        self._summary.outside += outcome.outside
        failed = {failure.position for failure in outcome.failures}
        for failure in outcome.failures:
            self._fail_links(links, (failure.position,), failure.reason, failure.errno)
        if self._events.verbose:
            for index in range(outcome.tried):
                if index not in failed:
                    self._events.linked(*self._link_paths(links, index))

    def _fail_links(self, links: Links, positions: Iterable[int], reason: str, number: int) -> None:
        for position in positions:
            twin = Twin(links.directory, links.names[position][1])
            self.fail(twin, self._link_paths(links, position), reason, number)

    def _link_paths(self, links: Links, position: int) -> Tuple[str, str]:
        source, name, _ = links.names[position]
        return self.paths(Twin(links.directory, name), source)

    def _fail_batch(
        self, directory: Optional[Directory], files: Sequence[PlannedFile], reason: str, number: int = 0
    ) -> None:
        """Each file by name: who reads the log must be able to tell what is missing."""
        for file in files:
            self._failed(directory, file, reason, number)

    def _failed(self, directory: Optional[Directory], file: PlannedFile, reason: str, number: int) -> None:
        self.fail(Twin(directory, file.entry.name), self._paths(directory, file), reason, number)

    def fail(self, twin: Twin, paths: Tuple[str, str], reason: str, number: int) -> None:
        """A name was not made, for this reason; a full disk ends the job."""
        self._summary.failed += 1
        self._events.failed(*paths, reason)
        self.missing.add(place_of(twin))
        if number in FATAL:
            self._summary.stop(reason)

    def named(self, twin: Twin, leader: Twin) -> None:
        """A file has got a further name."""
        self.recorder.add_name(twin, leader)
        self._summary.files += 1
        if self._events.verbose:
            self._events.copied(*self.paths(twin))

    def done(self, directory: Optional[Directory], file: PlannedFile, files: int, size: int) -> None:
        """A large file has its name, or (no file) a part of one that is shared is written."""
        self._summary.files += files
        self._summary.bytes += size
        if files and self._events.verbose:
            self._events.copied(*self._paths(directory, file))

    def _paths(self, directory: Optional[Directory], file: PlannedFile) -> Tuple[str, str]:
        return self.paths(Twin(directory, file.entry.name), file.shown)

    def paths(self, twin: Twin, shown: str = "") -> Tuple[str, str]:
        """Source and destination of a name as the user knows them; ``shown`` is that of an operand."""
        base, directory = self._plan.base.shown, twin.directory
        if directory is None:
            source = shown or next(f.shown for f in self._plan.loose if f.name == twin.name)
            return source, os.path.join(base, twin.name)
        return directory.shown(twin.name), os.path.join(base, *directory.landing(), twin.name)

    def learn(self, learned: Learned) -> None:
        """Take over what a worker has learned, and say once what there is to say."""
        self._facts.refused.update(learned.refused)
        self._summary.refused.update(learned.refused)
        self._summary.direct.update(learned.direct)
        self._summary.cloned = self._summary.cloned or learned.cloned
        self._summary.by_server = self._summary.by_server or learned.by_server
        self._summary.from_cache = self._summary.from_cache or learned.from_cache
        for note in learned.warnings - self._noted:
            self._noted.add(note)
            self._events.warning(note)
        for note in learned.problems - self._noted:
            self._noted.add(note)
            self._summary.problems += 1
            self._events.problem(note)

    # ---- files that several ranks have written together

    def name_shared(self, large: LargeFile, number: int) -> None:
        """Every byte of such a file is there: it gets its name."""
        self._with_directories(large, lambda making, source: self._commit_shared(large, number, making, source))

    def _commit_shared(self, large: LargeFile, number: int, making: Making, source: Optional[int]) -> None:
        follow = large.directory is None or large.directory.tree.look.follow
        sharedfile.commit(making, large.file, source, follow, number)
        self.done(large.directory, large.file, 1, 0)  # the ranks have counted its bytes

    def drop_shared(self, large: LargeFile, number: int, reason: str, errno: int) -> None:
        """Nothing is left of such a file; it has failed, or was not tried (no reason)."""
        self._with_directories(large, lambda making, _: sharedfile.discard(making, large.file.entry.name, number))
        if reason and not large.failed:
            large.failed = True
            self._failed(large.directory, large.file, reason, errno)

    def _with_directories(self, large: LargeFile, act: Callable[[Making, Optional[int]], None]) -> None:
        """Do something with the directories of a large file open; if it cannot be done the file has failed."""
        chains: List[DirectoryChain] = []
        try:
            place, source = self._open_directories(large.directory, chains)
            act(sharedfile.making_for(place, self._facts), source)
        except _FILE_ERRORS as exc:
            self._fail_large(large, reason_of(exc), getattr(exc, "errno", 0) or 0)
        finally:
            for chain in chains:
                chain.close()

    # ---- cleaning up

    def remove_temporaries(
        self, directory: Optional[Directory], names: Sequence[str], failure: Failure
    ) -> None:
        """The named temporaries of a worker that died: their names follow from the files and the worker."""
        if not failure.signum:
            return
        chains: List[DirectoryChain] = []
        try:
            place, _ = self._open_directories(directory, chains)
            suffix = Facts(self._options, failure.worker).suffix
            for name in names:
                for ending in ("", "r"):
                    _remove_own(place, temporary_name(name, suffix + ending))
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
        self.learn(learned(self._facts))


def place_of(twin: Twin) -> Place:
    """Where a name lands: the directories from the plan's base down, and the name."""
    return (twin.directory.landing() if twin.directory is not None else (), twin.name)


def _words(failure: Failure) -> str:
    return "worker %d %s" % (failure.worker, failure.reason) if failure.signum else failure.reason


def _remove_own(place: int, name: str) -> None:
    standing = copyfile.standing_at(place, name)
    if standing is not None and not stat.S_ISDIR(standing.st_mode):
        os.unlink(name, dir_fd=place)
