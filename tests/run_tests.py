# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Run the test files, each in an interpreter of its own, several at a time, and count.

Promised: the last line is `N passed, N failed, N skipped` alone and the exit status is 1 if anything failed;
a file that crashes, hangs or holds no test counts as one failure; what a file leaves in its process group or
under its TMPDIR does not outlive it. Not promised: an order; but files that say `# Takes about N s` start
first, the longest before.
"""

from __future__ import annotations

import argparse
import collections
import glob
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Sequence

import support

TESTS = os.path.dirname(os.path.abspath(__file__))
# The file is imported by name, so that it is counted whatever its own last lines call.
STUB = "import sys; sys.path[:0] = sys.argv[1:3]; import support; support.main(sys.argv.pop(), sys.argv[:1])"


def main(argv: Sequence[str]) -> int:
    """Run what the arguments ask for and return the exit status."""
    options = parse(argv)
    names = options.files or sorted(glob.glob(os.path.join(TESTS, "test_*.py")))
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.fast:
        os.environ["FILEIO_FAST"] = "1"
    scratch = support.make_temporary()
    try:
        outcomes = run_all(sorted(names, key=expected_seconds, reverse=True), options, scratch)
    finally:
        support.remove_tree(scratch)
    return summarise(outcomes)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run the tests. REQUIRE_ALL=1 turns skips into failures.")
    parser.add_argument("files", nargs="*", metavar="FILE", type=test_file, help="test files (default: all)")
    parser.add_argument(
        "-j",
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)) + 2,  # much of a test is waiting
        metavar="N",
        help="files at a time (default: the number of CPUs)",
    )
    parser.add_argument("--fast", action="store_true", help="leave out the tests that are marked slow")
    parser.add_argument(
        "--timeout",
        type=float,
        default=400,
        metavar="SECONDS",
        help="for one file, after which it is killed and has failed (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error("-j takes a number from 1 on")
    return options


def test_file(name: str) -> str:
    """The path of a test file given by path, or by name with or without test_ and .py."""
    stem = re.sub(r"^test_|\.py$", "", os.path.basename(name))
    for path in (name, os.path.join(TESTS, f"test_{stem}.py")):
        if os.path.isfile(path) and os.path.basename(path).startswith("test_"):
            return os.path.abspath(path)
    raise argparse.ArgumentTypeError(f"there is no test file {name}")


def expected_seconds(path: str) -> int:
    """What the file says of itself in a line `# Takes about N s`."""
    with open(path, encoding="utf-8") as stream:
        match = re.search(r"^# Takes about (\d+) s\b", stream.read(), re.MULTILINE)
    return int(match.group(1)) if match else 0


def run_all(paths: Sequence[str], options: argparse.Namespace, scratch: str) -> List[Dict[str, Any]]:
    """Run the files, options.jobs at a time; print a line for each when it ends; return all counts."""
    waiting = list(paths)
    running: List[Job] = []
    outcomes: List[Dict[str, Any]] = []
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(Job(waiting.pop(0), options.timeout, scratch))
            time.sleep(0.02)
            for job in [job for job in running if job.ended()]:
                running.remove(job)
                outcomes.append(job.outcome())
                show(outcomes[-1])
    finally:
        for job in running:
            job.kill()
    return outcomes


class Job:
    """One test file in its own interpreter and session, with a TMPDIR and a log of its own."""

    def __init__(self, path: str, timeout: float, scratch: str) -> None:
        self.name = os.path.basename(path)
        self.scratch = tempfile.mkdtemp(prefix=self.name + "-", dir=scratch)
        os.chmod(self.scratch, 0o755)  # tests run tools as nobody from below it
        self.log = os.path.join(scratch, os.path.basename(self.scratch) + ".log")
        self.report = self.log + ".json"
        self.started = time.monotonic()
        self.timeout = timeout
        self.timed_out = False
        argv = [
            sys.executable,
            "-X",
            "faulthandler",
            "-c",
            STUB,
            os.path.dirname(path),
            TESTS,
            os.path.splitext(self.name)[0],
        ]
        environment = {
            **os.environ,
            "TMPDIR": self.scratch,
            "FILEIO_TEST_REPORT": self.report,
            # Hundreds of runs of a tool, and compiling takes 0.15 s of each; the checkout stays clean.
            "PYTHONPYCACHEPREFIX": os.path.join(scratch, "bytecode"),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.scratch,
                start_new_session=True,
                env=environment,
            )

    def ended(self) -> bool:
        """Whether the file is through; one that is over its time is killed."""
        # WNOWAIT: the number stays its own until the group is gone too.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        elif time.monotonic() > self.started + self.timeout:
            self.timed_out = True
            self.kill()
        return self.process.returncode is not None

    def kill(self) -> None:
        """End the file and all that it started; faulthandler writes into the log where it was."""
        descendants = below(self.process.pid)
        os.kill(self.process.pid, signal.SIGABRT)
        deadline = time.monotonic() + 5
        while not os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in descendants:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself, or with its parent

    def outcome(self) -> Dict[str, Any]:
        """The file's counts, a crash or a time-out among the failures, and its output."""
        support.remove_tree(self.scratch)
        counts: Dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "deselected": 0, "reasons": []}
        if os.path.exists(self.report):
            with open(self.report, encoding="utf-8") as stream:
                counts = json.load(stream)
        with open(self.log, "rb") as log:
            output = log.read().decode("utf-8", "backslashreplace")
        verdict = self.verdict(counts)
        if verdict:
            counts["failed"] += 1
            output += f"{verdict}\n"
        return {**counts, "name": self.name, "seconds": time.monotonic() - self.started, "output": output}

    def verdict(self, counts: Dict[str, Any]) -> str:
        """What is wrong with the file beside the tests that failed, or nothing."""
        if self.timed_out:
            return f"killed after {self.timeout:g} s"
        if not any(counts[kind] for kind in ("passed", "failed", "skipped", "deselected")):
            return f"no test ran, exit status {self.process.returncode}"
        if self.process.returncode != 0 and not counts["failed"]:
            return f"exit status {self.process.returncode}, though no test failed"
        return ""


def below(pid: int) -> List[int]:
    """The processes that pid started, and those that these started, whatever their session."""
    children = collections.defaultdict(list)
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path, "rb") as stream:
                fields = stream.read().rsplit(b")", 1)[1].split()
        except OSError:
            continue  # it ended between the listing and the look
        children[int(fields[1])].append(int(path.split("/")[2]))
    found = list(children[pid])
    for child in found:
        found += children[child]
    return found


def show(outcome: Dict[str, Any]) -> None:
    """One line for a file, and all that it printed if it failed."""
    left_out = f", {outcome['deselected']} left out" if outcome["deselected"] else ""
    print(
        f"{outcome['name']:<24} {outcome['passed']:>4} passed, {outcome['failed']} failed, "
        f"{outcome['skipped']} skipped{left_out}, {outcome['seconds']:.1f} s",
        flush=True,
    )
    if outcome["failed"]:
        print(outcome["output"].rstrip("\n"), flush=True)


def summarise(outcomes: Sequence[Dict[str, Any]]) -> int:
    """The reasons of the skips and the line that closes; the exit status."""
    reasons = collections.Counter(reason for outcome in outcomes for reason in outcome["reasons"])
    for reason, count in sorted(reasons.items()):
        print(f"skipped {count}: {reason}")
    total = {kind: sum(outcome[kind] for outcome in outcomes) for kind in ("passed", "failed", "skipped")}
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if total["failed"] or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
