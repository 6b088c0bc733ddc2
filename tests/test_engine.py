#!/usr/bin/env python3
# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""How bytes move: every size around a buffer and an extent, holes, O_DIRECT and what is done without it.

Each test asks the same of one worker and of four. Extents and buffers are made small, so that a file of 130 KB is as
large a matter as one of 130 MB.
"""

# Takes about 8 s
from __future__ import annotations

import errno
import fcntl
import os
import unittest
from typing import Any, Dict, Iterator, List
from unittest import mock

import copying
import support
from copying import KIB, MIB
from support import Digest, Link, Random, Sparse, needs_root

from mlperf_common.fileio import workers

BUFFER = 16 * KIB
EXTENT = 64 * KIB
WORKERS = (1, 4)


def sizes(buffer_size: int = BUFFER, extent: int = EXTENT) -> List[int]:
    """Every size at which something else happens."""
    around = [0, 1, 511, 512, 513, 4095, 4096, 4097]
    around += [size + step for size in (buffer_size, extent) for step in (-1, 0, 1)]
    return sorted({*around, 2 * buffer_size, 2 * extent, 2 * extent + 7})


def tree(found: List[int]) -> Dict[str, Any]:
    """A file of each size, no two of them alike."""
    return {f"{size}": Random(size, seed=size) for size in found}


class EngineCase(support.TestCase):
    """`copies` runs a test's copy with one worker and with four, each into a new directory."""

    def copies(self) -> Iterator[Any]:
        for count in WORKERS:
            destination = self.path(f"copy-by-{count}")
            support.remove_tree(destination)
            yield count, destination

    def assert_copied(self, source: str, destination: str, outcome: copying.Outcome) -> None:
        """Complete, the same, and nothing left over."""
        summary, said = outcome
        self.assertEqual((said.failures, said.lines, summary.stopped), ([], [], ""))
        self.assertTrue(summary.is_complete())
        self.assert_same_tree(destination, source, modes=True)
        self.assert_no_leftovers(destination)

    def assert_failed(self, source: str, destination: str, outcome: copying.Outcome, name: str, reason: str) -> None:
        """`name` alone is missing, and the others are there."""
        summary, said = outcome
        self.assertEqual([os.path.basename(failed) for failed, _ in said.failures], [name])
        self.assertIn(reason, said.reason())
        self.assertFalse(summary.is_complete())
        expected = support.read_tree(source)
        del expected[name]
        self.assert_same_tree(destination, expected)
        self.assert_no_leftovers(destination)


