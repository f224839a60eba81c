#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Drives `msa bench` of the built tool: test_bench.py MSA.

Results have every field, count work by the formulas of the contract, are set against the
peaks rightly and repeat by their own command; suites have the lengths of the table; what makes no sense gets one line
and status 2.
"""
import csv
import io
import itertools
import json
import os
import pty
import shlex
import shutil
import subprocess
import time

from tool import (ATTENTION_FORMATS, INDEX_FORMATS, TOOL, finish, folder, msa, private_mounts, read_bytes, refused, run,
                  skip, test)

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench", "prefill_cases_128.csv")
PAGE = 128

FIELDS = """op format pattern batch total_q kv_len q_heads kv_heads index_heads threads isa device kernel strategy
precision median_us p10_us p90_us spread gflops gbps peak_gflops peak_gbps bound floor_us peak_fraction""".split()
WITHOUT_FLOPS = {"topk", "combine", "quantise"}


def cache_bytes():
    """As the tool takes it: the largest cache that the system tells of."""
    for name in "LEVEL3_CACHE_SIZE", "LEVEL2_CACHE_SIZE":
        text = subprocess.run(["getconf", name], capture_output=True, text=True).stdout.strip()
        if text.isdigit() and int(text):
            return int(text)
    return 32 << 20


CACHE = cache_bytes()


def bench(*arguments):
    """Results as a list of dictionaries, from one call of each."""
    return json.loads(msa("bench", *arguments, "--run-once", "--json", "-"))


# ---- results

TINY = {
    "prefill": "--q-heads 2 --kv-heads 1 --queries 5 --prefix 3000".split(),
    "decode": "--q-heads 2 --kv-heads 1 --batch 3 --context 3000 --new 2 --footprint 8".split(),
    "index": "--index-heads 2 --queries 5 --prefix 3000".split(),
    "layer": "--q-heads 2 --kv-heads 2 --index-heads 2 --queries 5 --prefix 3000".split(),
    "topk": "--rows 3 --pages 500".split(),
    "combine": "--queries 4 --q-heads 2 --splits 3 --footprint 1".split(),
    "quantise": "--rows 10 --kv-heads 2 --footprint 1".split(),
}


def close(a, b):
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def check_result(result, footprint=0):
    for field in FIELDS:
        assert field in result, field + " is missing"
    assert result["p10_us"] <= result["median_us"] <= result["p90_us"] and result["median_us"] > 0
    if result["samples"] > 1:
        assert close(result["spread"], (result["p90_us"] - result["p10_us"]) / result["median_us"])
    else:
        assert result["spread"] is None
    assert result["prepare_run_us"] >= result["median_us"] * 0.999
    planned = result["op"] in ("prefill", "decode", "index", "layer")
    for key in "batch", "total_q", "kv_len", "precision":
        assert (result[key] is not None) == planned
    own = result["op"] == "quantise" and result["format"] in ("bf16", "fp16")  # rows are copied, by no kernel
    assert bool(result["kernel"]) != own and result["kernel"] != ""
    if result["flops"] == 0:
        assert result["gflops"] is None
    else:
        assert close(result["gflops"], result["flops"] / result["median_us"] * 1e-3)
    assert close(result["gbps"], result["bytes"] / result["median_us"] * 1e-3)
    # The larger floor counts, that of memory only where the inputs do not fit the caches.
    memory_us, compute_us = (result[work] / result[peak] * 1e-3
                             for work, peak in (("bytes", "peak_gbps"), ("flops", "peak_gflops")))
    memory = result["op"] in WITHOUT_FLOPS or footprint > CACHE and memory_us > compute_us
    shares = [result[name] for name in ("peak_fraction_p10", "peak_fraction", "peak_fraction_p90")]
    if memory and footprint <= CACHE:
        assert shares == [None] * 3 and result["floor_us"] is None and result["bound"] is None
    else:
        assert result["bound"] == ("memory" if memory else "compute")
        assert close(result["floor_us"], memory_us if memory else compute_us)
        assert 0 < shares[0] and shares == sorted(shares)
        if result["samples"] == 1:
            assert shares[0] == shares[2] and close(shares[1], result["floor_us"] / result["median_us"])
    assert result["threads"] >= 1 and result["isa"] and result["device"]


def check_repeat(result):
    """The command of a result gives the same work."""
    arguments = shlex.split(result["command"])
    assert arguments[0] == "msa" and arguments[-1] == "--run-once"
    again, = json.loads(msa(*arguments[1:], "--json", "-"))
    assert again["work"] == result["work"] and again["command"] == result["command"]
    assert again["flops"] == result["flops"] and again["bytes"] == result["bytes"]


def check_op(op, *options):
    results = bench(op, *TINY[op], *options)
    for result in results:
        assert result["op"] == op
        check_result(result)
    check_repeat(results[-1])


def attention_flops(q_heads, k, positions):
    return 4 * 128 * q_heads * sum((min(k, p // PAGE + 1) - 1) * PAGE + p % PAGE + 1 for p in positions)


def index_flops(heads, positions):
    return 2 * 128 * 128 * heads * sum(p // PAGE for p in positions)


def check_work():
    result, = bench("prefill", "--q-heads", "6", "--kv-heads", "2", "--queries", "5", "--prefix", "2100", "--k", "7")
    assert result["flops"] == attention_flops(6, 7, range(2100, 2105))
    assert (result["batch"], result["total_q"], result["kv_len"]) == (1, 5, 2105)
    index = "index --index-heads 3 --queries 200 --prefix 100 --batch 2 --format fp8".split()
    result, = bench(*index)
    positions = list(range(100, 300)) * 2
    assert result["flops"] == index_flops(3, positions)
    pages, scores = 2 * (299 // PAGE), sum(p // PAGE for p in positions)
    assert result["bytes"] == pages * PAGE * 128 + 400 * 3 * 128 + 3 * scores * 4 + 400 * 3 * 16 * 4
    scores_only, = bench(*index, "--scores-only")
    assert scores_only["bytes"] == result["bytes"] - 400 * 3 * 16 * 4 and scores_only["flops"] == result["flops"]
    # Two new tokens, lists of 4 of which 2 are common: 6 distinct pages a head.
    result, = bench(*"decode --format q8kv4 --q-heads 4 --kv-heads 2 --batch 1 --context 90000 --new 2 --k 4".split(),
                    "--footprint", "0")
    pages = (result["bytes"] - 2 * 4 * (128 + 256) - 2 * 2 * 4 * 4) / (2 * PAGE * 72)
    assert pages == 2 * 6, pages
    result, = bench("layer", *TINY["layer"])
    assert result["flops"] == attention_flops(2, 16, range(3000, 3005)) + index_flops(2, range(3000, 3005))
    # A decode step: one new token a request, by plans for decode.
    step = "layer --decode --q-heads 2 --kv-heads 2 --index-heads 2 --batch 3 --prefix 3000 --footprint 0".split()
    result, = bench(*step)
    assert (result["batch"], result["total_q"], result["kv_len"], result["decode"]) == (3, 3, 3001, True)
    assert result["flops"] == 3 * (attention_flops(2, 16, [3000]) + index_flops(2, [3000]))
    check_result(result)
    check_repeat(result)
    rows = "quantise --rows 10 --kv-heads 2 --footprint 0".split()
    result, = bench(*rows, "--format", "nvfp4")
    assert result["bytes"] == 10 * 2 * (256 + 72)
    result, = bench(*rows, "--format", "fp8", "--cache")
    assert result["bytes"] == 2 * 10 * 2 * (256 + 128) + 10 * 8
    result, = bench("combine", "--queries", "4", "--q-heads", "2", "--splits", "3", "--footprint", "0")
    assert result["bytes"] == 4 * 2 * 4 * (256 + 4)
    result, = bench("topk", "--rows", "3", "--pages", "500", "--k", "8")
    assert result["bytes"] == 3 * (500 * 4 + 8 * 4 + 4)


def check_product():
    results = bench("topk,combine", "--rows", "1,2:4", "--pages", "16:64:x2,1K", "--queries", "2:6:2", "--q-heads", "1",
                    "--splits", "2", "--threads", "1,2", "--footprint", "0")
    found = [(r["rows"], r["pages"], r["threads"]) for r in results if r["op"] == "topk"]
    assert found == list(itertools.product([1, 2, 3, 4], [16, 32, 64, 1024], [1, 2])), found
    one, = bench("topk", "--rows", "0" * 40 + "2K", "--pages", "1")
    assert one["rows"] == 2048, one["rows"]
    found = [(r["queries"], r["threads"]) for r in results if r["op"] == "combine"]
    assert found == list(itertools.product([2, 4, 6], [1, 2])), found


def check_isa():
    best, portable = bench("topk", *TINY["topk"], "--isa", "best,c")
    assert portable["isa"] == "c" and portable["kernel"].endswith("_c")
    assert best["isa"] in ("c", "avx2", "avx512", "avx512bf16", "amx", "neon")
    one, two = bench("prefill", *TINY["prefill"], "--threads", "1,2", "--isa", "c")
    assert (one["threads"], two["threads"]) == (1, 2) and one["work"] == two["work"]


def check_samples():
    result, = json.loads(msa("bench", "topk", "--rows", "1", "--pages", "64", "--min-time", "0.2", "--samples", "7",
                             "--json", "-"))
    assert result["samples"] >= 7 and result["samples"] * result["median_us"] < 10e6
    check_result(result)
    result, = json.loads(msa("bench", "prefill", *TINY["prefill"], "--min-time", "0.2", "--json", "-"))
    assert result["samples"] > 1
    check_result(result)
    started = time.monotonic()
    result, = json.loads(msa("bench", "topk", "--rows", "1", "--pages", "64", "--min-time", "0", "--samples", "4",
                             "--rest", "150", "--json", "-"))
    assert time.monotonic() - started > 0.6 and " --rest 150" in result["command"]


OUT_OF_CACHE = CACHE * 2 >> 20  # MiB


def check_out_of_cache():
    for arguments in (["quantise", "--rows", "4096"], "decode --context 4096 --batch 64".split()):
        result, = bench(*arguments, "--footprint", str(OUT_OF_CACHE))
        check_result(result, OUT_OF_CACHE << 20)


def check_text():
    arguments = ["bench", "topk,quantise", "--rows", "2,3", "--pages", "64", "--footprint", "0", "--run-once"]
    results = json.loads(msa(*arguments, "--json", "-"))
    rows = list(csv.DictReader(io.StringIO(msa(*arguments, "--csv"))))
    assert [list(row) for row in rows] == [list(result) for result in results]
    assert [row["command"] for row in rows] == [result["command"] for result in results]
    table = msa(*arguments)
    for result in results:
        assert "\n  %s\n" % result["command"] in table, "the table does not repeat a result"
    lines = msa(*arguments, "--markdown").splitlines()
    assert len(lines) == 6 and len({line.count("|") for line in lines}) == 1, lines
    msa(*arguments, "--json", folder.path("json"))
    with open(folder.path("json")) as file:
        assert [r["work"] for r in json.load(file)] == [r["work"] for r in results]
    foreign = "neon" if os.uname().machine == "x86_64" else "avx2"
    refused("isa", *arguments, "--isa", foreign, "--json", folder.path("json"))
    with open(folder.path("json")) as file:
        assert len(json.load(file)) == len(results), "a refused call changed the results of an earlier one"
    refused("isa", *arguments, "--isa", foreign, "--json", folder.path("new"))
    assert not os.path.exists(folder.path("new")), "a refused call left a file"


def write_suite(name, *rows):
    """A suite of the table's columns; returns its name."""
    with open(TABLE) as file:
        header = file.readline()
    with open(name, "wb") as file:
        file.write(header.encode() + b"".join(row if isinstance(row, bytes) else row.encode() + b"\n" for row in rows))
    return name


