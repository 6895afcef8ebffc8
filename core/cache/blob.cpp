// Writing and checking sequence blobs. Offsets in comments are those of FORMAT.md.
#include "cache/blob.h"

#include <cstring>

#include "cache/blob_frame.h"
#include "cache/bytes.h"
#include "cache/refuse.h"

namespace kivi {
namespace {

constexpr BlobKind kKind{"the blob", {'K', 'I', 'V', 'I', 'S', 'E', 'Q', 0}, 1, 96};
constexpr size_t kRecordBytes = 128;

template <class... Parts>
[[noreturn]] void corrupt(const Parts&... parts) {
    refuse_corrupt(kKind, parts...);
}

// One number of the blob beside that of the cache.
template <class T>
void match(const char* what, T blob, T cache) {
    if (blob != cache)
        refuse(KIVI_ERROR_MISMATCH, "the blob's ", what, " is ", blob, "; the cache has ", cache);
}

template <class T>
void match_layer(int32_t layer, const char* what, T blob, T cache) {
    if (blob != cache) {
        refuse(KIVI_ERROR_MISMATCH, "the blob's ", what, " of layer ", layer, " is ", blob,
               "; the cache has ", cache);
    }
}

void put_spec(ByteWriter& to, const kivi_spec& spec) {
    for (int32_t field : {spec.bits, spec.axis, spec.group, spec.range}) to.put(field);
    to.put(spec.range_ratio);
    for (int32_t field : {spec.param_dtype, spec.transform, spec.rounding}) to.put(field);
}

void match_spec(int32_t layer, ByteReader& from, const kivi_spec& spec, const char* tensor) {
    const auto field = [&](const char* name, auto cache) {
        const auto blob = from.get<decltype(cache)>();
        if (std::memcmp(&blob, &cache, sizeof cache) != 0) {  // bits: a ratio of -0 is not 0
            refuse(KIVI_ERROR_MISMATCH, "the blob's ", name, " of ", tensor, " of layer ", layer, " is ",
                   blob, "; the cache has ", cache);
        }
    };
    field("bits", spec.bits);
    field("axis", spec.axis);
    field("group", spec.group);
    field("range", spec.range);
    field("range_ratio", spec.range_ratio);
    field("param_dtype", spec.param_dtype);
    field("transform", spec.transform);
    field("rounding", spec.rounding);
}

// Numbers of a damaged group are the one NaN, both of them; all others are finite, without a sign where it
// has no meaning.
bool sound_f32(uint32_t scale, uint32_t min) {
    constexpr uint32_t kInfinity = 0x7F800000, kSign = 0x80000000;
    if (scale == kNanF32 || min == kNanF32) return scale == min;
    return scale < kInfinity && (min & ~kSign) < kInfinity && min != kSign;
}
bool sound_f16(uint16_t scale, uint16_t min) {
    constexpr uint16_t kInfinity = 0x7C00, kSign = 0x8000;
    if (scale == kNanF16 || min == kNanF16) return scale == min;
    return scale < kInfinity && (min & ~kSign) < kInfinity && min != kSign;
}

// Parameters of one page: scales, then mins, at the end of its bytes.
void check_params(const kivi_spec& spec, const GroupShape& shape, const BlobPiece& piece,
                  const uint8_t* bytes) {
    if (spec.bits == 16) return;
    const int64_t groups = (piece.end - piece.begin) / shape.tokens * shape.blocks_a_row;
    const int64_t size = static_cast<int64_t>(dtype_bytes(spec.param_dtype));
    const uint8_t* const scales = bytes + piece.bytes - 2 * groups * size;
    for (int64_t group = 0; group < groups; group++) {
        ByteReader scale(scales + group * size), min(scales + (groups + group) * size);
        const bool sound = size == 4 ? sound_f32(scale.get<uint32_t>(), min.get<uint32_t>())
                                     : sound_f16(scale.get<uint16_t>(), min.get<uint16_t>());
        if (!sound)
            corrupt("scale or min of a group of positions ", piece.begin, " to ", piece.end - 1,
                    " is not a finite number");
    }
}

// A border that appends and flushes can reach.
void check_border(const Model& model, int32_t layer, const Span& span, Part part) {
    const Windows& windows = model.windows;
    const int64_t border = span.border(part);
    if (border == 0) return;
    const kivi_spec& spec = spec_of(model.layers[layer], part);
    int64_t step = windows.unit;
    if (windows.schedule == KIVI_SCHEDULE_PUBLISHED) {
        step = spec.bits < 16 && spec.axis == KIVI_AXIS_CHANNEL ? spec.group : 1;
    }
    if (border <= windows.sink || border > span.length || (border - windows.sink) % step != 0) {
        corrupt("a border of layer ", layer, " is ", border, " at length ", span.length);
    }
}

int64_t payload_bytes(const Model& model, int32_t layer, const Span& span) {
    int64_t bytes = 0;
    for_each_piece(model, layer, span, [&](const BlobPiece& piece) { bytes += piece.bytes; });
    return bytes;
}

}  // namespace

std::vector<size_t> blob_offsets(const Model& model, const std::vector<Span>& spans) {
    const auto layers = static_cast<int32_t>(model.layers.size());
    std::vector<size_t> offsets;
    offsets.reserve(layers + 1);
    size_t at = kKind.header_bytes + layers * kRecordBytes;
    for (int32_t layer = 0; layer < layers; layer++) {
        offsets.push_back(at);
        at += payload_bytes(model, layer, spans[layer]);
    }
    offsets.push_back(at);
    return offsets;
}

size_t blob_bytes(const Model& model, const std::vector<Span>& spans) {
    return blob_offsets(model, spans).back() + kBlobCrcBytes;
}

void write_blob_head(const Model& model, const std::vector<Span>& spans,
                     const std::vector<EncoderMark>& marks, uint8_t* blob) {
    const std::vector<size_t> offsets = blob_offsets(model, spans);
    const auto layers = static_cast<int32_t>(model.layers.size());
    int64_t length = 0;
    for (const Span& span : spans) length = std::max(length, span.length);

    ByteWriter to = begin_blob(kKind, blob, offsets.back() + kBlobCrcBytes);
    to.put(layout_id(model, 0));
    to.put(model.window_dtype);
    to.put(layers);
    to.put(model.windows.sink);
    to.put(model.windows.recent);
    to.put(model.windows.flush);
    to.put(model.windows.unit);
    to.put(model.windows.schedule);
    to.put(uint32_t{0});
    to.put(length);
    to.put(uint64_t{0});
    for (int32_t layer = 0; layer < layers; layer++) {
        if (!model.has(layer)) {
            to.put_zeros(kRecordBytes);
            continue;
        }
        const kivi_layer& shape = model.layers[layer];
        for (int32_t field : {shape.kv_heads, shape.q_heads, shape.key_dim, shape.value_dim}) to.put(field);
        put_spec(to, shape.k);
        put_spec(to, shape.v);
        to.put(spans[layer].key_border);
        to.put(spans[layer].value_border);
        to.put(marks[layer].query_aware);
        to.put(marks[layer].table_crc);
        to.put(static_cast<uint64_t>(offsets[layer]));
        to.put(static_cast<uint64_t>(offsets[layer + 1] - offsets[layer]));
        to.put(uint64_t{0});
    }
}

std::vector<Span> read_blob(const Model& model, const std::vector<EncoderMark>& marks, const uint8_t* blob,
                            size_t bytes) {
    ByteReader from = open_blob(kKind, blob, bytes);
    const auto id = from.get<uint64_t>();
    const auto layers = static_cast<int32_t>(model.layers.size());
    match("window_dtype", from.get<int32_t>(), model.window_dtype);
    match("layer_count", from.get<int32_t>(), layers);
    match("sink", from.get<int64_t>(), model.windows.sink);
    match("recent", from.get<int64_t>(), model.windows.recent);
    match("flush", from.get<int64_t>(), model.windows.flush);
    match("unit", from.get<int64_t>(), model.windows.unit);
    match("schedule", from.get<int32_t>(), model.windows.schedule);
    bool reserved = from.get<uint32_t>() != 0;
    const auto length = from.get<int64_t>();
    reserved = from.get<uint64_t>() != 0 || reserved;
    if (bytes < kKind.header_bytes + layers * kRecordBytes + kBlobCrcBytes)
        corrupt("its layer records are cut");

    std::vector<Span> spans(layers);
    std::vector<size_t> offsets(layers), sizes(layers);
    for (int32_t layer = 0; layer < layers; layer++) {
        const kivi_layer& shape = model.layers[layer];
        match_layer(layer, "kv_heads", from.get<int32_t>(), shape.kv_heads);
        match_layer(layer, "q_heads", from.get<int32_t>(), shape.q_heads);
        match_layer(layer, "key_dim", from.get<int32_t>(), shape.key_dim);
        match_layer(layer, "value_dim", from.get<int32_t>(), shape.value_dim);
        match_spec(layer, from, shape.k, "k");
        match_spec(layer, from, shape.v, "v");
        spans[layer].key_border = from.get<int64_t>();
        spans[layer].value_border = from.get<int64_t>();
        if (model.has(layer)) spans[layer].length = length;
        match_layer(layer, "use of query-aware rounding", from.get<uint32_t>(), marks[layer].query_aware);
        match_layer(layer, "checksum of encoder tables", from.get<uint32_t>(), marks[layer].table_crc);
        offsets[layer] = from.get<uint64_t>();
        sizes[layer] = from.get<uint64_t>();
        reserved = from.get<uint64_t>() != 0 || reserved;
    }
    match("layout id", id, layout_id(model, 0));

    // A blob that is sound and ours, unless somebody computed the CRC of nonsense.
    if (reserved) corrupt("reserved fields are not zero");
    if (length < 0 || static_cast<uint64_t>(length) > bytes) corrupt("its length is ", length);
    for (int32_t layer = 0; layer < layers; layer++) {
        if (!model.has(layer)) {
            if (spans[layer].key_border != 0 || spans[layer].value_border != 0 || offsets[layer] != 0 ||
                sizes[layer] != 0) {
                corrupt("layer ", layer, " is absent, yet has contents");
            }
            continue;
        }
        const Span& span = spans[layer];
        check_border(model, layer, span, Part::key);
        check_border(model, layer, span, Part::value);
        const Span settled = after_append(model.windows, span, length);
        // Appends and flushes move both together, or keys further under the published schedule.
        const bool together = model.windows.schedule == KIVI_SCHEDULE_PUBLISHED ? span.value_border <= span.key_border
                                                                                : span.value_border == span.key_border;
        if (!together || settled.key_border != span.key_border || settled.value_border != span.value_border) {
            corrupt("the borders of layer ", layer, " are not those of length ", length);
        }
    }
    const std::vector<size_t> expected = blob_offsets(model, spans);
    if (expected.back() + kBlobCrcBytes != bytes) corrupt("its payload has the wrong size");
    for (int32_t layer = 0; layer < layers; layer++) {
        if (!model.has(layer)) continue;
        if (offsets[layer] != expected[layer] || sizes[layer] != expected[layer + 1] - expected[layer]) {
            corrupt("the payload of layer ", layer, " is not where it belongs");
        }
        const uint8_t* at = blob + expected[layer];
        for_each_piece(model, layer, spans[layer], [&](const BlobPiece& piece) {
            const kivi_layer& shape = model.layers[layer];
            if (piece.kind == BlobPiece::page) {
                const kivi_spec& spec = spec_of(shape, piece.part);
                check_params(spec, group_shape(spec, dim_of(shape, piece.part)), piece, at);
            }
            at += piece.bytes;
        });
    }
    return spans;
}

}  // namespace kivi
