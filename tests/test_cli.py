#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Drives the built tool: test_cli.py MSA [CASE_FOLDER].

Every case file passes with one and two threads, all results bit-equal, also when all memory that no visible key names is
poisoned; every way in which a check can fail makes it fail. The case files are those of CASE_FOLDER (default: cases beside
this file) and of the folder that MSA_CASES names.
"""
import json
import os
import pty
import struct
import subprocess

from tool import CASES, ENVIRONMENT, TIMEOUT, TOOL, base, counts, finish, folder, msa, private_mounts, refused, run, skip, \
    test
import casefile
from casefile import CaseFile, Tensor, ints


def hash_of(path, *options):
    """The hash that a passing check prints."""
    line = msa("check", "--hash", *options, path)
    assert line.startswith("ok ") and line.count("\n") == 1, line
    return line.rsplit("hash ", 1)[1]


# ---- case files

def check_case(path):
    expected = hash_of(path, "--threads", "1")
    assert hash_of(path, "--threads", "2") == expected, "bits depend on the number of threads"
    for byte in "0", "127", "255":
        assert hash_of(path, "--threads", "2", "--poison", byte) == expected, "bits change with poison " + byte
    portable = hash_of(path, "--isa", "c", "--poison", "248") # AMX adds in an order of its own
    assert portable == expected or "_amx" in msa("check", path), "bits depend on the instruction set"
    assert hash_of(path, "--plan", "prefill") and hash_of(path, "--plan", "decode")


def run_case(path):
    case = casefile.read(path)
    files = []
    for options in ["--threads", "1"], ["--threads", "2", "--poison", "170"]:
        assert msa("run", path, "-o", folder.path("out"), *options) == ""
        with open(folder.path("out"), "rb") as file:
            files.append(file.read())
    assert files[0] == files[1], "files differ"
    results = casefile.read(folder.path("out"))
    assert len(files[0]) % 8 == len(results.header()[1]) % 8, "the data does not start at a multiple of 8"
    attends, indexes = case.metadata["op"] != "index", case.metadata["op"] in ("index", "layer")
    names = ["out", "lse"] * attends + ["scores", "topk", "num_valid_pages"] * indexes
    assert list(results.tensors) == names, list(results.tensors)
    for name in names:
        assert results[name].shape == case["expected." + name].shape, name
    if indexes: # NaN exactly where the expected scores have it
        nan = [[x != x for x in f["scores" if f is results else "expected.scores"].numbers()] for f in (results, case)]
        assert nan[0] == nan[1]


def run_one_key():
    path = os.path.join(CASES, "prefill_q8kv4_one_key.safetensors")
    msa("run", path, "-o", folder.path("out"))
    results = casefile.read(folder.path("out"))
    assert results["out"].dtype == "BF16" and results["out"].data == b"\x80\x3f" * (16 * 128), "out is not 1"
    assert results["lse"].data == bytes(4 * 16), "lse is not 0"
    assert results.metadata["op"] == "prefill" and results.metadata["kernels"]


def all_cases():
    folders = [CASES] + ([os.environ["MSA_CASES"]] if os.environ.get("MSA_CASES") else [])
    seen = {}
    for place in folders:
        for name in sorted(os.listdir(place)):
            if name.endswith(".safetensors"):
                seen.setdefault(name, os.path.join(place, name))
    for name, path in seen.items():
        test("check " + name, check_case, path)
        test("run " + name, run_case, path)
    if len(folders) == 1:
        skip("more case files", "MSA_CASES names no folder")
    test("results of one key are exact", run_one_key)
    test("many cases in one call", many_cases)


def many_cases():
    names = ["prefill_q8kv4_one_key", "index_nvfp4_h2"]
    paths = [os.path.join(CASES, name + ".safetensors") for name in names]
    lines = msa("check", *paths).splitlines()
    assert len(lines) == 2 and all(line.startswith("ok ") and name in line for line, name in zip(lines, names)), lines
    wrong = base(names[0])
    wrong["expected.lse"].set_number(0, 1.0)
    wrong_path = folder.write(wrong)
    assert msa("check", paths[0], wrong_path, paths[1], status=1).count("\n") == 3
    refused("cannot be opened", "check", paths[0], wrong_path, folder.path("none"), paths[1], silent=False)


# ---- the same keys in other layouts give the same bits

def same_results(case, path):
    assert hash_of(folder.write(case)) == hash_of(path)
    assert hash_of(folder.path(), "--poison", "127") == hash_of(path)


def joint_layout():
    case = base("prefill_q8kv8_gqa4")
    pages, heads = case["k"].shape[:2]
    rows = [k + v for k, v in zip(case["k"].rows(3), case["v"].rows(3))]
    case["kv"] = Tensor("F8_E4M3", [pages, heads, 128, 256], b"".join(rows))
    del case.tensors["k"], case.tensors["v"]
    same_results(case, os.path.join(CASES, "prefill_q8kv8_gqa4.safetensors"))


def quad(scales):
    return bytes(scales[token * 8 + group] for quad in range(32) for group in range(8) for token in range(quad * 4, quad * 4 + 4))


def slot_layout(order):
    case = base("prefill_q8kv4_scale")
    pages, heads = case["k"].shape[:2]
    slots = []
    for k, k_scale, v, v_scale in zip(*(case[name].rows(2) for name in ("k", "k_scale", "v", "v_scale"))):
        slots += [k, k_scale, v, quad(v_scale) if order == "quad" else v_scale]
    case["kv_slots"] = Tensor("U8", [pages, 2 * heads, 128, 72], b"".join(slots))
    case.metadata["v_scale_order"] = order
    for name in "k", "k_scale", "v", "v_scale":
        del case.tensors[name]
    same_results(case, os.path.join(CASES, "prefill_q8kv4_scale.safetensors"))


def separate_quad_scales():
    case = base("prefill_q8kv4_scale")
    case["v_scale"].data = bytearray(b"".join(quad(scales) for scales in case["v_scale"].rows(2)))
    case.metadata["v_scale_order"] = "quad"
    same_results(case, os.path.join(CASES, "prefill_q8kv4_scale.safetensors"))


def cumulative_keys():
    case = base("decode_q8kv4_q1")
    ends = [0]
    for length in case["kv_lens"].numbers():
        ends.append(ends[-1] + length)
    case["cu_seqlens_k"] = ints(ends)
    del case.tensors["kv_lens"]
    same_results(case, os.path.join(CASES, "decode_q8kv4_q1.safetensors"))


def unaligned_offsets():
    case = base("decode_q8kv4_q1")
    shifted = CaseFile(case.metadata, {"k_global_scale": Tensor("F32", [1], struct.pack("<f", 1.0)), **case.tensors})
    header, data = shifted.header()
    for pad in range(1, 8): # spaces after the header move the data through all alignments
        casefile.write_raw(folder.path(), json.dumps(header).encode() + b" " * pad, data)
        assert hash_of(folder.path()) == hash_of(os.path.join(CASES, "decode_q8kv4_q1.safetensors"))


def unused_tensors():
    case = base("prefill_q8kv4_one_key")
    case["index_q"] = Tensor("I64", [3], bytes(24))
    case["expected.scores"] = Tensor("BOOL", [1], bytes(1))
    case.metadata["anything"] = "at all"
    same_results(case, os.path.join(CASES, "prefill_q8kv4_one_key.safetensors"))


def unit_scales():
    case = base("prefill_q8kv8_gqa4")
    case["q_descale"] = Tensor("F32", [2], struct.pack("<2f", 0.5, 0.5))
    case["k_descale"] = Tensor("F32", [1], struct.pack("<f", 2.0))
    case["v_descale"] = Tensor("F32", [2], struct.pack("<2f", 1.0, 1.0))
    same_results(case, os.path.join(CASES, "prefill_q8kv8_gqa4.safetensors"))
    for name, out_or_lse in ("q_descale", "lse"), ("v_descale", "out"):
        case[name].set_number(1, 4.0)
        assert out_or_lse in msa("check", folder.write(case), status=1)
        case[name].set_number(1, 0.5 if name == "q_descale" else 1.0)


# ---- edges

def output(case, *options):
    msa("run", folder.write(case), "-o", folder.path("out"), *options)
    return casefile.read(folder.path("out"))


NOTHING = struct.pack("<f", float("-inf"))


def empty_requests():
    case = base("prefill_q8kv4_scale")
    plain = output(case)
    rows = case["q"].shape[0]
    width, table = case["page_table"].shape[1], case["page_table"].numbers()
    case["cu_seqlens_q"] = ints([0, 0, rows, rows, rows])
    case["kv_lens"] = ints([0, case["kv_lens"].numbers()[0], 0, 77])
    case["page_table"] = ints([-7] * width + table + [1 << 30] * width + table, [4, width])
    assert output(case).tensors["out"].data == plain["out"].data


def padding_rows():
    case = base("layer_q8kv4") if os.path.exists(os.path.join(CASES, "layer_q8kv4.safetensors")) else base("hf_layer_q8kv8")
    plain = output(case)
    rows = case["q"].shape[0]
    for name in "q", "index_q":
        row = len(case[name].data) // rows
        case[name] = Tensor(case[name].dtype, [rows + 2] + case[name].shape[1:], case[name].data + b"\x7f" * (2 * row))
    case.tensors = {n: t for n, t in case.tensors.items() if not n.startswith("expected")}
    for options in [], ["--poison", "255"], ["--poison", "0"]:
        results = output(case, *options)
        out, lse = results["out"].rows(1), results["lse"].rows(1)
        assert b"".join(out[:rows]) == plain["out"].data and not any(out[rows]) and not any(out[rows + 1])
        assert b"".join(lse[:rows]) == plain["lse"].data and lse[rows] == NOTHING * results["lse"].shape[1]
        assert all(list_ == b"\xff" * len(list_) for list_ in results["topk"].rows(2)[rows::rows + 2])
        assert results["num_valid_pages"].numbers()[rows:] == [0, 0]
        assert all(x != x for x in struct.unpack("<%df" % results["scores"].shape[2], results["scores"].rows(2)[rows]))


def no_rows():
    for name in "prefill_q8kv4_one_key", "index_nvfp4_h2":
        case = base(name)
        for name in list(case.tensors):
            tensor = case[name]
            if name in ("q", "index_q", "expected.num_valid_pages", "expected.out", "expected.lse"):
                case[name] = Tensor(tensor.dtype, [0] + tensor.shape[1:], b"")
            elif name in ("topk", "expected.topk", "expected.scores"):
                case[name] = Tensor(tensor.dtype, tensor.shape[:1] + [0] + tensor.shape[2:], b"")
        case["cu_seqlens_q"] = ints([0] * len(case["cu_seqlens_q"].numbers()))
        assert msa("check", folder.write(case)).startswith("ok ")
        case["cu_seqlens_q"], case["kv_lens"] = ints([0]), ints([])
        case["page_table"] = ints([], [0, case["page_table"].shape[1]])
        assert msa("check", folder.write(case)).startswith("ok "), "no requests"


def more_queries_than_keys():
    case = base("prefill_q8kv4_scale")
    rows, heads = case["q"].shape[:2]
    case["kv_lens"] = ints([3])
    results = output(case)
    out, lse = results["out"].rows(1), results["lse"].rows(1)
    assert not any(b"".join(out[:rows - 3])) and all(row == NOTHING * heads for row in lse[:rows - 3])
    assert all(any(row) for row in out[rows - 3:])


def table_without_columns():
    case = base("prefill_q8kv4_scale")
    case["page_table"], case["kv_lens"] = ints([], [1, 0]), ints([0])
    case["topk"] = ints([-1] * len(case["topk"].numbers()), case["topk"].shape)
    del case.tensors["expected.out"], case.tensors["expected.lse"]
    assert not any(output(case)["out"].data)
    case["kv_lens"] = ints([case["q"].shape[0]])
    case["topk"].set_number(0, 0)
    refused("error bit 2", "run", folder.write(case), "-o", folder.path("out"))


def out_dtype():
    case = base("prefill_q8kv4_one_key")
    case.metadata["out_dtype"] = "fp16"
    results = output(case)
    assert results["out"].dtype == "F16" and results["out"].data == b"\x00\x3c" * (16 * 128)
    assert msa("check", folder.path()).startswith("ok ")


# ---- the check can fail

def must_fail(case, *words):
    line = msa("check", folder.write(case), status=1)
    assert line.startswith("FAIL") and line.count("\n") == 1, line
    for word in words:
        assert word in line, line


def move_past_tolerance(case_name, tensor, index, key):
    case = base(case_name)
    # The true result lies within the tolerance of the old value, so two and a bit of them are certainly too far.
    old = case["expected." + tensor].numbers()[index]
    reach = float(case.metadata[key + "_atol"]) + float(case.metadata[key + "_rtol"]) * abs(old)
    case["expected." + tensor].set_number(index, old + 2.2 * reach / (1 - float(case.metadata[key + "_rtol"])) + 1e-30)
    if reach:
        must_fail(case, tensor, "1 of ")
    case["expected." + tensor].set_number(index, old)
    assert msa("check", folder.write(case))


def special_values():
    for name, index in ("out", 700), ("lse", 40):
        for value in float("nan"), float("inf"), float("-inf"):
            case = base("prefill_q8kv4_scale")
            case["expected." + name].set_number(index, value)
            must_fail(case, name, "1 of ")
    case = base("index_nvfp4_h2")
    scores = case["expected.scores"].numbers()
    written = next(i for i, x in enumerate(scores) if x == x)
    unwritten = next(i for i, x in enumerate(scores) if x != x)
    case["expected.scores"].set_number(written, float("nan"))
    must_fail(case, "scores", "1 of ")
    case["expected.scores"].set_number(written, scores[written])
    case["expected.scores"].set_number(unwritten, 0.0)
    must_fail(case, "scores", "1 of ")


def exchange_keys_and_values():
    case = base("prefill_q8kv8_gqa4")
    case["k"], case["v"] = case["v"], case["k"]
    must_fail(case, "out", "lse")


def replace_listed_page():
    case = base("prefill_holes")
    ids = case["topk"].numbers()
    rows, k = case["topk"].shape[1:]
    listed = ids[(rows - 1) * k:rows * k]
    other = next(p for p in range(min(16, max(listed))) if p not in listed)
    case["topk"].set_number((rows - 1) * k + listed.index(max(listed)), other)
    must_fail(case, "out", "lse")


def change_lists():
    case = base("index_nvfp4_h2")
    lists = case["expected.topk"]
    ids, k = lists.numbers(), lists.shape[2]
    full = next(i for i in range(0, len(ids), k) if ids[i + k - 1] >= 0)
    other = next(p for p in range(24) if p not in ids[full:full + k])
    lists.set_number(full + 3, other)
    must_fail(case, "topk 1 of ")
    lists.set_number(full + 3, ids[full + 3 - 1])
    must_fail(case, "topk 1 of ")
    lists.set_number(full + 3, ids[full + 3])
    lists.set_number(full + k - 1, -1)
    must_fail(case, "topk 1 of ")
    for i in range(k): # the same set in another order is right
        lists.set_number(full + i, ids[full + k - 1 - i])
    assert msa("check", folder.write(case))
    count = case["expected.num_valid_pages"]
    count.set_number(5, count.numbers()[5] + 1)
    must_fail(case, "num_valid_pages 1 of 32 wrong, first [5]")


def wrong_scale():
    for text in "0.0501", "0.0499":
        case = base("prefill_q8kv4_scale")
        case.metadata["sm_scale"] = text
        must_fail(case, "lse")

# ---- usage

def usage():
    good = os.path.join(CASES, "prefill_q8kv4_one_key.safetensors")
    for option in "--help", "-h", "help":
        text = msa(option)
        assert all("msa " + command in text for command in ("run", "check", "make", "bench", "info")), text
    assert msa("--version").startswith("msa ")
    for command in "run", "check", "make", "bench", "info":
        text = msa(command, "--help")
        assert "Usage: msa " + command in text and "--help" in text, text
        for option in "--splits", "--scores", "--strategy": # make refuses them
            assert (option in text) == {"make": False, "bench": True}.get(command, option in text), text
    refused("a command is missing; see msa --help")
    refused("frobnicate", "frobnicate")
    refused("--frobnicate", "check", "--frobnicate", good)
    refused("case file", "check")
    refused("case file", "run", "-o", folder.path("out"))
    refused("case file", "run", good, good, "-o", folder.path("out"))
    refused("-o", "run", good)
    refused("--output", "run", good, "--output")
    refused("extra", "info", "extra")
    for option, values in {"--threads": ["-1", "1025", "x", "", "1.5", " 1"], "--device": ["", "gpu", "cuda:", "cuda:x", "cuda:-1"],
                           "--precision": ["", "exactly"], "--plan": ["index"], "--strategy": ["best"],
                           "--poison": ["256", "-1", "x"]}.items():
        for value in values:
            refused(option, "check", option + "=" + value, good)
    refused("--isa: 'mmx' is none of: best, c, ", "check", "--isa", "mmx", good)
    assert msa("check", "--isa", "best", good) == msa("check", good)
    for command in "run", "check", "bench":
        assert "best|c|avx2" in msa(command, "--help")


def device_without_backend():
    good = os.path.join(CASES, "prefill_q8kv4_one_key.safetensors")
    refused("device", "check", "--device", "cuda:1000", good)
    assert msa("check", "--device", "cpu", good)


def bad_outputs():
    good = os.path.join(CASES, "prefill_q8kv4_one_key.safetensors")
    before = set(os.listdir(folder.name))
    for path in folder.path("none/out"), folder.name, "/proc/none":
        refused("cannot be written", "run", good, "-o", path)
    for path in "", "-":
        refused("run: -o '%s' cannot be written" % path, "run", good, "-o", path)
        refused("make: -o '%s' cannot be written" % path, "make", "-o", path)
        assert not path or not os.path.exists(path)
    if os.path.exists("/dev/full"):
        refused("cannot be written", "run", good, "-o", "/dev/full")
        for arguments in ["check", good], ["--help"], ["bench", "--help"], ["info", "--json"]:
            with open("/dev/full", "w") as full:
                tool = subprocess.run([TOOL, *arguments], env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE)
            assert tool.returncode == 2 and tool.stderr == b"msa: the output cannot be written\n", (arguments, tool)
    msa("run", good, "-o", "/dev/null")
    assert not os.path.isfile("/dev/null"), "the device was replaced"
    assert set(os.listdir(folder.name)) == before, "a partial file was left"


def overwritten_output():
    good = os.path.join(CASES, "prefill_q8kv4_one_key.safetensors")
    path = folder.path("kept")
    with open(path, "w") as file:
        file.write("old")
    case = base("prefill_q8kv4_scale")
    case["topk"].set_number(0, 1 << 30)
    refused("topk", "run", folder.write(case), "-o", path)
    with open(path) as file:
        assert file.read() == "old", "a failed run touched the output"
    msa("run", good, "-o", path)
    assert casefile.read(path)["lse"].data == bytes(64)
    case = folder.write(base("prefill_q8kv4_scale"))
    for name in case, os.path.join(os.path.dirname(case), ".", os.path.basename(case)):
        refused("is the case file itself", "run", case, "-o", name)
    casefile.read(case)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def outputs_that_are_no_plain_files():
    """Links and pipes stay what they are, and a file keeps its mode; names may be as long as the system allows."""
    good = os.path.join(CASES, "prefill_q8kv4_one_key.safetensors")
    make = ["make", "--op", "index", "--queries", "1", "--prefix", "0"]
    for arguments in ["run", good], make:
        plain, link, target = folder.path("plain"), folder.path("link"), folder.path("target")
        msa(*arguments, "-o", plain)
        with open(target, "w") as file:
            file.write("old")
        for path in target, folder.path("later"):
            os.symlink(path, link)
            msa(*arguments, "-o", link)
            assert os.readlink(link) == path and read(path) == read(plain)
            os.unlink(link)
            os.unlink(path)
        pipe = folder.path("pipe")
        os.mkfifo(pipe)
        reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
        msa(*arguments, "-o", pipe)
        assert reader.communicate(timeout=TIMEOUT)[0] == read(plain)
        os.unlink(pipe)
        for mode in 0o600, 0o640, 0o604:
            os.chmod(plain, mode)
            msa(*arguments, "-o", plain)
            assert os.stat(plain).st_mode & 0o7777 == mode
        long = folder.path("n" * 255)
        msa(*arguments, "-o", long)
        assert read(long) == read(plain)
        os.unlink(long)
        before = set(os.listdir(folder.name))
        refused("-o is given twice", *arguments, "-o", plain, "-o", folder.path("other"))
        assert set(os.listdir(folder.name)) == before


def output_to_stdout(*arguments):
    """What leads to the standard output is written through; in a /dev of this test's own."""
    script = """mount -t tmpfs none /dev && mkdir /dev/shm && ln -s /proc/self/fd/1 /dev/stdout || exit 77
        "$@" -o /dev/stdout >"$0" && test -L /dev/stdout"""
    done = private_mounts(script, folder.path("out"), TOOL, *arguments)
    assert done.returncode == 0, done.stderr
    msa(*arguments, "-o", folder.path("plain"))
    assert read(folder.path("out")) == read(folder.path("plain"))


