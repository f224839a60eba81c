/* SPDX-License-Identifier: MIT
 *
 * decode_sm90.cuh - K and V pages of decode_sm90.cu: copied as they are, and turned into the products' operands between
 * shared memory and registers.
 *
 * A tile is the K or the V of one page and head (16-bit types: of half a page), bytes as in memory:
 *   NVFP4    128 keys x 64 bytes of codes, then 128 x 8 scales (or V's quad order)   9 KB
 *   E4M3     128 keys x 128 bytes, 16-byte chunk c of key k at c ^ k%8              16 KB
 *   16-bit    64 keys x 256 bytes, as two halves of 128 bytes, each like E4M3       16 KB
 * One thread copies a whole tile: NVFP4 by plain bulk copies, the others by boxes of a tensor map with 128-byte
 * swizzle. Caches whose strides do not allow that (scales or keys apart) are copied by all threads, to the same places,
 * so that a layout never changes a bit.
 *
 * Four warps share a tile, a warp takes a quarter of its keys. Which element of d a product's inner index means, and
 * which key, is free as long as both operands agree:
 *   K  lane (g, t) takes 16 elements of key g of eight, from 32t on and from 32t + 16 on (16-bit: 16t and 64 + 16t)
 *   V  lane (g, t) takes the elements 16g .. 16g+15 of keys; column g of product n is element n of that block
 * so that a lane reads 8 or 16 bytes at a time, a block of NVFP4 has one scale, and nothing is exchanged between lanes.
 */
#ifndef MSA_CUDA_DECODE_SM90_CUH
#define MSA_CUDA_DECODE_SM90_CUH

#include "page.cuh"
#include "ptx_bulk_sm90.cuh"

enum {
    GROUP_WARPS = 4,
    GROUP = GROUP_WARPS * CUDA_WARP /* threads that share a tile */,
    SCALES = 8192 /* of a tile */
};

template <storage STORAGE> struct tile {
    static constexpr bool NVFP4 = STORAGE == STORAGE_NVFP4_E4M3, HALF = STORAGE == STORAGE_HALF;
    static constexpr int KEYS = HALF ? MSA_PAGE_SIZE / 2 : MSA_PAGE_SIZE, PER_PAGE = MSA_PAGE_SIZE / KEYS;
    static constexpr int BYTES = NVFP4 ? SCALES + 1024 : 16384;
    static constexpr int WARP_KEYS = KEYS / GROUP_WARPS, BLOCKS = WARP_KEYS / 8;
    static constexpr int PART = HALF ? 8 : 4; /* elements of V that are widened at a time */
    /* Column 2t + i of eight keys is this key: V's reads by a quad then fall into different banks. */
    static __device__ constexpr int key(int t, int i)
    {
        return NVFP4 ? 4 * i + t : 2 * t + i;
    }
};

/* K's pages, or V's. 64 bytes, a line of the constant cache. */
struct tile_source {
    const uint8_t *data, *scale;
    int64_t page_stride, head_stride, scale_page_stride, scale_head_stride, token_stride, scale_token_stride;
};

/* ------------------------------------------------------------------------------------------------ copies */

/* By one thread. `map`: E4M3, 16-bit; `part`: which half of the page, 16-bit. */
template <storage STORAGE>
static __device__ inline void copy_tile(uint32_t to, const tile_source &from, const CUtensorMap *map, int head,
                                        int page, int part, uint32_t barrier)
{
    using T = tile<STORAGE>;
    barrier_expect(barrier, T::BYTES);
    if constexpr (T::NVFP4) {
        copy_bulk(to, from.data + page * from.page_stride + head * from.head_stride, SCALES, barrier);
        copy_bulk(to + SCALES, from.scale + page * from.scale_page_stride + head * from.scale_head_stride, 1024,
                  barrier);
    } else {
        copy_box(to, map, 0, part * T::KEYS, head, page, barrier);
        if (T::HALF)
            copy_box(to + T::BYTES / 2, map, 128, part * T::KEYS, head, page, barrier);
    }
}