def check_odd_names():
    """Commands repeat, and CSV can be read, where names have characters that are special there."""
    name = write_suite(folder.path("it's a \"$suite\" \\ & more.csv"), "a 'b' \"c\",1,3,131,7,rep,1,3,128,1")
    result, = bench("--suite", name, *LEAST)
    assert result["case"] == "a 'b' \"c\""
    check_repeat(result)
    row, = csv.DictReader(io.StringIO(msa("bench", "--suite", name, *LEAST, "--run-once", "--csv")))
    for key in "case", "work", "command":
        assert row[key] == result[key], row[key]


def check_refused_names():
    """Names that a report cannot say are refused, so that none of its fields is missing."""
    row = "mine,1,3,131,7,rep,1,3,128,1"
    for bad in b"x\xff", b"x\x1b[31m", b"x\ty", b"\xc0\x80":
        name = write_suite(folder.path("bytes.csv"), row, row.encode().replace(b"mine", bad) + b"\n")
        refused("bytes.csv: line 3: case_id has control characters or is not UTF-8", "bench", "--suite", name, *LEAST)
        name = write_suite(folder.path("").encode() + bad + b".csv", row)
        refused("--suite: the name '", "bench", "--suite", name, *LEAST)
    name = write_suite(folder.path("Größe.csv"), row.replace("mine", "größte"))
    result, = bench("--suite", name, *LEAST)
    assert result["case"] == "größte" and name in result["command"] and name in result["work"]


