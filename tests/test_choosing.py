# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a tree, and how a copy ended, for programs: --exclude, --files-from, --failed-list, --json."""

# Takes about 20 s
from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from typing import Any, Dict, List

import support
from support import Fifo, Link, Random, TestCase, needs, needs_nobody, needs_root, run, run_tool, slow

from mlperf_common.fileio import choosing, copyplan

MIB = 1 << 20

NAMES = ["a", "b", "ab", "a.c", "x.o", "[", "A", "a-b", "a*", "\\", "]", "foo", "bar", "1", " ", "\udcff", "é"]


def random_tree(dice: random.Random, depth: int = 3) -> Dict[str, Any]:
    names = dice.sample(NAMES, dice.randint(2, 6))
    return {name: random_tree(dice, depth - 1) if depth and dice.random() < 0.5 else b"" for name in names}


def random_pattern(dice: random.Random) -> str:
    pieces = [
        *("a", "b", "*", "**", "***", "?", "/", "/", "foo", "[ab]", "[!a]", "[a-c]", "[]a]", "[[:alpha:]]", "[a"),
        *("\\*", "\\[", "\\", ".", "x.o", "[^/]", "[[:digit:]b]", "[\\]]", "é", "\udcff", "[b-]", "[c-a]"),
    ]
    return "".join(dice.choice(pieces) for _ in range(dice.randint(1, 4)))


PATTERNS = [
    *("*", "**", "/a", "a/", "a/b", "/a/**", "**/a", "/**/a", "*.o", "a/***", "/a/***", "*/b", "/*/b", "a/**/b"),
    *("[", "a*"),
    *("\\a", "a\\*", "?", "*/", "/*/", "**/", "***", "[!a]*", "foo/bar", "**a", "a**", "/a/*", "//a"),
]


class Exclude(TestCase):
    def by_rsync(self, source: str, patterns: List[str]) -> List[str]:
        words = ["rsync", "-rn", "-8", "--out-format=%n", *(f"--exclude={p}" for p in patterns)]
        shown = run([*words, source + "/", "/nowhere"], expect=0).stdout_bytes.split(b"\n")
        return sorted(os.fsdecode(_unescaped(line)).rstrip("/") for line in shown if line and line != b"./")

    def by_us(self, source: str, patterns: List[str]) -> List[str]:
        choice = choosing.Choice([choosing.Exclusion(pattern) for pattern in patterns], None)
        plan = copyplan.plan_copy_operations([source], self.path("nowhere"), choice=choice)
        start = len(self.path("nowhere")) + 1
        return sorted(path[start:] for path in [*plan.directories, *(f[1] for f in plan.files)] if path[start:])

    @slow
    @needs("rsync")
    def test_as_rsync_does(self) -> None:
        for seed in range(6):
            dice = random.Random(seed)
            source = self.make(f"s{seed}", random_tree(dice))
            single = PATTERNS if seed == 0 else []
            chosen = [[pattern] for pattern in single]
            chosen += [[random_pattern(dice) for _ in range(dice.randint(1, 2))] for _ in range(40)]
            for patterns in chosen:
                if not all(pattern.strip("/") for pattern in patterns):
                    continue
                with self.subTest(seed=seed, patterns=patterns):
                    ours, theirs = set(self.by_us(source, patterns)), set(self.by_rsync(source, patterns))
                    self.assertEqual((sorted(ours - theirs)[:3], sorted(theirs - ours)[:3]), ([], []))

    def test_what_is_excluded_is_not_refused(self) -> None:
        self.make("s", {"keep": b"1", "pipe": Fifo(), "gone": Link("nowhere"), "d": {"loop": Link("."), "f.tmp": b""}})
        for patterns in (["pipe", "gone", "d"], ["/pipe", "go*", "loop", "*.tmp"]):
            copy = self.path("c%d" % len(patterns))
            run_tool("fastcp", "-r", *(f"--exclude={p}" for p in patterns), "s", copy, cwd=self.tmp, expect=0)
            self.assertEqual(sorted(os.listdir(copy)), ["keep"] if "d" in patterns else ["d", "keep"])
        run_tool("fastcp", "-r", "--exclude=pipe", "s", "c", cwd=self.tmp, expect=1)

    def test_hard_links_and_second_runs(self) -> None:
        self.make("s", {"a": b"1", "b": b"22", "z": {"c": b"333"}})
        os.link(self.path("s", "a"), self.path("s", "m"))
        os.link(self.path("s", "a"), self.path("s", "z", "n"))
        words = ["fastcp", "-a", "--exclude=/a", "--exclude=b"]
        run_tool(*words, "s", "d", cwd=self.tmp, expect=0)
        self.assertTrue(os.path.samefile(self.path("d", "m"), self.path("d", "z", "n")))
        self.assertEqual(sorted(os.listdir(self.path("d"))), ["m", "z"])
        run_tool(*words, "-u", "s", "-T", "d", cwd=self.tmp, expect=0)
        for pattern in ("", "/", "//"):
            run_tool("fastcp", "-r", "--exclude", pattern, "s", "e", cwd=self.tmp, expect=2)


