# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The same tree through real filesystems: with and without O_DIRECT, nameless files, clones, folding of case."""

# Takes about 25 s
from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Any, Dict, Iterator

import support
from support import File, Link, Random, Sparse, TestCase, needs, needs_root, run_tool, slow

MIB = 1 << 20
SIZE = 320 * MIB


def tree() -> Dict[str, Any]:
    """Large, direct, small, sparse, empty; odd names; links."""
    return {
        "large": Random(65 * MIB + 7, seed=1),
        "direct": Random(2 * MIB + 1, seed=2),
        "small": File(b"x" * 777, mode=0o640),
        "sparse": Sparse(9 * MIB, {4 * MIB: b"y"}),
        "d": {"e": {}, "f": b"", "\udcff\n": b"odd", "l": Link("f")},
    }


@contextlib.contextmanager
def filesystem(case: TestCase, kind: str) -> Iterator[str]:
    """A place on a filesystem of this kind."""
    with contextlib.ExitStack() as stack:
        if kind in ("ext4", "xfs", "btrfs", "tmpfs"):
            size = SIZE if kind != "xfs" else max(SIZE, 400 * MIB)
            yield stack.enter_context(support.mounted(kind, size=size))
        elif kind == "ramfs":
            yield stack.enter_context(support.mounted_at(case.path("ramfs"), "-t", "ramfs", "ramfs"))
        elif kind == "overlay":
            below = stack.enter_context(support.mounted("ext4", size=SIZE))
            for name in ("lower", "upper", "work"):
                os.mkdir(os.path.join(below, name))
            words = ",".join(f"{key}={below}/{name}" for key, name in (
                ("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work")))
            yield stack.enter_context(support.mounted_at(case.path("overlay"), "-t", "overlay", "overlay", "-o", words))
        elif kind == "bindfs":
            place = case.path("fuse")
            os.makedirs(case.path("behind"), exist_ok=True)
            os.makedirs(place, exist_ok=True)
            support._enter_mount_namespace()
            if subprocess.run(["bindfs", case.path("behind"), place], check=False).returncode:
                case.skipTest("bindfs cannot be mounted")
            stack.callback(subprocess.run, ["umount", place], check=False)
            yield place
        else:
            yield stack.enter_context(sectors_of_4096(case))


@contextlib.contextmanager
def sectors_of_4096(case: TestCase) -> Iterator[str]:
    """ext4 on a loop device whose sectors are as large as a block."""
    image = case.path("image")
    with open(image, "wb") as file:
        file.truncate(SIZE)
    made = subprocess.run(
        ["losetup", "--sector-size", "4096", "--find", "--show", image], stdout=subprocess.PIPE, check=False, text=True
    )
    if made.returncode:
        case.skipTest("no loop device with sectors of 4096 bytes")
    device = made.stdout.strip()
    try:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with support.mounted_at(case.path("sectors"), device) as place:
            yield place
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


