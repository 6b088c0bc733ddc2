# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Second runs (-u, --checksum), where the walk goes (-x), and the ways in which bytes move and reach the storage."""

# Takes about 15 s
from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import Any, List, Sequence, Tuple

import copying
import keeping
import support
from keeping import last_line, looks, run_cp, run_fastcp, shell
from support import File, Link, Random, Sparse, TestCase, needs, needs_nobody, needs_root, run_tool, slow

MIB = 1 << 20
SECOND = 10**9
NEWER = "is not older than its source and of another size (-f replaces it)"

# Source, destination, by how many ns the destination is newer, options: what is there then (None: it is refused).
ROWS: Sequence[Tuple[bytes, Any, int, str, Any]] = (
    (b"same", b"SAME", 0, "", b"SAME"),
    (b"same", b"SAME", 1, "", b"SAME"),
    (b"same", b"SAME", -1, "", b"same"),
    (b"same", b"SAME", 9 * SECOND, "", b"SAME"),
    (b"same", b"SAME", 9 * SECOND, "-f", b"SAME"),
    (b"same", b"SAME", -9 * SECOND, "", b"same"),
    (b"longer", b"old", -1, "", b"longer"),
    (b"longer", b"", -1, "", b"longer"),
    (b"", b"old", -1, "", b""),
    (b"", b"", 0, "", b""),
    (b"longer", b"newer", 1, "", None),
    (b"longer", b"equal", 0, "", None),
    (b"", b"newer", 1, "", None),
    (b"longer", b"newer", 1, "-f", b"longer"),
    (b"longer", b"newer", 1, "-p", None),
    (b"same", b"SAME", 9, "--checksum", b"same"),
    (b"same", b"same", -9, "--checksum", b"same"),
    (b"longer", b"newer", 1, "--checksum", None),
    (b"longer", b"newer", 1, "--checksum -f", b"longer"),
    (b"longer", b"older", -1, "--checksum", b"longer"),
    (b"", b"", 5, "--checksum", b""),
    (b"x", None, 0, "", b"x"),
    (b"x", Link("elsewhere"), -1, "", None),
    (b"x", Link("elsewhere"), -1, "-f", b"x"),
)


