# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""How command lines are read, and what exit status each outcome has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from mlperf_common.fileio import command  # noqa: E402

# A tool whose body is Python source given in the environment.
TOOL = """
import os, sys
sys.path[0] = os.environ["ROOT"]
from mlperf_common.fileio import command
def make_parser():
    parser = command.Parser("tool", version="1.2.3", usage="tool [OPTION]... [OPERAND]...")
    parser.add_argument("-r", "-R", "--recursive", action="store_true")
    parser.add_argument("-f", "--force", action="store_true")
    parser.add_argument("-n", "--num-workers", "--num-threads", type=command.worker_count, default=7)
    parser.add_argument("-b", "--buffer-size", type=command.buffer_size, default=8)
    parser.add_argument("-t", "--target-directory", action=command.Once)
    return parser
def body(argv):
    scope = dict(globals(), argv=argv, status=0)
    exec(os.environ["BODY"], scope)
    return scope["status"]
sys.exit(command.run("tool", body))
"""
PARSE = """
args = command.parse(make_parser(), argv)
command.stdout().write(ascii([args.recursive, args.force, args.num_workers, args.buffer_size,
                              args.target_directory, args.operands]).encode())
"""


class Result:
    def __init__(self, process: subprocess.Popen, out: bytes, err: bytes) -> None:
        self.status, self.out, self.err = process.returncode, out, err.decode("utf-8", "surrogateescape")


def run_body(body, *argv, env=(), **settings):
    """Run TOOL with `body`, give back its status, stdout (bytes) and stderr (str)."""
    settings.setdefault("stdout", subprocess.PIPE)
    environ = dict(os.environ, ROOT=ROOT, BODY=body, **dict(env))
    process = subprocess.Popen([sys.executable, "-c", TOOL, *argv], env=environ, stdin=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, **settings)
    out, err = process.communicate(timeout=60)
    return Result(process, out, err)


def make_parser():
    parser = command.Parser("tool", version="1.2.3", usage="tool [OPTION]... [OPERAND]...")
    parser.add_argument("-r", "-R", "--recursive", action="store_true")
    parser.add_argument("-f", "--force", action="store_true")
    parser.add_argument("-n", "--num-workers", "--num-threads", type=command.worker_count, default=7)
    parser.add_argument("-b", "--buffer-size", type=command.buffer_size, default=8)
    parser.add_argument("-t", "--target-directory", action=command.Once)
    return parser


class ReadingArguments(unittest.TestCase):
    def check(self, argv, operands, **options):
        got = vars(command.parse(make_parser(), argv))
        wanted = dict(recursive=False, force=False, num_workers=7, buffer_size=8, target_directory=None)
        self.assertEqual(got, {**wanted, **options, "operands": operands}, argv)

    def test_operands_and_options_in_any_order(self):
        self.check([], [])
        self.check(["a", "b"], ["a", "b"])
        self.check(["-r", "a", "b"], ["a", "b"], recursive=True)
        self.check(["a", "-r", "b"], ["a", "b"], recursive=True)
        self.check(["a", "b", "-r"], ["a", "b"], recursive=True)
        self.check(["-R", "a", "-n", "3", "b", "-f"], ["a", "b"], recursive=True, force=True, num_workers=3)

    def test_after_two_dashes_everything_is_an_operand(self):
        self.check(["--", "-r", "out"], ["-r", "out"])
        self.check(["-f", "--", "-r", "--", "-n"], ["-r", "--", "-n"], force=True)
        self.check(["a", "--", "b", "-f"], ["a", "b", "-f"])
        self.check(["--"], [])
        self.check(["--", "--"], ["--"])

    def test_bundles(self):
        self.check(["-rf", "a"], ["a"], recursive=True, force=True)
        self.check(["-rn4", "a"], ["a"], recursive=True, num_workers=4)
        self.check(["-rfn", "4", "a"], ["a"], recursive=True, force=True, num_workers=4)

    def test_spellings_of_a_value(self):
        for words in (["-n4"], ["-n", "4"], ["--num-workers=4"], ["--num-workers", "4"], ["--num-threads=4"]):
            self.check([*words, "a"], ["a"], num_workers=4)
        self.check(["-tdir"], [], target_directory="dir")
        self.check(["-t", "-r", "a"], ["a"], target_directory="-r")
        self.check(["-t", "-", "a"], ["a"], target_directory="-")
        self.check(["-t", "a b", "a"], ["a"], target_directory="a b")
        self.check(["-t", "", "a"], ["a"], target_directory="")
        self.check(["--target-directory=", "a"], ["a"], target_directory="")
        self.check(["-t=x"], [], target_directory="=x")

    def test_the_last_of_a_repeated_value_wins(self):
        self.check(["-n", "4", "-n", "5"], [], num_workers=5)

    def test_odd_words_are_operands(self):
        for word in ("-", "", "a b", "=", "a=b", "a\n-r", "\udcff", "--"[:1]):
            self.check([word], [word])

    def test_buffer_sizes(self):
        sizes = {"1": 1, "8388608": 8 << 20, "8M": 8 << 20, "8m": 8 << 20, "4K": 4096, "2G": 2 << 30}
        for text, size in sizes.items():
            self.check(["-b", text], [], buffer_size=size)


