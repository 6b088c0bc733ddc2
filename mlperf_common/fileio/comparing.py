# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Two trees compared on one pool: names and kinds as listed, sizes without reading, then every byte.

Promises: what is only in one tree, of another kind, another size, other bytes or another link target is told, empty
files and directories included, in byte order of the paths; what cannot be listed is told and makes the result no
proof. Not promised: that trees which change meanwhile are seen at one moment.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from mlperf_common.fileio import copyplan, hashtasks, walk
from mlperf_common.fileio.hashtasks import Learned, Reading, Unusable
from mlperf_common.fileio.listing import AnyPool, Roots
from mlperf_common.fileio.manifest import CHUNK_SIZE
from mlperf_common.fileio.pairtasks import (
    CONTENT,
    METADATA,
    TROUBLE,
    Census,
    Finding,
    Looks,
    Pair,
    PairBatch,
    PairChunk,
    Side,
    metadata_differences,
)
from mlperf_common.fileio.progress import counted
from mlperf_common.fileio.refusals import CopyArgumentError, UnreadableEntries
from mlperf_common.fileio.walk import Directory, FileEntry, LinkEntry, Tree
from mlperf_common.fileio.workers import Failure, Task

# A batch ends at any of these; as for hashing.
BATCH_PAIRS = 64
BATCH_BYTES = 8 << 20
BATCH_NAMES = 12 << 10

MISSING, EXTRA, KIND, SIZE = "missing", "extra", "kind", "size"

Entry = Union[FileEntry, LinkEntry, Directory]
Stamp = Tuple[int, int, int]  # inode, size, modification time in nanoseconds


class Events:
    """What differs, for whoever tells the user."""

    def differs(self, path: str, kind: str, text: str) -> None:
        """One difference of one path, relative to both operands ("": themselves)."""

    def problem(self, line: str) -> None:
        """What keeps the comparison from being complete."""

    def skipped(self, path: str, kind: str) -> None:
        """A special file is left out."""


class Counts:
    """What a comparison did."""

    def __init__(self) -> None:
        self.files = self.directories = self.links = 0  # compared
        self.bytes = 0
        self.differences: Dict[str, int] = {}
        self.problems = 0
        self.refused: Dict[int, str] = {}
        self.direct: Set[int] = set()
        self.files_total = self.bytes_total = 0
        self.read = 0  # files

    def note(self, kind: str) -> None:
        """One difference of this kind."""
        self.differences[kind] = self.differences.get(kind, 0) + 1

    def is_identical(self) -> bool:
        """Whether both trees were seen whole, and nothing differs."""
        return not (self.differences or self.problems)


class Request(NamedTuple):
    """What to compare, and how: see the options of fastmd5."""

    source: str
    destination: str
    follow: bool = True
    metadata: bool = False
    skip_special: bool = False
    chunk_size: int = CHUNK_SIZE


def compare(
    request: Request,
    pool: AnyPool,
    roots: Roots,
    lister: walk.ListDirectories,
    events: Events,
    counts: Counts,
    share: Optional[Callable[[Run], None]] = None,
) -> None:
    """Compare two operands on a pool that has ``pairtasks.FUNCTIONS``.

    ``share``: has the entries of the run compared, instead of the pool alone.
    Raises OSError for an operand that cannot be looked at, AllWorkersDied, Interrupted.
    """
    look = os.stat if request.follow else os.lstat
    modes = [look(operand).st_mode for operand in (request.source, request.destination)]
    run = Run(request, roots, events, counts)
    if stat.S_IFMT(modes[0]) != stat.S_IFMT(modes[1]):
        run.differs("", KIND, _kinds(*(_word(mode) for mode in modes)))
    elif stat.S_ISDIR(modes[0]):
        trees = [_list(operand, request, lister, run) for operand in (request.source, request.destination)]
        if trees[0] is not None and trees[1] is not None:
            _compare_roots(run, request)
            counts.files_total = sum(directory.count() for directory in walk.breadth_first([trees[0]]))
            counts.bytes_total = sum(sum(directory.sizes()) for directory in walk.breadth_first([trees[0]]))
            run.entries = _Merge(run, trees[0], trees[1]).pairs()
            census = _Census(trees[0], trees[1], roots, run)
            pool.run(census.next_task, census.on_result)
    else:
        run.entries = iter([_operands(request, stat.S_ISLNK(modes[0]), counts)])
    if share is not None:
        share(run)
    else:
        run.on(pool)