def refused_before_the_work():
    """A file that cannot be written is noticed before the case is read."""
    for path in folder.path("none/out"), folder.name:
        refused("-o: '%s' cannot be written" % path, "run", folder.path("no case"), "-o", path)


def names_of_cases():
    """No name of a file makes a line of its own."""
    for name in "\nok    forged: prefill", "\x1b[31m\r\t\x7f":
        path = folder.path("case" + name)
        base("prefill_q8kv4_one_key").write(path)
        escaped = "".join("\\x%02x" % ord(c) if ord(c) < 32 or ord(c) == 127 else c for c in path)
        line = msa("check", path)
        assert line.startswith("ok    " + escaped + ": prefill, ") and line.count("\n") == 1, line


def default_threads(of_openmp):
    environment = dict(ENVIRONMENT, OMP_NUM_THREADS=str(of_openmp))
    text = subprocess.run([TOOL, "info", "--json"], env=environment, capture_output=True, check=True).stdout
    return json.loads(text)["devices"][0]["threads"]


def info():
    text = msa("info")
    assert "cpu" in text and "attention_c" in text
    parsed = json.loads(msa("info", "--json"))
    assert parsed["devices"][0]["device"] == "cpu" and "c" in parsed["cpu_isas"]
    kernels = parsed["kernels"]
    assert any(kernel["name"] == "attention_c" and kernel["available"] for kernel in kernels)
    refused("exclude each other", "info", "--json", "--markdown")
    if default_threads(3) == 3: # not where the build lacks OpenMP
        assert default_threads(5000) == 1024, "a context takes 1024 threads at most"
    lines = msa("info", "--markdown").splitlines()
    assert all(line.startswith("| ") or line.startswith("|---") for line in lines)
    assert len({line.count("|") for line in lines}) == 1, "rows of different length"
    assert len(lines) == 2 + len({(kernel["operation"], kernel["formats"]) for kernel in kernels})


