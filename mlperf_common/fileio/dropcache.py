# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The command line of dropcache: have the kernel forget the cached pages of files and trees.

Promises: dirty pages are written first (they would stay otherwise, and nothing is lost either way); every
file that could not be opened, written back or dropped is named; nothing is ever read or changed.

Does not promise that no page is left: the kernel keeps pages that a program has mapped or locked, and another
reader brings them back at any time (posix_fadvise(2): it is advice).
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time

from mlperf_common import __version__
from mlperf_common.fileio import command
from mlperf_common.fileio.words import kind_of, quote, reason_of

TYPE_CHECKING = False  # a name that type checkers know; importing typing would cost 2 ms
if TYPE_CHECKING:
    import argparse
    from typing import List, Optional, Sequence, Tuple

    from mlperf_common.fileio.walk import DirectoryChain

PROGRAM = "dropcache"

# What fdatasync(2) answers where there is nothing to write back: a read-only filesystem cannot hold dirty
# pages, and special ones (/proc) and some network filesystems do not know the call.
_NOTHING_TO_SYNC = (errno.EROFS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run dropcache with these arguments (sys.argv's if None) and return its exit status: 0, 1 or 2."""
    return command.run(PROGRAM, _body, argv)


def drop(descriptor: int) -> int:
    """Drop the cached pages of a regular file that is open as ``descriptor``; returns its size in bytes.

    Raises OSError (fdatasync(2), posix_fadvise(2)). The descriptor may be read-only: Linux writes back
    through it all the same, and whoever made the pages dirty may have closed the file long ago.
    """
    try:
        os.fdatasync(descriptor)
    except OSError as exc:
        if exc.errno not in _NOTHING_TO_SYNC:
            raise
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # a length of 0: to the end
    return os.fstat(descriptor).st_size


def _parser() -> command.Parser:
    parser = command.Parser(
        PROGRAM,
        version=__version__,
        usage="dropcache [OPTION]... PATH...",
        description="Drop the cached pages of files, and of all files below directories. "
        "Dirty pages are written to disk first.",
        epilog="Exit status: 0 if everything was dropped, 1 if not, 2 for a usage error.",
    )
    parser.add_argument(
        "--skip-special", action="store_true", help="leave out FIFOs, sockets and devices, with a warning"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    return parser


def _body(argv: Sequence[str]) -> int:
    parser = _parser()
    options = command.parse(parser, argv)
    if not options.operands:
        parser.error("missing operand")
    run = _Run(options)
    started = time.monotonic()
    for operand in options.operands:
        run.drop_operand(operand)
    run.summarise(time.monotonic() - started)
    return 1 if run.failures else 0


class _Run:
    """One run: drops operand by operand, counts, and says what goes wrong."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._skip_special = options.skip_special
        self._quiet = options.quiet
        self.files = self.bytes = self.failures = 0

    def drop_operand(self, operand: str) -> None:
        """Drop a file, or all files of a tree if all of it can be listed."""
        from mlperf_common.fileio import refusals

        try:
            mode = os.stat(operand).st_mode
            if stat.S_ISDIR(mode):
                self._drop_tree(operand)
            elif stat.S_ISREG(mode):
                self._drop_file(operand, operand)
            elif self._skip_special:
                self._warn_of([(operand, kind_of(mode))])
            else:
                self._fail(refusals.SPECIAL % kind_of(mode) % quote(operand))
        except OSError as exc:
            self._fail(f"cannot access {quote(operand)}: {reason_of(exc)}")
        except (refusals.UnreadableEntries, refusals.CopyArgumentError) as exc:
            self._fail(*exc.lines)

    def _drop_tree(self, root: str) -> None:
        from mlperf_common.fileio import copyplan, walk

        skipped: List[Tuple[str, str]] = []
        names = copyplan.list_relative_files(root, self._skip_special, skipped=skipped)
        self._warn_of(skipped)
        # Component by component, since a path may be longer than the kernel takes (PATH_MAX).
        chain = walk.open_chain(walk.open_root(root, False), False)
        try:
            for name in names:
                *above, last = name.split("/")
                self._drop_file(os.path.join(root, name), last, chain, above)
        finally:
            chain.close()

    def _drop_file(
        self, shown: str, name: str, chain: Optional[DirectoryChain] = None, above: Sequence[str] = ()
    ) -> None:
        try:
            directory = chain.open(above, range(len(above))) if chain else None
            # O_NONBLOCK: what has become a FIFO since it was listed must not hang us.
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            try:
                _require_regular(fd)
                self.bytes += drop(fd)
            finally:
                os.close(fd)
            self.files += 1
        except OSError as exc:
            self._fail(f"cannot drop {quote(shown)}: {reason_of(exc)}")

    def _warn_of(self, skipped: Sequence[Tuple[str, str]]) -> None:
        for path, kind in skipped:
            command.say(PROGRAM, f"warning: skipping {kind} {quote(path)}")

    def _fail(self, *lines: str) -> None:
        self.failures += 1
        for line in lines:
            command.say(PROGRAM, line)

    def summarise(self, seconds: float) -> None:
        """The last line: what was done, and how many things were not."""
        from mlperf_common.fileio.progress import counted, format_bytes, format_seconds

        files = f"{counted(self.files, 'file')} of {format_bytes(self.bytes)}"
        done = f"dropped {files} in {format_seconds(seconds)}"
        if self.failures:
            command.say(PROGRAM, f"{done}; {self.failures} failed")
        elif not self._quiet:
            command.say(PROGRAM, done)


def _require_regular(descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is a {kind_of(mode)}, not a regular file")


if __name__ == "__main__":
    sys.exit(main())
