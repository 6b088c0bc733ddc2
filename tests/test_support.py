# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The helpers and the runner themselves: a helper that sees nothing would make every other test agree."""

# Takes about 11 s
from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
import unittest

import support
from support import (
    Device,
    Digest,
    Dir,
    Fifo,
    File,
    Link,
    Random,
    Socket,
    Sparse,
    differences,
    make_tree,
    read_tree,
)

RUN_TESTS = os.path.join(support.ROOT, "tests", "run_tests.py")
ALL_KINDS = {
    "a": b"x",
    "empty": b"",
    "d": {"inner": {}, "b": b"y\0\n"},
    b"\xff\n": b"odd",
    "l": Link("a"),
    "dangling": Link(b"no\xfe"),
    "f": Fifo(),
    "s": Socket(),
}


class Trees(support.TestCase):
    def test_what_is_made_is_read_back(self) -> None:
        path = self.make("t", ALL_KINDS)
        expected = {os.fsdecode(name): value for name, value in ALL_KINDS.items()}
        expected["dangling"] = Link(os.fsdecode(b"no\xfe"))
        self.assertEqual(read_tree(path), expected)
        self.assert_same_tree(path, ALL_KINDS)

    def test_order_is_by_bytes(self) -> None:
        names = [b"\xee\x80\x80", b"\xf0\x90\x80\x80", b"\xff"]
        tree = read_tree(self.make("t", dict.fromkeys(reversed(names), b"")))
        self.assertEqual([os.fsencode(name) for name in tree], names)

    def test_long_contents_come_as_a_digest(self) -> None:
        path = self.make("t", {"r": Random(3 << 20, seed=1), "b": b"z" * 5000})
        tree = read_tree(path)
        self.assertIsInstance(tree["r"], Digest)
        self.assertEqual(tree["r"].size, 3 << 20)
        self.assert_same_tree(path, {"r": Random(3 << 20, seed=1), "b": b"z" * 5000})
        self.assertEqual(len(differences({"r": Random(3 << 20, seed=2), "b": b"z" * 5000}, tree)), 1)

    def test_random_is_the_same_everywhere_and_no_block_comes_twice(self) -> None:
        with open(self.make("r", Random(2 << 20, seed=7)), "rb") as stream:
            data = stream.read()
        self.assertEqual(data[:4].hex(), "ef05183c")
        blocks = [data[start : start + 512] for start in range(0, len(data), 512)]
        self.assertEqual(len(set(blocks)), len(blocks))

    def test_sparse_has_a_hole_and_its_data(self) -> None:
        path = self.make("s", Sparse(8 << 20, {3: b"abc", (1 << 20) - 1: b"edge", (8 << 20) - 1: b"e"}))
        status = os.stat(path)
        self.assertEqual(status.st_size, 8 << 20)
        self.assertLess(status.st_blocks * 512, 1 << 20)
        self.assert_same_tree(path, Sparse(8 << 20, {3: b"abc", (1 << 20) - 1: b"edge", (8 << 20) - 1: b"e"}))
        with open(path, "rb") as stream:
            self.assertEqual(stream.read(8), b"\0\0\0abc\0\0")

    def test_modes_and_times(self) -> None:
        path = self.make(
            "t",
            {
                "m": File(b"1", mode=0o640, mtime_ns=10**18 + 1),
                "d": Dir({"x": b""}, mode=0o2750, mtime_ns=10**18),
            },
        )
        tree = read_tree(path, modes=True, times=True)
        self.assertEqual(tree.entries["m"], File(b"1", 0o640, 10**18 + 1))
        self.assertEqual((tree.entries["d"].mode, tree.entries["d"].mtime_ns), (0o2750, 10**18))

    def test_a_device(self) -> None:
        if os.geteuid() != 0:
            self.skipTest("needs root, to make a device")
        self.assertEqual(read_tree(self.make("null", Device("c", 1, 3))), Device("c", 1, 3))

    def test_names_that_are_no_names_are_refused(self) -> None:
        for name in ("", ".", "..", "a/b"):
            with self.subTest(name), self.assertRaises(ValueError):
                self.make("t", {name: b""})

    def test_a_file_that_is_there_is_not_written_over(self) -> None:
        path = self.make("t", {"a": b"1"})
        with self.assertRaises(FileExistsError):
            make_tree(path, {"a": b"2"})


