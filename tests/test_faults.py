# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""System calls that fail for real (strace), full disks: the exit status, the message, and what is left.

After each fault: every name at the destination holds the whole new file or what stood there, no temporary is left,
the message names a path and the system's reason, and exit status 0 comes only with a complete copy.
"""

# Takes about 40 s
from __future__ import annotations

import os
import subprocess
import time
from typing import Any, Dict, List, Optional, Tuple

import copying
import support
from support import Random, TestCase, needs, needs_root, run_tool, slow

MIB = 1 << 20
OLD = b"what stood there"
LARGE = 66 * MIB  # more than an extent, so that it goes to the workers in parts

# What fails, how, and whether the copy can still be complete.
FAULTS: List[Tuple[str, str, bool]] = [
    ("preadv2", "error=EIO:when=1", False),
    ("preadv2", "error=EIO:when=2", False),
    ("preadv2", "error=EINTR:when=1", True),
    ("preadv2", "error=ESTALE:when=1", False),
    ("preadv2", "retval=0:when=1", False),
    ("pwritev2", "error=ENOSPC:when=1", False),
    ("pwritev2", "error=EDQUOT:when=1", False),
    ("pwritev2", "error=EIO:when=1", False),
    ("pwritev2", "error=EINTR:when=1", True),
    ("pwritev2", "retval=0:when=1+", False),
    ("pwritev2", "error=ESTALE:when=2", False),
    ("ftruncate", "error=EIO:when=1", False),
    ("mkdir,mkdirat", "error=EACCES:when=1", False),
    ("mkdir,mkdirat", "error=ENOSPC:when=1", False),
    ("linkat", "error=EIO:when=1", False),
    ("linkat", "error=ENOENT:when=1", True),  # as without /proc: a named temporary then
    ("renameat,renameat2", "error=EIO:when=1", False),
    ("renameat,renameat2", "error=EROFS:when=1", False),
    ("fchmod", "error=EIO:when=1", False),
]


def tree() -> Dict[str, Any]:
    """A large file, one that is moved with O_DIRECT, small ones, directories."""
    return {
        "large": Random(LARGE, seed=1),
        "direct": Random(3 * MIB, seed=2),
        "d": {"e": {"small": b"small"}, "f": b"f"},
        "empty": b"",
    }


class Faults(TestCase):
    source = ""
    wanted: Any = None
    count = 0

    @classmethod
    def setUpClass(cls) -> None:
        place = support.make_temporary()
        cls.addClassCleanup(support.remove_tree, place)
        cls.source = support.make_tree(os.path.join(place, "source"), tree())
        cls.wanted = support.read_tree(cls.source)

    def copy(self, calls: str, fault: str, old: bool, workers: int = 2) -> Tuple[support.Result, str, int]:
        """A copy under a fault: how it ended, where it went, how often the fault struck."""
        self.count += 1
        destination = self.path(f"copy{self.count}")
        if old:
            everything = {"large": OLD, "direct": OLD, "d": {"e": {"small": OLD}, "f": OLD}, "empty": OLD}
            self.make(f"copy{self.count}", everything)
        log = self.path(f"log{self.count}")
        options = ["-n", str(workers), "-rT", *(["-f"] if old else [])]
        under = support.strace_inject(log, calls, fault)
        result = run_tool("fastcp", *options, self.source, destination, under=under, timeout=60)
        return result, destination, support.injected(log)

    def check(self, result: support.Result, destination: str, old: bool) -> None:
        """The promises."""
        self.assertIn(result.returncode, (0, 1), result)
        if os.path.isdir(destination):
            self.assert_no_leftovers(destination)
            self.assertEqual(self.wrong(destination, old), [], result)
        if result.returncode == 0:
            self.assertEqual(support.differences(self.wanted, support.read_tree(destination)), [], result)
        else:
            self.assertRegex(result.stderr, r"(?m)^fastcp: .*'.+'.*: \S|^fastcp: stopped early: \S")
            self.assertEqual(result.stdout, "")

    def wrong(self, destination: str, old: bool) -> List[str]:
        """Files that are neither whole nor old."""
        found = []
        for name in ("large", "direct", "d/e/small", "d/f", "empty"):
            path = os.path.join(destination, name)
            if os.path.exists(path):
                with open(path, "rb") as file, open(os.path.join(self.source, name), "rb") as right:
                    data = file.read()
                    if data != right.read() and not (old and data == OLD):
                        found.append(name)
            elif old:
                found.append(name + " is gone")
        return found

    def run_table(self, old: bool) -> None:
        # New and replaced files go the same way but for these.
        apart = ("renameat,renameat2", "fchmod") if old else ("mkdir,mkdirat", "linkat")
        for calls, fault, recovers in FAULTS:
            if calls not in apart and (fault.startswith("error=E") and not fault.startswith("error=EIO")) is old:
                continue
            if calls in ("renameat,renameat2", "fchmod", "mkdir,mkdirat", "linkat") and calls not in apart:
                continue
            with self.subTest(calls=calls, fault=fault, old=old):
                result, destination, struck = self.copy(calls, fault, old)
                self.check(result, destination, old)
                if struck and not recovers:
                    self.assertEqual(result.returncode, 1, result)
                if recovers:
                    self.assertEqual(result.returncode, 0, result)

    @slow
    @needs("strace")
    def test_new_files(self) -> None:
        self.run_table(False)

    @slow
    @needs("strace")
    def test_replaced_files(self) -> None:
        self.run_table(True)

    @slow
    @needs("strace")
    def test_the_faults_of_the_table_strike(self) -> None:
        # Else the table proves nothing. fchmod and rename are of replaced files, linkat of new ones.
        for old in (False, True):
            for calls in ("preadv2", "pwritev2", "ftruncate", "fchmod" if old else "linkat"):
                with self.subTest(calls=calls, old=old):
                    self.assertGreater(self.copy(calls, "error=EIO:when=1", old)[2], 0)

    @slow
    @needs("strace")
    def test_fault_at_every_call_of_a_small_copy(self) -> None:
        source = self.make("small", {"d": {"f": b"content" * 1000}})
        for call in ("openat", "newfstatat,fstat", "preadv2", "pwritev2", "linkat", "mkdir,mkdirat", "close"):
            for k in self.calls_of(source, call):
                with self.subTest(call=call, k=k):
                    self.count += 1
                    destination = self.path(f"k{self.count}")
                    under = support.strace_inject(self.path(f"l{self.count}"), call, f"error=EIO:when={k}")
                    result = run_tool("fastcp", "-n", "1", "-r", source, destination, under=under)
                    path = os.path.join(destination, "d", "f")
                    if os.path.exists(path):
                        with open(path, "rb") as file:
                            self.assertEqual(file.read(), b"content" * 1000)
                    if result.returncode == 0 and os.path.isdir(destination):
                        self.assert_same_tree(destination, source)
                    if os.path.isdir(destination):
                        self.assert_no_leftovers(destination)

    def calls_of(self, source: str, call: str) -> List[int]:
        """The numbers of the last few calls of a copy: those of Python's own start are not ours."""
        self.count += 1
        log = self.path(f"trace{self.count}")
        argv = ["strace", "-f", "-qq", "-o", log, "-e", f"trace={call}"]
        run_tool("fastcp", "-n", "1", "-r", source, self.path(f"t{self.count}"), under=argv, expect=0)
        with open(log, "rb") as file:
            total = sum(b"(" in line for line in file)
        return list(range(max(1, total - 11), total + 1))


