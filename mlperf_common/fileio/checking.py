# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""A manifest read back and held against the files that it names.

Promises: every line is either checked or counted as malformed; a manifest that was cut within a line, or within the
chunks of a file, is noticed; missing, unreadable, changed and mismatched are told apart. Lines are read as they are
needed: memory does not grow with their number.

Not promised: that a cut between two files is noticed; what a manifest does not name is ``extra``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from typing import BinaryIO, Callable, Deque, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio import words
from mlperf_common.fileio.direct_io import BLOCK_SIZE
from mlperf_common.fileio.hashplan import HashEvents, Source, link_outcome
from mlperf_common.fileio.hashtasks import Outcome, Unread, unread
from mlperf_common.fileio.manifest import CHUNK_SIZE, DIRECTORY, LINK, NOTHING, Chunk, Line, ManifestError

LONGEST_LINE = 1 << 20  # bytes; a path is at most 4096, escaped twice that


class Expected(NamedTuple):
    """What a manifest says of one path: the chunks of a file, or the one line of a directory or link."""

    path: str
    chunks: List[Chunk]

    def kind(self) -> int:
        """DIRECTORY, LINK, or 0: a file."""
        return min(0, self.chunks[0][0])

    def size(self) -> int:
        """The bytes of all chunks."""
        return sum(size for _, size, _ in self.chunks)

    def chunk_size(self) -> int:
        """The size of its chunks: that of the first, where there are more."""
        return self.chunks[0][1] if len(self.chunks) > 1 else max(CHUNK_SIZE, self.size())


class Manifest:
    """One manifest, read line by line. ``malformed`` is called with (line number, why) of a line that is none."""

    def __init__(
        self, stream: BinaryIO, parse: Callable[[bytes], Line], end: bytes, malformed: Callable[[int, str], None]
    ) -> None:
        self.is_cut = False  # its last line has no end
        self._stream = stream
        self._parse = parse
        self._end = end
        self._malformed = malformed

    def __iter__(self) -> Iterator[Expected]:
        """What it says of each path, in its order; the lines of a path stand together."""
        path, first = "", 0
        chunks: List[Chunk] = []
        for number, raw in enumerate(self._lines(), 1):
            try:
                line = self._parse(raw)
            except ManifestError as exc:
                self._malformed(number, str(exc))
                continue
            if chunks and line.path == path and line.offset == sum(size for _, size, _ in chunks) > 0:
                chunks.append(line[1:])
                continue
            yield from self._whole(path, chunks, first)
            path, chunks, first = line.path, [line[1:]], number
        yield from self._whole(path, chunks, first)

    def _whole(self, path: str, chunks: List[Chunk], first: int) -> Iterator[Expected]:
        if not chunks:
            return
        problem = _problem_of(chunks)
        if problem:
            self._malformed(first, problem)
        else:
            yield Expected(path, chunks)

    def _lines(self) -> Iterator[bytes]:
        """Its lines without their ends; a NUL ends them as well as a newline does, but not both."""
        pending = b""
        while True:
            try:
                block = self._stream.read(1 << 16)
            except OSError as exc:
                raise ManifestError(words.reason_of(exc)) from exc
            if not block:
                break
            *lines, pending = (pending + block).split(self._end)
            yield from lines
            if len(pending) > LONGEST_LINE:
                raise ManifestError("a line of more than %d bytes: it is no manifest" % LONGEST_LINE)
        if pending:
            self.is_cut = True
            yield pending


def _problem_of(chunks: Sequence[Chunk]) -> str:
    """What is wrong with the lines of one path, taken together."""
    offset, size, digest = chunks[0]
    if offset in (DIRECTORY, LINK):
        wrong = offset == DIRECTORY and (size, digest) != (0, NOTHING)
        return "a directory has size 0 and the digest of nothing" if wrong else ""
    if offset != 0:
        return "the chunks before offset %d are missing" % offset
    if len(chunks) > 1:
        if size % BLOCK_SIZE:
            return "chunks of %d bytes: not a multiple of %d" % (size, BLOCK_SIZE)
        if any(chunk[1] != size for chunk in chunks[:-1]) or chunks[-1][1] > size or not chunks[-1][1]:
            return "chunks of different sizes"
    return ""


