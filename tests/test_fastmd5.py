# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""fastmd5 listing: its lines byte for byte, their order, what is named instead of hashed, and how it ends."""

# Takes about 20 s
from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import threading
import time
from typing import Dict, List, Optional, Tuple

import support
from support import Fifo, Link, Random, Sparse, TestCase, make_tree, needs, needs_nobody, needs_root, run_tool, slow

MIB = 1 << 20
GIB = 1 << 30
EMPTY = hashlib.md5(b"").hexdigest()

Line = Tuple[str, int, int, str]


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def lines(text: str) -> List[Line]:
    """The fields of lines whose paths are not escaped."""
    found = []
    for line in text.splitlines():
        path, offset, size, digest = line.split("\t")
        found.append((path, int(offset), int(size), digest))
    return found


class Listing(TestCase):
    def test_a_line_byte_for_byte(self) -> None:
        root = self.make("t", {"a": b"hello\n"})
        result = run_tool("fastmd5", root, expect=0)
        self.assertEqual(result.stdout_bytes, b"%s/a\t0\t6\tb1946ac92492d2347c6235b4d2611184\n" % os.fsencode(root))

    def test_every_size_like_hashlib(self) -> None:
        sizes = [0, 1, 511, 512, 513, 4095, 4096, 4097, (256 << 10) - 1, 256 << 10, MIB + 1]
        sizes += [2 * MIB - 1, 2 * MIB, 2 * MIB + 7]
        root = self.make("t", {f"{size:08}": Random(size, seed=size) for size in sizes})
        expected = []
        for size in sizes:
            with open(os.path.join(root, f"{size:08}"), "rb") as file:
                data = file.read()
            if size:
                expected.append((f"t/{size:08}", 0, size, md5(data)))
        for workers in (1, 4):
            for buffer in ("2M", "8M"):
                with self.subTest(workers=workers, buffer=buffer):
                    result = run_tool("fastmd5", "-n", str(workers), "-b", buffer, "t", cwd=self.tmp, expect=0)
                    self.assertEqual(lines(result.stdout), expected)

    def test_names_are_escaped_as_md5sum_does_and_tabs_besides(self) -> None:
        names = [b"plain", b"new\nline", b"back\\slash", b"re\rturn", b"t\tab", b"\xff\xfe", b"sp ace"]
        root = self.make("t", {os.fsdecode(name): b"x" for name in names})
        ours = run_tool("fastmd5", ".", cwd=root, expect=0).stdout_bytes.splitlines()
        digest = md5(b"x").encode()
        expected = [b"./" + name + b"\t0\t1\t" + digest for name in (b"\xff\xfe", b"plain", b"sp ace")]
        as_md5sum = {b"new\nline": b"new\\nline", b"back\\slash": b"back\\\\slash", b"re\rturn": b"re\\rturn"}
        for raw, escaped in as_md5sum.items():
            expected.append(b"\\./" + escaped + b"\t0\t1\t" + digest)
            theirs = subprocess.run(["md5sum", b"./" + raw], cwd=root, stdout=subprocess.PIPE, check=True).stdout
            self.assertEqual(theirs, b"\\" + digest + b"  ./" + escaped + b"\n")
        expected.append(b"\\./t\\tab\t0\t1\t" + digest)
        self.assertEqual(sorted(ours), sorted(expected))

    def test_order_is_that_of_bytes_whatever_the_workers(self) -> None:
        tree = {f"{name}{i}": Random(1 + i * 997, seed=i) for i in range(60) for name in ("f", "f-", "é")}
        root = self.make("t", {"d": dict(tree), "d-": b"x", "e": {"big": Random(20 * MIB, seed=1), **tree}, "z": b"z"})
        self.make("u", b"loose")
        outputs = {
            run_tool("fastmd5", "-n", str(n), "u", "t", "t/z", cwd=self.tmp, expect=0).stdout_bytes for n in (1, 2, 8)
        }
        self.assertEqual(len(outputs), 1)
        paths = [line[0] for line in lines(os.fsdecode(outputs.pop()))]
        inside = paths[1:-1]
        self.assertEqual((paths[0], paths[-1]), ("u", "t/z"))
        self.assertEqual(inside, sorted(inside, key=os.fsencode))
        self.assertEqual(len(inside), sum(len(files) for _, _, files in os.walk(root)))

    @slow
    def test_chunks_of_a_large_file(self) -> None:
        path = self.make("big", Sparse(GIB + 4097, {0: b"start", GIB: b"second", GIB + 4000: b"end"}))
        result = run_tool("fastmd5", "big", cwd=self.tmp, expect=0)
        expected = []
        with open(path, "rb") as file:
            for offset, size in ((0, GIB), (GIB, 4097)):
                digest = hashlib.md5()
                for _ in range(0, size, 64 * MIB):
                    digest.update(file.read(min(64 * MIB, size)))
                expected.append(("big", offset, size, digest.hexdigest()))
        self.assertEqual(lines(result.stdout), expected)

    def test_an_empty_file_has_no_line_and_an_empty_tree_none(self) -> None:
        self.make("t", {"e": b"", "d": {}})
        self.assertEqual(run_tool("fastmd5", "t", cwd=self.tmp, expect=0).stdout, "")

    def test_files_whose_size_says_nothing(self) -> None:
        result = run_tool("fastmd5", "/proc/self/mounts", "/proc/version", expect=0)
        with open("/proc/version", "rb") as file:
            data = file.read()
        self.assertIn(("/proc/version", 0, len(data), md5(data)), lines(result.stdout))

    def test_results_come_while_others_are_hashed(self) -> None:
        self.make("t", {"a": b"first"})
        os.mkfifo(self.path("t", "gate"))
        root = self.make("u", {f"f{i:03}": Random(2 * MIB, seed=i) for i in range(40)})
        process = self.start_tool("fastmd5", "-q", "-n", "2", self.path("t", "a"), root, stdout=subprocess.PIPE)
        stream = process.stdout
        self.assertIsNotNone(stream)
        if stream is not None:
            self.assertTrue(stream.readline().startswith(os.fsencode(self.path("t", "a"))))
            rest = stream.read()
            self.assertEqual(rest.count(b"\n"), 40)
        self.assertEqual(process.wait(60), 0)