class Differences(support.TestCase):
    def test_each_kind_of_difference_is_named(self) -> None:
        cases = [
            ({"a": b"1"}, {"a": b"2"}, "./a"),
            ({"a": b"1"}, {}, "./a: missing"),
            ({}, {"a": b"1"}, "./a: unexpected"),
            ({"a": {}}, {"a": b""}, "./a"),
            ({"a": Link("x")}, {"a": Link("y")}, "./a"),
            ({"a": Link("x")}, {"a": b"x"}, "./a"),
            ({"a": Fifo()}, {"a": Socket()}, "./a"),
            ({"a": File(b"", mode=0o600)}, {"a": File(b"", mode=0o644)}, "./a: expected mode 0600"),
            ({"a": Dir({}, mtime_ns=1)}, {"a": Dir({}, mtime_ns=2)}, "./a: expected mtime"),
            ({"d": {"e": {"f": b"1"}}}, {"d": {"e": {"f": b""}}}, "./d/e/f"),
        ]
        for expected, actual, start in cases:
            with self.subTest(start):
                lines = differences(expected, actual)
                self.assertEqual(len(lines), 1)
                self.assertTrue(lines[0].startswith(start), lines[0])

    def test_what_is_open_is_not_compared(self) -> None:
        self.assertEqual(differences({"a": b"1"}, {"a": File(b"1", mode=0o600, mtime_ns=1)}), [])

    def test_the_assertion_fails_and_names_the_place(self) -> None:
        one, other = self.make("one", {"a\udcff": b"1"}), self.make("other", {"a\udcff": b"2"})
        with self.assertRaisesRegex(AssertionError, r"\./a\\udcff: expected b'2', found b'1'"):
            self.assert_same_tree(one, other)
        os.chmod(self.make("third", {"a\udcff": File(b"1", mode=0o600)}), 0o700)
        self.assert_same_tree(one, self.path("third"))
        with self.assertRaisesRegex(AssertionError, "expected mode"):
            self.assert_same_tree(one, self.path("third"), modes=True)


class Leftovers(support.TestCase):
    def test_temporaries_are_found_and_other_names_are_not(self) -> None:
        path = self.make(
            "t",
            {
                ".a.bin.0123abcd": b"",
                ".fastcp.Zz345678": b"",
                "d": {".x.01234567": Link("x")},
                ".hidden": b"",
                ".short.abc": b"",
                "plain": b"",
                "a.01234567": b"",
            },
        )
        self.assertEqual(
            [os.path.basename(name) for name in support.leftovers(path)],
            [".a.bin.0123abcd", ".fastcp.Zz345678", ".x.01234567"],
        )
        with self.assertRaises(AssertionError):
            self.assert_no_leftovers(path)
        self.assert_no_leftovers(path, pattern="nothing")


class Removal(support.TestCase):
    def test_the_directory_of_a_test_goes_with_it(self) -> None:
        class Inner(support.TestCase):
            def runTest(self) -> None:
                self.make("d", {"e": Dir({"x": b""}, mode=0)})

        inner = Inner()
        inner.run()
        self.assertTrue(inner._tmp)
        self.assertFalse(os.path.lexists(inner._tmp))

    @support.needs_nobody
    def test_directories_without_permission_go_for_an_ordinary_user_too(self) -> None:
        os.chmod(self.tmp, 0o777)
        copy = os.path.join(support.public_copy(), "tests")
        code = f"""
            import os, sys; sys.path.insert(0, {copy!r})
            import support
            inner = support.Dir({{"x": b""}}, mode=0)
            support.make_tree("t", {{"d": support.Dir({{"e": inner}}, mode=0o500)}})
            support.remove_tree("t"); print(os.path.lexists("t"))"""
        os.mkdir(copy)
        with open(support.__file__, "rb") as stream:
            make_tree(os.path.join(copy, "support.py"), stream.read())
        result = support.run(
            [support.SYSTEM_PYTHON, "-c", textwrap.dedent(code)], user="nobody", cwd=self.tmp, expect=0
        )
        self.assertEqual(result.stdout, "False\n")

    def test_a_tree_deeper_than_the_recursion_limit_goes(self) -> None:
        top = self.path("deep")
        os.mkdir(top)
        here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(1500):
            os.mkdir("directory", dir_fd=here)
            below = os.open("directory", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)
        support.remove_tree(top)
        self.assertFalse(os.path.lexists(top))