class CleaningUp(TestCase):
    """What cannot be removed at the end loses neither the first error nor the last line."""

    @slow
    @needs("strace")
    def test_a_whole_copy_is_whole(self) -> None:
        source = self.make("s", {"a": b"new", "d": {"b": b"new"}})
        copy = self.make("c", {"a": b"old"})
        under = support.strace_inject(self.path("log"), "unlink,unlinkat", "error=EBUSY")
        done = run_tool("fastcp", "-n", "1", "-rfT", source, copy, under=under, expect=0)
        self.assertGreater(support.injected(self.path("log")), 0)
        first, last = done.stderr.splitlines()
        self.assertIn("warning: cannot remove the record of this run: ", first)
        self.assertRegex(last, "^fastcp: 2 files, ")
        self.assert_same_tree(self.path("c/a"), b"new")

    @slow
    @needs("strace")
    def test_the_first_error_is_told(self) -> None:
        source = self.make("s", {"a": b"new" * 3000, "z": b"z"})
        copy = self.make("c", {"a": b"old"})
        under = support.strace_inject(self.path("log"), "unlink,unlinkat", "error=EBUSY")
        under[-2:-2] = ["-e", "inject=pwritev2:error=EIO:when=1"]
        under[under.index("trace=unlink,unlinkat")] = "trace=unlink,unlinkat,pwritev2"
        done = run_tool("fastcp", "-n", "1", "-rfT", source, copy, under=under, expect=1)
        self.assertIn(f"cannot copy '{source}/a' to '{copy}/a': Input/output error", done.stderr)
        self.assertIn("warning: cannot remove the temporary file '.a.", done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], "^fastcp: FAILED: 1 of 2 files not copied; 1 file, ")
        self.assert_same_tree(self.path("c/a"), b"old")