class Refusals(unittest.TestCase):
    def refused(self, argv):
        """The one line of the usage error for `argv`."""
        result = run_body(PARSE, *argv)
        self.assertEqual((result.status, result.out), (2, b""), (argv, result.err))
        first, second, rest = result.err.split("\n")
        self.assertEqual((second, rest), ("Try 'tool --help' for more information.", ""))
        self.assertTrue(first.startswith("tool: "), first)
        return first

    def test_unknown_options(self):
        self.assertIn("--frobnicate", self.refused(["--frobnicate", "a"]))
        self.assertIn("--frobnicate", self.refused(["a", "--frobnicate=3"]))
        self.assertIn("x", self.refused(["-rx", "a"]))
        self.assertIn("5", self.refused(["-5", "a"]))  # argparse takes it for a negative number
        self.assertIn("q", self.refused(["-q me", "a"]))  # and this, for its space, for an operand

    def test_abbreviations(self):
        self.refused(["--recurs", "a"])
        self.refused(["--num=3", "a"])

    def test_values_that_must_or_must_not_be_there(self):
        self.assertIn("requires an argument", self.refused(["a", "-n"]))
        self.assertIn("requires an argument", self.refused(["a", "--target-directory"]))
        self.assertIn("./--", self.refused(["a", "-t", "--"]))
        self.assertIn("./--", self.refused(["a", "--target-directory=--"]))
        self.assertIn("doesn't allow an argument", self.refused(["--recursive=yes"]))

    def test_numbers(self):
        for text in ("0", "00", "-3", "+3", "3.0", "", " 3", "3 ", "1_0", "0x1", "three", "\u0663", "\udcff"):
            self.assertIn("-n/--num-workers", self.refused(["-n", text, "a"]))
            self.assertIn("-n/--num-workers", self.refused([f"--num-workers={text}", "a"]))
        for text in ("0", "0M", "M", "-1M", "8MB", "8MiB", "1.5M", "8 M", "", "8T"):
            self.assertIn("-b/--buffer-size", self.refused(["-b", text, "a"]))

    def test_an_option_of_which_there_can_be_one(self):
        self.assertIn("more than once", self.refused(["-t", "a", "-t", "b"]))
        self.assertIn("more than once", self.refused(["-t", "a", "--target-directory=a"]))

    def test_control_characters_in_a_word_stay_one_line(self):
        self.refused(["--a\nb\x1b[31m"])
        self.refused(["-n", "1\n2"])

    def test_the_first_problem_is_the_one_that_is_told(self):
        self.assertIn("-n", self.refused(["-n", "0", "--frobnicate"]))


class LargeNumbers(unittest.TestCase):
    def test_parsed_and_clamped(self):
        for digits in ("99999", "9" * 30, "9" * 5000, "0" * 5000 + "9999"):
            value, note = command.clamp(command.worker_count(digits), command.MAX_WORKERS, "workers")
            self.assertEqual(value, 256)
            self.assertIn("using 256", note)
        self.assertEqual(command.clamp(256, 256, "workers"), (256, ""))
        self.assertEqual(command.worker_count("0004"), 4)



