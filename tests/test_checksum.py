# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Hashing and comparing as a library, with chunks small enough to have many: every size around them, 1, 4 workers."""

# Takes about 5 s
from __future__ import annotations

import hashlib
import os
from typing import Any, List, Sequence, Tuple
from unittest import mock

import copying
import support
from copying import IN_PROCESS, MIB
from support import Random, TestCase

from mlperf_common.fileio import checksum, comparing, digest, hashplan, hashtasks, listing, pairtasks

CHUNK = MIB
SIZES = [0, 1, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7, 5 * CHUNK + 4096]
Told = List[Tuple[str, Any]]


class Ear(hashplan.HashEvents):
    """What was said, in order: (path, chunks or the reason)."""

    def __init__(self) -> None:
        self.told: Told = []

    def hashed(self, path: str, chunks: Sequence[Any]) -> None:
        self.told.append((path, list(chunks)))

    def failed(self, path: str, why: hashtasks.Unread) -> None:
        self.told.append((path, why.reason))


def chunks_of(path: str) -> List[Tuple[int, int, str]]:
    """What hashlib says of a file."""
    with open(path, "rb") as file:
        data = file.read()
    starts = range(0, len(data), CHUNK)
    return [(at, len(data[at : at + CHUNK]), hashlib.md5(data[at : at + CHUNK]).hexdigest()) for at in starts]


def hash_all(operands: Sequence[str], workers: int, everything: bool = False) -> Told:
    """Hash operands with chunks of ``CHUNK`` bytes."""
    ear = Ear()
    pool = copying.make_pool(hashtasks.FUNCTIONS, workers)
    roots = listing.Roots(pool)
    try:
        wanted = hashplan.Wanted(everything=everything, chunk_size=CHUNK)
        looked = [(operand, os.stat(operand)) for operand in operands]
        found = hashplan.find(looked, listing.PoolLister(pool, roots), ear, wanted)
        checksum.hash_files(found, pool, roots, ear, checksum.HashSummary())
    finally:
        roots.close()
        pool.close()
    return ear.told


class Policy(TestCase):
    """Machines on which MD5 is refused unless it is not for security (FIPS), or is refused altogether."""

    def constructor(self, md5: Any) -> Any:
        with mock.patch.object(hashlib, "md5", md5):
            digest.md5_constructor.cache_clear()
            self.addCleanup(digest.md5_constructor.cache_clear)
            return digest.md5_constructor()

    def test_fips(self) -> None:
        real = hashlib.new

        def strict(data: bytes = b"", usedforsecurity: bool = True) -> Any:
            if usedforsecurity:
                raise ValueError("[digital envelope routines] unsupported")
            return real("md5", data)

        self.assertEqual(self.constructor(strict)().hexdigest(), real("md5").hexdigest())

    def test_a_python_that_does_not_know_the_word(self) -> None:
        def old(data: bytes = b"") -> Any:
            return hashlib.new("md5", data)

        self.assertEqual(self.constructor(old)().hexdigest(), hashlib.new("md5").hexdigest())

    def test_refused(self) -> None:
        def never(data: bytes = b"", usedforsecurity: bool = True) -> Any:
            raise ValueError("no MD5 here")

        with self.assertRaisesRegex(digest.DigestRefused, "MD5 is not available here: no MD5 here"):
            self.constructor(never)

    def test_it_is_one_line(self) -> None:
        # The tool itself, in a Python whose hashlib refuses.
        self.make("site", {"usercustomize.py": b"", "sitecustomize.py": REFUSING.encode()})
        self.make("f", b"x")
        env = {"PYTHONPATH": self.path("site")}
        self.make("m", b"f\t0\t1\t9dd4e461268c8034f5c8564e155c67a6\n")
        for words in (["fastmd5", "f"], ["fastmd5", "-c", "m"], ["fastcp", "--verify", "f", "g"]):
            with self.subTest(words=words):
                done = support.run_tool(*words, cwd=self.tmp, env=env, expect=1)
                self.assertIn("MD5 is not available here: no MD5\n", done.stderr)
                self.assertLessEqual(done.stderr.count("\n"), 2)
        self.assertFalse(os.path.exists(self.path("g")))
        support.run_tool("fastmd5", "--compare", "f", "f", cwd=self.tmp, env=env, expect=0)  # which needs none


