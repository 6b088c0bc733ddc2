# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The fastmd5 command line: arguments -> list of files -> one line a chunk on stdout, in an order that is always the
same; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import errno
import os
import time
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Union

from mlperf_common import __version__
from mlperf_common.fileio import command, direct_io, joining, manifest, session
from mlperf_common.fileio.hashplan import HashEvents
from mlperf_common.fileio.progress import counted, format_bytes, format_rate, format_seconds
from mlperf_common.fileio.words import quote

if TYPE_CHECKING:
    from mlperf_common.fileio.checksum import HashSummary
    from mlperf_common.fileio.hashplan import Found
    from mlperf_common.fileio.hashtasks import Unread
    from mlperf_common.fileio.listing import AnyPool, Roots
    from mlperf_common.fileio.manifest import Chunk
    from mlperf_common.fileio.walk import ListDirectories

PROGRAM = "fastmd5"

USAGE = """fastmd5 [OPTION]... PATH...
       fastmd5 [OPTION]... -c [MANIFEST]...
       fastmd5 [OPTION]... --compare SOURCE DEST"""

DESCRIPTION = """Print the MD5 of each GiB of files, and of all files below directories, in an order that is always the
same. With -c check such lines; with --compare compare two trees byte by byte."""

FLUSH_SECONDS = 1.0  # what is known goes to a reader that waits at least this often


def make_parser() -> command.Parser:
    """The options of fastmd5. Each phrase fits its line; README.md and the man page say more."""
    parser = command.Parser(PROGRAM, version=__version__, usage=USAGE, description=DESCRIPTION)
    add = parser.add_argument_group("what is read").add_argument
    add("--skip-special", action="store_true", help="leave out FIFOs, sockets and devices")
    add("-P", "--no-dereference", dest="follow", action="store_false", help="take symbolic links for links")
    add("-L", "--dereference", dest="follow", action="store_true", default=True, help="follow symbolic links (default)")
    add("-C", "--directory", metavar="DIR", action=command.Once, help="names are relative to DIR, as if run there")
    group = parser.add_argument_group("how")
    session.add_pool_options(group, "bytes at a time; divides 1G (default: 8M)", _buffer_size)
    joining.add_options(group, (joining.JOB,), "where ranks meet (default: working directory)")
    group = parser.add_argument_group("what is said")
    group.add_argument("-z", "--zero", action="store_true", help="lines end with NUL, nothing is escaped")
    group.add_argument("--json", action="store_true", help="one JSON object a line")
    group.add_argument("-q", "--quiet", action="store_true", help="nothing but errors and warnings; no OK lines")
    session.add_progress_option(group)
    add = parser.add_argument_group("listing").add_argument
    add("--all", action="store_true", help="lines for empty files, directories, links, too")
    add = parser.add_argument_group("checking").add_argument
    add("-c", "--check", action="store_true", help="check what MANIFESTs (default: stdin) name")
    add("--status", action="store_true", help="print nothing: the exit status tells")
    add("--ignore-missing", action="store_true", help="files that are not there do not matter")
    add("--strict", action="store_true", help="exit with 1 for malformed lines")
    add("-w", "--warn", action="store_true", help="name each malformed line")
    add("--extra", action="store_true", help="report what is there and no line names")
    add = parser.add_argument_group("comparing").add_argument
    add("--compare", action="store_true", help="compare SOURCE and DEST: names, kinds, bytes")
    add("--metadata", action="store_true", help="compare mode, owner and times, too")
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
    _check_options(parser, args)
    session.settle_workers(PROGRAM, args)
    joining.settle_meeting(args, "")
    if args.compare:
        from mlperf_common.fileio import md5compare

        return md5compare.run(args)
    if args.check:
        from mlperf_common.fileio import md5check

        return md5check.run(args)
    from mlperf_common.fileio import hashtasks

    operands = args.operands
    if args.directory is not None:
        operands = enter(args.directory, operands)
    with session.open_pool(PROGRAM, args, hashtasks.FUNCTIONS, [operand or "." for operand in operands]) as pool:
        return _run(args, operands, pool) if args.distributed is None else _run_as_rank(args, operands, pool)


_OF_CHECK = ("status", "ignore_missing", "strict", "warn", "extra")


def _check_options(parser: command.Parser, args: argparse.Namespace) -> None:
    for name in _OF_CHECK:
        if getattr(args, name) and not args.check:
            parser.error("--%s is meaningful only with --check (-c)" % name.replace("_", "-"))
    joining.refuse_conflicts(parser, args, ("check",))
    if args.metadata and not args.compare:
        parser.error("--metadata is meaningful only with --compare")
    for one, other in (("check", "compare"), ("all", "check"), ("all", "compare"), ("zero", "json")):
        if getattr(args, one) and getattr(args, other):
            parser.error("cannot combine --%s and --%s" % (one, other))
    if args.compare and (args.zero or args.json):
        parser.error("cannot combine --compare and --%s" % ("zero" if args.zero else "json"))
    if args.compare and len(args.operands) != 2:
        parser.error("--compare needs SOURCE and DEST")
    if not args.operands and not args.check:
        parser.error("missing file operand")


