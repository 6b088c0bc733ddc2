# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What the command lines that work on a pool have in common: its opening and end, and the lines on stderr.

Promises: the workers end with the run, whatever ends it; a line never runs into the progress display.

Does not: decide what is an error, or know what a task does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import stat
import sys
from contextlib import contextmanager

from mlperf_common.fileio import command
from mlperf_common.fileio.progress import Progress
from mlperf_common.fileio.stopping import Interrupted, StopFlag
from mlperf_common.fileio.words import quote

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Optional, Sequence

    from mlperf_common.fileio.listing import AnyPool, Roots
    from mlperf_common.fileio.pacing import Pace

DEFAULT_BUFFER = 8 << 20  # bytes

# Plain files below both of these are done in this process: forking workers takes longer.
FEW_FILES = 64
FEW_BYTES = 64 << 20


def add_pool_options(group: Any, buffer_help: str, buffer_type: Callable[[str], int]) -> None:
    """-n, -b, --bwlimit."""
    add = group.add_argument
    add(
        "-n",
        "--num-workers",
        "--num-threads",
        metavar="N",
        type=command.worker_count,
        default=command.DEFAULT_WORKERS,
        help="worker processes, at most %d (default: %%(default)s)" % command.MAX_WORKERS,
    )
    add("-b", "--buffer-size", metavar="SIZE", type=buffer_type, default=DEFAULT_BUFFER, help=buffer_help)
    add(
        "--bwlimit",
        metavar="RATE",
        type=command.buffer_size,
        action=command.Once,
        help="bytes a second, of all workers together",
    )


def add_progress_option(group: Any) -> None:
    """--progress."""
    group.add_argument(
        "--progress",
        metavar="HOW",
        choices=("auto", "bar", "plain", "none"),
        default="auto",
        help="auto (default), bar, plain: every 30 s, none",
    )


def settle_workers(program: str, args: argparse.Namespace) -> None:
    """Clamp -n, with a note."""
    args.num_workers, note = command.clamp(args.num_workers, command.MAX_WORKERS, "workers")
    if note:
        command.say(program, note)


@contextmanager
def open_pool(
    program: str, args: argparse.Namespace, functions: Any, operands: Sequence[str]
) -> Iterator[AnyPool]:
    """The workers, and signals that end the run.

    They are forked before anything is listed, so that they never inherit a large plan; few plain files need none.
    """
    stop = StopFlag()
    stop.install()
    command.stdout().stop_flag = stop
    pool = _make_pool(program, args, functions, stop, args.num_workers == 1 or _are_few(operands))
    try:
        yield pool
    except BaseException:
        pool.abort()
        raise
    finally:
        pool.close()


def _make_pool(program: str, args: argparse.Namespace, functions: Any, stop: StopFlag, alone: bool) -> AnyPool:
    from mlperf_common.fileio import workers

    pace = _make_pace(args)
    if alone:
        return workers.InProcess(functions, args.buffer_size, stop, pace)
    # Once, before there are workers: in each of 16 it is 80 calls and 5 ms, and a young directory's names need it.
    importlib.import_module("hashlib")
    pool = workers.Pool(args.num_workers, functions, args.buffer_size, stop, pace)
    if pool.width < args.num_workers:
        command.say(program, "note: workers: %s allows %d" % (pool.limited_by, pool.width))
    return pool if pool.width else workers.InProcess(functions, args.buffer_size, stop, pace)