class Sizes(EngineCase):
    def run_table(self, source_root: str, destination_root: str, direct: List[str]) -> None:
        """The table: sizes x extents x buffers x workers; `direct` are the sides that must move without the cache."""
        number = 0
        for buffer_size in (8 * KIB, BUFFER, 2 * MIB):
            for extent in (BUFFER, EXTENT):
                source = os.path.join(source_root, f"source-{buffer_size}-{extent}")
                support.make_tree(source, tree(sizes(buffer_size if buffer_size < MIB else BUFFER, extent)))
                for count in WORKERS:
                    with self.subTest(buffer=buffer_size, extent=extent, workers=count):
                        number += 1
                        destination = os.path.join(destination_root, f"copy-{number}")
                        with copying.limits(extent, 1):
                            outcome = copying.copy(source, destination, count, buffer_size=buffer_size)
                        self.assert_copied(source, destination, outcome)
                        self.assertEqual(sorted(outcome[0].direct), direct)

    def test_direct(self) -> None:
        self.run_table(self.path(""), self.path(""), ["destination", "source"])

    def test_buffered_because_it_was_asked_for(self) -> None:
        with copying.buffered():
            self.run_table(self.path(""), self.path(""), [])

    @needs_root
    def test_a_source_without_direct(self) -> None:
        # ramfs, since tmpfs has learned to answer O_DIRECT (Linux 6.6).
        with support.mounted_at(self.path("ram"), "-t", "ramfs", "ramfs") as ram:
            self.run_table(ram, self.path(""), ["destination"])

    @needs_root
    def test_a_destination_without_direct(self) -> None:
        with support.mounted_at(self.path("ram"), "-t", "ramfs", "ramfs") as ram:
            self.run_table(self.path(""), ram, ["source"])

    def test_sizes_of_small_files_as_they_are_by_default(self) -> None:
        source = self.make("s", tree([*sizes(), 2 * MIB - 1, 2 * MIB, 2 * MIB + 1]))
        for count, destination in self.copies():
            outcome = copying.copy(source, destination, count)
            self.assert_copied(source, destination, outcome)
            self.assertEqual(outcome[0].io_mode(), "direct")

    def test_the_default_extent(self) -> None:
        source = self.make("s", {"a": Random(64 * MIB + 5000, seed=1)})
        for count, destination in self.copies():
            outcome = copying.copy(source, destination, count, buffer_size=8 * MIB)
            self.assert_copied(source, destination, outcome)

    def test_sums(self) -> None:
        found = sizes()
        source = self.make("s", {"d": tree(found), "e": {}, "l": Link("d/1")})
        for count, destination in self.copies():
            with copying.limits(EXTENT, 1):
                summary, said = copying.copy(source, destination, count, buffer_size=BUFFER)
            self.assertEqual((summary.files, summary.bytes), (len(found) + 1, sum(found) + 1))
            self.assertEqual((summary.directories, summary.failed, summary.not_tried), (3, 0, 0))
            names = [os.path.join(source, "d", f"{size}") for size in found] + [os.path.join(source, "l")]
            self.assertEqual(sorted(said.done), sorted(names))

    def test_progress_reaches_every_byte(self) -> None:
        source = self.make("s", tree(sizes()))
        for count, destination in self.copies():
            moved: List[int] = []
            with copying.limits(EXTENT, 1):
                copying.copy(source, destination, count, buffer_size=BUFFER, on_moved=moved.append)
            self.assertEqual(sum(moved), sum(sizes()))

    def test_operands_that_are_files(self) -> None:
        self.make("s", tree(sizes()))
        for count, destination in self.copies():
            os.mkdir(destination)
            names = [self.path("s", f"{size}") for size in sizes()]
            with copying.limits(EXTENT, 1):
                outcome = copying.copy(names, destination, count, buffer_size=BUFFER)
            self.assert_copied(self.path("s"), destination, outcome)

    def test_files_are_replaced_whole(self) -> None:
        # With -f they come under a temporary name first; what was longer or shorter before must not show.
        source = self.make("s", tree(sizes()))
        old = {f"{size}": Random(200_000 - size, seed=3) for size in sizes()}
        for count, destination in self.copies():
            support.make_tree(destination, {"s": old})
            with copying.limits(EXTENT, 1):
                outcome = copying.copy(source, destination, count, force=True, buffer_size=BUFFER)
            self.assert_copied(source, os.path.join(destination, "s"), outcome)

    def test_many_large_files_among_small_ones(self) -> None:
        source = self.make("s", {"a": tree([3 * EXTENT, 5, 3 * EXTENT + 1]), "b": tree([7, 2 * EXTENT + 1]), "c": {}})
        for count, destination in self.copies():
            with copying.limits(EXTENT, 1):
                outcome = copying.copy(source, destination, count, buffer_size=BUFFER)
            self.assert_copied(source, destination, outcome)


