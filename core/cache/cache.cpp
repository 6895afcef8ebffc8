// What each call checks, and what it then does.
#include "cache/cache.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "cache/blob_frame.h"
#include "cache/moments.h"
#include "cache/refuse.h"
#include "format/half.h"
#include "format/layout.h"

namespace kivi {
namespace {

constexpr size_t kWorkspaceAlignment = 64;

size_t aligned(size_t bytes) {
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}
uint8_t* aligned(void* memory) {
    return reinterpret_cast<uint8_t*>(aligned(reinterpret_cast<uintptr_t>(memory)));
}

[[noreturn]] void refuse_double(int32_t row, int32_t sequence) {
    refuse_argument("batch.sequences[", row, "] is ", sequence, ", which stands in an earlier row too");
}

DeviceRows device_rows(const Batch& batch) {
    return {batch.rows, batch.max_count, batch.sequences, batch.counts, batch.offsets, batch.tokens};
}

int64_t packed_tokens(const Windows& windows, const Span& span, Part part) {
    return std::max<int64_t>(0, span.border(part) - windows.sink);
}

uint64_t table_bytes(const Model& model, int64_t blocks) {
    const uint64_t sequences = model.max_sequences;
    return PageTable::bytes(model.max_sequences, blocks_per_sequence(model), blocks) +
           sequences * (model.layers.size() * sizeof(Span) + sizeof(Row) + sizeof(int64_t));
}

}  // namespace

kivi_memory estimate(const Model& model, uint64_t layout_version, uint64_t scratch_bytes) {
    kivi_memory memory{};
    memory.blocks = pool_blocks(model);
    memory.block_bytes = block_bytes(model);
    memory.page_bytes = memory.blocks * memory.block_bytes;
    memory.window_bytes = window_bytes(model);
    memory.table_bytes = table_bytes(model, memory.blocks);
    memory.moment_bytes = moment_bytes(model);
    memory.scratch_bytes = scratch_bytes;
    memory.total_bytes = memory.page_bytes + memory.window_bytes + memory.table_bytes + memory.moment_bytes +
                         memory.scratch_bytes;
    memory.layout_id = layout_id(model, layout_version);
    return memory;
}

Cache::Cache(Model model, std::unique_ptr<Backend> backend, const kivi_memory& memory)
    : model_(std::move(model)),
      backend_(std::move(backend)),
      memory_(memory),
      spans_(model_.layers.size() * model_.max_sequences),
      table_(model_.max_sequences, blocks_per_sequence(model_), memory.blocks),
      plan_(model_.max_sequences),
      planned_(model_.max_sequences),
      moments_(model_.layers.size()) {}

// ---- Checks ----------------------------------------------------------------------------------------------

const kivi_layer& Cache::layer(int32_t layer) const {
    if (layer < 0 || layer >= layer_count()) {
        refuse_argument("layer is ", layer, "; it must be from 0 to ", layer_count() - 1);
    }
    if (!model_.has(layer)) refuse_argument("layer is ", layer, ", which keeps nothing here (kv_heads 0)");
    return model_.layers[layer];
}

void Cache::check_sequence(int32_t sequence) const {
    if (sequence < 0 || sequence >= model_.max_sequences) {
        refuse_argument("sequence is ", sequence, "; it must be from 0 to ", model_.max_sequences - 1);
    }
}

void Cache::check_stream(kivi_stream stream) const {
    if (model_.device == KIVI_CPU && stream != nullptr) {
        refuse_argument("stream is ", stream, "; a cache on the CPU takes NULL only");
    }
}

void Cache::check_healthy() const {
    if (device_error_) {
        refuse(KIVI_ERROR_DEVICE,
               "an earlier call failed on the device; the cache answers queries and destroy only");
    }
}

void Cache::check_blocks(int64_t needed) const {
    if (needed > table_.free()) {
        refuse(KIVI_ERROR_CAPACITY, "the call needs ", needed, " more blocks of ", kPageTokens, " tokens; ",
               table_.free(), " of ", table_.total(), " are free (pool_tokens, kivi_reserve)");
    }
}

template <class Work>
void Cache::run(Work&& work) const {
    try {
        work();
    } catch (const Error& error) {
        if (error.status() == KIVI_ERROR_DEVICE) device_error_ = true;
        throw;
    }
}

// ---- Work ------------------------------------------------------------------------------------------------

template <class AfterOf>
Rows Cache::plan_rows(int32_t layer, const Batch& batch, AfterOf&& after_of) const {
    const int64_t number = ++plan_number_;
    int32_t size = 0;
    batch.for_each([&](int32_t index, int32_t sequence, int32_t count, int64_t offset) {
        if (planned_[sequence] == number) {
            refuse_double(index, sequence);
        }
        planned_[sequence] = number;
        const Span& before = span_at(layer, sequence);
        plan_[size++] = Row{index,
                            sequence,
                            offset,
                            count,
                            before,
                            after_of(sequence, before, count),
                            table_.blocks(sequence),
                            table_.count(sequence)};
    });
    return Rows{plan_.data(), size};
}

int64_t Cache::missing_blocks(int32_t sequence, const Span& after) const {
    return std::max<int64_t>(0, blocks_of(model_.windows, after) - table_.count(sequence));
}

void Cache::bind(int32_t sequence, int64_t count, kivi_stream stream) {
    const int64_t before = table_.count(sequence);
    if (count <= before) return;
    table_.resize(sequence, count);
    run([&] { backend_->bind_blocks(sequence, table_.blocks(sequence), before, count, stream); });
}

template <class Work>
void Cache::apply(int32_t layer, Rows rows, kivi_stream stream, Work&& work) {
    try {
        for (const Row& row : rows) bind(row.sequence, blocks_of(model_.windows, row.after), stream);
        run(work);
    } catch (...) {
        for (const Row& row : rows) table_.resize(row.sequence, row.block_count);
        throw;
    }
    for (const Row& row : rows) span_at(layer, row.sequence) = row.after;
}

template <class Work>
void Cache::run_on_device(const Batch& batch, Work&& work) const {
    const DeviceRows rows = device_rows(batch);
    run([&] { work(Rows{nullptr, 0, &rows}); });
}

template <class Work>
void Cache::grow(int32_t layer, const Batch& batch, kivi_stream stream, Work&& work) {
    if (batch.on_device) return run_on_device(batch, work);
    const Rows rows = plan_rows(layer, batch, [&](int32_t sequence, const Span& before, int64_t count) {
        const int64_t length = before.length + count;
        if (length > model_.max_tokens) {
            refuse(KIVI_ERROR_CAPACITY, "sequence ", sequence, " has ", before.length, " tokens; ", count,
                   " more pass max_tokens, ", model_.max_tokens);
        }
        return after_append(model_.windows, before, length);
    });
    if (rows.size == 0) return;
    int64_t needed = 0;
    for (const Row& row : rows) needed += missing_blocks(row.sequence, row.after);
    check_blocks(needed);
    apply(layer, rows, stream, [&] { work(rows); });
}

void Cache::append(int32_t layer, const Batch& batch, const View& k, const View& v, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    grow(layer, batch, stream, [&](Rows rows) { backend_->append(layer, rows, k, v, stream); });
}

void Cache::flush(int32_t layer, const Batch& batch, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    if (model_.windows.schedule == KIVI_SCHEDULE_PUBLISHED) {
        refuse(KIVI_ERROR_UNSUPPORTED,
               "flush_residual: the published schedule (1) packs only by its own rule");
    }
    const auto after = [&](int32_t, const Span& before, int64_t) {
        return after_flush(model_.windows, before);
    };
    const auto [begin, end] = layers_of(layer);

    if (batch.on_device) {
        for (int32_t i = begin; i < end; i++) {
            if (model_.has(i)) run_on_device(batch, [&](Rows rows) { backend_->flush(i, rows, stream); });
        }
        return;
    }

    // One block serves all layers, so the layer that reaches farthest decides.
    const Rows sequences = plan_rows(begin, batch, after);
    int64_t needed = 0;
    for (const Row& row : sequences) {
        int64_t missing = 0;
        for (int32_t i = begin; i < end; i++) {
            const Span flushed = after_flush(model_.windows, span_at(i, row.sequence));
            missing = std::max(missing, missing_blocks(row.sequence, flushed));
        }
        needed += missing;
    }
    check_blocks(needed);
    for (int32_t i = begin; i < end; i++) {
        if (!model_.has(i)) continue;
        const Rows rows = plan_rows(i, batch, after);
        if (rows.size > 0) apply(i, rows, stream, [&] { backend_->flush(i, rows, stream); });
    }
}

// Workspace of attend, from its first 64-byte boundary on:
//
//   rows of the plan | one bit a sequence, to find doubles | the backend's part
//
// On a device it is the backend's alone: the host cannot write there.
size_t Cache::plan_bytes(int32_t rows) const {
    if (model_.device != KIVI_CPU) return 0;
    return aligned(rows * sizeof(Row)) + aligned((model_.max_sequences + 7) / 8);
}

size_t Cache::attend_workspace(int32_t layer, int32_t rows, int32_t max_count) const {
    const int32_t active = std::min(rows, model_.max_sequences);
    if (active == 0 || max_count == 0) return 0;
    size_t backend_bytes = 0;
    const auto [begin, end] = layers_of(layer);
    for (int32_t i = begin; i < end; i++) {
        if (model_.has(i))
            backend_bytes = std::max(backend_bytes, backend_->attend_workspace(i, active, max_count));
    }
    return kWorkspaceAlignment - 1 + plan_bytes(active) + aligned(backend_bytes);
}

// Rows of a batch that only reads; `seen` has one bit a sequence.
int32_t Cache::plan_attend(int32_t layer, const Batch& batch, Row* rows, uint8_t* seen) const {
    std::memset(seen, 0, (model_.max_sequences + 7) / 8);
    int32_t size = 0;
    batch.for_each([&](int32_t index, int32_t sequence, int32_t count, int64_t offset) {
        const uint8_t bit = static_cast<uint8_t>(1 << (sequence % 8));
        if (seen[sequence / 8] & bit) {
            refuse_double(index, sequence);
        }
        seen[sequence / 8] |= bit;
        const Span& span = span_at(layer, sequence);
        new (&rows[size++])
            Row{index, sequence, offset, count, span, span, table_.blocks(sequence), table_.count(sequence)};
    });
    return size;
}

void Cache::check_workspace(int32_t layer, const Batch& batch, const void* workspace, size_t bytes) const {
    const size_t needed = attend_workspace(layer, batch.active, batch.max_count);
    if (bytes < needed) {
        refuse(KIVI_ERROR_BUFFER_TOO_SMALL, "workspace_bytes is ", bytes, "; ", batch.active,
               " rows of at most ", batch.max_count, " queries need ", needed);
    }
    if (workspace == nullptr && needed > 0) {
        refuse_argument("workspace is NULL, but ", needed, " bytes are needed");
    }
}

AttendCall Cache::attend_call(int32_t layer, const Batch& batch, const AttendRequest& request,
                              void* workspace, size_t workspace_bytes, kivi_stream stream) const {
    uint8_t* const end = static_cast<uint8_t*>(workspace) + workspace_bytes;
    uint8_t* const own = aligned(workspace) + plan_bytes(std::min(batch.active, model_.max_sequences));
    AttendCall call;
    call.layer = layer;
    call.q = request.q;
    call.out = request.out;
    call.k = request.k;
    call.v = request.v;
    call.lse = request.lse;
    call.scale = request.scale != 0
                     ? request.scale
                     : static_cast<float>(1 / std::sqrt(static_cast<double>(model_.layers[layer].key_dim)));
    call.soft_cap = request.soft_cap;
    call.window_left = request.window_left;
    call.learned_sinks = request.learned_sinks;
    call.flags = request.flags;
    call.workspace = own;
    call.workspace_bytes = static_cast<size_t>(end - own);
    call.stream = stream;
    return call;
}

void Cache::attend(int32_t layer, const Batch& batch, const AttendRequest& request, void* workspace,
                   size_t workspace_bytes, kivi_stream stream) const {
    check_stream(stream);
    check_healthy();
    check_workspace(layer, batch, workspace, workspace_bytes);
    if (batch.active == 0) return;
    AttendCall call = attend_call(layer, batch, request, workspace, workspace_bytes, stream);
    const DeviceRows on_device = device_rows(batch);
    std::unique_lock<std::mutex> lock;  // of the plan, until its rows have been handed to the device
    if (batch.on_device) {
        call.rows.on_device = &on_device;
    } else if (model_.device == KIVI_CPU) {
        const int32_t most_rows = std::min(batch.active, model_.max_sequences);
        Row* const rows = reinterpret_cast<Row*>(aligned(workspace));
        call.rows.data = rows;
        call.rows.size =
            plan_attend(layer, batch, rows, aligned(workspace) + aligned(most_rows * sizeof(Row)));
    } else {
        lock = std::unique_lock<std::mutex>(plan_mutex_);
        call.rows = plan_rows(layer, batch, [](int32_t, const Span& span, int64_t) { return span; });
    }
    run([&] { backend_->attend(call); });
}

void Cache::step(int32_t layer, const Batch& batch, const AttendRequest& request, void* workspace,
                 size_t workspace_bytes, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    check_workspace(layer, batch, workspace, workspace_bytes);
    if (batch.active == 0) return;
    AttendCall call = attend_call(layer, batch, request, workspace, workspace_bytes, stream);
    grow(layer, batch, stream, [&](Rows rows) {
        call.rows = rows;
        backend_->step(call);
    });
}

void Cache::dequantize(int32_t layer, int32_t sequence, int64_t begin, int64_t end, const View& k,
                       const View& v, bool stored_basis, kivi_stream stream) const {
    check_stream(stream);
    check_healthy();
    if (begin == end) return;
    const Span& span = span_at(layer, sequence);
    const Row row{0, sequence, 0, end - begin, span, span, table_.blocks(sequence), table_.count(sequence)};
    run([&] { backend_->dequantize(layer, row, begin, end, k, v, stored_basis, stream); });
}

// ---- Sequences and the pool -------------------------------------------------------------------------------

void Cache::drop_contents(int32_t sequence) {
    table_.resize(sequence, 0);
    for (int32_t layer = 0; layer < layer_count(); layer++) span_at(layer, sequence) = Span{};
}

void Cache::publish(int32_t sequence, const std::vector<Span>& spans, kivi_stream stream) {
    run([&] {
        backend_->set_sequence(sequence, spans, table_.blocks(sequence), table_.count(sequence), stream);
    });
}

void Cache::reset(kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    const std::vector<Span> empty(layer_count());
    run([&] { backend_->reset(stream); });
    for (int32_t sequence = 0; sequence < model_.max_sequences; sequence++) {
        drop_contents(sequence);
        publish(sequence, empty, stream);
    }
}

void Cache::reset_sequence(int32_t sequence, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    check_sequence(sequence);
    const std::vector<Span> empty(layer_count());
    drop_contents(sequence);
    publish(sequence, empty, stream);
}

void Cache::reserve(int64_t tokens, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    if (tokens < 0) refuse_argument("tokens is ", tokens, "; it must not be negative");
    const int64_t most = std::numeric_limits<int32_t>::max();
    const int64_t blocks = tokens / kPageTokens + (tokens % kPageTokens != 0);
    if (blocks > most || blocks > (int64_t{1} << 62) / static_cast<int64_t>(memory_.block_bytes)) {
        refuse_argument("tokens is ", tokens, "; the limit is 2147483647 blocks of ", kPageTokens,
                        " tokens and 2^62 bytes");
    }
    const int64_t more = blocks - table_.total();
    if (more <= 0) return;
    table_.prepare(more);
    run([&] { backend_->grow_pool(more, stream); });
    table_.add_blocks(more);
    const uint64_t table_before = table_bytes(model_, memory_.blocks);
    memory_.blocks += more;
    memory_.page_bytes += more * memory_.block_bytes;
    memory_.table_bytes = table_bytes(model_, memory_.blocks);
    memory_.total_bytes += more * memory_.block_bytes + memory_.table_bytes - table_before;
}

void Cache::reserve_sequence(int32_t sequence, int64_t tokens, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    check_sequence(sequence);
    if (tokens < 0) refuse_argument("tokens is ", tokens, "; it must not be negative");
    if (tokens > model_.max_tokens) {
        refuse(KIVI_ERROR_CAPACITY, "tokens is ", tokens, "; a sequence holds at most max_tokens, ",
               model_.max_tokens);
    }
    const int64_t blocks = most_blocks(model_.windows, tokens);
    check_blocks(blocks - table_.count(sequence));
    bind(sequence, blocks, stream);
}

void Cache::synchronize(kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    std::vector<Span> spans(spans_.size());
    std::vector<int32_t> full(model_.max_sequences);
    bool read = false;
    run([&] {
        backend_->synchronize(stream);
        read = backend_->read_state(&spans, &full);
    });
    if (!read) return;
    spans_ = std::move(spans);
    for (int32_t sequence = 0; sequence < model_.max_sequences; sequence++) {
        if (full[sequence] == 0) continue;
        refuse(KIVI_ERROR_CAPACITY, "sequence ", sequence, " had no room for an append on the device: its ",
               table_.count(sequence), " blocks or max_tokens, ", model_.max_tokens, ", were reached");
    }
}

// ---- Moving one sequence ----------------------------------------------------------------------------------

std::vector<Span> Cache::spans_of(int32_t sequence) const {
    std::vector<Span> spans(layer_count());
    const Span* first = nullptr;
    for (int32_t layer = 0; layer < layer_count(); layer++) {
        if (!model_.has(layer)) continue;
        spans[layer] = span_at(layer, sequence);
        if (first == nullptr) first = &spans[layer];
        if (spans[layer].length != first->length) {
            refuse(KIVI_ERROR_STATE, "sequence ", sequence, " has ", spans[layer].length, " tokens in layer ",
                   layer, " and ", first->length,
                   " in an earlier one; it moves between steps, when all are alike");
        }
    }
    return spans;
}

std::vector<EncoderMark> Cache::encoder_marks() const {
    std::vector<EncoderMark> marks(layer_count());
    for (int32_t layer = 0; layer < layer_count(); layer++) {
        const Moments& moments = moments_[layer];
        if (!moments.tables.empty()) marks[layer] = EncoderMark{1, moments.crc};
    }
    return marks;
}

size_t Cache::export_size(int32_t sequence) const { return blob_bytes(model_, spans_of(sequence)); }

size_t Cache::export_sequence(int32_t sequence, void* buffer, size_t bytes, kivi_stream stream) const {
    check_stream(stream);
    check_healthy();
    const std::vector<Span> spans = spans_of(sequence);
    const std::vector<size_t> offsets = blob_offsets(model_, spans);
    const size_t needed = blob_bytes(model_, spans);
    if (bytes < needed) {
        refuse(KIVI_ERROR_BUFFER_TOO_SMALL, "bytes is ", bytes, "; sequence ", sequence, " needs ", needed);
    }
    auto* const blob = static_cast<uint8_t*>(buffer);
    const int32_t* const blocks = table_.blocks(sequence);
    run([&] { backend_->synchronize(stream); });
    write_blob_head(model_, spans, encoder_marks(), blob);
    for (int32_t layer = 0; layer < layer_count(); layer++) {
        uint8_t* at = blob + offsets[layer];
        for_each_piece(model_, layer, spans[layer], [&](const BlobPiece& piece) {
            if (piece.kind == BlobPiece::page) {
                backend_->export_page(layer, piece.part, piece.head, blocks[piece.page_index],
                                      piece.end - piece.begin, at);
            } else {
                backend_->export_window(layer, piece.part, piece.head, sequence, piece.begin, piece.end, at);
            }
            at += piece.bytes;
        });
    }
    seal_blob(blob, needed);
    return needed;
}

void Cache::import_sequence(int32_t sequence, const void* buffer, size_t bytes, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    const auto* const blob = static_cast<const uint8_t*>(buffer);
    const std::vector<Span> spans = read_blob(model_, encoder_marks(), blob, bytes);
    const std::vector<size_t> offsets = blob_offsets(model_, spans);
    int64_t blocks = 0;
    for (const Span& span : spans) {
        if (span.length > model_.max_tokens) {
            refuse(KIVI_ERROR_CAPACITY, "the blob has ", span.length, " tokens; max_tokens is ",
                   model_.max_tokens);
        }
        blocks = std::max(blocks, blocks_of(model_.windows, span));
    }
    check_blocks(blocks - table_.count(sequence));

    run([&] { backend_->synchronize(stream); });
    blocks = std::max(blocks, table_.count(sequence));  // reserved ones stay
    table_.resize(sequence, 0);
    table_.resize(sequence, blocks);
    const int32_t* const table = table_.blocks(sequence);
    for (int32_t layer = 0; layer < layer_count(); layer++) {
        span_at(layer, sequence) = spans[layer];
        const uint8_t* at = blob + offsets[layer];
        for_each_piece(model_, layer, spans[layer], [&](const BlobPiece& piece) {
            if (piece.kind == BlobPiece::page) {
                backend_->import_page(layer, piece.part, piece.head, table[piece.page_index],
                                      piece.end - piece.begin, at);
            } else {
                backend_->import_window(layer, piece.part, piece.head, sequence, piece.begin, piece.end, at);
            }
            at += piece.bytes;
        });
    }
    publish(sequence, spans, stream);
}

// ---- Moments ----------------------------------------------------------------------------------------------

const kivi_layer& Cache::query_aware_layer(int32_t index) const {
    const kivi_layer& shape = layer(index);
    if (shape.k.bits == 16 || shape.k.rounding != KIVI_ROUND_QUERY_AWARE) {
        refuse_argument("layer is ", index,
                        ", whose keys are not rounded query-aware (k.rounding 1), so it has no moments");
    }
    return shape;
}

void Cache::check_nothing_packed(int32_t layer, const char* what) const {
    for (int32_t sequence = 0; sequence < model_.max_sequences; sequence++) {
        const Span& span = span_at(layer, sequence);
        if (std::max(span.key_border, span.value_border) > 0) {
            refuse(KIVI_ERROR_STATE, what, ": layer ", layer, " has packed tokens (sequence ", sequence,
                   "), so its moments are frozen; reset its sequences first");
        }
    }
}

void Cache::use_tables(int32_t layer, std::vector<Feedback> tables) {
    Moments& moments = moments_[layer];
    moments.crc = tables_crc(tables);
    moments.tables = std::move(tables);
    run([&] { backend_->set_feedback(layer, moments.tables); });
}

void Cache::write_means(int32_t layer, const std::vector<float>& means, int64_t queries) {
    run([&] { backend_->write_moments(layer, means.data()); });
    Moments& moments = moments_[layer];
    moments.present = true;
    moments.are_means = true;
    moments.queries = queries;
}

std::vector<float> Cache::mean_moments(int32_t layer) const {
    const kivi_layer& shape = model_.layers[layer];
    const Moments& moments = moments_[layer];
    std::vector<float> means(static_cast<size_t>(shape.kv_heads) * shape.key_dim * shape.key_dim);
    run([&] { backend_->read_moments(layer, means.data()); });
    if (!moments.are_means) {
        for (float& mean : means) mean = static_cast<float>(mean / static_cast<double>(moments.queries));
    }
    return means;
}

void Cache::accumulate_moments(int32_t layer, const Batch& batch, const View& q, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    Moments& moments = moments_[layer];
    if (!moments.tables.empty()) check_nothing_packed(layer, "kivi_moments_accumulate");
    if (batch.active == 0) return;
    const kivi_layer& shape = model_.layers[layer];
    std::vector<Row> rows;
    rows.reserve(batch.active);
    int64_t tokens = 0;
    batch.for_each([&](int32_t index, int32_t, int32_t count, int64_t offset) {
        Row row;
        row.index = index;
        row.offset = offset;
        row.count = count;
        rows.push_back(row);
        tokens += count;
    });

    // Means become sums again; a matrix that the caller set weighs as one query row.
    if (moments.are_means) {
        std::vector<float> sums = mean_moments(layer);
        const int64_t weight = std::max<int64_t>(1, moments.queries);
        for (float& sum : sums) sum *= static_cast<float>(weight);
        run([&] { backend_->write_moments(layer, sums.data()); });
        moments.are_means = false;
        moments.queries = weight;
    }
    run([&] {
        backend_->accumulate_moments(layer, Rows{rows.data(), static_cast<int32_t>(rows.size())}, q, stream);
    });
    moments.present = true;
    moments.queries += tokens * (shape.q_heads / shape.kv_heads);
    use_tables(layer, {});
}

void Cache::set_moments(int32_t layer, const View& m, bool stored_basis, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    check_nothing_packed(layer, "kivi_moments_set");
    const kivi_layer& shape = model_.layers[layer];
    // [heads, dim, dim] as far as its strides reach.
    std::vector<float> host;
    View matrices = m;
    if (model_.device != KIVI_CPU) {
        host.resize((shape.kv_heads - 1) * m.token_stride + (shape.key_dim - 1) * (m.head_stride + 1) + 1);
        run([&] { backend_->download(host.data(), m.data, host.size() * sizeof(float), stream); });
        matrices.data = host.data();
    }
    const std::vector<float> means = moments_in_stored_basis(matrices, shape, stored_basis);
    make_tables(means, shape);  // refuses here what commit would refuse
    write_means(layer, means, 0);
    use_tables(layer, {});
}

void Cache::commit_moments(int32_t layer, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    if (!moments_[layer].present) {
        refuse(KIVI_ERROR_STATE, "layer ", layer, " has no moments to commit; accumulate or set them first");
    }
    check_nothing_packed(layer, "kivi_moments_commit");
    run([&] { backend_->synchronize(stream); });
    use_tables(layer, make_tables(mean_moments(layer), model_.layers[layer]));
}

size_t Cache::moments_export_size(int32_t layer) const {
    if (moments_[layer].tables.empty()) {
        refuse(KIVI_ERROR_STATE, "layer ", layer, " has no committed moments to export");
    }
    return moments_blob_bytes(model_.layers[layer]);
}

size_t Cache::export_moments(int32_t layer, void* buffer, size_t bytes) const {
    check_healthy();
    const size_t needed = moments_export_size(layer);
    if (bytes < needed) {
        refuse(KIVI_ERROR_BUFFER_TOO_SMALL, "bytes is ", bytes, "; the moments of layer ", layer, " need ",
               needed);
    }
    const Moments& moments = moments_[layer];
    write_moments_blob(model_.layers[layer], moments.queries, mean_moments(layer), moments.tables,
                       static_cast<uint8_t*>(buffer));
    return needed;
}

void Cache::import_moments(int32_t layer, const void* buffer, size_t bytes, kivi_stream stream) {
    check_stream(stream);
    check_healthy();
    MomentTables read = read_moments_blob(model_.layers[layer], static_cast<const uint8_t*>(buffer), bytes);
    check_nothing_packed(layer, "kivi_moments_import");
    write_means(layer, read.means, read.queries);
    use_tables(layer, std::move(read.heads));
}

// ---- Queries ----------------------------------------------------------------------------------------------

kivi_length Cache::length(int32_t layer, int32_t sequence) const {
    const Span& span = span_at(layer, sequence);
    kivi_length length{};
    length.length = span.length;
    length.sink = std::min(span.length, model_.windows.sink);
    length.key_border = std::min(span.length, tail_begin(model_.windows, span, Part::key));
    length.value_border = std::min(span.length, tail_begin(model_.windows, span, Part::value));
    return length;
}

kivi_statistics Cache::statistics(int32_t layer) const {
    kivi_statistics sum{};
    sum.key_rounding = KIVI_ROUND_QUERY_AWARE;
    sum.moments = 2;
    const auto [begin, end] = layers_of(layer);
    for (int32_t i = begin; i < end; i++) {
        if (!model_.has(i)) continue;
        const kivi_layer& shape = model_.layers[i];
        for (int32_t sequence = 0; sequence < model_.max_sequences; sequence++) {
            const Span& span = span_at(i, sequence);
            sum.tokens += span.length;
            sum.packed_tokens += packed_tokens(model_.windows, span, Part::key);
            for (Part part : {Part::key, Part::value}) {
                const int dim = dim_of(shape, part);
                const int64_t packed = packed_tokens(model_.windows, span, part);
                const int64_t row = dim * static_cast<int64_t>(dtype_bytes(model_.window_dtype));
                sum.live_bytes +=
                    shape.kv_heads * (packed_bytes(spec_of(shape, part), dim, model_.window_dtype, packed) +
                                      (span.length - packed) * row);
            }
        }
        sum.saturated_rows += backend_->saturated_rows(i);
        const Moments& moments = moments_[i];
        const int32_t state = !moments.tables.empty() ? 2 : moments.present ? 1 : 0;
        sum.moments = std::min(sum.moments, state);
        if (state < 2) sum.key_rounding = KIVI_ROUND_NEAREST;
        sum.moment_queries += moments.queries;
    }
    sum.blocks_used = table_.used();
    sum.blocks_free = table_.free();
    sum.device_error = device_error_ ? 1 : 0;
    return sum;
}

}  // namespace kivi