class HelpAndVersion(unittest.TestCase):
    def test_go_to_stdout(self):
        result = run_body(PARSE, "--version")
        self.assertEqual((result.status, result.out, result.err), (0, b"tool 1.2.3\n", ""))
        result = run_body(PARSE, "--help")
        self.assertEqual((result.status, result.err), (0, ""))
        self.assertIn(b"--num-workers", result.out)

    def test_win_over_what_follows_them(self):
        self.assertEqual(run_body(PARSE, "--version", "--frobnicate").out, b"tool 1.2.3\n")

    def test_to_a_full_device(self):
        for option in ("--help", "--version"):
            with open("/dev/full", "wb") as full:
                result = run_body(PARSE, option, stdout=full)
            self.assertEqual(result.status, 1)
            self.assertEqual(result.err, "tool: cannot write to standard output: No space left on device\n")


def in_child(*descriptors):
    """A preexec_fn that closes descriptors."""
    return lambda: [os.close(descriptor) for descriptor in descriptors]


class StandardOutput(unittest.TestCase):
    WRITE = "command.stdout().write(b'x' * {})"

    def test_closed(self):
        for size in (1, 100_000):
            result = run_body(self.WRITE.format(size), stdout=None, preexec_fn=in_child(1))
            self.assertEqual(result.status, 1)
            self.assertEqual(result.err, "tool: cannot write to standard output: Bad file descriptor\n")

    def test_full(self):
        for size in (1, 100_000):
            with open("/dev/full", "wb") as full:
                result = run_body(self.WRITE.format(size), stdout=full)
            self.assertEqual(result.status, 1)
            self.assertEqual(result.err, "tool: cannot write to standard output: No space left on device\n")

    def test_reader_gone(self):
        for size in (1, 100_000):
            read_end, write_end = os.pipe()
            os.close(read_end)
            result = run_body(self.WRITE.format(size), stdout=write_end)
            os.close(write_end)
            self.assertEqual((result.status, result.err), (1, ""))

    def test_unused_does_not_matter(self):
        self.assertEqual(run_body("pass", stdout=None, preexec_fn=in_child(1)).status, 0)
        with open("/dev/full", "wb") as full:
            self.assertEqual(run_body("pass", stdout=full).status, 0)

    def test_a_failure_cannot_be_swallowed(self):
        body = "\ntry:\n    command.stdout().write(b'x' * 100_000)\nexcept OSError:\n    pass\n"
        with open("/dev/full", "wb") as full:
            self.assertEqual(run_body(body, stdout=full).status, 1)

    def test_everything_arrives_in_order(self):
        body = "for i in range(30_000): command.stdout().write(b'%d\\n' % i)"
        self.assertEqual(run_body(body).out, b"".join(b"%d\n" % i for i in range(30_000)))

    def test_what_was_written_before_an_error_arrives(self):
        result = run_body("command.stdout().write(b'one\\n'); raise OSError(5, 'oops', 'f')")
        self.assertEqual((result.status, result.out), (1, b"one\n"))

    def test_a_waiting_writer_can_be_stopped(self):
        body = ("from mlperf_common.fileio.stopping import StopFlag\n"
                "flag = StopFlag()\nflag.install()\ncommand.stdout().stop_flag = flag\n"
                "command.say('tool', 'ready')\ncommand.stdout().write(b'x' * 1_000_000)")
        read_end, write_end = os.pipe()
        process = subprocess.Popen([sys.executable, "-c", TOOL], stdout=write_end, stderr=subprocess.PIPE,
                                   env=dict(os.environ, ROOT=ROOT, BODY=body))
        os.close(write_end)
        self.assertEqual(process.stderr.readline(), b"tool: ready\n")
        os.read(read_end, 1)  # it has begun to write, and will fill the pipe
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=20), -signal.SIGTERM)
        process.stderr.close()
        os.close(read_end)


class ClosedDescriptors(unittest.TestCase):
    def test_a_message_never_lands_in_a_file_that_we_opened(self):
        body = ("fds = [os.open('/dev/null', os.O_RDONLY) for _ in range(3)]\n"
                "command.say('tool', 'hello')\nstatus = 0 if min(fds) > 2 else 9")
        for closed in ((0,), (1,), (2,), (0, 1), (0, 1, 2)):
            self.assertEqual(run_body(body, preexec_fn=in_child(*closed)).status, 0, closed)

    def test_full_stderr_is_no_error(self):
        body = "command.say('tool', 'hello')"
        with open("/dev/full", "wb") as full:
            process = subprocess.run([sys.executable, "-c", TOOL], stderr=full, timeout=60,
                                     env=dict(os.environ, ROOT=ROOT, BODY=body))
        self.assertEqual(process.returncode, 0)


