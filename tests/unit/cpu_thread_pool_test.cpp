// The thread pool: every item once, concurrent and nested loops, a pool that came through fork().
#include <doctest/doctest.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "cpu/thread_pool.h"

using kivi::cpu::ThreadPool;

TEST_CASE("every item runs exactly once, whatever the number of items and threads") {
    for (int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        for (int loop = 0; loop < 2000; ++loop) {
            const int64_t items = loop % 37;
            std::vector<int> hits(items, 0);
            pool.parallel(items, [&](int64_t item, int thread) {
                if (thread >= 0 && thread < pool.threads()) ++hits[item];
            });
            for (int hit : hits) REQUIRE(hit == 1);
            if (loop % 500 == 499) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // workers sleep
        }
    }
}

TEST_CASE("workers that sleep or are about to are woken, all of them, loop after loop") {
    using namespace std::chrono;
    ThreadPool pool(3);
    for (int loop = 0; loop < 6000; ++loop) {
        // Workers look for work for about 50 us before they sleep: gaps on both sides of that.
        const auto until = steady_clock::now() + nanoseconds(loop % 50 == 0 ? 500000 : 48000 + loop % 80 * 100);
        while (steady_clock::now() < until) std::this_thread::yield();
        std::atomic<int> met{0};
        pool.parallel(3, [&](int64_t, int) {  // no thread gets on before all three have an item
            ++met;
            const auto patience = steady_clock::now() + seconds(20);
            while (met < 3 && steady_clock::now() < patience) std::this_thread::yield();
        });
        const int together = met;
        REQUIRE(together == 3);
    }
}

TEST_CASE("a pool ends whatever its workers are doing") {
    using namespace std::chrono;
    for (int life = 0; life < 200; ++life) {
        ThreadPool pool(3);
        if (life % 2 == 0) pool.parallel(8, [](int64_t, int) {});
        const auto until = steady_clock::now() + microseconds(life % 5 == 0 ? 300 : life % 90);
        while (steady_clock::now() < until) std::this_thread::yield();
    }
}

TEST_CASE("two loops at once and a loop inside a loop both finish") {
    ThreadPool pool(3);
    std::atomic<int64_t> sum{0};
    const auto many = [&] {
        for (int loop = 0; loop < 300; ++loop) {
            pool.parallel(16, [&](int64_t, int) {
                pool.parallel(3, [&](int64_t item, int) { sum.fetch_add(item); });
            });
        }
    };
    std::thread other(many);
    many();
    other.join();
    CHECK(sum.load() == 2 * 300 * 16 * 3);
}

TEST_CASE("workers start with round to nearest whatever the creator's mode is") {
    std::fesetround(FE_UPWARD);
    ThreadPool pool(2);
    std::fesetround(FE_TONEAREST);
    std::atomic<bool> worker_ran{false}, wrong{false};
    for (int loop = 0; loop < 1000 && !worker_ran; ++loop) {
        pool.parallel(64, [&](int64_t, int thread) {
            if (thread > 0) worker_ran = true;
            if (std::fegetround() != FE_TONEAREST) wrong = true;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        });
    }
    CHECK(worker_ran);
    CHECK(!wrong);
}

TEST_CASE("after fork() the child runs loops on its own thread and can destroy the pool") {
    auto* pool = new ThreadPool(2);
    pool->parallel(8, [](int64_t, int) {});
    const pid_t child = fork();
    if (child == 0) {
        int ran = 0;
        pool->parallel(8, [&](int64_t, int thread) { ran += thread == 0; });
        delete pool;
        _exit(ran == 8 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    delete pool;
}
