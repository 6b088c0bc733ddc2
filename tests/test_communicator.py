# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""How ranks talk: by files, torch and MPI alike; and what becomes of a job when one of them does not talk any more."""

# Takes about 40 s
from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import stat
import time
import traceback
from typing import Any, Callable, Dict, List, Optional
from unittest import mock

import support
from support import TestCase, needs_root, slow

from mlperf_common.distributed import communicator, meeting
from mlperf_common.distributed.communicator import Files, MeetingError, RankFailed, Single
from mlperf_common.distributed.launch import Launch

CONTEXT = multiprocessing.get_context("fork")
ODD: List[Any] = [None, 0, "", "a\udcff\n", [1, [2, {"k": None}]], {"x": 1.5}, "long" * 100_000]


class Rank:
    """What a rank's process did: its result, or what it raised."""

    def __init__(self, path: str, process: Any) -> None:
        self.path = path
        self.process = process

    def end(self, timeout: float = 40) -> Any:
        """The result; an exception as (name, words); None where it was killed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.join()
            raise AssertionError("a rank hangs")
        if not os.path.exists(self.path):
            return None
        with open(self.path, encoding="ascii") as file:
            return json.load(file)


class Case(TestCase):
    def setUp(self) -> None:
        self.place = self.make("place", {})
        self.count = 0

    def start(
        self,
        ranks: int,
        body: Callable[[Files], Any],
        job: str = "job",
        only: Optional[List[int]] = None,
        **options: Any,
    ) -> List[Rank]:
        """A process for each rank (or only some), which calls body with its communicator."""
        self.count += 1
        started = []
        for rank in range(ranks) if only is None else only:
            path = self.path(f"result-{self.count}-{rank}")
            mine = Launch(rank, ranks, rank, job, "test")
            process = CONTEXT.Process(target=_run, args=(path, mine, self.place, body, options))
            process.start()
            self.addCleanup(process.join)
            self.addCleanup(process.kill)
            started.append(Rank(path, process))
        return started

    def run_ranks(self, ranks: int, body: Callable[[Files], Any], **options: Any) -> List[Any]:
        """What each rank's body returned, or (name, words) of what it raised."""
        return [rank.end() for rank in self.start(ranks, body, **options)]


def _run(path: str, launch: Launch, place: str, body: Callable[[Files], Any], options: Dict[str, Any]) -> None:
    try:
        with Files(launch, place, **options) as comm:
            result = body(comm)
    except BaseException as exc:
        if not isinstance(exc, (RankFailed, MeetingError, ValueError, KeyboardInterrupt)):
            traceback.print_exc()
        result = [type(exc).__name__, str(exc)]
    with open(path + ".new", "w", encoding="ascii") as file:
        json.dump(result, file)
    os.rename(path + ".new", path)  # a rank may be killed here, too