class Closing(TestCase):
    """What only close(2) or fsync(2) tells of the new file: a full quota on NFS."""

    def closes(self, name: str, words: List[str]) -> int:
        """Which close of the process tells of a file that is made: the last of one that has no name while it is made,
        the first, of a duplicate, of one that has a temporary's."""
        log = self.path(f"trace-{name}")
        argv = ["strace", "-f", "-y", "-qq", "-o", log, "-e", "trace=close"]
        run_tool("fastcp", "-n", "1", *words, under=argv, expect=0)
        with open(log, "rb") as file:
            lines = [line for line in file if b"close(" in line]
        place = os.fsencode(self.path("trace"))
        nameless = [number for number, line in enumerate(lines) if place + b"/#" in line]
        named = [number for number, line in enumerate(lines) if place + b"/.f." in line]
        self.assertTrue(named if name == "replaced" else nameless)
        return (named[0] if name == "replaced" else nameless[-1]) + 1

    @slow
    @needs("strace")
    def test_an_error_of_close_is_one_of_the_file(self) -> None:
        trees: List[Tuple[str, Any, Any]] = [
            ("small", {"f": b"new"}, {}),
            ("replaced", {"f": b"new"}, {"f": OLD}),
            ("large", {"f": Random(LARGE, seed=1)}, {}),
        ]
        for name, source, old in trees:
            for error, words in (("EDQUOT", "Disk quota exceeded"), ("EIO", "Input/output error")):
                with self.subTest(name, error=error):
                    for place, tree in (("s", source), ("trace", old), ("copy", old)):
                        support.remove_tree(self.path(place))
                        self.make(place, tree)
                    options = ["-rf" if old else "-r", self.path("s/f")]
                    number = self.closes(name, [*options, self.path("trace")])
                    under = support.strace_inject(self.path("log"), "close", f"error={error}:when={number}")
                    done = run_tool("fastcp", "-n", "1", *options, self.path("copy"), under=under, expect=1)
                    self.assertIn(f"cannot copy '{self.path('s/f')}' to '{self.path('copy/f')}': {words}", done.stderr)
                    self.assert_same_tree(self.path("copy"), old)

    @slow
    @needs("strace")
    def test_an_error_of_fsync_leaves_the_old_file(self) -> None:
        source = self.make("s", {"f": b"new"})
        for options, old in ((["--fsync"], {}), (["--fsync", "-f"], {"f": OLD}), (["--verify"], {})):
            with self.subTest(options=options):
                support.remove_tree(self.path("copy"))
                self.make("copy", old)
                under = support.strace_inject(self.path("log"), "fsync", "error=EDQUOT:when=1")
                words = ["-n", "1", "-rT", *options, source, self.path("copy")]
                done = run_tool("fastcp", *words, under=under, expect=1)
                self.assertIn("Disk quota exceeded", done.stderr)
                self.assert_same_tree(self.path("copy"), old)


class Vanishing(TestCase):
    def test_files_that_are_gone_since_they_were_listed(self) -> None:
        source = self.make("s", {f"d{i}": {f"f{j:03}": b"x" * j for j in range(200)} for i in range(5)})
        gone = [self.path(f"s/d{i}/f{j:03}") for i in range(5) for j in range(0, 200, 3)]

        def remove() -> None:
            for path in gone:
                os.unlink(path)

        _, said = copying.copy(source, self.path("copy"), 4, between=remove)
        self.assertEqual(sorted(path for path, _ in said.failures), sorted(gone))
        self.assertEqual({reason for _, reason in said.failures}, {"vanished since it was listed"})
        self.assert_same_tree(self.path("copy"), source)


