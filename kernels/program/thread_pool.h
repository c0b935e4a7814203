// Threads of the CPU kernels: a job's tasks are shared by the caller and by helpers that may come late, or never.
//
// Each of them takes the tasks of its own run from the front, then those of the others from the back. So nobody
// waits for a thread that the system has not let run: what it would have done is done by the others, and the
// caller waits only for tasks that have begun. Which thread computes a task decides no bit of its result.
#pragma once

#include <algorithm>
#include <cstdint>

// Threads of a job from now on, the caller included; helpers are started when they are first needed.
extern "C" void quire_set_num_threads(int count);

namespace quire {

typedef void (*TaskFunction)(const void* context, int task);

int num_threads();

// function(context, task) once for each task from 0 on, which must not throw. In the caller alone where it is a
// task itself, or while another thread's job has the helpers.
void run_tasks(int num_tasks, TaskFunction function, const void* context);

// body(task) for each task; in the caller alone unless it `is_worth` the helpers.
template <typename Body>
void parallel_for(int num_tasks, bool is_worth, const Body& body) {
    if (num_tasks <= 1 || !is_worth || num_threads() == 1) {
        for (int task = 0; task < num_tasks; ++task) body(task);
        return;
    }
    run_tasks(num_tasks, [](const void* context, int task) { (*static_cast<const Body*>(context))(task); }, &body);
}

// body(first, last) over runs of [0, count), a few for each thread.
template <typename Body>
void parallel_runs(int64_t count, bool is_worth, const Body& body) {
    constexpr int kRunsPerThread = 4;
    const int runs = is_worth ? int(std::min<int64_t>(count, num_threads() * kRunsPerThread)) : 1;
    parallel_for(runs, is_worth, [&](int run) { body(count * run / runs, count * (run + 1) / runs); });
}

}  // namespace quire
