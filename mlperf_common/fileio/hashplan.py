# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Which files are hashed, in which order, and which of them go to a worker together; nothing here reads a file.

Promises: operands come as given, the files of a tree by the bytes of their paths. What cannot be listed whole is a
problem that names it, and nothing of that operand is hashed: a partial listing would look like a whole one.

Sizes are those that the walk saw. They only place the work; what is hashed is what is there when it is read.
"""

from __future__ import annotations

import os
import stat
from array import array
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from mlperf_common.fileio import copyplan, refusals, walk
from mlperf_common.fileio.digest import link_chunk
from mlperf_common.fileio.hashtasks import Group, Outcome, Unread, unread
from mlperf_common.fileio.manifest import CHUNK_SIZE, DIRECTORY, NOTHING, Chunk
from mlperf_common.fileio.walk import FIELDS, Listing
from mlperf_common.fileio.words import kind_of, quote
from mlperf_common.fileio.words import reason_of as words_of

# A batch ends at any of these. 64 small files take some 5 ms, a round trip 0.1 ms; BATCH_NAMES (bytes) keeps the
# message below what fits a pipe beside another one.
BATCH_FILES = 64
BATCH_BYTES = 8 << 20
BATCH_NAMES = 16 << 10


class HashEvents:
    """What happens, for whoever tells the user; these defaults say nothing."""

    def hashed(self, path: str, chunks: Sequence[Chunk]) -> None:
        """A file has been read to its end and did not change: (offset, size, MD5) of its chunks, none if empty."""

    def failed(self, path: str, why: Unread) -> None:
        """A file could not be read, or changed."""

    def problem(self, line: str) -> None:
        """An operand of which nothing is hashed, or workers that died."""

    def skipped(self, path: str, kind: str) -> None:
        """A special file has been left out."""


class Source(NamedTuple):
    """A file to hash: how it is shown, where it is, what size it seemed to have.

    Below a tree (``root``): the directory's components, which of them are links, the name in it. An operand: no
    root, no components, and ``name`` is its path. ``fixed`` is the outcome of what is no file. ``follow``: the name
    may be a link. ``part``: the bytes that are wanted of a large file, if not all; ``stamp``: its inode, size and
    modification time, if it must have these.
    """

    shown: str
    root: Optional[str]
    components: Optional[Tuple[str, ...]]
    links: Tuple[int, ...]
    name: str
    size: int
    fixed: Optional[Outcome] = None
    follow: bool = True
    chunk_size: int = CHUNK_SIZE
    part: Optional[Tuple[int, int]] = None
    stamp: Optional[Tuple[int, int, int]] = None


class Wanted(NamedTuple):
    """Which entries are listed: with ``everything`` directories too; without ``follow`` links as links."""

    skip_special: bool = False
    everything: bool = False
    follow: bool = True
    chunk_size: int = CHUNK_SIZE


class _Recorder:
    """A lister that passes on what another lists, and remembers sizes and followed links of it."""

    def __init__(self, list_directories: walk.ListDirectories) -> None:
        self._list = list_directories
        self.sizes: Dict[str, array[int]] = {}
        self.links: Dict[str, Tuple[int, ...]] = {}
        self.files = self.bytes = 0

    def __call__(self, requests: Sequence[walk.Request]) -> Sequence[Any]:
        listings = self._list(requests)
        for request, listing in zip(requests, listings):
            if isinstance(listing, Listing):
                self._record(request, listing)
        return listings

    def _record(self, request: walk.Request, listing: Listing) -> None:
        numbers = array("Q")
        numbers.frombytes(listing.stats)
        sizes = numbers[::FIELDS]
        directory = "/".join(request.components)
        self.sizes[directory] = sizes
        if request.links:
            self.links[directory] = request.links
        self.files += len(sizes)
        self.bytes += sum(sizes)


class _Tree:
    """A directory operand and the files below it, relative to it, in order."""

    def __init__(self, operand: str, names: List[str], recorder: _Recorder, chunk_size: int) -> None:
        self._operand = operand
        self._chunk_size = chunk_size
        self._root = copyplan.absolute(operand or ".")
        self._names = names
        self._recorder = recorder

    def sources(self) -> Iterator[Source]:
        """Its files in byte order of their paths."""
        # Within a directory both lists are in the order of the names' bytes.
        sizes = {directory: iter(numbers) for directory, numbers in self._recorder.sizes.items()}
        for relative in self._names:
            directory, _, name = relative.rpartition("/")
            components = tuple(directory.split("/")) if directory else ()
            links = self._recorder.links.get(directory, ())
            size = next(sizes.get(directory, iter(())), 0)
            shown = os.path.join(self._operand, relative)
            yield Source(shown, self._root, components, links, name, size, chunk_size=self._chunk_size)


class _FullTree:
    """A directory operand with all that is below it, itself included, in order; links as ``wanted``."""

    def __init__(self, operand: str, tree: walk.Tree, wanted: Wanted) -> None:
        self._operand = operand
        self._tree = tree
        self._wanted = wanted

    def sources(self) -> Iterator[Source]:
        """Everything in byte order of the paths: what is in ``d`` comes after ``d-``, as ``-`` is before ``/``."""
        if self._wanted.everything:
            yield self._fixed("", [(DIRECTORY, 0, NOTHING)])
        stack = [iter(self._entries(self._tree.root, ""))]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
            elif isinstance(entry[1], walk.Directory):
                stack.append(iter(self._entries(entry[1], os.fsdecode(entry[0]))))
            else:
                yield entry[1]

    def _entries(self, directory: walk.Directory, prefix: str) -> List[Tuple[bytes, Union[Source, walk.Directory]]]:
        """What a directory holds: (bytes that it sorts by, the file, link or directory; or what is below that)."""
        request = directory.request()
        found: List[Tuple[bytes, Union[Source, walk.Directory]]] = []
        for entry in directory.files():
            path = prefix + entry.name
            found.append((os.fsencode(path), self._file(path, request, entry)))
        if self._wanted.everything:
            found.extend(self._links(directory, request, prefix))
        for child in directory.children:
            path = prefix + child.name
            if self._wanted.everything:
                found.append((os.fsencode(path), self._fixed(path, [(DIRECTORY, 0, NOTHING)])))
            found.append((os.fsencode(path) + b"/", child))
        found.sort(key=lambda item: item[0])
        return found

    def _file(self, path: str, request: walk.Request, entry: walk.FileEntry) -> Source:
        follow = self._wanted.follow
        return Source(
            self._shown(path), request.root, request.components, request.links, entry.name, entry.size, None, follow,
            self._wanted.chunk_size,
        )  # fmt: skip

    def _links(
        self, directory: walk.Directory, request: walk.Request, prefix: str
    ) -> Iterator[Tuple[bytes, Source]]:
        names = [link.name for link in directory.links]
        for name, outcome in zip(names, link_outcomes(names, request)):
            yield os.fsencode(prefix + name), self._fixed(prefix + name, outcome)

    def _fixed(self, path: str, outcome: Outcome) -> Source:
        return Source(self._shown(path), None, None, (), "", 0, outcome)

    def _shown(self, path: str) -> str:
        return os.path.join(self._operand, path) if path else self._operand or "."


def link_outcome(name: str, directory: Optional[int]) -> Outcome:
    """What there is to say of a symbolic link."""
    try:
        return [link_chunk(os.readlink(name, dir_fd=directory))]
    except OSError as exc:
        return unread(exc)


def link_outcomes(names: Sequence[str], request: walk.Request) -> List[Outcome]:
    """The same of links in a directory that the walk listed."""
    if not names:
        return []
    try:
        with walk.opened(request) as place:
            return [link_outcome(name, place) for name in names]
    except OSError as exc:
        return [unread(exc)] * len(names)


class _Loose:
    """An operand that is a file, or a link taken as one."""

    def __init__(self, operand: str, size: int, chunk_size: int, fixed: Optional[Outcome] = None) -> None:
        self._source = Source(operand, None, None, (), operand, size, fixed, chunk_size=chunk_size)

    def sources(self) -> Iterator[Source]:
        """The one file."""
        yield self._source


class Found:
    """The files of all operands."""

    def __init__(self) -> None:
        self.items: List[Union[_Tree, _FullTree, _Loose]] = []
        self.files = self.bytes = self.problems = 0

    def sources(self) -> Iterator[Source]:
        """The files in order."""
        for item in self.items:
            yield from item.sources()


def find(
    operands: Sequence[Tuple[str, Union[os.stat_result, OSError]]],
    list_directories: walk.ListDirectories,
    events: HashEvents,
    wanted: Wanted = Wanted(),  # noqa: B008 (it cannot change)
) -> Found:
    """List every operand, given with what stat said of it; what cannot be is a problem, and the others go on."""
    found = Found()
    for operand, st in operands:
        try:
            if isinstance(st, OSError):
                raise refusals.UnreadableEntries([(operand, words_of(st))])
            _find_one(found, operand, st, list_directories, events, wanted)
        except (refusals.UnreadableEntries, refusals.CopyArgumentError) as exc:
            found.problems += 1
            for line in exc.lines:
                events.problem(line)
    return found


def _find_one(
    found: Found,
    operand: str,
    st: os.stat_result,
    list_directories: walk.ListDirectories,
    events: HashEvents,
    wanted: Wanted,
) -> None:
    if stat.S_ISDIR(st.st_mode):
        _find_tree(found, operand, list_directories, events, wanted)
    elif stat.S_ISREG(st.st_mode):
        found.items.append(_Loose(operand, st.st_size, wanted.chunk_size))
        found.files += 1
        found.bytes += st.st_size
    elif stat.S_ISLNK(st.st_mode):
        if wanted.everything:
            found.items.append(_Loose(operand, 0, wanted.chunk_size, link_outcome(operand, None)))
    elif wanted.skip_special:
        events.skipped(operand, kind_of(st.st_mode))
    else:
        raise refusals.SpecialFiles([refusals.SPECIAL % kind_of(st.st_mode) % quote(operand)])


def _find_tree(
    found: Found, operand: str, list_directories: walk.ListDirectories, events: HashEvents, wanted: Wanted
) -> None:
    skipped: List[Tuple[str, str]] = []
    root = operand or "."  # only -C gives "": names without a prefix
    if wanted.everything or not wanted.follow:
        tree = copyplan.list_tree(root, wanted.skip_special, list_directories, skipped, wanted.follow)
        found.items.append(_FullTree(operand, tree, wanted))
        found.files += sum(directory.count() for directory in walk.breadth_first([tree]))
        found.bytes += sum(sum(directory.sizes()) for directory in walk.breadth_first([tree]))
    else:
        recorder = _Recorder(list_directories)
        names = copyplan.list_relative_files(root, wanted.skip_special, recorder, skipped)
        found.items.append(_Tree(operand, names, recorder, wanted.chunk_size))
        found.files += len(names)
        found.bytes += recorder.bytes
    for path, kind in skipped:
        events.skipped(path, kind)


# ------------------------------------------------------------------------------------------------ units of work


class Unit:
    """Files whose outcomes come out together: a batch, or one large file."""

    def __init__(self, sources: List[Source]) -> None:
        self.sources = sources
        self.outcomes: List[Optional[Outcome]] = [source.fixed for source in sources]  # in the same order
        self.due = [index for index, source in enumerate(sources) if source.fixed is None]
        self.missing = len(self.due)
        self.size = sum(source.size for source in sources)

    def settle(self, index: int, outcome: Outcome) -> None:
        """The outcome of one file."""
        self.outcomes[index] = outcome
        self.missing -= 1

    def settle_all(self, why: Unread) -> None:
        """None of the files can be hashed, for one reason."""
        for index in self.due:
            self.settle(index, why)


def cut(sources: Iterable[Source]) -> Iterator[Unit]:
    """Cut files into units, in order: what seems to have more than one chunk is alone."""
    batch: List[Source] = []
    size = names = 0
    for source in sources:
        cost = _cost(source, batch[-1] if batch else None)
        is_full = len(batch) >= BATCH_FILES or size + source.size > BATCH_BYTES or names + cost > BATCH_NAMES
        if batch and (is_full or _stands_apart(batch, source)):
            yield Unit(batch)
            batch, size, names = [], 0, 0
        batch.append(source)
        size += source.size
        names += cost
    if batch:
        yield Unit(batch)


def _stands_apart(batch: Sequence[Source], source: Source) -> bool:
    """Whether a file cannot be in the task of this batch; what is no file goes with any."""
    if source.size > source.chunk_size:
        return True
    first = next((s for s in batch if s.fixed is None), None)
    if first is None or source.fixed is not None:
        return False
    one_task = (first.root, first.follow, first.chunk_size) == (source.root, source.follow, source.chunk_size)
    return first.size > first.chunk_size or not one_task


def _cost(source: Source, before: Optional[Source]) -> int:
    """About how many bytes a file adds to a batch's message."""
    cost = len(source.name.encode("utf-8", "surrogatepass")) + 8
    if source.components and (before is None or before.components != source.components):
        cost += sum(len(part.encode("utf-8", "surrogatepass")) + 8 for part in source.components)
    return cost


def groups(sources: Sequence[Source]) -> Tuple[Group, ...]:
    """The files of a batch by directory, in order."""
    found: List[Tuple[Source, List[str]]] = []
    for source in sources:
        if not found or found[-1][0].components != source.components:
            found.append((source, []))
        found[-1][1].append(source.name)
    return tuple(Group(first.components, first.links, tuple(names)) for first, names in found)
