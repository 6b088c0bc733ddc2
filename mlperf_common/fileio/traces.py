# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The names of temporaries and of the records of runs: how they are made, and how those of others are known."""

from __future__ import annotations

import os
import re
from typing import Iterable, List, Set, Tuple

NAME_MAX = 255  # bytes in a name, on every filesystem that we know of

RECORD = ".fastcp-run-"
RECORD_NAME = re.compile(re.escape(RECORD) + r"([0-9a-f]{10})")

# .NAME.TOKEN, the worker's number, the item's in hexadecimal, "r", an attempt.
TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{10})[0-9]{3}[0-9a-f]*r?[0-9]*", re.DOTALL)

Landing = Tuple[str, ...]  # the names of directories from the plan's base down


def temporary_name(name: str, suffix: str) -> str:
    """``.NAME.SUFFIX``, so that Lustre places the file with NAME; ``.fastcp.SUFFIX`` where that is too long."""
    candidate = ".%s.%s" % (name, suffix)
    return candidate if len(os.fsencode(candidate)) <= NAME_MAX else ".fastcp.%s" % suffix


class Traces:
    """What other runs have in the directories that a plan meets: temporaries (directory, name, token), and records."""

    def __init__(self) -> None:
        self.temporaries: List[Tuple[Landing, str, str]] = []
        self.records: Set[Tuple[Landing, str]] = set()

    def look(self, landing: Landing, names: Iterable[bytes]) -> None:
        """Note those among the names of a directory."""
        for raw in names:
            if raw[:1] != b".":
                continue
            name = os.fsdecode(raw)
            record, temporary = RECORD_NAME.fullmatch(name), TEMPORARY.fullmatch(name)
            if record:
                self.records.add((landing, record[1]))
            elif temporary:
                self.temporaries.append((landing, name, temporary["token"]))

    def tokens(self) -> List[str]:
        """The runs that have left something."""
        return sorted({token for *_, token in self.temporaries} | {token for _, token in self.records})