class Update(TestCase):
    """-u: the same size and not older is left, older is replaced, newer and of another size is somebody's work."""

    def meet(self, name: str, source: bytes, destination: Any, age: int, moment: int) -> str:
        """A directory with s/f and, `age` ns newer than that, d/f."""
        place = self.make(name, {"s": {"f": source}, "d": {} if destination is None else {"f": destination}})
        os.utime(f"{place}/s/f", ns=(moment, moment))
        if destination is not None:
            os.utime(f"{place}/d/f", ns=(moment + age, moment + age), follow_symlinks=False)
        return place

    def test_by_size_and_age(self) -> None:
        moments = (1_700_000_000 * SECOND + 5, -5 * SECOND + 5, 4_200_000_000 * SECOND + 5)
        for number, (source, destination, age, options, expected) in enumerate(ROWS):
            for form in ("-ruT s d", "-u s/f d/f" if number % 2 else "-u s/f d"):
                with self.subTest(source=source, destination=destination, age=age, options=options, form=form):
                    place = self.meet(f"{number}{form[-3:]!r}", source, destination, age, moments[number % 3])
                    before = looks(f"{place}/d").get("f", {})
                    done = run_fastcp(*options.split(), *form.split(), cwd=place)
                    if expected is None:
                        self.assertEqual(done.returncode, 1, done)
                        self.assertIn("File exists" if isinstance(destination, Link) else NEWER, done.stderr)
                        self.assert_same_tree(f"{place}/d", {"f": destination})
                        continue
                    self.assertEqual(done.returncode, 0, done)
                    self.assert_same_tree(f"{place}/d", {"f": expected})
                    replaced = looks(f"{place}/d")["f"]["inode"] != before.get("inode")
                    untouched = expected == destination
                    self.assertEqual(replaced, not untouched)
                    said = last_line(done)
                    self.assertEqual("1 skipped, unverified" in said, untouched and "--checksum" not in options)
                    self.assertEqual("1 skipped, compared and the same" in said, untouched and "checksum" in options)

    def test_before_1970_is_older(self) -> None:
        for source, destination, expected in ((5, -5, b"same"), (-5, 5, b"SAME"), (-5, -6, b"same"), (-6, -5, b"SAME")):
            with self.subTest(source=source, destination=destination):
                age = (destination - source) * SECOND
                place = self.meet(f"{source}{destination}", b"same", b"SAME", age, source * SECOND)
                self.assertEqual(run_fastcp("-ruT", "s", "d", cwd=place).returncode, 0)
                self.assert_same_tree(f"{place}/d", {"f": expected})

    def test_all_that_is_newer_is_named_and_nothing_is_written(self) -> None:
        tree = {f"f{n:02}": b"longer" for n in range(25)}
        self.make("s", {**tree, "missing": b"1", "older": b"2"})
        self.make("d", {**dict.fromkeys(tree, b"new"), "older": b"1"})
        os.utime(self.path("d", "older"), (1, 1))
        expected = support.read_tree(self.path("d"))
        done = run_fastcp("-ruT", "s", "d", cwd=self.tmp)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count(NEWER), 20)
        self.assertIn("... and 5 more", done.stderr)
        self.assert_same_tree(self.path("d"), expected)
        self.assertEqual(run_fastcp("-rufT", "s", "d", cwd=self.tmp).returncode, 0)
        self.assert_same_tree(self.path("d"), self.path("s"))

    def test_a_replaced_file_keeps_what_it_has_and_the_rest_is_let_be(self) -> None:
        self.make("s", {"old": b"new", "same": b"1"})
        self.make("d", {"old": File(b"old", mode=0o640), "same": File(b"1", mode=0o604), "other": b"o"})
        os.utime(self.path("d", "old"), (1, 1))
        self.assertEqual(run_fastcp("-ruT", "s", "d", cwd=self.tmp).returncode, 0)
        expected = {"old": File(b"new", mode=0o640), "same": File(b"1", mode=0o604), "other": b"o"}
        self.assert_same_tree(self.path("d"), expected, modes=True)

    def test_a_second_run_moves_nothing(self) -> None:
        self.make("s", {f"d{d}": {f"f{i}": Random(3000 * i + d, seed=i) for i in range(20)} for d in range(4)})
        for options in (("-ruT",), ("-auT", "-n4"), ("-ruT", "-n4"), ("-ruTp",)):
            place = "c" + "".join(options)
            done = run_fastcp(*options, "s", place, cwd=self.tmp)
            self.assertEqual(done.returncode, 0, done)
            done = run_fastcp(*options, "s", place, cwd=self.tmp)
            self.assertEqual(done.returncode, 0, done)
            self.assertRegex(last_line(done), "^0 files, 0 directories, 0 B .*; 80 skipped, unverified$")
            done = run_fastcp(*options, "--checksum", "s", place, cwd=self.tmp)
            self.assertRegex(last_line(done), "^0 files, 0 directories, 0 B .*; 80 skipped, compared and the same$")
            self.assert_same_tree(self.path(place), self.path("s"))

    def test_what_changed_in_the_source_is_copied(self) -> None:
        self.make("s", {"a": b"1", "b": b"22", "c": b"333", "d": {}})
        self.assertEqual(run_fastcp("-r", "s", "d", cwd=self.tmp).returncode, 0)
        later = time.time() + 100
        for name, text in (("a", b"9"), ("b", b"longer"), ("d/new", b"n")):
            with open(self.path("s", *name.split("/")), "wb") as file:
                file.write(text)
            os.utime(self.path("s", *name.split("/")), (later, later))
        done = run_fastcp("-ruT", "s", "d", cwd=self.tmp)
        self.assertRegex(last_line(done), "^3 files, 0 directories, 8 B .*; 1 skipped, unverified$")
        self.assert_same_tree(self.path("d"), self.path("s"))

    def test_a_dry_run_shows_what_would_be_copied(self) -> None:
        self.make("s", {"new": b"1", "old": b"2", "same": b"3"})
        self.make("d", {"old": b"1", "same": b"3"})
        os.utime(self.path("d", "old"), (1, 1))
        done = run_fastcp("-ruTN", "s", "d", cwd=self.tmp)
        self.assertEqual(re.findall(r"/s/(\w+)", done.stdout), ["new", "old"])
        self.assert_same_tree(self.path("d"), {"old": b"1", "same": b"3"})

    @slow
    def test_after_an_interruption_it_completes(self) -> None:
        self.make("s", {"big": Random(70 * MIB, seed=9), **{f"f{n:02}": Random(2 * MIB, seed=n) for n in range(24)}})
        os.link(self.path("s", "f00"), self.path("s", "twin"))
        for number, (signum, options) in enumerate(
            ((signal.SIGTERM, "-r"), (signal.SIGKILL, "-a"))
        ):
            copy = f"c{number}"
            process = self.start_tool("fastcp", options, "-n2", "s", copy, cwd=self.tmp, stderr=subprocess.PIPE)
            deadline = time.monotonic() + 20
            while len(os.listdir(self.path(copy)) if os.path.isdir(self.path(copy)) else ()) < 3:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.001)
            os.killpg(process.pid, signum) if signum == signal.SIGKILL else process.send_signal(signum)
            process.communicate(timeout=30)
            there = set(os.listdir(self.path(copy)))
            self.assertEqual(process.returncode, -signum)
            done = run_tool("fastcp", options, "-uT", "s", copy, cwd=self.tmp, expect=0)
            self.assertIn(f"{len(there)} skipped, unverified", done.stderr)
            self.assert_same_tree(self.path(copy), self.path("s"))
            self.assertEqual(os.stat(self.path(copy, "twin")).st_nlink, 2 if options == "-a" else 1)
            done = run_tool("fastcp", options, "-uT", "s", copy, cwd=self.tmp, expect=0)
            self.assertRegex(done.stderr, "0 files, 0 directories, 0 B .*; 26 skipped, unverified")
            support.remove_tree(self.path(copy))


