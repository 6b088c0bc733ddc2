# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One temporary directory for all ranks: over files, in a group of torch.distributed, under MPI.

torch and mpi4py are not of this project: FILEIO_TORCH_PYTHON and FILEIO_MPI_PYTHON name interpreters that have them.
"""

# Takes about 30 s
from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Dict, List
from unittest import mock

import launchers
import support
import test_communicator
from support import ROOT, TestCase, needs, slow

from mlperf_common.distributed import communicator
from mlperf_common.distributed.communicator import Single
from mlperf_common.distributed.tempdir import shared_tempdir


class CollectivesOnly:
    """A communicator that, as torch's and MPI's, can tell of a failure by a collective alone."""

    def __init__(self, comm: Any) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.broadcast, self.barrier, self.check = comm.broadcast, comm.barrier, comm.check
        self.gathers = 0
        self._comm = comm

    def gather(self, obj: Any, root: int = 0) -> Any:
        self.gathers += 1
        return self._comm.gather(obj, root)

    def fail(self, reason: str) -> bool:
        return False


class OverFiles(test_communicator.Case):
    def body(self, comm: Any, failing: int = -1, killed: int = -1, first: int = -1) -> Any:
        """Every rank puts a file there and sees those of all."""
        if comm.rank == first:
            raise ValueError("before")
        with shared_tempdir(comm, dir=self.tmp, prefix="together-") as path:
            with open(os.path.join(path, str(comm.rank)), "w", encoding="ascii"):
                pass
            comm.barrier()
            seen = sorted(os.listdir(path))
            comm.barrier()
            if comm.rank == failing:
                raise ValueError("mine")
            if comm.rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
        return [path, seen, os.path.exists(path)]

    def left(self) -> List[str]:
        return [name for name in os.listdir(self.tmp) if name.startswith("together-")]

    def test_the_same_path_for_all_and_gone_afterwards(self) -> None:
        for ranks in (1, 2, 4):
            with self.subTest(ranks=ranks):
                results = self.run_ranks(ranks, self.body)
                self.assertEqual(len({path for path, _, _ in results}), 1)
                self.assertTrue(os.path.basename(results[0][0]).startswith("together-"))
                self.assertEqual([seen for _, seen, _ in results], [[str(r) for r in range(ranks)]] * ranks)
                self.assertFalse(results[0][2])
                self.assertEqual(self.left(), [])

    @slow
    def test_a_body_that_raises_ends_all(self) -> None:
        for failing in range(3):
            with self.subTest(failing=failing):
                results = self.run_ranks(3, functools.partial(self.body, failing=failing))
                for rank, (name, words) in enumerate(results):
                    if rank == failing:
                        self.assertEqual((name, words), ("ValueError", "mine"))
                    else:
                        self.assertEqual(name, "RankFailed")
                        self.assertRegex(words, f"^rank {failing} \\(.*\\) failed: ValueError: mine$")
                self.assertEqual(self.left(), [])

    @slow
    def test_a_rank_that_is_killed_ends_all(self) -> None:
        for killed in range(3):
            with self.subTest(killed=killed):
                results = self.run_ranks(3, functools.partial(self.body, killed=killed))
                self.assertIsNone(results[killed])
                for rank, result in enumerate(results):
                    if rank != killed:
                        self.assertEqual(result[0], "RankFailed")
                self.assertEqual(self.left(), [])

    def test_a_rank_that_fails_before(self) -> None:
        results = self.run_ranks(3, functools.partial(self.body, first=1))
        self.assertEqual([name for name, _ in results], ["RankFailed", "ValueError", "RankFailed"])
        self.assertEqual(self.left(), [])

    def test_a_directory_that_cannot_be_made(self) -> None:
        def body(comm: Any) -> Any:
            try:
                with shared_tempdir(comm, dir=self.path("missing")):
                    return "inside"
            except (OSError, communicator.RankFailed) as exc:
                return [type(exc).__name__, str(exc)]

        results = self.run_ranks(3, body)
        self.assertEqual(results[0][0], "FileNotFoundError")
        for name, words in results[1:]:
            self.assertEqual(name, "RankFailed")
            self.assertIn("rank 0 cannot make a temporary directory", words)

    def test_whatever_keeps_rank_0_from_making_it_is_told(self) -> None:
        def body(comm: Any) -> Any:
            with shared_tempdir(CollectivesOnly(comm), dir=self.tmp, prefix="a\0b") as path:
                return path

        results = self.run_ranks(3, body)
        self.assertEqual(results[0][0], "ValueError")
        self.assertIn("null", results[0][1])
        told = f"rank 0 cannot make a temporary directory: ValueError: {results[0][1]}"
        self.assertEqual(results[1:], [["RankFailed", told]] * 2)

    def test_a_body_that_is_interrupted_ends_all(self) -> None:
        def body(comm: Any, collectives: bool) -> Any:
            try:
                with shared_tempdir(CollectivesOnly(comm) if collectives else comm, dir=self.tmp):
                    if comm.rank == 1:
                        raise KeyboardInterrupt
            except BaseException as exc:  # here, so that the end of the communicator tells nobody
                return [type(exc).__name__, str(exc)]

        for collectives in (True, False):
            with self.subTest(collectives=collectives):
                results = self.run_ranks(3, functools.partial(body, collectives=collectives))
                self.assertEqual(results.pop(1), ["KeyboardInterrupt", ""])
                for name, words in results:
                    self.assertEqual(name, "RankFailed")
                    self.assertRegex(words, "^rank 1 \\(.*\\) failed: KeyboardInterrupt$")

    def test_one_within_another_ends_all(self) -> None:
        """Where only a collective tells, a rank that left the inner one by a RankFailed must still take part in it."""

        def body(comm: Any, failing: int) -> Any:
            comm = CollectivesOnly(comm)
            try:
                with shared_tempdir(comm, dir=self.tmp, prefix="together-"):
                    with shared_tempdir(comm, dir=self.tmp, prefix="together-"):
                        if comm.rank == failing:
                            raise ValueError("mine")
            except (ValueError, communicator.RankFailed) as exc:
                return [type(exc).__name__, str(exc), comm.gathers]

        for failing in range(3):
            with self.subTest(failing=failing):
                results = self.run_ranks(3, functools.partial(body, failing=failing))
                # Two exchanges; what a barrier gathers is not counted.
                self.assertEqual(results.pop(failing), ["ValueError", "mine", 2])
                for name, words, exchanges in results:
                    self.assertEqual((name, exchanges), ("RankFailed", 2))
                    self.assertRegex(words, f"^rank {failing} \\(.*\\) failed: ValueError: mine$")
                self.assertEqual(self.left(), [])

    def test_a_relative_directory_and_ranks_that_go_elsewhere(self) -> None:
        def body(comm: Any) -> Any:
            os.chdir(self.tmp)
            with shared_tempdir(comm, dir=".", prefix="together-") as path:
                os.chdir("/")
                return [path, os.path.isdir(path)]

        for path, there in self.run_ranks(2, body):
            self.assertEqual((os.path.dirname(path), there), (self.tmp, True))
        self.assertEqual(self.left(), [])

    def test_a_rank_that_still_writes_there_when_another_fails(self) -> None:
        def body(comm: Any) -> None:
            with shared_tempdir(comm, dir=self.tmp, prefix="together-") as path:
                comm.barrier()
                if comm.rank == 2:
                    time.sleep(0.2)
                    raise ValueError("mine")
                end = time.monotonic() + 3  # less than rank 0 tries to remove what it is filled with
                while comm.rank == 1 and time.monotonic() < end and os.path.isdir(path):
                    with contextlib.suppress(FileNotFoundError):
                        os.close(os.open(os.path.join(path, str(time.monotonic_ns())), os.O_CREAT | os.O_WRONLY))
                comm.barrier()

        results = self.run_ranks(3, body)
        self.assertEqual([name for name, _ in results], ["RankFailed", "RankFailed", "ValueError"])
        self.assertEqual(self.left(), [])


class Alone(TestCase):
    def test_no_communicator_is_one_process(self) -> None:
        with mock.patch.dict(os.environ, clear=False):
            for comm in (None, Single()):
                with shared_tempdir(comm, dir=self.tmp) as path:
                    self.assertTrue(os.path.isdir(path))
                self.assertFalse(os.path.exists(path))
        with self.assertRaisesRegex(ValueError, "its own"), shared_tempdir(dir=self.tmp):
            raise ValueError("its own")
        self.assertEqual(os.listdir(self.tmp), [])

    def test_an_exception_of_its_own_is_kept_where_the_others_cannot_be_told(self) -> None:
        alone = Single()
        with mock.patch.multiple(alone, create=True, fail=lambda _: False, gather=mock.Mock(side_effect=OSError)):
            with self.assertRaisesRegex(ValueError, "its own"), shared_tempdir(alone, dir=self.tmp):
                raise ValueError("its own")
            self.assertEqual(alone.gather.call_count, 1)
        self.assertEqual(os.listdir(self.tmp), [])

    def test_a_launcher_without_a_group_is_an_error(self) -> None:
        env = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
        with mock.patch.dict(os.environ, env), self.assertRaisesRegex(ValueError, "rank 1 of 2 .* pass a communicator"):
            with shared_tempdir(dir=self.tmp):
                self.fail("unreachable")
        self.assertEqual(os.listdir(self.tmp), [])


# What a rank does: argv is the directory and which rank fails; a line of JSON says how it went.
PROGRAM = """
import json, os, sys
sys.path.insert(0, {root!r})
from mlperf_common.distributed.tempdir import shared_tempdir
{begin}
failing = int(sys.argv[2])
said = [rank]
try:
    # One within the other: what ends the inner one must end the outer one too.
    with shared_tempdir({comm}dir=sys.argv[1]), shared_tempdir({comm}dir=sys.argv[1]) as path:
        open(os.path.join(path, str(rank)), "w").close()
        {barrier}
        said += [path, sorted(os.listdir(path))]
        {barrier}
        if rank == failing:
            raise ValueError("mine")
    said.append("left")
