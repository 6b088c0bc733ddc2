# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What has failed the users of other tools, one by one, where no table of another file has it."""

# Takes about 40 s
from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any, Dict, List
from unittest import mock

import copying
import support
from support import Device, Fifo, File, Link, Random, Socket, TestCase, needs, needs_nobody, needs_root, run_tool, slow
from test_names import LOCALES, NAMES

from mlperf_common.fileio import copytasks, metadata

MIB = 1 << 20


class Stopping(TestCase):
    """Thousands of files and a quota that is exceeded: an early end, not a line for each."""

    @slow
    @needs("strace")
    def test_a_full_quota_is_told_once(self) -> None:
        source = self.make("s", {f"d{i}": {f"f{j:03}": b"x" for j in range(500)} for i in range(20)})
        for call, error, words in (
            ("pwritev2", "EDQUOT", "Disk quota exceeded"),
            ("linkat", "ENOSPC", "No space left on device"),
        ):
            with self.subTest(call=call, error=error):
                under = support.strace_inject(self.path("log"), call, f"error={error}")
                done = run_tool("fastcp", "-r", source, self.path(f"c-{call}"), under=under, expect=1)
                self.assertLess(done.stderr.count("\n"), 100)
                self.assertIn(f"stopped early: {words}", done.stderr)
                self.assertRegex(done.stderr.splitlines()[-1], "^fastcp: FAILED: 10000 of 10000 files not copied")

    @needs_nobody
    def test_one_directory_that_cannot_be_made_is_one_line(self) -> None:
        source = self.make("s", {"big": {f"f{i}": b"x" for i in range(2000)}, "d": {"f": b"y"}})
        make = os.mkdir

        def fail(path: Any, *args: Any, **options: Any) -> None:
            if path == "big":
                raise PermissionError(13, "Permission denied")
            make(path, *args, **options)

        with mock.patch.object(os, "mkdir", fail):
            summary, said = copying.copy(source, self.path("c"), 1)
        self.assertEqual(len(said.lines), 1)
        self.assertEqual((summary.files, summary.not_tried, said.failures), (1, 2000, []))

    @slow
    @needs("strace")
    def test_a_worker_that_dies_while_it_lists(self) -> None:
        source = self.make("s", {f"d{i}": {"f": b"x"} for i in range(200)})
        for tool, words in (("fastcp", ["-r", source, self.path("c")]), ("fastmd5", [source]),
                            ("fastmd5", ["--compare", source, source])):  # fmt: skip
            with self.subTest(tool, words=words):
                under = ["strace", "-f", "-qq", "-P", os.path.join(source, "d100"), "-o", self.path("log"),
                         "-e", "trace=getdents64", "-e", "inject=getdents64:signal=KILL:when=1"]  # fmt: skip
                started = time.monotonic()
                done = run_tool(tool, "-n", "4", *words, under=under, expect=1)
                self.assertLess(time.monotonic() - started, 20)
                self.assertIn("was killed by SIGKILL", done.stderr)
                self.assertEqual(done.stdout, "")
                self.assertFalse(os.path.exists(self.path("c")))