def progress():
    """On a terminal, work of some seconds shows progress and gives the same line; short work shows nothing."""
    case = base("prefill_q8kv8_gqa4")
    copies = 80
    for name in "q", "expected.out", "expected.lse":
        case[name] = Tensor(case[name].dtype, [40 * copies] + case[name].shape[1:], case[name].data * copies)
    case["topk"] = Tensor("I32", [2, 40 * copies, 16], b"".join(list_ * copies for list_ in case["topk"].rows(1)))
    case["cu_seqlens_q"] = ints([40 * i for i in range(copies + 1)])
    case["kv_lens"] = ints(case["kv_lens"].numbers() * copies)
    case["page_table"] = ints(case["page_table"].numbers() * copies, [copies, case["page_table"].shape[1]])
    long = folder.write(case)
    short = os.path.join(CASES, "prefill_q8kv4_one_key.safetensors")
    plain = msa("check", "--hash", "--threads", "1", "--isa", "c", long)
    for path, shows in (long, True), (short, False):
        controller, terminal = pty.openpty()
        tool = subprocess.Popen([TOOL, "check", "--hash", "--threads", "1", "--isa", "c", path], env=ENVIRONMENT,
                                stdout=subprocess.PIPE, stderr=terminal)
        os.close(terminal)
        output = tool.communicate(timeout=TIMEOUT)[0].decode()
        shown = b""
        try:
            while True:
                shown += os.read(controller, 4096)
        except OSError: # the end, on Linux
            pass
        os.close(controller)
        assert tool.returncode == 0 and (b"%" in shown) == shows, shown
        assert path == short or output == plain


