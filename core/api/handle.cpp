// Slots of handles. They stand in slabs of doubling size; a slab is published once and never moves, so looking
// a handle up takes no lock. Creating and destroying do.
#include "api/handle.h"

#include <deque>
#include <mutex>
#include <thread>

#include "cache/refuse.h"

namespace kivi {
namespace {

constexpr uint32_t kExclusive = 0x80000000u;
constexpr int kSlabs = 24;
constexpr size_t kFirstSlab = 64;        // slots of slab 0
constexpr size_t kQuarantine = 1024;     // destroyed slots that wait before the oldest is used again

// The process's slots. Never destroyed: handles may be asked about until the very end.
struct Slots {
    std::atomic<kivi_cache*> slabs[kSlabs] = {};
    std::mutex mutex;                    // guards what follows
    int slab_count = 0;
    size_t slots_left = 0;               // never used, in the last slab
    std::deque<kivi_cache*> destroyed;   // oldest first
};

Slots& slots() {
    static Slots* const all = new Slots;
    return *all;
}

size_t slab_size(int slab) { return kFirstSlab << slab; }

bool is_slot(const kivi_cache* handle) {
    const auto address = reinterpret_cast<uintptr_t>(handle);
    for (int slab = 0; slab < kSlabs; slab++) {
        const kivi_cache* const first = slots().slabs[slab].load(std::memory_order_acquire);
        if (first == nullptr) return false;
        const auto begin = reinterpret_cast<uintptr_t>(first);
        if (address >= begin && address < begin + slab_size(slab) * sizeof(kivi_cache)) {
            return (address - begin) % sizeof(kivi_cache) == 0;
        }
    }
    return false;
}

kivi_cache* take_slot() {
    Slots& all = slots();
    if (all.slots_left == 0 && all.destroyed.size() > kQuarantine) {
        kivi_cache* const oldest = all.destroyed.front();
        all.destroyed.pop_front();
        return oldest;
    }
    if (all.slots_left == 0) {
        if (all.slab_count == kSlabs) refuse(KIVI_ERROR_OUT_OF_MEMORY, "too many caches are alive");
        const size_t size = slab_size(all.slab_count);
        all.slabs[all.slab_count].store(new kivi_cache[size], std::memory_order_release);
        all.slab_count++;
        all.slots_left = size;
    }
    const int last = all.slab_count - 1;
    return all.slabs[last].load(std::memory_order_relaxed) + (slab_size(last) - all.slots_left--);
}

void check_handle(const kivi_cache* handle) {
    if (handle == nullptr) refuse_argument("cache is NULL");
    if (!is_slot(handle)) {
        refuse_argument("cache is ", static_cast<const void*>(handle), ", which kivi_cache_create did not make");
    }
}

[[noreturn]] void refuse_destroyed() { refuse(KIVI_ERROR_STATE, "cache is a handle that was destroyed"); }

}  // namespace

kivi_cache* make_handle(std::unique_ptr<Cache> cache) {
    std::lock_guard<std::mutex> lock(slots().mutex);
    kivi_cache* const slot = take_slot();
    slot->cache.store(cache.release(), std::memory_order_release);
    return slot;
}

// Uses take the use word first and look at the cache second, destroy the other way round; with sequentially
// consistent order one of the two sees the other.
void destroy_handle(kivi_cache* handle) {
    if (handle == nullptr || !is_slot(handle)) return;
    // Of several destroys one gets the cache. Calls in progress still hold the use word; new ones see NULL.
    std::unique_ptr<Cache> cache(handle->cache.exchange(nullptr));
    if (cache == nullptr) return;
    uint32_t idle = 0;
    while (!handle->use.compare_exchange_weak(idle, kExclusive)) {
        idle = 0;
        std::this_thread::yield();
    }
    cache.reset();
    handle->use.fetch_sub(kExclusive, std::memory_order_release);
    std::lock_guard<std::mutex> lock(slots().mutex);
    slots().destroyed.push_back(handle);
}

SharedUse::SharedUse(const kivi_cache* handle) : handle_(const_cast<kivi_cache*>(handle)) {
    check_handle(handle);
    if (handle_->use.fetch_add(1) & kExclusive) {
        handle_->use.fetch_sub(1, std::memory_order_release);
        refuse(KIVI_ERROR_STATE, "cache is in use by a call that needs it to itself");
    }
    cache_ = handle_->cache.load();
    if (cache_ == nullptr) {
        handle_->use.fetch_sub(1, std::memory_order_release);
        refuse_destroyed();
    }
}

SharedUse::~SharedUse() { handle_->use.fetch_sub(1, std::memory_order_release); }

ExclusiveUse::ExclusiveUse(kivi_cache* handle) : handle_(handle) {
    check_handle(handle);
    uint32_t idle = 0;
    if (!handle_->use.compare_exchange_strong(idle, kExclusive)) {
        refuse(KIVI_ERROR_STATE, "cache is in use by another call, and this one needs it to itself");
    }
    cache_ = handle_->cache.load();
    if (cache_ == nullptr) {
        handle_->use.fetch_sub(kExclusive, std::memory_order_release);
        refuse_destroyed();
    }
}

ExclusiveUse::~ExclusiveUse() { handle_->use.fetch_sub(kExclusive, std::memory_order_release); }

}  // namespace kivi