class Running(support.TestCase):
    def test_output_and_status(self) -> None:
        result = support.run(["sh", "-c", r"cat; printf '\377' >&2; exit 3"], input=b"in")
        self.assertEqual((result.returncode, result.stdout, result.stderr), (3, "in", "\udcff"))
        with self.assertRaisesRegex(AssertionError, "expected exit status 0"):
            support.run(["false"], expect=0)

    def test_a_traceback_is_a_failure(self) -> None:
        with self.assertRaisesRegex(AssertionError, "a traceback"):
            support.run([sys.executable, "-c", "1 / 0"])

    def test_what_hangs_is_killed_with_its_group(self) -> None:
        started = time.monotonic()
        with self.assertRaisesRegex(AssertionError, "(?s)still running after 0.5 s.*early"):
            support.run(["sh", "-c", "echo early; sleep 600 & echo $! >pid; wait"], cwd=self.tmp, timeout=0.5)
        self.assertLess(time.monotonic() - started, 10)
        with open(self.path("pid"), encoding="ascii") as stream:
            self.assertTrue(ended(int(stream.read())))

    def test_the_environment_is_added_to_and_taken_from(self) -> None:
        result = support.run(["sh", "-c", "echo $ONE-${HOME-none}"], env={"ONE": "1", "HOME": None})
        self.assertEqual(result.stdout, "1-none\n")

    def test_signals_are_at_their_defaults_in_the_child(self) -> None:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.addCleanup(signal.signal, signal.SIGINT, previous)
        process = support.start(["sleep", "600"])
        os.kill(process.pid, signal.SIGINT)
        self.assertEqual(process.wait(10), -signal.SIGINT)

    def test_a_started_tool_ends_with_its_test(self) -> None:
        started = []

        class Inner(support.TestCase):
            def runTest(self) -> None:
                started.append(self.start_tool("x", under=["sh", "-c", "sleep 600"]))

        Inner().run()
        self.assertEqual(started[0].returncode, -signal.SIGKILL)

    def test_a_command_line(self) -> None:
        self.assertEqual(
            support.command_line("fastcp", "-r", b"a", flags=["-O"], under=["env"]),
            ["env", sys.executable, "-O", os.path.join(support.CLIENT, "fastcp"), "-r", b"a"],
        )

    @support.needs_nobody
    def test_nobody_is_nobody_and_runs_a_copy(self) -> None:
        argv = support.command_line("fastcp", user="nobody")
        self.assertFalse(argv[1].startswith(support.ROOT + "/"))
        code = "import os, mlperf_common; print(os.getuid(), os.getgroups(), mlperf_common.__file__)"
        result = support.run([argv[0], "-c", code], user="nobody", expect=0)
        self.assertTrue(result.stdout.startswith(f"65534 [] {support.public_copy()}/"), result)


def ended(pid: int) -> bool:
    """Whether the process is gone or a zombie, waiting up to 5 s for it."""
    for _ in range(250):
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
                if stream.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


class Needs(support.TestCase):
    def test_a_missing_program_is_named(self) -> None:
        @support.needs("sh", "no-such-program")
        class Inner(unittest.TestCase):
            def runTest(self) -> None: ...

        result = unittest.TestResult()
        Inner().run(result)
        self.assertEqual([reason for _, reason in result.skipped], ["needs no-such-program"])

    def test_an_interpreter_by_its_version(self) -> None:
        with self.assertRaisesRegex(unittest.SkipTest, "no Python 3.1 here"):
            support.old_python("3.1")
        self.assertTrue(all(version >= (3, 8) for version in support.python_versions()))


