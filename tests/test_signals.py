# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Signals at swept times: how fastcp ends, and what it leaves: whole files or nothing, and no process."""

# Takes about 25 s
from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any, List, Tuple

import support
from support import Random, TestCase, needs_root, slow

MIB = 1 << 20
SWEEP = 7  # moments
TREE = {
    "large": Random(66 * MIB, seed=1),
    "medium": Random(3 * MIB, seed=2),
    **{f"d{i}": {f"f{j:02}": Random(1 + 3001 * j, seed=j) for j in range(25)} for i in range(6)},
}
OLD = b"old"


def whole_or_absent(source: str, destination: str, old: bool) -> List[str]:
    """The files of DEST that are neither their source nor (where there were any) what stood there before."""
    wrong = []
    for directory, _, names in os.walk(destination):
        for name in names:
            if name.startswith("."):
                continue  # what is left behind is looked at apart
            path = os.path.join(directory, name)
            other = os.path.join(source, os.path.relpath(path, destination))
            with open(path, "rb") as file, open(other, "rb") as right:
                data = file.read()
                if data != right.read() and not (old and data == OLD):
                    wrong.append(path)
    return wrong


def workers_of(pid: int) -> List[int]:
    """The children of a process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


class Swept(TestCase):
    def setUp(self) -> None:
        self.source = self.make("source", TREE)
        started = time.monotonic()
        support.run_tool("fastcp", "-r", self.source, self.path("whole"), expect=0)
        self.duration = time.monotonic() - started

    def sweep(self, signum: int, *options: str, old: bool = False) -> List[Tuple[int, str]]:
        """Send the signal at several moments of a copy; exit statuses and what was said."""
        ends = []
        for step in range(SWEEP):
            destination = self.path(f"d{signum}{step}{len(options)}")
            if old:
                self.make(os.path.basename(destination), self.old_tree())
            process = self.start_tool(
                "fastcp", *options, self.source, destination, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            # Python itself ends with status 1 where SIGINT comes before it has begun: with workers it has.
            deadline = time.monotonic() + 10
            while not workers_of(process.pid) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(self.duration * step / SWEEP)
            children = workers_of(process.pid)
            process.send_signal(signum)
            sent = time.monotonic()
            _, errors = process.communicate(timeout=30)
            with self.subTest(signum=signum, step=step, options=options):
                self.assertLess(time.monotonic() - sent, 5)
                self.assertEqual(whole_or_absent(self.source, destination, old), [])
                self.assertEqual([pid for pid in children if self.survives(pid)], [])
                self.check(process.returncode, signum, os.fsdecode(errors), destination, old)
            ends.append((process.returncode, os.fsdecode(errors)))
        self.assertIn(-signum, [status for status, _ in ends])  # else the sweep proves nothing
        return ends

    def old_tree(self) -> Any:
        """Something else under every name."""
        return {name: dict.fromkeys(value, OLD) if isinstance(value, dict) else OLD for name, value in TREE.items()}

    def survives(self, pid: int) -> bool:
        deadline = time.monotonic() + 5
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        return is_alive(pid)

    def check(self, status: int, signum: int, errors: str, destination: str, old: bool) -> None:
        self.assertIn(status, (0, -signum))
        if status == 0:
            self.assertEqual(support.differences(support.read_tree(self.source), support.read_tree(destination)), [])
        if signum != signal.SIGKILL or not old:
            if os.path.isdir(destination):
                self.assert_no_leftovers(destination)
        if signum != signal.SIGKILL and status:
            # Nothing at all where it came before main() had a handler.
            self.assertRegex(errors, r"\A(fastcp: (stopped by SIG[A-Z]+; what is there so far is whole|.* io=.*)\n)?\Z")

    def test_sigterm(self) -> None:
        self.sweep(signal.SIGTERM, "-r")

    @slow
    def test_sigint(self) -> None:
        self.sweep(signal.SIGINT, "-r")

    @slow
    def test_sighup_while_files_are_replaced(self) -> None:
        self.sweep(signal.SIGHUP, "-rfT", old=True)

    @slow
    def test_sigkill_leaves_nothing_where_nothing_is_replaced(self) -> None:
        self.sweep(signal.SIGKILL, "-r")

    @slow
    def test_sigkill_while_files_are_replaced(self) -> None:
        self.sweep(signal.SIGKILL, "-rfT", old=True)
        # A later run of the same destination removes what the killed ones have left, and their records.
        for step in range(SWEEP):
            destination = self.path(f"d{int(signal.SIGKILL)}{step}1")
            support.run_tool("fastcp", "-rfT", self.source, destination, expect=0)
            self.assert_no_leftovers(destination)
            self.assertEqual([name for name in os.listdir(destination) if name.startswith(".fastcp")], [])


class Others(TestCase):
    def start(self, *options: str, **popen: Any) -> Any:
        source = self.make("source", {f"f{i}": Random(100 * MIB, seed=i) for i in range(2)})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        process = self.start_tool("fastcp", "-r", *options, source, self.path("copy"), **pipes)
        deadline = time.monotonic() + 10
        while not os.path.isdir(self.path("copy")) and time.monotonic() < deadline:
            time.sleep(0.002)
        return process

    def test_a_second_signal_does_not_wait(self) -> None:
        process = self.start()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        self.assertIn(process.returncode, (-signal.SIGTERM, -signal.SIGINT))
        self.assertEqual(os.listdir(self.path("copy")), [])

    def test_what_was_ignored_stays_ignored(self) -> None:
        source = self.make("source", {"f": Random(60 * MIB, seed=1)})
        tool = support.command_line("fastcp", "-r", source, self.path("copy"))
        process = support.start(["nohup", *tool], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not os.path.isdir(self.path("copy")):
            time.sleep(0.002)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0)
        self.assert_same_tree(self.path("copy"), source)

    def test_a_shell_sees_the_signal_and_ends_its_loop(self) -> None:
        source = self.make("source", {f"f{i}": Random(60 * MIB, seed=i) for i in range(2)})
        tool = " ".join(support.command_line("fastcp", "-r", source))
        script = f"for i in 1 2 3; do {tool} {self.path('copy')}$i; echo ended $?; done"
        process = support.start(["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not os.path.isdir(self.path("copy1")):
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        self.assertEqual((process.returncode, out), (-signal.SIGINT, b""))

    @slow
    @needs_root
    def test_no_workers_outlive_a_killed_parent(self) -> None:
        process = self.start()
        children = workers_of(process.pid)
        self.assertTrue(children)
        process.kill()
        process.communicate(timeout=10)
        deadline = time.monotonic() + 5
        while any(is_alive(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual([pid for pid in children if is_alive(pid)], [])
        self.assertEqual(os.listdir(self.path("copy")), [])

    def test_a_killed_worker_is_told_and_the_others_go_on(self) -> None:
        source = self.make("source", {f"d{i}": {f"f{j}": Random(MIB, seed=j) for j in range(20)} for i in range(12)})
        process = self.start_tool("fastcp", "-r", source, self.path("copy"), stderr=subprocess.PIPE)
        children: List[int] = []
        while not os.path.exists(self.path("copy", "d0", "f0")) and process.poll() is None:
            children = workers_of(process.pid)
        os.kill(children[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        text = os.fsdecode(errors)
        found = sum(len(names) for _, _, names in os.walk(self.path("copy")))
        self.assertEqual(whole_or_absent(source, self.path("copy"), False), [])
        # What it had in hand is named whole, also what it had finished of that.
        self.assertGreaterEqual(text.count("cannot copy"), 240 - found)
        self.assertEqual(process.returncode, 1 if "cannot copy" in text else 0)
        self.assertIn("killed by SIGKILL" if process.returncode else "240 files", text)
        self.assert_no_leftovers(self.path("copy"))


if __name__ == "__main__":
    support.main()
