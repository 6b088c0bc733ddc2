# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""In the parent: files that had several names get them again, once the first of them is there.

Promises: a name is given only to a file that this run copied, or that stood there unchanged; the others fail with it.
"""

from __future__ import annotations

import os
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.directories import Directories
from mlperf_common.fileio.facts import Options
from mlperf_common.fileio.filework import FileWork, place_of
from mlperf_common.fileio.linktasks import COPY, TwinBatch, TwinResult
from mlperf_common.fileio.listing import Roots
from mlperf_common.fileio.twins import Family, Twin
from mlperf_common.fileio.walk import Directory
from mlperf_common.fileio.words import quote
from mlperf_common.fileio.workers import Failure, Task

# Names in one task, and bytes of names and of the directories that lead to them: a message is at most 32 KiB.
TWINS = 64
TWIN_BYTES = 16 << 10


class Twins:
    """The further names of one plan. ``refused`` has those that are to be copied instead."""

    def __init__(
        self, plan: CopyPlan, roots: Roots, options: Options, files: FileWork, directories: Directories
    ) -> None:
        self.refused: List[Twin] = []
        self._options = options
        self._files = files
        self._directories = directories
        self._base = roots.get(plan.base.path, True)
        self._standing = {f.name for f in plan.loose if f.standing is not None}
        self._tasks = self._cut(plan.families)

    def next_task(self, worker: int, ahead: bool) -> Optional[Task]:
        """The next names; None when there are no more."""
        return next(self._tasks, None)

    def _cut(self, families: Sequence[Family]) -> Iterator[Task]:
        twins: List[Tuple[Twin, Twin]] = []
        names: List[Tuple[int, Tuple[str, ...], str, Tuple[str, ...], str, bool]] = []
        size = 0
        for leader, twin, bytes_of_file in self._due(families):
            name = (bytes_of_file, _landing(leader), leader.name, _landing(twin), twin.name, self._replaces(twin))
            cost = 64 + sum(len(os.fsencode(part)) + 4 for part in (*name[1], name[2], *name[3], name[4]))
            if names and (len(names) == TWINS or size + cost > TWIN_BYTES):
                yield self._task(twins, names)
                twins, names, size = [], [], 0
            twins.append((twin, leader))
            names.append(name)
            size += cost
        if names:
            yield self._task(twins, names)

    def _due(self, families: Sequence[Family]) -> Iterator[Tuple[Twin, Twin, int]]:
        """(the name that is there, the one to be given, bytes); what cannot be given fails here."""
        for family in families:
            for twin in family.followers:
                if place_of(family.leader) in self._files.missing or self._is_broken(family.leader):
                    self._fail(twin, "another name of the same file, %s, was not copied" % self._shown(family), 0)
                elif not self._is_broken(twin):
                    yield family.leader, twin, family.size

    def _is_broken(self, twin: Twin) -> bool:
        return twin.directory is not None and self._directories.is_broken(twin.directory)

    def _shown(self, family: Family) -> str:
        return quote(self._files.paths(family.leader)[0])

    def _replaces(self, twin: Twin) -> bool:
        if twin.directory is None:
            return twin.name in self._standing
        return os.fsencode(twin.name) in (twin.directory.existing or ())

    def _task(self, twins: List[Tuple[Twin, Twin]], names: Sequence[Any]) -> Task:
        return Task("twins", TwinBatch(self._options, self._base.key, tuple(names)), (self._base.fd,), twins)

    def on_result(self, task: Task, result: Any) -> None:
        """Names have been given, or not."""
        twins: List[Tuple[Twin, Twin]] = task.context
        if isinstance(result, Failure):
            for twin, _ in twins:
                self._files.remove_temporaries(twin.directory, [twin.name], result)
                self._fail(twin, result.reason, result.errno)
            return
        outcome: TwinResult = result
        self._files.learn(outcome.learned)
        for (twin, leader), (number, reason) in zip(twins, outcome.outcomes):
            if not reason:
                self._files.named(twin, leader)
            elif reason == COPY:
                self.refused.append(twin)
            else:
                self._fail(twin, reason, number)

    def _fail(self, twin: Twin, reason: str, number: int) -> None:
        self._files.fail(twin, self._files.paths(twin), reason, number)


def _landing(twin: Twin) -> Tuple[str, ...]:
    return twin.directory.landing() if isinstance(twin.directory, Directory) else ()