/* By a group's threads, each of which arrives at the barrier. */
template <storage STORAGE>
static __device__ inline void copy_tile_together(uint32_t to, const tile_source &from, int head, int page, int part,
                                                 uint32_t barrier, uint32_t thread)
{
    using T = tile<STORAGE>;
    constexpr int IN_ROW = T::NVFP4 ? 4 : T::HALF ? 16 : 8;
    int of_group = (int)(thread % GROUP), chunk = of_group % IN_ROW;
    const uint8_t *data =
        from.data + page * from.page_stride + head * from.head_stride + part * T::KEYS * from.token_stride;
#pragma unroll 1
    for (int key = of_group / IN_ROW; key < T::KEYS; key += GROUP / IN_ROW) {
        int place =
            T::NVFP4 ? key * 64 + chunk * 16 : chunk / 8 * (T::BYTES / 2) + key * 128 + ((chunk % 8 ^ key % 8) << 4);
        copy_async_16(to + place, data + key * from.token_stride + chunk * 16);
    }
    if (T::NVFP4)
        copy_async_8(to + SCALES + of_group * 8, from.scale + page * from.scale_page_stride +
                                                     head * from.scale_head_stride +
                                                     of_group * from.scale_token_stride);
    copy_async_arrive(barrier);
}

/* ------------------------------------------------------------------------------------------------ conversions */

/* Four E4M3 codes to two pairs of F16. */
static __device__ inline void widen_4(uint32_t codes, uint32_t &low, uint32_t &high)
{
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}

/* Entry `code` of the table of block scales: the products with the eight magnitudes of E2M1, rounded to E4M3. */
static __device__ inline uint2 scaled_magnitudes(uint32_t scale_code)
{
    uint32_t scale = e4m3_pair_to_f16(scale_code * 0x101);
    auto pair = [&](uint32_t magnitudes) { /* two F16; the products are exact */
                                           uint16_t codes;
                                           asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;"
                                               : "=h"(codes)
                                               : "r"(bits_of(__hmul2(pair_of(scale), pair_of(magnitudes)))));
                                           return (uint32_t)codes;
    };
    return make_uint2(pair(0x38000000) | pair(0x3E003C00) << 16, pair(0x42004000) | pair(0x46004400) << 16);
}

/* The upper half of a register without its sign bits into both halves, by the multiplier: a shift would take a turn of
 * the unit that all else here needs. Exact, as no such half is an Inf or NaN; `one` is 1.0 twice, opaque. */
static __device__ inline uint32_t upper_half(uint32_t x, uint32_t one)
{
    uint32_t y;
    asm("{\n"
        ".reg .b16 l, h;\n"
        ".reg .b32 t;\n"
        "mov.b32 {l, h}, %1;\n"
        "mov.b32 t, {h, h};\n"
        "mul.rn.f16x2 %0, t, %2;\n"
        "}"
        : "=r"(y)
        : "r"(x), "r"(one));
    return y;
}

/* Eight codes of a key and its block's table entry to pairs of the elements (0,2) (4,6) (1,3) (5,7). */
static __device__ inline void widen_key(uint32_t codes, uint2 entry, uint32_t one, uint32_t *pair)
{
    uint32_t magnitude = codes & 0x77777777;
    uint32_t low = permute(entry.x, entry.y, magnitude), high = permute(entry.x, entry.y, upper_half(magnitude, one));
    uint32_t even = permute(low, high, 0x6420) ^ (codes << 4 & 0x80808080);
    uint32_t odd = permute(low, high, 0x7531) ^ (codes & 0x80808080);
    widen_4(even, pair[0], pair[1]);
    widen_4(odd, pair[2], pair[3]);
}

/* Eight codes of a block to E4M3, in order. The signs go to the bytes by the permutation that spreads them. */
static __device__ inline uint2 widen_in_order(uint32_t codes, uint2 entry, uint32_t one)
{
    uint32_t magnitude = codes & 0x77777777, even = codes << 4;
    return make_uint2(permute(entry.x, entry.y, magnitude) ^ (permute(even, codes, 0xD9C8) & 0x80808080),
                      permute(entry.x, entry.y, upper_half(magnitude, one)) ^
                          (permute(even, codes, 0xFBEA) & 0x80808080));
}

/* Four of the eight codes each of the keys a and b, the lower or the upper ones, to pairs (a, b). */
static __device__ inline void widen_values(uint32_t a, uint32_t b, uint2 entry_a, uint2 entry_b, uint32_t one,
                                           bool upper, uint32_t (&pair)[4])
{
    uint32_t magnitude_a = a & 0x77777777, magnitude_b = b & 0x77777777;
    uint32_t from_a = permute(entry_a.x, entry_a.y, upper ? upper_half(magnitude_a, one) : magnitude_a);
    uint32_t from_b = permute(entry_b.x, entry_b.y, upper ? upper_half(magnitude_b, one) : magnitude_b);
    uint32_t sign = permute(a, b, upper ? 0x7362 : 0x5140);
    widen_4(permute(from_a, from_b, 0x6240) ^ (sign << 4 & 0x80808080), pair[0], pair[2]);
    widen_4(permute(from_a, from_b, 0x7351) ^ (sign & 0x80808080), pair[1], pair[3]);
}

