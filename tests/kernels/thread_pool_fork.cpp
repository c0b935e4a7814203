// Processes forked from one whose helpers sleep, each with more threads from job to job: prints how many did not
// run every task, or were not done after kDeadlineS.
#include "program/thread_pool.h"

#include <atomic>
#include <cstdio>

#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int kForks = 10, kJobs = 20, kTasks = 50, kDeadlineS = 5;
constexpr int kUntilAsleepUs = 1000;  // helpers without work look for some for 50

bool runs_all() {
    std::atomic<int> runs{0};
    quire::parallel_for(kTasks, true, [&](int) { ++runs; });
    return runs == kTasks;
}

int run_child() {
    alarm(kDeadlineS);
    int wrong = 0;
    for (int job = 0; job < kJobs; ++job) {
        quire_set_num_threads(2 + job % 9);
        wrong += !runs_all();
        usleep(kUntilAsleepUs);
    }
    return wrong != 0;
}

}  // namespace

int main() {
    quire_set_num_threads(4);
    int failed = 0;
    for (int i = 0; i < kForks && failed == 0; ++i) {
        runs_all();
        usleep(kUntilAsleepUs);
        const pid_t child = fork();
        if (child == 0) _exit(run_child());
        int status = 0;
        failed += waitpid(child, &status, 0) != child || status != 0;
    }
    std::printf("failed %d\n", failed);
    return 0;
}