class Holes(EngineCase):
    # Positions and lengths are multiples of what a filesystem allocates at once, here and below 64 KiB everywhere.
    BLOCK = 64 * KIB
    DATA = (b"data " * BLOCK)[:BLOCK]

    def shapes(self) -> Dict[str, Sparse]:
        """Name -> a file with holes; names end in the blocks that hold data."""
        block, data = self.BLOCK, self.DATA
        return {
            "one-hole-0": Sparse(8 * block),
            "one-hole-odd-0": Sparse(8 * block + 7),
            "ends-in-a-hole-1": Sparse(8 * block, {0: data}),
            "ends-in-an-odd-hole-1": Sparse(8 * block + 5000, {0: data}),
            "begins-with-a-hole-1": Sparse(8 * block, {7 * block: data}),
            "data-hole-data-2": Sparse(8 * block, {0: data, 7 * block: data}),
            "data-hole-data-odd-2": Sparse(7 * block + 5, {block: data, 7 * block: b"last!"}),
            "hole-data-hole-data-hole-2": Sparse(9 * block + 1, {2 * block: data, 5 * block: data}),
        }

    def test_holes_stay_holes(self) -> None:
        source = self.make("s", self.shapes())
        for extent in (self.BLOCK, 3 * self.BLOCK, 64 * MIB):
            for direct_minimum in (1, MIB):
                for count, destination in self.copies():
                    with self.subTest(extent=extent, direct=direct_minimum), copying.limits(extent, direct_minimum):
                        outcome = copying.copy(source, destination, count, buffer_size=BUFFER)
                        self.assert_copied(source, destination, outcome)
                        for name in self.shapes():
                            data = int(name[-1]) * self.BLOCK
                            self.assertLessEqual(copying.blocks(os.path.join(destination, name)), data, name)

    def test_a_large_file_that_is_only_a_hole(self) -> None:
        source = self.make("s", {"hole": Sparse(1 << 40)})
        for count, destination in self.copies():
            outcome = copying.copy(source, destination, count)
            self.assertTrue(outcome[0].is_complete())
            self.assertEqual(os.path.getsize(os.path.join(destination, "hole")), 1 << 40)
            self.assertLess(copying.blocks(os.path.join(destination, "hole")), MIB)

    def test_zeros_that_are_stored_are_copied(self) -> None:
        source = self.make("s", {"zeros": bytes(300_000)})
        for count, destination in self.copies():
            with copying.limits(EXTENT, 1):
                self.assert_copied(source, destination, copying.copy(source, destination, count, buffer_size=BUFFER))

    def test_no_data_at_all_is_not_believed_of_a_file_with_blocks(self) -> None:
        source = self.make("s", self.shapes())

        def nothing_here(fd: int, offset: int, whence: int) -> int:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))

        for count, destination in self.copies():
            with mock.patch.object(os, "lseek", nothing_here), copying.limits(EXTENT, 1):
                self.assert_copied(source, destination, copying.copy(source, destination, count, buffer_size=BUFFER))

    def test_a_filesystem_that_cannot_tell(self) -> None:
        source = self.make("s", self.shapes())

        def not_here(fd: int, offset: int, whence: int) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        for count, destination in self.copies():
            with mock.patch.object(os, "lseek", not_here), copying.limits(EXTENT, 1):
                self.assert_copied(source, destination, copying.copy(source, destination, count, buffer_size=BUFFER))

    def test_a_file_without_holes_is_never_asked_for_them(self) -> None:
        # Filesystems have answered "hole" for data that was written a moment ago.
        source = self.make("s", tree(sizes()))
        for count, destination in self.copies():
            with mock.patch.object(os, "lseek", side_effect=AssertionError), copying.limits(EXTENT, 1):
                self.assert_copied(source, destination, copying.copy(source, destination, count, buffer_size=BUFFER))


