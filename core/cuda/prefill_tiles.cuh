// Pieces of a sequence: from memory to the stage by bulk copies, and from there to operands of the tensor cores.
#pragma once
#include "cuda/decode_codes.cuh"
#include "cuda/decode_instructions.cuh"
#include "cuda/prefill_config.h"

namespace kivi::cuda::prompt {

// What follows from the thread's number is computed again for each piece: kept ready, it would cost the products their
// registers.
__device__ __forceinline__ int fresh_thread() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}
__device__ __forceinline__ int fresh_lane() { return fresh_thread() % 32; }
__device__ __forceinline__ int fresh_warp() { return fresh_thread() / 32; }

// What the loop seldom does stands beside it: the instructions of a piece are many for the caches as they are.
__device__ __forceinline__ bool rarely(bool condition) { return __builtin_expect(condition, false); }

// ---- To the stage ----

// By the whole block: keys and values of the call. Rows are far apart, and copies of single rows are slow in bulk. Each
// thread waits for its own, not for the stage's barrier.
template <class C>
__device__ __forceinline__ void fetch_fresh(const Args& p, SharedStorage<C>& shared, int stage, int head,
                                            const Piece& piece) {
    constexpr int kVectors = C::kRowBytes / 16;
    static_assert(C::kThreads % kVectors == 0);
    const RowArg& row = shared.row;
    const int thread = fresh_thread(), vector = thread % kVectors;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
        const View& view = part == 0 ? p.attend.k : p.attend.v;
        const int first = piece.position - shared.walk.length() + thread / kVectors;
        const uint16_t* from = static_cast<const uint16_t*>(view.data) + view.origin(row.index, row.offset) +
                               first * view.token_stride + head * view.head_stride + vector * 8;
        const uint8_t* to = shared.stage[stage][part] + thread * 16;
#pragma unroll 1
        for (int t = thread / kVectors; t < piece.count; t += C::kThreads / kVectors) {
            fast::copy16(fast::shared_address(to), from);
            from += C::kThreads / kVectors * view.token_stride;
            to += C::kThreads * 16;
        }
    }
}

// How many of `count` rows of the ring from a position on follow one another in memory: it goes on at its beginning.
__device__ __forceinline__ int straight_rows(const TensorStore& store, int position, int count) {
    const int64_t slot = (position - store.windows.sink) % store.tail_rows;
    return static_cast<int>(min(int64_t{count}, store.tail_rows - slot));
}
// By one thread: rows of a window from a position on.
template <class C>
__device__ __forceinline__ void fetch_rows(uint32_t to, const TensorStore& store, int sequence, int head, int position,
                                           int count, int straight, uint32_t bar) {
    const uint32_t bytes = straight * C::kRowBytes, all = count * C::kRowBytes;
    fast::bulk_copy(to, store.window_row(sequence, head, position), bytes, bar);
    if (bytes < all) {
        fast::bulk_copy(to + bytes, store.window_row(sequence, head, position + straight), all - bytes, bar);
    }
}

