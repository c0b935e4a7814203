// From the rows of live requests to a step's inputs; kernels/gather_step.py mirrors QuireRows field by field.
#pragma once

#include "program.h"

extern "C" {

// Host state of N rows; the owner keeps the arrays at their addresses.
struct QuireRows {
    const int32_t* token_ids;                 // [N, token_stride]
    const int64_t *num_computed, *num_known;  // [N]
    const int32_t* block_ids;                 // [N, table_stride]
    int64_t token_stride, table_stride;
    int32_t block_size;
    int32_t max_tokens;  // of a step: what its arrays [T] hold
};

int quire_gather_step(const QuireRows* rows, const int64_t* row_ids, const int64_t* num_tokens, int num_requests,
                      QuireStep* step);
}
