# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""dropcache: the pages are really gone, dirty ones are written first, and what fails is named."""
from __future__ import annotations

import ctypes
import errno
import mmap
import os
from unittest import mock

import support
from support import Fifo, Link, Random

from mlperf_common.fileio import dropcache

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def cached_pages(path: str) -> int:
    """How many pages of the file are in the page cache: mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        vector = ctypes.create_string_buffer((size + PAGE - 1) // PAGE)
        if libc.mincore(address, size, vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        libc.munmap(address, size)
        return sum(byte & 1 for byte in vector.raw)
    finally:
        os.close(fd)


class Dropping(support.TestCase):
    def cached(self, name: str, tree: object) -> str:
        """Make a file whose pages are in the cache; those just written are dirty."""
        path = self.make(name, tree)
        self.assertGreater(cached_pages(path), 0, "the filesystem under TMPDIR caches nothing")
        return path

    def test_dirty_pages_of_a_file(self) -> None:
        path = self.cached("f", Random(4 * MIB + 5))
        result = support.run_tool("dropcache", path, expect=0)
        self.assertEqual(cached_pages(path), 0)
        self.assertEqual((result.stdout, result.stderr.count("\n")), ("", 1))
        self.assertIn("dropped 1 file of 4.0 MiB", result.stderr)
        self.assert_same_tree(path, Random(4 * MIB + 5))

    def test_a_tree(self) -> None:
        files = ["t/a", "t/d/b", "t/d/e/c"]
        self.make("t", {"a": Random(MIB), "d": {"b": Random(1), "e": {"c": Random(70_000)}}, "empty": b"",
                        "link": Link("d")})
        result = support.run_tool("dropcache", self.path("t"), expect=0)
        self.assertEqual([cached_pages(self.path(name)) for name in files], [0, 0, 0])
        self.assertIn("dropped 6 files", result.stderr)  # those in d by both of its names

    def test_a_link_to_a_file(self) -> None:
        path = self.cached("f", Random(MIB))
        support.run_tool("dropcache", self.make("l", Link("f")), expect=0)
        self.assertEqual(cached_pages(path), 0)

    def test_a_path_longer_than_the_kernel_takes(self) -> None:
        self.make("t", {})
        before = os.open(".", os.O_RDONLY)
        self.addCleanup(os.close, before)
        self.addCleanup(os.fchdir, before)
        os.chdir(self.path("t"))
        for _ in range(30):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
        with open("f", "wb") as stream:
            stream.write(b"x" * 100_000)
        support.run_tool("dropcache", self.path("t"), expect=0)
        self.assertEqual(cached_pages("f"), 0)

    @support.needs_nobody
    def test_somebody_elses_dirty_file(self) -> None:
        path = self.cached("f", Random(MIB))
        os.chmod(path, 0o444)
        support.run_tool("dropcache", path, user=support.NOBODY, expect=0)
        self.assertEqual(cached_pages(path), 0)

    def test_quiet(self) -> None:
        result = support.run_tool("dropcache", "-q", self.make("f", b"x"), expect=0)
        self.assertEqual((result.stdout, result.stderr), ("", ""))


class Failing(support.TestCase):
    def test_the_others_go_on(self) -> None:
        path = self.make("f", Random(MIB))
        result = support.run_tool("dropcache", self.path("missing\n"), path, "", expect=1)
        self.assertEqual(cached_pages(path), 0)
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 3)
        self.assertIn("missing'$'\\n", lines[0])
        self.assertIn("''", lines[1])
        self.assertTrue(lines[2].endswith("; 2 failed"), lines[2])

    def test_special_files(self) -> None:
        self.make("t", {"p": Fifo(), "f": Random(MIB)})
        for operand in ("t", "t/p"):
            result = support.run_tool("dropcache", self.path(operand), expect=1)
            self.assertIn("t/p' is a FIFO", result.stderr)
        self.assertGreater(cached_pages(self.path("t/f")), 0)
        for operand in ("t/p", "t"):
            result = support.run_tool("dropcache", "--skip-special", self.path(operand), expect=0)
            self.assertIn("warning: skipping FIFO", result.stderr)
        self.assertEqual(cached_pages(self.path("t/f")), 0)

    @support.needs_nobody
    def test_what_may_not_be_read(self) -> None:
        self.make("t", {"f": support.File(b"x", mode=0), "d": support.Dir({}, mode=0)})
        paths = self.path("t"), self.path("t/f")
        result = support.run_tool("dropcache", *paths, user=support.NOBODY, expect=1)
        self.assertIn("t/d': Permission denied", result.stderr)
        self.assertIn("cannot drop", result.stderr)

    def test_what_has_become_a_fifo_does_not_hang(self) -> None:
        self.make("t", {"p": Fifo()})
        with mock.patch("mlperf_common.fileio.copyplan.list_relative_files", return_value=["p"]), \
                mock.patch("mlperf_common.fileio.command.say") as said:
            self.assertEqual(dropcache.main([self.path("t")]), 1)
        self.assertIn("it is a FIFO", said.call_args_list[0][0][1])

    def test_usage(self) -> None:
        for argv in ((), ("--frobnicate", "f")):
            result = support.run_tool("dropcache", *argv, expect=2)
            self.assertEqual(result.stderr.count("\n"), 2)

    def test_errors_of_the_calls(self) -> None:
        path = self.make("f", b"x")
        for call, number, status in (("fdatasync", errno.EIO, 1), ("fdatasync", errno.EROFS, 0),
                                     ("fdatasync", errno.EINVAL, 0), ("posix_fadvise", errno.EINVAL, 1)):
            with mock.patch(f"os.{call}", side_effect=OSError(number, os.strerror(number))), \
                    mock.patch("mlperf_common.fileio.command.say") as said:
                self.assertEqual(dropcache.main(["-q", path]), status, (call, number))
            self.assertEqual(said.called, status == 1)


class OtherFilesystems(support.TestCase):
    def test_proc(self) -> None:
        support.run_tool("dropcache", "/proc/self/status", expect=0)

    @support.needs_root
    @support.slow
    def test_read_only(self) -> None:
        with support.mounted("ext4") as place:
            support.make_tree(os.path.join(place, "f"), Random(MIB))
            with support.mounted_at(self.make("ro", {}), "--bind", "-o", "ro", place) as read_only:
                path = os.path.join(read_only, "f")
                support.run_tool("dropcache", path, expect=0)
                self.assertEqual(cached_pages(path), 0)


if __name__ == "__main__":
    support.main()