def until(condition: Callable[[], bool]) -> None:
    """Return when the condition is true; AssertionError after 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it does not come true")
        time.sleep(0.01)


def everything(comm: Any) -> Any:
    """Each collective with each root and odd values; what came out, the same on all ranks but for gathers."""
    found: List[Any] = []
    for root in range(comm.world_size):
        for value in ODD:
            found.append(comm.broadcast(value if comm.rank == root else "wrong", root))
        gathered = comm.gather([comm.rank, ODD[comm.rank % len(ODD)]], root)
        if comm.rank == root:
            expected = [[rank, ODD[rank % len(ODD)]] for rank in range(comm.world_size)]
            found.append(gathered == expected)
        else:
            found.append(gathered is None)
        comm.barrier()
    comm.check()
    return found == [*ODD, True] * comm.world_size


class Collectives(Case):
    def test_alone(self) -> None:
        self.assertTrue(everything(Single()))

    def test_files(self) -> None:
        for ranks in (1, 2, 4, 8):
            with self.subTest(ranks=ranks):
                self.assertEqual(self.run_ranks(ranks, everything), [True] * ranks)
                self.assertEqual(os.listdir(self.place), [])

    def test_nobody_leaves_a_barrier_before_the_last_one_comes(self) -> None:
        def body(comm: Files) -> Any:
            time.sleep(0.3 if comm.rank == 2 else 0)
            came = time.time()
            comm.barrier()
            return [came, time.time()]

        times = self.run_ranks(4, body)
        self.assertGreaterEqual(min(left for _, left in times), max(came for came, _ in times))

    @slow
    def test_many_collectives_leave_few_files(self) -> None:
        def body(comm: Files) -> Any:
            for number in range(60):
                comm.barrier()
                comm.broadcast(number, number % comm.world_size)
                comm.gather(number, 0)
            comm.barrier()
            return len([name for name in os.listdir(comm._place.fd) if name.startswith("say.")])

        self.assertLess(max(self.run_ranks(4, body)), 150)  # of 600

    def test_what_only_this_user_may_enter(self) -> None:
        def body(comm: Files) -> Any:
            comm.broadcast(1)
            comm.barrier()
            place = comm._place.fd
            modes = []
            for name in os.listdir(place):
                with contextlib.suppress(FileNotFoundError):  # said, heard, and removed meanwhile
                    modes.append(stat.S_IMODE(os.stat(name, dir_fd=place).st_mode))
            comm.barrier()
            return [stat.S_IMODE(os.stat(place).st_mode), *modes]

        old = os.umask(0)
        try:
            for directory, *modes in self.run_ranks(2, body):
                self.assertEqual((directory, set(modes)), (0o700, {0o600}))
        finally:
            os.umask(old)

    def test_a_directory_of_its_own_where_the_job_has_no_name(self) -> None:
        self.assertEqual(self.run_ranks(3, everything, job=""), [True] * 3)
        self.assertEqual(os.listdir(self.place), [])
        self.make("place/other", b"")
        for name, words in self.run_ranks(2, everything, job=""):
            self.assertEqual((name, "it must be empty, but has 'other'" in words), ("MeetingError", True))


class Again(Case):
    def test_a_job_that_meets_again_and_again(self) -> None:
        mine = functools.partial(Launch, world_size=3, local_rank=None, job="job", launcher="test")

        def body(comm: Files) -> Any:
            comm.close()
            for _ in range(5):
                with Files(mine(comm.rank), self.place, wait=5.0) as again:
                    again.barrier()
            return "well"

        self.assertEqual(self.run_ranks(3, body), ["well"] * 3)
        self.assertEqual(os.listdir(self.place), [])

    @slow
    def test_nobody_waits_for_a_pulse_that_rank_0_has_removed(self) -> None:
        def body(comm: Files) -> Any:
            comm.barrier()
            if comm.rank == 0:
                time.sleep(0.3)  # the others are in their longest pauses by then
            began = time.monotonic()
            comm.close()
            took = time.monotonic() - began
            if comm.rank == 0:
                time.sleep(2)  # it lives on: nobody is to wait for its death
            return took

        for _ in range(4):
            for took in self.run_ranks(3, body):
                self.assertLess(took, 1.5)


class Leftovers(Case):
    """Whatever an earlier job of the same name has left is never taken for this one's."""

    def test_of_a_job_that_was_killed(self) -> None:
        def sleep(comm: Files) -> None:
            comm.barrier()
            time.sleep(60)

        for _ in range(3):
            ranks = self.start(3, sleep)
            deadline = time.monotonic() + 20
            while len([n for d in os.listdir(self.place) for n in os.listdir(self.path("place", d))]) < 10:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            for rank in ranks:
                os.kill(rank.process.pid, signal.SIGKILL)
            for rank in ranks:
                rank.process.join()
            self.assertNotEqual(os.listdir(self.place), [])
            self.assertEqual(self.run_ranks(3, everything), [True] * 3)
            self.assertEqual(os.listdir(self.place), [])

    def test_made_up_ones(self) -> None:
        directory = f".fastcp-{os.geteuid()}-test-job"
        stranger = ["0" * 32, 1, 3, "elsewhere", "kernel", 1, 1]
        for name, value in (
            ("hello.0", stranger), ("hello.1", stranger), ("welcome", ["abcd", [stranger] * 3, ""]),
            ("welcome", ["abcd", [stranger] * 3, "the job has failed"]), ("ready.abcd.1", "0" * 32),
            ("say.abcd.1.0", [1]), ("hello.0", {"of": "another version"}), ("hello.1", [1, 2]), ("welcome", 5),
            ("welcome", ["abcd", 5, ""]), ("welcome", ["abcd", [[1]], ""]),
        ):  # fmt: skip
            with self.subTest(name=name, value=value):
                os.mkdir(self.path("place", directory), 0o700)
                with open(self.path("place", directory, name), "w", encoding="ascii") as file:
                    json.dump(value, file)
                self.assertEqual(self.run_ranks(3, everything), [True] * 3)
                self.assertEqual(os.listdir(self.place), [])

    def test_names_that_are_not_files_of_ours(self) -> None:
        directory = self.path("place", f".fastcp-{os.geteuid()}-test-job")
        for make in (lambda path: os.symlink("/dev/null", path), os.mkfifo, os.mkdir):
            os.mkdir(directory, 0o700)
            make(os.path.join(directory, "welcome"))
            with self.subTest(make=make):
                end = self.start(2, everything, only=[1], wait=1.0)[0].end()
                self.assertEqual(end, ["MeetingError", f"{directory + '/welcome'!r}: not a file of ours"])
            support.remove_tree(directory)

    def test_places_that_are_not_safe(self) -> None:
        path = self.path("place", f".fastcp-{os.geteuid()}-test-job")

        def link() -> None:
            os.symlink(self.tmp, path)

        def file() -> None:
            with open(path, "w", encoding="ascii"):
                pass

        def wide() -> None:
            os.mkdir(path)
            os.chmod(path, 0o750)

        no_directory, not_private = "Not a directory", "others may enter it (mode 0750)"
        for make, words in ((link, no_directory), (file, no_directory), (wide, not_private)):
            with self.subTest(words):
                make()
                for name, said in self.run_ranks(2, everything):
                    self.assertEqual(name, "MeetingError")
                    self.assertIn(words, said)
                os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

    @needs_root
    def test_a_place_of_somebody_else(self) -> None:
        path = self.path("place", f".fastcp-{os.geteuid()}-test-job")
        os.mkdir(path, 0o700)
        os.chown(path, 12345, 12345)
        for name, said in self.run_ranks(2, everything):
            self.assertEqual((name, "it is not yours" in said), ("MeetingError", True))

    def test_a_place_that_is_not_there(self) -> None:
        os.rmdir(self.place)
        for name, said in self.run_ranks(2, everything):
            self.assertEqual((name, "No such file" in said), ("MeetingError", True))


