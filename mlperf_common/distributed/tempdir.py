# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""One temporary directory for all ranks of a job.

Promises: every rank sees the same path; the directory is there while any rank is in its body, unless one has failed,
and gone afterwards; if one rank's body raises, every rank that leaves its own gets an exception, and keeps its own if
it has one; where rank 0 is known to have died, the others remove it. Not promised: that a rank which is stuck in a
collective of the caller's own leaves its body at all; that the directory goes while a rank which does not know yet that
the job has failed goes on filling it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from typing import Any, Iterator, List, Optional

from mlperf_common.distributed import communicator as communicators
from mlperf_common.distributed import launch
from mlperf_common.distributed.communicator import Communicator, RankFailed

# A directory that was just emptied is often full again while other ranks still make names there. One process that made
# files as fast as it could was outrun after 2 attempts in the middle, 71 at worst, two after 3 and 55 (ran, 30 times).
REMOVAL_SECONDS = 5.0
PAUSE_SECONDS = 0.02  # between two attempts


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
    ranks, but no communicator is given; LaunchError where it makes no sense. A rank that is stuck in a collective of
    the caller's own is not helped.
    """
    comm = communicator if communicator is not None else _default()
    made: Any = None
    error: Optional[BaseException] = None
    if comm.rank == 0:
        try:
            # A relative name would be another one in a rank, or a moment, with another working directory.
            base = os.path.abspath(tempfile.gettempdir() if dir is None else dir)
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=base)
        except BaseException as exc:  # whatever it is, the others wait to be told
            error = exc
    with _removing(made):
        path, problem = comm.broadcast([made.name if made else "", _words(error) if error else ""])
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
                _remove(path)
            raise


@contextlib.contextmanager
def _removing(made: Any) -> Iterator[None]:
    """Remove rank 0's directory at the end; on the other ranks ``made`` is None."""
    try:
        yield
    except BaseException:
        if made is not None:
            # What ended the body is what is to be said: an OSError of the removal is not.
            with contextlib.suppress(OSError):
                made.cleanup()
            _remove(made.name)
        raise
    if made is not None:
        made.cleanup()


def _remove(path: str) -> None:
    """Remove a directory into which ranks may still write that do not know yet that the job has failed."""
    end = time.monotonic() + REMOVAL_SECONDS
    shutil.rmtree(path, ignore_errors=True)
    while os.path.lexists(path) and time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _leaving_together(comm: Communicator) -> Iterator[None]:
    """Exchange at the end how it went: nobody leaves before all do, and nobody leaves well if one does not."""
    try:
        yield
    except BaseException as exc:
        # The others may be anywhere: where they can be told there, this waits for nobody. A RankFailed is no exception:
        # a directory within this one raises it, and where only a collective tells, the others wait in it.
        words = _words(exc)
        if not comm.fail(words):
            with contextlib.suppress(Exception):  # of torch, when a rank has died: this rank's own says more
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


def _words(exc: BaseException) -> str:
    return "%s: %s" % (type(exc).__name__, exc) if str(exc) else type(exc).__name__


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
