// Attention of many query rows over what all rows of a tile see, packed pages and keys and values of the call, for
// compute capability 9.0: what FlashAttention-3 (arXiv 2407.08608) does, with keys and values that are dequantised on
// their way. The rest is prefill_kernel.cuh's, which goes on from what this kernel leaves.
//
// A block serves the same rows as a block there: two warpgroups have 64 each. Others bring pieces of 64 tokens, by bulk
// copies if they are packed, and make operands of them in turns; a ring of pieces lies between.
//
//   fetching      | piece 4 |   piece 5   | ...
//   dequantising  | piece 1 |   piece 2   | ...
//   multiplying   | keys 0, softmax, values 0 | keys 1, softmax, values 1 | ...      by each of the two, for itself
//
// The two take turns with the tensor cores: while one multiplies, the other has its softmax.
#pragma once
#include <type_traits>

#include "cuda/batch.cuh"
#include "cuda/prefill_partials.cuh"
#include "cuda/prefill_queries.cuh"
#include "cuda/prefill_tiles.cuh"
#include "cuda/wgmma.cuh"

namespace kivi::cuda::prompt {

constexpr int kTurns = 8;  // the first of two named barriers, see multiply_pieces

template <bool BF16, int DIM>
struct PagesConfig {
    static constexpr bool kBf16 = BF16;  // q, and keys and values of the call
    static constexpr int kDim = DIM, kSteps = DIM / 16, kPairs = kSteps / 2;
    static constexpr int kTokens = kPieceTokens;
    // Warpgroups that make operands, and that multiply. Their registers; together they have all.
    static constexpr int kProducers = 2, kConsumers = 2, kProducerRegisters = 80, kConsumerRegisters = 176;
    static constexpr int kRows = 64 * kConsumers, kThreads = 128 * (kProducers + kConsumers);
    static constexpr int kStages = 4, kBuffers = 3;  // pieces on their way from memory; pieces as operands
    static_assert(kStages % kProducers == 0);
    static constexpr int kDown = down_of(BF16);
    static_assert(DIM == 64 || DIM == 128);