/* ------------------------------------------------------------------------------------------------ queries */

/* Half `half` of a row of 128 queries' elements as eight pairs, in the order in which K comes; NULL: zeros. */
template <storage STORAGE, bool E4M3>
static __device__ inline void load_query_half(const char *row, int half, uint32_t (&pair)[8])
{
    int t = threadIdx.x % 4, d = tile<STORAGE>::HALF ? 64 * half + 16 * t : 32 * t + 16 * half;
    uint4 x = make_uint4(0, 0, 0, 0), y = x;
    if (row && E4M3) {
        x = *(const uint4 *)(row + d);
    } else if (row) {
        x = *(const uint4 *)(row + 2 * d);
        y = *(const uint4 *)(row + 2 * d + 16);
    }
    if constexpr (!E4M3) {
        pair[0] = x.x, pair[1] = x.y, pair[2] = x.z, pair[3] = x.w;
        pair[4] = y.x, pair[5] = y.y, pair[6] = y.z, pair[7] = y.w;
    } else {
        if constexpr (tile<STORAGE>::NVFP4) /* widen_key's order */
            x = make_uint4(permute(x.x, x.y, 0x6420), permute(x.x, x.y, 0x7531), permute(x.z, x.w, 0x6420),
                           permute(x.z, x.w, 0x7531));
        widen_4(x.x, pair[0], pair[1]);
        widen_4(x.y, pair[2], pair[3]);
        widen_4(x.z, pair[4], pair[5]);
        widen_4(x.w, pair[6], pair[7]);
    }
}

/* ------------------------------------------------------------------------------------------------ K */

/* Where in a tile a lane reads its first key; its scales are at SCALES + place / 8. All else is a constant. */
template <storage STORAGE> static __device__ inline uint32_t place_of_keys(uint32_t thread)
{
    using T = tile<STORAGE>;
    int lane = thread % CUDA_WARP, g = lane / 4, t = lane % 4;
    int key = thread / CUDA_WARP % GROUP_WARPS * T::WARP_KEYS + T::key(g / 2, g % 2);
    return (uint32_t)(T::NVFP4 ? key * 64 + t * 16 : key * 128 + ((2 * t ^ g) << 4)); /* key % 8 is g */
}

/* Half of d of eight keys, block n of the warp's, as the products' b operands. */
template <storage STORAGE>
static __device__ inline void load_keys(uint32_t at, uint32_t scale_at, uint32_t table, uint32_t one, int n, int half,
                                        uint32_t (&pair)[8])
{
    using T = tile<STORAGE>;
    if constexpr (T::NVFP4) {
        uint2 codes = load_shared_64(at + n * 512 + half * 8);
        uint2 entry = load_shared_64(table + load_shared_8(scale_at + n * 64 + half) * 8);
        widen_key(codes.x, entry, one, pair);
        widen_key(codes.y, entry, one, pair + 4);
    } else if constexpr (T::HALF) {
        uint4 x = load_shared_128(at + half * (T::BYTES / 2) + n * 1024);
        uint4 y = load_shared_128((at ^ 16) + half * (T::BYTES / 2) + n * 1024);
        pair[0] = x.x, pair[1] = x.y, pair[2] = x.z, pair[3] = x.w;
        pair[4] = y.x, pair[5] = y.y, pair[6] = y.z, pair[7] = y.w;
    } else {
        uint4 x = load_shared_128((half ? at ^ 16 : at) + n * 1024);
        widen_4(x.x, pair[0], pair[1]);
        widen_4(x.y, pair[2], pair[3]);
        widen_4(x.z, pair[4], pair[5]);
        widen_4(x.w, pair[6], pair[7]);
    }
}

/* ------------------------------------------------------------------------------------------------ V */

/* Where in a tile a lane reads its first value, and the scale. */
struct value_places {
    uint32_t data, scale;
};

template <storage STORAGE> static __device__ inline value_places places_of_values(bool quad, uint32_t thread)
{
    using T = tile<STORAGE>;
    int lane = thread % CUDA_WARP, g = lane / 4, t = lane % 4;
    int first = thread / CUDA_WARP % GROUP_WARPS * T::WARP_KEYS, key = first + (T::NVFP4 ? t : 2 * t);
    if (T::NVFP4)
        return value_places{(uint32_t)(key * 64 + g * 8),
                            (uint32_t)(SCALES + first * 8 + (quad ? t + 4 * g : 8 * t + g))};
    return value_places{
        (uint32_t)(key * 128 + (T::HALF ? g / 4 * (T::BYTES / 2) + ((2 * (g % 4) ^ 2 * t) << 4) : (g ^ 2 * t) << 4)),
        0};
}

