# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One temporary directory for all ranks of a job.

Promises: every rank sees the same path; the directory is there while any rank is in its body, and gone afterwards; if
one rank's body raises, every rank that leaves its own gets an exception; where rank 0 is known to have died, the others
remove it. Not promised: that a rank which is stuck in a collective of the caller's own leaves its body at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from typing import Iterator, List, Optional

from mlperf_common.distributed import communicator as communicators
from mlperf_common.distributed import launch
from mlperf_common.distributed.communicator import Communicator, RankFailed


@contextlib.contextmanager
def shared_tempdir(
    communicator: Optional[Communicator] = None,
    dir: Optional[str] = None,  # noqa: A002 (as tempfile's)
    prefix: str = "shared-",
) -> Iterator[str]:
    """A temporary directory that rank 0 makes (in ``dir``; tempfile.TemporaryDirectory) and all ranks use: its path.

    ``communicator``: None means the initialised torch.distributed group or, where there is none, a single process.
    Leaving is a collective: all ranks do it together, then rank 0 removes the directory.

    Raises OSError on rank 0 where the directory cannot be made, RankFailed on the others; RankFailed on every rank
    whose own body did not raise, if another one's did; ValueError where the environment shows that there are more
    ranks, but no communicator is given. A rank that is stuck in a collective of the caller's own is not helped.
    """
    comm = communicator if communicator is not None else _default()
    made, error = None, None
    if comm.rank == 0:
        try:
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=dir)
        except OSError as exc:
            error = exc
    try:
        path, problem = comm.broadcast([made.name if made else "", str(error) if error else ""])
        if error is not None:
            raise error
        if problem:
            raise RankFailed(0, "rank 0 cannot make a temporary directory: %s" % problem)
        try:
            comm.barrier()
            with _leaving_together(comm):
                yield path
        except RankFailed as exc:
            if exc.rank == 0:  # it may not be able to any more
                shutil.rmtree(path, ignore_errors=True)
            raise
    finally:
        if made is not None:
            made.cleanup()


@contextlib.contextmanager
def _leaving_together(comm: Communicator) -> Iterator[None]:
    """Exchange at the end how it went: nobody leaves before all do, and nobody leaves well if one does not."""
    try:
        yield
    except RankFailed:  # the ranks know of it, and the one that has failed takes part in nothing any more
        raise
    except BaseException as exc:
        words = "%s: %s" % (type(exc).__name__, exc)
        if not comm.fail(words):  # the others may be anywhere: where they can be told there, this waits for nobody
            _exchange(comm, words)
        raise
    else:
        failed = _exchange(comm, "")
        if failed:
            raise failed[0]


def _exchange(comm: Communicator, problem: str) -> List[RankFailed]:
    """Tell the others of this rank's problem ("": none); theirs, the lowest rank's first."""
    mine = "rank %d (%s) failed: %s" % (comm.rank, socket.gethostname(), problem) if problem else ""
    said = comm.broadcast(comm.gather(mine))
    return [RankFailed(rank, words) for rank, words in enumerate(said) if words]


def _default() -> Communicator:
    torch = communicators.initialised_torch()
    if torch is not None:
        return torch
    mine = launch.detect(os.environ)
    if mine.world_size > 1:
        raise ValueError(
            "this is rank %d of %d (%s): pass a communicator" % (mine.rank, mine.world_size, mine.launcher)
        )
    return communicators.Single()