    // Operands, see wgmma.cuh. Keys: tokens by channels, in panels of 64 channels; behind packed ones eight rows of the
    // key mins of the piece's blocks in turn, whose products with the queries are exact and so need not be added to
    // keys. Values: channels by tokens.
    static constexpr int kKeyRows = kTokens + 8, kKeyPanel = 128 * kKeyRows, kKeyBytes = kKeyPanel * DIM / 64;
    static constexpr int kValueBytes = 128 * DIM;
    // The most that a piece's keys or values take in memory: 4 bits, groups of 32.
    static constexpr int kPackedBytes = kPieceBlocks * (4 * DIM + kBlockTokens * DIM / 2);
    static constexpr int kQueryPitch = 2 * DIM + 16;  // bytes of a row
};

template <class C>
struct PagesStorage {
    alignas(1024) uint8_t keys[C::kBuffers][C::kKeyBytes];
    alignas(1024) uint8_t values[C::kBuffers][C::kValueBytes];
    alignas(128) uint8_t stage[C::kStages][2][C::kPackedBytes];
    alignas(128) uint8_t queries[C::kRows][C::kQueryPitch];
    uint64_t fetched[C::kStages], full[C::kBuffers], empty[C::kBuffers];
};

// ---- Dequantising ----

// The tokens of a vector's even and odd words, exchanged.
__device__ __forceinline__ uint4 exchanged(uint4 x) { return make_uint4(x.y, x.x, x.w, x.z); }
__device__ __forceinline__ uint2 exchanged(uint2 x) { return make_uint2(x.y, x.x); }

// By one warp: the keys of block b as code * scale * 2^-kDown, and its mins. A thread has eight channels of two tokens
// side by side. Threads of odd rows take the later token first: so threads that store at the same time have all banks.
template <class C, int BITS>
__device__ __forceinline__ void dequantize_keys(uint8_t* to, const PackedPiece& packed, const uint8_t* stage, int b,
                                                int lane) {
    constexpr int kVectors = fast::kCodeVectors<BITS, C::kDim>;
    const int row = lane >> 2, column = lane & 3;
    const uint8_t* const params = stage + packed.key_params[b];
    fast::CodeVector<BITS, C::kDim> w[kVectors], x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const auto loaded = fast::load_codes<BITS, C::kDim>(stage + packed.key_codes[b], v, lane);
        w[v] = row % 2 ? exchanged(loaded) : loaded;
        x[v] = fast::shift_high<BITS>(w[v]);
    }
    // Of the first token's vector. Whatever is added changes bits that are 0, or is permuted with the row.
    const int token = kBlockTokens * b + 8 * (row / 2) + 5 * (row % 2);
    const int at = 128 * token + 16 * (column ^ token % 8);
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const uint4 s = fast::load16(params + i * 64 + column * 16);
#pragma unroll
        for (int unit = 0; unit < 2; ++unit) {
            const uint4 even = numbers<C, BITS>(w, x, packed.thousand, unit * C::kSteps + 2 * i);
            const uint4 odd = numbers<C, BITS>(w, x, packed.thousand, unit * C::kSteps + 2 * i + 1);
            uint8_t* const panel = to + i / 2 * C::kKeyPanel;
            const int here = at ^ unit * (2 * 128 + 2 * 16) ^ i % 2 * (4 * 16);
            *reinterpret_cast<uint4*>(panel + here) =
                make_uint4(fast::mul_half2(even.x, s.x), fast::mul_half2(odd.x, s.y), fast::mul_half2(even.z, s.z),
                           fast::mul_half2(odd.z, s.w));
            *reinterpret_cast<uint4*>(panel + (here ^ (4 * 128 + 4 * 16))) =
                make_uint4(fast::mul_half2(even.y, s.x), fast::mul_half2(odd.y, s.y), fast::mul_half2(even.w, s.z),
                           fast::mul_half2(odd.w, s.w));
        }
    }
    constexpr int kVectorsOfRow = C::kDim / 8;
#pragma unroll
    for (int i = lane; i < 4 * kVectorsOfRow; i += 32) {
        const int vector = i % kVectorsOfRow, r = 2 * (i / kVectorsOfRow) + b;
        *reinterpret_cast<uint4*>(to + vector / 8 * C::kKeyPanel + 128 * (C::kTokens + r) + 16 * (vector % 8 ^ r)) =
            fast::load16(params + 2 * C::kDim + vector * 16);
    }
}

// By one warp: the values of block b as (min + code * scale) * 2^-kDown, rounded once. A thread has eight tokens of two
// channels side by side.
template <class C, int BITS>
__device__ __forceinline__ void dequantize_values(uint8_t* to, const PackedPiece& packed, const uint8_t* stage, int b,
                                                  int lane) {
    constexpr int kVectors = fast::kCodeVectors<BITS, C::kDim>;
    const int row = lane >> 2, column = lane & 3;
    const uint8_t* const codes = stage + packed.value_codes[b];
    const uint8_t* const params = codes + packed.value_params + column * 16;
    fast::CodeVector<BITS, C::kDim> w[kVectors], x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        w[v] = fast::load_codes<BITS, C::kDim>(codes, v, lane);
        x[v] = fast::shift_high<BITS>(w[v]);
    }
    const int at = 128 * (4 * row) + 16 * (column + 4 * b ^ 4 * (row % 2));
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
        const unsigned group = unsigned(i * packed.value_groups) / C::kPairs;
        const uint4 s = fast::load16(params + group * 64);
        const uint4 mins = fast::load16(params + (packed.value_groups + group) * 64);
        constexpr uint32_t kBy = power_pair(-C::kDown);
        const uint4 m = make_uint4(fast::mul_half2(mins.x, kBy), fast::mul_half2(mins.y, kBy),
                                   fast::mul_half2(mins.z, kBy), fast::mul_half2(mins.w, kBy));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint4 first = numbers<C, BITS>(w, x, packed.thousand, 2 * i + k);
            const uint4 second = numbers<C, BITS>(w, x, packed.thousand, C::kSteps + 2 * i + k);
            uint8_t* const rows = to + 32 * 128 * i;
            const int here = at ^ k * (2 * 128 + 2 * 16);
            *reinterpret_cast<uint4*>(rows + here) =
                make_uint4(fma_half2(first.x, s.x, m.x), fma_half2(second.x, s.y, m.y), fma_half2(first.z, s.z, m.z),
                           fma_half2(second.z, s.w, m.w));
            *reinterpret_cast<uint4*>(rows + (here ^ (128 + 16))) =
                make_uint4(fma_half2(first.y, s.x, m.x), fma_half2(second.y, s.y, m.y), fma_half2(first.w, s.z, m.z),
                           fma_half2(second.w, s.w, m.w));
        }
    }
}