class _Census:
    """The entries of every directory of both trees counted again, so that a walk that misses some is noticed.

    Without it a comparison would share the blind spots of the copy, which uses the same walk.
    """

    def __init__(self, ours: Tree, theirs: Tree, roots: Roots, run: Run) -> None:
        self._roots = roots
        self._run = run
        self._left: Dict[str, int] = run.left
        self._tasks = itertools.chain(self._cut(ours, False), self._cut(theirs, True))

    def next_task(self, worker: int, ahead: bool) -> Optional[Task]:
        """The next few directories."""
        return next(self._tasks, None)

    def _cut(self, tree: Tree, second: bool) -> Iterator[Task]:
        directories = walk.breadth_first([tree])
        root = self._roots.get(tree.source, second)
        size = 0
        group: List[Directory] = []
        for directory in directories:
            group.append(directory)
            size += sum(len(os.fsencode(name)) + 8 for name in directory.components()) + 32
            if size > BATCH_NAMES or directory is directories[-1]:
                census = Census(root.key, second, tuple(self._counted(d) for d in group))
                yield Task("census", census, (root.fd,), group)
                group, size = [], 0

    def _counted(self, directory: Directory) -> Tuple[Tuple[str, ...], Tuple[int, ...], int]:
        request = directory.request()
        seen = directory.count() + len(directory.links) + len(directory.children)
        return request.components, request.links, seen + self._left.get(directory.shown(), 0)

    def on_result(self, task: Task, result: Any) -> None:
        """Directories have been counted."""
        for position, directory in enumerate(task.context):
            reason = _in_words(result) if isinstance(result, Failure) else result[position]
            if reason:
                self._run.differs(directory.shown(), TROUBLE, reason)


def _list(
    operand: str, request: Request, lister: walk.ListDirectories, run: Run
) -> Optional[Tree]:
    skipped: List[Tuple[str, str]] = []
    try:
        tree = copyplan.list_tree(operand, request.skip_special, lister, skipped, request.follow)
    except (CopyArgumentError, UnreadableEntries) as exc:
        run.counts.problems += 1
        for line in exc.lines:
            run.events.problem(line)
        return None
    for path, kind in skipped:
        run.events.skipped(path, kind)
        above = os.path.dirname(path)
        run.left[above] = run.left.get(above, 0) + 1
    return tree


def _word(mode: int) -> str:
    return {stat.S_IFDIR: "directory", stat.S_IFLNK: "symbolic link"}.get(stat.S_IFMT(mode), "file")


def _kinds(ours: str, theirs: str) -> str:
    return "%s in SOURCE, %s in DEST" % (ours, theirs)


# ------------------------------------------------------------------------------------------------ what meets what


class Work(NamedTuple):
    """A pair of entries whose bytes, target or metadata are to be compared, or what is known of a path already.

    ``ours`` and ``theirs`` are None for operands that are no directories, whose names are paths. ``part``: the bytes
    that are to be compared of large files, if not all; ``stamps``: their inodes, sizes and times, if they must have
    these.
    """

    path: str
    ours: Optional[Directory]
    theirs: Optional[Directory]
    pair: Optional[Pair]
    size: int
    findings: List[Finding]
    part: Optional[Tuple[int, int]] = None
    stamps: Optional[Tuple[Stamp, Stamp]] = None


def _compare_roots(run: Run, request: Request) -> None:
    run.counts.directories += 1
    if request.metadata:
        ours, theirs = (os.stat(operand) for operand in (request.source, request.destination))
        for text in metadata_differences(_looks(ours), _looks(theirs)):
            run.differs("", METADATA, text)


def _looks(st: os.stat_result) -> Looks:
    return Looks(stat.S_IMODE(st.st_mode), (st.st_uid, st.st_gid), st.st_mtime_ns)


def _operands(request: Request, is_link: bool, counts: Counts) -> Work:
    counts.links, counts.files = int(is_link), int(not is_link)
    counts.files_total = counts.files
    sizes = [os.lstat(o).st_size if is_link else os.stat(o).st_size for o in (request.source, request.destination)]
    findings: List[Finding] = []
    same = is_link or sizes[0] == sizes[1]
    if not same:
        findings.append((SIZE, "%d bytes in SOURCE, %d in DEST" % (sizes[0], sizes[1])))
    counts.bytes_total = 0 if is_link else sizes[0]
    pair = Pair(request.source, request.destination, is_link, same)
    return Work("", None, None, pair if same or request.metadata else None, 0 if is_link else sizes[0], findings)


