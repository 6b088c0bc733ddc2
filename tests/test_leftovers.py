# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What killed runs have left: which temporaries a later run removes, which stay and are counted; and small promises."""

# Takes about 12 s
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from typing import Any, Dict, List
from unittest import mock

import support
from keeping import run_fastcp, shell
from support import Random, TestCase, needs, needs_root, run_tool, slow

from mlperf_common.fileio import leftovers

TOKEN = "0123456789"
TEMPORARY = f".f.{TOKEN}003"
RECORD = f".fastcp-run-{TOKEN}"
DAY = 24 * 60 * 60
MIB = 1 << 20


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
        done = run_fastcp("-rfT", "s", "dst", cwd=self.tmp)
        self.assertEqual(done.returncode, 0, done)
        return done

    def test_which_are_removed(self) -> None:
        mine = leftovers.own_life()
        zombie = subprocess.Popen(["sleep", "99"])
        begun = leftovers.start_of(zombie.pid)
        zombie.kill()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        self.addCleanup(zombie.wait)
        table = [
            ("a zombie", self.life(pid=zombie.pid, start=begun), 0, True),
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

    @slow
    @needs("strace")
    def test_which_runs_make_a_record_and_where(self) -> None:
        """Those that may need named temporaries; in DEST, also where DEST is made by the run."""
        self.make("s", {"f": b"new"})
        self.make("dst", {"f": b"old"})
        log = self.path("log")
        rows = (("-r s new", None), ("-rf s new2", "new2"), ("-rfT s dst", "dst"), ("-f s/f dst/f", "dst"))
        for words, place in rows:
            with self.subTest(words=words):
                under = ["strace", "-f", "-y", "-qq", "-o", log, "-e", "trace=linkat"]
                run_tool("fastcp", "-n1", *words.split(), cwd=self.tmp, under=under, expect=0)
                with open(log, encoding="utf-8", errors="surrogateescape") as file:
                    made = re.findall(r"linkat\(.*, \d+<([^>]*)>, \"\.fastcp-run-", file.read())
                self.assertEqual(made, [self.path(place)] if place else [])

    def test_a_live_process_is_alive_however_old_its_record(self) -> None:
        """One that was stopped for a day goes on with what it has."""
        mine = leftovers.own_life()
        self.rerun(self.life(pid=mine.pid, start=mine.start), 3 * DAY)
        self.assertTrue(os.path.exists(self.path("dst", TEMPORARY)))

    def test_records_that_are_not_what_they_seem(self) -> None:
        """A link, a FIFO, a directory, another user's: they prove nothing."""
        text = json.dumps(self.life())
        scripts = {
            "a link": "echo '%s' >../record; ln -s ../record RECORD",
            "a FIFO": "mkfifo RECORD",
            "a directory": "mkdir RECORD",
            "too long": "(echo '%s'; head -c 5000 /dev/zero) >RECORD",
            "not an object": "echo '[1, 2]' >RECORD",
            "other fields": "echo '{\"pid\": 1}' >RECORD",
            "very deep": "printf '[%.0s' {1..4000} >RECORD",
            "a word for a number": "echo '%s' | sed 's/\"pid\": [0-9]*/\"pid\": \"x\"/' >RECORD",
            "no boot": "echo '%s' | sed 's/\"boot\": \"[^\"]*\"/\"boot\": \"\"/' >RECORD",
        }
        if os.geteuid() == 0:
            scripts["another user's"] = "echo '%s' >RECORD; chown nobody RECORD"
        for label, script in scripts.items():
            with self.subTest(label):
                self.make("s", {"f": b"new"})
                self.make("dst", {"f": b"old", TEMPORARY: b"part"})
                shell(script.replace("%s", text).replace("RECORD", RECORD), self.path("dst"))
                done = run_fastcp("-rfT", "s", "dst", cwd=self.tmp)
                self.assertEqual(done.returncode, 0, done)
                self.assertTrue(os.path.exists(self.path("dst", TEMPORARY)))
                self.assertTrue(os.path.lexists(self.path("dst", RECORD)))
                self.assertIn("temporary files of other runs: 1", done.stderr)
                support.remove_tree(self.path("dst"))
                support.remove_tree(self.path("s"))

    def test_where_records_are(self) -> None:
        """At DEST's top; for a DEST that is a file, in its directory. Elsewhere they count for nothing."""
        record = json.dumps(self.life()).encode()
        for words, place, counts in (
            ("-f f dst/f", "dst", True),
            ("-rf s dst", "dst", True),
            ("-rfT s/. dst/s", "dst/s", True),
            ("-rfT s dst/s", "dst/s", True),
            ("-rf s dst", "dst/s", False),
            ("-rfT s/. dst/s", "dst", False),
        ):
            with self.subTest(words=words, place=place):
                self.make("t", {"f": b"new", "s": {"f": b"new"}, "dst": {"f": b"old", "s": {"f": b"old"}}})
                target = "dst" if words.startswith("-f ") else "dst/s"
                self.make(f"t/{target}/{TEMPORARY}", b"part")
                self.make(f"t/{place}/{RECORD}", record)
                done = run_fastcp(*words.split(), cwd=self.path("t"))
                self.assertEqual(done.returncode, 0, done)
                self.assertEqual(os.path.exists(self.path("t", target, TEMPORARY)), not counts)
                self.assertEqual(os.path.exists(self.path("t", place, RECORD)), not counts)
                support.remove_tree(self.path("t"))

    def test_directories_that_a_run_does_not_write_to_are_let_be(self) -> None:
        self.make("s", {"d": {"f": b"new"}})
        self.make("dst", {"d": {"f": b"old", TEMPORARY: b"1"}, "e": {TEMPORARY: b"1"}, RECORD: b""})
        with open(self.path("dst", RECORD), "w", encoding="ascii") as file:
            json.dump(self.life(), file)
        self.assertEqual(run_fastcp("-rfT", "s", "dst", cwd=self.tmp).returncode, 0)
        self.assert_same_tree(self.path("dst"), {"d": {"f": b"new"}, "e": {TEMPORARY: b"1"}})

    def test_a_record_is_kept_young(self) -> None:
        place = os.open(self.make("dst", {}), os.O_RDONLY)
        self.addCleanup(os.close, place)
        record = leftovers.Record(place, TOKEN)
        path = self.path("dst", RECORD)
        os.utime(path, (1, 1))
        record.touch()
        self.assertEqual(os.stat(path).st_mtime, 1)
        with mock.patch.object(leftovers, "TOUCH_SECONDS", 0):
            record.touch()
        self.assertGreater(os.stat(path).st_mtime, time.time() - 100)
        os.unlink(path)
        with mock.patch.object(leftovers, "TOUCH_SECONDS", 0):
            record.touch()  # somebody has removed it: no error, and it does not come back
        record.remove()
        self.assertEqual(os.listdir(place), [])


@slow
class Killed(TestCase):
    """Runs that replace files, really killed, stopped, or alive while another one copies to the same place."""

    def setUp(self) -> None:
        names = [f"f{n}" for n in range(6)]
        self.make("s", {"d": {name: Random(8 * MIB, seed=n) for n, name in enumerate(names)}, "big": Random(65 * MIB)})
        self.old = {"d": dict.fromkeys(names, b"old"), "big": b"old"}

    def begin(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """A run that has begun to replace."""
        if not os.path.isdir(self.path(name)):
            self.make(name, self.old)
        words = ("-rfT", "-n3", *options, "s", name)
        process = self.start_tool("fastcp", *words, cwd=self.tmp, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while len(self.traces(name)) < 3:
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll())
        return process

    def traces(self, name: str) -> List[str]:
        """Temporaries and records."""
        return [entry for place in ("", "d") for entry in os.listdir(self.path(name, place)) if entry.startswith(".")]

    def assert_old_or_new(self, name: str) -> None:
        """Every file is what it was, or its source."""
        for place, _, files in os.walk(self.path(name)):
            for file in files:
                if not file.startswith("."):
                    path = os.path.join(place, file)
                    source = os.path.join(self.path("s"), os.path.relpath(path, self.path(name)))
                    found = support.read_tree(path)
                    self.assertIn(found, (b"old", support.read_tree(source)))

    def test_the_next_run_removes_exactly_what_is_left(self) -> None:
        process = self.begin("dst")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        left = self.traces("dst")
        self.assertGreater(len(left), 1)
        self.assertEqual(sum(name.startswith(".fastcp-run-") for name in left), 1)
        self.assert_old_or_new("dst")
        others = {TEMPORARY: b"of a run without a record", ".f1.swp": b"an editor's"}
        self.make("dst/d", others)
        done = run_tool("fastcp", "-rfT", "s", "dst", cwd=self.tmp, expect=0)
        self.assertIn("temporary files of other runs: 1", done.stderr)
        self.assertEqual(sorted(self.traces("dst")), sorted(others))
        for name in others:
            os.unlink(self.path("dst", "d", name))
        self.assert_same_tree(self.path("dst"), self.path("s"))

    def test_a_run_that_is_alive_loses_nothing(self) -> None:
        process = self.begin("dst")
        os.killpg(process.pid, signal.SIGSTOP)
        its_own = self.traces("dst")
        done = run_tool("fastcp", "-rfT", "s", "dst", cwd=self.tmp, expect=0)
        temporaries = [name for name in its_own if not name.startswith(".fastcp-run-")]
        self.assertIn(f"temporary files of other runs: {len(temporaries)}", done.stderr)
        self.assertEqual(sorted(self.traces("dst")), sorted(its_own))
        os.killpg(process.pid, signal.SIGCONT)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 0, said)
        self.assertEqual(self.traces("dst"), [])
        self.assert_same_tree(self.path("dst"), self.path("s"))

    def test_a_run_that_is_ended_leaves_nothing(self) -> None:
        process = self.begin("dst")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, -signal.SIGTERM, said)
        self.assertEqual(self.traces("dst"), [])
        self.assert_old_or_new("dst")


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
            small = self.make("t", {"f": Random(3 << 20, seed=2)})
            for options in ("-rT", "-ruT"):  # what is there takes no room again
                result = run_tool("fastcp", options, small, os.path.join(place, "d"), expect=0)
                self.assertNotIn("warning", result.stderr)


if __name__ == "__main__":
    support.main()
