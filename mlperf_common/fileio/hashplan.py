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
from mlperf_common.fileio.hashtasks import Chunk, Group, Outcome, Unread
from mlperf_common.fileio.walk import FIELDS, Listing
from mlperf_common.fileio.words import kind_of, quote, reason_of

# A batch ends at any of these. 64 small files take some 5 ms, a round trip 0.1 ms; BATCH_NAMES (bytes) keeps the
# message below what fits a pipe beside another one.
BATCH_FILES = 64
BATCH_BYTES = 8 << 20
BATCH_NAMES = 16 << 10


class HashEvents:
    """What happens, for whoever tells the user; these defaults say nothing."""

    def hashed(self, path: str, chunks: Sequence[Chunk]) -> None:
        """A file has been read to its end and did not change: (offset, size, MD5) of its chunks, none if empty."""

    def failed(self, path: str, reason: str) -> None:
        """A file could not be read, or changed."""

    def problem(self, line: str) -> None:
        """An operand of which nothing is hashed, or workers that died."""

    def skipped(self, path: str, kind: str) -> None:
        """A special file has been left out."""


class Source(NamedTuple):
    """A file to hash: how it is shown, where it is, what size it seemed to have.

    Below a tree (``root``): the directory's components, which of them are links, the name in it. An operand: no
    root, no components, and ``name`` is its path.
    """

    shown: str
    root: Optional[str]
    components: Optional[Tuple[str, ...]]
    links: Tuple[int, ...]
    name: str
    size: int


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

    def __init__(self, operand: str, names: List[str], recorder: _Recorder) -> None:
        self._operand = operand
        self._root = copyplan.absolute(operand)
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
            yield Source(os.path.join(self._operand, relative), self._root, components, links, name, size)


class _Loose:
    """An operand that is a file."""

    def __init__(self, operand: str, size: int) -> None:
        self._source = Source(operand, None, None, (), operand, size)

    def sources(self) -> Iterator[Source]:
        """The one file."""
        yield self._source


class Found:
    """The files of all operands."""

    def __init__(self) -> None:
        self.items: List[Union[_Tree, _Loose]] = []
        self.files = self.bytes = self.problems = 0

    def sources(self) -> Iterator[Source]:
        """The files in order."""
        for item in self.items:
            yield from item.sources()


def find(
    operands: Sequence[Tuple[str, Union[os.stat_result, OSError]]],
    list_directories: walk.ListDirectories,
    events: HashEvents,
    skip_special: bool = False,
) -> Found:
    """List every operand, given with what stat said of it; what cannot be is a problem, and the others go on."""
    found = Found()
    for operand, st in operands:
        try:
            if isinstance(st, OSError):
                raise refusals.UnreadableEntries([(operand, reason_of(st))])
            _find_one(found, operand, st, list_directories, events, skip_special)
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
    skip_special: bool,
) -> None:
    if stat.S_ISDIR(st.st_mode):
        recorder = _Recorder(list_directories)
        skipped: List[Tuple[str, str]] = []
        names = copyplan.list_relative_files(operand, skip_special, recorder, skipped)
        for path, kind in skipped:
            events.skipped(path, kind)
        found.items.append(_Tree(operand, names, recorder))
        found.files += len(names)
        found.bytes += recorder.bytes
    elif stat.S_ISREG(st.st_mode):
        found.items.append(_Loose(operand, st.st_size))
        found.files += 1
        found.bytes += st.st_size
    elif skip_special:
        events.skipped(operand, kind_of(st.st_mode))
    else:
        raise refusals.SpecialFiles([refusals.SPECIAL % kind_of(st.st_mode) % quote(operand)])


# ------------------------------------------------------------------------------------------------ units of work


class Unit:
    """Files whose outcomes come out together: a batch, or one large file."""

    def __init__(self, sources: List[Source]) -> None:
        self.sources = sources
        self.outcomes: List[Optional[Outcome]] = [None] * len(sources)  # of the same length, in the same order
        self.missing = len(sources)
        self.size = sum(source.size for source in sources)

    def settle(self, index: int, outcome: Outcome) -> None:
        """The outcome of one file."""
        self.outcomes[index] = outcome
        self.missing -= 1

    def settle_all(self, reason: str) -> None:
        """None of the files can be hashed, for one reason."""
        for index in range(len(self.sources)):
            self.settle(index, Unread(reason))


def cut(sources: Iterable[Source], chunk_size: int) -> Iterator[Unit]:
    """Cut files into units, in order: what seems to have more than one chunk is alone."""
    batch: List[Source] = []
    size = names = 0
    for source in sources:
        cost = _cost(source, batch[-1] if batch else None)
        is_full = len(batch) >= BATCH_FILES or size + source.size > BATCH_BYTES or names + cost > BATCH_NAMES
        if batch and (is_full or _stands_apart(batch[0], source, chunk_size)):
            yield Unit(batch)
            batch, size, names = [], 0, 0
        batch.append(source)
        size += source.size
        names += cost
    if batch:
        yield Unit(batch)


def _stands_apart(first: Source, source: Source, chunk_size: int) -> bool:
    return first.size > chunk_size or source.size > chunk_size or first.root != source.root


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