// visit(number of bits) for what the layer has.
template <class C, class Visit>
__device__ __forceinline__ void with_bits(int bits, const Visit& visit) {
    if (bits == 2) visit(std::integral_constant<int, 2>{});
    if (bits == 3) visit(std::integral_constant<int, 3>{});
    if (bits == 4) visit(std::integral_constant<int, 4>{});
}

// ---- Keys and values of the call ----

// By one warp: block b of the piece that begins at token `first`, as it is.
template <class C>
__device__ __forceinline__ void take_fresh_keys(uint8_t* to, const uint16_t* from, int64_t stride, int b, int lane) {
    constexpr int kVectors = C::kDim / 8;  // of a row
    const int vector = lane % kVectors;
    uint8_t* const panel = to + vector / 8 * C::kKeyPanel;
#pragma unroll
    for (int t = 0; t < kBlockTokens; t += 32 / kVectors) {
        const int token = kBlockTokens * b + t + lane / kVectors;
        fast::copy16(fast::shared_address(panel + 128 * token + 16 * (vector % 8 ^ token % 8)),
                     from + token * stride + vector * 8);
    }
    fast::wait_for_copies();
}
// A thread has eight tokens of two channels side by side.
template <class C>
__device__ __forceinline__ void take_fresh_values(uint8_t* to, const uint16_t* from, int64_t stride, int b, int lane) {
#pragma unroll
    for (int pair = 0; pair < C::kDim / 2; pair += 32) {
#pragma unroll 2
        for (int eight = 4 * b; eight < 4 * b + 4; ++eight) {
            uint32_t x[8];
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                x[t] = __ldg(reinterpret_cast<const uint32_t*>(from + (8 * eight + t) * stride + 2 * (pair + lane)));
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int channel = 2 * (pair + lane) + e, halves = e ? 0x7632 : 0x5410;
                *reinterpret_cast<uint4*>(to + 128 * channel + 16 * (eight ^ channel % 8)) =
                    make_uint4(__byte_perm(x[0], x[1], halves), __byte_perm(x[2], x[3], halves),
                               __byte_perm(x[4], x[5], halves), __byte_perm(x[6], x[7], halves));
            }
        }
    }
}

// ---- Producing ----

// The pieces of a block: `packed` ones from number `first_packed` of the sequence on, then `fresh` ones from number
// `first_fresh` of the call on.
struct Pieces {
    int first_packed, packed, first_fresh, fresh;
    // Part `part` of what has been found to do.
    __device__ Pieces(Done done, int part, int parts) {
        const int packed_all = done.packed / kPieceTokens, all = packed_all + done.fresh / kPieceTokens;
        const int begin = all * part / parts, end = all * (part + 1) / parts;
        first_packed = min(begin, packed_all);
        packed = min(end, packed_all) - first_packed;
        first_fresh = max(begin - packed_all, 0);
        fresh = max(end - packed_all, 0) - first_fresh;
    }
    __device__ int count() const { return packed + fresh; }
};