def check_long_names():
    """Paths and ids of any length stand whole in work and command, so that a baseline finds the right case."""
    here = os.path.join(folder.name, *["d" * 200] * 5)
    os.makedirs(here)
    ids = ["i" * 700 + end for end in "ab"]
    name = write_suite(os.path.join(here, "s.csv"), *(id + ",1,3,131,7,rep,1,3,128,1" for id in ids))
    results = bench("--suite", name, *LEAST)
    assert [result["case"] for result in results] == ids
    for result in results:
        assert result["command"].endswith(" --run-once")
        for key in "work", "command":
            assert " --suite %s --case %s --format " % (name, result["case"]) in result[key]
    check_repeat(results[1])
    with open(folder.path("baseline"), "w") as file:
        json.dump([dict(result, median_us=i + 1) for i, result in enumerate(results)], file)
    results = bench("--suite", name, *LEAST, "--baseline", folder.path("baseline"))
    assert [result["baseline_us"] for result in results] == [1, 2]


def check_large_suite():
    """A table is read to its end, whatever its size; lines that are blank count."""
    first, last = "first,1,3,131,7,rep,1,3,128,1", "last,1,3,131,7,rep,1,3,128,1"
    long = ",1,3,131,7,%s,1,3,128,1" % "+".join(["tag"] * 1000)
    rows = ["number%d" % i + long for i in range(400)]
    name = write_suite(folder.path("large.csv"), first, *rows, last)
    assert os.path.getsize(name) > 3 << 19
    results = bench("--suite", name, "--case", "last,first", *LEAST)
    assert [result["case"] for result in results] == ["first", "last"]
    name = write_suite(folder.path("large.csv"), first, *rows, "short,1")
    refused("large.csv: line 403 has not 10 fields", "bench", "--suite", name, *LEAST)
    name = write_suite(folder.path("large.csv"), "", b"\r\n\n", first, "\n\n", "short,1")
    refused("large.csv: line 9 has not 10 fields", "bench", "--suite", name, *LEAST)
    name = write_suite(folder.path("large.csv"), first, b"\0", last)
    refused("is no text", "bench", "--suite", name, *LEAST)
    result, = bench("--suite", write_suite(folder.path("large.csv"), b"\r\n", first.encode() + b"\r\n"), *LEAST)
    assert result["case"] == "first"


