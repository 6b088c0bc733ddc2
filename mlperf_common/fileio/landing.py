# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What stands already where a plan's files and directories will land. Reads only.

One listing for each existing destination directory that the plan meets, not one stat for each file.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from array import array
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from mlperf_common.fileio.refusals import (
    EXISTS,
    LINK_EXISTS,
    LINK_NEWER,
    NEWER,
    NOT_REGULAR,
    OVER_DIRECTORY,
    OVER_FILE,
    OVER_SOURCE,
    SAME_FILE,
    DestinationExists,
    DestinationNewer,
    DirectoryInTheWay,
    NonDirectoryInTheWay,
    NotRegularDestination,
    OverwritesSource,
    Refusals,
    SameFile,
    UnusableDestination,
)
from mlperf_common.fileio.traces import Traces
from mlperf_common.fileio.walk import (
    FIELDS,
    TIME_MASK,
    DestinationListing,
    Directory,
    FileEntry,
    Identity,
    ListDirectories,
    Request,
    Tree,
    breadth_first,
    open_chain,
    open_root,
    opened,
)


class Wishes(NamedTuple):
    """What the user wants of what exists: ``force`` replaces it; ``update`` only what is older; ``checksum``: only what
    differs."""

    force: bool = False
    update: bool = False
    checksum: bool = False


class LooseFile(NamedTuple):
    """A source operand that is a file, or a link to be copied as one: its path, the name that it gets in the base,
    what was seen of it.

    ``compare``: its bytes decide whether it is copied. ``left``: it is linked to another name and not copied.
    """

    source: str
    shown: str
    name: str
    entry: FileEntry
    standing: Optional[os.stat_result]  # what it will replace
    is_link: bool = False
    compare: bool = False
    left: bool = False
    nlink: int = 1
    allocated: int = 0


class Found(NamedTuple):
    """What a destination directory has: kind and inode of a name; size and mtime, if they were asked for."""

    name: bytes
    kind: str
    inode: int
    size: int
    mtime: int


class Base(NamedTuple):
    """The existing directory in which everything lands: the target, or the parent of a new name."""

    path: str
    shown: str
    identity: Identity


