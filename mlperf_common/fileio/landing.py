# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What stands already where a plan's files and directories will land. Reads only.

One listing for each existing destination directory that the plan meets, not one stat for each file.
"""

from __future__ import annotations

import errno
import os
import stat
from array import array
from typing import Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from mlperf_common.fileio.refusals import (
    EXISTS,
    NOT_REGULAR,
    OVER_DIRECTORY,
    OVER_FILE,
    OVER_SOURCE,
    SAME_FILE,
    DestinationExists,
    DirectoryInTheWay,
    NonDirectoryInTheWay,
    NotRegularDestination,
    OverwritesSource,
    Refusals,
    SameFile,
    UnusableDestination,
)
from mlperf_common.fileio.walk import (
    FIELDS,
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
)


class LooseFile(NamedTuple):
    """A source operand that is a file: its path, the name that it gets in the base, what was seen of it."""

    source: str
    shown: str
    name: str
    entry: FileEntry
    standing: Optional[os.stat_result]  # what it will replace


class Base(NamedTuple):
    """The existing directory in which everything lands: the target, or the parent of a new name."""

    path: str
    shown: str
    identity: Identity


class DestinationCheck:
    """The plan against what DEST holds already: one listing for each of its directories that the plan meets."""

    def __init__(self, base: Base, trees: Sequence[Tree], loose: Sequence[LooseFile], refusals: Refusals) -> None:
        self._base = base
        self._trees = trees
        self._loose = loose
        self._refusals = refusals
        self._directories = {d.identity[:2] for d in breadth_first(trees)}
        self._inodes: Set[int] = set()

    def run(self, list_directories: ListDirectories) -> None:
        """Fill ``destination`` and ``existing`` of the directories that stand already; note what is in the way."""
        for file in self._loose:
            self._check_loose(file)
        level = [tree.root for tree in self._trees if tree.root.existing is not None]
        while level:
            requests = [Request(self._base.path, d.landing(), (), True) for d in level]
            following: List[Directory] = []
            for directory, listing in zip(level, list_directories(requests)):
                if isinstance(listing, DestinationListing):
                    following.extend(self._compare(directory, listing))
            level = following

    def _shown(self, directory: Directory, name: str = "") -> str:
        return os.path.join(self._base.shown, *directory.landing(), *([name] if name else []))

    def _check_loose(self, file: LooseFile) -> None:
        if file.standing is None:
            return
        shown = os.path.join(self._base.shown, file.name)
        self._refusals.add(DestinationExists, EXISTS, shown)
        if stat.S_ISREG(file.standing.st_mode) and self._is_source(file.standing):
            self._refusals.add(OverwritesSource, OVER_SOURCE, shown, file.shown)

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
        found = self._asked(directory) if listing.errno else _found(listing)
        return self._meet(directory, found)

    def _meet(self, directory: Directory, found: Iterable[Tuple[bytes, str, int]]) -> List[Directory]:
        """Sort out the names that are both planned and there; the directories to go on with."""
        following = []
        children = {os.fsencode(child.name): child for child in directory.children}
        files = set(directory.file_names())
        for name, kind, inode in found:
            child = children.get(name)
            if child is not None and kind == "d":
                following.append(child)
            elif child is not None:
                self._refusals.add(NonDirectoryInTheWay, OVER_FILE, self._shown(child), child.shown())
            elif name in files:
                self._meet_file(directory, name, kind, inode)
        return following

    def _meet_file(self, directory: Directory, name: bytes, kind: str, inode: int) -> None:
        text = os.fsdecode(name)
        shown = self._shown(directory, text)
        if kind == "d":
            self._refusals.add(DirectoryInTheWay, OVER_DIRECTORY, shown)
        elif kind == "o":
            self._refusals.add(NotRegularDestination, NOT_REGULAR, shown)
        else:
            self._refusals.add(DestinationExists, EXISTS, shown)
            if directory.existing is not None:
                directory.existing.add(name)
            if kind == "l" or inode in self._source_inodes():
                self._look_closer(directory, text, shown, kind)

    def _look_closer(self, directory: Directory, name: str, shown: str, kind: str) -> None:
        """A link, or an inode number that a source has too: is it a source?"""
        try:
            st = self._stat(directory, name, follow=kind == "l")
        except OSError:  # a dangling link, or gone by now: no source either way
            return
        if stat.S_ISDIR(st.st_mode):
            self._refusals.add(DirectoryInTheWay, OVER_DIRECTORY, shown)
        planned = next(f for f in directory.files() if f.name == name)
        if (st.st_dev, st.st_ino) == (planned.dev, planned.ino):
            self._refusals.add(SameFile, SAME_FILE, directory.shown(name), shown)
        elif kind != "l" and self._is_source(st):
            self._refusals.add(OverwritesSource, OVER_SOURCE, shown, directory.shown(name))

    def _stat(self, directory: Directory, name: str, follow: bool) -> os.stat_result:
        chain = open_chain(open_root(self._base.path, True), True)
        try:
            return os.stat(name, dir_fd=chain.open(directory.landing()), follow_symlinks=follow)
        finally:
            chain.close()

    def _asked(self, directory: Directory) -> List[Tuple[bytes, str, int]]:
        """A directory that may be written but not listed (0733) is asked for each planned name."""
        found = []
        names = directory.file_names() + [os.fsencode(child.name) for child in directory.children]
        for name in names:
            try:
                st = self._stat(directory, os.fsdecode(name), follow=False)
            except FileNotFoundError:
                continue
            found.append((name, _letter_of(st.st_mode), st.st_ino))
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


def _found(listing: DestinationListing) -> Iterator[Tuple[bytes, str, int]]:
    inodes = array("Q")
    inodes.frombytes(listing.inodes)
    names = listing.names.split(b"\0") if inodes else []
    return zip(names, listing.kinds.decode(), inodes)


def _letter_of(mode: int) -> str:
    return {stat.S_IFLNK: "l", stat.S_IFDIR: "d", stat.S_IFREG: "f"}.get(stat.S_IFMT(mode), "o")