except Exception as exc:
    said += [type(exc).__name__, str(exc)]
os.write(1, ("said " + json.dumps(said) + "\\n").encode())  # whole, whoever else prints
{end}
"""
TORCH = PROGRAM.format(
    root=ROOT,
    begin="import torch.distributed as dist; dist.init_process_group('gloo'); rank = dist.get_rank()",
    comm="",
    barrier="dist.barrier()",
    end="dist.destroy_process_group()",
)
MPI = PROGRAM.format(
    root=ROOT,
    begin="from mlperf_common.distributed.communicator import Mpi; comm = Mpi(); rank = comm.rank",
    comm="comm, ",
    barrier="comm.barrier()",
    end="",
)
COLLECTIVES = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
{begin}
import test_communicator
os.write(1, b"%r\\n" % test_communicator.everything(comm))
{end}
"""


def interpreter(case: TestCase, variable: str, module: str) -> str:
    """The Python that has a module; skips where there is none."""
    program = os.environ.get(variable, sys.executable)
    if subprocess.run([program, "-c", f"import {module}"], stderr=subprocess.DEVNULL, check=False).returncode:
        case.skipTest(f"{variable}: no Python with {module}")
    return program


class Real(TestCase):
    def check(self, outputs: List[str], failing: int) -> None:
        """What the ranks say of a directory that they shared."""
        said = sorted(json.loads(line[5:]) for text in outputs for line in text.splitlines() if line[:5] == "said ")
        count = len(said)
        self.assertEqual([line[0] for line in said], list(range(count)))
        for line in said:
            self.assertEqual(line[1:3], [said[0][1], [str(rank) for rank in range(count)]])
        for line in said:
            if failing < 0:
                self.assertEqual(line[3:], ["left"])
            elif line[0] == failing:
                self.assertEqual(line[3:], ["ValueError", "mine"])
            else:
                self.assertEqual(line[3], "RankFailed")
                self.assertRegex(line[4], f"^rank {failing} \\(.*\\) failed: ValueError: mine$")
        self.assertEqual(os.listdir(self.tmp), [])