class DestinationCheck:
    """The plan against what DEST holds already: one listing for each of its directories that the plan meets.

    Afterwards ``unchanged`` has the names that -u leaves alone, by directory (None: the operands), ``traces`` what
    other runs have there.
    """

    def __init__(
        self, base: Base, trees: Sequence[Tree], loose: List[LooseFile], refusals: Refusals, wishes: Wishes
    ) -> None:
        self.unchanged: Dict[Optional[Directory], Set[bytes]] = {}
        self.traces = Traces()
        self._base = base
        self._trees = trees
        self._loose = loose
        self._refusals = refusals
        self._wishes = wishes
        self._directories = {d.identity[:2] for d in breadth_first(trees)}
        self._inodes: Set[int] = set()

    def count(self) -> int:
        """How many names are left alone."""
        return sum(len(names) for names in self.unchanged.values())

    def run(self, list_directories: ListDirectories) -> None:
        """Fill ``destination`` and ``existing`` of the directories that stand already; note what is in the way."""
        self._place = open_chain(open_root(self._base.path, True), True)
        try:
            self._run(list_directories)
        finally:
            self._place.close()

    def _run(self, list_directories: ListDirectories) -> None:
        replacing = self._wishes.force or self._wishes.update
        if replacing and any(file.standing is not None for file in self._loose):
            listing = list_directories([Request(self._base.path, (), (), True)])[0]
            if isinstance(listing, DestinationListing):
                self.traces.look((), listing.names.split(b"\0"))
        for position, file in enumerate(self._loose):
            self._loose[position] = self._check_loose(file)
        level = [tree.root for tree in self._trees if tree.root.existing is not None]
        while level:
            times = self._wishes.update
            requests = [Request(self._base.path, d.landing(), (), True, times=times) for d in level]
            following: List[Directory] = []
            for directory, listing in zip(level, list_directories(requests)):
                if isinstance(listing, DestinationListing):
                    following.extend(self._compare(directory, listing))
            level = following

    def _shown(self, directory: Directory, name: str = "") -> str:
        return os.path.join(self._base.shown, *directory.landing(), *([name] if name else []))

    def _check_loose(self, file: LooseFile) -> LooseFile:
        standing = file.standing
        if standing is None:
            return file
        shown = os.path.join(self._base.shown, file.name)
        if stat.S_ISREG(standing.st_mode) and self._is_source(standing):
            self._refusals.add(OverwritesSource, OVER_SOURCE, shown, file.shown)
        if file.is_link:
            self._meet_link(None, file.name, file.shown, shown, standing)
            return file
        there = (standing.st_size, standing.st_mtime_ns) if stat.S_ISREG(standing.st_mode) else None
        compare = self._weigh(None, os.fsencode(file.name), file.entry, there, shown)
        return file._replace(compare=compare)

    def _weigh(
        self,
        directory: Optional[Directory],
        name: bytes,
        entry: FileEntry,
        there: Optional[Tuple[int, int]],
        shown: str,
    ) -> bool:
        """What becomes of a file that has the name, ``there`` being its size and mtime (None: it is a link).

        It is refused, left alone (noted), or replaced; True: its bytes are to decide.
        """
        if not self._wishes.update or there is None:
            self._refusals.add(DestinationExists, EXISTS, shown)
            return False
        older = signed(there[1]) < signed(entry.mtime)
        if there[0] != entry.size:
            if not older:
                self._refusals.add(DestinationNewer, NEWER, shown)
            return False
        if self._wishes.checksum:
            return True
        if not older:
            self._leave(directory, name)
        return False

    def _leave(self, directory: Optional[Directory], name: bytes) -> None:
        self.unchanged.setdefault(directory, set()).add(name)

    def _meet_link(
        self, directory: Optional[Directory], name: str, source: str, shown: str, standing: os.stat_result
    ) -> None:
        """A link would land on a file or another link; the one that it leads to must not be lost by that."""
        if self._is_target(directory, name, source, standing):
            self._refusals.add(SameFile, SAME_FILE, source, shown)
        elif self._wishes.update and stat.S_ISLNK(standing.st_mode):
            if self._says_the_same(directory, name, source):
                self._leave(directory, os.fsencode(name))
            elif standing.st_mtime_ns >= self._at_source(directory, name, source, os.lstat).st_mtime_ns:
                self._refusals.add(DestinationNewer, LINK_NEWER, shown)
        else:
            self._refusals.add(DestinationExists, LINK_EXISTS, shown)

    def _is_target(self, directory: Optional[Directory], name: str, source: str, standing: os.stat_result) -> bool:
        try:
            led_to = self._at_source(directory, name, source, os.stat)
        except OSError:  # it leads nowhere
            return False
        return (led_to.st_dev, led_to.st_ino) == (standing.st_dev, standing.st_ino)

    def _says_the_same(self, directory: Optional[Directory], name: str, source: str) -> bool:
        place = self._place.open(directory.landing() if directory else ())
        return bool(self._at_source(directory, name, source, os.readlink) == os.readlink(name, dir_fd=place))

    def _at_source(self, directory: Optional[Directory], name: str, source: str, call: Any) -> Any:
        """``call`` on a source's entry, whose path may be longer than the kernel takes."""
        if directory is None:
            return call(source)
        with opened(directory.request()) as place:
            return call(name, dir_fd=place)

    def _compare(self, directory: Directory, listing: DestinationListing) -> List[Directory]:
        shown = self._shown(directory)
        if listing.identity is None or listing.errno not in (0, errno.EACCES):
            reason = listing.reason.replace("%", "%%")
            self._refusals.add(UnusableDestination, "cannot access %s: " + reason, shown)
            return []
        directory.destination, directory.existing = listing.identity, set()
        if listing.identity[:2] == directory.identity[:2]:
            self._refusals.add(SameFile, SAME_FILE, directory.shown(), shown)
        elif listing.identity[:2] in self._directories:
            self._refusals.add(OverwritesSource, OVER_SOURCE, shown, directory.shown())
        found = self._asked(directory) if listing.errno else list(_found(listing))
        self.traces.look(directory.landing(), (there.name for there in found))
        return self._meet(directory, found)

    def _meet(self, directory: Directory, found: Iterable[Found]) -> List[Directory]:
        """Sort out the names that are both planned and there; the directories to go on with."""
        following: List[Directory] = []
        compare: Set[bytes] = set()
        children = {os.fsencode(child.name): child for child in directory.children}
        files = {os.fsencode(entry.name): entry for entry in directory.files()}
        links = {os.fsencode(link.name) for link in directory.links}
        for there in found:
            child = children.get(there.name)
            if child is not None and there.kind == "d":
                following.append(child)
            elif child is not None:
                self._refusals.add(NonDirectoryInTheWay, OVER_FILE, self._shown(child), child.shown())
            elif there.name in files:
                self._meet_file(directory, there, files[there.name], compare)
            elif there.name in links and self._is_replaceable(directory, there):
                name = os.fsdecode(there.name)
                standing = self._stat(directory, name, follow=False)
                self._meet_link(directory, name, directory.shown(name), self._shown(directory, name), standing)
        directory.compare = frozenset(compare)
        return following

    def _is_replaceable(self, directory: Directory, there: Found) -> bool:
        """Whether what has a name could make room for a file or a link; if so the name is noted."""
        shown = self._shown(directory, os.fsdecode(there.name))
        if there.kind == "d":
            self._refusals.add(DirectoryInTheWay, OVER_DIRECTORY, shown)
            return False
        if there.kind == "o":
            self._refusals.add(NotRegularDestination, NOT_REGULAR, shown)
            return False
        if directory.existing is not None:
            directory.existing.add(there.name)
        return True

    def _meet_file(self, directory: Directory, there: Found, entry: FileEntry, compare: Set[bytes]) -> None:
        if not self._is_replaceable(directory, there):
            return
        shown = self._shown(directory, entry.name)
        if self._weigh(directory, there.name, entry, (there.size, there.mtime) if there.kind == "f" else None, shown):
            compare.add(there.name)
        if there.kind == "l" or there.inode in self._source_inodes():
            self._look_closer(directory, entry, shown, there.kind)

    def _look_closer(self, directory: Directory, planned: FileEntry, shown: str, kind: str) -> None:
        """A link, or an inode number that a source has too: is it a source?"""
        try:
            st = self._stat(directory, planned.name, follow=kind == "l")
        except OSError:  # a dangling link, or gone by now: no source either way
            return
        if stat.S_ISDIR(st.st_mode):
            self._refusals.add(DirectoryInTheWay, OVER_DIRECTORY, shown)
        if (st.st_dev, st.st_ino) == (planned.dev, planned.ino):
            self._refusals.add(SameFile, SAME_FILE, directory.shown(planned.name), shown)
        elif kind != "l" and self._is_source(st):
            self._refusals.add(OverwritesSource, OVER_SOURCE, shown, directory.shown(planned.name))

    def _stat(self, directory: Directory, name: str, follow: bool) -> os.stat_result:
        return os.stat(name, dir_fd=self._place.open(directory.landing()), follow_symlinks=follow)

    def _asked(self, directory: Directory) -> List[Found]:
        """A directory that may be written but not listed (0733) is asked for each planned name."""
        found = []
        names = directory.file_names() + [os.fsencode(child.name) for child in directory.children]
        for name in names + [os.fsencode(link.name) for link in directory.links]:
            try:
                st = self._stat(directory, os.fsdecode(name), follow=False)
            except FileNotFoundError:
                continue
            mtime = st.st_mtime_ns & TIME_MASK
            found.append(Found(name, _letter_of(st.st_mode), st.st_ino, st.st_size, mtime))
        return found

    def _source_inodes(self) -> Set[int]:
        if not self._inodes:
            self._inodes = {file.entry.ino for file in self._loose}
            for directory in breadth_first(self._trees):
                self._inodes.update(directory.stats[2::FIELDS])
        return self._inodes

    def _is_source(self, st: os.stat_result) -> bool:
        """Whether a file is also a planned source. The inodes sift; few get past them."""
        if st.st_ino not in self._source_inodes():
            return False
        seen = (st.st_dev, st.st_ino)
        if any((f.entry.dev, f.entry.ino) == seen for f in self._loose):
            return True
        return any(
            (f.dev, f.ino) == seen
            for d in breadth_first(self._trees)
            if st.st_ino in d.stats[2::FIELDS]
            for f in d.files()
        )


def _found(listing: DestinationListing) -> Iterator[Found]:
    inodes, times = array("Q"), array("Q")
    inodes.frombytes(listing.inodes)
    times.frombytes(listing.times)
    if not inodes:
        return
    sizes: Iterable[int] = times[::2] or itertools.repeat(0)
    mtimes: Iterable[int] = times[1::2] or itertools.repeat(0)
    yield from map(Found, listing.names.split(b"\0"), listing.kinds.decode(), inodes, sizes, mtimes)


def signed(mtime: int) -> int:
    """A time that was cut to 64 bits, as a number that can be compared: before 1970 it is negative."""
    return mtime - (1 << 64) if mtime >= 1 << 63 else mtime


def _letter_of(mode: int) -> str:
    return {stat.S_IFLNK: "l", stat.S_IFDIR: "d", stat.S_IFREG: "f"}.get(stat.S_IFMT(mode), "o")