// By the first warpgroups, which take pieces in turn.
template <class C>
__device__ __forceinline__ void produce(const Args& p, PagesStorage<C>& shared, const RowArg& row, int head,
                                        Pieces pieces) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool fetches = threadIdx.x % 128 == 0;
    const TensorStore& key = p.attend.layer.key;
    const TensorStore& value = p.attend.layer.value;
    constexpr int kPiecesOfPage = kPageTokens / C::kTokens;
    const auto block_of = [&](int i) {
        return i < pieces.packed ? p.attend.layer.block(row.sequence, (pieces.first_packed + i) / kPiecesOfPage) : 0;
    };
    const auto fetch = [&](int i, int block) {
        const int stage = i % C::kStages, half = (pieces.first_packed + i) % kPiecesOfPage;
        const uint32_t bar = fast::shared_address(&shared.fetched[stage]);
        const uint32_t keys = fast::shared_address(shared.stage[stage][0]);
        const uint8_t* const from = key.page(block, head);
        fast::barrier_expect(bar, p.packed.keys_bytes + p.packed.codes_bytes + p.packed.values_bytes);
        fast::bulk_copy(keys, from + p.packed.keys_from[half], p.packed.keys_bytes, bar);
        if (p.packed.codes_bytes > 0) {
            fast::bulk_copy(keys + p.packed.keys_bytes, from + p.packed.codes_from[half], p.packed.codes_bytes, bar);
        }
        fast::bulk_copy(fast::shared_address(shared.stage[stage][1]),
                        value.page(block, head) + p.packed.values_from[half], p.packed.values_bytes, bar);
    };
    int next_block = 0;
    if (fetches) {
        for (int i = group; i < C::kStages && i < pieces.packed; i += C::kProducers) fetch(i, block_of(i));
        next_block = block_of(group + C::kStages);
    }
    const View& view = warp < kPieceBlocks ? p.attend.k : p.attend.v;
    const auto fresh = [&](int i) {
        const int first = (pieces.first_fresh + i - pieces.packed) * C::kTokens;
        return static_cast<const uint16_t*>(view.data) + view.origin(row.index, row.offset) +
               first * view.token_stride + head * view.head_stride;
    };
#pragma unroll 1
    for (int i = group; i < pieces.count(); i += C::kProducers) {
        const int stage = i % C::kStages, buffer = i % C::kBuffers, round = i / C::kBuffers, b = warp % kPieceBlocks;
        const bool packed = i < pieces.packed;
        if (packed) fast::barrier_wait(fast::shared_address(&shared.fetched[stage]), i / C::kStages % 2);
        if (round > 0) fast::barrier_wait(fast::shared_address(&shared.empty[buffer]), (round - 1) % 2);
        if (warp < kPieceBlocks) {
            uint8_t* const to = shared.keys[buffer];
            if (packed) {
                with_bits<C>(key.spec().bits, [&](auto bits) {
                    dequantize_keys<C, decltype(bits)::value>(to, p.packed, shared.stage[stage][0], b, lane);
                });
            } else {
                take_fresh_keys<C>(to, fresh(i), view.token_stride, b, fresh_lane());
            }
        } else {
            uint8_t* const to = shared.values[buffer];
            if (packed) {
                with_bits<C>(value.spec().bits, [&](auto bits) {
                    dequantize_values<C, decltype(bits)::value>(to, p.packed, shared.stage[stage][1], b, lane);
                });
            } else {
                take_fresh_values<C>(to, fresh(i), view.token_stride, b, fresh_lane());
            }
        }
        hopper::hand_to_products();
        __syncwarp();
        if (lane == 0) hopper::barrier_arrive(fast::shared_address(&shared.full[buffer]));
        hopper::meet(1 + group, 128);  // the warpgroup has read the stage
        if (fetches && i + C::kStages < pieces.packed) {
            fetch(i + C::kStages, next_block);
            next_block = block_of(i + C::kStages + C::kProducers);
        }
    }
}

// ---- Multiplying ----

// What a thread has of its rows lane / 4 + 8 h.
template <class C>
struct PagesState {
    float out[C::kDim / 2];   // sum of p * values * 2^-kDown, see wgmma.cuh
    float reference[2];       // exponents that p is relative to; every p is <= 1
    float sum[2];             // of the p of the thread's columns
};