class Checksum(TestCase):
    """-u --checksum: bytes decide where sizes are the same, of small files and of large ones in parts."""

    def test_it_needs_update(self) -> None:
        self.make("a", b"1")
        done = run_fastcp("--checksum", "a", "b", cwd=self.tmp)
        self.assertEqual((done.returncode, os.path.exists(self.path("b"))), (2, False))
        self.assertIn("--checksum needs --update (-u)", done.stderr)

    SIZES = (1, 4097, MIB, 2 * MIB + 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 4095)

    def test_one_byte_that_differs(self) -> None:
        """At the start, in the middle and at the end; with extents of 4 MiB the last sizes are large files."""
        with copying.limits(extent=4 * MIB, direct_minimum=64 << 10):
            for size in self.SIZES:
                source = self.make(f"s{size}", {"f": Random(size, seed=size)})
                for place in sorted({0, size // 2, min(size - 1, 4 * MIB), size - 1}):
                    with self.subTest(size=size, place=place):
                        copy = self.make(f"d{size}-{place}", {"f": Random(size, seed=size)})
                        done = run_fastcp("-ruT", "--checksum", source, copy, "-b", "2M")
                        self.assertRegex(last_line(done), "^0 files, .*; 1 skipped, compared and the same$")
                        with open(f"{copy}/f", "r+b") as file:
                            file.seek(place)
                            byte = file.read(1)
                            file.seek(place)
                            file.write(bytes([byte[0] ^ 1]))
                        done = run_fastcp("-ruT", "--checksum", source, copy, "-b", "2M")
                        self.assertRegex(last_line(done), "^1 file, ")
                        self.assertNotIn("skipped", last_line(done))
                        self.assert_same_tree(copy, source)
                        support.remove_tree(copy)
                support.remove_tree(source)

    def test_large_files_on_several_workers(self) -> None:
        with copying.limits(extent=MIB, direct_minimum=64 << 10):
            tree = {f"f{n}": Random(5 * MIB + n, seed=n) for n in range(6)}
            self.make("s", {**tree, "small": b"1"})
            self.make("d", {**tree, "f3": Random(5 * MIB + 3, seed=99), "small": b"2"})
            done = run_fastcp("-ruT", "--checksum", "-n4", "s", "d", cwd=self.tmp)
            self.assertRegex(last_line(done), "^2 files, 0 directories, 5.0 MiB .*; 5 skipped, compared and the same$")
            self.assert_same_tree(self.path("d"), self.path("s"))
            self.assert_no_leftovers(self.path("d"))

    def test_holes_are_compared_as_the_zeros_that_they_are(self) -> None:
        self.make("s", {"f": Sparse(9 * MIB, {3 * MIB: b"x"}), "g": bytes(100_000)})
        self.make("d", {"f": Sparse(9 * MIB, {3 * MIB: b"x", 5 * MIB: bytes(5000)}), "g": Sparse(100_000)})
        done = run_fastcp("-ruT", "--checksum", "s", "d", cwd=self.tmp)
        self.assertIn("2 skipped, compared and the same", last_line(done))

    @needs_nobody
    def test_a_destination_that_cannot_be_read_is_an_error(self) -> None:
        self.make("s", {"f": b"1", "g": b"2"})
        self.make("d", {"f": File(b"1", mode=0o200)})
        shell("chown -R nobody d", self.tmp)
        words = ("-n1", "-ruT", "--checksum", self.path("s"), self.path("d"))
        done = run_tool("fastcp", *words, user="nobody", expect=1)
        self.assertRegex(done.stderr, "cannot copy '.*s/f' to '.*d/f': Permission denied")
        self.assert_same_tree(self.path("d"), {"f": b"1", "g": b"2"})


@needs_root
class OneFileSystem(TestCase):
    """-x: as cp, and what is mounted below is named under -v."""

    def test_as_cp(self) -> None:
        links = {"l": Link("m"), "lf": Link("m/inside")}
        self.make("s", {"f": b"1", "m": {}, "file": b"under", "deep": {"m": {}}, **links})
        with support.mounted_at(self.path("s", "m"), "-t", "tmpfs", "tmpfs") as place, support.mounted_at(
            self.path("s", "deep", "m"), "-t", "tmpfs", "tmpfs"
        ):
            support.make_tree(f"{place}/inside", b"2")
            shell("mount --bind m/inside file", self.path("s"))  # a file of another filesystem is copied
            self.addCleanup(subprocess.run, ["umount", self.path("s", "file")], check=False)
            support.make_tree(f"{place}/d", {"x": b"3"})
            for number, words in enumerate(("-rxP", "-rxL", "-rP", "-rxH", "-ax")):
                for sources in (["s"], ["s/m", "s/f"], ["s/."], ["s/m/inside"]):
                    with self.subTest(words=words, sources=sources):
                        found = []
                        for tool, run in (("cp", run_cp), ("fastcp", run_fastcp)):
                            copy = f"{tool}{number}{len(sources)}{sources[0].replace('/', '_')}"
                            self.make(copy, {})
                            done = run(words, *sources, copy, cwd=self.tmp)
                            self.assertEqual(done.returncode, 0, done)
                            found.append(looks(self.path(copy)))
                        self.assertEqual(keeping.differences(found[1], found[0], ("kind", "content", "mode")), [])

    def test_mount_points_are_named(self) -> None:
        self.make("s", {"f": b"1", "m": {}, "deep": {"m": {}}})
        with support.mounted_at(self.path("s", "m"), "-t", "tmpfs", "tmpfs"), support.mounted_at(
            self.path("s", "deep", "m"), "-t", "tmpfs", "tmpfs"
        ):
            for number, options in enumerate(("-rv", "-rxv", "-r", "-rx")):
                done = run_fastcp(options, "s", f"c{number}", cwd=self.tmp)
                named = re.findall("another filesystem is mounted on '(.*)'", done.stderr)
                self.assertEqual(sorted(named), ["s/deep/m", "s/m"] if "v" in options else [])
                self.assertEqual(done.returncode, 0)


class Storage(TestCase):
    """--fsync, holes, clones and O_DIRECT."""

    @slow
    @needs("strace")
    def test_fsync_of_every_file_and_directory(self) -> None:
        self.make("s", {"a": b"1", "d": {"b": b"2", "e": {}}, "big": Random(3 * MIB, seed=1), "l": Link("a")})
        below = ["c", "c/d", "c/d/e"]
        for options, names in (("-aT", ["", *below]), ("-rPfT", below)):
            log = self.path("log")
            under = ["strace", "-f", "-y", "-qq", "-o", log, "-e", "trace=fsync,rename,renameat,renameat2,linkat"]
            run_tool("fastcp", options, "--fsync", "s", "c", cwd=self.tmp, under=under, expect=0)
            with open(log, encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
            synced = re.findall(r"fsync\(\d+<([^>]*)>", text)
            expected = [os.path.join(self.tmp, name).rstrip("/") for name in names]
            self.assertEqual(sorted(path for path in synced if os.path.isdir(path)), expected)
            self.assertEqual(sum(not os.path.isdir(path) for path in synced), 3)
            if options == "-rPfT":  # replaced: what is renamed has been written before
                for temporary in re.findall(r"rename\w*\(.*?\"(\.[^\"]+)\"", text):
                    if not temporary.startswith((".fastcp-run-", ".l.")):
                        self.assertLess(text.index(f"/{temporary}>"), text.index(f'"{temporary}"'))

    @slow
    @needs("strace")
    def test_an_fsync_that_fails_is_an_error(self) -> None:
        self.make("s", {"a": b"1", "d": {"b": b"2"}})
        here, below = "cannot fsync directory '.'", "cannot fsync directory 'c3'"
        for when, said in ((1, "cannot copy 's/a'"), (3, here), (4, below)):
            under = support.strace_inject(self.path("log"), "fsync", f"error=EIO:when={when}")
            words = ("-n1", "-r", "--fsync", "s", f"c{when - 1}")
            done = run_tool("fastcp", *words, cwd=self.tmp, under=under, expect=1)
            self.assertIn(said, done.stderr)
            self.assertIn("Input/output error", done.stderr)
            self.assertEqual(os.path.exists(self.path(f"c{when - 1}", "a")), when > 1)

    def test_holes_stay_unless_they_are_not_wanted(self) -> None:
        tree = {"f": Sparse(9 * MIB, {5 * MIB: b"x"}), "hole": Sparse(3 * MIB), "small": Sparse(70_000, {0: b"y"})}
        self.make("s", tree)
        for option, filled in (("auto", False), ("never", True)):
            with copying.limits(extent=4 * MIB):
                done = run_fastcp("-r", f"--sparse={option}", "s", option, cwd=self.tmp)
            self.assertEqual(done.returncode, 0, done)
            self.assert_same_tree(self.path(option), self.path("s"))
            for name, literal in tree.items():
                size = os.stat(self.path(option, name)).st_blocks * 512
                self.assertEqual(size >= literal.size, filled, (option, name, size))

    def test_a_hole_of_a_terabyte_costs_nothing(self) -> None:
        self.make("s", Sparse(1 << 40, {(1 << 40) - 5: b"end"}))
        started = time.monotonic()
        done = run_fastcp("s", "c", cwd=self.tmp)
        self.assertEqual(done.returncode, 0, done)
        self.assertLess(time.monotonic() - started, 30)
        st = os.stat(self.path("c"))
        self.assertEqual((st.st_size, st.st_blocks), (1 << 40, os.stat(self.path("s")).st_blocks))
        with open(self.path("c"), "rb") as file:
            file.seek((1 << 40) - 8)
            self.assertEqual(file.read(), b"\0\0\0end\0\0")

    @needs_root
    def test_clones_that_cannot_be(self) -> None:
        self.make("s", {"a": b"1", "big": Random(2 * MIB, seed=1), "empty": b""})
        with support.mounted("ext4", size=64 * MIB) as place:  # another filesystem, and one that cannot anyway
            for copy in (f"{place}/c", f"{place}/d"):
                done = run_fastcp("-r", "--reflink=always", self.path("s"), copy)
                self.assertEqual(done.returncode, 1)
                self.assertEqual(done.stderr.count("cannot clone it (--reflink=always)"), 2)
                self.assert_same_tree(copy, {"empty": b""})
            for option in ("auto", "never"):
                done = run_fastcp("-r", f"--reflink={option}", self.path("s"), f"{place}/{option}")
                self.assertEqual(done.returncode, 0)
                self.assertNotIn("cloned", done.stderr)

    def test_what_the_summary_says_of_direct(self) -> None:
        self.make("small", b"12345")
        self.make("empty", b"")
        self.make("big", Random(2 * MIB + 5, seed=1))
        rows: List[Tuple[str, str, str]] = [
            ("big", "auto", "io=direct"),
            ("big", "always", "io=direct"),
            ("big", "never", "io=buffered (--direct=never)"),
            ("small", "auto", "io=buffered (small files)"),
            ("small", "always", "io=direct"),
            ("small", "never", "io=buffered (--direct=never)"),
            ("empty", "auto", "io=none (no bytes)"),
            ("empty", "always", "io=none (no bytes)"),
        ]
        for name, way, said in rows:
            with self.subTest(name, way=way):
                done = run_fastcp(f"--direct={way}", name, f"{name}-{way}", cwd=self.tmp)
                self.assertEqual(done.returncode, 0, done)
                self.assertTrue(last_line(done).endswith(said), last_line(done))
                self.assert_same_tree(self.path(f"{name}-{way}"), self.path(name))

    @needs_root
    def test_each_side_is_told_apart(self) -> None:
        self.make("big", Random(2 * MIB + 5, seed=1))
        with support.mounted_at(self.path("ramfs"), "-t", "ramfs", "ramfs") as place:
            done = run_fastcp("big", f"{place}/c", cwd=self.tmp)
            self.assertRegex(last_line(done), r"io=partly direct \(destination: O_DIRECT refused at open: Inv[^;]*\)$")
            done = run_fastcp(f"{place}/c", "back", cwd=self.tmp)
            self.assertRegex(last_line(done), r"io=partly direct \(source: O_DIRECT refused at open: Inv[^;]*\)$")
            done = run_fastcp(f"{place}/c", f"{place}/d", cwd=self.tmp)
            self.assertRegex(last_line(done), r"io=buffered \(destination: .*; source: .*\)$")
            for words in (("big", f"{place}/e"), (f"{place}/c", "e")):
                done = run_fastcp("--direct=always", *words, cwd=self.tmp)
                self.assertEqual(done.returncode, 1, done)
                self.assertIn("O_DIRECT refused at open", done.stderr)
                self.assertFalse(os.path.exists(self.path(words[1])))


if __name__ == "__main__":
    support.main()
