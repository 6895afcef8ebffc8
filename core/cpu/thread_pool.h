// Threads of one cache: short parallel loops, started within microseconds, without allocation.
//
//   caller    publishes a job, wakes sleepers, takes items itself, closes the job, waits for the workers inside it
//   worker    spins for a moment, then sleeps; enters an open job, takes items, leaves
//
// Items are claimed one by one from a counter, so a slow thread takes fewer. A pool that is in use (two
// attends at once, a nested call) or that came through fork() runs the loop on the caller's thread.
//
// There is no lock: all shared state is atomic words, and a sleeper waits on a semaphore, which the caller raises
// (a system call) only where somebody sleeps. The caller waits for a worker only at the end, while one that has
// claimed an item still works on it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>

#include <semaphore.h>

namespace kivi::cpu {

class ThreadPool {
  public:
    // next: the first item that no thread has claimed, a guess at what this thread's next one will be.
    using Task = void (*)(void* context, int64_t item, int thread, const std::atomic<int64_t>& next);

    // `threads` counts the caller's. Fewer run if the system refuses to start them.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return workers_ + 1; }

    // task(context, item, thread, next) for every item in [0, items); thread is in [0, threads()) and no two
    // calls of one loop with the same thread overlap. Tasks must not throw. A body may leave `next` out.
    void parallel(int64_t items, Task task, void* context);

    template <class Body>
    void parallel(int64_t items, const Body& body) {
        const Task call = [](void* context, int64_t item, int thread, const std::atomic<int64_t>& next) {
            const Body& run = *static_cast<const Body*>(context);
            if constexpr (std::is_invocable_v<const Body&, int64_t, int, const std::atomic<int64_t>&>) {
                run(item, thread, next);
            } else {
                run(item, thread);
            }
        };
        parallel(items, call, const_cast<void*>(static_cast<const void*>(&body)));
    }

  private:
    void work(int thread);
    uint64_t wait_for_job(uint64_t last);
    bool has_news(uint64_t last) const;
    void sleep(uint64_t last);
    void wake();
    void run_items(int thread);

    int workers_ = 0;
    int64_t process_ = 0;  // the process that owns the workers
    std::unique_ptr<std::thread[]> handles_;

    std::atomic<bool> busy_{false};

    // The job: written by the caller while it is closed and nobody is inside.
    Task task_ = nullptr;
    void* context_ = nullptr;
    int64_t items_ = 0;

    alignas(64) std::atomic<uint64_t> open_{0};  // number of the open job, 0: none
    alignas(64) std::atomic<int64_t> next_{0};   // first item that nobody has claimed
    alignas(64) std::atomic<int> inside_{0};     // workers that may touch the job
    uint64_t jobs_ = 0;

    // Workers that sleep, or are about to, are counted in asleep_; who lowers it by n owes the semaphore n.
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    sem_t wake_;
};

}  // namespace kivi::cpu