def check_unknown_cases():
    name = write_suite(folder.path("two.csv"), "x1,1,3,131,7,rep,1,3,128,1", "x2,1,3,131,7,rep,1,3,128,1")
    for given, unknown in ("x1,nosuch", "nosuch"), ("nosuch,x1", "nosuch"), ("x1,,x2", ""), ("x1,x", "x"):
        refused("--case: '%s' names no case of the suite %s" % (unknown, name), "bench", "--suite", name, "--case", given,
                *LEAST)
    assert len(bench("--suite", name, "--case", "x2,x1", *LEAST)) == 2


def check_baseline():
    arguments = ["bench", "topk", "--rows", "2,3", "--pages", "64", "--run-once"]
    results = json.loads(msa(*arguments, "--json", "-"))
    for factor, slower in (1000, "0 of 2"), (0.001, "2 of 2"):
        with open(folder.path("baseline"), "w") as file:
            json.dump([dict(result, median_us=result["median_us"] * factor) for result in results], file)
        text = msa(*arguments, "--baseline", folder.path("baseline"), "--json", folder.path("json"))
        assert "baseline/this: geometric mean" in text and slower + " more than 1 % slower" in text, text
        with open(folder.path("json")) as file:
            for result, before in zip(json.load(file), results):
                assert close(result["baseline_us"], before["median_us"] * factor)
    # The same work on other threads is only the second choice.
    with open(folder.path("baseline"), "w") as file:
        other = dict(results[0], median_us=1, threads=results[0]["threads"] + 1)
        json.dump([other, dict(results[0], median_us=2)], file)
    one, two = json.loads(msa(*arguments, "--baseline", folder.path("baseline"), "--json", "-"))
    assert one["baseline_us"] == 2 and two["baseline_us"] is None
    # What was measured with pauses is no baseline of what was not.
    assert results[0]["rest_ms"] == 0
    text = msa(*arguments, "--rest", "1", "--baseline", folder.path("baseline"), "--json", folder.path("json"))
    assert "baseline: 0 of 2 results are in the file, with the same --rest" in text, text
    with open(folder.path("json")) as file:
        assert [(r["rest_ms"], r["baseline_us"]) for r in json.load(file)] == [(1, None), (1, None)]


def check_plot():
    arguments = ["bench", "prefill,index", "--queries", "2", "--prefix", "1K:4K:x2", "--q-heads", "2", "--kv-heads",
                 "1", "--index-heads", "1,2", "--run-once"]
    msa(*arguments, "--plot", folder.path("it's.png"))
    assert read_bytes("it's.png").startswith(b"\x89PNG")
    msa(*arguments, "--plot", folder.path("curves.svg"))
    picture = read_bytes("curves.svg").decode()
    assert "<svg" in picture and "context, tokens" in picture
    for curve in "prefill", "index, index-heads 1", "index, index-heads 2":
        assert curve in picture, curve
    # One point, and values of 0, for which a logarithmic scale has no place.
    for options in ["topk", *TINY["topk"]], ["index", *TINY["index"], "--seed", "0,1"]:
        done = run("bench", *options, "--run-once", "--plot", folder.path("point.svg"))
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert options[0] in read_bytes("point.svg").decode()


