# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What spares others: --bwlimit, kept by all workers together; copies that a server makes itself; the stripe line."""

# Takes about 15 s
from __future__ import annotations

import signal
import subprocess
import time
from typing import List

import support
from support import Random, TestCase, run_tool, slow

KIB, MIB = 1 << 10, 1 << 20

RATE = 16 * MIB  # bytes a second
TREE = {"big": Random(9 * MIB, seed=1), "d": {f"f{i}": Random(100 * KIB, seed=i) for i in range(40)}}
SIZE = 9 * MIB + 40 * 100 * KIB
PIECE = RATE // 4  # what may move at once


class Limit(TestCase):
    def seconds(self, *words: str, expect: int = 0) -> float:
        started = time.monotonic()
        run_tool(*words, "--bwlimit", str(RATE), cwd=self.tmp, expect=expect)
        return time.monotonic() - started

    def assert_limited(self, seconds: float, size: int) -> None:
        """At the limit, not above it, and not idle for long."""
        self.assertGreaterEqual(seconds, (size - PIECE) / RATE)
        self.assertLess(seconds, size / RATE + 2)

    def test_a_tree_by_many_workers(self) -> None:
        self.make("s", TREE)
        self.assert_limited(self.seconds("fastcp", "-n", "8", "-r", "s", "d"), SIZE)
        self.assert_same_tree(self.path("d"), self.path("s"))

    @slow
    def test_each_way_that_bytes_move(self) -> None:
        self.make("s", TREE)
        run_tool("fastcp", "-r", "s", "d", cwd=self.tmp, expect=0)
        cases: List[List[str]] = [
            ["fastcp", "s/big", "one"],
            ["fastcp", "-n", "1", "--direct=never", "s/big", "buffered"],
            ["fastcp", "-n", "2", "-r", "--manifest", "m", "s", "e"],
            ["fastcp", "-r", "-u", "--checksum", "s", "-T", "d"],
            ["fastmd5", "s"],
            ["fastmd5", "-n", "1", "s"],
            ["fastmd5", "--compare", "s", "d"],
            ["fastmd5", "-c", "-C", "e", "m"],
        ]
        for words in cases:
            with self.subTest(words=words):
                size = 9 * MIB if "s/big" in words else SIZE
                self.assert_limited(self.seconds(*words), size)

    @slow
    def test_what_is_read_back_counts(self) -> None:
        self.make("big", Random(6 * MIB, seed=1))
        self.assert_limited(self.seconds("fastcp", "--verify", "big", "copy"), 12 * MIB)

    @slow
    def test_ranks_share_it(self) -> None:
        self.make("s", TREE)
        started = time.monotonic()
        ranks = [
            self.start_tool(
                "fastcp", "--distributed", "-n", "2", "--bwlimit", str(RATE), "-r", "s", "d",
                cwd=self.tmp,
                env={
                    "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                    "TORCHELASTIC_RUN_ID": "limit", "TORCHELASTIC_RESTART_COUNT": "0",
                },
            )
            for rank in range(2)
        ]  # fmt: skip
        self.assertEqual([rank.wait(60) for rank in ranks], [0, 0])
        self.assertGreaterEqual(time.monotonic() - started, (SIZE - 2 * PIECE) / RATE)
        self.assert_same_tree(self.path("d"), self.path("s"))

    def test_a_signal_ends_the_wait(self) -> None:
        self.make("big", Random(8 * MIB, seed=1))
        for workers in ("1", "4"):
            with self.subTest(workers=workers):
                copying = self.start_tool(
                    "fastcp", "-n", workers, "--bwlimit", "1K", self.path("big"), self.path("copy"),
                    stderr=subprocess.PIPE,
                )  # fmt: skip
                time.sleep(1)
                started = time.monotonic()
                copying.send_signal(signal.SIGTERM)
                self.assertEqual(copying.wait(10), -signal.SIGTERM)
                self.assertLess(time.monotonic() - started, 2)
                self.assert_no_leftovers(self.tmp)

    def test_what_is_no_rate(self) -> None:
        for text in ("0", "-1", "1.5M", "", "10X"):
            with self.subTest(text=text):
                run_tool("fastcp", "--bwlimit=" + text, "a", "b", cwd=self.tmp, expect=2)


if __name__ == "__main__":
    support.main(__name__)
