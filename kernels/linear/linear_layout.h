// The layout of packed bfloat16 weights, which narrower ones become on their way to the kernels (linear_narrow.h).
//
// W [N, K] is cut into panels of 32 columns of y, a panel into tiles of 32 steps of K (zeros past N and K):
// [ceil(N / 32)][ceil(K / 32)][2][16][16][2], that is 16 columns, 16 pairs of k, column, k of the pair. 1 KB,
// a tile of AMX, and in each 64 bytes an operand of vdpbf16ps. One thread reads its panels as one stream.
#pragma once

#include "linear/tile.h"

namespace quire {

constexpr int kTileColumns = 16;
constexpr int kPanelColumns = 2 * kTileColumns;
constexpr int kTileDepth = 32;
constexpr int kTileSize = kTileColumns * kTileDepth;  // numbers in a tile
constexpr int kStepSize = 2 * kTileSize;              // numbers of a panel for 32 steps of K

inline int count_panels(int N) { return (N + kPanelColumns - 1) / kPanelColumns; }

// Steps of kTileDepth that a panel has.
inline int count_steps(int K) { return (K + kTileDepth - 1) / kTileDepth; }

}  // namespace quire
