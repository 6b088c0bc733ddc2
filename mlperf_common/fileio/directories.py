# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The directories of a copy: made before their files, given their last mode after them, compared at the end.

No two planned directories may become one: a name that is there already is accepted only if no other planned
directory of this run has its device and inode, and a listing shows exactly its bytes (case-folding
filesystems).
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from mlperf_common.fileio import walk, words
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.copytasks import FUNCTIONS, Check, Level, Made
from mlperf_common.fileio.facts import FATAL, Options
from mlperf_common.fileio.listing import AnyPool, Roots, group_size
from mlperf_common.fileio.metadata import Seen
from mlperf_common.fileio.report import Events, Summary
from mlperf_common.fileio.stopping import StopFlag
from mlperf_common.fileio.walk import Directory
from mlperf_common.fileio.workers import Failure, InProcess, Task

GROUP = 64  # directories made, or compared, in one task, at most

COLLIDES = "collides with another name in the destination's directory"


class Directories:
    """The destination directories of one plan, and the source directories behind them."""

    def __init__(
        self, plan: CopyPlan, pool: AnyPool, roots: Roots, options: Options, summary: Summary, events: Events
    ) -> None:
        self._plan = plan
        self._options = options
        self._pool = pool
        self._roots = roots
        self._summary = summary
        self._events = events
        self._broken: Set[Directory] = set()
        self._made: Dict[Directory, int] = {}  # and the mode that each was made with
        self._unsure: Set[Directory] = set()  # a worker has been told to make them, and has not answered
        self._owners: Dict[Tuple[int, int], Directory] = {}
        self._tasks: Iterator[Task] = iter(())

    def is_broken(self, directory: Directory) -> bool:
        """Whether this directory, or one above it, could not be made. Ask level by level, from the top."""
        if directory.parent is not None and directory.parent in self._broken:
            self._broken.add(directory)
        return directory in self._broken

    def _run(self, tasks: Iterator[Task], on_result: Any) -> None:
        self._tasks = tasks
        self._pool.run(self._next, on_result)

    def _next(self, worker: int, ahead: bool) -> Optional[Task]:
        return None if self._summary.stopped else next(self._tasks, None)

    # ---- making

    def make(self) -> None:
        """Make what is missing, shallowest first: each level is there before the next begins."""
        level = [tree.root for tree in self._plan.trees]
        while level:
            for directory in level:
                if directory.destination is not None:
                    self._owners[directory.destination[:2]] = directory
            missing = [d for d in level if d.existing is None and not self.is_broken(d)]
            self._run(self._levels(missing), self._on_made)
            level = [child for directory in level for child in directory.children]

    def _levels(self, missing: Sequence[Directory]) -> Iterator[Task]:
        base = self._roots.get(self._plan.base.path, True)
        for group in self._grouped(missing, lambda directory: directory.parent):
            wanted = tuple((d.landing()[-1], d.mode) for d in group)
            self._unsure.update(group)
            yield Task("mkdir", Level(self._options, base.key, group[0].landing()[:-1], wanted), (base.fd,), group)

    def _on_made(self, task: Task, result: Any) -> None:
        self._unsure.difference_update(task.context)
        for position, directory in enumerate(task.context):
            if isinstance(result, Failure):
                self._break(directory, result.reason, result.errno)
            else:
                self._note(directory, result[position])

    def _note(self, directory: Directory, made: Made) -> None:
        if made.reason:
            self._break(directory, made.reason, made.errno)
        elif made.existed and (made.dev, made.ino) in self._owners:
            self._break(directory, COLLIDES, 0)
        else:
            self._owners[made.dev, made.ino] = directory
            if not made.existed:
                self._summary.directories += 1
                self._made[directory] = made.mode

    def _break(self, directory: Directory, reason: str, number: int) -> None:
        self._broken.add(directory)
        self._problem("cannot create directory %s: %s", directory, reason)
        if number in FATAL:
            self._summary.stop(reason)

    def _problem(self, text: str, directory: Directory, reason: str) -> None:
        self._summary.problems += 1
        landing = os.path.join(self._plan.base.shown, *directory.landing())
        self._events.problem(text % (words.quote(landing), reason))

    # ---- the end

    def finish(self, learn: Any, alone: bool = False) -> None:
        """Deepest first, directories get their last mode, and what of their sources is to be kept.

        Those of a run that was stopped too, ``alone``: in this process, since its workers may be gone.
        """
        pool = InProcess(FUNCTIONS, 0, StopFlag()) if alone else self._pool
        if alone:  # a worker that was stopped may have made one without a chance to say so
            self._made.update(dict.fromkeys(self._unsure, 0o777))
        levels: Dict[int, List[Directory]] = {}
        for directory in walk.breadth_first(self._plan.trees):
            if not self.is_broken(directory) and self._needs_finish(directory):
                levels.setdefault(len(directory.landing()), []).append(directory)
        for depth in sorted(levels, reverse=True):
            self._tasks = self._dressings(levels[depth])
            pool.run(lambda worker, ahead: next(self._tasks, None), lambda t, r: self._on_dressed(t, r, learn))
        self._made.clear()
        if alone:
            pool.close()

    def _needs_finish(self, directory: Directory) -> bool:
        made = self._made.get(directory)
        if self._options.kept.anything():
            return made is not None or directory.existing is not None
        return made is not None and directory.mode & made & 0o700 != 0o700  # else as the kernel made it: nearly always

    def _dressings(self, level: Sequence[Directory]) -> Iterator[Task]:
        from mlperf_common.fileio.dressing import EXISTED, Dress, DressTask  # most copies have nothing to finish

        base = self._roots.get(self._plan.base.path, True)
        for group in self._grouped(level, lambda directory: directory.tree):
            root = self._roots.get(group[0].tree.source, False)
            dresses = tuple(
                Dress(
                    d.landing(),
                    d.request().components,
                    d.request().links,
                    d.identity,
                    Seen(d.mode, *d.owner, d.atime_ns, d.identity.mtime_ns),
                    self._made.get(d, EXISTED),
                )
                for d in group
            )
            yield Task("dress", DressTask(self._options, root.key, base.key, dresses), (root.fd, base.fd), group)

    def _on_dressed(self, task: Task, result: Any, learn: Any) -> None:
        failure = isinstance(result, Failure)
        for position, directory in enumerate(task.context):
            reason = result.reason if failure else result.reasons[position]
            if reason and directory not in self._unsure:
                self._problem("cannot finish directory %s: %s", directory, reason)
        if not failure:
            learn(result.learned)

    def sync(self) -> None:
        """If that is wanted, write the directories of the copy to the storage: their names are there then, too."""
        if self._options.fsync:
            self._run(self._syncs(), self._on_synced)

    def _syncs(self) -> Iterator[Task]:
        from mlperf_common.fileio.dressing import SyncTask

        base = self._roots.get(self._plan.base.path, True)
        yield Task("sync", SyncTask(base.key, ((),)), (base.fd,), (self._plan.base.shown or ".",))
        directories = [d for d in walk.breadth_first(self._plan.trees) if not self.is_broken(d) and d.landing()]
        for group in self._grouped(directories, lambda directory: None):
            shown = tuple(os.path.join(self._plan.base.shown, *d.landing()) for d in group)
            yield Task("sync", SyncTask(base.key, tuple(d.landing() for d in group)), (base.fd,), shown)

    def _on_synced(self, task: Task, result: Any) -> None:
        for position, shown in enumerate(task.context):
            reason = result.reason if isinstance(result, Failure) else result[position]
            if reason:
                self._summary.problems += 1
                self._events.problem("cannot fsync directory %s: %s" % (words.quote(shown), reason))

    def check_sources(self) -> None:
        """Compare every source directory with what the walk saw: an entry added meanwhile was not copied."""
        self._run(self._checks(), self._on_checked)

    def _checks(self) -> Iterator[Task]:
        entered = [d for d in walk.breadth_first(self._plan.trees) if d.tree.look.device in (None, d.identity.dev)]
        for group in self._grouped(entered, lambda directory: directory.tree):
            root = self._roots.get(group[0].tree.source, False)
            looks = tuple((d.request().components, d.request().links, d.identity, d.digest) for d in group)
            yield Task("check", Check(root.key, looks), (root.fd,), group)

    def _on_checked(self, task: Task, result: Any) -> None:
        for position, directory in enumerate(task.context):
            reason = result.reason if isinstance(result, Failure) else result[position]
            if reason:
                self._summary.problems += 1
                self._events.problem("%s: %s" % (words.quote(directory.shown()), reason))

    def _grouped(self, directories: Sequence[Directory], key: Any) -> Iterator[Tuple[Directory, ...]]:
        """Neighbours with the same ``key``, in groups for one task each."""
        size = group_size(len(directories), self._pool.width, GROUP)
        group: List[Directory] = []
        for directory in directories:
            if group and (key(directory) is not key(group[0]) or len(group) == size):
                yield tuple(group)
                group = []
            group.append(directory)
        if group:
            yield tuple(group)
