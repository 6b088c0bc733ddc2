# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a copy keeps: modes, owners, times, ACLs, attributes, links and hard links, against the real cp."""

# Takes about 15 s
from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from typing import Any, Dict, Sequence, Tuple

import support
from support import Dir, File, Link, Random, TestCase, needs, needs_nobody, needs_root, run_tool, slow

ATTRIBUTES = ("user.", "security.capability", "system.posix_acl_")
NOT_OURS = ("trusted.",)  # cp -a copies these as root; fastcp does not

Entry = Tuple[Any, ...]


def look(root: str, times: bool) -> Dict[str, Entry]:
    """Everything that may be kept, of everything below a directory, itself included."""
    found: Dict[str, Entry] = {}
    names: Dict[Tuple[int, int], str] = {}
    for directory, children, files in os.walk(root):
        for name in ["", *files, *(child for child in children if os.path.islink(os.path.join(directory, child)))]:
            path = os.path.join(directory, name) if name else directory
            st = os.lstat(path)
            relative = os.path.relpath(path, root)
            twin = names.setdefault((st.st_dev, st.st_ino), relative)
            link = os.readlink(path) if stat.S_ISLNK(st.st_mode) else ""
            attributes = [n for n in os.listxattr(path, follow_symlinks=False) if n.startswith(ATTRIBUTES)]
            kept = sorted((n, os.getxattr(path, n, follow_symlinks=False)) for n in attributes)
            mtime = st.st_mtime_ns if times else 0
            found[relative] = (oct(st.st_mode), st.st_uid, st.st_gid, mtime, twin, link, kept)
    return found


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


