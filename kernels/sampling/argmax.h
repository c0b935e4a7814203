#pragma once

#include <cstdint>

namespace quire {

// The first place of the row's maximum, or of its first NaN.
int64_t find_largest(const float* row, int64_t size);

}  // namespace quire
