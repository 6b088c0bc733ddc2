# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""fastmd5 --compare: a line on stdout for each difference, counts on stderr, an exit status."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any, Sequence

from mlperf_common.fileio import command, comparing, pairtasks, session, together
from mlperf_common.fileio.comparing import EXTRA, KIND, MISSING, SIZE, Counts, Request
from mlperf_common.fileio.listing import AnyPool, PoolLister, Roots
from mlperf_common.fileio.pairtasks import CONTENT, METADATA, TARGET, TROUBLE
from mlperf_common.fileio.progress import counted, format_bytes, format_rate, format_seconds
from mlperf_common.fileio.words import quote
from mlperf_common.fileio.workers import AllWorkersDied

PROGRAM = "fastmd5"

WORDS = {
    MISSING: "missing in DEST",
    EXTRA: "extra in DEST",
    KIND: "type differs",
    SIZE: "size differs",
    CONTENT: "content differs",
    TARGET: "link target differs",
    METADATA: "metadata differs",
}


def run(args: argparse.Namespace) -> int:
    """Compare the two operands; the exit status."""
    if args.directory is not None:
        os.chdir(args.directory)
    started = time.monotonic()
    with session.open_pool(PROGRAM, args, pairtasks.FUNCTIONS, args.operands) as pool:
        console = _Console(args)
        roots = Roots(pool)
        counts = Counts()
        source, destination = args.operands
        request = Request(source, destination, args.follow, args.metadata, args.skip_special)
        if args.distributed is not None:
            return _run_as_rank(args, request, pool, console, started)
        console.follow(pool, lambda: (None, counts.files, None))
        with console.watch(roots, "the comparison is not complete"):
            try:
                comparing.compare(request, pool, roots, PoolLister(pool, roots), console, counts)
            except AllWorkersDied as exc:
                console.problem(str(exc))
                counts.problems += 1
    command.stdout().flush()
    console.conclude(counts, time.monotonic() - started)
    return 0 if counts.is_identical() else 1


def _run_as_rank(args: argparse.Namespace, request: Request, pool: AnyPool, console: _Console, started: float) -> int:
    """The same as one of several ranks: rank 0 says what differs."""
    roots, counts = Roots(pool), Counts()

    def follow(lister: Any, own: Counts) -> None:
        if lister is not None:
            console.plan(pool, lister.found)
        else:
            console.follow(pool, lambda: (counts.bytes_total, own.read, counts.files_total))

    def body(comm: Any) -> int:
        console.join(comm)
        with console.watch(roots, "the comparison is not complete"):
            identical = together.compare(comm, args.meeting, pool, roots, request, console, counts, follow)
        if comm.rank == 0:
            command.stdout().flush()
            console.conclude(counts, time.monotonic() - started)
        return 0 if identical else 1

    return together.run(PROGRAM, args, "comparison", args.operands, body)


class _Console(session.Console, comparing.Events):
    """Differences on stdout, all else on stderr."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(PROGRAM, args.quiet, session.display_mode(args), "comparing")
        self._operands: Sequence[str] = args.operands

    def differs(self, path: str, kind: str, text: str) -> None:
        shown = quote(path or ".")
        if kind == TROUBLE:
            self.say("cannot compare %s: %s" % (shown, text))
            return
        line = "%s: %s%s\n" % (WORDS[kind], shown, " (%s)" % text if text else "")
        command.stdout().write(os.fsencode(line))

    def conclude(self, counts: Counts, seconds: float) -> None:
        """The last line: what was compared, and how many differences there are of each kind."""
        done = "%s, %s, %s compared, %s in %s, %s" % (
            counted(counts.files, "file"),
            counted(counts.directories, "directory"),
            counted(counts.links, "link"),
            format_bytes(counts.bytes),
            format_seconds(seconds),
            format_rate(counts.bytes, seconds),
        )
        if counts.is_identical():
            if not self.quiet:
                self.say("identical: " + done)
            return
        words = ["%s: %d" % (WORDS[kind], number) for kind, number in counts.differences.items()]
        if counts.problems:
            words.append("not compared: %d" % counts.problems)
        self.say("NOT IDENTICAL: %s; %s" % (", ".join(words), done))