class Comparing(TestCase):
    @slow
    @needs("strace")
    def test_an_update_that_compares_goes_on_without_o_direct(self) -> None:
        self.make("s", {"f": Random(3 * MIB, seed=1)})
        run_tool("fastcp", "-r", "s", "d", cwd=self.tmp, expect=0)
        under = support.strace_inject(self.path("log"), "preadv2", "error=EINVAL:when=1")
        result = run_tool("fastcp", "-n", "1", "-ruT", "--checksum", "s", "d", cwd=self.tmp, under=under, expect=0)
        self.assertGreater(support.injected(self.path("log")), 0)
        self.assertIn("1 skipped, compared and the same", result.stderr)


class Hashing(TestCase):
    @slow
    @needs("strace")
    def test_a_read_error_is_named_and_has_no_line(self) -> None:
        self.make("t", {"a": Random(3 * MIB, seed=1), "b": b"small"})
        # The first call asks whether the page cache has the file, which it has not.
        for fault, status in (
            ("error=EIO:when=1", 0),
            ("error=EIO:when=2", 1),
            ("error=ESTALE:when=2", 1),
            ("error=EINTR:when=2", 0),
            ("retval=0:when=2", None),
        ):
            with self.subTest(fault):
                log = self.path("log")
                run_tool("dropcache", "t", cwd=self.tmp, expect=0)
                under = support.strace_inject(log, "preadv2", fault)
                result = run_tool("fastmd5", "-n", "1", "t", cwd=self.tmp, under=under)
                self.assertGreater(support.injected(log), 0)
                if status is not None:
                    self.assertEqual(result.returncode, status, result)
                self.assertEqual(result.stdout.count("\n") + result.stderr.count("cannot hash"), 2, result)

    @slow
    @needs("strace")
    def test_a_listing_that_fails_half_way_is_no_listing(self) -> None:
        self.make("t", {f"f{i:04}": b"x" for i in range(3000)})
        words = {"EIO": "Input/output error", "ESTALE": "Stale file handle", "ENOMEM": "Cannot allocate memory"}
        for error, when in (("EIO", 1), ("EIO", 2), ("ESTALE", 2), ("ENOMEM", 1)):
            for tool, args in (("fastmd5", ("t",)), ("fastcp", ("-r", "t", "copy"))):
                with self.subTest(tool, error=error, when=when):
                    under = support.strace_inject(self.path("log"), "getdents64", f"error={error}:when={when}")
                    under[1:1] = ["-P", self.path("t")]  # Python lists directories of its own
                    result = run_tool(tool, "-n", "1", *args, cwd=self.tmp, under=under, expect=1)
                    self.assertGreater(support.injected(self.path("log")), 0)
                    self.assertEqual(result.stdout, "")
                    self.assertIn(f"'t': {words[error]}", result.stderr)
                    self.assertFalse(os.path.exists(self.path("copy")))


class Limits(TestCase):
    """Little memory, and a reader of messages that takes its time."""

    def test_address_space(self) -> None:
        source = self.make("big", Random(70 * MIB, seed=1))
        under = ["bash", "-c", 'ulimit -v 800000; exec "$@"', "bash"]
        run_tool("fastcp", "-n", "64", "-b", "64M", source, self.path("a"), under=under, expect=0)
        self.assert_same_tree(self.path("a"), source)
        for tool, words in (("fastcp", [self.path("b")]), ("fastmd5", []), ("fastmd5", ["--compare", self.path("a")])):
            with self.subTest(tool, words=words):
                result = run_tool(tool, "-b", "1G", source, *words, under=under, expect=1)
                advice = "Cannot allocate memory for a buffer of 1073741824 bytes; a smaller one will do (-b)"
                self.assertIn(advice, result.stderr)
        self.assertFalse(os.path.exists(self.path("b")))
        run_tool("fastcp", "-b", "64M", source, self.path("b"), under=under, expect=0)  # as it says

    @slow
    def test_a_slow_reader_of_messages(self) -> None:
        source = self.make("s", {f"d{i}": {f"{'f' * 100}{j}": b"x" for j in range(300)} for i in range(10)})
        process = self.start_tool("fastcp", "-rv", "-n", "16", source, self.path("copy"), stderr=subprocess.PIPE)
        time.sleep(2)  # the pipe is full long before: 600 kB
        _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0)
        self.assertEqual(errors.count(b"\n"), 3001)
        self.assert_same_tree(self.path("copy"), source)