// By one whole warp: all other pieces. `block` is the page's, of a packed one.
template <class C>
__device__ __forceinline__ void fetch(const Args& p, SharedStorage<C>& shared, int stage, int head,
                                      const Piece& piece, int block) {
    const int lane = fresh_lane();
    const RowArg& row = shared.row;
    const uint32_t bar = fast::shared_address(&shared.full[stage]);
    const uint32_t to[2] = {fast::shared_address(shared.stage[stage][0]),
                            fast::shared_address(shared.stage[stage][1])};
    const TensorStore& key = p.attend.layer.key;
    const TensorStore& value = p.attend.layer.value;
    if (lane != 0) return;
    if (rarely(!packed_keys<C>(piece))) {
        const int straight = piece.kind == Kind::tail ? straight_rows(key, piece.position, piece.count) : piece.count;
        fast::barrier_expect(bar, 2 * piece.count * C::kRowBytes);
        for (int part = 0; part < 2; ++part) {
            const TensorStore& store = part == 0 ? key : value;
            fetch_rows<C>(to[part], store, row.sequence, head, piece.position, piece.count,
                          C::kPublished ? straight_rows(store, piece.position, piece.count) : straight, bar);
        }
        return;
    }
    // All of the piece, as far as it is filled or not: the page is there.
    const int half = static_cast<int>(piece.position - key.windows.sink) / C::kTokens % 2;
    const uint8_t* const keys = key.page(block, head);
    const uint8_t* const values = value.page(block, head);
    const bool value_rows = C::kPublished && piece.kind == Kind::middle;
    const int first = value_rows ? shared.walk.hidden(piece) : 0, rows = piece.count - first;
    fast::barrier_expect(bar, p.packed.keys_bytes + p.packed.codes_bytes +
                                  (value_rows ? rows * C::kRowBytes : p.packed.values_bytes));
    fast::bulk_copy(to[0], keys + p.packed.keys_from[half], p.packed.keys_bytes, bar);
    if (p.packed.codes_bytes > 0) {
        fast::bulk_copy(to[0] + p.packed.keys_bytes, keys + p.packed.codes_from[half], p.packed.codes_bytes, bar);
    }
    if (value_rows) {
        fetch_rows<C>(to[1] + first * C::kRowBytes, value, row.sequence, head, piece.position + first, rows,
                      straight_rows(value, piece.position + first, rows), bar);
        return;
    }
    fast::bulk_copy(to[1], values + p.packed.values_from[half], p.packed.values_bytes, bar);
}

// ---- Packed pieces ----

__device__ __forceinline__ uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
// 2^n in both halves.
__device__ constexpr uint32_t power_pair(int n) {
    return static_cast<uint32_t>(15 + n) << 10 | static_cast<uint32_t>(15 + n) << 26;
}

// code * 2^-down, exact, of codes that stand at bit `power` of both halves: below the exponent of 1024, a code there
// is 1024 + code * 2^power. `thousand` is 1024 in both halves; as it is not known to the compiler, one
// instruction masks the code and adds it.
__device__ __forceinline__ uint32_t code_numbers(uint32_t pair, uint32_t thousand, int power, int down) {
    return fma_half2(pair | thousand, power_pair(-power - down), 0x80008000u | power_pair(10 - power - down));
}
__device__ __forceinline__ uint4 code_numbers(uint4 pairs, uint32_t thousand, int power, int down) {
    return make_uint4(code_numbers(pairs.x, thousand, power, down), code_numbers(pairs.y, thousand, power, down),
                      code_numbers(pairs.z, thousand, power, down), code_numbers(pairs.w, thousand, power, down));
}

// Operand `number` of a block whose vectors are w, times 2^-kDown; x: those shifted.
template <class C, int BITS, class Vector, int VECTORS>
__device__ __forceinline__ uint4 numbers(const Vector (&w)[VECTORS], const Vector (&x)[VECTORS], uint32_t thousand,
                                         int number) {
    const uint4 pairs = fast::operand<BITS>(w, x, number);
    const int step = number % C::kSteps;
    const int low = step_power(BITS, C::kDim, step, 0), high = step_power(BITS, C::kDim, step, 1);
    return make_uint4(code_numbers(pairs.x, thousand, low, C::kDown), code_numbers(pairs.y, thousand, low, C::kDown),
                      code_numbers(pairs.z, thousand, high, C::kDown), code_numbers(pairs.w, thousand, high, C::kDown));
}

// How many shares a block's codes have, of a warp each: vectors, or all where these have two words.
template <int BITS, int DIM>
constexpr int kShares = vector_words(BITS, DIM) == 2 ? 1 : fast::kCodeVectors<BITS, DIM>;

