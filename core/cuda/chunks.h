// How a sequence is cut for attention: a pure function of the position, so that a result does not depend on the
// batch, the capacity or how many blocks there are. Sixteen chunks of 512 positions, then sixteen of twice the
// size for every doubling of the length.
#pragma once
#include <cstdint>

#include "format/host_device.h"

namespace kivi::cuda {

constexpr int64_t kFirstChunk = 512;
constexpr int kChunksAnOctave = 16;

// First position of chunk i, counted from the end of the sink window; chunk 0 holds that window too.
KIVI_HOST_DEVICE inline int64_t chunk_begin(int i) {
    if (i < kChunksAnOctave) return kFirstChunk * i;
    const int octave = (i - kChunksAnOctave) / kChunksAnOctave, step = i % kChunksAnOctave;
    return (kFirstChunk << octave) * (kChunksAnOctave + step);
}

// The chunk that holds a position.
KIVI_HOST_DEVICE inline int chunk_of(int64_t position) {
    int octave = 0;
    while (position >= (kFirstChunk << octave) * 2 * kChunksAnOctave) ++octave;
    if (position < kFirstChunk * kChunksAnOctave) return static_cast<int>(position / kFirstChunk);
    return kChunksAnOctave * octave + static_cast<int>(position / (kFirstChunk << octave));
}

}  // namespace kivi::cuda