def check_plot_names():
    """Names that gnuplot would take for a command, a home or an escape."""
    here = os.path.join(folder.name, "odd names")
    os.mkdir(here)
    for name in "|touch pwned;.png", "~/x.png", "~.svg", "a'b\\n\"c`touch pwned`$(touch pwned).svg", "-.svg", "%d.png":
        if "/" in name:
            os.mkdir(os.path.join(here, os.path.dirname(name)))
        done = subprocess.run([TOOL, "bench", "topk", *TINY["topk"], "--run-once", "--plot", name], cwd=here,
                              capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert os.path.getsize(os.path.join(here, name)) > 100
        assert "pwned" not in os.listdir(here)
    assert len(os.listdir(here)) == 6, os.listdir(here)


def check_full_disk():
    """Reports that do not fit leave the earlier file as it was, and nothing else; where the space is too little for them."""
    small = folder.path("small")
    os.mkdir(small)
    script = """mount -t tmpfs -o size=64k none "$0" || exit 77
        cd "$0" && echo old >file.json && echo old >file.svg && echo old >file.png && echo old >case && mkdir rest &&
        { cat /dev/zero >rest/filler; true; } 2>/dev/null
        for option in --json=file.json --plot=file.svg --plot=file.png; do
            "$1" bench topk --rows 1:40 --pages 16 --run-once $option >/dev/null && exit 1
        done
        "$1" make -o case --queries 1 --prefix 0 && exit 2
        [ "$(cat file.json file.svg file.png case)" = "old
old
old
old" ] && [ "$(ls -A | wc -l)" = 5 ]"""
    done = private_mounts(script, small, TOOL)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and all("cannot be written" in line for line in lines if line.startswith("msa: ")), done
    assert len([line for line in lines if line.startswith("msa: ")]) == 4, done


def check_no_gnuplot():
    """Noticed before anything is measured."""
    done = subprocess.run([TOOL, "bench", "topk", "--run-once", "--plot", folder.path("none.svg")], capture_output=True,
                          text=True, env=dict(os.environ, PATH=folder.name))
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr == "msa: --plot: gnuplot is not installed\n", done.stderr
    assert not os.path.exists(folder.path("none.svg"))


def check_peak():
    lines = msa("bench", "peak", "--threads", "1,2").splitlines()
    names = lines[0].replace("fma ", "fma").replace("bf16 dot", "bf16dot").split()
    one, two = map(str.split, lines[1:3])
    assert one[0] == "1" and two[0] == "2" and len(names) == len(one) == len(two)
    rates = dict(zip(names, map(float, one)))
    assert rates["read"] > 0.5 and rates["copy"] > 0.5
    wide = [rates[name] for name in ("fma128", "fma256", "fma512") if rates[name]]
    if os.uname().machine in ("x86_64", "aarch64"):
        assert wide and max(wide) > 1, lines


def check_memory():
    """A context of 1,048,576 tokens, NVFP4, one KV head: right answers, inside 4 GiB; with the index over all of it."""
    shape = ["--format", "q8kv4", "--q-heads", "2", "--kv-heads", "1"]
    prefill, decode = ["--queries", "256", "--prefix", "1048320"], ["--batch", "1", "--context", "1M"]
    layer = ["bench", "layer", "--index-format", "nvfp4", "--index-heads", "1", "--run-once"]
    index = ["bench", "index", "--decode", "--format", "nvfp4", "--index-heads", "1", "--run-once", "--footprint", "0"]
    made = folder.path("million.safetensors")
    for arguments in (["make", "--op", "prefill", *prefill, "--with-expected", "-o", made], ["check", made],
                      ["make", "--op", "decode", *decode, "--with-expected", "-o", made], ["check", made],
                      ["bench", "prefill", *prefill, "--run-once"],
                      ["bench", "decode", *decode, "--run-once", "--footprint", "0"],
                      layer + prefill, index + decode):
        if arguments[0] != "check" and arguments[1] != "index":
            arguments = [*arguments, *shape]
        child = subprocess.Popen([TOOL, *arguments], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        assert usage.ru_maxrss < 4 << 20, "%d KiB" % usage.ru_maxrss


def check_progress():
    """A line on a terminal, nothing elsewhere."""
    arguments = [TOOL, "bench", "topk", "--rows", "1", "--pages", "64", "--min-time", "1.6"]
    ours, theirs = pty.openpty()
    child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    assert child.wait() == 0
    assert b"1 of 1" in shown and b"%" in shown, shown
    assert run(*arguments[1:]).stderr == ""


def check_gpu_run():
    """scripts/gpu-run counts a result of a GPU, whose share of the peak has no percentiles, as one passed."""
    results = bench("topk,index", *TINY["topk"], "--index-heads", "1", "--queries", "5", "--prefix", "3000")
    for result in results:
        result.update(peak_fraction=0.5, peak_fraction_p10=None, peak_fraction_p90=None)
    here = folder.path("gpu")
    os.mkdir(here)
    shutil.copy(os.path.join(os.path.dirname(TABLE), "..", "scripts", "gpu-run"), here)
    for share, line in (0.5, "bench: 2 passed, 0 failed, 0 skipped, exit status 0"), \
            (1.2, "bench: 1 passed, 1 failed, 0 skipped, exit status 0"):
        results[0]["peak_fraction"] = share
        with open(os.path.join(here, "json"), "w") as file:
            json.dump(results, file, indent=2)
        for name in "msa", "checkkernel", "test_faults":
            with open(os.path.join(here, name), "w") as file:
                file.write("""#!/bin/sh
                    [ "$1" = bench ] && exec cat %s
                    echo 1 passed, 0 failed, 0 skipped\n""" % shlex.quote(os.path.join(here, "json")))
            os.chmod(file.name, 0o755)
        done = subprocess.run([os.path.join(here, "gpu-run")], capture_output=True, text=True)
        assert line in done.stdout.splitlines(), done.stdout
        assert (done.returncode == 0) == (share < 1), done.stdout


# ---- the suite

def read_table():
    with open(TABLE, newline="") as file:
        return {row["case_id"]: row for row in csv.DictReader(file)}


def lengths(row):
    """New tokens and prefixes of a case, by the contract's formula where the table has none."""
    batch, total, final = int(row["batch"]), int(row["total_q"]), int(row["max_final_kv"])
    if row["shape_exact"] == "1":
        return [int(x) for x in row["query_lens"].split()], [int(x) for x in row["prefix_lens"].split()]
    queries = [total * (i + 1) // batch - total * i // batch for i in range(batch)]
    moved = (queries[-1] - final) % PAGE
    queries[-1] -= moved
    queries[0] += moved
    prefix = final - queries[-1]
    return queries, [PAGE * (prefix * (i + 1) // batch // PAGE) for i in range(batch)]


LEAST = "--k 1 --q-heads 1 --kv-heads 1 --format q8kv8".split()


def check_suite():
    table = read_table()
    ids = ["prefill_092e27340df8621a02f0", "prefill_e77ac4d03ef7a2ac8ffe", "prefill_0020c25fae59bfa2285a",
           "prefill_3bae7083e0b65d7d2c2f"]  # exact; spread over 5 requests; 3 requests, exact, no weight; stress
    text = msa("bench", "--suite", "formal", "--case", ",".join(ids), *LEAST, "--run-once",
               "--json", folder.path("json"))
    with open(folder.path("json")) as file:
        results = json.load(file)
    assert sorted(r["case"] for r in results) == sorted(ids)
    weights = flops = time = 0
    for result in results:
        row = table[result["case"]]
        queries, prefixes = lengths(row)
        positions = [p for q, prefix in zip(queries, prefixes) for p in range(prefix, prefix + q)]
        assert result["flops"] == attention_flops(1, 1, positions), result["case"]
        assert result["total_q"] == sum(queries) == int(row["total_q"])
        assert result["kv_len"] == max(map(sum, zip(queries, prefixes)))
        assert result["weight"] == (int(row["representative_weight"]) if "rep" in row["tags"].split("+") else 0)
        assert result["pattern"] == "even"
        weights += result["weight"]
        flops += result["weight"] * result["flops"]
        time += result["weight"] * result["median_us"]
    summary = next(line for line in text.splitlines() if line.startswith("weighted mean: "))
    assert "weighted mean: %.2f us" % (time / weights) in summary, (summary, time / weights)
    assert "%.4f TFLOP/s" % (flops / time * 1e-6) in summary, (summary, flops / time * 1e-6)
    check_repeat(results[0])


def check_suite_index():
    ids = "prefill_3bae7083e0b65d7d2c2f,prefill_1771c5fd9f866a13a3bc"
    text = msa("bench", "index", "--suite", "formal", "--case", ids, "--index-heads", "1", "--run-once")
    assert "median of the 2 cases of fewer than 512 queries" in text and "512 to 4095" not in text, text


def check_suite_names():
    """smoke is the anchors; a file may stand in for the table."""
    refused("names no case of the suite smoke", "bench", "--suite", "smoke", "--case", "prefill_092e27340df8621a02f0")
    result, = bench("--suite", "smoke", "--case", "prefill_0020c25fae59bfa2285a", *LEAST)
    assert result["case"] == "prefill_0020c25fae59bfa2285a"
    with open(TABLE) as file:
        lines = file.read().splitlines()
    with open(folder.path("own.csv"), "w") as file:
        file.write("\n".join([lines[0], "mine,1,3,131,7,rep,1,3,128,1", "other,2,260,386,1,rep,1,,,0"]) + "\n")
    mine, other = bench("--suite", folder.path("own.csv"), *LEAST)
    assert (mine["case"], mine["total_q"], mine["kv_len"], mine["weight"]) == ("mine", 3, 131, 7)
    assert (other["case"], other["batch"], other["total_q"]) == ("other", 2, 260)
    for bad, word in [("short,1,3", "line 2 has not 10 fields"),
                      ("bad,1,3,131,7,rep,1,3 4,128,1",
                       "line 2: query_lens, prefix_lens: not 1 lengths of 0..1048576 each"),
                      ("bad,0,3,131,7,rep,1,,,0", "own.csv: line 2: batch: 0 is outside 1..65536"),
                      ("bad,1,3,131,x,rep,1,3,128,1", "line 2: representative_weight: 'x' is not a whole number"),
                      ("bad,1,3,131,7,rep,1,4,128,1", "line 2: case bad: the lengths make total_q 4 and max_final_kv 132"),
                      # Made of the other columns: too many queries moved, or a final length that none has.
                      ("bad,2,4,300,7,rep,1,,,0", "line 2: case bad: request 1 would have -84 queries after 384 keys"),
                      ("bad,1,300,100,7,rep,1,,,0", "line 2: case bad: request 0 would have 300 queries after -"),
                      ("bad,1,3,132,7,rep,1,,,0", "line 2: case bad: the lengths make total_q 3 and max_final_kv 131, not"),
                      ("bad,2,260,300,1,rep,1,,,0", "make total_q 260 and max_final_kv 344, not 260 and 300")]:
        # Nothing is measured before a bad line is seen.
        with open(folder.path("own.csv"), "w") as file:
            file.write("\n".join([lines[0], bad, "mine,1,3,131,7,rep,1,3,128,1"]) + "\n")
        refused(word, "bench", "--suite", folder.path("own.csv"))
        with open(folder.path("own.csv"), "w") as file:
            file.write("\n".join([lines[0], "mine,1,3,131,7,rep,1,3,128,1", bad]) + "\n")
        refused(word.replace("line 2", "line 3"), "bench", "--suite", folder.path("own.csv"))
    with open(folder.path("own.csv"), "w") as file:
        file.write(lines[0] + "\n")
    refused("--suite: %s has no cases" % folder.path("own.csv"), "bench", "--suite", folder.path("own.csv"))
    with open(folder.path("own.csv"), "w") as file:
        file.write("nonsense\n")
    refused("the first line", "bench", "--suite", folder.path("own.csv"))


# ---- bad input

QUICK = "--queries 1 --prefix 1 --run-once".split()
REFUSED = [
    ("give an operation", "bench"),
    ("'nothing' is none of", "bench nothing"),
    ("'' is none of", "bench prefill,"),
    ("one argument too many", "bench prefill decode"),
    ("peak stands alone", "bench prefill,peak"),
    ("--rows: not an axis of prefill", "bench prefill --rows 3"),
    ("--context: not an axis of index", "bench index --context 3"),
    ("--prefix: not an axis of index --decode", "bench index --decode --prefix 3"),
    ("--queries: 0 is outside", "bench prefill --queries 0"),
    ("--queries: 'x' is not a whole number", "bench prefill --queries x"),
    ("--queries: '1KK' is not a whole number", "bench prefill --queries 1KK"),
    ("--queries: 'K' is not a whole number", "bench prefill --queries K"),
    ("--queries: -1K is outside", "bench prefill --queries -1K"),
    ("--queries: 2M is outside 1..1048576", "bench prefill --queries 2M"),
    ("--seed: %s2K is outside" % ("1" * 40), "bench topk --seed %s2K" % ("1" * 40)),
    ("--queries: ',' has an empty value", "bench prefill --queries ,"),
    ("--queries: '3,' has an empty value", "bench prefill --queries 3,"),
    ("--pattern: 'even,,shared' has an empty value", "bench prefill --pattern even,,shared"),
    ("--queries: '' is not a whole number", "bench prefill --queries 3:"),
    ("--queries: '' is not a whole number", "bench prefill --queries :3"),
    ("--queries: '' is not a whole number", "bench prefill --queries 3:5:"),
    ("--queries: the range 5:4 is empty", "bench prefill --queries 5:4"),
    ("'1:2:3:4' is none of: N, FIRST:LAST", "bench prefill --queries 1:2:3:4"),
    ("more than 256 values", "bench prefill --queries 1:400"),
    ("--k: 33 is outside 1..32", "bench prefill --k 33"),
    ("--format: 'e5m2' is none of", "bench prefill --format e5m2"),
    ("--format: 'fp8' is none of", "bench prefill --format fp8"),
    ("--format: bf16 needs --cache", "bench quantise --format bf16"),
    ("--pattern: 'odd' is none of", "bench prefill --pattern odd"),
    ("--isa: 'sse' is none of", "bench prefill --isa sse"),
    ("--threads: 2000 is outside", "bench prefill --threads 2000"),
    ("--min-time: 'x' is not", "bench prefill --min-time x"),
    ("--min-time: -1 is outside", "bench prefill --min-time -1"),
    ("--rest: 10001 is outside", "bench prefill --rest 10001"),
    ("--csv and --markdown exclude", "bench prefill --csv --markdown"),
    ("--json - and --csv exclude", "bench prefill --json - --csv"),
    ("--json - and --markdown exclude", "bench prefill --json - --markdown"),
    ("--json: not an option of peak", "bench peak --json -"),
    ("--queries: not an option of peak", "bench peak --queries 3"),
    ("--isa: not an option of peak", "bench peak --isa c"),
    ("--csv: not an option of peak", "bench peak --csv"),
    ("--suite: not an option of peak", "bench peak --suite formal"),
    ("--plot: 'a.gif' ends in neither", "bench prefill --plot a.gif"),
    ("--json: '/no/such/folder' cannot be written", "bench prefill --json /no/such/folder"),
    ("--plot: '/no/such/plot.svg' cannot be written", "bench topk --run-once --plot /no/such/plot.svg"),
    ("--baseline: unable to open /no/such/file: No such file or directory", "bench prefill --baseline /no/such/file"),
    ("--suite: 'x' is neither", "bench --suite x"),
    ("--suite: decode has no suite", "bench decode --suite formal"),
    ("--batch: not an axis of prefill --suite", "bench --suite formal --batch 2"),
    ("--case: 'x' names no case", "bench --suite formal --case x"),
    ("--case: only a --suite", "bench prefill --case x"),
    ("--q-heads: 5 is not 1 to 16 times the 3 KV heads", "bench prefill --q-heads 5 --kv-heads 3 --queries 1 --prefix 1"),
    ("--kv-heads: 4 is not a multiple of the 3 index heads", "bench layer --index-heads 3 --queries 1 --prefix 1"),
    ("must be 0..1048576", "bench prefill --queries 1M --prefix 1M"),
    ("of memory, the machine has", "bench prefill --queries 1M --prefix 0 --batch 1024 --q-heads 1024 --kv-heads 64"),
    ("of memory, the machine has", "bench combine --queries 1M --q-heads 1024 --splits 32"),
    ("--rows: factor of '1:4:x1': 1 is outside 2..", "bench topk --rows 1:4:x1"),
]


def check_bad_baseline():
    for text in "[1]", "{}", "[{\"work\": 1, \"median_us\": 2}]", "[{\"work\": \"x\", \"median_us\": 0}]", "[":
        with open(folder.path("baseline"), "w") as file:
            file.write(text)
        refused("--baseline: ", "bench", "prefill", "--baseline", folder.path("baseline"))


def main():
    for op in TINY:
        test("bench " + op, check_op, op)
    test("bench index --decode", check_op, "index", "--scores-only")
    test("bench every attention format", lambda: list(map(check_result, bench(
        "prefill,decode", "--format", ",".join(ATTENTION_FORMATS), "--q-heads", "2", "--kv-heads", "1", "--queries",
        "2", "--prefix", "300", "--batch", "2", "--context", "300", "--footprint", "0"))))
    test("bench every index format", lambda: list(map(check_result, bench(
        "index", "--decode", "--format", ",".join(INDEX_FORMATS), "--batch", "2", "--context", "1000", "--footprint",
        "1"))))
    test("bench every quantiser", lambda: list(map(check_result, bench(
        "quantise", "--format", "fp8,nvfp4", "--rows", "300", "--footprint", "0")
        + bench("quantise", "--cache", "--format", "fp8,nvfp4,bf16,fp16", "--rows", "300", "--footprint", "4"))))
    test("bench every kind of scores", lambda: list(map(check_result, bench(
        "topk", "--rows", "2", "--pages", "1,16,17,8192", "--scores", "random,ascending,equal"))))
    test("useful work", check_work)
    test("product of axes", check_product)
    test("instruction sets and threads", check_isa)
    test("samples", check_samples)
    if OUT_OF_CACHE << 20 > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4:
        skip("out of cache", "too little memory")
    else:
        test("out of cache", check_out_of_cache)
    test("table, CSV, markdown, JSON", check_text)
    test("names with quotes and spaces", check_odd_names)
    test("names that no report can say", check_refused_names)
    test("long names", check_long_names)
    test("large suites and blank lines", check_large_suite)
    test("unknown cases", check_unknown_cases)
    test("baseline", check_baseline)
    if shutil.which("gnuplot"):
        test("plot", check_plot)
        test("plot names", check_plot_names)
        test("reports on a full disk", check_full_disk)
    else:
        skip("plot", "no gnuplot")
    test("plot without gnuplot", check_no_gnuplot)
    test("scripts/gpu-run", check_gpu_run)
    test("peaks", check_peak)
    test("memory of 1M tokens", check_memory)
    test("progress", check_progress)
    test("suite", check_suite)
    test("suite for the index", check_suite_index)
    test("suite names", check_suite_names)
    for word, arguments in REFUSED:
        test("refused: " + arguments, refused, word, *arguments.split())
    test("refused: bad baselines", check_bad_baseline)
    finish()


main()