// visit(unit, step, codes * 2^-down) for the operands of share V of a block's codes.
template <class C, int BITS, int V, class Visit>
__device__ __forceinline__ void for_operands(const uint8_t* codes, uint32_t thousand, int lane, const Visit& visit) {
    if constexpr (vector_words(BITS, C::kDim) == 2) {
        uint2 w[3], x[3];
#pragma unroll
        for (int v = 0; v < 3; ++v) {
            w[v] = fast::load_codes<BITS, C::kDim>(codes, v, lane);
            x[v] = fast::shift_high<BITS>(w[v]);
        }
#pragma unroll
        for (int number = 0; number < 2 * C::kSteps; ++number) {
            visit(number / C::kSteps, number % C::kSteps, numbers<C, BITS>(w, x, thousand, number));
        }
        return;
    }
    constexpr int kVectors = BITS == 3 && V % 3 == 0 ? 3 : 1;  // one of three gathers the operand in the spare bits
    constexpr int kInPlace = BITS == 3 ? 3 : 8 / BITS;
    uint4 w[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) w[v] = fast::load16(codes + (V + v) * kVectorBytes + lane * 16);
    const uint4 x = fast::shift_high<BITS>(w[0]);
    const auto give = [&](int number, uint4 pairs, int power) {
        visit(number / C::kSteps, number % C::kSteps, code_numbers(pairs, thousand, power, C::kDown));
    };
#pragma unroll
    for (int f = 0; f < fields_of(BITS); ++f) {
        const uint4 pairs = make_uint4(fast::code_pair<BITS>(w[0].x, x.x, f), fast::code_pair<BITS>(w[0].y, x.y, f),
                                       fast::code_pair<BITS>(w[0].z, x.z, f), fast::code_pair<BITS>(w[0].w, x.w, f));
        give(operand_of(BITS, V, f), pairs, BITS * (f % kInPlace));
    }
    if constexpr (kVectors == 3) {
        give(V / 3 * 16 + 15,
             make_uint4(fast::spare_pair(x.x, w[1].x, w[2].x), fast::spare_pair(x.y, w[1].y, w[2].y),
                        fast::spare_pair(x.z, w[1].z, w[2].z), fast::spare_pair(x.w, w[1].w, w[2].w)),
             kSparePower);
    }
}

// An operand of fragment_order.h serves as B for two products, of its even and of its odd registers: these stand side by
// side, as products want them.
__device__ __forceinline__ uint4 even_and_odd(uint4 x) { return make_uint4(x.x, x.z, x.y, x.w); }
__device__ __forceinline__ void store_operand(uint32_t (&to)[4], uint4 x) {
    *reinterpret_cast<uint4*>(to) = even_and_odd(x);
}

// Keys as code * scale * 2^-kDown: the mins are left to a product of their own, which is exact.
template <class C, int BITS, int V>
__device__ __forceinline__ void unpack_keys(SharedStorage<C>& shared, const PackedPiece& packed, const uint8_t* stage,
                                            int b, int lane) {
    const uint8_t* const codes = stage + packed.key_codes[b];
    const uint8_t* const scales = stage + packed.key_params[b] + (lane & 3) * 16;
    uint4 scale[C::kPairs];
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) scale[i] = fast::load16(scales + i * 64);
    for_operands<C, BITS, V>(codes, packed.thousand, lane, [&](int unit, int step, uint4 x) {
        const uint4 s = scale[step / 2];
        const uint32_t low = step % 2 ? s.y : s.x, high = step % 2 ? s.w : s.z;  // of four channels each
        store_operand(shared.keys[2 * b + unit][step][lane],
                make_uint4(fast::mul_half2(x.x, low), fast::mul_half2(x.y, low), fast::mul_half2(x.z, high),
                           fast::mul_half2(x.w, high)));
    });
}

// Values as (min + code * scale) * 2^-kDown, rounded once.
template <class C, int BITS, int V>
__device__ __forceinline__ void unpack_values(SharedStorage<C>& shared, const PackedPiece& packed, const uint8_t* stage,
                                              int b, int lane) {
    const uint8_t* const codes = stage + packed.value_codes[b];
    const uint8_t* const params = codes + packed.value_params + (lane & 3) * 16;
    uint4 scale[C::kPairs], min[C::kPairs];
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const unsigned group = unsigned(i * packed.value_groups) / C::kPairs;
        scale[i] = fast::load16(params + group * 64);
        min[i] = fast::load16(params + (packed.value_groups + group) * 64);
    }
    for_operands<C, BITS, V>(codes, packed.thousand, lane, [&](int unit, int step, uint4 x) {
        const uint4 s = scale[step / 2], m = min[step / 2];
        const uint32_t s0 = unit ? s.y : s.x, s1 = unit ? s.w : s.z;  // of two tokens each
        const uint32_t m0 = fast::mul_half2(unit ? m.y : m.x, power_pair(-C::kDown));
        const uint32_t m1 = fast::mul_half2(unit ? m.w : m.z, power_pair(-C::kDown));
        store_operand(shared.values[2 * b + unit][step][lane],
                make_uint4(fma_half2(x.x, s0, m0), fma_half2(x.y, s0, m0), fma_half2(x.z, s1, m1),
                           fma_half2(x.w, s1, m1)));
    });
}

