// Handles: a kivi_cache is a small slot that is not freed with its cache, so that a handle can be looked at
// after its cache is gone. A pointer is a handle if it lies in our slots at the right place; nothing foreign is
// ever read.
//
//   slot  { use word | cache, NULL once destroyed }
//   use   0 idle, n readers, kExclusive one call that has the cache to itself
//
// In the child of a fork() only the forking thread lives on, so calls of others are taken off the use words. A cache
// that one of them had to itself may be half changed: it stays in use there, and destroying it frees nothing.
//
// A destroyed slot is used again only after many others, so a stale handle is refused and not taken for a new
// cache.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "cache/cache.h"
#include "kivi/kivi.h"

struct alignas(64) kivi_cache {
    std::atomic<uint32_t> use{0};
    std::atomic<kivi::Cache*> cache{nullptr};
    kivi_cache* next_destroyed = nullptr;  // in the queue of destroyed slots
    bool abandoned = false;                // half changed by a thread that did not come through fork()
};

namespace kivi {

kivi_cache* make_handle(std::unique_ptr<Cache> cache);
// Waits for calls in progress, then ends the cache. NULL, foreign and destroyed handles are ignored.
void destroy_handle(kivi_cache* handle);

// The cache for one call, shared with other readers. Throws Error if the handle is not a live one
// (INVALID_ARGUMENT, STATE) or another thread has the cache to itself (STATE).
class SharedUse {
  public:
    explicit SharedUse(const kivi_cache* handle);
    ~SharedUse();
    SharedUse(const SharedUse&) = delete;
    SharedUse& operator=(const SharedUse&) = delete;
    const Cache& operator*() const { return *cache_; }
    const Cache* operator->() const { return cache_; }

  private:
    kivi_cache* handle_;
    const Cache* cache_;
};

// The cache for one call that changes it.
class ExclusiveUse {
  public:
    explicit ExclusiveUse(kivi_cache* handle);
    ~ExclusiveUse();
    ExclusiveUse(const ExclusiveUse&) = delete;
    ExclusiveUse& operator=(const ExclusiveUse&) = delete;
    Cache& operator*() const { return *cache_; }
    Cache* operator->() const { return cache_; }

  private:
    kivi_cache* handle_;
    Cache* cache_;
};

}  // namespace kivi
