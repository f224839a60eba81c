#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Drives `msa make` of the built tool: test_make.py MSA.

Made cases are the same whatever the number of threads, agree with double precision in every format, and select pages
by the rules of their pattern; what makes no sense gets one line and status 2.
"""
import itertools

from tool import ATTENTION_FORMATS, INDEX_FORMATS, finish, folder, msa, read_bytes, refused, test
import casefile

PAGE = 128

SMALL = "--q-heads 4 --kv-heads 2".split()
SHAPES = {
    "prefill": SMALL + "--batch 2 --queries 9 --prefix 2500".split(),
    "decode": SMALL + "--batch 3 --context 3000 --new 2".split(),
    "layer": SMALL + "--index-heads 2 --batch 2 --queries 9 --prefix 2500".split(),
    "index": "--index-heads 2 --batch 2 --queries 9 --prefix 2500".split(),
}


def make(*arguments, name="case"):
    msa("make", "-o", folder.path(name), *arguments)
    return casefile.read(folder.path(name))


def check_made(op, *options):
    arguments = ["--op", op, *SHAPES[op], *options, "--with-expected"]
    make(*arguments, "--threads", "1", name="one")
    make(*arguments, "--threads", "2", name="two")
    assert read_bytes("one") == read_bytes("two"), "the file depends on the number of threads"
    make(*arguments, "--seed", "1", name="seed")
    assert read_bytes("one") != read_bytes("seed"), "the seed changes nothing"
    assert msa("check", folder.path("one"), folder.path("seed")).count("ok ") == 2


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 128 else magnitude


def check_values():
    """Standard normal values; NVFP4 blocks use their whole range."""
    case = make("--format", "q8kv4", *SMALL, "--queries", "64", "--prefix", "1000")
    q = [e4m3(code) for code in case["q"].data]
    mean = sum(q) / len(q)
    variance = sum(x * x for x in q) / len(q)
    assert abs(mean) < 0.02 and abs(variance - 1) < 0.03, (mean, variance)
    codes = case["k"].data
    for block in range(0, len(codes), 8):
        largest = max(max(byte & 7, byte >> 4 & 7) for byte in codes[block:block + 8])
        assert largest == 7, "block %d has no code of 6, the largest is %d" % (block // 8, largest)
    assert case["k"].data != case["v"].data


def check_tables():
    case = make("--op", "decode", *SMALL, "--batch", "5", "--context", "1000", "--new", "1")
    pages = case["page_table"].numbers()
    assert sorted(pages) == list(range(case["k"].shape[0])), "no permutation of the pool"
    assert pages != sorted(pages), "pages lie in order"


def lists_of(case, heads):
    """For each list and query: (own page, ids without the -1 tail)."""
    k, starts, lens = int(case.metadata["topk"]), case["cu_seqlens_q"].numbers(), case["kv_lens"].numbers()
    ids, result = case["topk"].numbers(), []
    for head in range(heads):
        rows = []
        for b, length in enumerate(lens):
            for i in range(starts[b], starts[b + 1]):
                own = (length - (starts[b + 1] - i)) // PAGE
                row = ids[(head * starts[-1] + i) * k:(head * starts[-1] + i + 1) * k]
                used = [x for x in row if x >= 0]
                assert used + [-1] * (k - len(used)) == row, "-1 before an id"
                assert used == sorted(set(used)) and used[-1] == own, "not ascending, or without the own page"
                assert len(used) == min(k, own + 1), "%d ids at page %d" % (len(used), own)
                rows.append((own, used))
        result.append(rows)
    return result


def make_lists(pattern, k, *options):
    return lists_of(make("--pattern", pattern, "--k", str(k), "--q-heads", "2", "--kv-heads", "2", *options), 2)


def check_even():
    for k in 16, 5, 1:
        for own, ids in make_lists("even", k, "--queries", "3000", "--prefix", "0")[0]:
            expected = list(range(own + 1)) if own < k else [s * own // (k - 1) for s in range(k - 1)] + [own]
            assert ids == expected, (k, own, ids)


def check_clustered():
    rows = make_lists("clustered", 16, "--queries", "1000", "--prefix", "100000")
    assert rows[0] != rows[1], "both KV heads have the same lists"
    kept = total = 0
    for (_, before), (_, after) in zip(rows[0], rows[0][1:]):
        kept += len(set(before[:-1]) & set(after))
        total += len(before) - 1
    assert abs(kept / total - 0.9) < 0.01, kept / total
    # From the first query with a choice on, which keeps of the pages that all queries before it saw.
    rows = make_lists("clustered", 16, "--queries", "400", "--prefix", "1900")[0]
    first = next(i for i, (own, _) in enumerate(rows) if own >= 16)
    assert len(set(rows[first - 1][1]) & set(rows[first][1])) >= 9


def check_scattered():
    rows = make_lists("scattered", 16, "--queries", "1000", "--prefix", "100000")
    assert rows[0] != rows[1], "both KV heads have the same lists"
    kept = sum(len(set(a[:-1]) & set(b[:-1])) for (_, a), (_, b) in zip(rows[0], rows[0][1:])) / len(rows[0])
    assert kept < 0.6, "%.2f pages in common, expected 15*15/781 = 0.29" % kept
    seen = set(itertools.chain(*(ids for _, ids in rows[0])))
    assert len(seen) > 770, "draws reach %d of 781 pages" % len(seen)


def check_shared():
    case = make("--op", "decode", "--pattern", "shared", *SMALL, "--batch", "4", "--context", "50000", "--new", "8")
    for rows in lists_of(case, 2):
        for request in range(4):
            ids = [set(used) for _, used in rows[8 * request:8 * request + 8]]
            common = set.intersection(*ids)
            assert len(common) == 14, "%d pages are common" % len(common)
            assert len(set.union(*ids)) > 24, "the other two are hardly drawn"


REFUSED = [
    ("-o CASE is missing", "make --op prefill"),
    ("--op: 'topk' is none of", "make -o x --op topk"),
    ("--precision: a case does not say", "make -o x --precision fast"),
    ("--scores-only: a case does not say", "make -o x --op index --scores-only"),
    ("--decode: a layer's case", "make -o x --op layer --decode"),
    ("--queries: a case has one value, not 2", "make -o x --queries 1,2"),
    ("one argument too many", "make -o x y"),
    ("--q-heads: 5 is not 1 to 16 times the 3 KV heads", "make -o x --q-heads 5 --kv-heads 3 --queries 1 --prefix 1"),
    ("--splits: not an axis of prefill", "make -o x --splits 3"),
    ("/no/such/folder", "make -o /no/such/folder/x --queries 1 --prefix 1"),
]


def main():
    for op in SHAPES:
        for name in INDEX_FORMATS if op == "index" else ATTENTION_FORMATS if op == "prefill" else ["bf16", "q8kv4"]:
            test("make %s %s" % (op, name), check_made, op, "--format", name)
    for name in INDEX_FORMATS:
        test("make layer with index " + name, check_made, "layer", "--format",
             "bf16" if name == "bf16" else "q8kv8", "--index-format", name)
    test("make with k = 3 and k = 32", lambda: [check_made("layer", "--k", k) for k in ("3", "32")])
    test("made values", check_values)
    test("made page tables", check_tables)
    test("pattern even", check_even)
    test("pattern clustered", check_clustered)
    test("pattern scattered", check_scattered)
    test("pattern shared", check_shared)
    for word, arguments in REFUSED:
        test("refused: " + arguments, refused, word, *arguments.split())
    finish()


main()