@slow
class Reading(TestCase):
    """A reader that reads what is elsewhere: the storage has what was read, and that is not the source."""

    PROGRAM = """
import os, sys
sys.path.insert(0, {root!r})
real = os.preadv
def wrong(fd, buffers, offset, *flags):
    return real(fd, buffers, 0 if 4 << 20 <= offset < 6 << 20 else offset, *flags)
os.preadv = wrong
from mlperf_common.fileio import fastcp
sys.exit(fastcp.main(sys.argv[1:]))
"""

    def test_what_the_copy_cannot_know_a_comparison_does(self) -> None:
        source = self.make("s", {"f": Random(9 * MIB, seed=1)})
        program = self.PROGRAM.format(root=support.ROOT)
        words = ["-n", "1", "-b", "2M", "-r", "--manifest", self.path("m"), source, self.path("c")]
        support.run([sys.executable, "-c", program, *words], expect=0)
        run_tool("fastmd5", "--compare", source, self.path("c"), expect=1)
        apart = run_tool("fastmd5", "-C", source, ".", expect=0).stdout_bytes
        run_tool("fastmd5", "-C", self.path("c"), "-c", input=apart, expect=1)

    def test_several_workers_read_one_file(self) -> None:
        source = self.make("s", {"f": Random(4 * MIB, seed=1)})
        extent = copytasks.copy_extent

        def told(worker: Any, part: Any, fds: Any) -> Any:
            with open(self.path(f"by-{os.getpid()}"), "wb"):
                pass
            time.sleep(0.05)
            return extent(worker, part, fds)

        with copying.limits(MIB), mock.patch.dict(copytasks.FUNCTIONS, extent=told):
            copying.copy(source, self.path("c"), 4)
        self.assertGreater(len([name for name in os.listdir(self.tmp) if name.startswith("by-")]), 1)

    @needs("fincore")
    def test_a_large_copy_leaves_the_page_cache_alone(self) -> None:
        source = self.make("s", Random(70 * MIB, seed=1))
        run_tool("dropcache", source, expect=0)
        run_tool("fastcp", source, self.path("c"), expect=0)
        for path in (source, self.path("c")):
            done = support.run(["fincore", "-b", "-n", "-o", "RES", path], expect=0)
            self.assertLess(int(done.stdout), MIB)


class OnOneName(TestCase):
    @slow
    def test_eight_copies_of_one_file_to_one_name(self) -> None:
        source = self.make("big", Random(3 * MIB, seed=1))
        for number in range(6):
            out = self.path(f"d{number}", "out")
            os.mkdir(os.path.dirname(out))
            options = ["-f"] if number % 2 else []
            started = [self.start_tool("fastcp", *options, source, out, stderr=subprocess.PIPE) for _ in range(8)]
            ends = [(process.communicate(timeout=60)[1], process.returncode) for process in started]
            self.assertIn(0, [status for _, status in ends])
            if options:
                self.assertEqual({status for _, status in ends}, {0}, ends)
            self.assert_same_tree(os.path.dirname(out), {"out": Random(3 * MIB, seed=1)})


@slow
class Modes(TestCase):
    @slow
    @needs("strace")
    def test_directories_are_never_wider_than_they_will_be(self) -> None:
        self.make("s", {"d": {"f": b"x"}})
        os.chmod(self.path("s/d"), 0o750)
        for options, mode in (("-r", "0750"), ("-rp", "0700"), ("-a", "0700")):
            with self.subTest(options=options):
                under = ["strace", "-f", "-qq", "-o", self.path("log"), "-e", "trace=mkdir,mkdirat"]
                run_tool("fastcp", "-n1", options, self.path("s"), self.path(f"c{options}"), under=under, expect=0)
                with open(self.path("log"), encoding="utf-8") as file:
                    made = re.findall(r'mkdirat\(\d+, "d", (\d+)\)', file.read())
                self.assertEqual(made, [mode])
                self.assertEqual(os.stat(self.path(f"c{options}", "d")).st_mode & 0o777, 0o750)

    @needs_nobody
    def test_a_large_read_only_file_of_an_ordinary_user(self) -> None:
        os.chmod(self.tmp, 0o777)
        source = self.make("s", {"f": File(Random(66 * MIB, seed=1), mode=0o440)})
        subprocess.run(["chown", "-R", "nobody:", source], check=True)
        for options in ("-r", "-rp", "-rf", "-rfp"):
            run_tool("fastcp", "-n", "8", f"{options}T", source, self.path("c" + options[2:]), user="nobody", expect=0)
            self.assert_same_tree(self.path("c" + options[2:]), source, modes=True)

    @slow
    @needs_nobody
    @needs("strace")
    def test_files_of_root_copied_by_an_ordinary_user(self) -> None:
        os.chmod(self.tmp, 0o777)
        source = self.make("s", {"f": File(b"x", mode=0o644), "d": {"g": File(b"y", mode=0o444)}})
        for options in ("-r", "-rp", "-a"):
            for more in ("", "f", "u"):
                words = [f"{options}{more}T", source, self.path("c" + options)]
                run_tool("fastcp", "-n", "2", *words, user="nobody", expect=0)
        log = self.path("log")
        under = ["strace", "-f", "-qq", "-o", log, "-e", "trace=fchown,fchownat,chown"]
        run_tool("fastcp", "-n1", "-r", source, self.path("n"), under=under, expect=0)
        with open(log, encoding="utf-8") as file:
            self.assertNotIn("chown", file.read())

    def test_only_attributes_of_users_travel(self) -> None:
        source, copy = self.make("s", b"x"), self.make("c", b"x")
        names = ["lustre.lov", "trusted.x", "security.selinux", "security.ima", "system.nfs4_acl", "user.mine"]
        given: List[str] = []
        with mock.patch.object(os, "listxattr", lambda *_, **__: names), \
             mock.patch.object(os, "getxattr", lambda *_, **__: b"v"), \
             mock.patch.object(os, "setxattr", lambda _, name, *__, **___: given.append(os.fsdecode(name))):
            fds = [os.open(path, os.O_RDWR) for path in (source, copy)]
            try:
                kept = metadata.Kept(xattr=True)
                metadata.dress(fds[1], fds[0], os.fstat(fds[0]), kept, metadata.Notes(), None)
            finally:
                for fd in fds:
                    os.close(fd)
        self.assertEqual([name for name in given if not name.startswith("system.posix_acl")], ["user.mine"])