def is_direct(fd: int) -> bool:
    """Whether a descriptor has O_DIRECT."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def refusing(call: Any, number: int, calls: int = 0) -> Any:
    """`call` (os.preadv, os.pwritev) that answers `number` to every O_DIRECT transfer but the first `calls`."""
    done = [0]

    def transfer(fd: int, *args: Any) -> int:
        if is_direct(fd):
            done[0] += 1
            if done[0] > calls:
                raise OSError(number, os.strerror(number))
        return int(call(fd, *args))

    return transfer


class FallingBack(EngineCase):
    """What is refused at a file's first transfer is done buffered; after that every error is real."""

    def assert_falls_back(self, name: str, side: str, number: int) -> None:
        source = self.make("s", tree(sizes()))
        for count, destination in self.copies():
            with mock.patch.object(os, name, refusing(getattr(os, name), number)), copying.limits(EXTENT, 1):
                outcome = copying.copy(source, destination, count, buffer_size=BUFFER)
            self.assert_copied(source, destination, outcome)
            mode = f"{side}: {os.strerror(number)} at the first transfer"
            self.assertEqual(outcome[0].io_mode(), f"partly direct ({mode})")

    def test_reading_is_refused(self) -> None:
        self.assert_falls_back("preadv", "source", errno.EINVAL)

    def test_writing_is_refused(self) -> None:
        self.assert_falls_back("pwritev", "destination", errno.EINVAL)

    def test_by_another_name(self) -> None:
        self.assert_falls_back("pwritev", "destination", errno.EOPNOTSUPP)

    def test_both_are_refused(self) -> None:
        source = self.make("s", tree(sizes()))
        for count, destination in self.copies():
            with mock.patch.object(os, "preadv", refusing(os.preadv, errno.EINVAL)), copying.limits(EXTENT, 1):
                with mock.patch.object(os, "pwritev", refusing(os.pwritev, errno.EINVAL)):
                    outcome = copying.copy(source, destination, count, buffer_size=BUFFER)
            self.assert_copied(source, destination, outcome)
            self.assertTrue(outcome[0].io_mode().startswith("buffered (destination: Invalid argument"))

    def test_after_bytes_have_moved_it_is_an_error(self) -> None:
        source = self.make("s", {"f": Random(3 * BUFFER)})
        for name in ("preadv", "pwritev"):
            for count, destination in self.copies():
                with mock.patch.object(os, name, refusing(getattr(os, name), errno.EINVAL, 1)), copying.limits(MIB, 1):
                    outcome = copying.copy(source, destination, count, buffer_size=BUFFER)
                self.assert_failed(source, destination, outcome, "f", "Invalid argument")

    def test_another_error_at_the_first_transfer_is_an_error(self) -> None:
        source = self.make("s", {"f": Random(3 * EXTENT)})
        for number in (errno.EIO, errno.EPERM):
            for count, destination in self.copies():
                with mock.patch.object(os, "preadv", refusing(os.preadv, number)), copying.limits(EXTENT, 1):
                    outcome = copying.copy(source, destination, count, buffer_size=BUFFER)
                self.assert_failed(source, destination, outcome, "f", os.strerror(number))

    def test_small_files_are_not_said_to_be_direct(self) -> None:
        # Two ways to move a small file: in one piece, and by its data segments.
        for name, content in (("dense", Random(5000)), ("sparse", Sparse(300_000, {0: b"x" * 5000}))):
            source = self.make(name, {"f": content})
            for count, destination in self.copies():
                summary, _ = copying.copy(source, destination, count)
                self.assertEqual(summary.io_mode(), "buffered (small files)", name)


class SourcesThatMove(EngineCase):
    """The size that the plan saw is the size that is copied, or the file has failed."""

    def change(self, path: str, data: bytes = b"", truncate: int = -1) -> None:
        with open(path, "r+b") as stream:
            if truncate >= 0:
                stream.truncate(truncate)
            stream.seek(0, os.SEEK_END)
            stream.write(data)

    def while_copying(self, change: Any, reason: str, size: int = 6 * EXTENT) -> None:
        """`change(path)` at the first report of bytes moved: the file is large, so its commit is still to come."""
        for count, destination in self.copies():
            source = self.path(f"s{count}")
            support.remove_tree(source)
            support.make_tree(source, {"large": Random(size), "small": Random(10)})
            waiting = [os.path.join(source, "large")]

            def moved(_: int, waiting: List[str] = waiting) -> None:
                if waiting:
                    change(waiting.pop())

            with copying.limits(EXTENT, 1), mock.patch.object(workers, "REPORT_SECONDS", 0):
                outcome = copying.copy(source, destination, count, buffer_size=BUFFER, on_moved=moved)
            self.assertEqual(waiting, [])
            self.assert_failed(source, destination, outcome, "large", reason)

    def test_it_grows(self) -> None:
        self.while_copying(lambda path: self.change(path, b"more"), "changed while it was being copied")

    def test_it_shrinks(self) -> None:
        self.while_copying(lambda path: self.change(path, truncate=5000), "")

    def test_it_is_written_in_place(self) -> None:
        def write(path: str) -> None:
            with open(path, "r+b") as stream:
                stream.write(b"new")

        self.while_copying(write, "modification time has moved")

    def test_it_is_written_in_place_and_its_time_put_back(self) -> None:
        def write(path: str) -> None:
            before = os.stat(path)
            with open(path, "r+b") as stream:
                stream.write(b"new")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

        self.while_copying(write, "status change time has moved")

    def test_another_takes_its_name(self) -> None:
        # The open file is what is copied; its status change time tells that its link has gone.
        def swap(path: str) -> None:
            support.make_tree(path + ".new", Random(6 * EXTENT, seed=9))
            os.rename(path + ".new", path)

        self.while_copying(swap, "status change time has moved")

    def test_a_directory_gets_an_entry(self) -> None:
        for count, destination in self.copies():
            source = self.make(f"s{count}", {"d": {"f": b"x"}})
            late = os.path.join(source, "d", "late")
            summary, said = copying.copy(
                source, destination, count, between=lambda late=late: support.make_tree(late, b"y")
            )
            where = os.path.join(source, "d")
            self.assertEqual(said.lines, [f"'{where}': directory changed while it was being copied"])
            self.assertFalse(summary.is_complete())
            self.assert_same_tree(destination, {"d": {"f": b"x"}})


