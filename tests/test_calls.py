# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What a copy costs where nothing goes wrong: system calls a small file, and what is imported before any is made."""

# Takes about 8 s
from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import unittest
from typing import Any, Dict, List, Set

import support
from support import needs, slow

from mlperf_common.fileio import batches, listing
from mlperf_common.fileio.batches import Batches, PlannedFile, Queue
from mlperf_common.fileio.walk import FileEntry

# What `--version`, `--help` or a usage error need; all else waits until the arguments are read.
STARTERS = {"command", "fastcp", "joining", "progress", "report", "session", "stopping", "words"}
HEAVY = {"array", "ctypes", "hashlib", "inspect", "json", "mmap", "multiprocessing", "pickle", "random", "selectors",
         "shutil", "socket", "subprocess", "tempfile", "threading", "traceback", "typing"}


class SystemCalls(support.TestCase):
    """By strace, of all processes of a run."""

    def tree(self, directories: int, files: int) -> str:
        content = {"d%02d" % d: {"f%02d-%03d" % (d, f): b"x" * 2000 for f in range(files)} for d in range(directories)}
        return self.make("source", content)

    @slow
    @needs("strace")
    def test_at_most_12_a_small_file(self) -> None:
        source, log = self.tree(50, 100), self.path("log")
        under = ["strace", "-f", "-c", "-qq", "-o", log]
        support.run_tool("fastcp", "-q", "-r", source, self.path("copy"), under=under, expect=0)
        with open(log) as stream:
            counted = {words[-1]: int(words[3]) for words in map(str.split, stream) if words[3:] and words[3].isdigit()}
        self.assertEqual(counted["linkat"], 5000)
        # 10 are due for each file: stat, open, fstat, read, open, write, fstat, link, close, close. The second fstat is
        # compared with the first by ctime, too, which the plan does not have. One more a file goes over this.
        self.assertLessEqual(counted["total"] / 5000, 12, counted)

    @slow
    @needs("strace")
    def test_each_source_entry_is_looked_at_once_by_name_and_no_copy_is(self) -> None:
        source, log = self.tree(3, 100), self.path("log")
        under = ["strace", "-f", "-qq", "-o", log, "-e", "trace=%file"]
        support.run_tool("fastcp", "-q", "-r", source, self.path("copy"), under=under, expect=0)
        looks: Dict[str, int] = {}
        with open(log) as stream:
            for found in re.finditer(r' (?:stat|lstat|newfstatat|statx)\([^"\n]*"(f\d\d-\d\d\d)"', stream.read()):
                looks[found[1]] = looks.get(found[1], 0) + 1
        self.assertEqual((len(looks), set(looks.values())), (300, {1}))


class Dealing(unittest.TestCase):
    """What is dealt out gets small towards the end, so that no worker has much left when the others have nothing."""

    def test_batches(self) -> None:
        entry = FileEntry("f", 1, 1, 1, 1)
        files = [PlannedFile(f"f{number}", entry, False) for number in range(10000)]
        queues = [Queue(None, iter(files[start : start + 500]), 500) for start in range(0, 10000, 500)]
        dealt = Batches(queues)
        sizes: List[int] = []
        names: List[str] = []
        for turn in range(10000):
            found = dealt.next(turn % 16, False)
            if found is None:
                break
            sizes.append(len(found[1]))
            names += [file.name for file in found[1]]
        self.assertEqual(sorted(names), sorted(file.name for file in files))
        self.assertEqual(set(sizes[:20]), {batches.BATCH_FILES})
        self.assertLessEqual(max(sizes[-16:]), batches.LEAST_FILES)
        self.assertLess(len(sizes), 200)

    def test_groups_of_directories(self) -> None:
        for count, width, each, size in ((1, 16, 4, 1), (100, 16, 4, 1), (1000, 16, 4, 15), (100000, 16, 4, 64),
                                         (100, 16, 2, 3), (100, 1, 2, 50)):
            self.assertEqual(listing.group_size(count, width, 64, each), size)


class Start(support.TestCase):
    """Of a tool that has nothing to copy; -S, since an installed .pth file may import half the library."""

    def test_nothing_is_imported_that_the_arguments_do_not_need(self) -> None:
        code = (f"import sys\nsys.path.insert(0, {support.ROOT!r})\nfrom mlperf_common.fileio.fastcp import main\n"
                "status = main(sys.argv[1:])\nprint(*sys.modules, file=sys.stderr)\nsys.exit(status)")
        start = "mlperf_common.fileio."
        for word, status in (("--version", 0), ("--help", 0), ("--no-such-option", 2)):
            with self.subTest(word):
                loaded = set(support.run([sys.executable, "-S", "-c", code, word], expect=status).stderr.split())
                self.assertEqual({name[len(start):] for name in loaded if name.startswith(start)}, STARTERS)
                self.assertEqual(loaded & HEAVY - self.of_argparse(), set())

    def of_argparse(self) -> Set[str]:
        """What the library itself imports: it differs between its releases."""
        code = "import argparse, contextlib, signal, sys; print(*sys.modules)"
        return set(support.run([sys.executable, "-S", "-c", code], expect=0).stdout.split())

    @slow
    def test_it_takes_little_longer_than_python_alone(self) -> None:
        # Bytecode of its own place: others may not write it, and compiling is not what is measured.
        env = {"PYTHONPYCACHEPREFIX": self.path("cache"), "PYTHONDONTWRITEBYTECODE": None}
        tool = os.path.join(support.CLIENT, "fastcp")
        ratios: List[float] = []
        for _ in range(10):
            alone, ours = (self.cpu_seconds(words, env) for words in (["-c", "pass"], [tool, "--version"]))
            ratios.append(ours / alone)
        # 2.5 is wanted, and 2.2 measured; 3.7 to 3.9 when everything was imported first.
        self.assertLess(statistics.median(ratios), 3.2, ratios)

    def cpu_seconds(self, words: List[str], env: Dict[str, Any]) -> float:
        """Of one run: the clock on the wall would measure who else is there."""
        process = support.start([sys.executable, "-S", *words], env=env, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        self.assertEqual(status, 0)
        return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    support.main()
