# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job talk: broadcast, gather and barrier, by four means that look the same.

``Single`` is a job of one. ``Torch`` uses an initialised torch.distributed group, ``Mpi`` mpi4py, ``Files`` (in the
module ``meeting``) plain files in a directory that all ranks see, where there is neither.

Promises: every rank gets what was sent; with ``Files`` a rank that fails or dies ends the others. Not promised: that a
collective which some rank never calls returns, where torch or MPI do not notice it.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any, Callable, List, Optional, Protocol, Tuple

from mlperf_common.distributed.meeting import Files, MeetingError, RankFailed

__all__ = ["Communicator", "Files", "MeetingError", "Mpi", "RankFailed", "Single", "Torch", "initialised_torch"]


class Communicator(Protocol):
    """What all of them have."""

    rank: int
    world_size: int

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The ``obj`` of the rank ``root``, on every rank."""

    def gather(self, obj: Any, root: int = 0) -> Optional[List[Any]]:
        """On the rank ``root`` the ``obj`` of every rank, in order; None on the others."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def check(self) -> None:
        """Raise RankFailed if it is known that a rank has failed or died."""

    def fail(self, reason: str) -> bool:
        """Tell the other ranks, whatever they do, that this one has failed; False where only a collective could."""


class Single:
    """One process alone."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.on_check: Callable[[], None] = lambda: None

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """``obj`` itself."""
        return obj

    def gather(self, obj: Any, root: int = 0) -> Optional[List[Any]]:
        """``[obj]``."""
        return [obj]

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def check(self) -> None:
        """There is nobody who could fail."""
        self.on_check()

    def reported(self) -> Tuple[int, int]:
        """Nobody else does anything."""
        return 0, 0

    def fail(self, reason: str) -> bool:
        """There is nobody to be told."""
        return True


class Torch:
    """An initialised process group of torch.distributed; None: the default one. What it sends is pickled.

    By tensors of bytes: torch's own collectives of objects need NumPy (ran: 2.13), which not every torch comes with,
    and NCCL has no gather of objects.
    """

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed

        self._torch = torch
        self._dist = torch.distributed
        self._group = group
        self.rank: int = self._dist.get_rank(group)
        self.world_size: int = self._dist.get_world_size(group)

    def _device(self) -> Any:
        """Where the group's backend wants its tensors."""
        nccl = self._dist.get_backend(self._group) == "nccl"
        return self._torch.device("cuda", self._torch.cuda.current_device()) if nccl else self._torch.device("cpu")

    def _tensor(self, data: bytes, length: int) -> Any:
        tensor = self._torch.zeros(length, dtype=self._torch.uint8)
        if data:
            tensor[: len(data)] = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        return tensor.to(self._device())

    def _number(self, value: int) -> Any:
        return self._torch.tensor([value], dtype=self._torch.int64, device=self._device())

    def _global(self, rank: int) -> int:
        """A rank of the group as the rank of the world that torch's calls want."""
        return rank if self._group is None else int(self._dist.get_global_rank(self._group, rank))

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The ``obj`` of the rank ``root``, on every rank."""
        data = pickle.dumps(obj) if self.rank == root else b""
        size = self._number(len(data))
        self._dist.broadcast(size, src=self._global(root), group=self._group)
        tensor = self._tensor(data, int(size.item()))
        self._dist.broadcast(tensor, src=self._global(root), group=self._group)
        return obj if self.rank == root else pickle.loads(bytes(tensor.tolist()))

    def gather(self, obj: Any, root: int = 0) -> Optional[List[Any]]:
        """On the rank ``root`` the ``obj`` of every rank, in order; None on the others."""
        data = pickle.dumps(obj)
        sizes = [self._number(0) for _ in range(self.world_size)]
        self._dist.all_gather(sizes, self._number(len(data)), group=self._group)
        lengths = [int(size.item()) for size in sizes]
        tensors = [self._tensor(b"", max(lengths)) for _ in range(self.world_size)]
        self._dist.all_gather(tensors, self._tensor(data, max(lengths)), group=self._group)
        if self.rank != root:
            return None
        return [pickle.loads(bytes(tensor[:length].tolist())) for tensor, length in zip(tensors, lengths)]

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._dist.barrier(group=self._group)

    def check(self) -> None:
        """torch says so in the collectives."""

    def fail(self, reason: str) -> bool:
        """Only a collective could tell them."""
        return False


class Mpi:
    """A communicator of mpi4py; None: COMM_WORLD. What it sends is pickled by mpi4py."""

    def __init__(self, comm: Any = None) -> None:
        if comm is None:
            from mpi4py import MPI

            comm = MPI.COMM_WORLD
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The ``obj`` of the rank ``root``, on every rank."""
        return self._comm.bcast(obj, root=root)

    def gather(self, obj: Any, root: int = 0) -> Optional[List[Any]]:
        """On the rank ``root`` the ``obj`` of every rank, in order; None on the others."""
        found: Optional[List[Any]] = self._comm.gather(obj, root=root)
        return found

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._comm.Barrier()

    def check(self) -> None:
        """MPI ends the job itself when a rank dies."""

    def fail(self, reason: str) -> bool:
        """Only a collective could tell them."""
        return False


def initialised_torch() -> Optional[Torch]:
    """The default group of torch.distributed, if the program has initialised it; torch is not imported to find out."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return Torch()
