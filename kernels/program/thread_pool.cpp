// The threads behind thread_pool.h. A thread without work looks for some for kSpin, then sleeps: inside a forward
// pass the next job follows within microseconds, between steps nobody may burn a core.
#include "program/thread_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include <pthread.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);  // to wake a sleeper takes 5 to 50
constexpr int kLooksPerClock = 16;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `is_over` came true within kSpin.
template <typename Condition>
bool spin_until(const Condition& is_over) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kLooksPerClock; ++i) {
            if (is_over()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
}

// Where threads sleep until a condition holds. Who makes it true calls wake() afterwards, which costs a load if
// nobody sleeps. Conditions and what makes them true use sequentially consistent atomics: either the sleeper
// sees the change, or the waker sees the sleeper.
class EventCount {
  public:
    template <typename Condition>
    void sleep_until(const Condition& is_over) {
        std::unique_lock<std::mutex> lock(mutex_);
        ++num_sleepers_;
        changed_.wait(lock, is_over);
        --num_sleepers_;
    }

    void wake() {
        if (num_sleepers_ == 0) return;
        { std::lock_guard<std::mutex> lock(mutex_); }
        changed_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::atomic<int> num_sleepers_{0};
};

// Tasks [first, last) that nobody has taken yet, in one word.
class alignas(64) Run {
  public:
    void set(uint32_t first, uint32_t last) { word_.store(uint64_t(first) << 32 | last, std::memory_order_release); }

    // The first of them, or the last.
    template <bool is_first>
    bool take(int& task) {
        uint64_t word = word_.load(std::memory_order_acquire);
        while (first(word) < last(word))
            if (word_.compare_exchange_weak(word, is_first ? word + (uint64_t(1) << 32) : word - 1,
                                            std::memory_order_acq_rel, std::memory_order_acquire)) {
                task = int(is_first ? first(word) : last(word) - 1);
                return true;
            }
        return false;
    }

  private:
    static uint32_t first(uint64_t word) { return uint32_t(word >> 32); }
    static uint32_t last(uint64_t word) { return uint32_t(word); }

    std::atomic<uint64_t> word_{0};
};

thread_local bool t_is_in_task = false;

// One job at a time. A task that was taken keeps its job alive until it is reported, so what a thread reads after
// taking one belongs to it, however late the thread comes.
class Pool {
  public:
    void set_size(int size) { size_ = std::clamp(size, 1, kMaxThreads); }
    int size() const { return size_.load(std::memory_order_relaxed); }

    // False, with nothing done, while another thread's job runs.
    bool run(int num_tasks, TaskFunction function, const void* context) {
        const std::unique_lock<std::mutex> lock(job_mutex_, std::try_to_lock);
        if (!lock) return false;
        const int size = std::min(this->size(), num_tasks);
        start_helpers(size);
        function_ = function;
        context_ = context;
        num_unfinished_.store(num_tasks, std::memory_order_relaxed);
        for (int i = 0; i < size; ++i)
            runs_[i].set(uint32_t(int64_t(num_tasks) * i / size), uint32_t(int64_t(num_tasks) * (i + 1) / size));
        job_size_.store(size, std::memory_order_relaxed);
        ++num_jobs_;
        helpers_event_.wake();
        report(work(0, size));
        const auto is_done = [&] { return num_unfinished_ == 0; };
        if (!spin_until(is_done)) caller_event_.sleep_until(is_done);
        return true;
    }

  private:
    static constexpr int kMaxThreads = 256;

    void start_helpers(int size) {
        if (num_helpers_ + 1 >= size) return;
        sigset_t all, before;  // a signal is for a thread that may be waiting for one
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; num_helpers_ + 1 < size; ++num_helpers_)
                std::thread([this, index = num_helpers_ + 1] { help(index); }).detach();
        } catch (const std::system_error&) {  // no more threads for this user: those that are there do the work
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    [[noreturn]] void help(int index) {
        for (uint32_t seen = 0;;) {
            const auto is_new = [&] { return num_jobs_ != seen; };
            if (!spin_until(is_new)) helpers_event_.sleep_until(is_new);
            seen = num_jobs_;
            const int size = job_size_.load(std::memory_order_relaxed);
            if (index < size) report(work(index, size));
        }
    }

    // Takes tasks until there are none left; how many it did. All of one job: it cannot end before they are reported.
    int work(int self, int size) {
        int count = 0, task;
        t_is_in_task = true;
        for (; runs_[self].take<true>(task); ++count) function_(context_, task);
        for (int i = 1; i < size; ++i)
            for (Run& run = runs_[(self + i) % size]; run.take<false>(task); ++count) function_(context_, task);
        t_is_in_task = false;
        return count;
    }

    void report(int count) {
        if (count > 0 && num_unfinished_.fetch_sub(count) == count) caller_event_.wake();
    }

    std::atomic<int> size_{int(std::max(1u, std::thread::hardware_concurrency()))};
    std::mutex job_mutex_;
    int num_helpers_ = 0;
    TaskFunction function_ = nullptr;
    const void* context_ = nullptr;
    std::atomic<int> num_unfinished_{0}, job_size_{0};
    std::atomic<uint32_t> num_jobs_{0};
    EventCount helpers_event_, caller_event_;
    Run runs_[kMaxThreads];
};

// Never destroyed: helpers outlive whatever the process does at its exit.
Pool& pool() {
    static Pool* const pool = new Pool;
    return *pool;
}

// A fork has none of the helper threads, but their locks and counts as they were: the pool is made anew.
void renew_pool() {
    const int size = pool().size();
    (new (&pool()) Pool)->set_size(size);
}

[[maybe_unused]] const int g_is_registered = pthread_atfork(nullptr, nullptr, renew_pool);

}  // namespace

int num_threads() { return t_is_in_task ? 1 : pool().size(); }

void run_tasks(int num_tasks, TaskFunction function, const void* context) {
    if (!t_is_in_task && pool().run(num_tasks, function, context)) return;
    for (int task = 0; task < num_tasks; ++task) function(context, task);
}

}  // namespace quire

extern "C" void quire_set_num_threads(int count) { quire::pool().set_size(count); }