class Special(TestCase):
    @needs_root
    def test_what_is_no_file_is_refused_or_left_out_and_never_opened(self) -> None:
        kinds: Dict[str, Any] = {
            "socket": Socket(), "character device": Device("c", 1, 5), "block device": Device("b", 7, 250),
        }  # fmt: skip; FIFOs have their place elsewhere
        for kind, value in kinds.items():
            with self.subTest(kind):
                place = self.make(kind.split()[0], {"a": b"a", "x": value, "z": b"z"})
                runs = (("fastcp", ["-r", place, self.path("new")]), ("fastmd5", [place]), ("dropcache", [place]))
                for tool, words in runs:
                    done = run_tool(tool, *words, timeout=20, expect=1)
                    self.assertRegex(done.stderr, f"{tool}: '.*/x' is a {kind}")
                self.assertFalse(os.path.exists(self.path("new")))
                copy = self.path(f"copy-{kind}")
                for tool, words in (("fastcp", ["-r", place, copy]), ("fastmd5", [place]), ("dropcache", [place])):
                    done = run_tool(tool, "--skip-special", *words, timeout=20, expect=0)
                    said = f"warning: ('.*/x' is left out: it is a {kind}|skipping {kind} '.*/x')\n"
                    self.assertRegex(done.stderr, said)
                self.assert_same_tree(copy, {"a": b"a", "z": b"z"})

    def test_cycles_of_links(self) -> None:
        self.make("s", {"a": {"up": Link("..")}, "self": Link("."), "f": b"1"})
        self.make("good", b"g")
        for tool in ("fastmd5", "dropcache"):
            done = run_tool(tool, "s", "good", cwd=self.tmp, timeout=20, expect=1)
            self.assertIn("cyclic symbolic link", done.stderr)
            if tool == "fastmd5":
                self.assertTrue(done.stdout.startswith("good\t0\t1\t"))
        for options in ("-rP", "-a"):
            run_tool("fastcp", options, "s", f"c{options}", cwd=self.tmp, timeout=20, expect=0)
            self.assert_same_tree(self.path(f"c{options}"), self.path("s"))


