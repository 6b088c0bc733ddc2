# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One copy by several ranks as a library: processes of one machine, whose barrier is the one of multiprocessing."""

# Takes about 15 s
from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import signal
import subprocess
import unittest
from typing import Any, Callable, Dict, Iterator, List, Tuple
from unittest import mock

import copying
import support
from support import File, Link, Random, Sparse, TestCase

from mlperf_common.fileio import (
    claims,
    copyplan,
    copytasks,
    dealing,
    facts,
    listing,
    report,
    rewalk,
    sharing,
    transfer,
    walk,
    walksharing,
)
from mlperf_common.fileio.dealing import Part, Unit
from mlperf_common.fileio.metadata import Kept
from mlperf_common.fileio.walk import Request

KIB, MIB = 1 << 10, 1 << 20
CONTEXT = multiprocessing.get_context("fork")


class Dealing(unittest.TestCase):
    """Every byte of every unit is in exactly one item, whatever the numbers."""

    def check(self, units: List[Unit], ranks: int) -> List[List[Part]]:
        items = list(dealing.deal(units, sum(unit.cost for unit in units), ranks))
        parts = [part for item in items for part in item]
        left = iter(parts)
        for unit in units:
            at = 0
            while True:
                part = next(left)
                self.assertEqual((part.work, part.start), (unit.work, at))
                at = part.end
                if at == unit.cuttable:
                    break
                self.assertEqual(at % copying.batches.EXTENT, 0)
        self.assertEqual(list(left), [])
        self.assertTrue(all(items))
        return items

    def test_sizes_and_ranks(self) -> None:
        for ranks in (1, 2, 7, 1000):
            for size in (0, 1, 64 * MIB, 65 * MIB, 5 << 30, 1 << 40):
                with self.subTest(ranks=ranks, size=size):
                    units = [Unit(object(), size + dealing.FILE_COST, size), Unit(object(), 7)]
                    self.check(units + [Unit(object(), 40 * MIB) for _ in range(300)], ranks)

    def test_one_huge_file_is_spread_over_all(self) -> None:
        for ranks in (2, 4, 64):
            size = ranks << 30
            items = self.check([Unit("huge", size + dealing.FILE_COST, size)], ranks)
            self.assertGreaterEqual(len(items), 2 * ranks)
            self.assertLessEqual(max(part.end - part.start for item in items for part in item), size // ranks)

    def test_the_last_items_are_small(self) -> None:
        units = [Unit(object(), 32 * MIB) for _ in range(100_000)]
        items = self.check(units, 16)
        self.assertLess(len(items), 16 * 40)
        self.assertLessEqual(max(len(item) for item in items[-16:]), 4 * dealing.LEAST // (32 * MIB))


class Claiming(TestCase):
    """Each item goes to one rank, whoever is faster, also where the view of the directory is old."""

    def place(self, name: str) -> int:
        os.mkdir(self.path(name))
        place = os.open(self.path(name), os.O_RDONLY)
        self.addCleanup(os.close, place)
        return place

    def test_in_turn(self) -> None:
        for ranks, items in ((1, 0), (1, 1), (3, 2), (3, 3), (3, 40), (8, 100)):
            with self.subTest(ranks=ranks, items=items):
                place = self.place(f"{ranks}-{items}")
                publisher = claims.Publisher(place)
                everyone = [claims.Claims(place, rank, ranks) for rank in range(ranks)]
                self.assertEqual([one.next() for one in everyone], [None] * ranks)
                got: List[int] = []
                for number in range(items):
                    publisher.publish(number)
                    got += [item for one in everyone[number % ranks :] for item in _taken(one)]
                self.assertFalse(any(one.is_over() for one in everyone))
                publisher.finish()
                while not all(one.is_over() for one in everyone):
                    got += [item for one in everyone for item in _taken(one)]
                self.assertEqual(sorted(got), list(range(items)))

    def test_at_once_in_many_processes(self) -> None:
        place, ranks, items = self.place("p"), 6, 500
        publisher = claims.Publisher(place)
        for number in range(items):
            publisher.publish(number)
        publisher.finish()

        def rank(number: int) -> None:
            mine = claims.Claims(place, number, ranks)
            got: List[int] = []
            while not mine.is_over():
                got += _taken(mine)
            claims.write_json(place, f"got-{number}", got)

        _together([functools.partial(rank, number) for number in range(ranks)])
        got = [claims.read_json(place, f"got-{number}") for number in range(ranks)]
        self.assertEqual(sorted(item for one in got for item in one), list(range(items)))
        self.assertTrue(all(one == sorted(one) for one in got))

    def test_an_old_view_costs_a_vain_attempt_and_no_more(self) -> None:
        place = self.place("p")
        publisher = claims.Publisher(place)
        for number in range(60):
            publisher.publish(number)
        publisher.finish()
        one, other = (claims.Claims(place, rank, 2) for rank in range(2))
        with mock.patch.object(claims.Claims, "_is_claimed", lambda self, number: False):
            got = [item for _ in range(40) for rank in (one, one, other) for item in _taken(rank)]
        self.assertEqual(sorted(got), list(range(60)))

    def test_a_search_takes_few_looks(self) -> None:
        place = self.place("p")
        publisher = claims.Publisher(place)
        for number in range(2000):
            publisher.publish(number)
        publisher.finish()
        fast, slow = claims.Claims(place, 0, 2), claims.Claims(place, 1, 2)
        for _ in range(1500):
            fast.next()
        slow.next()
        looks: List[int] = []
        is_claimed = claims.Claims._is_claimed

        def count(self: claims.Claims, number: int) -> bool:
            looks.append(number)
            return is_claimed(self, number)

        with mock.patch.object(claims.Claims, "_is_claimed", count):
            self.assertEqual(_taken(slow), [1501])
        self.assertLess(len(looks), 30)

    def test_a_stop_is_for_all(self) -> None:
        place = self.place("p")
        publisher = claims.Publisher(place)
        for number in range(5):
            publisher.publish(number)
        one, other = (claims.Claims(place, rank, 2) for rank in range(2))
        one.stop()
        other.stop()
        self.assertEqual((one.next(), other.next()), (None, None))
        self.assertTrue(one.is_over() and other.is_over())


def _taken(rank: claims.Claims) -> List[int]:
    """The item that a rank gets now, which is its own number, if it gets one."""
    taken = rank.next()
    if taken is None:
        return []
    number, item = taken
    if number != item:
        raise AssertionError(taken)
    return [number]


def _together(functions: List[Callable[[], None]]) -> List[int]:
    """Run each in a process of its own; their exit codes."""
    processes = [CONTEXT.Process(target=function) for function in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    return [process.exitcode for process in processes]


class Walking(TestCase):
    """A walk by ranks finds what one process finds, and lists each directory once."""

    def walk_by(
        self, ranks: int, source: str, change: Callable[[int], None] = lambda rank: None, follow: str = "none"
    ) -> Tuple[Any, List[int]]:
        """What a plan by so many ranks knows, and how many directories each rank has listed."""
        place = os.open(support.make_temporary(), os.O_RDONLY)
        self.addCleanup(os.close, place)
        barrier = CONTEXT.Barrier(ranks)

        def rank(number: int) -> None:
            change(number)
            list_directory = walk.list_directory
            listed: List[Request] = []

            def count(chain: Any, request: Request) -> Any:
                listed.append(request)
                return list_directory(chain, request)

            pool = copying.make_pool(copytasks.FUNCTIONS, 1)
            roots = listing.Roots(pool)
            crew = sharing.Crew(number, ranks, place, lambda: barrier.wait(60) and None, lambda: None)
            with mock.patch.object(walk, "list_directory", count):
                with walksharing.shared_walk(crew, pool, roots) as lister:
                    if lister is not None:
                        claims.write_json(place, "found", _found(source, lister, follow))
            claims.write_json(place, f"listed-{number}", sum(not request.destination for request in listed))

        self.assertEqual(_together([functools.partial(rank, number) for number in range(ranks)]), [0] * ranks)
        return claims.read_json(place, "found"), [claims.read_json(place, f"listed-{n}") for n in range(ranks)]

    def tree(self) -> Dict[str, Any]:
        return {
            **{f"d{i}": {f"f{j}": b"x" * j for j in range(i)} for i in range(40)},
            "odd\udcff\n": {"\udcfe": {"a": {}, "b": {"\t": b"1"}}},
            "links": {"l": Link("../d3"), "dangling": Link("nowhere")},
            **{f"e{i}": {"x": {"y": {"z": b"z"}}, "m": File(b"m", mode=0o600)} for i in range(20)},
        }

    def test_the_same_as_alone(self) -> None:
        source = self.make("s", self.tree())
        os.link(self.path("s/d5/f1"), self.path("s/d6/other"))
        os.unlink(self.path("s/links/dangling"))
        for follow in ("none", "all"):
            alone = _found(source, walk.SerialLister(), follow)
            for ranks in (1, 2, 5):
                with self.subTest(ranks=ranks, follow=follow):
                    found, listed = self.walk_by(ranks, source, follow=follow)
                    self.assertEqual(found, alone)
                    self.assertEqual(sum(listed), len(alone))
                    self.assertTrue(all(listed), listed)

    def test_what_cannot_be_taken_is_told_as_alone(self) -> None:
        source = self.make("s", {**self.tree(), "up": {"u": Link("..")}})
        os.mkfifo(self.path("s/d7/pipe"))
        alone = _found(source, walk.SerialLister(), "all")
        self.assertIn("dangling", str(alone))
        found, _ = self.walk_by(4, source, follow="all")
        self.assertEqual(found, alone)

    @support.slow
    @support.needs_root
    def test_a_rank_that_sees_another_directory_lists_nothing(self) -> None:
        source = self.make("s", self.tree())
        elsewhere = self.make("other", {f"d{i}": {"wrong": b""} for i in range(40)})

        def change(number: int) -> None:
            if number == 1:
                support.new_mount_namespace()
                subprocess.run(["mount", "--bind", elsewhere, source], check=True)

        found, listed = self.walk_by(3, source, change)
        alone = _found(source, walk.SerialLister())
        self.assertEqual(found, alone)
        self.assertEqual((listed[1], sum(listed)), (0, len(alone)))

    def test_what_goes_wrong_on_another_rank_is_tried_by_rank_0(self) -> None:
        source = self.make("s", self.tree())

        list_directory = walk.list_directory

        def change(number: int) -> None:
            def fail(chain: Any, request: Request) -> Any:
                if len(request.components) % 2:
                    return walk.Listing(None, problems=(("", "Input/output error"),))
                return list_directory(chain, request)._replace(problems=(("f", "Input/output error"),))

            if number == 2:
                walk.list_directory = fail

        found, listed = self.walk_by(3, source, change)
        self.assertEqual(found, _found(source, walk.SerialLister()))
        self.assertGreater(listed[2], 0)

    @support.slow
    @support.needs_root
    def test_what_is_mounted_in_the_tree_is_listed_by_rank_0(self) -> None:
        source = self.make("s", {f"d{i}": {"f": b"", "m": {}} for i in range(40)})
        with contextlib.ExitStack() as mounts:
            for name in ("d3/m", "d4/m"):
                place = mounts.enter_context(support.mounted_at(self.path("s", name), "-t", "tmpfs", "tmpfs"))
                for directory in ("y", "z"):  # files of the same inodes on both
                    os.mkdir(os.path.join(place, directory))
                    support.make_tree(os.path.join(place, directory, "f"), b"x")
                os.link(os.path.join(place, "y/f"), os.path.join(place, "z/g"))
            found, _ = self.walk_by(3, source)
            self.assertEqual(found, _found(source, walk.SerialLister()))
            plan = _replayed(source)
            families = {tuple(_path(twin) for twin in [f.leader, *f.followers]) for f in plan.families}
            self.assertEqual(families, {("d3/m/y/f", "d3/m/z/g"), ("d4/m/y/f", "d4/m/z/g")})
            pool = copying.make_pool(copytasks.FUNCTIONS, 1)
            said = copying.Said()
            options = facts.Options(copying.TOKEN, kept=Kept(links=True))
            transfer.copy(plan, pool, listing.Roots(pool), options, said)
            self.assertEqual((said.failures, said.lines), ([], []))
            self.assert_same_tree(source + "-copy", source)


def _found(source: str, lister: Any, follow: str = "none") -> Any:
    """All that a plan has of a source, or why there is none."""
    try:
        plan = copyplan.plan_copy_operations(
            [source], source + "-copy", follow=follow, keep_links=True, list_directories=lister
        )
    except (copyplan.CopyArgumentError, copyplan.UnreadableEntries) as exc:
        return str(exc)
    fields = ("mode", "owner", "links", "twins", "allocated", "shared", "identity")
    found = [
        [d.shown(), os.fsdecode(d.names), list(d.stats), *(getattr(d, name) for name in fields)]
        for d in walk.breadth_first(plan.trees)
    ]
    return json.loads(json.dumps(found))


def _replayed(source: str) -> copyplan.CopyPlan:
    """The plan that another node makes of a walk that was written down."""
    stream = io.StringIO()
    serial = walk.SerialLister()
    wishes: Dict[str, Any] = {"follow": "none", "keep_links": True}
    copyplan.plan_copy_operations(
        [source], source + "-copy", list_directories=rewalk.Recording(serial, stream), **wishes
    )
    stream.seek(0)
    return copyplan.plan_copy_operations(
        [source], source + "-copy", list_directories=rewalk.Replay(serial, stream), **wishes
    )


def _path(twin: Any) -> str:
    return os.path.join(*twin.directory.components(), twin.name)


class Copying(TestCase):
    """A tree copied by ranks is the tree copied by one process."""

    def setUp(self) -> None:
        self.ranks = 3
        self.workers = 2

    @contextlib.contextmanager
    def small(self) -> Iterator[None]:
        """Everything is large enough to be shared."""
        with copying.limits(64 * KIB, 16 * KIB), mock.patch.object(dealing, "LEAST", 64 * KIB):
            with mock.patch.object(dealing, "FILE_COST", 4 * KIB):
                yield

    def run_ranks(
        self, sources: List[str], destination: str, options: facts.Options, **wishes: Any
    ) -> Dict[str, Any]:
        """What the leader has to say."""
        os.makedirs(self.path("work"), exist_ok=True)
        work = os.open(support.make_temporary(), os.O_RDONLY)
        self.addCleanup(os.close, work)
        barrier = CONTEXT.Barrier(self.ranks)

        def rank(number: int) -> None:
            pool = copying.make_pool(copytasks.FUNCTIONS, self.workers)
            roots = listing.Roots(pool)
            crew = sharing.Crew(number, self.ranks, work, lambda: barrier.wait(60) and None, lambda: None)
            said = copying.Said()
            if number:
                sharing.help_out(crew, pool, roots, said, report.Summary())
            else:
                plan = copyplan.plan_copy_operations(sources, destination, **wishes)
                summary = transfer.copy(plan, pool, roots, options, said, crew=crew)
                fields = {k: v for k, v in vars(summary).items() if isinstance(v, (int, str))}
                fields.update(failures=said.failures, lines=said.lines, complete=summary.is_complete())
                with open(self.path("said"), "w", encoding="ascii") as file:
                    json.dump(fields, file)
            roots.close()
            pool.close()

        with self.small():
            codes = _together([functools.partial(rank, number) for number in range(self.ranks)])
        self.assertEqual(codes, [0] * self.ranks)
        with open(self.path("said"), encoding="ascii") as file:
            said: Dict[str, Any] = json.load(file)
        said["claimed"] = len(os.listdir(os.path.join(os.readlink(f"/proc/self/fd/{work}"), claims.CLAIMS)))
        return said

    def tree(self) -> Dict[str, Any]:
        return {
            "huge": Random(3 * MIB + 77, seed=1),
            "big": {f"b{index}": Random(70 * KIB + index, seed=index) for index in range(9)},
            "holes": Sparse(2 * MIB, {MIB + 5: b"data"}),
            **{f"d{i}": {f"f{j}": Random(100 * j, seed=j) for j in range(40)} for i in range(6)},
            "empty": {"e": {}},
            "links": {"l": Link("../huge"), "dangling": Link("nowhere")},
            "odd\udcff\n": {"\udcfe": b"x", "m": File(b"m", mode=0o600)},
        }

    def options(self, **wishes: Any) -> facts.Options:
        return facts.Options(copying.TOKEN, **wishes)

    def test_a_tree(self) -> None:
        source = self.make("s", self.tree())
        everything = ({}, {"verify": True}, {"fsync": True}, {"direct": "never"}, {"sparse": "never"})
        for number, wishes in enumerate(everything):
            with self.subTest(wishes=wishes):
                copy = self.path(f"c{number}")
                said = self.run_ranks([source], copy, self.options(**wishes), follow="none")
                self.assertEqual((said["failures"], said["lines"], said["complete"]), ([], [], True))
                self.assertEqual((said["files"], said["links"]), (253, 2))
                self.assert_same_tree(copy, source, modes=True)
                self.assert_no_leftovers(copy)
                self.assertGreater(said["claimed"], 1)

    def test_operands_of_all_kinds(self) -> None:
        self.make("s", {"a": Random(700 * KIB, seed=1), "l": Link("a"), "d": {"f": b"1", "g": b"2"}, "b": b"3"})
        self.make("c", {})
        operands = [self.path("s", name) for name in ("a", "l", "d", "b")]
        said = self.run_ranks(operands, self.path("c"), self.options(), follow="none")
        self.assertTrue(said["complete"], said)
        self.assert_same_tree(self.path("c"), self.path("s"))

    def test_what_exists_is_replaced_or_left(self) -> None:
        source = self.make("s", {"huge": Random(2 * MIB, seed=1), "f": b"new", "same": b"same", "d": {"x": b"y"}})
        for name in ("huge", "f", "d/x"):
            os.utime(self.path("s", name), (2 * 10**9, 2 * 10**9))
        copy = self.make("c", {"huge": File(b"old", mode=0o640), "f": b"old", "same": b"same", "other": b"o"})
        said = self.run_ranks([f"{source}/."], copy, self.options(), update=True)
        self.assertEqual((said["complete"], said["files"], said["unchanged"]), (True, 3, 1), said)
        self.assertEqual(os.stat(self.path("c", "huge")).st_mode & 0o777, 0o640)
        with open(self.path("c/other"), "rb") as file:
            self.assertEqual(file.read(), b"o")
        os.unlink(self.path("c/other"))
        self.assert_same_tree(copy, source)
        said = self.run_ranks([f"{source}/."], copy, self.options(), update=True, checksum=True)
        self.assertEqual((said["complete"], said["files"], said["same"]), (True, 0, 4), said)

    def test_hard_links_and_metadata(self) -> None:
        source = self.make("s", {"a": Random(900 * KIB, seed=1), "d": {"f": File(b"x", mode=0o4711)}, "e": {}})
        os.link(self.path("s/a"), self.path("s/e/b"))
        os.utime(self.path("s/a"), ns=(5, 123456789))
        os.utime(self.path("s/d"), ns=(7, 7))
        kept = Kept(mode=True, ownership=True, timestamps=True, links=True, xattr=True)
        said = self.run_ranks([source], self.path("c"), self.options(kept=kept), follow="none", keep_links=True)
        self.assertTrue(said["complete"], said)
        self.assert_same_tree(self.path("c"), source, modes=True, times=True)
        self.assertTrue(os.path.samefile(self.path("c/a"), self.path("c/e/b")))

    def test_a_part_that_fails_fails_the_file_once_and_leaves_nothing(self) -> None:
        source = self.make("s", {"huge": Random(3 * MIB, seed=1), "f": b"x", "d": {"g": b"y"}})
        move = copytasks.copy_extent

        def fail(worker: Any, extent: Any, fds: Any) -> Any:
            if extent.start >= MIB:
                raise OSError(5, "Input/output error")
            return move(worker, extent, fds)

        with mock.patch.dict(copytasks.FUNCTIONS, extent=fail):
            said = self.run_ranks([source], self.path("c"), self.options())
        self.assertEqual(said["failures"], [[self.path("s/huge"), "Input/output error"]])
        self.assertEqual((said["failed"], said["complete"], said["files"], said["not_tried"]), (1, False, 2, 0))
        self.assert_same_tree(self.path("c"), {"f": b"x", "d": {"g": b"y"}})
        self.assert_no_leftovers(self.path("c"))

    def test_a_source_that_changes_fails_on_whichever_rank_sees_it(self) -> None:
        source = self.make("s", {"huge": Random(3 * MIB, seed=1), "f": b"x"})
        commit = sharing.Lead._name_shared

        def touch(*args: Any) -> None:
            os.utime(self.path("s/huge"))
            commit(*args)

        with mock.patch.object(sharing.Lead, "_name_shared", touch):
            said = self.run_ranks([source], self.path("c"), self.options())
        self.assertEqual(len(said["failures"]), 1, said)  # it is not one of those that a single rank does
        self.assertIn("modification time has moved", said["failures"][0][1])
        self.assert_same_tree(self.path("c"), {"f": b"x"})
        self.assert_no_leftovers(self.path("c"))

    def test_failures_of_all_ranks_are_told(self) -> None:
        source = self.make("s", {f"d{i}": {f"f{j}": b"x" * 9000 for j in range(30)} for i in range(8)})
        copied = copytasks.copyfile.copy_file

        def fail(worker: Any, making: Any, job: Any) -> Any:
            if job.name == "f7":
                raise OSError(5, "Input/output error")
            return copied(worker, making, job)

        with mock.patch.object(copytasks.copyfile, "copy_file", fail):
            said = self.run_ranks([source], self.path("c"), self.options())
        self.assertEqual((said["failed"], said["files"], said["complete"]), (8, 232, False))
        wanted = [[self.path(f"s/d{i}/f7"), "Input/output error"] for i in range(8)]
        self.assertEqual(sorted(said["failures"]), wanted)

    def test_a_full_disk_stops_all(self) -> None:
        source = self.make("s", {f"d{i}": {f"f{j}": b"x" * 9000 for j in range(30)} for i in range(20)})

        def fail(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        with mock.patch.object(copytasks.copyfile, "copy_file", fail):
            said = self.run_ranks([source], self.path("c"), self.options())
        self.assertEqual((said["complete"], said["files"], said["stopped"]), (False, 0, "No space left on device"))
        self.assertLess(said["failed"], 60)
        self.assertEqual(said["failed"] + said["not_tried"], 600)


if __name__ == "__main__":
    support.main()