/* 16 of the warp's keys, from 16 * block on, as they lie in the tile. 16-bit: elements 8 * part .. 8 * part + 7 of the
 * lane's 16. */
template <storage STORAGE> struct raw_values {
    uint4 x[4]; /* keys 2t, 2t+1, 2t+8, 2t+9; NVFP4: keys t, t+4, t+8, t+12: codes, and the scale's table entry */
};

template <storage STORAGE>
static __device__ inline void load_values(uint32_t at, uint32_t scale_at, uint32_t table, int block, int part,
                                          raw_values<STORAGE> &raw)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (tile<STORAGE>::NVFP4) { /* in both orders of scales the fourth key from here is 32 bytes on */
            uint2 codes = load_shared_64(at + block * 1024 + i * 256);
            uint2 entry = load_shared_64(table + load_shared_8(scale_at + block * 128 + i * 32) * 8);
            raw.x[i] = make_uint4(codes.x, codes.y, entry.x, entry.y);
        } else { /* an odd key's chunk is the even one's ^ 1 */
            raw.x[i] = load_shared_128((at ^ (i % 2 ^ part) << 4) + block * 2048 + i % 2 * 128 + i / 2 * 1024);
        }
    }
}

/* PART of the lane's 16 elements as the products' b operands; those from PART * part on. */
template <storage STORAGE, int PART = tile<STORAGE>::PART>
static __device__ inline void widen_part(const raw_values<STORAGE> &raw, uint32_t one, int part, uint32_t (&low)[PART],
                                         uint32_t (&high)[PART])
{
    using T = tile<STORAGE>;
    const uint4(&x)[4] = raw.x;
    if constexpr (T::NVFP4) {
        auto entry = [&](int i) { return make_uint2(x[i].z, x[i].w); };
        auto codes = [&](int i) { return part < 2 ? x[i].x : x[i].y; };
        widen_values(codes(0), codes(1), entry(0), entry(1), one, part % 2, low);
        widen_values(codes(2), codes(3), entry(2), entry(3), one, part % 2, high);
    } else if constexpr (T::HALF) {
        auto pairs = [&](const uint4 &a, const uint4 &b, uint32_t(&to)[8]) {
            const uint32_t from[4][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
#pragma unroll
            for (int w = 0; w < 4; w++) {
                to[2 * w] = permute(from[w][0], from[w][1], 0x5410);
                to[2 * w + 1] = permute(from[w][0], from[w][1], 0x7632);
            }
        };
        pairs(x[0], x[1], low);
        pairs(x[2], x[3], high);
    } else {
        auto word = [&](const uint4 &a) { return part == 0 ? a.x : part == 1 ? a.y : part == 2 ? a.z : a.w; };
        auto pairs = [&](uint32_t a, uint32_t b, uint32_t(&to)[PART]) {
            widen_4(permute(a, b, 0x5140), to[0], to[1]);
            widen_4(permute(a, b, 0x7362), to[2], to[3]);
        };
        pairs(word(x[0]), word(x[1]), low);
        pairs(word(x[2]), word(x[3]), high);
    }
}

/* Keys of the warp from `keys` of the tile on may hold NaN, and 0 * NaN would reach a result. */
template <storage STORAGE>
static __device__ inline void clear_dead_values(uint32_t v_tile, int keys, bool quad, uint32_t thread)
{
    using T = tile<STORAGE>;
    int lane = thread % CUDA_WARP, first = thread / CUDA_WARP % GROUP_WARPS * T::WARP_KEYS;
    if constexpr (T::NVFP4) {   /* a zero scale makes a zero of every code */
        int key = first + lane; /* 32 keys, a lane each */
        for (int block = 0; key >= keys && block < 8; block++)
            store_shared_8(v_tile + SCALES + (quad ? key / 4 * 32 + block * 4 + key % 4 : key * 8 + block), 0);
    } else {
        for (int key = max(first, keys) + lane / 8; key < first + T::WARP_KEYS; key += 4) {
            store_shared_128(v_tile + key * 128 + lane % 8 * 16, make_uint4(0, 0, 0, 0));
            if (T::HALF)
                store_shared_128(v_tile + T::BYTES / 2 + key * 128 + lane % 8 * 16, make_uint4(0, 0, 0, 0));
        }
    }
    fence_async_reads(); /* the copy engine writes here again */
    __syncwarp();
}

#endif
