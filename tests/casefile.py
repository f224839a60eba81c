# SPDX-License-Identifier: MIT
"""Reads and writes safetensors files with nothing but the standard library, so that tests can change case files."""
import json
import struct

DTYPE_BYTES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "BOOL": 1, "I64": 8}


def element_count(shape):
    count = 1
    for extent in shape:
        count *= extent
    return count


class Tensor:
    """Dense data of a dtype and shape; a bytearray, so that it can be changed in place."""

    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, list(shape), bytearray(data)

    def numbers(self):
        """The elements of an F32 or I32 tensor."""
        return list(struct.unpack("<%d%s" % (len(self.data) // 4, "f" if self.dtype == "F32" else "i"), self.data))

    def set_number(self, index, value):
        struct.pack_into("<f" if self.dtype == "F32" else "<i", self.data, 4 * index, value)

    def rows(self, axes):
        """The data cut into one piece for each index of the first `axes` axes."""
        count = element_count(self.shape[:axes])
        size = len(self.data) // count
        return [bytes(self.data[i * size:(i + 1) * size]) for i in range(count)]


def ints(values, shape=None):
    return Tensor("I32", shape or [len(values)], struct.pack("<%di" % len(values), *values))


class CaseFile:
    """Tensors by name, and metadata."""

    def __init__(self, metadata=None, tensors=None):
        self.metadata, self.tensors = dict(metadata or {}), dict(tensors or {})

    def __getitem__(self, name):
        return self.tensors[name]

    def __setitem__(self, name, tensor):
        self.tensors[name] = tensor

    def copy(self):
        return CaseFile(self.metadata, {n: Tensor(t.dtype, t.shape, t.data) for n, t in self.tensors.items()})

    def header(self):
        """The header as a dictionary, and the data."""
        header, data = {"__metadata__": dict(self.metadata)}, bytearray()
        for name, tensor in self.tensors.items():
            header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape),
                            "data_offsets": [len(data), len(data) + len(tensor.data)]}
            data += tensor.data
        return header, data

    def write(self, path):
        write_raw(path, *self.header())


def read(path):
    with open(path, "rb") as file:
        content = file.read()
    length, = struct.unpack_from("<Q", content)
    header = json.loads(content[8:8 + length])
    case = CaseFile(header.pop("__metadata__", {}))
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        case[name] = Tensor(entry["dtype"], entry["shape"], content[begin:end])
    return case


def write_raw(path, header, data):
    """`header` may be a dictionary, or text that need not be valid."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