class Proofs(TestCase):
    @slow
    def test_every_name_in_every_format_and_locale(self) -> None:
        self.make("s", dict.fromkeys(NAMES, b"x"))
        lists: Dict[str, bytes] = {}
        for env in LOCALES[2:4]:
            for option in ("--all", "-z", "--json"):
                text = run_tool("fastmd5", "-q", option, "-C", "s", ".", cwd=self.tmp, env=env, expect=0).stdout_bytes
                self.assertEqual(text, lists.setdefault(option, text))
                words = ["-C", "s", "-c", "--extra", *([option] if option != "--all" else [])]
                done = run_tool("fastmd5", *words, cwd=self.tmp, env=env, input=text, expect=0)
                self.assertEqual(done.stdout_bytes, lists.setdefault("said " + option, done.stdout_bytes))
                end = b"\0" if option == "-z" else b"\n"
                self.assertEqual(done.stdout_bytes.count(end), len(NAMES) + (option == "--all"))
        run_tool("fastcp", "-q", "-r", "--manifest", "m", "s", "d", cwd=self.tmp, env=LOCALES[2], expect=0)
        run_tool("fastmd5", "-C", "d", "-c", "--extra", "--quiet", "m", cwd=self.tmp, env=LOCALES[0], expect=0)
        run_tool("fastmd5", "--compare", "s", "d", cwd=self.tmp, env=LOCALES[3], expect=0)

    def test_lists_of_other_chunks(self) -> None:
        import hashlib

        path = self.make("f", Random(70 * MIB + 5, seed=1))
        with open(path, "rb") as file:
            data = file.read()
        for sizes in ([32 * MIB] * 3, [70 * MIB + 5]):
            lines, at = [], 0
            for size in sizes:
                piece = data[at : at + size]
                lines.append(f"f\t{at}\t{len(piece)}\t{hashlib.md5(piece).hexdigest()}\n")
                at += len(piece)
            text = "".join(lines).encode()
            with self.subTest(sizes=sizes):
                for buffer in ("2M", "16M"):
                    run_tool("fastmd5", "-b", buffer, "-c", cwd=self.tmp, input=text, expect=0)
                with open(path, "r+b") as file:
                    file.seek(65 * MIB)
                    file.write(b"!!!")
                done = run_tool("fastmd5", "-c", cwd=self.tmp, input=text, expect=1)
                ranges = [tuple(map(int, line.split("\t")[1:3])) for line in lines]
                start, size = next(part for part in reversed(ranges) if part[0] <= 65 * MIB)
                self.assertEqual(done.stdout, f"f: FAILED (bytes {start} to {start + size} differ)\n")
                with open(path, "wb") as file:
                    file.write(data)

    @needs_nobody
    def test_each_trouble_of_a_check_has_its_words(self) -> None:
        place = self.make("t", {"ok": b"1", "differs": b"1", "gone": b"1", "shut": b"1", "dir": b"1", "fifo": b"1"})
        os.chmod(self.tmp, 0o755)
        text = run_tool("fastmd5", "-C", place, ".", expect=0).stdout_bytes
        with open(self.path("t/differs"), "wb") as file:
            file.write(b"2")
        os.chmod(self.path("t/shut"), 0)
        for name in ("gone", "dir", "fifo"):
            os.unlink(self.path("t", name))
        self.make("t/dir", {})
        self.make("t/fifo", Fifo())
        done = run_tool("fastmd5", "-C", place, "-c", user="nobody", input=text, timeout=20, expect=1)
        self.assertEqual(sorted(line.split(":")[0] for line in done.stdout.splitlines()),
                         ["differs", "dir", "fifo", "gone", "ok", "shut"])  # fmt: skip
        said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
        self.assertEqual(said["ok"], "OK")
        self.assertEqual(len({said[name] for name in ("ok", "differs", "gone", "shut")}), 4, said)
        self.assertRegex(done.stderr, r"6 paths checked: 1 OK, ")