class FilesWithoutASize(EngineCase):
    """/proc says 0 and has content; cp copies it."""

    def test_a_size_of_zero_is_read_to_its_end(self) -> None:
        with open("/proc/filesystems", "rb") as stream:
            content = stream.read()
        for count, destination in self.copies():
            outcome = copying.copy("/proc/filesystems", destination, count)
            self.assertTrue(outcome[0].is_complete(), outcome[1].failures)
            self.assertEqual(support.read_tree(destination), content)
            self.assertEqual(outcome[0].bytes, len(content))

    @unittest.skipUnless(os.path.exists("/sys/kernel/uevent_seqnum"), "needs /sys")
    def test_a_file_that_ends_before_its_size_fails(self) -> None:
        self.assertEqual(os.path.getsize("/sys/kernel/uevent_seqnum"), 4096)
        for count, destination in self.copies():
            _, said = copying.copy("/sys/kernel/uevent_seqnum", destination, count)
            self.assertIn("file ends", said.reason())
            self.assertFalse(os.path.exists(destination))


class Descriptors(EngineCase):
    def test_none_stays_open(self) -> None:
        self.make("s", {f"d{n}": {"large": Random(3 * EXTENT), "small": b"x"} for n in range(5)})
        before = sorted(os.listdir("/proc/self/fd"))
        for count, destination in self.copies():
            with copying.limits(EXTENT, 1):
                copying.copy(self.path("s"), destination, count, buffer_size=BUFFER)
            self.assertEqual(sorted(os.listdir("/proc/self/fd")), before)

    def test_nothing_is_written_beyond_an_extent(self) -> None:
        # Neighbours work at the same time: a padded write may only happen at the end of the file.
        written: List[Any] = []
        real = os.pwritev

        def watched(fd: int, buffers: Any, offset: int) -> int:
            done = real(fd, buffers, offset)
            written.append((offset, offset + done))
            return done

        source = self.make("s", {"f": Random(4 * EXTENT + 7)})
        with copying.limits(EXTENT, 1), mock.patch.object(os, "pwritev", watched):
            copying.copy(source, self.path("d"), buffer_size=3 * BUFFER)
        written.sort()
        self.assertEqual(written[-1][1], 4 * EXTENT + 4096)
        for (_, end), (start, _) in zip(written, written[1:]):
            self.assertLessEqual(end, start)

    def test_the_final_name_is_never_partly_there(self) -> None:
        source = self.make("s", {"f": Random(6 * EXTENT)})
        seen = set()

        def look(_: int) -> None:
            try:
                seen.add(os.stat(self.path("d", "f")).st_size)
            except FileNotFoundError:
                seen.add(-1)

        with copying.limits(EXTENT, 1), mock.patch.object(workers, "REPORT_SECONDS", 0):
            copying.copy(source, self.path("d"), buffer_size=BUFFER, on_moved=look)
        self.assertEqual(seen, {-1})
        self.assertIsInstance(support.read_tree(self.path("d", "f")), Digest)


if __name__ == "__main__":
    support.main()
