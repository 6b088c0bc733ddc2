# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""fastmd5 -c: manifests read back, a line on stdout for each path, counts on stderr, an exit status."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, BinaryIO, Dict, Iterator, Set

from mlperf_common.fileio import checking, command, hashtasks, manifest, session
from mlperf_common.fileio.checking import CHANGED, DIFFERS, MISSING, OK, UNREADABLE, Expected, Verdict
from mlperf_common.fileio.checksum import HashSummary, hash_files
from mlperf_common.fileio.digest import DigestRefused
from mlperf_common.fileio.hashplan import Found, HashEvents, Wanted, find
from mlperf_common.fileio.listing import PoolLister, Roots
from mlperf_common.fileio.manifest import ManifestError
from mlperf_common.fileio.progress import counted
from mlperf_common.fileio.words import quote
from mlperf_common.fileio.workers import AllWorkersDied

if TYPE_CHECKING:
    from mlperf_common.fileio.listing import AnyPool

PROGRAM = "fastmd5"
EXTRA = "extra"


def run(args: argparse.Namespace) -> int:
    """Check the manifests that the operands name; the exit status."""
    # Before -C: the manifests are where the caller is.
    streams = [(name, _open(name)) for name in args.operands or ["-"]]
    if args.directory is not None:
        os.chdir(args.directory)
    # A directory makes a pool of workers: how much there is to check is not known.
    with session.open_pool(PROGRAM, args, hashtasks.FUNCTIONS, ["."]) as pool:
        roots = Roots(pool)
        check = _Check(args, pool, roots)
        with check.console.watch(roots, "the check is not complete"):
            for name, stream in streams:
                check.manifest(name, stream)
            if args.extra:
                check.extra()
        return check.conclude()


def _open(name: str) -> BinaryIO:
    # Descriptor 0 and not sys.stdin, which is None where that was closed.
    return open(0, "rb", closefd=False) if name == "-" else open(name, "rb")


class _Check:
    """One run: counts verdicts over all manifests, and prints."""

    def __init__(self, args: argparse.Namespace, pool: AnyPool, roots: Roots) -> None:
        quiet = args.quiet or args.status
        mode = "none" if quiet else session.display_mode(args, lists=True)
        self.console = session.Console(PROGRAM, quiet, mode, "checking")
        self._args = args
        self._pool = pool
        self._roots = roots
        self._counts: Dict[str, int] = dict.fromkeys((OK, DIFFERS, MISSING, UNREADABLE, CHANGED, EXTRA), 0)
        self._ignored = self._malformed = self._troubles = 0
        self._named: Set[str] = set()
        self._is_full = False  # a line of an empty file, a directory or a link: what --all adds

    def manifest(self, name: str, stream: BinaryIO) -> None:
        """Check what one manifest names."""
        shown = quote("standard input" if name == "-" else name)
        parse = manifest.parse_line
        if self._args.zero or self._args.json:
            parse = manifest.parse_zero if self._args.zero else manifest.parse_json
        lines = checking.Manifest(
            stream, parse, b"\0" if self._args.zero else b"\n", lambda number, why: self._bad_line(shown, number, why)
        )
        check = checking.Check(self._seen(lines), self._args.follow, self._judged)
        summary = HashSummary()
        self.console.follow(self._pool, lambda: (None, summary.files, None))
        try:
            hash_files(check, self._pool, self._roots, check, summary)
        except (DigestRefused, AllWorkersDied, ManifestError) as exc:
            self._trouble("%s: %s" % (shown, exc))
        if lines.is_cut:
            self._trouble("%s: its last line has no end: it was cut" % shown)

    def _seen(self, lines: checking.Manifest) -> Iterator[Expected]:
        for expected in lines:
            if self._args.extra:
                self._named.add(os.path.normpath(expected.path))
                self._is_full = self._is_full or expected.size() == 0 or expected.kind() != 0
            yield expected

    def _bad_line(self, shown: str, number: int, why: str) -> None:
        self._malformed += 1
        if self._args.warn:
            self.console.say("%s: line %d: improperly formatted: %s" % (shown, number, why))

    def _trouble(self, line: str) -> None:
        self._troubles += 1
        if not self._args.status:
            self.console.say(line)

    def _judged(self, expected: Expected, verdict: Verdict) -> None:
        if verdict.kind == MISSING and self._args.ignore_missing:
            self._ignored += 1
            return
        self._counts[verdict.kind] += 1
        if verdict.kind != OK:
            self._print(expected.path, "FAILED (%s)" % verdict.text)
        elif not self._args.quiet:
            self._print(expected.path, "OK")

    def _print(self, path: str, words: str) -> None:
        if self._args.status:
            return
        if self._args.zero:
            command.stdout().write(b"%s: %s\0" % (os.fsencode(path), os.fsencode(words)))
        else:
            command.stdout().write(b"%s%s: %s\n" % (*manifest.escape(path), os.fsencode(words)))

    def extra(self) -> None:
        """Report what is here and that no line has named."""
        console = _Extra(self.console)
        wanted = Wanted(self._args.skip_special, self._is_full, self._args.follow)
        found: Found = find([("", os.stat("."))], PoolLister(self._pool, self._roots), console, wanted)
        self._troubles += found.problems
        for source in found.sources():
            # Without --all a manifest has no line for an empty file.
            unnamed = source.shown not in self._named and (self._is_full or source.size)
            if unnamed:
                self._counts[EXTRA] += 1
                self._print(source.shown, "EXTRA")

    def conclude(self) -> int:
        """The last lines, and the exit status."""
        command.stdout().flush()
        counts = self._counts
        failed = sum(number for kind, number in counts.items() if kind != OK)
        if not counts[OK] and not failed and not self._troubles:
            self._trouble("nothing was verified")
        strict = self._args.strict and self._malformed
        if self._args.status:
            return 1 if failed or self._troubles or strict else 0
        if self._malformed:
            self.console.say("warning: %s improperly formatted" % _are(self._malformed, "line"))
        words = ["%d OK" % counts[OK]] + ["%d %s" % (n, kind) for kind, n in counts.items() if kind != OK and n]
        if self._ignored:
            words.append("%d missing ones ignored" % self._ignored)
        line = "%s checked: %s" % (counted(counts[OK] + failed - counts[EXTRA], "path"), ", ".join(words))
        if failed or self._troubles or strict:
            self.console.say("FAILED: " + line)
            return 1
        if not self.console.quiet:
            self.console.say(line)
        return 0


def _are(number: int, noun: str) -> str:
    return "%s %s" % (counted(number, noun), "is" if number == 1 else "are")


class _Extra(HashEvents):
    """Passes on what a listing says."""

    def __init__(self, console: session.Console) -> None:
        self._console = console

    def problem(self, line: str) -> None:
        self._console.problem(line)

    def skipped(self, path: str, kind: str) -> None:
        self._console.skipped(path, kind)
