// Threads of one cache; the protocol is described in thread_pool.h.
#include "cpu/thread_pool.h"

#include <cfenv>
#include <chrono>
#include <csignal>
#include <system_error>

#include <pthread.h>
#include <unistd.h>

namespace kivi::cpu {
namespace {

// Long enough to bridge the gap between two layers of a decode step, short enough to cost nothing at rest.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesBetweenLooks = 64;
// Workers are inside a job for one more item at most; one that lost its core takes far longer than this.
constexpr int kPausesBeforeYield = 4096;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Signals belong to the program's own threads.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

}  // namespace

ThreadPool::ThreadPool(int threads) : process_(getpid()) {
    sem_init(&wake_, 0, 0);
    if (threads <= 1) return;
    handles_ = std::make_unique<std::thread[]>(threads - 1);
    SignalsBlocked blocked;
    try {
        for (; workers_ < threads - 1; ++workers_) {
            const int thread = workers_ + 1;
            handles_[workers_] = std::thread([this, thread] { work(thread); });
        }
    } catch (const std::system_error&) {
        // The system has no more threads: those that run will do.
    }
}

ThreadPool::~ThreadPool() {
    if (process_ != getpid()) {
        // After fork() there are no workers to join, but their marks on the semaphore remain.
        (void)handles_.release();
        return;
    }
    stop_.store(true);
    wake();
    for (int i = 0; i < workers_; ++i) handles_[i].join();
    sem_destroy(&wake_);
}

void ThreadPool::parallel(int64_t items, Task task, void* context) {
    const bool alone = workers_ == 0 || items <= 1 || process_ != getpid() || busy_.exchange(true);
    if (alone) {
        std::atomic<int64_t> next{0};
        for (int64_t i = 0; i < items; ++i) {
            next.store(i + 1, std::memory_order_relaxed);
            task(context, i, 0, next);
        }
        return;
    }
    task_ = task;
    context_ = context;
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    open_.store(++jobs_);
    wake();
    run_items(0);
    // Closed first, counted second; workers enter in the opposite order, so none slips through.
    open_.store(0);
    for (int looks = 0; inside_.load() != 0; ++looks) {
        if (looks < kPausesBeforeYield) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
    busy_.store(false);
}

void ThreadPool::run_items(int thread) {
    for (;;) {
        const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
        if (item >= items_) return;
        task_(context_, item, thread, next_);
    }
}

bool ThreadPool::has_news(uint64_t last) const {
    const uint64_t job = open_.load();
    return stop_.load() || (job != 0 && job != last);
}

// Number of an open job that is not `last`; 0 when the pool ends.
uint64_t ThreadPool::wait_for_job(uint64_t last) {
    for (;;) {
        const auto until = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < kPausesBetweenLooks; ++i) {
                if (stop_.load()) return 0;
                const uint64_t job = open_.load();
                if (job != 0 && job != last) return job;
                pause();
            }
        } while (std::chrono::steady_clock::now() < until);
        sleep(last);
    }
}

// Worker and caller act in opposite orders, and atomics are sequentially consistent here: the worker counts itself,
// then looks for news; the caller publishes news, then takes the count. So a worker sees the news or is counted.
// One that is done with a job may take the rise that was meant for another: it looks, counts itself and sleeps
// again, and the other one misses that job, which the caller finishes without it.
void ThreadPool::sleep(uint64_t last) {
    asleep_.fetch_add(1);
    if (has_news(last)) {
        // Not to sleep after all: off the count again, unless the caller has taken it and the semaphore will rise.
        int asleep = asleep_.load();
        while (asleep > 0) {
            if (asleep_.compare_exchange_weak(asleep, asleep - 1)) return;
        }
    }
    while (sem_wait(&wake_) != 0) continue;  // interrupted by a signal
}

void ThreadPool::wake() {
    if (asleep_.load() == 0) return;
    for (int sleepers = asleep_.exchange(0); sleepers > 0; --sleepers) sem_post(&wake_);
}

void ThreadPool::work(int thread) {
    std::fesetenv(FE_DFL_ENV);  // threads inherit rounding mode and flush-to-zero from whoever made the cache
    uint64_t last = 0;
    while (const uint64_t job = wait_for_job(last)) {
        last = job;
        inside_.fetch_add(1);
        if (open_.load() == job) run_items(thread);
        inside_.fetch_sub(1);
    }
}

}  // namespace kivi::cpu
