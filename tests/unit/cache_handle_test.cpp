// Handles that are NULL, foreign or destroyed are refused without being followed; a cache in conflicting use
// is refused, not corrupted. [DESTROY-1] [THREAD-1] [FORK-1]
#include "cache_support.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>

#include "api/handle.h"

using namespace kivi_test;

TEST_CASE("NULL, misaligned and foreign pointers are no handles") {
    alignas(64) char foreign[256] = {};
    const TestCache cache(small_config());
    kivi_cache* const fakes[] = {
        nullptr, reinterpret_cast<kivi_cache*>(foreign), reinterpret_cast<kivi_cache*>(64),
        reinterpret_cast<kivi_cache*>(reinterpret_cast<char*>(static_cast<kivi_cache*>(cache)) + 8)};
    for (kivi_cache* fake : fakes) {
        CHECK(kivi_cache_reset(fake, nullptr) == KIVI_ERROR_INVALID_ARGUMENT);
        size_t bytes;
        CHECK(kivi_attend_workspace(fake, 0, 1, 1, &bytes) == KIVI_ERROR_INVALID_ARGUMENT);
        kivi_cache_destroy(fake);
    }
    CHECK(kivi_cache_reset(cache, nullptr) == KIVI_OK);
}

TEST_CASE("a slot that was never given out is no live handle") {
    const TestCache cache(small_config());
    kivi_cache* const beyond = static_cast<kivi_cache*>(cache) + 1;
    CHECK(kivi_cache_reset(beyond, nullptr) < 0);
    kivi_cache_destroy(beyond);
}

TEST_CASE("fault 110: a destroyed handle is refused and destroying it again does nothing") {
    const kivi_config config = small_config();
    std::set<kivi_cache*> seen;
    for (int i = 0; i < 300; i++) {
        kivi_cache* cache;
        REQUIRE(kivi_cache_create(&config, &cache) == KIVI_OK);
        CHECK(seen.insert(cache).second);  // not soon again the handle of another cache
        kivi_cache_destroy(cache);
        kivi_cache_destroy(cache);
        CHECK(kivi_cache_reset(cache, nullptr) == KIVI_ERROR_STATE);
        CHECK(contains(error(), "destroyed"));
    }
    for (kivi_cache* cache : seen) CHECK(kivi_cache_reset(cache, nullptr) == KIVI_ERROR_STATE);
}

TEST_CASE("slots are used again after many others") {
    kivi_config config = small_config();
    config.layer_count = 1;
    config.max_tokens = 1;
    std::set<kivi_cache*> seen;
    for (int i = 0; i < 5000; i++) {
        kivi_cache* cache;
        REQUIRE(kivi_cache_create(&config, &cache) == KIVI_OK);
        seen.insert(cache);
        kivi_cache_destroy(cache);
    }
    CHECK(seen.size() < 4000);
}

TEST_CASE("readers share a cache, and whoever needs it alone is refused meanwhile") {
    const TestCache cache(small_config());
    {
        const kivi::SharedUse one(cache), two(cache);
        CHECK(kivi_cache_reset(cache, nullptr) == KIVI_ERROR_STATE);
        CHECK(contains(error(), "in use"));
        CHECK(cache.length(0, 0) == 0);
    }
    {
        const kivi::ExclusiveUse alone(cache);
        kivi_length length;
        CHECK(kivi_sequence_length(cache, 0, 0, &length, sizeof length) == KIVI_ERROR_STATE);
        CHECK(kivi_cache_reset(cache, nullptr) == KIVI_ERROR_STATE);
    }
    CHECK(kivi_cache_reset(cache, nullptr) == KIVI_OK);
}

TEST_CASE("two threads that append to one cache: each call succeeds or is refused, and all are counted") {
    kivi_config config = small_config();
    config.max_tokens = 100000;
    TestCache cache(config);
    std::atomic<int> appended{0}, refused{0}, other{0};
    const auto work = [&](int32_t sequence) {
        for (int i = 0; i < 400; i++) {
            const kivi_status status = cache.append_layer(0, sequence, 3);
            (status == KIVI_OK ? appended : status == KIVI_ERROR_STATE ? refused : other)++;
        }
    };
    std::thread one(work, 0), two(work, 1);
    one.join();
    two.join();
    CHECK(other == 0);
    CHECK(appended + refused == 800);
    CHECK(cache.length(0, 0) + cache.length(0, 1) == 3 * appended);
}

TEST_CASE("destroy waits for a call in progress") {
    const kivi_config config = small_config();
    kivi_cache* cache;
    REQUIRE(kivi_cache_create(&config, &cache) == KIVI_OK);
    std::atomic<bool> destroyed{false};
    std::thread other;
    {
        const kivi::SharedUse use(cache);
        other = std::thread([&] {
            kivi_cache_destroy(cache);
            destroyed = true;
        });
        for (int i = 0; i < 1000; i++) std::this_thread::yield();
        CHECK(!destroyed);
        CHECK(use->model().max_tokens == 600);
    }
    other.join();
    CHECK(destroyed);
}

namespace {

// Runs `body` in the child of a fork; what it returns, or -1 if it did not end.
template <class Body>
int in_child(Body&& body) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        alarm(20);  // a hang ends as a failure
        _exit(body());
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A thread that is in the middle of a call while it lives.
template <class Use>
class Caller {
  public:
    explicit Caller(kivi_cache* cache) {
        thread_ = std::thread([this, cache] {
            const Use use(cache);
            inside_ = true;
            while (!leave_) std::this_thread::yield();
        });
        while (!inside_) std::this_thread::yield();
    }
    ~Caller() {
        leave_ = true;
        thread_.join();
    }

  private:
    std::atomic<bool> inside_{false}, leave_{false};
    std::thread thread_;
};

}  // namespace

TEST_CASE("after fork() calls of other threads do not hold a cache in the child") {
    TestCache cache(small_config());
    REQUIRE(cache.append_layer(0, 0, 3) == KIVI_OK);
    {
        const Caller<kivi::SharedUse> reader(cache);
        CHECK(cache.append_layer(0, 0, 3) == KIVI_ERROR_STATE);
        CHECK(in_child([&] {
                  if (cache.append_layer(0, 0, 3) != KIVI_OK || cache.length(0, 0) != 6) return 1;
                  kivi_cache_destroy(cache);
                  return cache.append_layer(0, 0, 3) == KIVI_ERROR_STATE ? 0 : 2;
              }) == 0);
    }
    CHECK(cache.append_layer(0, 0, 3) == KIVI_OK);
    CHECK(cache.length(0, 0) == 6);
}

TEST_CASE("after fork() a cache that another thread was changing is refused in the child, and destroy returns") {
    TestCache cache(small_config());
    {
        const Caller<kivi::ExclusiveUse> writer(cache);
        CHECK(in_child([&] {
                  if (cache.append_layer(0, 0, 3) != KIVI_ERROR_STATE) return 1;
                  kivi_cache_destroy(cache);
                  if (cache.append_layer(0, 0, 3) != KIVI_ERROR_STATE) return 2;
                  const kivi_config config = small_config();
                  kivi_cache* other = nullptr;
                  if (kivi_cache_create(&config, &other) != KIVI_OK) return 3;
                  kivi_cache_destroy(other);
                  return 0;
              }) == 0);
    }
    CHECK(cache.append_layer(0, 0, 3) == KIVI_OK);
}
