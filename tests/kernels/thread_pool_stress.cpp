// Jobs of every size from two callers at once, with the number of threads changing: each task runs exactly once and
// is over when its job returns. Prints what it saw; test_thread_pool.py builds it with and without ThreadSanitizer.
#include "program/thread_pool.h"

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

constexpr int kJobs = 3000, kMaxTasks = 67;

std::atomic<int> g_wrong{0}, g_nested{0}, g_elsewhere{0};

void check_job(int num_tasks) {
    std::vector<int> runs(num_tasks);  // not atomic: a task that runs twice, or late, is a race
    const std::thread::id caller = std::this_thread::get_id();
    quire::parallel_for(num_tasks, true, [&](int task) {
        ++runs[task];
        if (std::this_thread::get_id() != caller) ++g_elsewhere;
        quire::parallel_for(2, true, [&](int) { ++g_nested; });
    });
    for (int count : runs) g_wrong += count != 1;
}

void check_runs(int count) {
    std::vector<int> seen(count);
    quire::parallel_runs(count, true, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) ++seen[i];
    });
    for (int times : seen) g_wrong += times != 1;
}

void call_many(int seed) {
    for (int job = 0; job < kJobs; ++job) {
        const int size = (job * 7 + seed) % (kMaxTasks + 1);
        check_job(size);
        check_runs(size);
    }
}

}  // namespace

int main() {
    quire_set_num_threads(4);
    call_many(0);
    std::thread other([] { call_many(3); });
    for (int i = 0; i < 200; ++i) {
        quire_set_num_threads(1 + i % 5);
        check_job(50);
    }
    call_many(5);
    other.join();
    std::printf("wrong %d nested %s elsewhere %s\n", g_wrong.load(), g_nested ? "some" : "none", g_elsewhere ? "some" : "none");
    return 0;
}
