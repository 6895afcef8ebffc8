// Threads: caches are independent, const calls on one cache run together, and conflicting use of one cache is
// refused with KIVI_ERROR_STATE instead of damaging it ([THREAD-1]).
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kivi/kivi.hpp"

namespace {

constexpr int kQHeads = 4, kKvHeads = 2, kDim = 64;

std::vector<float> normal(size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution;
    std::vector<float> values(count);
    for (float& value : values) value = distribution(random);
    return values;
}

kivi::Cache make_cache(int layers, int sequences, int64_t tokens, int threads) {
    kivi::Config config("k3v2");
    config.layers(layers, kQHeads, kKvHeads, kDim).capacity(sequences, tokens).threads(threads);
    return kivi::Cache(config);
}

void append(kivi::Cache& cache, int layer, int count, unsigned seed) {
    const auto k = normal(static_cast<size_t>(count) * kKvHeads * kDim, seed);
    const auto v = normal(k.size(), seed + 1000);
    cache.append(layer, kivi::Batch(1, count), {k, {1, count, kKvHeads, kDim}}, {v, {1, count, kKvHeads, kDim}});
}

std::vector<float> attend(const kivi::Cache& cache, int layer, unsigned seed, kivi::Workspace& workspace) {
    const auto q = normal(kQHeads * kDim, seed);
    std::vector<float> out(q.size());
    cache.attend(layer, kivi::Batch(1, 1), {q, {1, 1, kQHeads, kDim}}, {out, {1, 1, kQHeads, kDim}}, workspace);
    return out;
}

// A whole life of one cache; the last output.
std::vector<float> decode(int threads, unsigned seed) {
    kivi::Cache cache = make_cache(2, 1, 512, threads);
    kivi::Workspace workspace = cache.workspace(1, 1);
    std::vector<float> out;
    for (int layer = 0; layer < 2; ++layer) append(cache, layer, 200, seed + static_cast<unsigned>(layer));
    for (unsigned step = 0; step < 40; ++step)
        for (int layer = 0; layer < 2; ++layer) {
            append(cache, layer, 1, seed + step);
            out = attend(cache, layer, seed + step, workspace);
        }
    return out;
}

// Runs `work(index)` on `count` threads at once.
template <class Work>
void together(int count, Work work) {
    std::atomic<int> waiting{count};
    std::vector<std::thread> threads;
    for (int index = 0; index < count; ++index)
        threads.emplace_back([&, index] {
            --waiting;
            while (waiting > 0) std::this_thread::yield();
            work(index);
        });
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST_CASE("many caches in many threads give what each gives alone") {
    constexpr int kThreads = 6;
    std::vector<std::vector<float>> alone, result(kThreads);
    for (unsigned index = 0; index < kThreads; ++index) alone.push_back(decode(1, 10 * index));
    together(kThreads, [&](int index) { result[index] = decode(1 + index % 2, 10u * static_cast<unsigned>(index)); });
    for (int index = 0; index < kThreads; ++index) CHECK(result[index] == alone[index]);
}

TEST_CASE("attends on one cache run together, each with its own workspace, bit for bit") {
    for (const int pool : {1, 3}) {
        kivi::Cache cache = make_cache(1, 1, 1024, pool);
        append(cache, 0, 700, 1);
        constexpr int kThreads = 4, kCalls = 25;
        std::vector<std::vector<float>> expected;
        kivi::Workspace workspace = cache.workspace(1, 1);
        for (unsigned call = 0; call < kCalls; ++call) expected.push_back(attend(cache, 0, call, workspace));
        std::atomic<int> differing{0};
        together(kThreads, [&](int) {
            kivi::Workspace own = cache.workspace(1, 1);
            for (unsigned call = 0; call < kCalls; ++call) differing += attend(cache, 0, call, own) != expected[call];
        });
        CHECK(differing == 0);
    }
}

TEST_CASE("every const call runs beside attend") {
    kivi::Cache cache = make_cache(1, 1, 512, 2);
    append(cache, 0, 400, 3);
    const auto blob = cache.export_sequence(0);
    kivi::Workspace workspace = cache.workspace(1, 1);
    const auto expected = attend(cache, 0, 5, workspace);
    std::atomic<int> wrong{0};
    together(4, [&](int index) {
        kivi::Workspace own = cache.workspace(1, 1);
        std::vector<float> k(400 * kKvHeads * kDim);
        for (int call = 0; call < 10; ++call) {
            if (index == 0) wrong += cache.export_sequence(0) != blob;
            if (index == 1) wrong += cache.length(0, 0).length != 400 || cache.statistics().tokens != 400;
            if (index == 2) {
                const kivi::Tensor view(k, {400, kKvHeads, kDim});
                cache.dequantize(0, 0, 0, 400, &view, nullptr);
            }
            wrong += attend(cache, 0, 5, own) != expected;
        }
    });
    CHECK(wrong == 0);
}

TEST_CASE("[THREAD-1] conflicting use of one cache is refused and changes nothing") {
    constexpr int kTokens = 2048, kPrompt = 1024;
    const auto k = normal(static_cast<size_t>(kPrompt) * kKvHeads * kDim, 1);
    const kivi::ConstTensor prompt(k, {1, kPrompt, kKvHeads, kDim});
    kivi::Cache cache = make_cache(1, 1, kTokens, 1);
    std::atomic<bool> stop{false};
    std::atomic<int> refused{0}, unexpected{0};

    // One thread attends without a pause, the other appends prompts, by turns with and without attention, and resets.
    kivi::Workspace workspace = cache.workspace(1, 1), own = cache.workspace(1, kPrompt);
    const auto q = normal(static_cast<size_t>(kPrompt) * kQHeads * kDim, 2);
    const std::vector<float> untouched(q.size(), 7.0f);
    std::vector<float> out;
    std::thread reader([&] {
        while (!stop) {
            try {
                attend(cache, 0, 7, workspace);
            } catch (const kivi::Error& error) {
                error.status() == KIVI_ERROR_STATE && error.what()[0] ? ++refused : ++unexpected;
            }
        }
    });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    int prompts = 0;
    while (refused < 3 && std::chrono::steady_clock::now() < deadline) {
        out = untouched;
        try {
            if (prompts * kPrompt == kTokens) {
                cache.reset();
                prompts = 0;
            }
            if (prompts % 2 == 0) {
                cache.step(0, kivi::Batch(1, kPrompt), {q, {1, kPrompt, kQHeads, kDim}}, prompt, prompt,
                           {out, {1, kPrompt, kQHeads, kDim}}, own);
            } else {
                cache.append(0, kivi::Batch(1, kPrompt), prompt, prompt);
            }
            ++prompts;
        } catch (const kivi::Error& error) {
            error.status() == KIVI_ERROR_STATE && out == untouched ? ++refused : ++unexpected;
        }
    }
    stop = true;
    reader.join();
    CHECK(refused >= 3);
    CHECK(unexpected == 0);
    // The calls that returned success took effect, the others did not: an undisturbed cache is the same.
    kivi::Cache calm = make_cache(1, 1, kTokens, 1);
    for (int done = 0; done < prompts; ++done) calm.append(0, kivi::Batch(1, kPrompt), prompt, prompt);
    REQUIRE(cache.length(0, 0).length == calm.length(0, 0).length);
    CHECK(cache.export_sequence(0) == calm.export_sequence(0));
}

TEST_CASE("[FAIL-2] the last error belongs to its thread") {
    kivi::Cache cache = make_cache(1, 1, 64, 1);
    CHECK_THROWS_AS(cache.length(0, 77), kivi::Error);
    const std::string mine = kivi_last_error();
    CHECK(mine.find("77") != std::string::npos);
    std::string fresh = "unset", theirs;
    std::thread other([&] {
        fresh = kivi_last_error();
        try {
            cache.length(0, 99);
        } catch (const kivi::Error&) {
        }
        theirs = kivi_last_error();
    });
    other.join();
    CHECK(fresh.empty());
    CHECK(theirs.find("99") != std::string::npos);
    CHECK(kivi_last_error() == mine);
}

TEST_CASE("a cache may be used and destroyed on another thread than the one that made it") {
    kivi::Cache cache = make_cache(1, 1, 512, 2);
    append(cache, 0, 300, 9);
    kivi::Workspace workspace = cache.workspace(1, 1);
    const auto here = attend(cache, 0, 4, workspace);
    std::vector<float> there;
    std::thread([&, moved = std::move(cache)]() mutable {
        kivi::Workspace own = moved.workspace(1, 1);
        there = attend(moved, 0, 4, own);
        kivi::Cache ends_here = std::move(moved);
    }).join();
    CHECK(there == here);
}

TEST_CASE("after fork the child attends on its own thread and agrees") {
    kivi::Cache cache = make_cache(1, 1, 512, 2);
    append(cache, 0, 300, 9);
    kivi::Workspace workspace = cache.workspace(1, 1);
    const auto expected = attend(cache, 0, 4, workspace);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        alarm(60);  // a hang ends as a failure
        int result = 2;
        try {
            result = attend(cache, 0, 4, workspace) == expected ? 0 : 1;
        } catch (...) {
        }
        _exit(result);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    CHECK(attend(cache, 0, 4, workspace) == expected);
}
