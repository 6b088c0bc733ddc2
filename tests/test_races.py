# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Several copies at once, readers meanwhile, trees that change under the copy: nothing partial, nothing outside."""

# Takes about 20 s
from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import threading
import time
from typing import Callable, Iterator, List, Set, Tuple

import copying
import support
from support import Fifo, Link, Random, TestCase, make_tree, run_tool, slow

from mlperf_common.fileio import copyplan

MIB = 1 << 20
SECRET = b"what nobody below SOURCE may see"


def tree() -> object:
    """Small files, and one that goes in parts."""
    return {
        "large": Random(66 * MIB, seed=9),
        **{f"d{i}": {f"f{j}": Random(2000 * j + 1, seed=j) for j in range(12)} for i in range(5)},
    }


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do something over and over in a thread."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                act()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Together(TestCase):
    def start(self, *options: str) -> List[subprocess.Popen[bytes]]:
        source = self.path("source")
        return [
            self.start_tool("fastcp", "-n", "3", *options, source, self.path("copy"), stderr=subprocess.PIPE)
            for _ in range(8)
        ]

    @slow
    def test_eight_copies_of_which_two_are_killed(self) -> None:
        source = self.make("source", tree())
        generator = random.Random(4)
        for round_number, options in enumerate((["-rT"], ["-rfT"], ["-ruT"], ["-rfT"])):
            with self.subTest(options=options, round=round_number):
                processes = self.start(*options)
                for process in processes[2:4]:
                    time.sleep(generator.random() / 3)
                    process.send_signal(signal.SIGKILL)
                ends = [(process.communicate(timeout=90)[1], process.returncode) for process in processes]
                for errors, status in ends:
                    self.assertIn(status, (0, 1, -signal.SIGKILL), errors)
                    self.assertNotIn(b"Traceback", errors)
                if any(status == 0 for _, status in ends):
                    self.assertEqual(self.differences(source), [])
                # What the killed ones have left, a later run removes; what they made of DEST is whole.
                run_tool("fastcp", "-rfT", source, self.path("copy"), expect=0)
                self.assert_same_tree(self.path("copy"), source)
                self.assert_no_leftovers(self.path("copy"))

    def differences(self, source: str) -> List[str]:
        """Files of the copy that are not whole, and those that are missing."""
        wrong = []
        for directory, _, names in os.walk(source):
            for name in names:
                path = os.path.join(directory, name)
                other = self.path("copy", os.path.relpath(path, source))
                with open(path, "rb") as file:
                    data = file.read()
                with contextlib.suppress(FileNotFoundError), open(other, "rb") as file:
                    if file.read() == data:
                        continue
                wrong.append(other)
        return wrong

    @slow
    def test_a_reader_never_sees_a_part(self) -> None:
        source = self.make("source", tree())
        whole: Set[str] = set()
        for directory, _, names in os.walk(source):
            for name in names:
                with open(os.path.join(directory, name), "rb") as file:
                    whole.add(hashlib.md5(file.read()).hexdigest())
        seen: Set[str] = set()

        def read() -> None:
            for directory, _, names in os.walk(self.path("copy")):
                for name in names:
                    if not name.startswith("."):
                        with open(os.path.join(directory, name), "rb") as file:
                            seen.add(hashlib.md5(file.read()).hexdigest())

        with meanwhile(read):
            for _ in range(3):
                run_tool("fastcp", "-rfT", source, self.path("copy"), expect=0)
        self.assertTrue(seen)
        self.assertEqual(seen - whole, set())


class Swapped(TestCase):
    """Entries that are something else when the copy comes to them than when they were listed."""

    def move_away(self, path: str) -> None:
        """The same inode stands behind the name, but through a link that leads out of the tree."""
        moved = os.path.join(self.place, "moved")
        os.rename(path, moved)
        os.symlink(moved, path)

    def put(self, kind: object) -> Callable[[str], None]:
        """Something else takes the name."""

        def act(path: str) -> None:
            os.rename(path, os.path.join(self.place, "old"))
            make_tree(path, kind)

        return act

    def swaps(self) -> List[Tuple[str, str, Callable[[str], None]]]:
        """Which name is swapped, which links are followed, and how."""
        everything, nothing = copyplan.FOLLOW_ALL, copyplan.FOLLOW_NONE
        return [
            ("source/m/x", nothing, self.move_away),
            ("source/m", nothing, self.move_away),
            ("source/m", everything, self.move_away),
            ("source/m/x", nothing, self.put(Link("../../outside/x"))),
            ("source/m/x", everything, self.put(Link("../../outside/x"))),
            ("source/m", everything, self.put(Link("../outside"))),
            ("source/m/x", everything, self.put(Fifo())),
            ("source/m/x", everything, self.put({"in": b"side"})),
            ("source/m", everything, self.put({"x": SECRET})),
            ("copy/source/m", everything, self.move_away),
            ("copy/source/m", everything, self.put(Link("../../outside"))),
            ("copy/source/m", everything, self.put(Fifo())),
            ("copy/source", everything, self.put(Link("../outside"))),
        ]

    def check(self, path: str, follow: str, act: Callable[[str], None]) -> None:
        deep = {"y": {"y": {}}}  # looked at last, so that no directory in question is still open from the walk
        tree = {"source": {"m": {"x": b"x"}}, "last": deep, "copy": {"source": {"m": {}}, "last": deep}}
        make_tree(self.place, {**tree, "outside": {"x": SECRET}})
        _, said = copying.copy(
            [os.path.join(self.place, name) for name in ("source", "last")],
            os.path.join(self.place, "copy"),
            follow=follow,
            between=lambda: act(os.path.join(self.place, path)),
        )
        self.assertTrue(said.failures or said.lines)
        self.assert_same_tree(os.path.join(self.place, "outside"), {"x": SECRET})
        moved = os.path.join(self.place, "moved")
        if path.startswith("source"):
            self.assert_same_tree(os.path.join(self.place, "copy"), tree["copy"])
        elif os.path.exists(moved):
            self.assert_same_tree(moved, {})

    def test_between_the_walk_and_the_copy(self) -> None:
        for number in range(len(self.swaps())):
            self.place = self.path(f"{number}")
            path, follow, act = self.swaps()[number]
            with self.subTest(path=path, follow=follow, number=number):
                self.check(path, follow, act)