// Makes sure that all scores are <= 0, see update_references in prefill_products.cuh; here all rows see all tokens.
template <class C, int SCORES>
__device__ __forceinline__ void move_references(PagesState<C>& s, float (&score)[SCORES], bool first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float largest = -infinity();
#pragma unroll
        for (int j = 0; j < C::kTokens / 8; ++j) {
            largest = fmaxf(largest, fmaxf(score[4 * j + 2 * h], score[4 * j + 2 * h + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(fast::kAll, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(fast::kAll, largest, 2));
        const bool moves = first ? largest > -infinity() : largest > 0.0f;
        const float up = moves ? largest + kHeadroom : 0.0f;
        s.reference[h] += up;
        const float down = fast::exp2_fast(fminf(-up, 0.0f));  // (at first all sums are 0)
        s.sum[h] *= down;
#pragma unroll
        for (int j = 0; j < C::kTokens / 8; ++j) score[4 * j + 2 * h] -= up, score[4 * j + 2 * h + 1] -= up;
#pragma unroll
        for (int j = 0; j < C::kDim / 8; ++j) s.out[4 * j + 2 * h] *= down, s.out[4 * j + 2 * h + 1] *= down;
    }
}

// What has been summed, from the basis of storage to that of the caller and back.
template <class C>
__device__ __forceinline__ void rotate(PagesState<C>& s, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        // Of the thread's channels: 8 (c / 2) + 2 (lane % 4) + c % 2.
        const auto at = [&](int c) -> float& { return s.out[c / 2 * 4 + 2 * h + c % 2]; };
#pragma unroll
        for (int c = 0; c < C::kDim / 4; ++c) at(c) = fast::across(fast::across(at(c), 1, lane), 2, lane);
#pragma unroll
        for (int step = 1; step < C::kDim / 4; step *= 2) {
#pragma unroll
            for (int c = 0; c < C::kDim / 4; ++c) {
                if ((c & step) == 0) fast::butterfly(at(c), at(c + step));
            }
        }
#pragma unroll
        for (int c = 0; c < C::kDim / 4; ++c) at(c) *= fast::hadamard_norm<C>();
    }
}

// Pieces begin .. end - 1 of the block, at least one. FRESH: they are keys and values of the call.
template <class C, bool FRESH>
__device__ __forceinline__ void multiply_pieces(PagesStorage<C>& shared, PagesState<C>& s, uint32_t (&q)[C::kSteps][4],
                                                const float (&plain)[2], int begin, int end) {
    constexpr bool kB = FRESH && C::kBf16;  // operands are bf16
    constexpr int kScores = FRESH ? C::kTokens / 2 : C::kKeyRows / 2;
    const int lane = threadIdx.x % 32, consumer = threadIdx.x / 128 - C::kProducers;
    const auto wait_for = [&](int i) {
        fast::barrier_wait(fast::shared_address(&shared.full[i % C::kBuffers]), i / C::kBuffers % 2);
    };
    float score[kScores];
    uint32_t weights[C::kTokens / 16][4];
    const auto multiply_keys = [&](int i) {
        const uint32_t keys = fast::shared_address(shared.keys[i % C::kBuffers]);
        if constexpr (FRESH) {
            hopper::multiply<kB>(score, q[0], hopper::panel(keys));
        } else {
            hopper::multiply(score, q[0], hopper::panel(keys));
        }
#pragma unroll
        for (int k = 1; k < C::kSteps; ++k) {
            const uint64_t panel = hopper::panel(keys + k / 4 * C::kKeyPanel + k % 4 * 32);
            if constexpr (FRESH) {
                hopper::multiply_add<kB>(score, q[k], panel);
            } else {
                hopper::multiply_add(score, q[k], panel);
            }
        }
    };
    const auto multiply_values = [&](int i) {
        const uint32_t values = fast::shared_address(shared.values[i % C::kBuffers]);
#pragma unroll
        for (int k = 0; k < C::kTokens / 16; ++k) {
            hopper::multiply_add<kB>(s.out, weights[k], hopper::panel(values + k * 32));
        }
    };
    const int turn = kTurns + consumer, others_turn = kTurns + 1 - consumer;
    if (consumer == 1) hopper::arrive(others_turn, 256);  // the first has the first turn
    wait_for(begin);
    hopper::fence();
    multiply_keys(begin);
    hopper::commit();
    hopper::wait();
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
        // Scores in exponents of 2, relative to the references. The last columns are of the mins. Values of the call are
        // not times 2^-kDown: their p are.
        uint32_t negative = i > 0 ? fast::kAll : 0u;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float f = FRESH ? plain[h] : plain[h] * (1 << C::kDown);
#pragma unroll
            for (int j = 0; j < C::kTokens / 8; ++j) {
                float bias = -s.reference[h];
                if constexpr (FRESH) {
                    bias -= C::kDown;
                } else {
                    bias = fmaf(score[C::kTokens / 2 + 2 * h + j / 4], plain[h], bias);
                }
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = score[4 * j + 2 * h + e];
                    if constexpr (FRESH) x = fmaf(x, 0.0f, x);  // an infinite key must not hide behind exp(-inf)
                    x = fmaf(x, f, bias);
                    negative &= __float_as_uint(x);
                }
            }
        }
        if (rarely(__any_sync(fast::kAll, static_cast<int>(negative) >= 0))) move_references(s, score, i == 0);
        // p, and its sum: of the rounded p, where they are coarse.
        constexpr float kUp = FRESH ? 1 << C::kDown : 1;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < C::kTokens / 8; ++j) {
                const float* const x = score + 4 * j + 2 * h;
                float2 both = make_float2(fast::exp2_fast(x[0]), fast::exp2_fast(x[1]));
                const uint32_t pair = fast::to_pair<kB>(both.x, both.y);
                weights[j / 2][2 * (j % 2) + h] = pair;
                if constexpr (kB) both = fast::from_pair<true>(pair);
                sum += both.x + both.y;
            }
            s.sum[h] = fmaf(sum, kUp, s.sum[h]);
        }
        // The next keys behind these values, so that the tensor cores go on. (At last the same keys again, for nothing:
        // a branch would keep products apart.)
        const int next = min(i + 1, end - 1);
        wait_for(next);
        hopper::meet(turn, 256);
        hopper::fence();
        multiply_values(i);
        multiply_keys(next);
        hopper::commit();
        if (consumer == 0 || i + 1 < end) hopper::arrive(others_turn, 256);
        hopper::wait();
        if (lane == 0) hopper::barrier_arrive(fast::shared_address(&shared.empty[i % C::kBuffers]));
    }
}