def _unescaped(line: bytes) -> bytes:
    """rsync shows a backslash that octal digits follow, and what is not printable, as \\#ooo."""
    found, at = b"", 0
    while at < len(line):
        if line[at : at + 2] == b"\\#" and line[at + 2 : at + 5].isdigit():
            found += bytes([int(line[at + 2 : at + 5], 8)])
            at += 5
        else:
            found += line[at : at + 1]
            at += 1
    return found


class FilesFrom(TestCase):
    def copy(self, data: bytes, *options: str, expect: int = 0, copy: str = "d") -> Any:
        with open(self.path("list"), "wb") as stream:
            stream.write(data)
        words = ["fastcp", "-r", "--files-from", "list", *options, "s", copy]
        return run_tool(*words, cwd=self.tmp, expect=expect)

    def test_each_goes_where_the_whole_copy_has_it(self) -> None:
        tree = {"a": b"1", "b": b"2", "d": {"x": b"3", "e": {"y": b"4", "z": b"5"}}, "n\n": b"6", "o": {"p": b"7"}}
        self.make("s", tree)
        os.chmod(self.path("s", "d"), 0o750)
        self.copy(b"a\0./d//e/y\0n\n\0o/\0a\0\0", "-0")
        wanted = {"a": b"1", "d": {"e": {"y": b"4"}}, "n\n": b"6", "o": {"p": b"7"}}
        self.assert_same_tree(self.path("d"), self.make("w", wanted))
        self.assertEqual(os.stat(self.path("d", "d")).st_mode & 0o777, 0o750)
        self.copy(b"d/e\nb\nd/e/y", copy="l")
        self.assert_same_tree(self.path("l"), self.make("v", {"b": b"2", "d": {"e": {"y": b"4", "z": b"5"}}}))
        self.copy(b".\n", copy="all")
        self.assert_same_tree(self.path("all"), self.path("s"))
        self.copy(b"", copy="none")
        self.assertEqual(os.listdir(self.path("none")), [])

    def test_from_stdin(self) -> None:
        self.make("s", {"a": b"1", "b": b"2"})
        with open(self.path("list"), "wb") as stream:
            stream.write(b"b\0")
        with open(self.path("list"), "rb") as stream:
            run_tool("fastcp", "-r", "--files-from=-", "-0", "s", "d", cwd=self.tmp, stdin=stream, expect=0)
        self.assertEqual(os.listdir(self.path("d")), ["b"])

    def test_what_is_not_there_is_an_error_and_the_others_are_copied(self) -> None:
        self.make("s", {"a": b"1", "d": {"x": b"2"}})
        result = self.copy(b"a\nno\nd/no\na/below\nno/d/e\nd/x\n", expect=1)
        for name in ("no", "d/no", "a/below", "no/d/e"):
            self.assertIn("cannot copy 's/%s' to" % name, result.stderr)
        self.assertIn("FAILED: 4 of 6 files not copied", result.stderr)
        self.assert_same_tree(self.path("d", "d"), self.path("s", "d"))

    def test_names_that_lead_elsewhere(self) -> None:
        self.make("s", {"a": b"1", "d": {}})
        self.make("other", b"x")
        for name in ("../other", "d/../a", "/etc/passwd", ".."):
            result = self.copy(os.fsencode(name) + b"\na\n", expect=1, copy="d" + name.replace("/", "_"))
            self.assertIn("is not a name below SOURCE", result.stderr)
        self.assertEqual(sorted(os.listdir(self.tmp)), ["list", "other", "s"])

    def test_how_it_is_called(self) -> None:
        self.make("s", {"a": b"1"})
        self.make("f", b"1")
        for words, status in (
            (["--files-from", "f", "s", "d"], 2), (["-r", "-0", "s", "d"], 2),
            (["-r", "--files-from", "f", "s", "s", "s"], 2), (["-r", "--files-from", "f", "f", "d"], 1),
            (["-r", "--files-from", "none", "s", "d"], 1),
            (["-r", "--json", "-N", "s", "d"], 2), (["-r", "--failed-list", "x", "s", "f", "d"], 2),
        ):  # fmt: skip
            with self.subTest(words=words):
                run_tool("fastcp", *words, cwd=self.tmp, expect=status)
                self.assertFalse(os.path.exists(self.path("d")))