@support.slow
@support.needs_root
class Mounts(support.TestCase):
    def test_each_filesystem_is_there_and_then_gone(self) -> None:
        for fs in ("tmpfs", "ext4", "xfs", "btrfs"):
            with self.subTest(fs), support.mounted(fs) as place:
                with open("/proc/self/mounts", encoding="utf-8") as stream:
                    kinds = {line.split()[1]: line.split()[2] for line in stream}
                self.assertEqual(kinds[place], fs)
                self.assertEqual(os.listdir(place), [])
                self.assertEqual(stat.S_IMODE(os.stat(place).st_mode), 0o777)
                make_tree(os.path.join(place, "t"), ALL_KINDS)
            with self.subTest(fs):
                self.assertFalse(os.path.lexists(os.path.dirname(place)))

    def test_a_full_tmpfs_is_full(self) -> None:
        with support.mounted("tmpfs", size=1 << 20) as place, self.assertRaisesRegex(OSError, "No space"):
            make_tree(os.path.join(place, "big"), Random(2 << 20))

    def test_nobody_else_sees_them(self) -> None:
        with support.mounted("tmpfs") as place:
            with open("/proc/1/mounts", encoding="utf-8") as stream:
                self.assertNotIn(place, stream.read())

    def test_a_busy_mount_is_let_go(self) -> None:
        with support.mounted("tmpfs") as place:
            held = os.open(place, os.O_RDONLY)
        os.close(held)
        self.assertFalse(os.path.lexists(os.path.dirname(place)))

    def test_a_mount_that_is_refused_is_a_skip(self) -> None:
        with self.assertRaisesRegex(unittest.SkipTest, "mount -t nosuchfs"):
            with support.mounted_at(self.path("m"), "-t", "nosuchfs", "none"):
                self.fail("mounted")

    def test_what_is_mounted_below_is_unmounted_before_it_is_removed(self) -> None:
        precious = self.make("precious", {"keep": b"1"})
        doomed = self.make("doomed", {"x y": {}})
        support._enter_mount_namespace()
        subprocess.run(["mount", "--bind", precious, os.path.join(doomed, "x y")], check=True)
        support.remove_tree(doomed)
        self.assertFalse(os.path.lexists(doomed))
        self.assert_same_tree(precious, {"keep": b"1"})


class Faults(support.TestCase):
    def test_traps_are_refused(self) -> None:
        for call in ("preadv", "pwritev", "open", "pread64"):
            with self.subTest(call), self.assertRaisesRegex(ValueError, call):
                support.strace_inject("log", f"write,{call}", "error=EIO")

    @support.slow
    @support.needs("strace")
    def test_a_fault_happens_and_is_counted(self) -> None:
        code = (
            "import os\nfd = os.open('/dev/zero', 0)\n"
            "try: os.preadv(fd, [bytearray(8)], 0); print('read')\nexcept OSError as exc: print(exc.errno)"
        )
        log = self.path("log")
        for calls, fault, expected, count in (
            ("preadv2", "error=EIO:when=1", "5\n", 1),
            ("preadv2", "error=EIO:when=2", "read\n", 0),
            ("preadv2", "retval=3", "read\n", 1),
        ):
            with self.subTest(fault):
                under = support.strace_inject(log, calls, fault, trace="openat")
                result = support.run([*under, sys.executable, "-c", code], expect=0)
                self.assertEqual(result.stdout, expected)
                self.assertEqual(support.injected(log), count)
                with open(log, encoding="utf-8", errors="replace") as stream:
                    self.assertIn("/dev/zero", stream.read())

    @support.slow
    @support.needs("strace")
    def test_a_signal_happens(self) -> None:
        under = support.strace_inject(self.path("log"), "chdir", "signal=KILL:when=1")
        result = support.run([*under, "sh", "-c", "cd /; echo alive"])
        self.assertEqual((result.returncode, result.stdout), (-signal.SIGKILL, ""))


