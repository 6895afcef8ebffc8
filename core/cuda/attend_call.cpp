#include "cuda/attend_call.h"

#include <algorithm>

#include "cuda/decode.h"
#include "cuda/prefill.h"

namespace kivi::cuda {
namespace {

bool prefills(const Layer& layer) { return layer.key.order.order == Order::fragment; }

// Whether it took the decode kernel.
bool launch(const AttendArgs& args, bool decodes, const Gpu& gpu, Stream stream) {
    if (decodes && decode_takes(args)) {
        decode(args, gpu.multiprocessors, stream);
        return true;
    }
    if (prefills(args.layer) && prefill_takes(args)) {
        prefill(args, gpu, stream);
    } else {
        attend(args, stream);
    }
    return false;
}

// Calls of `count` to the returned number of tokens a row are of one kernel and instance.
int32_t alike_until(const AttendArgs& args, int32_t count) {
    if (decode_reads(args) && count <= decode_max_count(args.layer)) return count;
    const int32_t few = prefills(args.layer) ? prefill_few_count(args.layer) : 0;
    return count <= few ? few : INT32_MAX;
}

// Leaves rows of least .. most tokens; whether there can be any.
bool keep_rows(BatchArgs& batch, int32_t least, int32_t most) {
    const bool alike = batch.on_device && batch.arrays.counts == nullptr;  // all have max_count
    if (alike && most < batch.max_count) return false;
    batch.least_count = least;
    batch.max_count = std::min(most, batch.max_count);
    bool any = batch.on_device;
    for (int32_t i = 0; i < batch.size && !batch.on_device; ++i) {
        int32_t& count = batch.rows[i].count;
        if (count < least || count > most) count = 0;
        any = any || count > 0;
    }
    return any;
}

}  // namespace

bool attend_call(const AttendArgs& args, bool decodes, const Gpu& gpu, Stream stream) {
    // One launch for rows of a kind. Under the flag, because the kernel that a row takes must not depend on the rows beside
    // it; and for 16-bit pages, because no other fast kernel takes rows of different counts.
    const bool prefilled = prefills(args.layer) && prefill_reads(args);
    const bool apart = decodes && (args.invariant ? decode_reads(args) || prefilled
                                                  : decode_reads(args) && !prefills(args.layer));
    if (!apart) return launch(args, decodes, gpu, stream);
    AttendArgs part = args;
    bool decoded = false;
    for (int64_t least = 1, most; least <= args.batch.max_count; least = most + 1) {
        most = alike_until(args, static_cast<int32_t>(least));
        part.batch = args.batch;
        if (!keep_rows(part.batch, static_cast<int32_t>(least), static_cast<int32_t>(most))) continue;
        if (launch(part, decodes, gpu, stream)) decoded = true;
    }
    return decoded;
}

size_t attend_call_workspace(const Layer& layer, bool decodes, int32_t rows, int32_t max_count, const Gpu& gpu) {
    size_t bytes = attend_workspace(layer, rows, max_count);
    if (decodes) bytes = std::max(bytes, decode_workspace(layer, rows, max_count, gpu.multiprocessors));
    if (prefills(layer)) bytes = std::max(bytes, prefill_workspace(layer, rows, max_count, gpu));
    return bytes;
}

}  // namespace kivi::cuda
