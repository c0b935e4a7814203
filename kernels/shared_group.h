// Ranks that compute one model share memory: sums over ranks, rows side by side, bytes of rank 0. See shared_group.py.
#pragma once

#include <cstdint>

extern "C" {

// What an operation comes to. After the first that is not QUIRE_GROUP_OK every other one ends at once with
// QUIRE_GROUP_ABORTED, until quire_group_reset.
enum QuireGroupStatus { QUIRE_GROUP_OK, QUIRE_GROUP_ABORTED, QUIRE_GROUP_LOST };

// Takes the open file, unless it cannot be mapped: then null. Nobody is waited for.
void* quire_group_join(int fd, int rank, int size, int64_t slot_bytes, int spin_us);
void quire_group_leave(void* group);

// x[i] = sum over ranks, in the order of ranks, in float32, rounded once: the same bits in all of them.
int quire_all_reduce(void* group, void* x, int64_t count, int is_bf16);

// out[num_rows, sum of widths] = the ranks' rows of `width` bytes side by side; null: this rank only gives its own.
int quire_gather_slices(void* group, const void* rows, int64_t num_rows, int64_t width, void* out);

// data = rank 0's, which does not wait until the others have it.
int quire_broadcast(void* group, void* data, int64_t size);

// Ends what any rank does in the group, or begins before the next reset, with this text.
void quire_group_abort(void* group, const char* text, int size);
int quire_group_status(void* group);
int quire_group_abort_text(void* group, char* text, int size);  // its size

// All ranks call it, whatever each has done since the last time: afterwards they agree again.
int quire_group_reset(void* group);

}  // extern "C"
