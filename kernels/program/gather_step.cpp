// A step's inputs from the rows of its requests, as worker/steps/step_inputs.py says.
// Legend: T tokens, R requests of the step, W blocks of the widest table.
#include "program/program.h"

#include <algorithm>

// Host state of N rows; the owner keeps the arrays at their addresses. gather_step.py mirrors it field by field.
struct QuireRows {
    const int32_t* token_ids;                 // [N, token_stride]
    const int64_t *num_computed, *num_known;  // [N]
    const int32_t* block_ids;                 // [G, N, table_stride] of G KV groups
    const int64_t* windows;      // [G], larger than any length where there is no bound
    const int32_t* null_blocks;  // [G], whose keys and values are 0
    int64_t token_stride, table_stride, group_stride;
    int32_t block_size;
    int32_t max_tokens;  // of a step: what its arrays [T] hold
    int32_t num_groups, padding;
};

namespace {

enum Failure { kNone = 0, kNotKnown = 1, kTooLong = 2 };

// Token and position of `count` tokens of one row, from its computed count on.
void gather_tokens(const QuireRows& rows, int64_t row, int64_t count, QuireStep& step) {
    const int32_t* ids = rows.token_ids + row * rows.token_stride;
    const int64_t end = rows.num_computed[row] + count;
    int token = step.num_tokens;
    for (int64_t position = rows.num_computed[row]; position < end; ++position, ++token) {
        step.input_ids[token] = ids[position];
        step.positions[token] = position;
    }
    step.num_tokens = token;
}

// Slots [T] and tables [R, W] of a step's requests in one group. Blocks that no token of the step sees may be
// another's by now: kernels, which read whole tiles, find zeros in their place.
void gather_group(const QuireRows& rows, int group, const int64_t* row_ids, const QuireStep& step) {
    const int64_t size = rows.block_size;
    int64_t* slots = step.slots + size_t(group) * step.num_tokens;
    int32_t* tables = step.block_tables + size_t(group) * step.num_requests * step.table_width;
    for (int r = 0; r < step.num_requests; ++r, tables += step.table_width) {
        const int32_t* blocks = rows.block_ids + group * rows.group_stride + row_ids[r] * rows.table_stride;
        const int64_t first = std::max<int64_t>(0, rows.num_computed[row_ids[r]] - rows.windows[group] + 1) / size;
        std::fill_n(tables, first, rows.null_blocks[group]);
        std::copy(blocks + first, blocks + step.table_width, tables + first);
        for (int t = step.query_starts[r]; t < step.query_starts[r + 1]; ++t)
            slots[t] = blocks[step.positions[t] / size] * size + step.positions[t] % size;
    }
}

}  // namespace

// Fills the arrays of `step` but for cos, sin and sampling, and its other counts. Returns 0, or 1 if a row has to
// compute tokens that are not known, 2 if the step has more than max_tokens; the arrays are undefined then.
extern "C" int quire_gather_step(const QuireRows* rows, const int64_t* row_ids, const int64_t* num_tokens,
                                 int num_requests, QuireStep* step) {
    step->num_requests = num_requests;
    step->num_tokens = 0;
    step->query_starts[0] = 0;
    int64_t longest = 0;
    for (int r = 0; r < num_requests; ++r) {
        const int64_t row = row_ids[r], seq_len = rows->num_computed[row] + num_tokens[r];
        if (seq_len > rows->num_known[row]) return kNotKnown;
        if (step->num_tokens + num_tokens[r] > rows->max_tokens) return kTooLong;
        gather_tokens(*rows, row, num_tokens[r], *step);
        step->query_starts[r + 1] = step->num_tokens;
        step->seq_lens[r] = int32_t(seq_len);
        longest = std::max(longest, seq_len);
    }
    step->table_width = int32_t((longest + rows->block_size - 1) / rows->block_size);
    step->num_groups = rows->num_groups;
    for (int group = 0; group < rows->num_groups; ++group) gather_group(*rows, group, row_ids, *step);
    return kNone;
}
