// The sequence blob (FORMAT.md, "Sequence blob"): header, layer records, payloads, CRC. Pure functions of
// bytes; the cache moves payloads between blob and backend.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/half.h"
#include "format/layout.h"
#include "format/model.h"
#include "format/policy.h"

namespace kivi {

// Rounding of one layer's keys, as the blob records it.
struct EncoderMark {
    uint32_t query_aware = 0;  // 1: packed with committed moments
    uint32_t table_crc = 0;
};

// One run of a layer's payload: window rows of one head, or the packed tokens of one page of one head.
struct BlobPiece {
    enum Kind { sink, page, tail };
    Part part;
    int head;
    Kind kind;
    int64_t begin, end;  // positions
    int64_t page_index;  // of the sequence; pages only
    int64_t bytes;
};

// Calls visit(piece) for every non-empty piece of a layer's payload, in the order of the blob.
template <class Visit>
void for_each_piece(const Model& model, int32_t layer, const Span& span, Visit&& visit) {
    const kivi_layer& shape = model.layers[layer];
    const int64_t sink = model.windows.sink;
    for (Part part : {Part::key, Part::value}) {
        const int dim = dim_of(shape, part);
        const int64_t row_bytes = dim * static_cast<int64_t>(dtype_bytes(model.window_dtype));
        const int64_t border = tail_begin(model.windows, span, part);
        for (int head = 0; head < shape.kv_heads; head++) {
            const auto rows = [&](BlobPiece::Kind kind, int64_t begin, int64_t end) {
                if (begin < end) visit(BlobPiece{part, head, kind, begin, end, 0, (end - begin) * row_bytes});
            };
            rows(BlobPiece::sink, 0, std::min(span.length, sink));
            for (int64_t begin = sink, page = 0; begin < border; begin += kPageTokens, page++) {
                const int64_t end = std::min(begin + kPageTokens, border);
                const int64_t bytes =
                    packed_bytes(spec_of(shape, part), dim, model.window_dtype, end - begin);
                visit(BlobPiece{part, head, BlobPiece::page, begin, end, page, bytes});
            }
            rows(BlobPiece::tail, border, span.length);
        }
    }
}

size_t blob_bytes(const Model& model, const std::vector<Span>& spans);
// Where the payload of each layer begins; one more entry for where the CRC stands.
std::vector<size_t> blob_offsets(const Model& model, const std::vector<Span>& spans);
// Everything but the payloads and the CRC.
void write_blob_head(const Model& model, const std::vector<Span>& spans,
                     const std::vector<EncoderMark>& marks, uint8_t* blob);

// Checks a blob against the model as FORMAT.md lists it, capacity aside, and returns its spans. Throws
// CORRUPT or MISMATCH.
std::vector<Span> read_blob(const Model& model, const std::vector<EncoderMark>& marks, const uint8_t* blob,
                            size_t bytes);

}  // namespace kivi
