// Slots of handles. They stand in slabs of doubling size; a slab is published once and never moves, so
// looking a handle up takes no lock. Creating and destroying do.
#include "api/handle.h"

#include <mutex>
#include <thread>

#include <pthread.h>

#include "cache/refuse.h"

namespace kivi {
namespace {

constexpr uint32_t kExclusive = 0x80000000u;
constexpr int kSlabs = 24;
constexpr size_t kFirstSlab = 64;     // slots of slab 0
constexpr size_t kQuarantine = 1024;  // destroyed slots that wait before the oldest is used again

// The process's slots, in static storage: handles may be asked about until the very end.
std::atomic<kivi_cache*> slabs[kSlabs];
std::mutex mutex;  // guards what follows
int slab_count = 0;
size_t slots_left = 0;  // never used, in the last slab
size_t live = 0;
kivi_cache* oldest_destroyed = nullptr;
kivi_cache* newest_destroyed = nullptr;
size_t destroyed_count = 0;

// Gives the slabs back when the library is unloaded, unless a cache is still alive.
struct Sweep {
    ~Sweep();
} sweep;

size_t slab_size(int slab) { return kFirstSlab << slab; }

bool is_slot(const kivi_cache* handle) {
    const auto address = reinterpret_cast<uintptr_t>(handle);
    for (int slab = 0; slab < kSlabs; slab++) {
        const kivi_cache* const first = slabs[slab].load(std::memory_order_acquire);
        if (first == nullptr) return false;
        const auto begin = reinterpret_cast<uintptr_t>(first);
        if (address >= begin && address < begin + slab_size(slab) * sizeof(kivi_cache)) {
            return (address - begin) % sizeof(kivi_cache) == 0;
        }
    }
    return false;
}

Sweep::~Sweep() {
    if (live > 0) return;
    for (std::atomic<kivi_cache*>& slab : slabs) delete[] slab.exchange(nullptr);
}

// Held over a fork(), so that the child finds the lists whole and the mutex free.
void before_fork() { mutex.lock(); }
void after_fork_in_parent() { mutex.unlock(); }
void after_fork_in_child() {
    for (int slab = 0; slab < slab_count; slab++) {
        kivi_cache* const first = slabs[slab].load();
        for (kivi_cache* slot = first; slot < first + slab_size(slab); slot++) {
            const uint32_t use = slot->use.load();
            if (use == 0) continue;
            slot->abandoned = (use & kExclusive) != 0;
            slot->use.store(use & kExclusive);
        }
    }
    mutex.unlock();
}
const int watches_forks = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

kivi_cache* take_slot() {
    if (slots_left == 0 && destroyed_count > kQuarantine) {
        kivi_cache* const oldest = oldest_destroyed;
        oldest_destroyed = oldest->next_destroyed;
        destroyed_count--;
        return oldest;
    }
    if (slots_left == 0) {
        if (slab_count == kSlabs) refuse(KIVI_ERROR_OUT_OF_MEMORY, "too many caches are alive");
        const size_t size = slab_size(slab_count);
        slabs[slab_count].store(new kivi_cache[size], std::memory_order_release);
        slab_count++;
        slots_left = size;
    }
    const int last = slab_count - 1;
    return slabs[last].load(std::memory_order_relaxed) + (slab_size(last) - slots_left--);
}

void queue_destroyed(kivi_cache* slot) {
    slot->next_destroyed = nullptr;
    (destroyed_count == 0 ? oldest_destroyed : newest_destroyed->next_destroyed) = slot;
    newest_destroyed = slot;
    destroyed_count++;
}

void check_handle(const kivi_cache* handle) {
    if (handle == nullptr) refuse_argument("cache is NULL");
    if (!is_slot(handle)) {
        refuse_argument("cache is ", static_cast<const void*>(handle),
                        ", which kivi_cache_create did not make");
    }
}

[[noreturn]] void refuse_destroyed() { refuse(KIVI_ERROR_STATE, "cache is a handle that was destroyed"); }

}  // namespace

kivi_cache* make_handle(std::unique_ptr<Cache> cache) {
    std::lock_guard<std::mutex> lock(mutex);
    kivi_cache* const slot = take_slot();
    live++;
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
    while (!handle->abandoned && !handle->use.compare_exchange_weak(idle, kExclusive)) {
        idle = 0;
        std::this_thread::yield();
    }
    if (handle->abandoned) (void)cache.release();
    handle->abandoned = false;
    cache.reset();
    handle->use.fetch_sub(kExclusive, std::memory_order_release);
    std::lock_guard<std::mutex> lock(mutex);
    live--;
    queue_destroyed(handle);
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
