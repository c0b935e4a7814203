// The norm of one row, shared by rms_norm.cpp and rotate_and_write.cpp, and the norm of rows for callers in C++.
#pragma once

#include "linear/tile.h"

// x, residual (null: none; updated in place) and y are [T, D], their rows `stride` numbers apart; is_bf16: all of
// them, else float32. y may be x.
extern "C" void quire_rms_norm(int is_bf16, const void* x, void* residual, const void* weight, void* y, int rows,
                               int size, int stride, float eps, float weight_offset, int rounds_normed);

namespace quire {

// total += x, rounded to T.
template <typename T>
inline void add_row(const T* x, T* total, int size) {
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) store(total + i, load(total + i) + load(x + i));
    for (; i < size; ++i) total[i] = narrow<T>(widen(total[i]) + widen(x[i]));
}

template <typename T>
inline float sum_squares(const T* x, int size) {
    Vec squares = Vec{};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; ++i) total += widen(x[i]) * widen(x[i]);
    return total;
}

// y = x * factor * (offset + weight), and may be x. If rounds_normed, the first product is rounded to T.
template <typename T>
inline void scale_row(const T* x, const T* weight, T* y, int size, float factor, float weight_offset,
                      bool rounds_normed) {
    int i = 0;
    if (!rounds_normed) {
        for (i = 0; i + kLanes <= size; i += kLanes)
            store(y + i, load(x + i) * factor * (load(weight + i) + weight_offset));
        for (; i < size; ++i) y[i] = narrow<T>(widen(x[i]) * factor * (widen(weight[i]) + weight_offset));
        return;
    }
    T normed[kLanes];
    for (i = 0; i + kLanes <= size; i += kLanes) {
        store(normed, load(x + i) * factor);
        store(y + i, load(normed) * (load(weight + i) + weight_offset));
    }
    for (; i < size; ++i)
        y[i] = narrow<T>(widen(narrow<T>(widen(x[i]) * factor)) * (widen(weight[i]) + weight_offset));
}

// What numbers are scaled by of which `size` have this sum of squares.
inline float find_norm_factor(float squares, int size, float eps) {
    return 1.0f / std::sqrt(squares / float(size) + eps);
}

// y may be x.
template <typename T>
inline void norm_row(const T* x, const T* weight, T* y, int size, float eps, float weight_offset = 0.0f,
                     bool rounds_normed = true) {
    scale_row(x, weight, y, size, find_norm_factor(sum_squares(x, size), size, eps), weight_offset, rounds_normed);
}

}  // namespace quire