def _make_pace(args: argparse.Namespace) -> Optional[Pace]:
    """The limit of these workers: of several ranks each has its share."""
    if args.bwlimit is None:
        return None
    from mlperf_common.fileio import pacing

    ranks = 1
    if args.distributed is not None:
        from mlperf_common.distributed import launch

        try:
            ranks = launch.detect(os.environ).world_size
        except launch.LaunchError:  # nothing is copied then, and together.run says why
            pass
    return pacing.Pace(max(1, args.bwlimit // ranks))


def _are_few(operands: Sequence[str]) -> bool:
    if len(operands) > FEW_FILES:
        return False
    total = 0
    for operand in operands:
        try:
            st = os.stat(operand)
        except OSError:  # whoever opens it will say so
            continue
        if stat.S_ISDIR(st.st_mode):
            return False
        total += st.st_size
    return total <= FEW_BYTES


# Of terminals that wrap lines anew when they get narrower, what they put into the environment.
_REFLOWING = ("TMUX", "VTE_VERSION", "KONSOLE_VERSION", "KITTY_WINDOW_ID", "WT_SESSION")


def display_mode(args: argparse.Namespace, lists: bool = False) -> str:
    """How progress is shown; ``lists``: lines go to stdout meanwhile, which on a terminal show enough."""
    if args.quiet or (lists and args.progress == "auto" and os.isatty(1)):
        return "none"
    return str(args.progress)


class Console:
    """Tells the user on stderr what happens: the only place of a run that prints."""

    def __init__(self, program: str, quiet: bool, mode: str, label: str) -> None:
        """``mode`` is as for Progress; ``label`` says what is being done."""
        self.quiet = quiet
        self._program = program
        self._label = label
        reflows = any(name in os.environ for name in _REFLOWING)
        self._progress = Progress(sys.stderr, mode=mode, label=label, reflows=reflows)
        self._moved = 0
        self._comm: Any = None

    def say(self, line: str) -> None:
        """A line, whatever it is."""
        self._progress.clear()
        command.say(self._program, line)

    def problem(self, line: str) -> None:
        """An error that is not of one file."""
        self.say(line)

    def warning(self, line: str) -> None:
        """What was done otherwise than asked, without making the result wrong."""
        self.say("warning: " + line)

    def trace(self, text: str) -> None:
        """Where an unexpected error came from, for whoever wants to know."""
        if text and os.environ.get("FASTCP_DEBUG") == "1":
            self.say(text)

    def skipped(self, path: str, kind: str) -> None:
        """A special file that --skip-special leaves out."""
        self.warning("%s is left out: it is a %s" % (quote(path), kind))

    def clear(self) -> None:
        """Take the progress line away, for what is written to the same terminal now."""
        self._progress.clear()

    def phase(self, label: str) -> None:
        """What is being done from now on."""
        self._progress.label = label

    def plan(self, pool: AnyPool, found: Callable[[], int]) -> None:
        """Show how many entries have been found, until ``follow``."""
        self._progress.start("planning")
        self._tick(pool, lambda: self._progress.found(found()))

    def follow(self, pool: AnyPool, counts: Callable[[], Any]) -> None:
        """Show how far the run is; ``counts()`` gives total bytes, files done, total files."""
        self._progress.start(self._label)

        def tick() -> None:
            total, done, files = counts()
            if self._comm is None:
                self._progress.update(self._moved, total, done, files)
            elif self._comm.rank:
                self._comm.report((self._moved, done))
            else:
                others = self._comm.reported()
                # At the end what the others have done is among the counts, too.
                self._progress.update(self._moved + others[0], total, min(files, done + others[1]), files)

        pool.on_moved = self._count
        self._tick(pool, tick)

    def join(self, comm: Any) -> None:
        """Be one rank of several: the first shows what all of them have done, whenever it looks at the others."""
        self._comm = comm

    def _tick(self, pool: AnyPool, tick: Callable[[], None]) -> None:
        if self._comm is None:
            pool.on_tick = tick
        else:
            self._comm.on_check = tick

    def _count(self, moved: int) -> None:
        self._moved += moved

    @contextmanager
    def watch(self, roots: Roots, rest: str) -> Iterator[None]:
        """The work of a run: at its end the progress line goes and ``roots`` are closed; a signal is told, with what
        that means (``rest``)."""
        try:
            yield
        except Interrupted as exc:
            self.say("stopped by %s; %s" % (signal.Signals(exc.signum).name, rest))
            raise
        finally:
            self._progress.clear()
            roots.close()
