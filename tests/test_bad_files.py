#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Drives the built tool with bad case files: test_bad_files.py MSA [CASE_FOLDER]. Each gets one clear line and status 2, little
memory is used, and nothing is written."""
import json
import os
import random
import resource
import struct
import subprocess

from tool import CASES, ENVIRONMENT, TIMEOUT, TOOL, base, finish, folder, msa, refused, run, test
import casefile
from casefile import Tensor, ints


def bad(words, case):
    refused(words, "check", folder.write(case))
    refused(words, "run", folder.path(), "-o", folder.path("none"))
    assert not os.path.exists(folder.path("none"))


def bad_raw(words, header, data):
    casefile.write_raw(folder.path(), header, data)
    refused(words, "check", folder.path())


def bad_bytes(words, content):
    with open(folder.path(), "wb") as file:
        file.write(content)
    refused(words, "check", folder.path())


def hostile_prefixes():
    with open(os.path.join(CASES, "prefill_q8kv4_one_key.safetensors"), "rb") as file:
        good = file.read()
    length, = struct.unpack_from("<Q", good)
    for size in 0, 1, 7:
        bad_bytes("too short", good[:size])
    for value in length + len(good), len(good) - 7, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1:
        bad_bytes("header length", struct.pack("<Q", value) + good[8:])
    for value in 0, 1, length // 2:
        bad_bytes("JSON", struct.pack("<Q", value) + good[8:])
    for size in 8, 9, 8 + length - 1:
        bad_bytes(["header length"], good[:size])
    for size in 8 + length, len(good) // 2, len(good) - 1:
        bad_bytes("data_offsets end at", good[:size])
    bad_bytes("belong to no tensor", good + b"\0")
    with open(folder.path(), "wb") as file: # 200 MB that take no room on the disk
        file.write(struct.pack("<Q", 150000000))
        file.truncate(200000000)
    refused("limit", "check", folder.path())


def hostile_json():
    _, data = base("prefill_q8kv4_one_key").header()
    for text in b"", b"x", b"{", b"[]", b"[1, 2]", b"null", b'"q"', b"{}{}", b'{"q": }', b'{"q": "\xff"}', b"{\0}", \
            b'{"a": 1, "a": 1}', b"[" * 100000, b'{"a":' * 100000, b'{"__metadata__": {"op": "a", "op": "b"}}', \
            b'{"q": {"shape": [99999999999999999999]}}':
        bad_raw("JSON", text, data)
    bad_raw("metadata op is missing", b"{}", b"")
    bad_raw("belong to no tensor", b"{}", data)
    bad_raw("__metadata__", b'{"__metadata__": []}', b"")
    bad_raw(["metadata 'op'", "no text"], b'{"__metadata__": {"op": 1}}', b"")


def hostile_entries():
    def entry(words, **changes):
        header, data = base("prefill_q8kv4_one_key").header()
        for key, value in changes.items():
            if value is None:
                del header["q"][key]
            else:
                header["q"][key] = value
        bad_raw(words, header, data)

    begin, end = base("prefill_q8kv4_one_key").header()[0]["q"]["data_offsets"]
    for value in None, 7, "F4", "f8_e4m3", "", ["F32"]:
        entry(["'q'", "dtype"], dtype=value)
    for value in None, 7, "1", [-1, 16, 128], [1.0, 16, 128], ["1", 16, 128], [1, None], [1] * 9, {"0": 1}:
        entry(["'q'", "rank" if value == [1] * 9 else "shape"], shape=value)
    for value in [1 << 62, 4], [1 << 32, 1 << 32], [(1 << 63) - 1], [1 << 31, 1 << 31, 1 << 31], [1 << 62, 4, 0]:
        entry(["'q'", "shape"], shape=value)
    for value in [1, 16, 127], [0, 16, 128], []:
        entry(["'q'", "shape and dtype make"], shape=value)
    for value in None, 7, [], [begin], [begin, end, end], [end, begin], [-1, end], [begin, float(end)], [str(begin), end]:
        entry(["'q'", "data_offsets"], data_offsets=value)
    for value in [begin, 1 << 60], [1 << 60, (1 << 60) + end - begin], [begin + (1 << 62), end + (1 << 62)]:
        entry(["'q'", "data_offsets end at"], data_offsets=value)
    entry("overlap", data_offsets=[begin - 4, end - 4])
    entry("belong to no tensor", data_offsets=[begin + 8, end + 8])
    entry("overlap", data_offsets=[0, end - begin])
    header, data = base("prefill_q8kv4_one_key").header()
    for value in None, 1, "q", []:
        bad_raw(["'q'", "no object"], {**header, "q": value}, data)
    twice = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    bad_raw("overlap", {"q": twice, "k": twice}, bytes(4))


def hostile_files():
    refused(["none", "cannot be opened"], "check", folder.path("none"))
    refused("no regular file", "check", folder.name)
    refused("no regular file", "check", "/dev/zero")
    os.mkfifo(folder.path("fifo"))
    refused("no regular file", "check", folder.path("fifo"))


def every_tensor_changed(name):
    """Each tensor in turn: left out, of another rank, dtype, or shape."""
    case = base(name)
    other = {"F32": "I32", "I32": "F32", "BF16": "F16", "F8_E4M3": "F8_E5M2", "U8": "BOOL"}
    for key, tensor in case.tensors.items():
        required = not key.startswith("expected") and not key.endswith("global_scale")
        changed = case.copy()
        del changed.tensors[key]
        if required:
            bad("needed" if key == "kv_lens" or key in ("kv", "kv_slots") else [key, "missing"], changed)
        changed = case.copy()
        changed[key].shape = tensor.shape + [1]
        bad([key, "shape"], changed)
        changed[key].shape = [casefile.element_count(tensor.shape)]
        if len(tensor.shape) > 1:
            bad([key, "shape"], changed)
        changed = case.copy()
        changed[key].dtype = other[tensor.dtype]
        bad("dtype", changed)
        changed = case.copy()
        row = len(tensor.data) // tensor.shape[0]
        changed[key] = Tensor(tensor.dtype, [tensor.shape[0] + 1] + tensor.shape[1:], bytes(tensor.data) + bytes(row))
        if key not in ("q", "index_q", "index_k", "kv", "kv_slots", "topk"):
            bad("shape", changed)
        changed[key] = Tensor(tensor.dtype, tensor.shape[:-1] + [2 * tensor.shape[-1]], tensor.data * 2)
        if key not in ("cu_seqlens_q", "kv_lens", "page_table", "kv"):
            bad([key, "shape"], changed)


def unknown_names():
    for name in "Q", "expected", "expected.", "out", "x\ny\x1b[31m", "k " * 4000, "":
        case = base("prefill_q8kv4_one_key")
        case[name] = Tensor("F32", [1], bytes(4))
        bad("unknown", case)


def disagreeing_lengths():
    case = base("prefill_q8kv4_scale")
    case["cu_seqlens_k"] = ints([0, case["kv_lens"].numbers()[0]])
    bad(["kv_lens", "both"], case)
    case = base("prefill_q8kv4_scale")
    case["kv_lens"] = ints([1400, 1400])
    bad(["kv_lens", "shape [2]"], case)
    case = base("prefill_q8kv4_scale")
    case["cu_seqlens_q"] = ints([])
    bad(["cu_seqlens_q", "empty"], case)
    case = base("prefill_q8kv4_scale")
    rows, heads = case["q"].shape[:2]
    case["q"] = Tensor("F8_E4M3", [rows - 1, heads, 128], case["q"].data[:-heads * 128])
    bad(["total_q=%d" % (rows - 1)], case)


def caches_given_twice():
    case = base("prefill_q8kv8_gqa4")
    case["kv"] = Tensor("F8_E4M3", [1, 2, 128, 256], bytes(65536))
    bad(["exactly one of", "more"], case)
    case = base("prefill_q8kv4_one_key")
    slots = Tensor("U8", [1, 3, 128, 72], bytes(3 * 9216))
    case["kv_slots"] = slots
    bad(["exactly one of", "more"], case)
    del case.tensors["k"], case.tensors["v"]
    bad("k_scale", case)
    del case.tensors["k_scale"], case.tensors["v_scale"]
    bad("two a KV head", case)
    case["kv_slots"], case["topk"] = Tensor("U8", [0, 0, 128, 72], b""), ints([], [0, 1, 16])
    bad("0 KV heads", case)


def bad_metadata():
    table = {
        "op": ["", "Prefill", "prefill ", "attention", "prefill\n"],
        "sm_scale": ["", "nan", "inf", "-inf", "0", "-0.1", "1e999", "1e39", "1e-60", "0x1p-3", " 0.1", "0.1 ", "0,1", "0.1f",
                     "1e", ".", "--1"],
        "topk": ["", "0", "-1", "33", "16.0", "16x", " 16", "99999999999999999999", "2147483648", "8", "0x10"],
        "v_scale_order": ["", "Quad", "linear,"],
        "out_dtype": ["", "f32", "e4m3"],
        "out_atol": ["", "nan", "-1", "x", "inf"],
        "out_rtol": ["-0.5"],
        "lse_atol": ["1e400"],
    }
    for key, values in table.items():
        for value in values:
            case = base("prefill_q8kv4_one_key")
            case.metadata[key] = value
            bad(key, case)
    for key, values in {"init_pages": ["-1", "16", "a"], "local_pages": ["0", "-1", "17"], "topk_order": ["", "id"],
                        "scores_atol": ["nan"]}.items():
        for value in values:
            case = base("index_nvfp4_h2")
            case.metadata[key] = value
            bad(key, case)
    for value in "0", "33":
        case = base("prefill_q8kv4_one_key")
        case.metadata["topk"] = value
        bad("metadata topk: %s is outside 1..32" % value, case)
    for text in "8.838834764831845e-2", "0.08838834764831845", "+.08838834764831845":
        case = base("prefill_q8kv8_gqa4")
        case.metadata["sm_scale"] = text
        assert msa("check", folder.write(case))


def unsupported_formats():
    case = base("prefill_q8kv8_gqa4")
    case["q"] = Tensor("BF16", case["q"].shape, case["q"].data * 2)
    case["q_descale"] = Tensor("F32", [1], struct.pack("<f", 1))
    bad("q_descale must not be given: q has dtype BF16, only F8_E4M3 has it", case)
    case = base("prefill_q8kv8_gqa4")
    case["k_scale"] = Tensor("F8_E4M3", case["k"].shape[:3] + [8], bytes(len(case["k"].data) // 16))
    bad("k_scale must not be given: k has dtype F8_E4M3, only U8 (NVFP4) has it", case)
    case = base("prefill_q8kv8_gqa4")
    case["k_global_scale"] = Tensor("F32", [1], struct.pack("<f", 1))
    bad("k_global_scale must not be given: k has dtype F8_E4M3, only U8 (NVFP4) has it", case)
    case = base("prefill_q8kv4_one_key")
    case["q"] = Tensor("F8_E4M3", [1, 17, 128], bytes(17 * 128))
    case.tensors = {n: t for n, t in case.tensors.items() if not n.startswith("expected")}
    bad("q has 17 heads, expected 1 to 16 times the 1 KV heads", case)
    case = base("hf_layer_q8kv8")
    rows, heads = case["index_q"].shape[0], case["k"].shape[1] + 1
    case["index_q"] = Tensor("F8_E4M3", [rows, heads, 128], bytes(rows * heads * 128))
    bad("index_q has %d heads, expected a divisor of the %d KV heads" % (heads, heads - 1), case)
    case = base("hf_layer_q8kv8")
    case["index_k_scale"] = Tensor("F8_E4M3", case["index_k"].shape[:2] + [8], bytes(len(case["index_k"].data) // 16))
    bad("index_k_scale must not be given: index_k has dtype F8_E4M3, only U8 (NVFP4) has it", case)
    for name in "index_q", "index_k": # 16-bit indices are BF16 alone, and both are
        case = base("hf_layer_q8kv8")
        case[name] = Tensor("F16", case[name].shape, case[name].data * 2)
        bad("%s has dtype F16, expected BF16 or F8_E4M3" % name, case)
    case = base("hf_layer_q8kv8")
    case["index_q"] = Tensor("BF16", case["index_q"].shape, case["index_q"].data * 2)
    bad("index: q_dtype = BF16 with k_dtype = E4M3", case)


def nothing_expected():
    case = base("prefill_q8kv4_one_key")
    del case.tensors["expected.out"], case.tensors["expected.lse"]
    refused("expected", "check", folder.write(case))
    msa("run", folder.path(), "-o", folder.path("out"))
    case["expected.scores"] = Tensor("F32", [1], bytes(4)) # not what the operation computes
    refused("expected", "check", folder.write(case))


def error_bits():
    def set_bits(words, **values):
        case = base("prefill_q8kv4_scale")
        for name, (index, value) in values.items():
            case[name].set_number(index, value)
        bad(words, case)
        refused(words, "check", "--poison", "255", folder.path())

    rows = base("prefill_q8kv4_scale")["q"].shape[0]
    for value in 12, 1 << 30, -2, -(1 << 31):
        set_bits(["topk", "error bit 1"], topk=(20, value))
    for value in 15, -1, (1 << 31) - 1, -(1 << 31):
        set_bits(["page_table", "error bit 2"], page_table=(base("prefill_q8kv4_scale")["topk"].numbers()[0], value))
    for value in -1, -(1 << 31):
        set_bits(["kv_lens", "error bit 4"], kv_lens=(0, value))
    for value in rows + 1, -1, (1 << 31) - 1:
        set_bits(["cu_seqlens_q", "error bit 4"], cu_seqlens_q=(1, value))
    set_bits(["cu_seqlens_q", "does not start at 0", "error bit 4"], cu_seqlens_q=(0, 1))
    for value in 12 * 128 + 1, (1 << 31) - 1:
        set_bits("error bit 8", kv_lens=(0, value))


def random_damage():
    """Flipped bytes anywhere in the header, and random values in the small tensors: any status, but never a crash."""
    source = random.Random(1)
    for name in "prefill_q8kv4_one_key", "index_nvfp4_h2":
        case = base(name)
        header, data = case.header()
        text = json.dumps(header).encode()
        for _ in range(100):
            damaged = bytearray(text)
            for _ in range(source.choice([1, 1, 2, 5])):
                damaged[source.randrange(len(damaged))] = source.choice(b'0123456789{}[]",:e-. \x00\x80')
            casefile.write_raw(folder.path(), bytes(damaged), data)
            any_status()
        for _ in range(50):
            damaged = case.copy()
            for key in "cu_seqlens_q", "kv_lens", "page_table", "topk":
                if key in damaged.tensors and source.random() < 0.7:
                    count = len(damaged[key].data) // 4
                    value = source.choice([source.randrange(-5, 5000), source.randrange(-1 << 31, 1 << 31)])
                    damaged[key].set_number(source.randrange(count), value)
            damaged.write(folder.path())
            any_status("--poison", "255")


def any_status(*options):
    done = run("check", *options, folder.path())
    assert done.returncode in (0, 1, 2), "status %d: %s" % (done.returncode, done.stderr)
    assert done.stderr.count("\n") == (done.returncode == 2), done.stderr


def little_memory():
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak < 400 * 1024, "a hostile file took %d KiB" % peak


def main():
    # First, so that the peak of memory is theirs.
    test("hostile length and data", hostile_prefixes)
    test("hostile JSON", hostile_json)
    test("hostile tensor entries", hostile_entries)
    test("hostile files", hostile_files)
    test("damaged files never crash", random_damage)
    test("hostile files take little memory", little_memory)
    for name in "prefill_q8kv4_global_scale", "index_nvfp4_h2", "hf_layer_q8kv8", "layout_slots_quad":
        test("every tensor of %s left out, or of another rank, dtype, shape" % name, every_tensor_changed, name)
    test("unknown tensor names", unknown_names)
    test("lengths that disagree", disagreeing_lengths)
    test("caches given twice", caches_given_twice)
    test("bad metadata", bad_metadata)
    test("unsupported formats", unsupported_formats)
    test("nothing expected", nothing_expected)
    test("error bits", error_bits)
    finish()


main()