@slow
@needs_root
class Matrix(TestCase):
    def setUp(self) -> None:
        self.source = self.make("source", tree())

    def through(self, kind: str, io: str) -> None:
        """Copy to a filesystem, on it, and back from it; each copy is whole, each says how its bytes moved."""
        with filesystem(self, kind) as place:
            there, again, back = os.path.join(place, "there"), os.path.join(place, "again"), self.path("back")
            result = run_tool("fastcp", "-a", self.source, there, expect=0)
            self.assertRegex(result.stderr, io)
            self.assert_same_tree(there, self.source, modes=True)
            run_tool("fastcp", "-a", "--reflink=never", there, again, expect=0)
            self.assert_same_tree(again, self.source, modes=True)
            run_tool("fastcp", "-rPf", "--verify", there, back, expect=0)
            self.assert_same_tree(back, self.source, modes=True)
            run_tool("fastcp", "-rPfT", self.source, again, expect=0)  # replaced, by named temporaries
            self.assert_same_tree(again, self.source, modes=True)
            if kind != "ramfs":  # which has no holes
                self.assertLess(os.stat(os.path.join(there, "sparse")).st_blocks * 512, 9 * MIB)
            for root in (place, back):
                self.assert_no_leftovers(root)
            mine, theirs = (
                run_tool("fastmd5", "-P", "-q", "-C", root, ".", expect=0).stdout for root in (self.source, there)
            )
            self.assertEqual(mine, theirs)
            compared = run_tool("fastmd5", "--compare", "-P", self.source, there, expect=0)
            self.assertIn("identical", compared.stderr)

    def test_ext4(self) -> None:
        self.through("ext4", r"io=direct\n")

    def test_xfs(self) -> None:
        self.through("xfs", r"io=direct\n")

    def test_btrfs(self) -> None:
        self.through("btrfs", r"io=direct\n")

    def test_tmpfs(self) -> None:
        self.through("tmpfs", r"io=(direct|partly direct)")

    def test_ramfs(self) -> None:
        self.through("ramfs", r"io=partly direct \(destination: ")

    def test_overlay(self) -> None:
        self.through("overlay", r"io=direct\n")

    @needs("bindfs")
    def test_fuse(self) -> None:
        self.through("bindfs", r"io=(partly )?direct")

    def test_sectors_of_4096_bytes(self) -> None:
        self.through("sectors", r"io=direct\n")


@slow
@needs_root
class Clones(TestCase):
    def test_blocks_are_shared_where_the_filesystem_can(self) -> None:
        for kind in ("btrfs", "xfs"):
            with self.subTest(kind), filesystem(self, kind) as place:
                source = support.make_tree(os.path.join(place, "s"), {"a": Random(70 * MIB, seed=1), "b": b"x" * 9000})
                os.sync()
                before = os.statvfs(place).f_bfree
                for option in ("auto", "always"):
                    copy = os.path.join(place, option)
                    result = run_tool("fastcp", "-r", f"--reflink={option}", source, copy, expect=0)
                    self.assertIn("io=cloned", result.stderr)
                    self.assert_same_tree(copy, source)
                os.sync()
                st = os.statvfs(place)
                self.assertLess((before - st.f_bfree) * st.f_frsize, 35 * MIB)
                result = run_tool("fastcp", "-r", "--reflink=never", source, os.path.join(place, "n"), expect=0)
                self.assertNotIn("cloned", result.stderr)


@slow
@needs_root
class FoldingCase(TestCase):
    """Two names of the source that are one at the destination: an error, never one file or one directory of both."""

    @contextlib.contextmanager
    def place(self) -> Iterator[str]:
        try:
            with support.mounted("ext4", size=64 * MIB, mkfs=["-O", "casefold"]) as root:
                place = os.path.join(root, "folds")
                os.mkdir(place)
                if subprocess.run(["chattr", "+F", place], check=False, stderr=subprocess.DEVNULL).returncode == 0:
                    yield place
                    return
        except support.unittest.SkipTest:
            pass
        with self.by_fuse() as place:
            yield place

    @contextlib.contextmanager
    def by_fuse(self) -> Iterator[str]:
        image, place = self.path("image"), self.path("ntfs")
        with open(image, "wb") as file:
            file.truncate(64 * MIB)
        os.makedirs(place, exist_ok=True)
        support._enter_mount_namespace()
        for command in (["mkntfs", "-q", "-F", image], ["lowntfs-3g", "-o", "ignore_case", image, place]):
            try:
                done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            except FileNotFoundError:
                self.skipTest("no filesystem that folds case: neither ext4 with casefold nor ntfs-3g")
            if done.returncode:
                self.skipTest(f"{command[0]} does not work here")
        try:
            yield place
        finally:
            subprocess.run(["umount", place], check=False)

    def test_files_and_directories(self) -> None:
        with self.place() as place:
            if not self.folds(place):
                self.skipTest("this filesystem does not fold case")
            for name, tree in (
                ("files", {"name": b"one", "NAME": b"the other"}),
                ("directories", {"name": {"a": b"1"}, "NAME": {"b": b"2"}}),
            ):
                for force in ("", "f"):
                    with self.subTest(name, force=force):
                        source = self.make(name + force, tree)
                        copy = os.path.join(place, name + force)
                        result = run_tool("fastcp", f"-r{force}", source, copy, expect=1)
                        self.assertIn("collides with another name", result.stderr)
                        found = support.read_tree(copy)
                        self.assertEqual(len(found), 1)
                        self.assertIn(next(iter(found.values())), tree.values())
                        self.assert_no_leftovers(place)

    def folds(self, place: str) -> bool:
        with open(os.path.join(place, "probe"), "wb"):
            pass
        return os.path.exists(os.path.join(place, "PROBE"))


