# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What killed runs have left: which temporaries a later run removes, which stay and are counted; and small promises."""

# Takes about 5 s
from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any, Dict

import support
from support import Random, TestCase, needs_root, run_tool

from mlperf_common.fileio import leftovers

TOKEN = "0123456789"
TEMPORARY = f".f.{TOKEN}003"
RECORD = f".fastcp-run-{TOKEN}"
DAY = 24 * 60 * 60


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


class Leftovers(TestCase):
    def life(self, **changes: Any) -> Dict[str, Any]:
        """The record of a run that is over, or that of another one."""
        return {**leftovers.own_life()._asdict(), "pid": dead_pid(), "start": 1, **changes}

    def rerun(self, record: Any, age: float = 0, temporary: str = TEMPORARY) -> support.Result:
        """A run into a DEST that has a temporary and (if not None) a record."""
        self.make("s", {"f": b"new", "d": {"g": b"new"}})
        place = self.make("dst", {"f": b"old", temporary: b"part", "d": {temporary: b"part"}})
        if record is not None:
            path = os.path.join(place, RECORD)
            with open(path, "w", encoding="ascii") as file:
                file.write(record if isinstance(record, str) else json.dumps(record))
            os.utime(path, (time.time() - age, time.time() - age))
        return run_tool("fastcp", "-rfT", "s", "dst", cwd=self.tmp, expect=0)

    def test_which_are_removed(self) -> None:
        mine = leftovers.own_life()
        table = [
            ("no record", None, 0, False),
            ("a dead process", self.life(), 0, True),
            ("this process", self.life(pid=mine.pid, start=mine.start), 0, False),
            ("its number again", self.life(pid=mine.pid, start=mine.start + 1), 0, True),
            ("another boot", self.life(boot="another"), 0, False),
            ("another namespace", self.life(namespace="pid:[1]"), 0, False),
            ("another boot, a day ago", self.life(boot="another"), DAY + 100, True),
            ("another boot, almost a day ago", self.life(boot="another"), DAY - 1000, False),
            ("rubbish", "rubbish", 0, False),
            ("empty", "", 0, False),
        ]
        for label, record, age, removed in table:
            with self.subTest(label):
                result = self.rerun(record, age)
                left = [name for name in (TEMPORARY, f"d/{TEMPORARY}") if os.path.exists(self.path("dst", name))]
                self.assertEqual(left, [] if removed else [TEMPORARY, f"d/{TEMPORARY}"])
                self.assertEqual("temporary files of other runs: 2" in result.stderr, not removed)
                self.assertEqual(os.path.exists(self.path("dst", RECORD)), record is not None and not removed)
                names = [name for name in os.listdir(self.path("dst")) if name.startswith(".fastcp-run-")]
                self.assertIn(names, ([], [RECORD]))
                with open(self.path("dst", "f"), "rb") as file:
                    self.assertEqual(file.read(), b"new")
                support.remove_tree(self.path("dst"))
                support.remove_tree(self.path("s"))

    def test_only_what_it_seems(self) -> None:
        self.make("s", {"f": b"new"})
        names = {
            f".link.{TOKEN}001": None,  # a symbolic link
            f".twin.{TOKEN}001": "elsewhere",  # another name that is not its own
            f".f.{TOKEN}001": "f",  # the name that it was to get: link, then killed before unlink
            f".f.{TOKEN}": "not of this kind",
            ".f.0123456789abcdef": "of no run",
        }
        self.make("dst", {"f": b"old", RECORD: json.dumps(self.life()).encode()})
        os.symlink("f", self.path("dst", f".link.{TOKEN}001"))
        self.make("elsewhere", b"two names")
        os.link(self.path("elsewhere"), self.path("dst", f".twin.{TOKEN}001"))
        os.link(self.path("dst", "f"), self.path("dst", f".f.{TOKEN}001"))
        for name in (f".f.{TOKEN}", ".f.0123456789abcdef"):
            self.make(f"dst/{name}", b"somebody's")
        run_tool("fastcp", "-rfT", "s", "dst", cwd=self.tmp, expect=0)
        gone = [name for name in names if not os.path.lexists(self.path("dst", name))]
        self.assertEqual(gone, [f".f.{TOKEN}001"])

    @needs_root
    def test_not_those_of_others(self) -> None:
        self.make("s", {"f": b"new"})
        self.make("dst", {"f": b"old", TEMPORARY: b"part", RECORD: json.dumps(self.life()).encode()})
        os.chown(self.path("dst", TEMPORARY), 1234, 1234)
        run_tool("fastcp", "-rfT", "s", "dst", cwd=self.tmp, expect=0)
        self.assertTrue(os.path.exists(self.path("dst", TEMPORARY)))

    def test_a_run_that_replaces_nothing_makes_no_record(self) -> None:
        self.make("s", {"f": b"new"})
        under = ["strace", "-f", "-qq", "-o", self.path("log"), "-e", "trace=openat"]
        run_tool("fastcp", "-r", "s", "dst", cwd=self.tmp, under=under, expect=0)
        with open(self.path("log"), "rb") as file:
            self.assertNotIn(b".fastcp-run-", file.read())


class Small(TestCase):
    def test_times_that_jump(self) -> None:
        self.make("s", {"f": Random(40 << 20, seed=1)})
        for options, status in ((["--ignore-times"], 0), ([], 1)):
            with open(self.path("errors"), "w+b") as said:
                copy = self.path("c" + "".join(options))
                process = self.start_tool("fastcp", "-r", *options, self.path("s"), copy, stderr=said)
                moment = 1
                while process.poll() is None:
                    moment += 1
                    os.utime(self.path("s", "f"), (moment, moment))
                said.seek(0)
                errors = said.read()
            self.assertEqual(process.returncode, status, errors)
            if status:
                self.assertRegex(errors, rb"its (modification|status change) time has moved")

    @needs_root
    def test_too_little_room_is_a_warning(self) -> None:
        source = self.make("s", {"f": Random(9 << 20, seed=1)})
        with support.mounted("tmpfs", size=4 << 20) as place:
            result = run_tool("fastcp", "-r", source, os.path.join(place, "c"), expect=1)
            self.assertRegex(result.stderr, "warning: the files take 9.0 MiB, 4.0 MiB are free at the destination")
            result = run_tool("fastcp", "-r", self.make("t", {"f": b"1"}), os.path.join(place, "d"), expect=0)
            self.assertNotIn("warning", result.stderr)


if __name__ == "__main__":
    support.main()