@slow
class Loops(TestCase):
    @slow
    def test_many_workers_on_little_work_again_and_again(self) -> None:
        source = self.make("s", {f"d{i}": {f"f{j}": b"" for j in range(50)} for i in range(10)})
        for number in range(4):
            run_tool("fastcp", "-q", "-r", "-n", "32", source, self.path(f"c{number}"), timeout=30, expect=0)
            run_tool("fastmd5", "-q", "-n", "32", source, timeout=30, expect=0)

    def test_a_slow_reader_of_the_plan(self) -> None:
        source = self.make("s", {f"d{i}": {f"f{j}": b"" for j in range(400)} for i in range(10)})
        fastcp = " ".join(support.command_line("fastcp", "-rN", source, self.path("new")))
        done = support.run(["bash", "-c", f"set -o pipefail; {fastcp} | (sleep 1; wc -l)"], timeout=40, expect=0)
        self.assertEqual(done.stdout.strip(), "4011")

    def test_logs(self) -> None:
        source = self.make("s", {"f": Random(70 * MIB, seed=1), "d": {"g": b"x"}})
        for tool, words in (("fastcp", ["-r", source, self.path("c")]), ("fastmd5", [source]), ("dropcache", [source])):
            for quiet in ([], ["-q"]):
                words = [word + "q" * bool(quiet) if word == self.path("c") else word for word in words]
                done = run_tool(tool, *quiet, *words, expect=0)
                self.assertNotRegex(done.stderr, r"[\r\x1b\x08]")
                if quiet:
                    self.assertEqual(done.stderr, "")

    def test_the_root_as_dest(self) -> None:
        name = "fastcp-test-file-of-nobody"
        self.make(name, b"x")
        mode = os.stat("/").st_mode
        for words in (["-N", name, "/"], ["-N", name, "//"], ["-rN", ".", "/tmp//"]):
            run_tool("fastcp", *words, cwd=self.tmp, timeout=20, expect=0)
        self.assertEqual(os.stat("/").st_mode, mode)
        self.assertFalse(os.path.exists("/" + name))


class Numbers(TestCase):
    def test_odd_ones_copy(self) -> None:
        source = self.make("s", {"f": Random(5 * MIB, seed=1), "d": {"g": b"x"}})
        for number, words in enumerate((["-b", "1"], ["-n", "99999", "-b", "2M"], ["-n", "1", "-b", "3000000"])):
            run_tool("fastcp", *words, "-r", source, self.path(f"c{number}"), expect=0)
            self.assert_same_tree(self.path(f"c{number}"), source)

    def test_as_many_processes_as_asked_for(self) -> None:
        source = self.make("s", {f"d{i}": {f"f{j}": b"x" for j in range(300)} for i in range(10)})
        for number, (words, wanted) in enumerate(((["-n", "3"], 3), ([], 16))):
            copy = self.path(f"c{number}")
            process = self.start_tool("fastcp", *words, "-r", source, copy, stderr=subprocess.DEVNULL)
            most = 0
            while process.poll() is None:
                try:
                    with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
                        most = max(most, len(file.read().split()))
                except OSError:
                    break
                time.sleep(0.005)
            self.assertEqual(most, wanted)


CALLS_OF_ONE = {
    "serverside.py": {"copy_file_range"},  # on one mount of a file server alone, and every byte is accounted for
    "pacing.py": {"lockf"},  # of a memfd, which is on no filesystem
}


class Calls(TestCase):
    def test_calls_that_are_not_made(self) -> None:
        # They fail, or do something else, on one filesystem or other.
        package = os.path.join(support.ROOT, "mlperf_common")
        for directory, _, names in os.walk(package):
            for name in names:
                if name.endswith(".py"):
                    with open(os.path.join(directory, name), encoding="utf-8") as file:
                        calls = r"\b(?:os|fcntl)\.(copy_file_range|sendfile|posix_fallocate|flock|lockf)\("
                        found = re.findall(calls, file.read())
                    self.assertLessEqual(set(found), CALLS_OF_ONE.get(name, set()), name)


if __name__ == "__main__":
    support.main()