// Warps take the shares of codes in turn; `first` is whose turn it is.
template <class C, int BITS, bool KEYS>
__device__ __forceinline__ void unpack_codes(SharedStorage<C>& shared, const PackedPiece& packed, const uint8_t* stage,
                                             int first, int warp, int lane) {
    constexpr int kVectors = kShares<BITS, C::kDim>;
    static_assert(kVectors <= 8);
#pragma unroll 1
    for (int b = 0; b < kPieceBlocks; ++b) {
        const auto vector = [&](auto v) {
            constexpr int V = decltype(v)::value;
            if constexpr (V < kVectors) {
                if ((first + b * kVectors + V) % C::kWarps != warp) return;
                if constexpr (KEYS) {
                    unpack_keys<C, BITS, V>(shared, packed, stage, b, lane);
                } else {
                    unpack_values<C, BITS, V>(shared, packed, stage, b, lane);
                }
            }
        };
        vector(std::integral_constant<int, 0>{});
        vector(std::integral_constant<int, 1>{});
        vector(std::integral_constant<int, 2>{});
        vector(std::integral_constant<int, 3>{});
        vector(std::integral_constant<int, 4>{});
        vector(std::integral_constant<int, 5>{});
        vector(std::integral_constant<int, 6>{});
        vector(std::integral_constant<int, 7>{});
    }
}

template <class C, bool KEYS>
__device__ __forceinline__ void unpack_codes(SharedStorage<C>& shared, const PackedPiece& packed, const uint8_t* stage,
                                             int bits, int first, int warp, int lane) {
    switch (bits) {
        case 2: return unpack_codes<C, 2, KEYS>(shared, packed, stage, first, warp, lane);
        case 3: return unpack_codes<C, 3, KEYS>(shared, packed, stage, first, warp, lane);
        default: return unpack_codes<C, 4, KEYS>(shared, packed, stage, first, warp, lane);
    }
}

// ---- 16-bit rows ----

// 16 tokens of the stage as operands.
template <class C>
__device__ __forceinline__ void take_keys(SharedStorage<C>& shared, const uint8_t* stage, int unit, int lane) {
    const int row = lane >> 2, column = lane & 3;
    const int token = unit / 2 * kBlockTokens + 8 * (row / 2) + 2 * (unit % 2) + row % 2;
    const uint8_t* const from = stage + token * C::kRowBytes + column * 16;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 a = fast::load16(from + i * 64), b = fast::load16(from + i * 64 + 4 * C::kRowBytes);
        store_operand(shared.keys[unit][2 * i][lane], make_uint4(a.x, b.x, a.z, b.z));
        store_operand(shared.keys[unit][2 * i + 1][lane], make_uint4(a.y, b.y, a.w, b.w));
    }
}
// Tokens before `begin` and from `end` on become zeros: their weight is 0, but 0 times NaN is not.
template <class C>
__device__ __forceinline__ void take_values(SharedStorage<C>& shared, const uint8_t* stage, int unit, int begin,
                                            int end, int lane) {
    const int row = lane >> 2, column = lane & 3;
    const int token = unit / 2 * kBlockTokens + 8 * column + 2 * (unit % 2);
    const uint8_t* const from = stage + token * C::kRowBytes + row * 8;
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const auto load = [&](int more) {
            return token + more >= begin && token + more < end
                       ? *reinterpret_cast<const uint2*>(from + more * C::kRowBytes + i * 64)
                       : make_uint2(0, 0);
        };
        const uint2 v0 = load(0), v1 = load(1), v2 = load(4), v3 = load(5);
        store_operand(shared.values[unit][2 * i][lane],
                make_uint4(__byte_perm(v0.x, v1.x, 0x5410), __byte_perm(v0.x, v1.x, 0x7632),
                           __byte_perm(v2.x, v3.x, 0x5410), __byte_perm(v2.x, v3.x, 0x7632)));
        store_operand(shared.values[unit][2 * i + 1][lane],
                make_uint4(__byte_perm(v0.y, v1.y, 0x5410), __byte_perm(v0.y, v1.y, 0x7632),
                           __byte_perm(v2.y, v3.y, 0x5410), __byte_perm(v2.y, v3.y, 0x7632)));
    }
}

