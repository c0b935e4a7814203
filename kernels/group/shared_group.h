// Ranks that compute one model share memory: sums over ranks, rows side by side, bytes of rank 0. See shared_group.py.
#pragma once

#include <cstdint>

extern "C" {

// What an operation comes to. After the first that is not QUIRE_GROUP_OK every other one ends at once with
// QUIRE_GROUP_ABORTED, until quire_group_reset.
enum QuireGroupStatus { QUIRE_GROUP_OK, QUIRE_GROUP_ABORTED, QUIRE_GROUP_LOST };

// The same in all ranks. Operations are between the ranks of one stage; ring_bytes: a power of 2 from 4096 on, or 0
// where there is one stage.
struct QuireGroupShape {
    int64_t slot_bytes, ring_bytes;
    int32_t size, stage_size;  // ranks; of one stage
};

// Takes the open file, unless it cannot be mapped: then null. Nobody is waited for.
void* quire_group_join(int fd, int rank, const struct QuireGroupShape* shape, int spin_us);
void quire_group_leave(void* group);

// x[i] = sum over ranks, in the order of ranks, in float32, rounded once: the same bits in all of them.
int quire_all_reduce(void* group, void* x, int64_t count, int is_bf16);

// out[num_rows, sum of widths] = the ranks' rows of `width` bytes side by side; null: this rank only gives its own.
int quire_gather_slices(void* group, const void* rows, int64_t num_rows, int64_t width, void* out);

// data = rank 0's, which does not wait until the others have it.
int quire_broadcast(void* group, void* data, int64_t size);

// From the first rank of a stage to all ranks of the next, in a circle; what was sent first comes first. Who sends waits
// only while the ring is full. Each receives as many bytes at once as were sent at once.
int quire_group_send(void* group, const void* data, int64_t size);
int quire_group_receive(void* group, void* data, int64_t size);

// This rank has done a step more, for the core, which looks for the rank that the others wait for.
void quire_group_note_step(void* group);

// Ends what any rank does in the group, or begins before the next reset, with this text.
void quire_group_abort(void* group, const char* text, int size);
int quire_group_status(void* group);
int quire_group_abort_text(void* group, char* text, int size);  // its size

// All ranks call it, whatever each has done since the last time: afterwards they agree again.
int quire_group_reset(void* group);

}  // extern "C"
