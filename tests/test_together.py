# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""fastcp and fastmd5 as several ranks of a job: started by hand with the variables of torchrun, and by real launchers.

Two nodes are two mount and UTS namespaces: a host name and a node-local disk for each.
"""

# Takes about 90 s
from __future__ import annotations

import contextlib
import glob
import itertools
import os
import random
import re
import signal
import subprocess
import time
from typing import Any, Dict, List, NamedTuple, Sequence

import launchers
import run_tests
import support
from support import Link, Random, Sparse, TestCase, needs, needs_root, run_tool, slow

MIB, GIB = 1 << 20, 1 << 30
JOBS = itertools.count(os.getpid() * 1000)


def tree() -> Dict[str, Any]:
    """Enough for several ranks: a file that they share, directories of small ones, links, odd names."""
    return {
        "huge": Random(200 * MIB + 77, seed=1),
        **{f"d{i}": {f"f{j}": Random(1000 * j, seed=j) for j in range(60)} for i in range(12)},
        "empty": {"e": {}},
        "l": Link("d1"),
        "odd\udcff\n": {"\udcfe\t": b"x"},
    }


class Ended(NamedTuple):
    """How the ranks of a job ended."""

    statuses: List[int]
    outputs: List[bytes]
    errors: List[str]
    seconds: float


class Case(TestCase):
    def start_ranks(
        self, count: int, *words: str, job: str = "", under: Sequence[Sequence[str]] = (), **options: Any
    ) -> List[subprocess.Popen[bytes]]:
        """Start a tool as so many ranks; ``under``: what goes before each of them."""
        job = job or f"test-{next(JOBS)}"
        return [
            self.start_tool(
                words[0],
                *words[1:],
                under=under[rank] if under else (),
                env={
                    "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
                    "TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": "0",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                **options,
            )
            for rank in range(count)
        ]  # fmt: skip

    def wait_for(self, processes: Sequence[subprocess.Popen[bytes]], timeout: float = 60) -> Ended:
        """How they end. A traceback fails the test."""
        started = time.monotonic()
        told = [process.communicate(timeout=timeout) for process in processes]
        errors = [error.decode("utf-8", "backslashreplace") for _, error in told]
        self.assertNotIn("Traceback", "".join(errors))
        self.assertNotIn("internal error", "".join(errors))
        statuses = [process.returncode for process in processes]
        return Ended(statuses, [out for out, _ in told], errors, time.monotonic() - started)

    def ranks(self, count: int, *words: str, **options: Any) -> Ended:
        """Run a tool as so many ranks."""
        return self.wait_for(self.start_ranks(count, *words, **options))

    def assert_nothing_of_ours(self, place: str) -> None:
        """Neither temporaries nor what the ranks have met in."""
        self.assert_no_leftovers(place)
        self.assertEqual([name for name in os.listdir(place) if name.startswith(".fast")], [])


class Shown(Case):
    @slow
    def test_rank_0_shows_what_all_ranks_do(self) -> None:
        """Each of two ranks moves half of it, and nothing is shown but by rank 0."""
        large = 72 << 20  # more than an extent, so that it is cut
        source = self.make("s", {"a": Random(large, seed=1), "b": Random(large, seed=2)})
        sums = "--compare", self.make("t", {"a": Random(large, seed=1), "b": Random(large, seed=2)})
        for phase, words in (
            ("copying", ["fastcp", "-r", source, self.path("c")]),
            ("hashing", ["fastmd5", source]),
            ("comparing", ["fastmd5", *sums, source]),
        ):
            with self.subTest(phase):
                words += ["-n", "2", "--bwlimit", "42M", "--progress=bar", "--distributed"]
                ended = self.ranks(2, *words, "--rendezvous", self.path())
                self.assertEqual(ended.statuses, [0, 0], ended.errors)
                self.assertEqual(ended.errors[1], "")
                shown = re.findall(r"%s: (\d+) %%, \d+\.\d MiB of 144\.0 MiB, \d of 2 files" % phase, ended.errors[0])
                percents = [int(percent) for percent in shown]
                self.assertTrue(percents == sorted(percents), percents)
                self.assertGreater(percents[-1], 55)  # alone it would get half

    def test_what_other_ranks_find(self) -> None:
        """All entries count, whichever rank lists them."""
        source = self.make("s", {"d%d" % i: {"e": {"f": b"", "g": b""}, "f": b""} for i in range(100)})
        log = self.path("log")
        slow_listing = support.strace_inject(log, "getdents64", "delay_enter=5000")
        words = ["fastcp", "-n", "1", "-r", "--progress=bar", "--distributed", source, self.path("c")]
        ended = self.ranks(2, *words, under=[slow_listing] * 2)
        self.assertEqual(ended.statuses, [0, 0], ended.errors)
        found = [int(number) for number in re.findall(r"planning: (\d+) entr", ended.errors[0])]
        self.assertTrue(found == sorted(found) and found[-1] > 330, found)  # with half of both levels not over 300


class Copying(Case):
    def test_a_tree(self) -> None:
        source = self.make("s", tree())
        for count in (1, 4):
            with self.subTest(ranks=count):
                copy = self.path(f"c{count}")
                ended = self.ranks(count, "fastcp", "-n", "2", "-rP", "--distributed", source, copy)
                self.assertEqual(ended.statuses, [0] * count, ended.errors)
                self.assertEqual("".join(ended.errors[1:]), "")
                first, last = ended.errors[0].splitlines()
                who = "all ranks share one DEST" if count > 1 else "there are no other ranks"
                self.assertEqual(first, f"fastcp: rank 0 of {count} (torchrun): {who}")
                self.assertRegex(last, r"^fastcp: 722 files, 1 link, 16 directories, .*io=direct$")
                self.assert_same_tree(copy, source, modes=True)
                self.assert_nothing_of_ours(copy)
                self.assert_nothing_of_ours(self.tmp)

    @slow
    def test_a_second_run(self) -> None:
        source = self.make("s", {"a": b"a", "d": {"b": b"b"}})
        copy = self.make("c", {"a": b"other", "mine": b"m"})
        os.utime(self.path("c/a"), (2**31, 2**31))
        ended = self.ranks(3, "fastcp", "-n", "2", "-r", "--distributed", f"{source}/.", copy)
        self.assertEqual(ended.statuses, [1, 1, 1])
        self.assertIn(f"cannot create regular file '{copy}/a': File exists (-f replaces it)", ended.errors[0])
        self.assertEqual(ended.errors[1:], ["", ""])
        self.assert_same_tree(copy, {"a": b"other", "mine": b"m"})
        ended = self.ranks(3, "fastcp", "-n", "2", "-rf", "--distributed", f"{source}/.", copy)
        self.assertEqual(ended.statuses, [0, 0, 0], ended.errors)
        self.assert_same_tree(copy, {"a": b"a", "d": {"b": b"b"}, "mine": b"m"})
        ended = self.ranks(3, "fastcp", "-n", "2", "-ru", "--distributed", f"{source}/.", copy)
        self.assertEqual(ended.statuses, [0, 0, 0], ended.errors)
        self.assertIn("2 skipped, unverified", ended.errors[0])
        self.assert_nothing_of_ours(copy)

    @slow
    def test_what_is_refused_is_told_once_and_nothing_is_written(self) -> None:
        source = self.make("s", {"a": b"a", "d": {"b": b"b"}})
        self.make("c", {})
        for words, message in (
            (["-r", source, self.path("missing/c")], "cannot create directory"),
            ([self.path("no"), self.path("c")], "cannot stat"),
            (["-r", source, self.path("s/d")], "into itself"),
            ([source, self.path("c")], "-r not specified"),
        ):
            with self.subTest(words=words):
                ended = self.ranks(2, "fastcp", "-n", "2", "--distributed", "--rendezvous", self.tmp, *words)
                self.assertEqual(ended.statuses, [1, 1], ended.errors)
                self.assertIn(message, ended.errors[0])
                self.assertEqual(ended.errors[1], "")
                self.assert_same_tree(self.tmp, {"s": {"a": b"a", "d": {"b": b"b"}}, "c": {}})

    def test_a_dry_run_prints_the_plan_once(self) -> None:
        source = self.make("s", {"a": b"a"})
        ended = self.ranks(3, "fastcp", "-n", "2", "-rN", "--distributed", source, self.path("c"))
        self.assertEqual(ended.statuses, [0, 0, 0], ended.errors)
        alone = run_tool("fastcp", "-rN", source, self.path("c"), expect=0).stdout_bytes
        self.assertEqual(ended.outputs, [alone, b"", b""])
        self.assertFalse(os.path.exists(self.path("c")))

    @slow
    def test_metadata_and_hard_links(self) -> None:
        source = self.make("s", {"huge": Random(196 * MIB, seed=1), "d": {"f": b"x"}, "e": {}})
        os.link(self.path("s/huge"), self.path("s/e/twin"))
        for name in ("huge", "d/f", "d", "e", ""):
            os.utime(self.path("s", name), ns=(10**18 + 7, 10**18 + 9))
        ended = self.ranks(3, "fastcp", "-n", "2", "-a", "--verify", "--distributed", source, self.path("c"))
        self.assertEqual(ended.statuses, [0, 0, 0], ended.errors)
        self.assert_same_tree(self.path("c"), source, modes=True, times=True)
        self.assertTrue(os.path.samefile(self.path("c/huge"), self.path("c/e/twin")))
        self.make("there", {})
        ended = self.ranks(2, "fastcp", "-n", "2", "-aT", "--distributed", source, self.path("there"))
        self.assertEqual(ended.statuses, [0, 0], ended.errors)
        self.assert_same_tree(self.path("there"), source, modes=True, times=True)  # its own times, too

    @slow
    def test_files_that_fail_on_any_rank_are_told_by_the_first(self) -> None:
        source = self.make("s", {f"d{i}": {f"f{j}": b"x" * 3000 for j in range(150)} for i in range(10)})
        gone = [self.path(f"s/d{i}/f{j}") for i in range(10) for j in (3, 77)]
        under = ["bash", "-c", 'exec "$@"', "bash"]
        processes = self.start_ranks(3, "fastcp", "-n", "2", "-r", "--distributed", source, self.path("c"),
                                     under=[under] * 3)  # fmt: skip
        while not os.path.exists(self.path("c")):  # the plan is made then
            time.sleep(0.001)
        for path in gone:
            os.unlink(path)
        ended = self.wait_for(processes)
        copied = {name for path in gone for name in [path.replace("/s/", "/c/")] if os.path.exists(name)}
        told = [path for path in gone if f"cannot copy '{path}'" in ended.errors[0]]
        self.assertEqual(len(told) + len(copied), len(gone))
        self.assertEqual(ended.errors[1:], ["", ""])
        self.assertEqual(set(ended.statuses), {1})  # a directory has changed, if nothing else

    def test_without_the_option_the_environment_is_not_read(self) -> None:
        source = self.make("s", {"a": b"a"})
        env = {"RANK": "7", "WORLD_SIZE": "x", "TORCHELASTIC_RUN_ID": "a", "SLURM_STEP_ID": "0"}
        run_tool("fastcp", "-r", source, self.path("c"), env=env, expect=0)
        for tool, words in (("fastcp", ["-r", source, self.path("e")]), ("fastmd5", [source])):
            done = run_tool(tool, "--distributed", *words, env=env, expect=1)
            self.assertRegex(done.stderr, f"^{tool}: torchrun: WORLD_SIZE is 'x': not a number from 0 on\n$")

    def test_usage(self) -> None:
        for tool, words in (
            ("fastcp", ["--distributed=both"]),
            ("fastcp", ["--distributed=node"]),
            ("fastcp", ["--rendezvous", "."]),
            ("fastcp", ["--distributed", "--rank-timeout", "0"]),
            ("fastcp", ["--distributed", "--manifest", "m"]),
            ("fastcp", ["--rank-timeout", "5"]),
            ("fastmd5", ["--distributed=node"]),
            ("fastmd5", ["--distributed", "-c"]),
            ("fastmd5", ["--rendezvous", "."]),
        ):
            with self.subTest(tool, words=words):
                run_tool(tool, *words, "a", "b", expect=2)

    def test_no_launcher_is_one_rank_and_says_so(self) -> None:
        source = self.make("s", {"a": b"a"})
        done = run_tool("fastcp", "-r", "--distributed", source, self.path("c"), expect=0)
        self.assertIn("fastcp: rank 0 of 1 (none): there are no other ranks\n", done.stderr)
        self.assert_same_tree(self.path("c"), source)
        self.assert_nothing_of_ours(self.tmp)

    @slow
    def test_a_rank_that_never_comes(self) -> None:
        # Its number is 2 of 3; the time is that of the code, so it is made short.
        source = self.make("s", {"a": b"a"})
        code = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from mlperf_common.distributed import meeting;"
            "meeting.Files.__init__.__defaults__ = (2.0, 2.0, *meeting.Files.__init__.__defaults__[2:]);"
            "from mlperf_common.fileio import fastcp; sys.exit(fastcp.main(sys.argv[1:]))"
        )
        words = ["-n", "2", "-r", "--distributed", source, self.path("c")]
        processes = [
            support.start(
                [support.sys.executable, "-c", code, support.ROOT, *words],
                env={"RANK": str(rank), "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": f"late-{next(JOBS)}"},
                stderr=subprocess.PIPE,
            )
            for rank in (0, 0)
        ]
        for process in processes:
            _, errors = process.communicate(timeout=30)
            self.assertEqual(process.returncode, 1)
            self.assertIn(b"of 3 ranks these have not come: 1, 2 (do all nodes see this directory?)", errors)
        self.assertFalse(os.path.exists(self.path("c")))


class Killed(Case):
    """A rank that dies, is stopped or ends by a signal: the others end, what has a name is whole, -u completes it."""

    def setUp(self) -> None:
        self.source = self.make("s", tree())
        self.copy = self.make("c", {})

    def start(self) -> List[subprocess.Popen[bytes]]:
        return self.start_ranks(4, "fastcp", "-n", "2", "-rPuT", "--distributed", self.source, self.copy)

    def check(self, ended: Ended, seconds: float) -> None:
        self.assertLess(ended.seconds, seconds)
        for directory, below, names in os.walk(self.copy):
            below[:] = [name for name in below if not name.startswith(".")]
            for name in names:
                path = os.path.join(directory, name)
                if not name.startswith("."):
                    self.assert_same_tree(path, os.path.join(self.source, os.path.relpath(path, self.copy)))

    @slow
    def test_swept_kills(self) -> None:
        chance = random.Random(5)
        for number in range(4):
            victim, delay = number % 4, chance.random() * 1.3
            with self.subTest(victim=victim, delay=delay):
                processes = self.start()
                hello = os.path.join(self.tmp, ".fastcp-*", f"hello.{victim}")
                while not glob.glob(hello) and processes[victim].poll() is None:
                    time.sleep(0.002)  # before that nobody can know of it
                time.sleep(delay)
                processes[victim].kill()
                ended = self.wait_for(processes)
                self.check(ended, 15)
                others = {status for rank, status in enumerate(ended.statuses) if rank != victim}
                self.assertLessEqual(others, {0, 1}, ended)
                self.assertEqual(len(others), 1, ended)
                if ended.statuses[victim] != 0 and others == {1}:
                    self.assertRegex("".join(ended.errors), f"rank {victim} \\(.*\\) has died|do not meet")
        done = run_tool("fastcp", "-rPuT", self.source, self.copy, expect=0)
        self.assert_same_tree(self.copy, self.source)
        self.assertNotIn("temporary files of other runs", done.stderr)
        self.assert_nothing_of_ours(self.copy)

    @slow
    def test_killed_during_the_walk(self) -> None:
        for victim in (1, 0):
            with self.subTest(victim=victim):
                processes = self.start()
                walk = os.path.join(self.tmp, ".fastcp-job-*", "walk/items/0")
                while not glob.glob(walk) and processes[victim].poll() is None:
                    time.sleep(0.001)
                processes[victim].send_signal(signal.SIGSTOP)  # the others cannot end the walk without it
                time.sleep(0.3)
                processes[victim].kill()
                ended = self.wait_for(processes)
                self.check(ended, 15)
                self.assertEqual(os.listdir(self.copy), [])
                self.assertEqual({s for r, s in enumerate(ended.statuses) if r != victim}, {1}, ended)
                self.assertRegex("".join(ended.errors), f"rank {victim} \\(.*\\) has died")

    @slow
    def test_a_signal_to_one_rank_ends_all(self) -> None:
        for victim, number in ((2, signal.SIGTERM), (0, signal.SIGINT)):
            with self.subTest(victim=victim):
                processes = self.start()
                while not os.path.exists(os.path.join(self.copy, "d1")):
                    time.sleep(0.005)
                processes[victim].send_signal(number)
                ended = self.wait_for(processes)
                self.check(ended, 12)
                if ended.statuses[victim] != 0:  # it was in time
                    self.assertEqual(ended.statuses[victim], -number)
                    self.assertEqual({s for r, s in enumerate(ended.statuses) if r != victim}, {1}, ended.errors)
                self.assert_no_leftovers(self.copy)
                support.remove_tree(self.copy)
                os.mkdir(self.copy)

    @slow
    def test_a_killed_worker_fails_its_files_and_no_more(self) -> None:
        processes = self.start()
        while not os.path.exists(os.path.join(self.copy, "d1")):
            time.sleep(0.002)
        with open(f"/proc/{processes[1].pid}/task/{processes[1].pid}/children", encoding="ascii") as file:
            children = file.read().split()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(children[0]), signal.SIGKILL)
        ended = self.wait_for(processes)
        self.check(ended, 60)
        self.assertEqual(len(set(ended.statuses)), 1, ended)
        self.assert_nothing_of_ours(self.copy)


@slow
@needs_root
@needs("nsenter", "unshare")
class Nodes(Case):
    """--distributed=node, and what job says where nodes do not share DEST."""

    def setUp(self) -> None:
        self.source = self.make("s", {"huge": Random(200 * MIB, seed=1), **{
            f"d{i}": {f"f{j}": Random(99 * j, seed=j) for j in range(40)} for i in range(4)}})  # fmt: skip
        self.local = self.make("local", {})
        self.meeting = self.make("meeting", {})
        self.nodes = [self.node(f"node{number}") for number in range(2)]

    def node(self, name: str) -> List[str]:
        """A node with a disk of its own: what goes before a command to run it there."""
        script = 'hostname "$1"; mount -t tmpfs -o size=600M node "$2"; echo; exec sleep 600'
        holder = support.start(
            ["unshare", "-m", "-u", "--propagation", "private", "sh", "-c", script, "sh", name, self.local],
            stdout=subprocess.PIPE,
        )
        self.addCleanup(self._end, holder)
        if holder.stdout is not None:
            holder.stdout.readline()
        return ["nsenter", "-m", "-u", "-t", str(holder.pid), "--"]

    def run_nodes(self, *words: str, mode: str = "node", options: Sequence[str] = ()) -> Ended:
        """Two ranks on each node."""
        under = [self.nodes[rank // 2] for rank in range(4)]
        where = [f"--distributed={mode}", "--rendezvous", self.meeting, *options]
        return self.ranks(4, "fastcp", "-n", "2", "-r", *where, *words, under=under)

    def on(self, node: int, *words: str) -> support.Result:
        return support.run([*self.nodes[node], *words])

    def assert_whole(self) -> None:
        for node in range(2):
            done = self.on(node, "diff", "-r", self.source, os.path.join(self.local, "c"))
            self.assertEqual((done.returncode, done.stdout), (0, ""))
            hidden = self.on(node, "find", self.local, "-name", ".fast*")
            self.assertEqual(hidden.stdout, "")

    def test_each_node_has_a_whole_copy(self) -> None:
        ended = self.run_nodes(self.source, os.path.join(self.local, "c"))
        self.assertEqual(ended.statuses, [0] * 4, ended.errors)
        self.assertIn("each node has a DEST of its own", ended.errors[0])
        self.assertRegex(ended.errors[0], r"\nfastcp: 322 files, 10 directories, ")
        self.assertEqual("".join(ended.errors[1:]), "")
        self.assert_whole()
        self.assertEqual(os.listdir(self.meeting), [])

    def test_what_one_node_has_already_the_other_gets(self) -> None:
        self.on(0, "mkdir", "-p", os.path.join(self.local, "c", "d1"))
        self.on(0, "cp", "-p", self.path("s/d1/f7"), os.path.join(self.local, "c", "d1", "f7"))
        ended = self.run_nodes(f"{self.source}/.", os.path.join(self.local, "c"), options=["-T", "-u"])
        self.assertEqual(ended.statuses, [0] * 4, ended.errors)
        self.assertIn("1 skipped, unverified", ended.errors[0])
        self.assert_whole()

    def test_a_refusal_on_one_node_stops_all(self) -> None:
        for node in (0, 1):
            with self.subTest(node=node):
                self.on(node, "mkdir", "-p", os.path.join(self.local, "c", "d1"))
                self.on(node, "sh", "-c", f"echo mine >{self.local}/c/d1/f7")
                ended = self.run_nodes(f"{self.source}/.", os.path.join(self.local, "c"), options=["-T"])
                self.assertEqual(ended.statuses, [1] * 4, ended.errors)
                self.assertIn(f"node node{node}: cannot create regular file", ended.errors[0])
                self.assertEqual(self.on(1 - node, "ls", "-A", self.local).stdout, "")
                self.assertEqual(self.on(node, "find", self.local, "-type", "f").stdout, f"{self.local}/c/d1/f7\n")
                self.on(node, "rm", "-r", os.path.join(self.local, "c"))

    def test_a_full_disk_on_one_node(self) -> None:
        self.on(1, "mount", "-o", "remount,size=50M", self.local)
        ended = self.run_nodes(self.source, os.path.join(self.local, "c"))
        self.assertEqual(ended.statuses, [1] * 4, ended.errors)
        self.assertIn("node node1: cannot copy", ended.errors[0])
        self.assertIn("No space left on device", ended.errors[0])
        self.assertIn("fastcp: FAILED: ", ended.errors[0])

    def test_job_on_disks_that_are_not_shared(self) -> None:
        ended = self.run_nodes(self.source, os.path.join(self.local, "c"), mode="job")
        self.assertEqual(ended.statuses, [1] * 4, ended.errors)
        self.assertIn("is another directory on node1: --distributed=node makes a copy on each node", ended.errors[0])
        for node in (0, 1):
            self.assertEqual(self.on(node, "ls", "-A", self.local).stdout, "")


class Launched(Case):
    """By real launchers: the same copy, told once."""

    def setUp(self) -> None:
        self.source = self.make("s", {"huge": Random(200 * MIB, seed=1), **{
            f"d{i}": {f"f{j}": Random(99 * j, seed=j) for j in range(40)} for i in range(4)}})  # fmt: skip

    def words(self, name: str, *options: str) -> List[str]:
        return support.command_line("fastcp", "-n", "2", "-r", "--distributed", *options, self.source, self.path(name))

    def check(self, done: support.Result, name: str, who: str) -> None:
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(done.stderr.count("fastcp: "), 2, done)
        self.assertIn(f"fastcp: rank 0 of 4 ({who}): all ranks share one DEST\n", done.stderr)
        self.assertIn("fastcp: 161 files, 5 directories, ", done.stderr)
        self.assert_same_tree(self.path(name), self.source)
        self.assert_nothing_of_ours(self.tmp)

    @slow
    @needs("mpirun.openmpi")
    def test_open_mpi(self) -> None:
        done = support.run([*launchers.mpirun(4), *self.words("c")], timeout=60)
        self.check(done, "c", "openmpi")
        done = support.run([*launchers.mpirun(4), *self.words("c", "-T")], timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn("File exists (-f replaces it)", done.stderr)

    @slow
    @needs("mpiexec.hydra")
    def test_hydra_gives_no_name(self) -> None:
        done = support.run([*launchers.hydra(4), *self.words("c")], timeout=60)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("pmi gives its jobs no name: say --rendezvous DIR, an empty directory that all", done.stderr)
        meeting = self.make("meeting", {})
        done = support.run([*launchers.hydra(4), *self.words("c", "--rendezvous", meeting)], timeout=60)
        self.check(done, "c", "pmi")
        self.assertEqual(os.listdir(meeting), [])

    @slow
    @needs_root
    @needs("slurmctld", "slurmd", "srun", "sbatch", "munged")
    def test_slurm(self) -> None:
        with launchers.slurm(self.path("slurm")) as env:
            self.check(support.run(["srun", "-n4", *self.words("c")], env=env, timeout=60), "c", "slurm")
            node = self.words("n", "--rendezvous", self.tmp)
            node[node.index("--distributed")] = "--distributed=node"
            done = support.run(["srun", "-n4", *node], env=env, timeout=60)
            self.assertEqual(done.returncode, 0, done)
            self.assert_same_tree(self.path("n"), self.source)
            script = self.path("job.sh")
            line = " ".join(self.words("b"))
            with open(script, "w", encoding="utf-8") as file:
                file.write(f"#!/bin/bash\n#SBATCH -n 4\nsrun {line} || exit\n{line.replace(' -r ', ' -ruT ')}\n")
            words = ["sbatch", "--wait", f"--output={self.path('out')}", script]
            self.assertEqual(support.run(words, env=env, cwd=self.tmp, timeout=60).returncode, 0)
            self.assert_same_tree(self.path("b"), self.source)
            with open(self.path("out"), encoding="utf-8") as file:
                text = file.read()
            self.assertIn("rank 0 of 4 (slurm): all ranks share one DEST\n", text)
            self.assertIn("rank 0 of 1 (none): there are no other ranks\n", text)  # the batch script itself

    @slow
    @needs("mpirun.openmpi")
    def test_a_killed_rank_under_open_mpi(self) -> None:
        # mpirun ends the others itself.
        process = support.start([*launchers.mpirun(4), *self.words("c")], stderr=subprocess.PIPE)
        self.addCleanup(self._end, process)
        victims: List[int] = []
        while process.poll() is None and not victims:
            victims = [pid for pid in run_tests.below(process.pid) if b"fastcp" in _arguments(pid)]
            if len(victims) < 4 or not os.path.exists(self.path("c")):
                victims = []
                time.sleep(0.005)
        for pid in victims[1:2]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)
        run_tool("fastcp", "-ruT", self.source, self.path("c"), expect=0)
        self.assert_same_tree(self.path("c"), self.source)


def _arguments(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


class Proving(Case):
    """fastmd5: the same lines as one process."""

    def setUp(self) -> None:
        self.source = self.make("s", {
            **{f"d{i}": {f"f{j}": Random(3000 * j, seed=j) for j in range(40)} for i in range(9)},
            "large": Random(40 * MIB, seed=1), "l": Link("d1"), "empty": {"e": {}, "f": b""}, "odd\udcff\n\t": b"x"})

    def both(self, *words: str, status: int = 0, **options: Any) -> Ended:
        """One process, then three; the same on stdout and in the last line."""
        alone = run_tool("fastmd5", *words, cwd=self.tmp, expect=status, **options)
        ended = self.ranks(3, "fastmd5", "-n", "2", "--distributed", *words, cwd=self.tmp)
        self.assertEqual(ended.statuses, [status] * 3, ended.errors)
        self.assertEqual(ended.outputs, [alone.stdout_bytes, b"", b""])
        counts = [text.splitlines()[-1].split(" in ")[0] for text in (alone.stderr, ended.errors[0])]
        self.assertEqual(counts[0], counts[1])
        self.assertEqual(ended.errors[1:], ["", ""])
        self.assert_nothing_of_ours(self.tmp)
        return ended

    def test_lists(self) -> None:
        lists = (["s"], ["--all", "-P", "s"], ["-z", "s/d1", "s/large", "s"], ["-C", "s", "."], ["--json", "s/large"])
        for words in lists:
            with self.subTest(words=words):
                self.both(*words)

    def test_not_where_they_would_be_found(self) -> None:
        for tool, words in (
            ("fastmd5", ["."]),
            ("fastmd5", ["s", self.tmp]),
            ("fastmd5", ["--rendezvous", "s/d1", "s"]),
            ("fastmd5", ["--compare", ".", "s"]),
            ("fastcp", ["-r", "--rendezvous", "s/empty/e", "s", "c"]),
        ):
            with self.subTest(tool, words=words):
                ended = self.ranks(2, tool, "-q", "-n", "2", "--distributed", *words, cwd=self.tmp)
                self.assertEqual(ended.statuses, [1, 1], ended.errors)
                self.assertIn("or below it: say --rendezvous DIR\n", ended.errors[0])
        self.assertEqual(os.listdir(self.tmp), ["s"])

    def test_what_cannot_be_hashed(self) -> None:
        self.make("t", {"a": b"a", "p": support.Fifo()})
        self.both("s", "t", "missing", status=1)

    @slow
    def test_a_file_of_several_chunks(self) -> None:
        self.make("big", Sparse(3 * GIB + 1, {7: b"x", 2 * GIB: b"y"}))
        self.both("big", "s/d1", timeout=120)

    @slow
    def test_comparisons(self) -> None:
        run_tool("fastcp", "-rP", self.source, self.path("d"), expect=0)
        self.both("--compare", "-P", "s", "d")
        self.both("--compare", "s/large", "d/large")
        with open(self.path("d/large"), "r+b") as file:
            file.seek(20 * MIB)
            file.write(b"changed")
        os.unlink(self.path("d/d3/f3"))
        self.make("d/d4/new", b"")
        with open(self.path("d/d5/f9"), "r+b") as file:
            file.write(b"?")
        os.truncate(self.path("d/d5/f8"), 3)
        self.both("--compare", "-P", "s", "d", status=1)
        self.both("--compare", "--metadata", "-P", "s", "d", status=1)


if __name__ == "__main__":
    support.main()
