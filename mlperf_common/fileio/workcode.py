# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Pieces of a copy as JSON, for other ranks: what is common to all, and items of work.

Device numbers do not travel: on another node they say nothing. What comes back has device 0 in their place.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mlperf_common.fileio.batches import PlannedFile, Queue
from mlperf_common.fileio.copyplan import CopyPlan
from mlperf_common.fileio.dealing import FILE_COST, Part, Unit
from mlperf_common.fileio.facts import Options
from mlperf_common.fileio.landing import Base
from mlperf_common.fileio.largefile import LargeFile
from mlperf_common.fileio.metadata import Kept
from mlperf_common.fileio.sharedfile import Shared, SharedFile
from mlperf_common.fileio.walk import Directory, FileEntry, Identity, Look, Tree
from mlperf_common.fileio.workload import Links, Work


class Batch(NamedTuple):
    """Small files of one directory (None: operands), as a unit of work."""

    directory: Optional[Directory]
    files: Sequence[PlannedFile]


def units(work: Work, options: Options) -> List[Unit]:
    """Work as what can be dealt: large files first, largest first, then links, then small files."""
    found = [Unit(large, large.file.entry.size + FILE_COST, _cuttable(large, options)) for large in work.larges]
    found += [Unit(links, FILE_COST * len(links.names)) for links in work.links]
    for queue in work.queues:
        found += [_batch(queue.directory, files) for files in iter(queue.take, [])]
    return found


def _batch(directory: Optional[Directory], files: Sequence[PlannedFile]) -> Unit:
    return Unit(Batch(directory, files), sum(file.entry.size for file in files) + FILE_COST * len(files))


def _cuttable(large: LargeFile, options: Options) -> int:
    """Its size if several ranks may share it: not where it is to be compared first, or to be a clone."""
    return 0 if large.file.compare or options.reflink == "always" else large.file.entry.size


# ------------------------------------------------------------------------------------------------ what is common


def encode_common(plan: CopyPlan, options: Options) -> Any:
    """The trees, where they land, and what the user asked for."""
    trees = [(t.source, t.shown, t.components, t.look.follow) for t in plan.trees]
    base = plan.base
    return {"trees": trees, "base": (base.path, base.shown, base.identity[1:]), "options": options}


def decode_common(value: Any) -> Tuple[CopyPlan, Options]:
    """A plan that knows its trees and its base, but no file; and the options."""
    trees = [
        Tree(source, shown, tuple(components), Look(follow)) for source, shown, components, follow in value["trees"]
    ]
    path, shown, identity = value["base"]
    fields = dict(zip(Options._fields, value["options"]))
    options = Options(**dict(fields, kept=Kept(*fields["kept"])))
    return CopyPlan((), (), Base(path, shown, Identity(0, *identity)), trees), options


# --------------------------------------------------------------------------------------------------------- items


class Encoder:
    """Items of a plan's work; ``cut`` has the files that are shared, by the number that each has got."""

    def __init__(self, plan: CopyPlan) -> None:
        self._trees = {tree: position for position, tree in enumerate(plan.trees)}
        self._numbers: Dict[LargeFile, int] = {}
        self.cut: List[LargeFile] = []

    def item(self, parts: Sequence[Part]) -> Any:
        """An item as JSON knows it."""
        return [self._part(part) for part in parts]

    def _part(self, part: Part) -> Any:
        work = part.work
        at = self._place(work.directory)
        if isinstance(work, Links):
            return {"links": work.names, "at": at}
        if isinstance(work, LargeFile):
            file = _encode_file(work.file)
            if part.end - part.start in (0, work.file.entry.size):
                return {"large": file, "at": at}
            return {"large": file, "at": at, "number": self._number(work), "part": (part.start, part.end)}
        return {"files": [_encode_file(file) for file in work.files], "at": at}

    def _place(self, directory: Optional[Directory]) -> Any:
        if directory is None:
            return None
        request = directory.request()
        return self._trees[directory.tree], request.components, request.links, directory.identity[1:]

    def _number(self, large: LargeFile) -> int:
        if large not in self._numbers:
            self._numbers[large] = len(self.cut)
            self.cut.append(large)
        return self._numbers[large]


def _encode_file(file: PlannedFile) -> Any:
    entry = file.entry
    return file.name, entry.name, entry.size, entry.ino, entry.mtime, file.replaces, file.shown, file.compare


def _decode_file(value: Any) -> PlannedFile:
    path, name, size, inode, mtime, replaces, shown, compare = value
    return PlannedFile(path, FileEntry(name, size, 0, inode, mtime), replaces, shown, compare)


class Decoder:
    """Items become work again, on trees that hold just the directories which these name.

    ``cut`` has the files that are shared and that this rank has a part of, with their numbers.
    """

    def __init__(self, plan: CopyPlan, shared: Shared) -> None:
        self.cut: List[Tuple[LargeFile, int]] = []
        self._trees = plan.trees
        self._shared = shared

    def work(self, item: Any) -> Work:
        """What an item asks for."""
        work = Work([], [], [])
        for value in item:
            directory = self._directory(value["at"])
            if "links" in value:
                work.links.append(Links(directory, tuple((s, name, replaces) for s, name, replaces in value["links"])))
            elif "large" in value:
                work.larges.append(self._large(directory, value))
            else:
                files = [_decode_file(file) for file in value["files"]]
                work.queues.append(Queue(directory, iter(files), len(files)))
        return work

    def _large(self, directory: Optional[Directory], value: Any) -> LargeFile:
        file = _decode_file(value["large"])
        if "part" not in value:
            return LargeFile(directory, file)
        start, end = value["part"]
        large = SharedFile(directory, file, value["number"], (start, end), self._shared)
        self.cut.append((large, value["number"]))
        return large

    def _directory(self, place: Any) -> Optional[Directory]:
        if place is None:
            return None
        tree, components, links, identity = place
        directory = Directory(self._trees[tree], None, "", False)
        for level, name in enumerate(components):
            directory = Directory(self._trees[tree], directory, name, level in links)
        directory.identity = Identity(0, *identity)
        return directory