class Ends(Case):
    """One rank fails, dies, is stopped or never comes: the others end with its number, and soon."""

    def check(self, ends: List[Any], rank: int, words: str, but: int) -> None:
        for number, end in enumerate(ends):
            if number != but:
                self.assertEqual(end[0], "RankFailed", ends)
                self.assertRegex(end[1], f"^rank {rank} \\(.*\\) {words}")

    @slow
    def test_a_rank_that_fails(self) -> None:
        for victim in range(3):
            for wait in ("barrier", "gather", "broadcast", "check"):

                def body(comm: Files, victim: int, wait: str) -> None:
                    comm.barrier()
                    if comm.rank == victim:
                        raise ValueError("of its own")
                    while True:
                        if wait == "check":
                            time.sleep(0.05)
                            comm.check()
                        elif wait == "barrier":
                            comm.barrier()
                        else:
                            time.sleep(0.01)
                            getattr(comm, wait)(1, victim)

                with self.subTest(victim=victim, wait=wait):
                    started = time.monotonic()
                    ends = self.run_ranks(3, functools.partial(body, victim=victim, wait=wait))
                    self.assertEqual(ends[victim], ["ValueError", "of its own"])
                    self.check(ends, victim, "failed: of its own", victim)
                    self.assertLess(time.monotonic() - started, 8)
                    self.assertEqual(os.listdir(self.place), [])

    def test_a_rank_that_is_killed(self) -> None:
        def body(comm: Files, victim: int) -> None:
            comm.barrier()
            if comm.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()

        for victim in range(3):
            with self.subTest(victim=victim):
                started = time.monotonic()
                ends = self.run_ranks(3, functools.partial(body, victim=victim))
                self.assertIsNone(ends[victim])
                self.check(ends, victim, "has died: its process is gone", victim)
                self.assertLess(time.monotonic() - started, 5)
                self.assertEqual(os.listdir(self.place), [])

    def test_a_message_that_was_removed_with_its_dead_rank(self) -> None:
        """Rank 0 posts and dies, rank 2 finds it dead and removes all that it made, before rank 1 reads."""
        seen = self.path("seen")

        def body(comm: Files) -> None:
            comm.barrier()
            if comm.rank != 1:
                comm.barrier()
                if comm.rank == 0:
                    until(lambda: os.path.exists(seen))
                    os.kill(os.getpid(), signal.SIGKILL)
                comm.barrier()
            comm.gather(None)
            posted = comm._number + 1
            until(lambda: comm._watch(0).look().posted == posted)
            self.make("seen", b"")
            until(lambda: not [name for name in os.listdir(comm._place.fd) if name.endswith("%d.0" % posted)])
            comm.broadcast(None)

        ends = self.run_ranks(3, body)
        self.assertIsNone(ends[0])
        self.check(ends, 0, "has died: its process is gone", 0)

    @slow
    def test_a_rank_that_is_killed_at_any_moment(self) -> None:
        def body(comm: Files) -> Any:
            for root in range(3):
                comm.barrier()
                comm.gather(root, root)
            return "well"

        ended_all = 0
        for number in range(18):  # from before they meet (about 0.05 s) until after they have left
            victim, moment = number % 3, 0.01 * number
            with self.subTest(victim=victim, moment=moment):
                ranks = self.start(3, body, wait=3.0, dead=2.0)
                time.sleep(moment)
                os.kill(ranks[victim].process.pid, signal.SIGKILL)
                killed = time.monotonic()
                ends = [rank.end() for rank in ranks]
                self.assertLess(time.monotonic() - killed, 15)
                for end in ends[:victim] + ends[victim + 1 :]:
                    if end != "well":
                        self.assertIn(end[0], ("RankFailed", "MeetingError"))
                        self.assertRegex(end[1], f"rank {victim}\\b|these have not come: {victim}\\b")
                        ended_all += 1
                left = self.left()
                if victim or ends[1:] != ["well"] * 2:  # else all had left, and rank 0 was to clean up
                    self.assertEqual(left, [])
        self.assertGreater(ended_all, 0)

    def left(self) -> List[str]:
        """What was left in the ranks' directories, now removed; but for a hello that was killed before it was one."""
        left = [name for place in os.listdir(self.place) for name in os.listdir(self.path("place", place))]
        support.remove_tree(self.place)
        os.mkdir(self.place)
        return [name for name in left if not name.startswith("hello.")]

    @slow
    def test_a_rank_that_is_stopped_or_on_a_node_that_is_gone(self) -> None:
        def body(comm: Files, victim: int) -> None:
            comm.barrier()
            if comm.rank == victim:
                os.kill(os.getpid(), signal.SIGSTOP)
            comm.barrier()

        for victim in (0, 2):
            with self.subTest(victim=victim):
                ranks = self.start(3, functools.partial(body, victim=victim), dead=2.0)
                ends = [None if number == victim else rank.end() for number, rank in enumerate(ranks)]
                self.check(ends, victim, "has died: no sign of life for 2 s", victim)
                os.kill(ranks[victim].process.pid, signal.SIGCONT)
                self.assertEqual(ranks[victim].end()[0], "RankFailed")

    @slow
    def test_a_rank_that_computes_for_long_is_not_dead(self) -> None:
        def body(comm: Files) -> Any:
            comm.barrier()
            if comm.rank == 1:
                time.sleep(5)
            comm.barrier()
            return "well"

        self.assertEqual(self.run_ranks(3, body, dead=2.0), ["well"] * 3)

    @slow
    def test_a_rank_that_never_comes(self) -> None:
        for missing in range(3):
            with self.subTest(missing=missing):
                only = [rank for rank in range(3) if rank != missing]
                for rank in self.start(3, everything, only=only, wait=1.0, dead=1.0):
                    name, words = rank.end()
                    self.assertEqual(name, "MeetingError")
                    number = 0 if missing == 0 else missing
                    told = f"have not come: {number} " if missing else "rank 0 has not welcomed this rank"
                    self.assertIn(told, words)
                self.assertEqual(os.listdir(self.place), [])

    def test_ranks_of_jobs_of_different_sizes(self) -> None:
        for sizes in ((2, 3), (3, 2)):
            with self.subTest(sizes=sizes):
                ranks = self.start(sizes[0], everything, only=[0, *range(2, sizes[0])], dead=2.0)
                ranks += self.start(sizes[1], everything, only=[1])
                words = r"the ranks do not meet: rank 0 \(.*\) is one of %d ranks, rank 1 \(.*\) one of %d" % sizes
                for name, said in [rank.end(10) for rank in ranks]:
                    self.assertIn(name, ("MeetingError", "RankFailed"))
                    self.assertRegex(said, words)
                self.assertEqual(os.listdir(self.place), [])

    def test_two_processes_that_are_one_rank(self) -> None:
        for rank in (0, 1):
            with self.subTest(rank=rank):
                # While the third one is missing, both are there and see each other.
                start = functools.partial(self.start, 3, everything, wait=3.0, dead=2.0)
                twins = start(only=[rank]) + start(only=[rank])
                time.sleep(1)
                ranks = start(only=[number for number in range(3) if number != rank])
                ends = [rank.end() for rank in twins]
                told = [end for end in ends if f"two processes are rank {rank}: " in str(end)]
                self.assertEqual([end[0] for end in told], ["MeetingError"])
                if rank:
                    self.assertEqual([ends[0] is True, ends[1] is True].count(True), 1)
                for other in ranks:
                    other.end()
                self.assertEqual(os.listdir(self.place), [])

    def test_a_rank_that_leaves_before_the_others(self) -> None:
        def body(comm: Files) -> Any:
            comm.barrier()
            return "left" if comm.rank == 1 else comm.gather(1)

        ends = self.run_ranks(2, body)
        self.assertEqual(ends, [["RankFailed", "rank 1 has left the job"], "left"])

    def test_a_signal_is_told(self) -> None:
        def body(comm: Files) -> None:
            comm.barrier()
            if comm.rank == 1:
                raise KeyboardInterrupt
            comm.barrier()

        ends = self.run_ranks(2, body)
        self.check(ends, 1, "failed: KeyboardInterrupt", 1)


