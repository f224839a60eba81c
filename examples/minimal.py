# SPDX-License-Identifier: MIT
"""minimal.c from Python: which 4 of 10 pages does a query attend to? Nothing but the standard library: any array that gives
its address (torch.Tensor.data_ptr(), numpy.ndarray.ctypes.data) goes where an address stands here."""
import ctypes
from ctypes import addressof, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p

MSA_DENSE = -2**63  # as in msa.h

class TopkArgs(ctypes.Structure):  # msa_topk_args, field by field
    _fields_ = [("size", c_size_t), ("scores", c_void_p), ("scores_head_stride", c_int64), ("scores_row_stride", c_int64),
                ("num_heads", c_int32), ("rows", c_int64), ("columns", c_int32), ("valid_pages", c_void_p),
                ("k", c_int32), ("init_pages", c_int32), ("local_pages", c_int32), ("order", c_int),
                ("topk", c_void_p), ("topk_head_stride", c_int64), ("topk_row_stride", c_int64)]

msa = ctypes.CDLL("libmsa.so.0")
msa.msa_last_error.restype = ctypes.c_char_p

def check(status):
    if status:
        raise RuntimeError(msa.msa_last_error().decode())

scores = (c_float * 10)(0.5, -1, 7, 0.25, 3, 3, -2, 1, 0, 0)
valid_pages, pages, context = c_int32(10), (c_int32 * 4)(), c_void_p()
check(msa.msa_context_create(None, byref(context)))
check(msa.msa_topk(context, byref(TopkArgs(
    size=ctypes.sizeof(TopkArgs), scores=addressof(scores), scores_head_stride=MSA_DENSE, scores_row_stride=MSA_DENSE,
    num_heads=1, rows=1, columns=10, valid_pages=addressof(valid_pages), k=4, local_pages=1, topk=addressof(pages),
    topk_head_stride=MSA_DENSE, topk_row_stride=MSA_DENSE)), None))
print("pages", *pages)  # pages 2 4 5 9
msa.msa_context_destroy(context)