def main():
    for name, tensor, index, key in ("prefill_q8kv4_scale", "out", 4321, "out"), ("prefill_q8kv4_scale", "lse", 17, "lse"), \
            ("index_nvfp4_h2", "scores", 0, "scores"), ("hf_layer_q8kv8", "out", 99999, "out"):
        test("%s of %s moved past its tolerance" % (tensor, name), move_past_tolerance, name, tensor, index, key)
    test("NaN and infinity where a number is right", special_values)
    test("K and V exchanged", exchange_keys_and_values)
    test("a page of a list replaced", replace_listed_page)
    test("lists and counts changed", change_lists)
    test("another sm_scale", wrong_scale)
    test("layout kv", joint_layout)
    test("layout kv_slots, linear", slot_layout, "linear")
    test("layout kv_slots, quad", slot_layout, "quad")
    test("separate V scales in quad order", separate_quad_scales)
    test("cu_seqlens_k in place of kv_lens", cumulative_keys)
    test("data at any alignment", unaligned_offsets)
    test("known tensors that the operation does not use", unused_tensors)
    test("descales", unit_scales)
    test("empty requests", empty_requests)
    test("padding rows", padding_rows)
    test("no rows, no requests", no_rows)
    test("more queries than keys", more_queries_than_keys)
    test("a page table without columns", table_without_columns)
    test("out_dtype", out_dtype)
    test("usage", usage)
    test("devices", device_without_backend)
    test("outputs that cannot be written", bad_outputs)
    test("outputs that exist", overwritten_output)
    test("outputs that are no plain files", outputs_that_are_no_plain_files)
    test("run -o /dev/stdout", output_to_stdout, "run", os.path.join(CASES, "prefill_q8kv4_one_key.safetensors"))
    test("make -o /dev/stdout", output_to_stdout, "make", "--op", "index", "--queries", "1", "--prefix", "0")
    test("outputs are looked at before the work", refused_before_the_work)
    test("names of cases", names_of_cases)
    test("info", info)
    test("progress", progress)
    all_cases()
    finish()


main()
