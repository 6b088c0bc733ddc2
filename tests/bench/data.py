# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The data that is copied: the same bytes and names from the same seed, made on demand, removed by whom made them.

Promised: no two blocks of it are alike, so that nothing on the way can compress or share them; file by file it is
written in order, so that a filesystem lays it out as well as it can. ``Data`` removes what it made and nothing else.
"""

from __future__ import annotations

import os
import random
import shutil
from typing import Dict, Iterator, List, Tuple

import machine

SEED = 20240229
PIECE = 4 << 20  # bytes made at a time
LARGE = 1 << 30
SMALL_FILES = 20_000
SMALL_IN_ONE = 100  # small files in a directory: 200 directories
SMALL_SIZES = (1 << 10, 64 << 10)  # bytes, both included, each size in between as likely
MILLION = 1_000_000
PARTS_OF_MILLION = {"million": 1, "hundredth": 100, "fivehundredth": 500, "ranked": 25}
COMPLETE = "complete"  # the name of the file that says so


class Data:
    """The sets of files under ``root``, all sizes and numbers times ``scale``.

    A set that an earlier run has left complete is used as it is, and left again.
    """

    def __init__(self, root: str, scale: float, keep: bool) -> None:
        self.root = root
        self._scale = scale
        self._keep = keep
        self._made: List[str] = []

    def get(self, name: str) -> str:
        """The path of the set ``name``, a directory; made if it is not there.

        four: 4 large files. one: 1 file of the size of these 4. small: many files of 1 to 64 KiB. tiny: 1 file of
        a few bytes. million: 1,000,000 files of a byte. hundredth: 10,000 of these, fivehundredth: 2,000,
        ranked: 40,000. walked: 50,000 in directories of 25.
        """
        place = os.path.join(self.root, "%s-%g" % (name, self._scale))
        if not os.path.exists(os.path.join(place, COMPLETE)):
            self._made.append(place)
            shutil.rmtree(place, ignore_errors=True)
            os.makedirs(os.path.join(place, name))
            for path, size in self.files(name):
                _make_file(os.path.join(place, name, path), size)
            machine.sync_filesystem(place)
            with open(os.path.join(place, COMPLETE), "w"):
                pass
        return os.path.join(place, name)

    def files(self, name: str) -> Iterator[Tuple[str, int]]:
        """The relative path and size of each file of a set, a directory's files one after the other."""
        large = max(4096, int(LARGE * self._scale) // 4096 * 4096)
        if name == "four":
            return iter([("large%d" % number, large) for number in range(4)])
        if name == "one":
            return iter([("huge", 4 * large)])
        if name == "tiny":
            return iter([("tiny", 10)])
        if name == "walked":
            count = max(10, int(50_000 * self._scale))
            return iter([("directory%04d/file%02d" % divmod(number, 25), 1) for number in range(count)])
        if name in PARTS_OF_MILLION:
            return self._entries(int(MILLION // PARTS_OF_MILLION[name] * self._scale))
        return self._small()

    def _small(self) -> Iterator[Tuple[str, int]]:
        chance = random.Random(SEED)
        for number in range(max(10, int(SMALL_FILES * self._scale))):
            where, which = divmod(number, SMALL_IN_ONE)
            yield "directory%03d/file%03d" % (where, which), chance.randint(*SMALL_SIZES)

    def _entries(self, count: int) -> Iterator[Tuple[str, int]]:
        for number in range(max(10, count)):
            where, which = divmod(number, SMALL_IN_ONE)
            yield "directory%05d/file%03d" % (where, which), 1

    def size(self, name: str) -> int:
        """How many bytes a set holds."""
        return sum(size for _, size in self.files(name))

    def clean(self) -> None:
        """Remove what was made here, unless it is to be kept."""
        if not self._keep:
            for place in self._made:
                shutil.rmtree(place)
            try:
                os.rmdir(self.root)
            except OSError:  # others' data is in it
                pass


def _make_file(path: str, size: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # The name seeds it: its bytes are the same whatever was made before.
    chance = random.Random("%d %s" % (SEED, os.path.basename(os.path.dirname(path)) + os.path.basename(path)))
    with open(path, "wb", buffering=0) as stream:
        while size:
            count = min(size, PIECE)
            stream.write(chance.getrandbits(8 * count).to_bytes(count, "little"))
            size -= count


def differences(source: str, copy: str) -> List[str]:
    """In what the trees, or files, differ: names, kinds, bytes."""
    if os.path.isfile(source):
        return [] if _same_bytes(source, copy) else [copy]
    ours, theirs = _tree(source), _tree(copy)
    wrong = sorted(ours.keys() ^ theirs.keys())
    return wrong + [name for name in sorted(ours.keys() & theirs.keys()) if not _alike(ours[name], theirs[name])]


def _tree(root: str) -> Dict[str, str]:
    """Relative path -> path of all files and directories below ``root``."""
    return {
        os.path.relpath(os.path.join(top, name), root): os.path.join(top, name)
        for top, directories, files in os.walk(root)
        for name in [*directories, *files]
    }


def _alike(one: str, other: str) -> bool:
    if os.path.isdir(one) or os.path.isdir(other):
        return os.path.isdir(one) and os.path.isdir(other)
    return _same_bytes(one, other)


def _same_bytes(one: str, other: str) -> bool:
    if os.path.getsize(one) != os.path.getsize(other):
        return False
    with open(one, "rb", buffering=0) as first, open(other, "rb", buffering=0) as second:
        while True:
            piece = first.read(PIECE)
            if piece != second.read(PIECE):
                return False
            if not piece:
                return True
