// What a whole forward pass is called with; kernels/decoder.py mirrors these structs field by field.
// Legend: T tokens, R requests, S of them that sample, D head size.
#pragma once

#include <cstdint>

extern "C" {

// What quire_linear is called with; scales and bias are null where there are none.
struct QuireLinear {
    const void* packed;
    const float* scales;
    const void* bias;
    int32_t num_in, num_out, variant, format;
};

struct QuireLayer {
    const void *input_norm, *post_norm;
    const void *query_norm, *key_norm;  // null where the model has none
    QuireLinear qkv, o, gate_up, down;
    void *k_cache, *v_cache;
    int32_t window;  // larger than any length where there is none
    int32_t padding;
};

struct QuireDecoder {
    const QuireLayer* layers;
    const void *embedding, *last_norm;
    const float *cos, *sin;  // [positions, D / 2]; null if each step brings its own
    QuireLinear lm_head;
    int32_t is_bf16;
    int32_t activation;  // 0 silu, 1 gelu, 2 gelu_tanh
    int32_t num_layers, num_heads, num_kv_heads, head_size, block_size;
    float norm_eps, qk_norm_eps;
    int32_t splits_tokens;  // 1: threads share a step's tokens, 0: they share each kernel's work
};

struct QuireStep {
    int64_t *input_ids, *positions, *slots;  // [T]
    const float *cos, *sin;                  // [T, D / 2], or null: from the decoder's tables
    int32_t *query_starts, *seq_lens;        // [R + 1], [R]
    int32_t* block_tables;                   // [R, table_width]
    int64_t* sampling;                       // [S] of the R in rising order, or null: hidden states are wanted
    int32_t num_tokens, num_requests, num_sampling, table_width;
    int32_t num_parts;  // that it is computed in: quire_decoder_workspace writes it
    int32_t padding;
};

int quire_decoder_layout(int which);
int64_t quire_decoder_workspace(const QuireDecoder* decoder, QuireStep* step);
void quire_decoder_forward(const QuireDecoder* decoder, const QuireStep* step, void* workspace, void* out);

}  // extern "C"