class Small(TestCase):
    def test_pulses(self) -> None:
        for pulse in (
            meeting.Pulse(), meeting.Pulse(10**12, 7, None, True), meeting.Pulse(1, 2, (3, "why \udcff" * 10), False),
            meeting.Pulse(1, 2, (3, "x" * 5000), False), meeting.Pulse(3, 4, None, True, True),
            meeting.Pulse(5, 6, None, False, True, (7, 1 << 60)),
        ):  # fmt: skip
            data = meeting.encode_pulse(pulse)
            self.assertEqual(len(data), meeting.PULSE_LENGTH)
            again = meeting.decode_pulse(data)
            self.assertIsNotNone(again)
            if again and pulse.failed and again.failed:
                self.assertTrue(pulse.failed[1].startswith(again.failed[1][:1000]))
                again = again._replace(failed=pulse.failed)
            self.assertEqual(again, pulse)

    def test_a_torn_pulse_is_none(self) -> None:
        one, other = (meeting.encode_pulse(meeting.Pulse(n, n, (n, "w" * 900), False)) for n in (1, 2))
        for at in range(0, len(one), 7):
            mixed = one[:at] + other[at:]
            self.assertIn(meeting.decode_pulse(mixed), (None, meeting.decode_pulse(one), meeting.decode_pulse(other)))
        self.assertIsNone(meeting.decode_pulse(b""))

    def test_nfs(self) -> None:
        table = (
            "22 1 0:20 / / rw - ext4 /dev/vda rw\n30 22 0:31 / /nfs rw shared:1 - nfs4 server:/x rw\n"
            "31 30 0:32 / /nfs/local\\040disk rw - xfs /dev/x rw\n32 22 0:33 / /nfsx rw - tmpfs none rw\n"
        )
        with mock.patch.object(meeting, "_read_text", lambda path: table):
            paths = ("/nfs", "/nfs/a/b", "/nfs/local disk/c", "/nfsx", "/tmp", "/")
            found = {path: meeting.is_nfs(path) for path in paths}
        self.assertEqual([path for path, nfs in found.items() if nfs], ["/nfs", "/nfs/a/b"])

    def test_processes(self) -> None:
        me = meeting.this_process(Launch(0, 1, 0, "", "test"))
        self.assertFalse(meeting.is_gone(me, me))
        self.assertTrue(meeting.is_gone(me._replace(start=me.start + 1), me))
        self.assertFalse(meeting.is_gone(me._replace(kernel="another", pid=1, start=7), me))
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        self.assertEqual(meeting.start_of(child), 0)  # a zombie does nothing any more
        os.waitpid(child, 0)

    def test_what_a_killed_rank_leaves_is_its_own(self) -> None:
        other = ["hello.11", "hello.2", "say.ab.1.0", "say.ab.1.0.00c0ffee.new", "welcome"]
        own = ["hello.1", "pulse.ab.1", "pulse.ab.1.new", "ready.ab.1", "say.ab.2.1", "say.ab.3.1.00c0ffee.new"]
        place = meeting.open_place(self.make("place", {}), Launch(0, 3, 0, "job", "test"))
        self.addCleanup(place.close)
        for name in other + own:
            self.make(os.path.join(place.path, name), b"")
        with contextlib.suppress(OSError):  # it is not empty
            place.remove_all_of({1})
        self.assertEqual(sorted(os.listdir(place.fd)), other)
        place.remove_all_of({0, 2, 11})
        self.assertEqual(os.listdir(self.path("place")), [])

    def test_torch_is_not_imported_to_find_out(self) -> None:
        done = support.run(
            [
                support.sys.executable,
                "-c",
                "import sys; from mlperf_common.distributed import communicator as c;"
                "print(c.initialised_torch(), 'torch' in sys.modules, 'mpi4py' in sys.modules)",
            ],
            cwd=support.ROOT,
            expect=0,
        )
        self.assertEqual(done.stdout, "None False False\n")
        self.assertIsNone(communicator.initialised_torch())


if __name__ == "__main__":
    support.main()
