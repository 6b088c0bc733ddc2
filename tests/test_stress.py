# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Random trees, options and faults, then the promises: exit status 0 only if complete, nothing partial, nothing lost.

A fixed number of seeds, or: STRESS_SECONDS=600 python3 tests/test_stress.py (it prints each seed that fails), or one
seed: STRESS_SEED=17 python3 tests/test_stress.py.
"""

# Takes about 20 s
from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List

import support
from support import File, Link, Random, Sparse, TestCase, needs, run_tool, slow

MIB = 1 << 20
SEEDS = range(1, 19)
SIZES = [0, 1, 511, 4095, 4096, 4097, 70_000, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 5]
OLD = b"what stood there"
# A call, how it fails, the first one that may, and how many are between two that may: Python's own start, which is not
# ours to test, opens some 160 files and looks at 640.
FAULTS = [
    ("preadv2", "EIO", 1, 1), ("pwritev2", "EIO", 1, 1), ("pwritev2", "ENOSPC", 1, 1), ("pwritev2", "EINTR", 1, 1),
    ("openat", "EMFILE", 165, 15), ("linkat", "EIO", 1, 1), ("fsync", "EIO", 1, 1), ("newfstatat", "ESTALE", 640, 30),
]  # fmt: skip


class Scene:
    """What a seed makes: a source, what stands at the destination, options, a fault."""

    def __init__(self, case: TestCase, seed: int) -> None:
        self.random = random.Random(seed)
        self.case = case
        self.source = case.make(f"source{seed}", self.tree(3))
        self.copy = case.path(f"copy{seed}")
        self.bystander = case.make(f"bystander{seed}", b"not ours")
        self.options = self.choose_options()
        self.old: Dict[str, bytes] = {}
        if self.random.random() < 0.6:
            self.stand_in_the_way()

    def tree(self, depth: int) -> Dict[str, Any]:
        """A directory of random entries."""
        found: Dict[str, Any] = {}
        for _ in range(self.random.randint(0, 7)):
            letters = self.random.choice(["a", "b", "c d", "e\n", "\udcff", "-f", "é", "x" * 200])
            name = letters + str(self.random.randint(0, 9))
            kind = self.random.random()
            if kind < 0.25 and depth:
                found[name] = self.tree(depth - 1)
            elif kind < 0.35:
                found[name] = Link(self.random.choice(["a1", ".", "../b2", "/etc/hostname"]))
            elif kind < 0.45:
                found[name] = Sparse(5 * MIB, {self.random.randrange(5 * MIB - 9): b"data"})
            else:
                mode = self.random.choice([0o644, 0o600, 0o444, 0o755])
                found[name] = File(Random(self.random.choice(SIZES), seed=self.random.randrange(99)), mode=mode)
        if depth == 3 and self.random.random() < 0.3:
            found["large"] = Random(66 * MIB + self.random.choice([0, 1, 4096]), seed=1)
        return found

    def choose_options(self) -> List[str]:
        """-P always, since the links lead anywhere."""
        wanted = [o for o in ("-f", "-p", "-a", "--fsync", "--sparse=never", "--verify", "--reflink=never", "-v")
                  if self.random.random() < 0.25]  # fmt: skip
        wanted += self.random.choice([[], ["-u"], ["-u", "--checksum"]])
        wanted += ["-n", str(self.random.choice([1, 2, 4])), "-b", self.random.choice(["2M", "8M"])]
        return ["-r", "-P", "-T", *wanted]

    def stand_in_the_way(self) -> None:
        for directory, _, names in os.walk(self.source):
            place = os.path.join(self.copy, os.path.relpath(directory, self.source))
            for name in names:
                if self.random.random() < 0.4 and not os.path.islink(os.path.join(directory, name)):
                    os.makedirs(place, exist_ok=True)
                    path = os.path.join(place, name)
                    with open(path, "wb") as file:
                        file.write(OLD)
                    self.old[os.path.normpath(path)] = OLD
                    if self.random.random() < 0.5:
                        os.utime(path, (1, 1))

    def run(self) -> support.Result:
        """The copy under its fault."""
        kind = self.random.random()
        if kind < 0.35:
            return self.run_killed()
        under: List[str] = []
        if kind < 0.8:
            call, error, first, step = self.random.choice(FAULTS)
            log = self.case.path("log" + os.path.basename(self.copy))
            when = first + step * self.random.randint(0, 5)
            under = support.strace_inject(log, call, f"error={error}:when={when}")
        return run_tool("fastcp", *self.options, self.source, self.copy, under=under, timeout=60)

    def run_killed(self) -> support.Result:
        process = self.case.start_tool(
            "fastcp", *self.options, self.source, self.copy, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        time.sleep(0.1 + self.random.random() * 0.4)
        victim = process.pid
        if self.random.random() < 0.4:
            with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
                children = [int(word) for word in file.read().split()]
            victim = self.random.choice(children or [victim])
        try:
            os.kill(victim, self.random.choice([signal.SIGKILL, signal.SIGTERM]))
        except ProcessLookupError:
            pass
        out, errors = process.communicate(timeout=60)
        return support.Result(process.args, process.returncode, out, errors)  # type: ignore[arg-type]


class Stress(TestCase):
    def check(self, scene: Scene, before: Any, result: support.Result) -> None:
        """The promises."""
        self.assertIn(result.returncode, (0, 1, -signal.SIGKILL, -signal.SIGTERM), result)
        self.assertEqual(support.differences(before, support.read_tree(scene.source)), [], "the source has changed")
        with open(scene.bystander, "rb") as file:
            self.assertEqual(file.read(), b"not ours")
        if result.returncode == 0:
            left = "-u" in scene.options and scene.old
            if not left:
                self.assert_same_tree(scene.copy, scene.source)
        self.check_files(scene, result)

    def check_files(self, scene: Scene, result: support.Result) -> None:
        killed = result.returncode == -signal.SIGKILL
        for path in scene.old:
            self.assertTrue(os.path.lexists(path), f"{path} is lost: {result}")
        for directory, _, names in os.walk(scene.copy):
            for name in names:
                path = os.path.normpath(os.path.join(directory, name))
                right = os.path.join(scene.source, os.path.relpath(path, scene.copy))
                if not os.path.lexists(right):
                    self.assertTrue(killed and name.startswith("."), f"{path} was left: {result}")
                elif not os.path.islink(path):
                    with open(path, "rb") as file, open(right, "rb") as other:
                        data = file.read()
                        self.assertIn(data, (other.read(), scene.old.get(path)), f"{path} is partial: {result}")

    @slow
    @needs("strace")
    def test_seeds(self) -> None:
        deadline = time.monotonic() + float(os.environ.get("STRESS_SECONDS", "0"))
        seeds = [int(os.environ["STRESS_SEED"])] if "STRESS_SEED" in os.environ else list(SEEDS)
        if deadline > time.monotonic():
            seeds = []
        number = int(time.time()) if not seeds else 0
        while seeds or time.monotonic() < deadline:
            seed = seeds.pop(0) if seeds else (number := number + 1)
            with self.subTest(seed=seed):
                scene = Scene(self, seed)
                before = support.read_tree(scene.source)
                result = scene.run()
                try:
                    self.check(scene, before, result)
                except AssertionError:
                    sys.stderr.write(f"STRESS_SEED={seed} {scene.options}\n")
                    raise
            support.remove_tree(scene.source)
            if os.path.isdir(scene.copy):
                support.remove_tree(scene.copy)


if __name__ == "__main__":
    support.main()
