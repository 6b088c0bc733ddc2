# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The fastmd5 line: any name makes one line, every line reads back, everything else is refused."""
from __future__ import annotations

import hashlib
import os
import random
import subprocess
import unittest

import support

from mlperf_common.fileio import manifest

DIGEST = hashlib.md5(b"").hexdigest()
NAMES = {
    b"plain": b"plain",
    b"a b/c": b"a b/c",
    b"a\nb": b"\\a\\nb",
    b"a\rb": b"\\a\\rb",
    b"a\\b": b"\\a\\\\b",
    b"a\tb": b"\\a\\tb",
    b"\\": b"\\\\\\",
    b"\\n": b"\\\\\\n",
    b"\n\r\t\\": b"\\\\n\\r\\t\\\\",
    b"\xff\xfe": b"\xff\xfe",
    "\u00e9".encode(): "\u00e9".encode(),
    b" ": b" ",
    b"\x1b[31m": b"\x1b[31m",
}


class Writing(unittest.TestCase):
    def test_names(self) -> None:
        for raw, written in NAMES.items():
            line = written + b"\t1073741824\t5\t" + DIGEST.encode() + b"\n"
            self.assertEqual(manifest.format_line(raw, 1 << 30, 5, DIGEST), line)
            self.assertEqual(manifest.format_line(os.fsdecode(raw), 1 << 30, 5, DIGEST), line)

    def test_escape_and_unescape(self) -> None:
        self.assertEqual(manifest.escape("plain"), (b"", b"plain"))
        self.assertEqual(manifest.escape("a\tb"), (b"\\", b"a\\tb"))
        for raw in NAMES:
            self.assertEqual(manifest.unescape(manifest.escape(raw)[1]), raw)


class AgainstMd5sum(support.TestCase):
    def test_names_without_a_tab_are_escaped_as_md5sum_does(self) -> None:
        names = [name for name in NAMES if b"\t" not in name and b"/" not in name]
        for name in names:
            self.make(name, b"")
        for name in names:
            theirs = subprocess.check_output(["md5sum", "--", name], cwd=self.tmp)
            prefix, escaped = manifest.escape(name)
            self.assertEqual(prefix + DIGEST.encode() + b"  " + escaped + b"\n", theirs)


class Reading(unittest.TestCase):
    def test_names(self) -> None:
        for raw, written in NAMES.items():
            for end in (b"\n", b""):
                line = written + b"\t0\t1\t" + DIGEST.encode() + end
                self.assertEqual(manifest.parse_line(line), (os.fsdecode(raw), 0, 1, DIGEST))

    def test_offsets_that_mark_directories_and_links(self) -> None:
        for offset in (-1, -2):
            self.assertEqual(manifest.parse_line(manifest.format_line("d", offset, 0, DIGEST)).offset, offset)

    def test_every_byte_and_random_bytes_come_back(self) -> None:
        chance = random.Random(7)
        names = [bytes([byte]) for byte in range(1, 256)]
        names += [bytes(chance.choices(b"\\\n\r\tntr\xffa/", k=chance.randint(1, 9))) for _ in range(3000)]
        names += [bytes(chance.choices(range(1, 256), k=255)) for _ in range(50)]
        for name in names:
            line = manifest.format_line(name, chance.randrange(1 << 62), chance.randrange(1 << 62), DIGEST)
            self.assertEqual((line.count(b"\n"), line.count(b"\t"), line.count(b"\r")), (1, 3, 0))
            got = manifest.parse_line(line)
            self.assertEqual(os.fsencode(got.path), name)
            self.assertEqual(manifest.format_line(*got), line)

    def test_refusals(self) -> None:
        digest = DIGEST.encode()
        for line, reason in {
            b"": "1 fields",
            b"\n": "1 fields",
            b"a\t0\t1": "3 fields",
            b"a\t0\t1\t" + digest + b"\t": "5 fields",
            b"a\tb\t0\t1\t" + digest: "5 fields",
            b"\t0\t1\t" + digest: "name is empty",
            b"\\\t0\t1\t" + digest: "name is empty",
            b"a\0b\t0\t1\t" + digest: "NUL",
            b"a\nb\t0\t1\t" + digest: "not escaped",
            b"a\rb\t0\t1\t" + digest: "not escaped",
            b"a\\b\t0\t1\t" + digest: "not escaped",
            b"\\plain\t0\t1\t" + digest: "not escaped",
            b"\\a\nb\\n\t0\t1\t" + digest: "not escaped",
            b"\\a\\x\t0\t1\t" + digest: "unknown escape",
            b"\\a\\\t0\t1\t" + digest: "unknown escape",
            b"a\t\t1\t" + digest: "offset",
            b"a\t-3\t1\t" + digest: "offset",
            b"a\t-0\t1\t" + digest: "offset",
            b"a\t+1\t1\t" + digest: "offset",
            b"a\t01\t1\t" + digest: "offset",
            b"a\t 1\t1\t" + digest: "offset",
            b"a\t1_0\t1\t" + digest: "offset",
            b"a\t\xd9\xa3\t1\t" + digest: "offset",
            b"a\t" + b"9" * 5000 + b"\t1\t" + digest: "offset",
            b"a\t0\t-1\t" + digest: "size",
            b"a\t0\t1.5\t" + digest: "size",
            b"a\t0\t1\t" + digest[:-1]: "digest",
            b"a\t0\t1\t" + digest + b"0": "digest",
            b"a\t0\t1\t" + digest.upper(): "digest",
            b"a\t0\t1\t" + digest + b"\r\n": "digest",
            b"a\t0\t1\t" + digest + b"\n\n": "digest",
            b"a\t0\t1\t" + b"g" * 32: "digest",
        }.items():
            with self.subTest(line=line), self.assertRaisesRegex(manifest.ManifestError, reason):
                manifest.parse_line(line)

    def test_a_cut_line_is_never_a_line(self) -> None:
        line = manifest.format_line("a\nb", 1 << 30, 77, DIGEST)
        for length in range(len(line) - 1):
            with self.assertRaises(ValueError):
                manifest.parse_line(line[:length])


if __name__ == "__main__":
    support.main()
