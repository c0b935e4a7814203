// What a whole forward pass is called with: a list of operations over named buffers, and a step's inputs.
// kernels/program/program.py mirrors these structs field by field. An operation is a kind, a struct of arguments, and a
// method of Pass in program.cpp.
// Legend: T tokens, R requests, S of them that sample, D head size.
#pragma once

#include "linear/experts.h"
#include "linear/linear.h"
#include "linear/xielu.h"
#include "norm/shared_norm.h"
#include "recurrent/causal_conv.h"
#include "recurrent/delta_rule.h"
#include "recurrent/mamba2.h"

#include <cstdint>

extern "C" {

// A buffer with a row for each token or for each sampling request; operations know it by its number. 0 is the
// caller's memory for the result. One that is whole has the rows of all parts of a step, for operations that read those
// of other parts; it is written again only after two such operations, when all parts have done with the first.
struct QuireSlot {
    int64_t row_bytes;
    int32_t is_sampled, is_whole;
};

// K and V of a layer.
struct QuireCache {
    void *k, *v;
    int32_t group, padding;  // of a step's tables and slots
};

// From 0 on, in the order of program.Kind.
enum QuireKind {
    QUIRE_EMBED, QUIRE_ANGLES, QUIRE_NORM, QUIRE_ADD_NORM, QUIRE_LINEAR, QUIRE_ROTATE, QUIRE_KEEP, QUIRE_ATTEND,
    QUIRE_ACTIVATE, QUIRE_WIDEN, QUIRE_SCALE, QUIRE_CAP, QUIRE_ROUTE, QUIRE_EXPERTS, QUIRE_ADD, QUIRE_LAYER_NORM,
    QUIRE_ADD_ROWS, QUIRE_ALL_REDUCE, QUIRE_SHARED_NORM, QUIRE_ENCODER_ATTEND, QUIRE_LOAD,
    QUIRE_SCALE_ROWS, QUIRE_XIELU, QUIRE_ROTATE_LATENT, QUIRE_MULTIPLY_HEADS, QUIRE_PRODUCT,
    QUIRE_CONVOLVE, QUIRE_DELTA_RULE, QUIRE_MAMBA2,
};

// y = rows of the table by token id. With num_rows above 0 the table has those of so many tokens from `first` on, and
// the row of any other token is 0. As QUIRE_LOAD: y = rows of the table by the token's place in the step.
struct QuireEmbed {
    const void* table;
    int32_t y, size, first, num_rows;
};

// x += rows of the table by position, or by the token's type.
struct QuireAddRows {
    const void* table;
    int32_t x, size, by_type, padding;
};

// Slots cos and sin = rows of the tables by position, or the step's own.
struct QuireAngles {
    const float *cos_table, *sin_table;  // [positions, D / 2]; null if each step brings its own
    int32_t cos, sin, half, rope;  // the last: which of the model's ropes
};

// y = norm(x); as QUIRE_ADD_NORM: residual += x, y = norm(residual). Of rows that are `stride` numbers long, the
// `size` numbers from `first` on, and so many after them for each further one of `count` norms.
struct QuireNorm {
    const void* weight;
    int32_t x, residual, y, first, size, stride;
    int32_t rounds_normed, count;
    float eps, weight_offset;
};

// y = layer norm of x; where `adds`, residual += x, y = layer norm of the residual, and y may be the residual.
struct QuireLayerNorm {
    const void *weight, *bias;  // bias: null where there is none
    int32_t x, residual, y, size, adds;
    float eps;
};

// residual += x. Where there is a gate, a slot with a number a row, x is multiplied by its sigmoid first; 0: none.
struct QuireAdd {
    int32_t x, residual, size, gate;
};

// float32 weights multiply a float32 slot, also where the model's type is another.
struct QuireMultiply {
    QuireLinear linear;
    int32_t x, y;
};

// Norms, rotates and, where it `writes`, writes to the caches what a linear layer has left in qkv. Nothing is rotated
// where cos is 0.
struct QuireRotate {
    const void *query_norm, *key_norm;  // null where the model has none
    int32_t qkv, cos, sin, layer;
    int32_t num_heads, num_kv_heads, head_size, stride, writes, norms_after;
    float eps;
};

// Goes on with the last token of each sampling request only; rows of these slots move up.
struct QuireKeep {
    const int32_t* slots;
    int32_t num_slots, padding;
};

// y = attention of the queries in qkv; K and V of the whole step must be in the caches.
struct QuireAttend {
    const float* sinks;  // [H], or null
    int32_t qkv, y, layer;
    int32_t num_heads, num_kv_heads, head_size, value_size;
    int32_t stride;  // numbers of a row of qkv
    int32_t window;  // larger than any length where there is no bound
    int32_t padding;
    float scale, soft_cap;    // soft_cap 0: none
};

// y = attention both ways, as quire_encoder_attention; qkv is a whole slot that holds the whole step.
struct QuireEncoderAttend {
    const float* bias;  // null: none
    int32_t qkv, y;
    int32_t num_heads, num_kv_heads, head_size;
    int32_t window, reach, padding;
    float scale, soft_cap;
};

struct QuireActivate {
    int32_t x, y, size;
    int32_t activation;  // a QuireActivation
};

// y = x as float32.
struct QuireWiden {
    int32_t x, y, size;
};

// x *= factor; x is of the model's type, so never what QUIRE_WIDEN has left.
struct QuireScale {
    int32_t x, size;
    float factor;
};

// x = cap * tanh(x / cap), in float32.
struct QuireCap {
    int32_t x, size;
    float cap;
};

// As quire_route.
struct QuireRoute {
    QuireRouter router;
    int32_t logits, choices, weights, is_float32;  // the last: the logits, whatever the model's type
};

// As quire_experts.
struct QuireExperts {
    const QuireLinear *gate_up, *down;  // [num_experts]
    int32_t x, choices, weights, routed, wide, gated, y;
    int32_t num_experts, per_token, activation, scales_inputs, padding;
};

// x = the sum of all ranks' x (quire_all_reduce); their steps have the same tokens.
struct QuireAllReduce {
    void* group;
    int32_t x, size;
};

// As quire_shared_norm, of the numbers from `first` on in rows of `stride`.
struct QuireNormOfRanks {
    QuireSharedNorm norm;
    int32_t x, first, stride, squares;
};

// The first `size` numbers of each row of x, which are `stride` long, *= the table's number by position.
struct QuireScaleRows {
    const float* table;
    int32_t x, size, stride, padding;
};

// x = xIELU of x.
struct QuireActivateXielu {
    QuireXielu numbers;
    int32_t x, size;
};

// As quire_rotate_latent.
struct QuireRotateLatent {
    int32_t query, y, latent, cos, sin, layer;
    int32_t num_heads, nope, rope, rank;
};

// As quire_multiply_heads.
struct QuireMultiplyHeads {
    const QuireLinear* layers;
    int32_t x, y, num_heads, x_stride, x_step, y_stride, y_step, padding;
};

// x *= act of the `size` numbers from `first` on of y's rows, which are `stride` long.
struct QuireProduct {
    int32_t x, y, first, size, stride;
    int32_t gate;  // a QuireGate
};

// As quire_causal_conv. Only in programs whose steps are not cut into parts.
struct QuireConvolve {
    QuireCausalConv conv;
    int32_t x, y, stride, padding;
};

// As quire_delta_rule, with `decay` and `beta` in some columns of two slots, or of one. As QUIRE_CONVOLVE no parts.
struct QuireAdvanceDelta {
    QuireDeltaRule rule;
    int32_t qkv, qkv_stride, decay, decay_first, decay_stride, beta, beta_first, beta_stride, y, padding;
};

// As quire_mamba2; dt is the numbers from `first` on of the rows of `steps`, which are `stride` long.
struct QuireScan {
    QuireMamba2 scan;
    int32_t x, steps, y, first, stride, padding;
};

struct QuireOperation {
    const void* arguments;  // the struct of its kind
    int32_t kind, padding;
};

struct QuireProgram {
    const QuireOperation* operations;
    const QuireSlot* slots;
    const QuireCache* caches;
    int32_t num_operations, num_slots;
    int32_t is_bf16, block_size;
    int32_t splits_tokens;  // 1: threads share a step's tokens, 0: they share each operation's work, as with ranks
    int32_t kv_format;      // of the caches, in narrow_cache.h
};

struct QuireStep {
    int64_t state_stride;  // numbers of a state slot
    int64_t *input_ids, *positions;          // [T]
    int64_t* slots;                          // [G, T] of G KV groups
    int64_t* types;                          // [T], or null: all are 0
    const float *cos, *sin;                  // [ropes, T, D / 2], or null: from the program's tables
    int32_t *query_starts, *seq_lens;        // [R + 1], [R]
    int32_t* block_tables;                   // [G, R, table_width]
    int64_t* sampling;                       // [S] of the R in rising order; null where nothing is sampled
    // Of recurrent layers, null without: as StepStates of worker/attention/metadata.py, of the whole step in each part.
    float* states;                           // [num_slots, state_stride]
    int32_t *state_slots, *save_starts;      // [R], [R + 1]
    int32_t *save_tokens, *save_slots;       // of all saves
    int32_t num_tokens, num_requests, num_sampling, table_width;
    int32_t num_parts;  // how many threads share it: quire_program_workspace writes it
    int32_t num_groups;
};

int quire_program_layout(int which);
int64_t quire_program_workspace(const QuireProgram* program, QuireStep* step);
int quire_program_run(const QuireProgram* program, const QuireStep* step, void* workspace, void* out);

}  // extern "C"