class Everything(TestCase):
    def test_all_has_empty_files_directories_and_links(self) -> None:
        root = self.make("t", {"e": b"", "d": {"x": b"1"}, "d-": b"2", "l": Link("nowhere")})
        result = run_tool("fastmd5", "--all", "-P", "t", cwd=self.tmp, expect=0)
        self.assertEqual(
            lines(result.stdout),
            [
                ("t", -1, 0, EMPTY),
                ("t/d", -1, 0, EMPTY),
                ("t/d-", 0, 1, md5(b"2")),
                ("t/d/x", 0, 1, md5(b"1")),
                ("t/e", 0, 0, EMPTY),
                ("t/l", -2, 7, md5(b"nowhere")),
            ],
        )
        self.assertEqual(run_tool("fastmd5", "-P", "t", cwd=self.tmp, expect=0).stdout.count("\n"), 2)
        self.assertEqual(run_tool("fastmd5", root, expect=1).stdout, "")  # the link leads nowhere

    def test_names_relative_to_a_directory(self) -> None:
        root = self.make("t", {"a": b"1", "d": {"b": b"2"}})
        expected = run_tool("fastmd5", "a", "d", cwd=root, expect=0).stdout
        for operand in (".", "./", root, root + "/", "../t", "d/.."):
            with self.subTest(operand):
                self.assertEqual(run_tool("fastmd5", "-C", "t", operand, cwd=self.tmp, expect=0).stdout, expected)
        for operand, line in (("./d//b", "d/b\t"), (root + "/d/b", "d/b\t"), ("d", "d/b\t")):
            with self.subTest(operand):
                self.assertTrue(run_tool("fastmd5", "-C", "t", operand, cwd=self.tmp, expect=0).stdout.startswith(line))
        self.assertRegex(run_tool("fastmd5", "-C", "t", "/etc/passwd", cwd=self.tmp, expect=1).stderr, "not below")
        self.assertRegex(run_tool("fastmd5", "-C", "none", ".", cwd=self.tmp, expect=1).stderr, "No such file")

    def test_other_formats(self) -> None:
        self.make("t", {"a\nb": b"1"})
        zero = run_tool("fastmd5", "-z", "t", cwd=self.tmp, expect=0).stdout_bytes
        self.assertEqual(zero, b"t/a\nb\t0\t1\t%s\0" % md5(b"1").encode())
        line = run_tool("fastmd5", "--json", "t", cwd=self.tmp, expect=0).stdout
        self.assertEqual(line, '{"path": "t/a\\nb", "offset": 0, "size": 1, "md5": "%s"}\n' % md5(b"1"))


