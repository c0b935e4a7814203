// The norm of rows that ranks have shared out; the formula is in rms_norm.py.
#pragma once

#include <cstdint>

extern "C" {

struct QuireSharedNorm {
    const void* weight;        // [size]
    void* group;               // as of quire_all_reduce
    int32_t size, total_size;  // numbers of a row that this rank has, and that all have
    int32_t counts;            // 0: another rank has the same ones, and it is their squares that count
    int32_t rounds_normed;
    float eps, weight_offset;
};

// x, `rows` rows that are `stride` numbers apart, becomes its norm; is_bf16: x and weight, else float32. `squares`
// [rows] is scratch. Returns a QuireGroupStatus.
int quire_shared_norm(int is_bf16, const QuireSharedNorm* norm, void* x, int rows, int stride, float* squares);
}