@slow
@needs_root
class FullDisks(TestCase):
    def fill(self, place: str, force: bool, tree: Any, status: Optional[int] = 1) -> support.Result:
        source = self.make(f"source{len(os.listdir(self.tmp))}", tree)
        options = ["-rT"] + (["-f"] if force else [])
        result = run_tool("fastcp", *options, source, os.path.join(place, "copy"), expect=status)
        for directory, _, names in os.walk(os.path.join(place, "copy")):
            for name in names:
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    data = file.read()
                with open(os.path.join(source, os.path.relpath(path, os.path.join(place, "copy"))), "rb") as file:
                    self.assertIn(data, (file.read(), OLD))
        self.assert_no_leftovers(place)
        return result

    def test_no_space(self) -> None:
        for fs, size in (("tmpfs", 8 * MIB), ("ext4", 16 * MIB)):
            with self.subTest(fs), support.mounted(fs, size=size) as place:
                tree = {f"f{i:03}": Random(MIB, seed=i) for i in range(60)}
                support.make_tree(os.path.join(place, "copy"), {"f000": OLD})
                result = self.fill(place, True, tree)
                self.assertRegex(result.stderr, "No space left on device")
                self.assertRegex(result.stderr, "stopped early: No space left on device")
                self.assertRegex(result.stderr, r"(?m)^fastcp: FAILED: \d+ of 60 files not copied")

    def test_no_space_for_a_large_file(self) -> None:
        with support.mounted("tmpfs", size=32 * MIB) as place:
            result = self.fill(place, False, {"big": Random(70 * MIB, seed=1)})
            self.assertRegex(result.stderr, "cannot copy .*big.*No space left on device")
            self.assertEqual(os.listdir(os.path.join(place, "copy")), [])

    def test_no_inodes(self) -> None:
        with support.mounted("ext4", size=32 * MIB, mkfs=["-N", "32"]) as place:
            result = self.fill(place, False, {f"f{i:03}": b"x" for i in range(100)})
            self.assertRegex(result.stderr, "No space left on device")

    def test_a_destination_that_cannot_be_written_is_known_before_the_walk(self) -> None:
        source = self.make("s", {f"d{i}": {} for i in range(50)})
        os.chmod(self.tmp, 0o755)
        with support.mounted("ext4") as place:
            support.run(["mount", "-o", "remount,ro", place], expect=0)
            for words in (["-r", source, place], ["-r", source, os.path.join(place, "new")]):
                with self.subTest(words=words):
                    log = self.path("log")
                    under = ["strace", "-f", "-qq", "-P", source, "-o", log, "-e", "trace=getdents64"]
                    done = run_tool("fastcp", *words, under=under, expect=1)
                    self.assertRegex(done.stderr, "^fastcp: cannot create directory '.*': Read-only file system\n$")
                    with open(log, encoding="ascii") as file:
                        self.assertNotIn("getdents64(", file.read())
        closed = self.make("closed", support.Dir({}, mode=0o755))
        done = run_tool("fastcp", "-r", source, closed, user="nobody", expect=1)
        self.assertRegex(done.stderr, "^fastcp: cannot create directory '.*/s': Permission denied\n$")

    def test_read_only(self) -> None:
        with support.mounted("ext4", size=32 * MIB) as place:
            support.make_tree(os.path.join(place, "copy"), {"f": OLD})
            support.run(["mount", "-o", "remount,ro", place], expect=0)
            result = self.fill(place, True, {"f": b"new", "g": b"new", "d": {}})
            self.assertRegex(result.stderr, "Read-only file system")


if __name__ == "__main__":
    support.main()