@slow
@needs_root
class Quota(TestCase):
    """A quota that the kernel enforces, on btrfs: those of ext4, xfs and tmpfs are not in every kernel."""

    def limit(self, place: str, size: str) -> None:
        subprocess.run(["btrfs", "-q", "qgroup", "limit", size, place], check=True)

    @contextlib.contextmanager
    def place(self, size: str) -> Iterator[str]:
        with filesystem(self, "btrfs") as root:
            place = os.path.join(root, "limited")
            for command in (["quota", "enable", root], ["subvolume", "create", place]):
                if subprocess.run(["btrfs", "-q", *command], check=False, stderr=subprocess.DEVNULL).returncode:
                    self.skipTest("no quota on btrfs here")
            self.limit(place, size)
            yield place

    def test_it_ends_the_job_and_what_is_there_is_whole(self) -> None:
        small = {f"f{index:02}": Random(MIB, seed=index) for index in range(30)}
        for name, tree in (("small", small), ("large", {**small, "large": Random(70 * MIB, seed=1)})):
            source = self.make(name, tree)
            with self.subTest(name), self.place("16M") as place:
                copy = os.path.join(place, "copy")
                done = run_tool("fastcp", "-r", source, copy, expect=1)
                self.assertIn("Disk quota exceeded", done.stderr)
                self.assertRegex(done.stderr, r"stopped early: .*\n.*FAILED: \d+ of 3[01] files not copied")
                self.assertLess(done.stderr.count("\n"), 100)
                for found in os.listdir(copy):
                    self.assert_same_tree(os.path.join(copy, found), os.path.join(source, found))
                self.assert_no_leftovers(place)
                self.limit(place, "none")
                run_tool("fastcp", "-ruT", source, copy, expect=0)
                self.assert_same_tree(copy, source)


@slow
@needs_root
class Shapes(TestCase):
    def test_a_directory_of_very_many_entries(self) -> None:
        with support.mounted("tmpfs", size=800 * MIB, options="nr_inodes=900000") as place:
            many = os.path.join(place, "many")
            os.mkdir(many)
            for index in range(200_000):
                os.close(os.open(f"{many}/{index:06}", os.O_CREAT | os.O_WRONLY))
            run_tool("fastcp", "-rq", many, os.path.join(place, "copy"), expect=0, timeout=120)
            self.assertEqual(sorted(os.listdir(many)), sorted(os.listdir(os.path.join(place, "copy"))))

    def test_depth_and_paths_beyond_what_the_kernel_takes(self) -> None:
        source = self.make("deep", {})
        fd = os.open(source, os.O_RDONLY)
        for _ in range(1200):
            os.mkdir("directory", dir_fd=fd)
            below = os.open("directory", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.close(fd)
        self.addCleanup(subprocess.run, ["rm", "-rf", source, self.path("copy")], check=False)
        run_tool("fastcp", "-a", source, self.path("copy"), expect=0)
        result = run_tool("fastmd5", "--compare", source, self.path("copy"), expect=0)
        self.assertIn("1 file, 1201 directories", result.stderr)


if __name__ == "__main__":
    support.main()