def enter(directory: str, operands: Sequence[str]) -> List[str]:
    """Go to ``directory``; the operands relative to it, in one spelling: "" is the directory itself.

    A relative operand is below it; an absolute one must be. Raises OSError.
    """
    os.chdir(directory)
    return [_relative(operand, directory) for operand in operands]


def _relative(operand: str, directory: str) -> str:
    if not operand:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), operand)
    parts = [part for part in operand.split("/") if part not in ("", ".")]
    if not operand.startswith("/") and ".." not in parts:
        return "/".join(parts)
    if os.path.exists(operand) and os.path.samefile(operand, "."):
        return ""
    # By the kernel's own idea of the way: a ".." after a link leads elsewhere than the words say. The last name stays
    # as it is, since it may be a link that is meant itself.
    above, name = os.path.split(operand.rstrip("/"))
    at = os.path.realpath(operand) if name in ("", "..") else os.path.join(os.path.realpath(above or "."), name)
    relative = os.path.relpath(at, os.path.realpath("."))
    if relative == ".." or relative.startswith("../"):
        raise OSError(errno.EINVAL, "is not below %s (-C)" % quote(directory), operand)
    return relative


def _run(args: argparse.Namespace, operands: Sequence[str], pool: AnyPool) -> int:
    from mlperf_common.fileio.checksum import HashSummary
    from mlperf_common.fileio.listing import Roots

    started = time.monotonic()
    console = _Console(args)
    roots = Roots(pool)
    summary = HashSummary()
    with console.watch(roots, "the list is not complete"):
        _hash(args, operands, pool, roots, console, summary)
    command.stdout().flush()  # an error of it is the last line then
    console.conclude(summary, time.monotonic() - started)
    return 0 if summary.is_complete() else 1


def _hash(
    args: argparse.Namespace,
    operands: Sequence[str],
    pool: AnyPool,
    roots: Roots,
    console: _Console,
    summary: HashSummary,
) -> None:
    from mlperf_common.fileio import checksum
    from mlperf_common.fileio.digest import DigestRefused
    from mlperf_common.fileio.listing import PoolLister
    from mlperf_common.fileio.workers import AllWorkersDied

    try:
        lister = PoolLister(pool, roots)
        console.plan(pool, lister.found)
        found = _find(args, operands, lister, console)
        console.follow(pool, lambda: (found.bytes, summary.files, found.files))
        checksum.hash_files(found, pool, roots, console, summary, cached=True)
    except (DigestRefused, AllWorkersDied) as exc:
        console.problem(str(exc))
        summary.problems += 1


def _find(args: argparse.Namespace, operands: Sequence[str], lister: ListDirectories, console: _Console) -> Found:
    from mlperf_common.fileio import hashplan

    wanted = hashplan.Wanted(args.skip_special, args.all, args.follow)
    looked = [(operand, _stat(operand or ".", args.follow)) for operand in operands]
    return hashplan.find(looked, lister, console, wanted)


def _run_as_rank(args: argparse.Namespace, operands: Sequence[str], pool: AnyPool) -> int:
    """The same as one of several ranks: rank 0 finds what is to be hashed, and has the lines."""
    from mlperf_common.fileio import together
    from mlperf_common.fileio.checksum import HashSummary
    from mlperf_common.fileio.listing import Roots

    started = time.monotonic()
    console = _Console(args)
    roots, summary = Roots(pool), HashSummary()

    def find(lister: Any) -> Found:
        console.plan(pool, lister.found)
        return _find(args, operands, lister, console)

    def follow(found: Optional[Found], own: HashSummary) -> None:
        size, files = (found.bytes, found.files) if found is not None else (0, 0)
        console.follow(pool, lambda: (size, own.files, files))

    def body(comm: Any) -> int:
        console.join(comm)
        with console.watch(roots, "the list is not complete"):
            complete = together.list_files(comm, args.meeting, pool, roots, find, console, summary, follow)
        if comm.rank == 0:
            command.stdout().flush()
            console.conclude(summary, time.monotonic() - started)
        return 0 if complete else 1

    return together.run(PROGRAM, args, "list", [operand or "." for operand in operands], body)


def _stat(path: str, follow: bool) -> Union[os.stat_result, OSError]:
    try:
        return os.stat(path, follow_symlinks=follow)
    except OSError as exc:
        return exc


def line_format(args: argparse.Namespace) -> Callable[[str, int, int, str], bytes]:
    """How lines are written."""
    return manifest.format_zero if args.zero else manifest.format_json if args.json else manifest.format_line


class _Console(session.Console, HashEvents):
    """Lines of chunks on stdout, all other lines on stderr."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(PROGRAM, args.quiet, session.display_mode(args, lists=True), "hashing")
        self._flushed = time.monotonic()
        self._all = args.all
        self._format = line_format(args)

    def hashed(self, path: str, chunks: Sequence[Chunk]) -> None:
        out = command.stdout()
        for offset, size, digest in chunks or ([(0, 0, manifest.NOTHING)] if self._all else []):
            out.write(self._format(path, offset, size, digest))
        self._flush_now_and_then()

    def failed(self, path: str, why: Unread) -> None:
        self.say("cannot hash %s: %s" % (quote(path), why.reason))

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