@needs_root
@needs("setfacl", "setfattr")
class LikeCp(TestCase):
    def setUp(self) -> None:
        self.source = self.make(
            "source",
            {
                "plain": File(b"1", mode=0o640),
                "setid": File(b"2", mode=0o6755),
                "readonly": File(b"3", mode=0o400),
                "private": Dir({"f": b"4", "deep": Dir({"g": b"5"}, mode=0o555)}, mode=0o700),
                "sticky": Dir({}, mode=0o1777),
                "setgid": Dir({"h": b"6"}, mode=0o2775),
                "unwritable": Dir({"i": File(b"7", mode=0o444)}, mode=0o500),
                "link": Link("plain"),
                "dangling": Link("nowhere"),
                "direct": Random(3 << 20, seed=1),
                "large": Random(66 << 20, seed=2),
            },
        )
        at = self.path("source")
        os.link(f"{at}/plain", f"{at}/private/deep/twin")
        os.link(f"{at}/large", f"{at}/setgid/large-twin")
        os.link(f"{at}/link", f"{at}/link-twin", follow_symlinks=False)
        os.chown(f"{at}/plain", 1234, 2345)
        os.chown(f"{at}/setid", 1234, 2345)
        os.chmod(f"{at}/setid", 0o6755)
        os.chown(f"{at}/private", 1234, 2345)
        os.chown(f"{at}/link", 1234, 2345, follow_symlinks=False)
        run("setfacl", "-m", "u:daemon:rw,g:bin:r", f"{at}/direct")
        run("setfacl", "-d", "-m", "u:daemon:rwx", f"{at}/setgid")
        run("setfattr", "-n", "user.colour", "-v", "blue", f"{at}/readonly")
        run("setfattr", "-n", "user.dir", "-v", "x", f"{at}/sticky")
        run("setfattr", "-n", "trusted.secret", "-v", "x", f"{at}/readonly")
        os.setxattr(f"{at}/direct", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
        self.set_times(at)

    def set_times(self, at: str) -> None:
        """Before 1970, after 2038, nanoseconds; links' own; directories last."""
        moments = [-315521755_123456789, 4102444800_987654321, 1704164645_123456789, 1, 1700000000_000000001]
        everything = [os.path.join(d, n) for d, ds, fs in os.walk(at, topdown=False) for n in [*fs, *ds]] + [at]
        for index, path in enumerate(everything):
            moment = moments[index % len(moments)]
            os.utime(path, ns=(moment + 5, moment), follow_symlinks=False)

    def compare(self, ours: Sequence[str], theirs: Sequence[str], times: bool, acl: bool = False) -> None:
        for base in ("plain", "default-acl") if acl else ("plain",):
            for tool, options in (("fastcp", ours), ("cp", theirs)):
                place = self.path(f"{tool}-{base}{'_'.join(theirs)}")
                os.mkdir(place)
                if base == "default-acl":
                    run("setfacl", "-d", "-m", "u:bin:rwx,g::---,o::---", place)
                if tool == "fastcp":
                    run_tool("fastcp", "-q", *options, self.source, f"{place}/copy", expect=0)
                else:
                    run("cp", *options, self.source, f"{place}/copy")
            a, b = (look(self.path(f"{t}-{base}{'_'.join(theirs)}", "copy"), times) for t in ("fastcp", "cp"))
            with self.subTest(options=theirs, base=base):
                self.assertEqual({k: (a.get(k), b.get(k)) for k in {**a, **b} if a.get(k) != b.get(k)}, {})

    def test_archive(self) -> None:
        self.compare(["-a"], ["-a"], True, acl=True)

    def test_p(self) -> None:
        self.compare(["-rpP"], ["-rpP"], True, acl=True)

    @slow
    def test_lists(self) -> None:
        for wanted in ("mode", "ownership", "timestamps", "links", "xattr", "mode,ownership", "all"):
            self.compare(["-rP", f"--preserve={wanted}"], ["-rP", f"--preserve={wanted}"], "timestamps" in wanted)
        for unwanted in ("mode", "ownership", "links,timestamps", "xattr"):
            options = ["-a", f"--no-preserve={unwanted}"]
            self.compare(options, options, "times" not in unwanted)

    def test_plain(self) -> None:
        self.compare(["-rP"], ["-rP"], False)

    def test_existing_directories(self) -> None:
        for tool, argv in (("fastcp", ["-aTf"]), ("cp", ["-aT"])):
            place = self.make(tool, {"private": Dir({"f": File(b"old", mode=0o666)}, mode=0o777), "other": b"stays"})
            if tool == "fastcp":
                run_tool("fastcp", *argv, self.source, place, expect=0)
            else:
                run("cp", *argv, self.source, place)
        self.assertEqual(look(self.path("fastcp"), True), {**look(self.path("cp"), True), "other": look(
            self.path("fastcp"), True)["other"]})

    def test_what_is_not_copied(self) -> None:
        run_tool("fastcp", "-a", self.source, self.path("copy"), expect=0)
        names = os.listxattr(self.path("copy", "readonly"))
        self.assertEqual([name for name in names if name.startswith(NOT_OURS)], [])

    def test_directories_are_finished_when_the_run_failed(self) -> None:
        with open(self.path("source", "plain"), "ab"):
            os.mkdir(self.path("into"))
        with support.mounted("tmpfs", size=8 << 20) as place:
            run_tool("fastcp", "-a", self.source, os.path.join(place, "copy"), expect=1)
            for name in ("private/deep", "unwritable", "sticky"):
                a, b = os.stat(os.path.join(place, "copy", name)), os.stat(os.path.join(self.source, name))
                self.assertEqual((a.st_mode, a.st_uid, a.st_mtime_ns), (b.st_mode, b.st_uid, b.st_mtime_ns), name)

    @slow
    def test_directories_are_finished_when_a_signal_came(self) -> None:
        self.make("source/private/more", {f"f{i}": Random(30 << 20, seed=i) for i in range(8)})
        process = self.start_tool("fastcp", "-a", self.source, self.path("copy"), stderr=subprocess.PIPE)
        deadline = time.monotonic() + 10
        while not os.path.isdir(self.path("copy", "unwritable")) and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        self.assertEqual(process.returncode, -signal.SIGTERM)
        for name in ("unwritable", "private"):
            self.assertEqual(os.stat(self.path("copy", name)).st_mode, os.stat(self.path("source", name)).st_mode)

    def test_attributes_that_the_destination_does_not_know(self) -> None:
        with support.mounted_at(self.path("ramfs"), "-t", "ramfs", "ramfs") as place:
            result = run_tool("fastcp", "-a", self.source, f"{place}/a", expect=None)
            self.assertRegex(result.stderr, r"(?m)^fastcp: warning: cannot preserve the extended attribute user\.")
            result = run_tool("fastcp", "-rP", "--preserve=xattr", self.source, f"{place}/b", expect=1)
            self.assertRegex(result.stderr, r"cannot copy .*readonly.*cannot preserve the extended attribute user")


class Usage(TestCase):
    def test_values(self) -> None:
        self.make("a", b"1")
        for args, words in (
            (["--preserve=nothing"], "not one of mode"),
            (["--preserve="], "not one of mode"),
            (["--no-preserve=times"], "not one of mode"),
            (["--checksum"], "needs --update"),
            (["--direct=maybe"], "invalid choice"),
            (["--reflink=always", "--sparse=never"], "cannot combine"),
            (["--reflink=always", "--verify"], "cannot combine"),
            (["--delete"], "unrecognized"),
            (["--backup"], "unrecognized"),
        ):
            with self.subTest(args):
                result = run_tool("fastcp", *args, "a", "b", cwd=self.tmp, expect=2)
                self.assertRegex(result.stderr, words)
                self.assertFalse(os.path.exists(self.path("b")))


class OrdinaryUser(TestCase):
    @needs_nobody
    def test_what_may_not_be_kept(self) -> None:
        place = support.make_temporary()
        self.addCleanup(support.remove_tree, place)
        tree = {"f": File(b"1", mode=0o6755), "g": File(b"2", mode=0o644)}
        source = support.make_tree(os.path.join(place, "s"), tree)
        os.mkdir(os.path.join(place, "d"))
        for path in (place, os.path.join(place, "d")):
            os.chmod(path, 0o777)
        result = run_tool("fastcp", "-rp", source, os.path.join(place, "d", "copy"), user=support.NOBODY, expect=0)
        self.assertRegex(result.stderr, "warning: the group of files could not be kept; their group bits are cleared")
        modes = {name: oct(os.stat(os.path.join(place, "d", "copy", name)).st_mode & 0o7777) for name in ("f", "g")}
        self.assertEqual(modes, {"f": oct(0o705), "g": oct(0o604)})


class Updates(TestCase):
    def copy(self, *args: str, expect: int = 0) -> support.Result:
        return run_tool("fastcp", *args, cwd=self.tmp, expect=expect)

    def stamp(self, name: str, seconds: int) -> None:
        os.utime(self.path(name), (seconds, seconds))

    def test_newer_older_and_the_same(self) -> None:
        table = [  # source, destination, seconds that it is newer, options: what becomes of it
            (b"same", b"SAME", 0, [], b"SAME"),
            (b"same", b"SAME", 9, [], b"SAME"),
            (b"same", b"SAME", -9, [], b"same"),
            (b"longer", b"old", -9, [], b"longer"),
            (b"longer", b"newer", 9, [], None),
            (b"longer", b"equal", 0, [], None),
            (b"longer", b"newer", 9, ["-f"], b"longer"),
            (b"same", b"SAME", 9, ["--checksum"], b"same"),
            (b"same", b"same", -9, ["--checksum"], b"same"),
        ]
        for index, (new, old, age, options, expected) in enumerate(table):
            for form in ("tree", "file"):
                with self.subTest(index, form=form):
                    s, d = f"s{index}{form}", f"d{index}{form}"
                    self.make(s, {"f": new})
                    self.make(d, {"f": old})
                    self.stamp(f"{s}/f", 1_000_000_000)
                    self.stamp(f"{d}/f", 1_000_000_000 + age)
                    inode = os.stat(self.path(d, "f")).st_ino
                    args = ["-ruT", *options, s, d] if form == "tree" else ["-u", *options, f"{s}/f", f"{d}/f"]
                    result = self.copy(*args, expect=1 if expected is None else 0)
                    with open(self.path(d, "f"), "rb") as file:
                        self.assertEqual(file.read(), old if expected is None else expected)
                    if expected is None:
                        self.assertIn("is not older than its source and of another size", result.stderr)
                    elif expected == old and "--checksum" not in options:
                        self.assertIn("1 skipped, unverified", result.stderr)
                    elif old == new:
                        self.assertIn("1 skipped, compared and the same", result.stderr)
                        self.assertEqual(os.stat(self.path(d, "f")).st_ino, inode)

    def test_a_second_run_moves_nothing(self) -> None:
        self.make("s", {f"f{i}": Random(5000 + i, seed=i) for i in range(20)})
        for options in (["-ruT"], ["-auT"]):
            place = "d" + options[0]
            self.copy(*options, "s", place)
            said = self.copy(*options, "s", place).stderr
            self.assertRegex(said, "0 files, 0 directories, 0 B .*; 20 skipped, unverified")

    @slow
    def test_large_files_are_compared_in_parts(self) -> None:
        self.make("s", {"big": Random(140 << 20, seed=1)})
        self.copy("-rp", "s", "d")
        self.assertIn("1 skipped, compared and the same", self.copy("-ruT", "--checksum", "s", "d").stderr)
        with open(self.path("d", "big"), "r+b") as file:
            file.seek(100 << 20)
            file.write(b"damage")
        self.assertIn("1 file, ", self.copy("-ruT", "--checksum", "s", "d").stderr)
        self.assert_same_tree(self.path("d"), self.path("s"))

    @needs_root
    def test_one_file_system(self) -> None:
        self.make("s", {"f": b"1", "m": {}})
        with support.mounted_at(self.path("s", "m"), "-t", "tmpfs", "tmpfs") as place:
            support.make_tree(os.path.join(place, "inside"), b"2")
            result = self.copy("-rxv", "s", "c")
            self.assert_same_tree(self.path("c"), {"f": b"1", "m": {}})
            self.assertIn("another filesystem is mounted on 's/m'", result.stderr)
            self.copy("-r", "s", "e")
            self.assert_same_tree(self.path("e"), {"f": b"1", "m": {"inside": b"2"}})


class Ways(TestCase):
    @slow
    @needs("strace")
    def test_fsync_of_every_file_and_directory(self) -> None:
        self.make("s", {"a": b"1", "d": {"b": b"2"}})
        log = self.path("log")
        under = ["strace", "-f", "-y", "-qq", "-o", log, "-e", "trace=fsync"]
        run_tool("fastcp", "-n", "1", "-r", "--fsync", "s", "c", cwd=self.tmp, under=under, expect=0)
        with open(log, encoding="utf-8", errors="surrogateescape") as file:
            calls = file.read().splitlines()
        self.assertEqual(sum("fsync(" in call for call in calls), 5, calls)  # two files, c, c/d, and where c is
        under = support.strace_inject(log, "fsync", "error=EIO:when=1")
        result = run_tool("fastcp", "-n", "1", "-r", "--fsync", "s", "e", cwd=self.tmp, under=under, expect=1)
        self.assertIn("Input/output error", result.stderr)

    def test_holes(self) -> None:
        self.make("s", support.Sparse(9 << 20, {5 << 20: b"x"}))
        for option, filled in (("--sparse=auto", False), ("--sparse=never", True)):
            run_tool("fastcp", option, "s", f"c{option}", cwd=self.tmp, expect=0)
            self.assert_same_tree(self.path(f"c{option}"), self.path("s"))
            self.assertEqual(os.stat(self.path(f"c{option}")).st_blocks * 512 >= 9 << 20, filled)

    def test_direct(self) -> None:
        self.make("small", b"12345")
        self.make("big", Random((2 << 20) + 5, seed=1))
        for name in ("small", "big"):
            for way, words in (("always", "io=direct"), ("never", "io=buffered")):
                with self.subTest(name, way=way):
                    result = run_tool("fastcp", f"--direct={way}", name, f"{name}-{way}", cwd=self.tmp, expect=0)
                    self.assertIn(words, result.stderr)
                    self.assert_same_tree(self.path(f"{name}-{way}"), self.path(name))

    def test_clones_that_cannot_be(self) -> None:
        self.make("s", b"1")
        result = run_tool("fastcp", "--reflink=always", "s", "c", cwd=self.tmp, expect=None)
        if result.returncode:  # not so on a filesystem that can
            self.assertIn("cannot clone it (--reflink=always)", result.stderr)
            self.assertFalse(os.path.exists(self.path("c")))


if __name__ == "__main__":
    support.main()
