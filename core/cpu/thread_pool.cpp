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

ThreadPool::ThreadPool(int threads) : process_(getpid()), bed_(std::make_unique<Bed>()) {
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
        // After fork() there are no workers to join, but their marks on what they slept on remain.
        (void)handles_.release();
        (void)bed_.release();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(bed_->mutex);
        stop_.store(true);
    }
    bed_->wake.notify_all();
    for (int i = 0; i < workers_; ++i) handles_[i].join();
}

void ThreadPool::parallel(int64_t items, Task task, void* context) {
    const bool alone = workers_ == 0 || items <= 1 || process_ != getpid() || busy_.exchange(true);
    if (alone) {
        for (int64_t i = 0; i < items; ++i) task(context, i, 0);
        return;
    }
    task_ = task;
    context_ = context;
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    open_.store(++jobs_);
    if (asleep_.load() > 0) {
        {
            std::lock_guard<std::mutex> lock(bed_->mutex);
        }  // a worker about to sleep has looked at open_ or will
        bed_->wake.notify_all();
    }
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
        task_(context_, item, thread);
    }
}

// Number of an open job that is not `last`; 0 when the pool ends.
uint64_t ThreadPool::wait_for_job(uint64_t last) {
    const auto ready = [&](uint64_t job) { return job != 0 && job != last; };
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kPausesBetweenLooks; ++i) {
            const uint64_t job = open_.load();
            if (ready(job)) return job;
            if (stop_.load(std::memory_order_relaxed)) return 0;
            pause();
        }
    } while (std::chrono::steady_clock::now() < until);

    std::unique_lock<std::mutex> lock(bed_->mutex);
    asleep_.fetch_add(1);
    uint64_t job = 0;
    bed_->wake.wait(lock, [&] {
        job = open_.load();
        return ready(job) || stop_.load();
    });
    asleep_.fetch_sub(1);
    return stop_.load() ? 0 : job;
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
