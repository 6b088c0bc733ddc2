# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""MD5, and that of bytes on their way: of each chunk of a file whose bytes pass once and in order, holes as zeros."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, List

from mlperf_common.fileio.manifest import CHUNK_SIZE, LINK, Chunk

_ZEROS = bytes(1 << 20)


class DigestRefused(Exception):
    """This Python, or the machine's policy, has no MD5."""


@functools.lru_cache(maxsize=None)
def md5_constructor() -> Callable[[], Any]:
    """What makes an MD5 object. Raises DigestRefused.

    ``usedforsecurity=False`` is what a machine in FIPS mode wants to hear; Python 3.8 does not know it.
    """
    import hashlib  # 5 ms, which a copy without digests need not wait for

    md5: Callable[..., Any] = hashlib.md5
    named = functools.partial(md5, usedforsecurity=False)
    for constructor in (named, md5):
        try:
            constructor()
            return constructor
        except TypeError:
            continue
        except ValueError as exc:
            raise DigestRefused(f"MD5 is not available here: {exc}") from exc
    raise DigestRefused("MD5 is not available here")


def link_chunk(target: str) -> Chunk:
    """The line of a symbolic link: the size and digest of its target's bytes."""
    text = os.fsencode(target)
    md5 = md5_constructor()()
    md5.update(text)
    return LINK, len(text), str(md5.hexdigest())


class Digest:
    """The chunks of a file, or of its part from ``start`` (bytes, where a chunk begins) on. Raises DigestRefused."""

    def __init__(self, start: int = 0, chunk_size: int = CHUNK_SIZE) -> None:
        self._new = md5_constructor()
        self._chunk_size = chunk_size
        self._start = start
        self._size = 0
        self._md5 = self._new()
        self._done: List[Chunk] = []

    def update(self, data: memoryview) -> None:
        """The next bytes."""
        while len(data):
            piece = data[: self._chunk_size - self._size]
            self._md5.update(piece)
            self._size += len(piece)
            data = data[len(piece) :]
            if self._size == self._chunk_size:
                self._end_chunk()

    def zeros(self, count: int) -> None:
        """A hole of ``count`` bytes."""
        while count > 0:
            piece = min(count, len(_ZEROS))
            self.update(memoryview(_ZEROS)[:piece])
            count -= piece

    def _end_chunk(self) -> None:
        self._done.append((self._start, self._size, str(self._md5.hexdigest())))
        self._start += self._size
        self._size = 0
        self._md5 = self._new()

    def chunks(self) -> List[Chunk]:
        """(offset, size, MD5) of each chunk of what has passed; none of nothing. Ends the last one."""
        if self._size:
            self._end_chunk()
        return self._done
