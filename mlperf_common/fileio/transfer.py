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
from typing import TYPE_CHECKING, Optional

from mlperf_common.fileio import walk
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.directories import Directories
from mlperf_common.fileio.facts import NEVER, Options
from mlperf_common.fileio.filework import FileWork
from mlperf_common.fileio.leftovers import Keeper
from mlperf_common.fileio.listing import AnyPool, Roots
from mlperf_common.fileio.progress import format_bytes
from mlperf_common.fileio.recording import Recorder
from mlperf_common.fileio.report import Events, Summary
from mlperf_common.fileio.workers import AllWorkersDied
from mlperf_common.fileio.workload import Work, sort_out

if TYPE_CHECKING:
    from mlperf_common.fileio.sharing import Crew, Lead


def copy(
    plan: CopyPlan,
    pool: AnyPool,
    roots: Roots,
    options: Options,
    events: Events,
    summary: Optional[Summary] = None,
    recorder: Optional[Recorder] = None,
    crew: Optional[Crew] = None,
) -> Summary:
    """Carry out ``plan``; ``summary`` is filled in as it goes, and ``recorder`` with what is hashed meanwhile.

    ``crew``: other ranks take part, of which this one is the leader.
    Raises Interrupted when a signal came, after the workers have stopped and cleaned up.
    """
    summary = summary or Summary()
    _note_plan(summary, plan, options, events)
    directories = Directories(plan, pool, roots, options, summary, events)
    files = FileWork(plan, roots, options, summary, events, recorder or Recorder(False))
    keeper = Keeper(plan, roots, options, summary, events, crew is not None)
    pool.on_tick = files.ticking(keeper.ticking(pool.on_tick))
    lead = _lead(crew, plan, pool, options, summary, events)
    try:
        _check_base(plan, roots)
        _warn_of_space(plan, roots, events)
        directories.make()
        if not summary.stopped:
            keeper.begin()
        _copy_files(sort_out(plan, directories.is_broken), pool, files, lead)
        events.phase("finishing")
        _name_twins(plan, pool, roots, options, files, directories)
        if crew is None or crew.checks_sources:
            directories.check_sources()
        keeper.end()  # before DEST's own times are given
        directories.finish(files.learn)
        directories.sync()
    except AllWorkersDied as exc:
        summary.stop(str(exc))
        _give_up(directories, files, keeper, lead)
        if lead is not None:  # the other ranks wait for this one
            raise
    except BaseException:
        pool.abort()
        _give_up(directories, files, keeper, lead)
        raise
    finally:
        files.close()
        keeper.end()
    summary.not_tried = max(0, len(plan.files) + len(plan.links) + len(plan.missing) - summary.tried())
    return summary


def _give_up(directories: Directories, files: FileWork, keeper: Keeper, lead: Optional[Lead]) -> None:
    """Nothing is left of what was under way; the directories that are there get their last mode."""
    files.close()
    if lead is not None:
        lead.abandon(files)
    keeper.end()
    directories.finish(files.learn, alone=True)


def _note_plan(summary: Summary, plan: CopyPlan, options: Options, events: Events) -> None:
    """What is known before anything is copied."""
    summary.unchanged = plan.unchanged
    summary.split = 0 if options.kept.links else plan.shared()
    summary.never_direct = options.direct == NEVER
    for source, destination in plan.missing:
        summary.failed += 1
        events.failed(source, destination, os.strerror(errno.ENOENT))


def _copy_files(work: Work, pool: AnyPool, files: FileWork, lead: Optional[Lead]) -> None:
    if lead is not None:
        lead.carry_out(work, files, pool)
    else:
        files.add(work)
        pool.run(files.next_task, files.on_result)


def _lead(
    crew: Optional[Crew], plan: CopyPlan, pool: AnyPool, options: Options, summary: Summary, events: Events
) -> Optional[Lead]:
    """The leader's part, where there are other ranks; they are looked at whenever the pool looks at the clock."""
    if crew is None:
        return None
    from mlperf_common.fileio.sharing import Lead  # most copies are made by one process and its workers

    check, show = crew.check, pool.on_tick

    def tick() -> None:
        check()
        show()

    pool.on_tick = tick
    return Lead(crew, plan, options, summary, events)


def _warn_of_space(plan: CopyPlan, roots: Roots, events: Events) -> None:
    """Warn where there seems to be too little room: clones, compression and FUSE make it a guess (statvfs(3))."""
    room = os.fstatvfs(roots.get(plan.base.path, True).fd)
    free, needed = room.f_bavail * room.f_frsize, plan.allocated()
    if room.f_blocks > 0 and needed > free:
        events.warning(
            "the files take %s, %s are free at the destination" % (format_bytes(needed), format_bytes(free))
        )


def _name_twins(
    plan: CopyPlan, pool: AnyPool, roots: Roots, options: Options, files: FileWork, directories: Directories
) -> None:
    """Further names for what has been copied; those that cannot be had are copied after all."""
    if plan.families:
        from mlperf_common.fileio.naming import Twins  # most copies keep no hard links

        twins = Twins(plan, roots, options, files, directories)
        pool.run(twins.next_task, twins.on_result)
        if files.take_refused(twins.refused):
            pool.run(files.next_task, files.on_result)


def _check_base(plan: CopyPlan, roots: Roots) -> None:
    """Everything lands below one descriptor: it must be the directory that the plan looked at."""
    now = walk.identity_of(os.fstat(roots.get(plan.base.path, True).fd))
    if not now.is_same(plan.base.identity):
        raise OSError(errno.ESTALE, "another directory has taken its place since it was looked at", plan.base.path)
