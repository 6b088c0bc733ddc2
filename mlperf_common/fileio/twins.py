# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Names of one file (hard links) that are to become names of one file: who is copied, who is linked to it.

Placement only; nothing here touches a file. Not promised: that names outside of what is copied are known.
"""

from __future__ import annotations

import os
from typing import AbstractSet, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from mlperf_common.fileio.landing import LooseFile
from mlperf_common.fileio.walk import FIELDS, Directory, Tree, breadth_first


class Twin(NamedTuple):
    """One name: in a directory of a tree, or (None) an operand, then the name that it gets in the base."""

    directory: Optional[Directory]
    name: str


class Standing(NamedTuple):
    """A name that is not copied, because it stands at the destination already; an operand has a path."""

    twin: Twin
    path: str
    shown: str
    is_link: bool


def standing_of(twin: Twin, loose: Mapping[str, LooseFile]) -> Standing:
    """The same of a planned file."""
    if twin.directory is not None:
        return Standing(twin, "", "", False)
    return Standing(twin, loose[twin.name].source, loose[twin.name].shown, False)


class Family(NamedTuple):
    """A file of ``size`` bytes with several names: ``leader`` is copied, or stands already; the others follow."""

    leader: Twin
    followers: List[Twin]
    size: int


class _Group:
    def __init__(self, first: Twin, size: int) -> None:
        self.members = [first]
        self.size = size


def find_families(
    trees: Sequence[Tree], loose: List[LooseFile], unchanged: Dict[Optional[Directory], Set[bytes]]
) -> List[Family]:
    """The files with several names, in the order of the plan; followers are marked as ``left``.

    Where -u leaves one of the names alone the others are linked to that.
    """
    groups: Dict[Tuple[int, int], _Group] = {}
    for key, twin, size in _candidates(trees, loose):
        group = groups.get(key)
        if group is None:
            groups[key] = _Group(twin, size)
        else:
            group.members.append(twin)
    families = [_family(group, unchanged) for group in groups.values() if len(group.members) > 1]
    families = [family for family in families if family.followers]
    _mark(families, loose)
    return families


def _candidates(trees: Sequence[Tree], loose: Sequence[LooseFile]) -> Iterator[Tuple[Tuple[int, int], Twin, int]]:
    for file in loose:
        if file.nlink > 1:
            yield (file.entry.dev, file.entry.ino), Twin(None, file.name), file.entry.size
    for directory in breadth_first(trees):
        names = directory.file_names() if directory.twins else []
        for position in directory.twins:
            size, dev, ino = directory.stats[position * FIELDS : position * FIELDS + 3]
            yield (dev, ino), Twin(directory, os.fsdecode(names[position])), size
        for link in directory.links:
            if link.ino:
                yield (link.dev, link.ino), Twin(directory, link.name), 0


def _family(group: _Group, unchanged: Dict[Optional[Directory], Set[bytes]]) -> Family:
    nothing: AbstractSet[bytes] = frozenset()
    standing = [t for t in group.members if os.fsencode(t.name) in unchanged.get(t.directory, nothing)]
    leader = standing[0] if standing else group.members[0]
    return Family(leader, [t for t in group.members if t is not leader and t not in standing], group.size)


def _mark(families: Sequence[Family], loose: List[LooseFile]) -> None:
    left: Dict[Optional[Directory], Set[bytes]] = {}
    for family in families:
        for twin in family.followers:
            left.setdefault(twin.directory, set()).add(os.fsencode(twin.name))
    for directory, names in left.items():
        if directory is not None:
            directory.left = names
    for position, file in enumerate(loose):
        if os.fsencode(file.name) in left.get(None, ()):
            loose[position] = file._replace(left=True)