class Outcome(TestCase):
    def json(self, *words: str, expect: int = 0, **options: Any) -> Dict[str, Any]:
        result = run_tool("fastcp", "--json", *words, cwd=self.tmp, expect=expect, **options)
        self.assertEqual(result.stdout.count("\n"), 1)
        found: Dict[str, Any] = json.loads(result.stdout_bytes.decode("ascii"))
        self.assertEqual((found["status"], found["complete"]), (expect, expect == 0))
        return found

    def names(self, name: str = "list") -> List[str]:
        with open(self.path(name), "rb") as stream:
            data = stream.read()
        self.assertTrue(not data or data.endswith(b"\0"))
        return [os.fsdecode(part) for part in data.split(b"\0")[:-1]]

    def test_a_copy_that_is_complete(self) -> None:
        self.make("s", {"a": b"12", "d": {"b\udcff": b"345"}, "l": Link("a")})
        found = self.json("-r", "--failed-list", "list", "-P", "s", "d")
        wanted = {"files": 2, "links": 1, "directories": 2, "bytes": 5, "failed": 0, "errors": [], "sources": ["s"]}
        self.assertEqual({name: found[name] for name in wanted}, wanted)
        self.assertEqual((found["options"]["recursive"], found["io"]), (True, "buffered (small files)"))
        self.assertEqual(self.names(), [])

    @needs_root
    @needs_nobody
    def test_the_failed_ones_are_copied_by_another_run(self) -> None:
        self.make("s", {"a": b"1", "odd\n\udcff": b"2", "d": {"x": b"3", "y": b"4"}})
        os.chmod(self.tmp, 0o777)
        closed = [self.path("s", "odd\n\udcff"), self.path("s", "d", "y")]
        for path in closed:
            os.chmod(path, 0)
        found = self.json("-r", "--failed-list", "list", "s", "d", expect=1, user="nobody")
        self.assertEqual(self.names(), ["d/y", "odd\n\udcff"])
        self.assertEqual(sorted(error["source"] for error in found["errors"]), ["s/d/y", "s/odd\n\udcff"])
        self.assertEqual({error["message"] for error in found["errors"]}, {"Permission denied"})
        for path in closed:
            os.chmod(path, 0o644)
        words = ["-r", "-u", "--files-from", "list", "-0", "--failed-list", "again", "s", "-T", "d"]
        run_tool("fastcp", *words, cwd=self.tmp, expect=0, user="nobody")
        self.assert_same_tree(self.path("d"), self.path("s"))
        self.assertEqual(self.names("again"), [])

    @needs_root
    def test_a_full_disk_names_everything(self) -> None:
        self.make("s", {f"f{i:02}": Random(300_000, seed=i) for i in range(20)})
        with support.mounted("tmpfs", 2 * MIB) as place:
            found = self.json("-r", "--failed-list", "list", "s", os.path.join(place, "d"), expect=1)
        self.assertEqual(self.names(), ["."])
        self.assertIn("No space left on device", found["stopped"])

    def test_a_copy_that_is_refused(self) -> None:
        self.make("s", {"a": b"1"})
        found = self.json("s", "d", "--failed-list", "list", expect=1)
        self.assertEqual(found["errors"][0]["message"], "-r not specified; omitting directory 's'")
        self.assertEqual((found["files"], found["io"], self.names()), (0, None, ["."]))

    def test_a_signal(self) -> None:
        self.make("s", {"a": Random(8 * MIB, seed=1)})
        words = ["fastcp", "--json", "--failed-list", self.path("list"), "--bwlimit", "1M", "-r"]
        pipes: Dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        copying = self.start_tool(*words, self.path("s"), self.path("d"), **pipes)
        time.sleep(1)
        copying.send_signal(signal.SIGTERM)
        out, _ = copying.communicate(timeout=20)
        self.assertEqual(copying.returncode, -signal.SIGTERM)
        self.assertEqual(json.loads(out)["status"], 1)
        self.assertEqual(self.names(), ["."])

    def test_where_the_list_may_not_go(self) -> None:
        self.make("s", {"a": b"1", "b": b"2"})
        self.make("old", b"precious")
        os.mkdir(self.path("dir"))
        for name, options, words in (
            ("old", [], "File exists (-f replaces it)"), ("s/a", ["-f"], "cannot overwrite source"),
            ("d/a", [], "the copy writes there"), ("dir", ["-f"], "it is a directory"),
            ("none/list", [], "there is no such directory"),
        ):  # fmt: skip
            with self.subTest(name=name):
                result = run_tool("fastcp", "-r", *options, "--failed-list", name, "s", "d", cwd=self.tmp, expect=1)
                self.assertIn(words, result.stderr)
                self.assertEqual(result.stderr.count("\n"), 1)
                self.assertFalse(os.path.exists(self.path("d")))
        self.assert_same_tree(self.path("old"), self.make("same", b"precious"))
        run_tool("fastcp", "-r", "-f", "--failed-list", "old", "s", "d", cwd=self.tmp, expect=0)
        self.assertEqual(self.names("old"), [])

    @slow
    def test_of_several_ranks_one_tells(self) -> None:
        self.make("s", {"a": b"1", "d": {"b": b"2", "skip": b""}})
        self.make("names", b"a\0d/b\0none\0")
        words = ["--distributed", "-r", "--json", "--failed-list", "list", "--files-from", "names", "-0", "s", "d"]
        ranks = [
            self.start_tool(
                "fastcp", *words, cwd=self.tmp, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "told",
                     "TORCHELASTIC_RESTART_COUNT": "0"},
            )
            for rank in range(2)
        ]  # fmt: skip
        told = [rank.communicate(timeout=60)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [1, 1])
        self.assertEqual((told[1], json.loads(told[0])["files"], self.names()), (b"", 2, ["none"]))
        self.assertEqual(sorted(os.listdir(self.path("d", "d"))), ["b"])


if __name__ == "__main__":
    support.main()
