# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The fastmd5 command line: arguments -> list of files -> one line a chunk on stdout, in an order that is always the
same; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, Union

from mlperf_common import __version__
from mlperf_common.fileio import command, direct_io, manifest, session
from mlperf_common.fileio.hashplan import HashEvents
from mlperf_common.fileio.progress import counted, format_bytes, format_rate, format_seconds
from mlperf_common.fileio.stopping import Interrupted
from mlperf_common.fileio.words import quote

if TYPE_CHECKING:
    from mlperf_common.fileio.checksum import HashSummary
    from mlperf_common.fileio.hashplan import Found
    from mlperf_common.fileio.hashtasks import Chunk
    from mlperf_common.fileio.listing import AnyPool, Roots

PROGRAM = "fastmd5"

USAGE = "fastmd5 [OPTION]... PATH..."

DESCRIPTION = """Print the MD5 of each GiB of files, and of all files below directories, as lines of path, offset, size
and digest, separated by tabs. The order does not depend on the workers."""

FLUSH_SECONDS = 1.0  # what is known goes to a reader that waits at least this often


def make_parser() -> command.Parser:
    """The options of fastmd5."""
    parser = command.Parser(PROGRAM, version=__version__, usage=USAGE, description=DESCRIPTION)
    session.add_pool_options(
        parser,
        "bytes that a worker reads at a time, K, M or G may follow; a multiple of 2M that divides 1G evenly "
        "(default: 8M)",
        _buffer_size,
    )
    parser.add_argument(
        "--skip-special", action="store_true", help="leave out FIFOs, sockets and devices, with a warning"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors and warnings only on stderr")
    return parser


def _buffer_size(text: str) -> int:
    size = command.buffer_size(text)
    if size % direct_io.BUFFER_ALIGN or manifest.CHUNK_SIZE % size:
        raise argparse.ArgumentTypeError("not a multiple of 2M that divides 1G evenly: %s" % quote(text))
    return size


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run fastmd5 on ``argv`` (default: the command line's) and return its exit status: 0, 1 or 2."""
    return command.run(PROGRAM, _body, argv)


def _body(argv: Sequence[str]) -> int:
    parser = make_parser()
    args = command.parse(parser, argv)
    if not args.operands:
        parser.error("missing file operand")
    session.settle_workers(PROGRAM, args)
    from mlperf_common.fileio import hashtasks

    with session.open_pool(PROGRAM, args, hashtasks.FUNCTIONS, args.operands) as pool:
        return _run(args, pool)


def _run(args: argparse.Namespace, pool: AnyPool) -> int:
    from mlperf_common.fileio.checksum import HashSummary
    from mlperf_common.fileio.listing import Roots

    started = time.monotonic()
    console = _Console(args)
    roots = Roots(pool)
    summary = HashSummary()
    try:
        _hash(args, pool, roots, console, summary)
    except Interrupted as exc:
        console.interrupted(exc, "the list is not complete")
        raise
    finally:
        console.clear()
        roots.close()
    console.conclude(summary, time.monotonic() - started)
    return 0 if summary.is_complete() else 1


def _hash(args: argparse.Namespace, pool: AnyPool, roots: Roots, console: _Console, summary: HashSummary) -> None:
    from mlperf_common.fileio import checksum, hashplan
    from mlperf_common.fileio.hashtasks import DigestRefused
    from mlperf_common.fileio.listing import PoolLister
    from mlperf_common.fileio.workers import AllWorkersDied

    try:
        found: Found = hashplan.find(_look(args.operands), PoolLister(pool, roots), console, args.skip_special)
        console.follow(pool, lambda: (found.bytes, summary.files, found.files))
        checksum.hash_files(found, pool, roots, console, summary)
    except (DigestRefused, AllWorkersDied) as exc:
        console.problem(str(exc))
        summary.problems += 1


def _look(operands: Sequence[str]) -> List[Tuple[str, Union[os.stat_result, OSError]]]:
    return [(operand, _stat(operand)) for operand in operands]


def _stat(path: str) -> Union[os.stat_result, OSError]:
    try:
        return os.stat(path)
    except OSError as exc:
        return exc


class _Console(session.Console, HashEvents):
    """Lines of chunks on stdout, all other lines on stderr."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(PROGRAM, args.quiet, "none" if args.quiet else "auto", "hashing")
        self._flushed = time.monotonic()

    def hashed(self, path: str, chunks: Sequence[Chunk]) -> None:
        out = command.stdout()
        for offset, size, digest in chunks:
            out.write(manifest.format_line(path, offset, size, digest))
        self._flush_now_and_then()

    def failed(self, path: str, reason: str) -> None:
        self.say("cannot hash %s: %s" % (quote(path), reason))

    def _flush_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            command.stdout().flush()
            self._flushed = now

    def follow(self, pool: AnyPool, counts: Any) -> None:
        super().follow(pool, counts)
        show = pool.on_tick

        def tick() -> None:
            self._flush_now_and_then()
            show()

        pool.on_tick = tick

    def conclude(self, summary: HashSummary, seconds: float) -> None:
        """The last line: what was done, and first of all whether anything is missing."""
        done = "%s, %s in %s, %s, io=%s" % (
            counted(summary.files, "file"),
            format_bytes(summary.bytes),
            format_seconds(seconds),
            format_rate(summary.bytes, seconds),
            summary.io_mode(),
        )
        if not summary.is_complete():
            missing = summary.files_total - summary.files
            other = ", %s" % counted(summary.problems, "other problem") if summary.problems else ""
            self.say("FAILED: %d of %s not hashed%s; %s" % (missing, counted(summary.files_total, "file"), other, done))
        elif not self.quiet:
            self.say(done)