class _Merge:
    """Two walked trees, entry by entry, in byte order of the paths."""

    def __init__(self, run: Run, ours: Tree, theirs: Tree) -> None:
        self._counts = run.counts
        self._metadata = run.request.metadata
        self._roots = (ours.root, theirs.root)

    def pairs(self) -> Iterator[Work]:
        """Everything that is to be compared or told; without recursion, a directory's entries at a time."""
        stack = [iter(self._meet(self._roots[0], self._roots[1], ""))]
        while stack:
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
            elif isinstance(item[1], Work):
                yield item[1]
            else:
                ours, theirs = item[1]
                stack.append(iter(self._meet(ours, theirs, os.fsdecode(item[0]))))

    def _meet(
        self, ours: Directory, theirs: Directory, prefix: str
    ) -> List[Tuple[bytes, Union[Work, Tuple[Directory, Directory]]]]:
        found: List[Tuple[bytes, Union[Work, Tuple[Directory, Directory]]]] = []
        mine, others = _entries(ours), _entries(theirs)
        for name in {**mine, **others}:
            key = os.fsencode(prefix) + name
            one, other = mine.get(name), others.get(name)
            found.append((key, self._pair(prefix + os.fsdecode(name), ours, theirs, one, other)))
            if isinstance(one, Directory) and isinstance(other, Directory):
                found.append((key + b"/", (one, other)))
        found.sort(key=lambda item: item[0])
        return found

    def _pair(
        self, path: str, ours: Directory, theirs: Directory, one: Optional[Entry], other: Optional[Entry]
    ) -> Work:
        findings: List[Finding] = []
        pair, size = None, 0
        if one is None or other is None:
            entry = one if one is not None else other
            findings.append((MISSING if other is None else EXTRA, _described(entry)))
        elif _kind(one) != _kind(other):
            findings.append((KIND, _kinds(_kind(one), _kind(other))))
        elif isinstance(one, Directory) and isinstance(other, Directory):
            self._counts.directories += 1
            if self._metadata:
                findings.extend((METADATA, t) for t in metadata_differences(_seen(one), _seen(other)))
        elif isinstance(one, LinkEntry):
            self._counts.links += 1
            pair = Pair(one.name, one.name, True, False)
        elif isinstance(one, FileEntry) and isinstance(other, FileEntry):
            self._counts.files += 1
            same, size = one.size == other.size, one.size
            if not same:
                findings.append((SIZE, "%d bytes in SOURCE, %d in DEST" % (one.size, other.size)))
            if same or self._metadata:
                pair = Pair(one.name, one.name, False, same)
        return Work(path, ours, theirs, pair, size, findings)


def _entries(directory: Directory) -> Dict[bytes, Entry]:
    found: Dict[bytes, Entry] = {os.fsencode(entry.name): entry for entry in directory.files()}
    found.update((os.fsencode(link.name), link) for link in directory.links)
    found.update((os.fsencode(child.name), child) for child in directory.children)
    return found


def _kind(entry: Entry) -> str:
    if isinstance(entry, Directory):
        return "directory"
    return "symbolic link" if isinstance(entry, LinkEntry) else "file"


def _described(entry: Optional[Entry]) -> str:
    if not isinstance(entry, Directory):
        return "" if entry is None else _kind(entry)
    below = 0
    stack = [entry]
    while stack:
        at = stack.pop()
        below += at.count() + len(at.links) + len(at.children)
        stack.extend(at.children)
    return "directory" + (" with %s below it" % counted(below, "entry") if below else "")


def _seen(directory: Directory) -> Looks:
    return Looks(stat.S_IMODE(directory.mode), directory.owner, directory.identity.mtime_ns)


# ------------------------------------------------------------------------------------------------ the run


class _Slot:
    """Work that goes into one task, and what came of it; slots end in their order."""

    def __init__(self, works: List[Work]) -> None:
        self.works = works
        self.findings: List[List[Finding]] = [list(work.findings) for work in works]
        self.missing = 0