REFUSING = """
import hashlib


def md5(*_, **__):
    raise ValueError("no MD5")


hashlib.md5 = md5
"""


class Hashing(TestCase):
    def test_every_size_in_every_way(self) -> None:
        root = self.make("t", {f"{size:08}": Random(size, seed=size) for size in SIZES})
        paths = [os.path.join(root, f"{size:08}") for size in SIZES]
        expected = [(path, chunks_of(path)) for path in paths]
        for workers in (IN_PROCESS, 4):
            for operands, everything in (([root], False), (paths, False), ([root], True)):
                with self.subTest(workers=workers, operands=len(operands), everything=everything):
                    told = hash_all(operands, workers, everything)
                    self.assertEqual([line for line in told if line[0] != root], expected)

    def test_a_file_that_has_grown_since_it_was_listed_is_shared_out(self) -> None:
        path = self.make("f", Random(5 * CHUNK + 1, seed=1))
        real = os.stat
        small = mock.Mock(wraps=real(path), st_mode=real(path).st_mode, st_size=3)
        for workers in (IN_PROCESS, 4):
            ear = Ear()
            pool = copying.make_pool(hashtasks.FUNCTIONS, workers)
            roots = listing.Roots(pool)
            wanted = hashplan.Wanted(chunk_size=CHUNK)
            found = hashplan.find([(path, small)], listing.PoolLister(pool, roots), ear, wanted)
            checksum.hash_files(found, pool, roots, ear, checksum.HashSummary())
            roots.close()
            pool.close()
            self.assertEqual(ear.told, [(path, chunks_of(path))])

    def test_large_files_between_small_ones_keep_their_place(self) -> None:
        sizes = {f"f{i:02}": (7 * CHUNK if i % 5 == 0 else i) for i in range(1, 40)}
        root = self.make("t", {name: Random(size, seed=size) for name, size in sizes.items()})
        told = hash_all([root], 4)
        paths = [os.path.join(root, name) for name in sorted(sizes)]
        self.assertEqual(told, [(path, chunks_of(path)) for path in paths])


class Differences(comparing.Events):
    """What differs."""

    def __init__(self) -> None:
        self.told: List[Tuple[str, str, str]] = []

    def differs(self, path: str, kind: str, text: str) -> None:
        self.told.append((path, kind, text))


class Comparing(TestCase):
    def compare(self, workers: int) -> List[Tuple[str, str, str]]:
        pool = copying.make_pool(pairtasks.FUNCTIONS, workers)
        roots = listing.Roots(pool)
        events, counts = Differences(), comparing.Counts()
        request = comparing.Request(self.path("a"), self.path("b"), chunk_size=CHUNK)
        try:
            comparing.compare(request, pool, roots, listing.PoolLister(pool, roots), events, counts)
        finally:
            roots.close()
            pool.close()
        self.assertEqual(counts.is_identical(), not events.told)
        return events.told

    def test_a_changed_byte_in_each_chunk_of_every_size(self) -> None:
        for place in ("a", "b"):
            self.make(place, {f"{size:08}": Random(size, seed=size) for size in SIZES})
        for workers in (IN_PROCESS, 4):
            self.assertEqual(self.compare(workers), [])
            for size in SIZES:
                path = self.path("b", f"{size:08}")
                for start, length, _ in chunks_of(path):
                    with self.subTest(size=size, start=start, workers=workers):
                        for at in {start, start + length - 1}:
                            self.flip(path, at)
                            text = f"bytes {start} to {start + length}"
                            self.assertEqual(self.compare(workers), [(f"{size:08}", "content", text)])
                            self.flip(path, at)

    def flip(self, path: str, at: int) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    support.main()