# ------------------------------------------------------------------------------------------------ the files


def source_of(expected: Expected, follow: bool) -> Source:
    """What is to be hashed for this; what is no file is looked at now."""
    fixed: Optional[Outcome] = None
    if expected.kind() == LINK:
        fixed = link_outcome(expected.path, None)
    elif expected.kind() == DIRECTORY:
        fixed = _directory_outcome(expected.path, follow)
    root, *above = _split(expected.path)
    links = tuple(range(len(above) - 1))
    return Source(
        expected.path, root, tuple(above[:-1]), links, above[-1], expected.size(), fixed, follow, expected.chunk_size()
    )


def _split(path: str) -> List[str]:
    """The directory to begin at, and the names on the way: so a path may be longer than the kernel takes at once."""
    parts = [part for part in path.split("/") if part]
    return ["/" if path.startswith("/") else ".", *(parts or ["."])]


def _directory_outcome(path: str, follow: bool) -> Outcome:
    try:
        st = os.stat(path, follow_symlinks=follow)
    except OSError as exc:
        return unread(exc)
    if stat.S_ISDIR(st.st_mode):
        return [(DIRECTORY, 0, NOTHING)]
    return unread(NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))


class Verdict(NamedTuple):
    """What became of one path: ``kind`` is OK, or one of the words below; ``text`` says more."""

    kind: str
    text: str = ""


OK, MISSING, UNREADABLE, CHANGED, DIFFERS = "ok", "missing", "unreadable", "changed", "different"


def judge(expected: Expected, outcome: Outcome) -> Verdict:
    """Hold what was found against what was expected."""
    if isinstance(outcome, Unread):
        if outcome.errno in (errno.ENOENT, errno.ENOTDIR) and not outcome.changed:
            return Verdict(MISSING, "missing" if outcome.errno == errno.ENOENT else outcome.reason)
        return Verdict(CHANGED if outcome.changed else UNREADABLE, outcome.reason)
    found = list(outcome) if isinstance(outcome, list) else []
    if not found and expected.kind() == 0:
        found = [(0, 0, NOTHING)]
    size = sum(chunk[1] for chunk in found)
    if size != expected.size() and expected.kind() == 0:
        return Verdict(DIFFERS, "size is %d, not %d" % (size, expected.size()))
    wrong = [chunk for chunk, right in zip(found, expected.chunks) if chunk != right]
    if expected.kind() == 0 and wrong:
        return Verdict(DIFFERS, "bytes %s differ" % ranges(wrong))
    return Verdict(DIFFERS, "its target differs") if wrong else Verdict(OK)


def ranges(chunks: Iterable[Chunk]) -> str:
    """The bytes of chunks in words, neighbours taken together: "0 to 4096, 8192 to 9000" (the end is not in it)."""
    found: List[Tuple[int, int]] = []
    for offset, size, _ in chunks:
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + size)
        else:
            found.append((offset, offset + size))
    return ", ".join("%d to %d" % pair for pair in found)


class Check(HashEvents):
    """What a manifest expects, given out as files to hash, and judged as their outcomes come, in the same order."""

    files = bytes = problems = 0  # as hash_files asks of what was found: how many there will be is not known

    def __init__(
        self, manifest: Iterable[Expected], follow: bool, verdict: Callable[[Expected, Verdict], None]
    ) -> None:
        self._manifest = manifest
        self._follow = follow
        self._verdict = verdict
        self._waiting: Deque[Expected] = deque()

    def sources(self) -> Iterator[Source]:
        """What is to be hashed."""
        for expected in self._manifest:
            self._waiting.append(expected)
            yield source_of(expected, self._follow)

    def hashed(self, path: str, chunks: Sequence[Chunk]) -> None:
        self._judge(list(chunks))

    def failed(self, path: str, why: Unread) -> None:
        self._judge(why)

    def _judge(self, outcome: Outcome) -> None:
        expected = self._waiting.popleft()
        self._verdict(expected, judge(expected, outcome))