// ---- All ----

// Values fill a block one by one: parameters past the end of what is packed may be anything, NaN included. Makes them
// zero.
template <class C>
__device__ __forceinline__ void clear_unused_parameters(uint8_t* stage, const PackedPiece& packed, int count) {
    const int all = 2 * packed.value_groups * C::kTokens;
#pragma unroll 1
    for (int i = fresh_thread(); i < all; i += C::kThreads) {
        const int token = i % C::kTokens, b = token / kBlockTokens, param = i / C::kTokens;
        if (token < count) continue;
        uint16_t* const params = reinterpret_cast<uint16_t*>(stage + packed.value_codes[b] + packed.value_params);
        params[param * kBlockTokens + token % kBlockTokens] = 0;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // copies write there next
}

// By the whole block: the stage's piece as operands.
template <class C>
__device__ __forceinline__ void unpack(const Args& p, SharedStorage<C>& shared, int from, const Piece& piece) {
    const auto& stage = shared.stage[from];
    const int lane = fresh_lane(), warp = fresh_warp();
    constexpr int kMinVectors = kPieceBlocks * C::kDim / 8;
    const bool packed = packed_keys<C>(piece);
#pragma unroll 1
    for (int i = fresh_thread(); i < kMinVectors; i += C::kThreads) {
        const int b = i / (C::kDim / 8), at = i % (C::kDim / 8);
        const uint8_t* const mins = stage[0] + p.packed.key_params[b] + 2 * C::kDim + at * 16;
        *reinterpret_cast<uint4*>(&shared.mins[b][at * 8]) =
            packed ? even_and_odd(fast::load16(mins)) : make_uint4(0, 0, 0, 0);
    }
    if (rarely(!packed)) {
#pragma unroll 1
        for (int job = warp; job < 2 * C::kPieceUnits; job += C::kWarps) {
            if (job < C::kPieceUnits) {
                take_keys(shared, stage[0], job, lane);
            } else {
                take_values(shared, stage[1], job - C::kPieceUnits, 0, piece.count, lane);
            }
        }
        return;
    }
    if constexpr (C::kPublished) {
        if (rarely(piece.kind == Kind::page && piece.count < C::kTokens)) {
            clear_unused_parameters<C>(shared.stage[from][1], p.packed, piece.count);
            __syncthreads();
        }
    }
    unpack_codes<C, true>(shared, p.packed, stage[0], p.attend.layer.key.spec().bits, 0, warp, lane);
    if constexpr (C::kPublished) {
        if (rarely(piece.kind == Kind::middle)) {
            for (int unit = warp; unit < C::kPieceUnits; unit += C::kWarps) {
                take_values(shared, stage[1], unit, shared.walk.hidden(piece), piece.count, lane);
            }
            return;
        }
    }
    unpack_codes<C, false>(shared, p.packed, stage[1], p.attend.layer.value.spec().bits, C::kWarps / 2, warp, lane);
    if (C::kPublished || !rarely(piece.count < C::kTokens)) return;
    // Parameters past the sequence's end may be anything, NaN included.
    __syncthreads();
    constexpr int kBlockVectors = 2 * C::kSteps * 32;
#pragma unroll 1
    for (int i = piece.count / kBlockTokens * kBlockVectors + fresh_thread(); i < kPieceBlocks * kBlockVectors;
         i += C::kThreads) {
        reinterpret_cast<uint4*>(shared.values)[i] = make_uint4(0, 0, 0, 0);
    }
}

}  // namespace kivi::cuda::prompt