class Hostile(TestCase):
    def setUp(self) -> None:
        self.outside = self.make("outside", {"secret": SECRET, "d": {"secret": SECRET}})

    def swap(self, path: str, *kinds: Callable[[str], None]) -> Callable[[], None]:
        """One after the other the kinds of entry take the name."""
        turn = [0]

        def act() -> None:
            fresh = f"{path}.fresh"
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, f"{path}.old{turn[0] % 3}")
            with contextlib.suppress(OSError):
                if os.path.isdir(fresh) and not os.path.islink(fresh):
                    support.remove_tree(fresh)
                else:
                    os.unlink(fresh)
            kinds[turn[0] % len(kinds)](fresh)
            with contextlib.suppress(OSError):
                os.rename(fresh, path)
            turn[0] += 1

        return act

    def found(self, root: str) -> bytes:
        """All bytes of all files below a directory; links are not followed."""
        data = []
        for directory, _, names in os.walk(root):
            for name in names:
                path = os.path.join(directory, name)
                if os.path.isfile(path) and not os.path.islink(path):
                    with open(path, "rb") as file:
                        data.append(file.read())
        return b"\n".join(data)

    @slow
    def test_entries_of_the_source_that_change_their_kind(self) -> None:
        before = support.read_tree(self.outside)
        kinds: List[Callable[[str], None]] = [
            lambda path: str(make_tree(path, b"file")) and None,
            lambda path: str(make_tree(path, Fifo())) and None,
            lambda path: os.symlink(os.path.join(self.outside, "secret"), path),
            lambda path: str(make_tree(path, {"in": b"side"})) and None,
            lambda path: os.symlink(os.path.join(self.outside, "d"), path),
        ]
        hidden = self.make("apart", {"x": b"0"})  # the swapped entry has a directory of its own
        source = self.make("source", {"a": b"1", "z": b"2"})
        os.rename(hidden, os.path.join(source, "m"))
        with meanwhile(self.swap(os.path.join(source, "m", "x"), *kinds)):
            for round_number in range(12):
                result = run_tool("fastcp", "-n", "2", "-rP", source, self.path(f"c{round_number}"), timeout=30)
                self.assertIn(result.returncode, (0, 1))
                self.assertNotIn(SECRET, self.found(self.path(f"c{round_number}")))
                result = run_tool("fastmd5", "-n", "2", "--skip-special", source, timeout=30)
                self.assertIn(result.returncode, (0, 1))
        self.assertEqual(support.differences(before, support.read_tree(self.outside)), [])

    @slow
    def test_directories_of_the_destination_that_become_links(self) -> None:
        before = support.read_tree(self.outside)
        source = self.make("source", {"d": {f"f{i}": Random(500, seed=i) for i in range(300)}, "e": {"f": b"1"}})
        kinds: List[Callable[[str], None]] = [
            lambda path: str(make_tree(path, {})) and None,
            lambda path: os.symlink(self.outside, path),
        ]
        for round_number in range(8):
            copy = self.make(f"copy{round_number}", {"d": {}})
            with meanwhile(self.swap(os.path.join(copy, "d"), *kinds)):
                result = run_tool("fastcp", "-n", "2", "-rfT", source, copy, timeout=30)
            self.assertIn(result.returncode, (0, 1))
        self.assertEqual(support.differences(before, support.read_tree(self.outside)), [])

    @slow
    def test_files_that_grow_and_shrink(self) -> None:
        source = self.make("source", {"f": Random(3 * MIB, seed=1), "large": Random(66 * MIB, seed=2)})
        sizes = iter([1, 5 * MIB, 100, 67 * MIB] * 100000)

        def change() -> None:
            for name in ("f", "large"):
                os.truncate(os.path.join(source, name), next(sizes))

        with meanwhile(change):
            for round_number in range(5):
                result = run_tool("fastcp", "-r", source, self.path(f"c{round_number}"), timeout=30)
                self.assertIn(result.returncode, (0, 1))
                for name in os.listdir(self.path(f"c{round_number}")):
                    size = os.path.getsize(self.path(f"c{round_number}", name))
                    self.assertIn(size, (1, 100, 3 * MIB, 5 * MIB, 66 * MIB, 67 * MIB))

    def test_what_is_added_meanwhile_is_noticed(self) -> None:
        source = self.make("source", {"large": Random(66 * MIB, seed=2), "d": {"f": b"1"}})
        process = self.start_tool("fastcp", "-r", source, self.path("copy"), stderr=subprocess.PIPE)
        while not os.path.isdir(self.path("copy", "d")):
            time.sleep(0.001)
        make_tree(os.path.join(source, "d", "new"), b"2")
        _, errors = process.communicate(timeout=60)
        if os.path.exists(self.path("copy", "d", "new")):
            self.assertEqual(process.returncode, 0)
        else:
            self.assertEqual(process.returncode, 1)
            self.assertIn(b"directory changed while it was being copied", errors)


if __name__ == "__main__":
    support.main()