@slow
class InTorch(Real):
    def ranks(self, count: int, program: str, *words: str) -> List[str]:
        """Run a program as so many ranks of a group of torch."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        python = interpreter(self, "FILEIO_TORCH_PYTHON", "torch")
        env: Dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        started = [
            support.start([python, "-c", program, *words], env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE)
            for rank in range(count)
        ]
        outputs = [process.communicate(timeout=90)[0].decode() for process in started]
        self.assertEqual([process.returncode for process in started], [0] * count)
        return outputs

    def test_two_and_four_processes(self) -> None:
        for count, failing in ((2, -1), (4, 2)):
            with self.subTest(count=count, failing=failing):
                self.check(self.ranks(count, TORCH, self.tmp, str(failing)), failing)

    def test_collectives(self) -> None:
        begin = (
            "import torch.distributed as dist; dist.init_process_group('gloo')\n"
            "from mlperf_common.distributed.communicator import Torch; comm = Torch()"
        )
        program = COLLECTIVES.format(root=ROOT, begin=begin, end="dist.destroy_process_group()")
        self.assertEqual(self.ranks(3, program), ["True\n"] * 3)

    def test_a_part_of_the_group(self) -> None:
        begin = (
            "import torch.distributed as dist; dist.init_process_group('gloo')\n"
            "group = dist.new_group([1, 2])\n"
            "from mlperf_common.distributed.communicator import Single, Torch\n"
            "comm = Torch(group) if dist.get_rank() else Single()"
        )
        program = COLLECTIVES.format(root=ROOT, begin=begin, end="dist.barrier(); dist.destroy_process_group()")
        self.assertEqual(self.ranks(3, program), ["True\n"] * 3)


@slow
@needs("mpirun.openmpi")
class UnderMpi(Real):
    def ranks(self, count: int, program: str, *words: str) -> List[str]:
        python = interpreter(self, "FILEIO_MPI_PYTHON", "mpi4py.MPI")
        argv = [*launchers.mpirun(count), python, "-c", program, *words]
        return [support.run(argv, timeout=90, expect=0).stdout]

    def test_four_ranks(self) -> None:
        for failing in (-1, 0, 3):
            with self.subTest(failing=failing):
                self.check(self.ranks(4, MPI, self.tmp, str(failing)), failing)

    def test_collectives(self) -> None:
        begin = "from mlperf_common.distributed.communicator import Mpi; comm = Mpi()"
        program = COLLECTIVES.format(root=ROOT, begin=begin, end="")
        self.assertEqual(self.ranks(4, program), ["True\n" * 4])


class Waiting(test_communicator.Case):
    def test_rank_0_waits_until_the_last_one_leaves(self) -> None:
        def body(comm: Any) -> Any:
            with shared_tempdir(comm, dir=self.tmp) as path:
                if comm.rank == 2:
                    time.sleep(0.5)
                    return os.path.exists(path)
            return not os.path.exists(path) or comm.rank != 0

        self.assertEqual(self.run_ranks(3, body), [True] * 3)


if __name__ == "__main__":
    support.main()