class Outcomes(unittest.TestCase):
    def line(self, body, **settings):
        """The only line of a run that must end with 1."""
        result = run_body(body, **settings)
        self.assertEqual(result.status, 1, result.err)
        self.assertEqual(result.err.count("\n"), 1, result.err)
        return result.err

    def test_the_status_of_the_body(self):
        for status in (0, 1, 2):
            self.assertEqual(run_body(f"status = {status}").status, status)

    def test_an_error_of_the_system_names_its_file(self):
        line = self.line("open('/nonexistent/f')")
        self.assertEqual(line, "tool: '/nonexistent/f': No such file or directory\n")

    def test_an_error_of_the_system_without_a_name(self):
        self.assertEqual(self.line("os.close(99)"), "tool: Bad file descriptor\n")

    def test_a_broken_pipe_that_is_not_stdout_is_told(self):
        self.assertEqual(self.line("raise BrokenPipeError(32, 'Broken pipe')"), "tool: Broken pipe\n")

    def test_refusals_line_by_line(self):
        result = run_body("from mlperf_common.fileio import copyplan\n"
                          "raise copyplan.CopyArgumentError(['one', 'two'])")
        self.assertEqual((result.status, result.err), (1, "tool: one\ntool: two\n"))

    def test_unreadable_entries(self):
        result = run_body("from mlperf_common.fileio import copyplan\n"
                          "raise copyplan.UnreadableEntries([('a', 'why'), ('b', 'why')])")
        self.assertEqual(result.status, 1)
        self.assertTrue(result.err)
        for line in result.err.splitlines():
            self.assertTrue(line.startswith("tool: "), line)

    def test_a_bug_is_one_line(self):
        self.assertIn("ZeroDivisionError", self.line("1 / 0"))
        self.assertIn("MemoryError", self.line("raise MemoryError"))

    def test_a_bug_with_debugging_has_a_traceback(self):
        self.assertIn("Traceback", run_body("1 / 0", env={"FASTCP_DEBUG": "1"}).err)
        self.assertNotIn("Traceback", run_body("1 / 0", env={"FASTCP_DEBUG": "0"}).err)

    def test_signals_kill(self):
        start = "import signal\nfrom mlperf_common.fileio.stopping import Interrupted\n"
        for body, signum in (("raise KeyboardInterrupt", signal.SIGINT),
                             ("raise Interrupted(15)", signal.SIGTERM),
                             ("signal.signal(1, lambda *_: None)\nraise Interrupted(1)", signal.SIGHUP)):
            result = run_body(start + body)
            self.assertEqual((result.status, result.out, result.err), (-signum, b"", ""))


class Messages(unittest.TestCase):
    # str with undecodable bytes, not ASCII, control characters, and a surrogate that comes from no name
    ODD = "command.say('tool', 'a\\udcff b\\u00e9 c\\n\\x1b\\x9b d\\ud800')"

    def test_odd_names_in_every_locale(self):
        for env in ({"LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}, {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"},
                    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
            result = run_body(self.ODD, env=env)
            self.assertEqual(result.status, 0, (env, result.err))
            self.assertEqual(result.err.count("\n"), 1)
            self.assertNotIn("\x1b", result.err)
            self.assertIn("c\\n\\x1b\\x9b d\\ud800", result.err)

    def test_bytes_of_a_name_go_out_as_they_are(self):
        self.assertEqual(run_body("command.say('tool', 'a\\udcff\\u00e9')").err, "tool: a\udcff\u00e9\n")

    def test_odd_operands_in_an_error(self):
        for env in ({"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
            result = run_body("open(argv[0])", b"/nonexistent/\xff\n", env=env)
            self.assertEqual((result.status, result.err.count("\n")), (1, 1))


class StartUp(unittest.TestCase):
    def test_nothing_heavy_is_imported(self):
        code = (f"import sys\nsys.path[0] = {ROOT!r}\nfrom mlperf_common.fileio import command\n"
                "command.parse(command.Parser('x', version='1', usage='x'), [])\n"
                "heavy = 'multiprocessing', 'ctypes', 'hashlib', 'typing', 'subprocess'\n"
                "print([name for name in heavy if name in sys.modules])")
        out = subprocess.run([sys.executable, "-S", "-c", code], env=dict(os.environ, ROOT=ROOT),
                             check=True, stdout=subprocess.PIPE).stdout
        self.assertEqual(out, b"[]\n")


if __name__ == "__main__":
    unittest.main()
