# SPDX-License-Identifier: MIT
"""What tests of the tool share: they are programs whose first argument is the built tool; the second, if any, is a folder of
case files (default: cases beside this file)."""
import os
import subprocess
import sys
import tempfile
import traceback

sys.dont_write_bytecode = True  # the source tree stays as it is
import casefile

TOOL = os.path.abspath(sys.argv[1])
CASES = os.path.abspath(sys.argv[2] if len(sys.argv) > 2 else os.path.join(os.path.dirname(__file__), "cases"))
ENVIRONMENT = dict(os.environ, OMP_WAIT_POLICY="passive")  # waiting threads leave a busy machine to others
# A sanitizer's report must not look like one of the tool's own statuses.
for sanitizer in "ASAN", "UBSAN", "LSAN", "TSAN":
    ENVIRONMENT[sanitizer + "_OPTIONS"] = "exitcode=99:halt_on_error=1:" + os.environ.get(sanitizer + "_OPTIONS", "")
TIMEOUT = 300
ATTENTION_FORMATS = "bf16 fp16 q8kv8 q8kv4 bf16kv8 bf16kv4 fp16kv8 fp16kv4".split()
INDEX_FORMATS = "bf16 fp8 nvfp4".split()

counts = {"passed": 0, "failed": 0, "skipped": 0}


class Skipped(Exception):
    """A test cannot be run here."""


def test(name, function, *arguments):
    """Runs one test: an assertion that fails, or any other exception but Skipped, is a failure."""
    try:
        function(*arguments)
        counts["passed"] += 1
        print("ok - " + name)
    except Skipped as reason:
        skip(name, reason)
    except Exception:
        counts["failed"] += 1
        print("not ok - " + name)
        print("".join("# " + line + "\n" for line in traceback.format_exc().splitlines()), end="")
    sys.stdout.flush()


def skip(name, reason):
    counts["skipped"] += 1
    print("ok - %s # SKIP %s" % (name, reason))


def run(*arguments):
    return subprocess.run([TOOL, *arguments], env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=TIMEOUT, text=True, errors="replace")


def private_mounts(script, *arguments):
    """Runs a shell script with mounts of its own, where it ends with 77 if it cannot mount; or skips the test."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private", "sh", "-c", script]
    try:
        done = subprocess.run([*command, *arguments], env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=TIMEOUT, text=True, errors="replace")
    except FileNotFoundError:
        raise Skipped("no unshare")
    if done.returncode == 77 or done.stderr.startswith("unshare: "):
        raise Skipped("no mounts of this test's own")
    return done


def msa(*arguments, status=0):
    """Runs the tool and requires the exit status; returns stdout."""
    done = run(*arguments)
    assert done.returncode == status, "status %d, expected %d: msa %s\n%s%s" % (
        done.returncode, status, " ".join(arguments), done.stdout, done.stderr)
    return done.stdout


def refused(words, *arguments, silent=True):
    """Requires status 2, one line on stderr that starts with "msa: " and holds the words; and, if silent, no stdout."""
    done = run(*arguments)
    errors = done.stderr
    assert done.returncode == 2, "status %d, expected 2: %s%s" % (done.returncode, done.stdout, errors)
    assert errors.startswith("msa: ") and errors.count("\n") == 1 and errors.endswith("\n"), "no single line: " + errors
    assert not silent or not done.stdout, "stdout: " + done.stdout
    for word in words if isinstance(words, (list, tuple)) else [words]:
        assert word in errors, "'%s' is not in: %s" % (word, errors)


class Folder(tempfile.TemporaryDirectory):
    def path(self, name="case.safetensors"):
        return os.path.join(self.name, name)

    def write(self, case):
        case.write(self.path())
        return self.path()


folder = Folder()


def read_bytes(name):
    with open(folder.path(name), "rb") as file:
        return file.read()


def base(name):
    return casefile.read(os.path.join(CASES, name + ".safetensors"))


def finish():
    """Says the counts and ends the program."""
    folder.cleanup()
    print("%(passed)d passed, %(failed)d failed, %(skipped)d skipped" % counts)
    sys.exit(counts["failed"] != 0)