// The warp's rows of q as operands, by way of shared memory; returns their units.
template <class C, bool BF16>
__device__ __forceinline__ float2 load_query_operands(const Args& p, PagesStorage<C>& shared, const RowArg& row,
                                                      int head, int first_row, int rows, bool rotated,
                                                      uint32_t (&q)[C::kSteps][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4 * C::kProducers;
    uint8_t* const own = shared.queries[16 * warp];
    float unit[2];
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = lane / 4 + 8 * half;
        const QueryRow<C> query(p.attend, row, head, first_row + 16 * warp + r, rows, rotated, lane);
        unit[half] = query.unit;
#pragma unroll
        for (int i = 0; i < C::kPairs; ++i) {
            *reinterpret_cast<uint4*>(own + r * C::kQueryPitch + i * 64 + lane % 4 * 16) =
                make_uint4(query.pair[i][0], query.pair[i][1], query.pair[i][2], query.pair[i][3]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < C::kSteps; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            uint32_t pair = *reinterpret_cast<const uint32_t*>(own + (lane / 4 + e % 2 * 8) * C::kQueryPitch + k * 32 +
                                                               e / 2 * 16 + lane % 4 * 4);
            if constexpr (BF16) {  // as they were: exact
                const float2 both = fast::from_pair(pair);
                pair = fast::to_pair<true>(both.x, both.y);
            }
            q[k][e] = pair;
        }
    }
    return make_float2(unit[0], unit[1]);
}

// By each of the other warpgroups, whose tile begins at first_row. Leaves sums in the basis of storage.
template <class C>
__device__ __forceinline__ void consume(const Args& p, PagesStorage<C>& shared, const RowArg& row, int head,
                                        int first_row, int rows, const Pieces& pieces, PagesState<C>& s) {
    const int lane = threadIdx.x % 32;
    const TensorStore& key = p.attend.layer.key;
    const TensorStore& value = p.attend.layer.value;
#pragma unroll
    for (float& x : s.out) x = 0.0f;
    s.reference[0] = s.reference[1] = s.sum[0] = s.sum[1] = 0.0f;
    const float scale = p.attend.scale * kLog2E;
    uint32_t q[C::kSteps][4];
    if (pieces.packed > 0) {
        const float2 unit = load_query_operands<C, false>(p, shared, row, head, first_row, rows, key.rotated(), q);
        multiply_pieces<C, false>(shared, s, q, {scale * unit.x, scale * unit.y}, 0, pieces.packed);
    }
    if (pieces.fresh > 0) {
        if (value.rotated()) rotate(s, lane);
        const float2 unit = load_query_operands<C, C::kBf16>(p, shared, row, head, first_row, rows, false, q);
        multiply_pieces<C, true>(shared, s, q, {scale * unit.x, scale * unit.y}, pieces.packed, pieces.count());
        if (value.rotated()) rotate(s, lane);
    }
}

// Grid: as that of prefill_kernel, with page_parts.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) prefill_pages_kernel(const __grid_constant__ Args p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t pages_memory[];
    PagesStorage<C>& shared = *reinterpret_cast<PagesStorage<C>*>(pages_memory);
    const Layer& layer = p.attend.layer;
    const int head = blockIdx.y, tile = p.tiles - 1 - blockIdx.x / p.page_parts, part = blockIdx.x % p.page_parts;
    const int first_row = (p.first_tile + tile) * C::kRows;
    const RowArg row = row_of(p.attend.batch, blockIdx.z);
    const int rows = row.count * ratio(layer);
    if (rows <= first_row) return;
    const Pieces pieces(done_before(p, row, layer.spans[row.sequence], first_row), part, p.page_parts);
    if (threadIdx.x == 0) {
        for (uint64_t& bar : shared.fetched) hopper::barrier_init(fast::shared_address(&bar), 1);
        for (uint64_t& bar : shared.full) hopper::barrier_init(fast::shared_address(&bar), 4);
        for (uint64_t& bar : shared.empty) hopper::barrier_init(fast::shared_address(&bar), 4 * C::kConsumers);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128 * C::kProducers) {
        hopper::give_registers<C::kProducerRegisters>();
        produce(p, shared, row, head, pieces);
    } else {
        hopper::take_registers<C::kConsumerRegisters>();
        const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16 - 64 * C::kProducers;  // rows begin in the tile
        PagesState<C> s;
        consume(p, shared, row, head, first_row, rows, pieces, s);
        const PartialsOf<C> partials(p, p.page_workspace, p.page_parts, blockIdx.z, head, tile, part);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = own + lane / 4 + 8 * h;
            float sum = s.sum[h];
            sum += __shfl_xor_sync(fast::kAll, sum, 1);
            sum += __shfl_xor_sync(fast::kAll, sum, 2);
            if (lane % 4 == 0) partials.sums[r] = pieces.count() > 0 ? Sum{s.reference[h], sum} : no_sum();
            float* const to = partials.rows + r * C::kDim + lane % 4 * 2;
            constexpr float kUp = 1 << C::kDown;
#pragma unroll
            for (int j = 0; j < C::kDim / 8; ++j) {
                *reinterpret_cast<float2*>(to + 8 * j) =
                    make_float2(s.out[4 * j + 2 * h] * kUp, s.out[4 * j + 2 * h + 1] * kUp);
            }
        }
    }
#endif
}

}  // namespace kivi::cuda::prompt