class Troubles(TestCase):
    def complain(self, *args: str, status: int = 1, **options: object) -> str:
        """The one error line, or all of them, of a run that must fail."""
        return run_tool("fastmd5", *args, cwd=self.tmp, expect=status, **options).stderr  # type: ignore[arg-type]

    def test_usage(self) -> None:
        self.make("a", b"1")
        table: Dict[Tuple[str, ...], str] = {
            (): "missing file operand",
            ("-n", "0", "a"): "at least 1",
            ("-n", "-3", "a"): "not a positive",
            ("-n", "x", "a"): "not a positive",
            ("-b", "0", "a"): "at least 1",
            ("-b", "3M", "a"): "divides 1G",
            ("-b", "2G", "a"): "divides 1G",
            ("--nope", "a"): "unrecognized",
            ("-z", "--json", "a"): "cannot combine",
            ("--compare", "a"): "needs SOURCE and DEST",
            ("--strict", "a"): "only with --check",
            ("--all", "-c", "a"): "cannot combine",
            ("--metadata", "a"): "only with --compare",
        }
        for args, words in table.items():
            with self.subTest(args):
                self.assertRegex(self.complain(*args, status=2), words)

    def test_what_cannot_be_had_is_named_and_the_rest_is_hashed(self) -> None:
        self.make("t", {"a": b"1", "p": Fifo()})
        self.make("good", b"1")
        result = run_tool("fastmd5", "none", "t", "", "good", cwd=self.tmp, expect=1)
        self.assertEqual(lines(result.stdout), [("good", 0, 1, md5(b"1"))])
        self.assertRegex(result.stderr, "'none': No such file")
        self.assertRegex(result.stderr, "'t/p' is a FIFO")
        skipped = run_tool("fastmd5", "--skip-special", "t", cwd=self.tmp, expect=0)
        self.assertEqual(len(lines(skipped.stdout)), 1)
        self.assertRegex(skipped.stderr, "warning: 't/p' is left out")

    @needs_nobody
    def test_unreadable(self) -> None:
        root = support.make_temporary()
        self.addCleanup(support.remove_tree, root)
        tree = {"a": b"1", "no": support.File(b"2", mode=0), "d": support.Dir({"x": b""}, mode=0)}
        make_tree(os.path.join(root, "t"), tree)
        os.chmod(root, 0o755)
        result = run_tool("fastmd5", "t/a", "t/no", "t", cwd=root, user=support.NOBODY, expect=1)
        self.assertEqual(lines(result.stdout), [("t/a", 0, 1, md5(b"1"))])
        self.assertRegex(result.stderr, "cannot hash 't/no': Permission denied")
        self.assertRegex(result.stderr, "'t/d': Permission denied")

    @slow
    def test_files_that_change(self) -> None:
        path = self.make("grows", Random(100 * MIB, seed=3))
        stop = threading.Event()

        def grow() -> None:
            while not stop.is_set():
                with open(path, "ab") as file:
                    file.write(b"x")
                time.sleep(0.002)

        thread = threading.Thread(target=grow)
        thread.start()
        try:
            result = run_tool("fastmd5", "grows", cwd=self.tmp, expect=1)
        finally:
            stop.set()
            thread.join()
        self.assertEqual(result.stdout, "")
        self.assertRegex(result.stderr, "cannot hash 'grows': changed while it was being read")

    def test_standard_output(self) -> None:
        self.make("t", {f"f{i}": b"x" for i in range(3000)})
        few = self.make("few", {"f": b"x"})  # what fits the buffer fails only at the end, and no count comes before
        for words in (["-q", self.path("t")], [few], [few + "/f"]):
            with self.subTest(words=words), open("/dev/full", "wb") as full:
                process = self.start_tool("fastmd5", *words, stdout=full, stderr=subprocess.PIPE)
                _, errors = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 1)
                self.assertEqual(errors, b"fastmd5: cannot write to standard output: No space left on device\n")
        tool = " ".join(support.command_line("fastmd5", "-q", self.path("t")))
        done = support.run(["bash", "-c", f"{tool} | head -n 1; exit ${{PIPESTATUS[0]}}"])
        self.assertEqual((done.returncode, done.stderr), (1, ""))

    def test_a_killed_worker_is_told_and_the_others_go_on(self) -> None:
        root = self.make("t", {f"f{i:02}": Random(5 * MIB, seed=i) for i in range(40)})
        process = self.start_tool("fastmd5", "-n", "4", root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        victim = _child_of(process.pid)
        self.assertIsNotNone(victim)
        os.kill(victim or 0, signal.SIGKILL)
        out, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1)
        missing = 40 - out.count(b"\n")
        self.assertGreaterEqual(missing, 0)
        self.assertEqual(errors.count(b"cannot hash"), missing)
        if missing:
            self.assertIn(b"killed by SIGKILL", errors)

    @slow
    def test_signals_end_it_as_themselves(self) -> None:
        root = self.make("t", {f"f{i:02}": Random(8 * MIB, seed=i) for i in range(30)})
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(signum):
                process = self.start_tool("fastmd5", root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                _child_of(process.pid)
                process.send_signal(signum)
                process.communicate(timeout=30)
                self.assertEqual(process.returncode, -signum)

    def test_a_directory_by_c_is_shared_out_as_any(self) -> None:
        root = self.make("t", {f"f{i:02}": Random(2 * MIB, seed=i) for i in range(30)})
        process = self.start_tool("fastmd5", "-q", "-C", root, ".", stdout=subprocess.DEVNULL)
        self.assertIsNotNone(_child_of(process.pid))
        self.assertEqual(process.wait(60), 0)

    @slow
    @needs("strace")
    @needs_nobody
    def test_a_file_of_somebody_else_is_opened_once(self) -> None:
        root = support.make_temporary()
        self.addCleanup(support.remove_tree, root)
        make_tree(os.path.join(root, "t"), {f"f{i}": b"1" for i in range(20)})
        os.chmod(root, 0o777)
        log = os.path.join(root, "log")
        under = ["strace", "-f", "-qq", "-o", log, "-e", "trace=openat"]
        run_tool("fastmd5", "-n", "1", "t", cwd=root, user=support.NOBODY, under=under, expect=0)
        with open(log, encoding="utf-8", errors="replace") as file:
            self.assertEqual(sum('"f' in line and "O_DIRECTORY" not in line for line in file), 20)

    def read_from_storage(self, *words: str) -> int:
        """Run fastmd5; the bytes that it and its workers had from the storage, the page cache left as it was."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
        run_tool("fastmd5", *words, cwd=self.tmp, expect=0)
        return (resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before) * 512

    def test_a_list_takes_from_the_page_cache_what_is_all_there_and_a_proof_nothing(self) -> None:
        size = 12 * MIB
        for name in ("f", "g"):
            self.make(name, Random(size, seed=1))
        os.sync()
        with open(self.path("m"), "wb") as file:
            file.write(run_tool("fastmd5", "f", cwd=self.tmp, expect=0).stdout_bytes)
        self.assertLess(self.read_from_storage("f"), MIB)
        self.assertGreaterEqual(self.read_from_storage("-c", "m"), size)
        self.assertGreaterEqual(self.read_from_storage("--compare", "f", "g"), 2 * size)
        with open(self.path("f"), "rb") as file:  # a part of it is not
            os.posix_fadvise(file.fileno(), 3 * MIB, 4 * MIB, os.POSIX_FADV_DONTNEED)
        self.assertGreaterEqual(self.read_from_storage("f"), size)

    @slow
    @needs_root
    def test_without_o_direct(self) -> None:
        with support.mounted_at(self.path("ramfs"), "-t", "ramfs", "ramfs") as place:
            make_tree(os.path.join(place, "f"), Random(3 * MIB, seed=1))
            result = run_tool("fastmd5", "f", cwd=place, expect=0)
            self.assertRegex(result.stderr, r"io=buffered \(O_DIRECT refused")
            with open(os.path.join(place, "f"), "rb") as file:
                self.assertEqual(lines(result.stdout), [("f", 0, 3 * MIB, md5(file.read()))])


def _child_of(pid: int) -> Optional[int]:
    """A worker of this process, as soon as it works: it has read something."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
                children = [int(word) for word in file.read().split()]
            for child in children:
                with open(f"/proc/{child}/io", encoding="ascii") as file:
                    if int(file.read().split("rchar: ")[1].split()[0]) > MIB:
                        return child
        except (OSError, IndexError):
            pass
        time.sleep(0.005)
    return None


if __name__ == "__main__":
    support.main()