@support.slow
class Runner(support.TestCase):
    """tests/run_tests.py on test files made here."""

    def run_files(self, *args: str, env: object = None, **files: str) -> support.Result:
        """Write each FILE='body of a class' as test_FILE.py and run those."""
        paths = []
        for name, body in files.items():
            source = (
                "# {}\nimport os, subprocess, time, unittest\nimport support\nclass T(unittest.TestCase):\n{}"
            )
            top, _, body = body.rpartition("====\n")
            text = source.format(top.strip(), textwrap.indent(textwrap.dedent(body), "    "))
            paths.append(make_tree(self.path(f"test_{name}.py"), text.encode()))
        plain = {"REQUIRE_ALL": None, "FILEIO_FAST": None, **(env or {})}  # type: ignore[dict-item]
        return support.run([sys.executable, RUN_TESTS, *args, *paths], env=plain, timeout=60)

    def assert_closes(self, result: support.Result, line: str, status: int) -> None:
        self.assertEqual(result.stdout.splitlines()[-1], line, result)
        self.assertEqual(result.returncode, status, result)

    def test_counts_add_up_over_files(self) -> None:
        result = self.run_files(
            one="def test_a(self): pass\ndef test_b(self): self.skipTest('no moon')",
            two="def test_a(self): pass\n@unittest.expectedFailure\ndef test_b(self): self.fail()",
        )
        self.assert_closes(result, "3 passed, 0 failed, 1 skipped", 0)
        self.assertIn("\nskipped 1: no moon\n", result.stdout)

    def test_the_output_of_a_failing_file_is_shown_and_of_a_passing_one_not(self) -> None:
        result = self.run_files(
            good="def test_a(self): print('quiet words')",
            bad="def test_a(self): print('loud words'); self.fail('reason \\udcff')",
        )
        self.assert_closes(result, "1 passed, 1 failed, 0 skipped", 1)
        self.assertIn("loud words", result.stdout)
        self.assertIn("reason", result.stdout)
        self.assertNotIn("quiet words", result.stdout)

    def test_a_test_counts_once_whatever_its_subtests_do(self) -> None:
        result = self.run_files(
            one="""
            def test_a(self):
                for i in range(3):
                    with self.subTest(i): self.fail()
            def test_b(self):
                for i in range(3):
                    with self.subTest(i): self.skipTest("why")
            def test_c(self):
                with self.subTest(1): self.skipTest("why")
                self.fail()
            @unittest.expectedFailure
            def test_d(self): pass
            """
        )
        self.assert_closes(result, "0 passed, 3 failed, 1 skipped", 1)

    def test_a_class_that_cannot_be_set_up_fails(self) -> None:
        result = self.run_files(one="@classmethod\ndef setUpClass(cls): 1/0\ndef test_a(self): pass")
        self.assert_closes(result, "0 passed, 1 failed, 0 skipped", 1)
        result = self.run_files(
            two="@classmethod\ndef setUpClass(cls): raise unittest.SkipTest('x')\ndef test_a(self): pass"
        )
        self.assert_closes(result, "0 passed, 0 failed, 1 skipped", 0)

    def test_files_without_tests_crashing_or_lying_fail(self) -> None:
        for name, body in {
            "none": "pass",
            "crash": "def test_a(self): os._exit(0)",
            "signal": "def test_a(self): os.kill(os.getpid(), 9)",
            "top": "def f(self): pass\n1/0",
            "late": "def test_a(self):\n  import atexit; atexit.register(os._exit, 7)",
        }.items():
            with self.subTest(name):
                result = self.run_files(**{name: body})
                self.assert_closes(result, f"{int(name == 'late')} passed, 1 failed, 0 skipped", 1)

    def test_a_file_that_hangs_is_killed_with_all_it_started(self) -> None:
        result = self.run_files(
            "--timeout",
            "2",
            hang=f"""
            def test_a(self):
                process = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True)
                open({self.path("pid")!r}, "w").write(str(process.pid))
                os.kill(os.getpid(), 19) if os.environ.get("STOP") else time.sleep(600)
            """,
        )
        self.assert_closes(result, "0 passed, 1 failed, 0 skipped", 1)
        self.assertIn("killed after 2 s", result.stdout)
        self.assertIn("in test_a", result.stdout)
        with open(self.path("pid"), encoding="ascii") as stream:
            self.assertTrue(ended(int(stream.read())))

    def test_what_a_file_leaves_behind_goes(self) -> None:
        self.run_files(
            one=f"""
            def test_a(self):
                process = subprocess.Popen(["sleep", "600"])
                open({self.path("pid")!r}, "w").write(str(process.pid))
                import tempfile; place = tempfile.mkdtemp(); os.chmod(place, 0)
                open({self.path("place")!r}, "w").write(place)
            """
        )
        with open(self.path("pid"), encoding="ascii") as stream:
            self.assertTrue(ended(int(stream.read())))
        with open(self.path("place"), encoding="utf-8") as stream:
            self.assertFalse(os.path.lexists(stream.read()))

    def test_require_all_turns_skips_into_failures(self) -> None:
        result = self.run_files(
            one="def test_a(self): self.skipTest('no moon')\n@unittest.skip('x')\ndef test_b(self): pass",
            two="@classmethod\ndef setUpClass(cls): raise unittest.SkipTest('y')\ndef test_a(self): pass",
            env={"REQUIRE_ALL": "1"},
        )
        self.assert_closes(result, "0 passed, 3 failed, 0 skipped", 1)
        self.assertIn("no moon", result.stdout)

    def test_fast_leaves_out_the_slow_ones_without_a_skip(self) -> None:
        files = {
            "one": "def test_a(self): pass\n@support.slow\ndef test_b(self): self.fail()",
            "two": "fileio_slow = True\n@classmethod\ndef setUpClass(cls): 1/0\ndef test_a(self): pass",
        }
        result = self.run_files("--fast", env={"REQUIRE_ALL": "1"}, **files)
        self.assert_closes(result, "1 passed, 0 failed, 0 skipped", 0)
        self.assertIn("1 left out", result.stdout)
        for name in files:
            os.unlink(self.path(f"test_{name}.py"))
        self.assert_closes(self.run_files(**files), "1 passed, 2 failed, 0 skipped", 1)

    def test_the_longest_file_starts_first(self) -> None:
        body = "def test_a(self): pass"
        result = self.run_files(
            "-j", "1", a=body, b="Takes about 3 s\n====\n" + body, c="Takes about 20 s\n====\n" + body
        )
        self.assertEqual(
            [line.split()[0] for line in result.stdout.splitlines()[:3]],
            ["test_c.py", "test_b.py", "test_a.py"],
        )

    def test_files_run_at_the_same_time(self) -> None:
        # Each waits for the other, so one at a time would never end.
        meet = (
            f"def test_a(self):\n  open({self.path()!r} + {{}}, 'w')\n"
            f"  while not os.path.exists({self.path()!r} + {{}}): time.sleep(0.01)"
        )
        result = self.run_files(
            "-j", "2", "--timeout", "20", a=meet.format("'x'", "'y'"), b=meet.format("'y'", "'x'")
        )
        self.assert_closes(result, "2 passed, 0 failed, 0 skipped", 0)

    def test_usage_errors(self) -> None:
        for args in (["-j", "0"], ["no-such-file"], ["--no-such-option"]):
            with self.subTest(args):
                self.assertEqual(support.run([sys.executable, RUN_TESTS, *args]).returncode, 2)

    def test_a_file_alone_has_the_same_status(self) -> None:
        source = (
            "import sys\nsys.path.insert(0, {!r})\nimport support\n"
            "class T(support.TestCase):\n{}\nsupport.main()\n"
        )
        for body, status in (
            (" def test_a(self): pass", 0),
            (" def test_a(self): self.fail()", 1),
            (" pass", 1),
            (" @support.slow\n def test_a(self): self.fail()", 0),
        ):
            with self.subTest(body):
                text = source.format(os.path.dirname(RUN_TESTS), body)
                path = make_tree(self.path(f"alone{status}{len(body)}.py"), text.encode())
                result = support.run(
                    [sys.executable, path],
                    stderr=subprocess.STDOUT,
                    env={"FILEIO_FAST": "1", "REQUIRE_ALL": None},
                )
                self.assertEqual(result.returncode, status, result)


if __name__ == "__main__":
    support.main()