class _Large:
    """Two large files: opened once by the parent, compared chunk by chunk."""

    def __init__(self, slot: _Slot) -> None:
        self.slot = slot
        self.fds: List[int] = []
        self.before: List[os.stat_result] = []
        self.chunks: Deque[PairChunk] = deque()
        self.wrong: List[Tuple[int, int]] = []
        self.under_way = 0
        self.trouble = ""

    def close(self) -> None:
        """Close both."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Run:
    """Gives out the tasks, takes the results, lets them go in order."""

    def __init__(self, request: Request, roots: Roots, events: Events, counts: Counts) -> None:
        self.request = request
        self.counts = counts
        self.entries: Iterator[Work] = iter(())
        self._roots = roots
        self.events = events
        self.left: Dict[str, int] = {}  # special files left out, by their directory
        self._slots: Deque[_Slot] = deque()
        self._held_back: Optional[Work] = None
        self._large: Optional[_Large] = None
        self._open: Set[_Large] = set()
        self._reading = Reading()

    def on(self, pool: AnyPool) -> None:
        """Compare all entries. Raises AllWorkersDied, Interrupted."""
        try:
            pool.run(self.next_task, self.on_result)
        finally:
            self.close()

    def differs(self, path: str, kind: str, text: str) -> None:
        """Tell of one difference."""
        if kind == TROUBLE:
            self.counts.problems += 1
        else:
            self.counts.note(kind)
        self.events.differs(path, kind, text)

    # ---- giving out

    def next_task(self, worker: int, ahead: bool) -> Optional[Task]:
        """The next chunk or batch, or None."""
        while True:
            if self._large is not None and self._large.chunks:
                if ahead:
                    return None
                return self._chunk_task(self._large)
            works = self._take()
            if not works:
                return None
            slot = _Slot(works)
            self._slots.append(slot)
            task = self._begin(slot)
            if task is not None:
                return task
            self._let_go()

    def _take(self) -> List[Work]:
        """The next entries of one pair of directories, or one pair of large files."""
        works: List[Work] = []
        size = names = 0
        while len(works) < BATCH_PAIRS and size < BATCH_BYTES and names < BATCH_NAMES:
            work = self._held_back or next(self.entries, None)
            self._held_back = None
            if work is None:
                break
            if works and (work.ours is not works[0].ours or self._is_large(work)):
                self._held_back = work
                break
            works.append(work)
            if self._is_large(work):
                break
            size += work.size
            names += 2 * len(os.fsencode(work.path)) + 32
        return works

    def _is_large(self, work: Work) -> bool:
        return is_large(work, self.request.chunk_size)

    def _begin(self, slot: _Slot) -> Optional[Task]:
        due = [index for index, work in enumerate(slot.works) if work.pair is not None]
        if not due:
            return None
        first = slot.works[due[0]]
        try:
            sides, fds = self._sides(first)
        except OSError as exc:
            for index in due:
                slot.findings[index].append((TROUBLE, hashtasks.reason_of(exc)))
            return None
        slot.missing = 1
        if first.pair is not None and self._is_large(first):
            self._large = _Large(slot)
            self._open_large(self._large, first, first.pair)
            return self._chunk_task(self._large) if self._large.chunks else None
        pairs = [slot.works[index].pair for index in due]
        follow, metadata = self.request.follow, self.request.metadata
        batch = PairBatch(sides[0], sides[1], tuple(pair for pair in pairs if pair), follow, metadata)
        return Task("pairs", batch, fds, (slot, due))

    def _sides(self, work: Work) -> Tuple[List[Side], Tuple[int, ...]]:
        if work.ours is None or work.theirs is None:
            return [Side(0, (), ())] * 2, ()
        sides, fds = [], []
        for directory, second in ((work.ours, False), (work.theirs, True)):
            request = directory.request()
            root = self._roots.get(request.root, second)  # each tree has a chain of its own in a worker
            sides.append(Side(root.key, request.components, request.links))
            fds.append(root.fd)
        return sides, tuple(fds)

    def _open_large(self, large: _Large, work: Work, pair: Pair) -> None:
        self._open.add(large)
        try:
            for directory, name in ((work.ours, pair.ours), (work.theirs, pair.theirs)):
                fd, st = self._open_one(directory, name)
                large.fds.append(fd)
                large.before.append(st)
                self._reading.prepare(fd, st)
            self._cut(large, work)
            if self.request.metadata and (work.part is None or work.part[0] == 0):
                texts = metadata_differences(_looks(large.before[0]), _looks(large.before[1]))
                large.slot.findings[0].extend((METADATA, text) for text in texts)
        except (OSError, Unusable) as exc:
            large.trouble = hashtasks.reason_of(exc)
        self._end_if_done(large)

    def _cut(self, large: _Large, work: Work) -> None:
        sizes = [st.st_size for st in large.before]
        if work.stamps not in (None, tuple(stamp_of(st) for st in large.before)):
            raise hashtasks.Changed("changed since it was listed")
        if sizes[0] != sizes[1]:
            raise hashtasks.Changed("changed while it was being compared: sizes %d and %d" % (sizes[0], sizes[1]))
        devs = (large.before[0].st_dev, large.before[1].st_dev)
        for start in range(*(work.part or (0, sizes[0])), self.request.chunk_size):
            large.chunks.append(PairChunk(start, min(start + self.request.chunk_size, sizes[0]), sizes[0], devs))

    def _open_one(self, directory: Optional[Directory], name: str) -> Tuple[int, os.stat_result]:
        if directory is None:
            return hashtasks.open_file(name, None, self.request.follow)
        request = directory.request()
        chain = walk.open_chain(os.dup(self._roots.get(request.root, False).fd), False)
        try:
            return hashtasks.open_file(name, chain.open(request.components, request.links), self.request.follow)
        finally:
            chain.close()

    def _chunk_task(self, large: _Large) -> Task:
        large.under_way += 1
        return Task("pairchunk", large.chunks.popleft(), tuple(large.fds), large)

    # ---- taking results

    def on_result(self, task: Task, result: Any) -> None:
        """A batch or a chunk has ended, one way or the other."""
        if task.kind == "pairchunk":
            self._on_chunk(task.context, task.payload, result)
        else:
            slot, due = task.context
            self._on_batch(slot, due, result)
        self._let_go()

    def _on_batch(self, slot: _Slot, due: Sequence[int], result: Any) -> None:
        slot.missing = 0
        if isinstance(result, Failure):
            for index in due:
                slot.findings[index].append((TROUBLE, _in_words(result)))
            return
        findings, learned = result
        self._learn(learned)
        for index, found in zip(due, findings):
            slot.findings[index].extend(found)
            self.counts.bytes += slot.works[index].size
            pair = slot.works[index].pair
            self.counts.read += pair is not None and pair.bytes

    def _on_chunk(self, large: _Large, part: PairChunk, result: Any) -> None:
        large.under_way -= 1
        if isinstance(result, Failure):
            large.trouble = large.trouble or _in_words(result)
            large.chunks.clear()
        else:
            same, learned = result
            self._learn(learned)
            self.counts.bytes += part.end - part.start
            if not same:
                large.wrong.append((part.start, part.end))
        self._end_if_done(large)

    def _end_if_done(self, large: _Large) -> None:
        if large.under_way or (large.chunks and not large.trouble):
            return
        large.chunks.clear()
        findings = large.slot.findings[0]
        findings.extend((CONTENT, "bytes %d to %d" % part) for part in sorted(large.wrong))
        try:
            for fd, st in zip(large.fds, large.before):
                hashtasks.check_unchanged(st, os.fstat(fd))
        except (OSError, Unusable) as exc:
            large.trouble = hashtasks.reason_of(exc)
        if large.trouble:
            findings.append((TROUBLE, large.trouble))
        large.slot.missing = 0
        self.counts.read += 1
        large.close()
        self._open.discard(large)

    def _learn(self, learned: Learned) -> None:
        self.counts.refused.update(learned.refused)
        self.counts.direct |= learned.direct

    def _let_go(self) -> None:
        """Tell what is known, as far as everything before it is."""
        while self._slots and not self._slots[0].missing:
            slot = self._slots.popleft()
            for work, findings in zip(slot.works, slot.findings):
                for kind, text in findings:
                    self.differs(work.path, kind, text)

    def close(self) -> None:
        """Give up what is open."""
        for large in self._open:
            large.close()
        self._open.clear()


def is_large(work: Work, chunk_size: int) -> bool:
    """Whether a pair is compared chunk by chunk."""
    return work.pair is not None and work.pair.bytes and work.size > chunk_size


def stamp_of(st: os.stat_result) -> Stamp:
    """What tells a file from another one of its name, or from itself once it has changed."""
    return st.st_ino, st.st_size, st.st_mtime_ns


def _in_words(failure: Failure) -> str:
    return "worker %d %s" % (failure.worker, failure.reason) if failure.signum else failure.reason
