# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Digests of what is read while copying, collected for the manifest of the copy."""

from __future__ import annotations

from typing import Dict, List, Sequence

from mlperf_common.fileio.manifest import Chunk
from mlperf_common.fileio.twins import Twin


class Recorder:
    """Collects the digests of a copy; one that is not ``wanted`` forgets everything."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self.chunks: Dict[Twin, List[Chunk]] = {}
        self.unread: List[Twin] = []

    def add(self, twin: Twin, chunks: Sequence[Chunk]) -> None:
        """A file or link was copied."""
        if self._wanted:
            self.chunks[twin] = list(chunks)

    def add_name(self, twin: Twin, leader: Twin) -> None:
        """A file has got another name."""
        if self._wanted and leader in self.chunks:
            self.chunks[twin] = self.chunks[leader]
        else:
            self.add_unread(twin)

    def add_unread(self, twin: Twin) -> None:
        """A file stands there already: it was not read from end to end, or not hashed."""
        if self._wanted:
            self.unread.append(twin)
