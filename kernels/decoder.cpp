// A decoder's forward pass in one call: embedding, layers, last norm and, for the rows that sample, logits.
// It adds no arithmetic: every number comes from the kernels of this folder, called in the order in which
// worker/models/decoder.py calls them, so both give the same bits. What the last layer computes after its K and V
// are written is needed for sampled tokens only, and a row does not depend on its neighbours: others are dropped.
//
// Where the weights fit a core's cache, a thread computes whole layers for a run of the step's tokens, its part; the
// parts meet once a layer, when K and V are written, and not in every kernel.
// Legend: T tokens, R requests, S of them that sample, D head size.
#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "gated_activation.h"
#include "linear.h"
#include "paged_attention.h"
#include "rms_norm.h"
#include "rotate_and_write.h"
#include "thread_pool.h"
#include "tile.h"

namespace {

using namespace quire;

constexpr int64_t kMinParallelBytes = 1 << 18;
constexpr size_t kAlignment = 64;
constexpr int kMinPartTokens = 16;  // a tile of AMX has 16 rows: fewer take as long

// Rows [count, width bytes] of `from` by index; `to` may be `from` where the indexes rise.
void gather_rows(const void* from, const int64_t* index, int count, size_t width, void* to) {
    const char* source = static_cast<const char*>(from);
    char* target = static_cast<char*>(to);
    if (from == to) {
        for (int i = 0; i < count; ++i)
            if (index[i] != i) std::memcpy(target + i * width, source + index[i] * width, width);
        return;
    }
    parallel_runs(count, int64_t(count * width) > kMinParallelBytes, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) std::memcpy(target + i * width, source + index[i] * width, width);
    });
}

void widen_all(const bf16* from, int64_t count, float* to) {
    constexpr int64_t kChunk = 1 << 14;
    const int chunks = int((count + kChunk - 1) / kChunk);
    parallel_for(chunks, count * int64_t(sizeof(float)) > kMinParallelBytes, [&](int chunk) {
        const int64_t first = chunk * kChunk;
        copy_floats(to + first, from + first, int(std::min(kChunk, count - first)));
    });
}

// Hands out aligned parts of one piece of memory; without memory it only adds up their sizes.
class Arena {
  public:
    explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

    template <typename T = void>
    T* take(size_t size_bytes) {
        char* start = memory_ ? memory_ + used_ : nullptr;
        used_ += (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
        return static_cast<T*>(static_cast<void*>(start));
    }

    size_t used() const { return used_; }
    bool is_real() const { return memory_ != nullptr; }

  private:
    char* memory_;
    size_t used_ = 0;
};

// What is live during a layer. Tokens that are dropped in the last one free their places in these buffers.
struct Buffers {
    void *residual, *normed, *delta, *qkv, *attended, *gate_up, *gated;
    bf16* logits;  // before they are widened
    float *cos, *sin;
    int64_t* last_tokens;
    int32_t *starts, *lengths, *tables;

    Buffers(const QuireDecoder& decoder, const QuireStep& step, Arena& arena) {
        const QuireLayer& layer = decoder.layers[0];
        const int tokens = step.num_tokens;
        const size_t row = size_t(tokens) * (decoder.is_bf16 ? sizeof(bf16) : sizeof(float));
        const size_t angles = size_t(tokens) * (decoder.head_size / 2) * sizeof(float);
        residual = arena.take(row * layer.qkv.num_in);
        normed = arena.take(row * layer.qkv.num_in);
        delta = arena.take(row * layer.qkv.num_in);
        qkv = arena.take(row * layer.qkv.num_out);
        attended = arena.take(row * layer.o.num_in);
        gate_up = arena.take(row * layer.gate_up.num_out);
        gated = arena.take(row * layer.down.num_in);
        logits = arena.take<bf16>(decoder.is_bf16 ? size_t(step.num_sampling) * decoder.lm_head.num_out * sizeof(bf16) : 0);
        cos = arena.take<float>(angles);
        sin = arena.take<float>(angles);
        last_tokens = arena.take<int64_t>(tokens * sizeof(int64_t));
        starts = arena.take<int32_t>((tokens + 1) * sizeof(int32_t));
        lengths = arena.take<int32_t>(tokens * sizeof(int32_t));
        tables = arena.take<int32_t>(size_t(step.num_requests) * step.table_width * sizeof(int32_t));
    }
};

// Tokens [first, last) of a step as a step of its own. A request may be cut: what is left of it here is a chunk
// like any other, whose keys may be written by another thread in this very step.
struct Part {
    QuireStep step;
    int first_sampling = 0;  // sampling requests of the step before this part's

    Part(const QuireStep& whole, int head_size, int first, int last, Arena& arena) : step(whole) {
        const int32_t* starts = whole.query_starts;
        const int begin = int(std::upper_bound(starts, starts + whole.num_requests, first) - starts) - 1;
        const int end = int(std::lower_bound(starts, starts + whole.num_requests, last) - starts);
        step.num_tokens = last - first;
        step.num_requests = end - begin;
        step.input_ids += first;
        step.positions += first;
        step.slots += first;
        if (step.cos) step.cos += size_t(first) * (head_size / 2), step.sin += size_t(first) * (head_size / 2);
        step.block_tables += size_t(begin) * whole.table_width;
        step.query_starts = arena.take<int32_t>((step.num_requests + 1) * sizeof(int32_t));
        step.seq_lens = arena.take<int32_t>(step.num_requests * sizeof(int32_t));
        step.sampling = arena.take<int64_t>(step.num_requests * sizeof(int64_t));
        cut_requests(whole, first, last, begin, arena.is_real());
    }

  private:
    void cut_requests(const QuireStep& whole, int first, int last, int begin, bool is_real) {
        int64_t* sampling = step.sampling;
        step.num_sampling = 0;
        for (int i = 0; i < whole.num_sampling; ++i) {
            const int token = whole.query_starts[whole.sampling[i] + 1] - 1;
            first_sampling += token < first;
            if (token < first || token >= last) continue;
            if (is_real) sampling[step.num_sampling] = whole.sampling[i] - begin;
            ++step.num_sampling;
        }
        if (!whole.sampling) step.sampling = nullptr;
        if (!is_real) return;
        for (int i = 0; i < step.num_requests; ++i) {
            const int cut_off = std::max(0, whole.query_starts[begin + i + 1] - last);
            step.query_starts[i] = std::max(0, whole.query_starts[begin + i] - first);
            step.seq_lens[i] = whole.seq_lens[begin + i] - cut_off;
        }
        step.query_starts[step.num_requests] = step.num_tokens;
    }
};

class Pass {
  public:
    Pass(const QuireDecoder& decoder, const QuireStep& step, Arena& arena)
        : decoder_(decoder),
          step_(step),
          buffers_(decoder, step, arena),
          rows_(step.num_tokens),
          requests_(step.num_requests),
          starts_(step.query_starts),
          lengths_(step.seq_lens),
          tables_(step.block_tables) {}

    void embed() {
        gather_rows(decoder_.embedding, step_.input_ids, rows_, hidden() * element(), buffers_.residual);
        find_angles();
    }

    // Layer `i` up to its K and V, which are in the cache afterwards.
    void write_keys(int i) {
        const QuireLayer& layer = decoder_.layers[i];
        norm(layer.input_norm, i > 0, buffers_.normed);
        linear(layer.qkv, buffers_.normed, buffers_.qkv);
        rotate_and_write(layer);
    }

    // The rest of it, when the keys of all tokens that these see are there. In the last layer `rows_` are left.
    void finish_layer(int i) {
        const QuireLayer& layer = decoder_.layers[i];
        if (i == decoder_.num_layers - 1 && step_.sampling) drop_tokens(layer);
        if (rows_ == 0) return;
        attend(layer);
        linear(layer.o, buffers_.attended, buffers_.delta);
        norm(layer.post_norm, true, buffers_.normed);
        linear(layer.gate_up, buffers_.normed, buffers_.gate_up);
        activate(layer.down.num_in);
        linear(layer.down, buffers_.gated, buffers_.delta);
    }

    // The part of `out` that is these tokens': hidden states of the model's type, or logits.
    void write(void* out, int first_token, int first_sampling) {
        if (!step_.sampling)
            norm(decoder_.last_norm, true, static_cast<char*>(out) + first_token * hidden() * element());
        else if (rows_ > 0)
            write_logits(static_cast<float*>(out) + size_t(first_sampling) * decoder_.lm_head.num_out);
    }

    // float32 [S, vocab].
    void write_logits(float* out) {
        norm(decoder_.last_norm, true, buffers_.normed);
        if (!decoder_.is_bf16) return linear(decoder_.lm_head, buffers_.normed, out);
        linear(decoder_.lm_head, buffers_.normed, buffers_.logits);
        widen_all(buffers_.logits, int64_t(rows_) * decoder_.lm_head.num_out, out);
    }

  private:
    size_t element() const { return decoder_.is_bf16 ? sizeof(bf16) : sizeof(float); }
    int hidden() const { return decoder_.layers[0].qkv.num_in; }

    void linear(const QuireLinear& layer, const void* x, void* y) {
        quire_linear(layer.variant, layer.format, decoder_.is_bf16, x, rows_, layer.num_in, layer.packed,
                     layer.num_out, layer.scales, layer.bias, y);
    }

    // y = norm(residual), with delta added to the residual before if there is one.
    void norm(const void* weight, bool has_delta, void* y) {
        quire_rms_norm(decoder_.is_bf16, has_delta ? buffers_.delta : buffers_.residual,
                       has_delta ? buffers_.residual : nullptr, weight, y, rows_, hidden(), decoder_.norm_eps);
    }

    void activate(int width) {
        if (decoder_.activation == 0)
            quire_silu_and_multiply(decoder_.is_bf16, buffers_.gate_up, buffers_.gated, rows_, width);
        else
            quire_gelu_and_multiply(decoder_.is_bf16, decoder_.activation == 2, buffers_.gate_up, buffers_.gated,
                                    rows_, width);
    }

    void find_angles() {
        cos_ = step_.cos;
        sin_ = step_.sin;
        if (cos_) return;
        const size_t width = decoder_.head_size / 2 * sizeof(float);
        gather_rows(decoder_.cos, step_.positions, rows_, width, buffers_.cos);
        gather_rows(decoder_.sin, step_.positions, rows_, width, buffers_.sin);
        cos_ = buffers_.cos;
        sin_ = buffers_.sin;
    }

    void rotate_and_write(const QuireLayer& layer) {
        quire_rotate_and_write(decoder_.is_bf16, buffers_.qkv, rows_, cos_, sin_, layer.query_norm,
                               layer.key_norm, decoder_.qk_norm_eps, layer.k_cache, layer.v_cache, step_.slots,
                               decoder_.num_heads, decoder_.num_kv_heads, decoder_.head_size,
                               decoder_.block_size);
    }

    void attend(const QuireLayer& layer) {
        quire_paged_attention(decoder_.is_bf16, buffers_.qkv, layer.qkv.num_out, buffers_.attended,
                              layer.k_cache, layer.v_cache, tables_, step_.table_width, starts_, lengths_,
                              requests_, decoder_.num_heads, decoder_.num_kv_heads, decoder_.head_size,
                              decoder_.block_size, layer.window, 0.0f);
    }

    // Keeps the last token of each request that samples, as a request of one token.
    void drop_tokens(const QuireLayer& layer) {
        const int kept = step_.num_sampling;
        if (kept == rows_) return;
        for (int i = 0; i < kept; ++i) {
            const int64_t request = step_.sampling[i];
            buffers_.last_tokens[i] = step_.query_starts[request + 1] - 1;
            buffers_.lengths[i] = step_.seq_lens[request];
        }
        for (int i = 0; i <= kept; ++i) buffers_.starts[i] = i;
        gather_rows(buffers_.qkv, buffers_.last_tokens, kept, layer.qkv.num_out * element(), buffers_.qkv);
        gather_rows(buffers_.residual, buffers_.last_tokens, kept, hidden() * element(), buffers_.residual);
        gather_rows(tables_, step_.sampling, kept, step_.table_width * sizeof(int32_t), buffers_.tables);
        rows_ = requests_ = kept;
        starts_ = buffers_.starts;
        lengths_ = buffers_.lengths;
        tables_ = buffers_.tables;
    }

    const QuireDecoder& decoder_;
    const QuireStep& step_;
    Buffers buffers_;
    int rows_, requests_;
    const float *cos_ = nullptr, *sin_ = nullptr;
    const int32_t *starts_, *lengths_, *tables_;
};

int count_parts(const QuireDecoder& decoder, const QuireStep& step) {
    if (!decoder.splits_tokens) return 1;
    return std::max(1, std::min(num_threads(), step.num_tokens / kMinPartTokens));
}

// First token of a part; that of the part after the last is T.
int find_first(const QuireStep& step, int part, int parts) { return int(int64_t(step.num_tokens) * part / parts); }

size_t measure_part(const QuireDecoder& decoder, const QuireStep& step, int part, int parts) {
    Arena arena(nullptr);
    const int first = find_first(step, part, parts), last = find_first(step, part + 1, parts);
    const Part cut(step, decoder.head_size, first, last, arena);
    Buffers(decoder, cut.step, arena);
    return arena.used();
}

// A part of a step on its way through the layers.
struct Run {
    Arena arena;
    const int first;
    const Part part;
    Pass pass;

    Run(const QuireDecoder& decoder, const QuireStep& step, int index, int parts, void* memory)
        : arena(memory),
          first(find_first(step, index, parts)),
          part(step, decoder.head_size, first, find_first(step, index + 1, parts), arena),
          pass(decoder, part.step, arena) {}
};

}  // namespace

// Sizes of the structs, 0 to 3 in the order of decoder.h: what reads them elsewhere is checked against it.
extern "C" int quire_decoder_layout(int which) {
    const size_t sizes[] = {sizeof(QuireLinear), sizeof(QuireLayer), sizeof(QuireDecoder), sizeof(QuireStep)};
    return int(sizes[which]);
}

// Bytes of the workspace for a step. It is cut here, for the number of threads of this moment: another may hold when
// it is computed.
extern "C" int64_t quire_decoder_workspace(const QuireDecoder* decoder, QuireStep* step) {
    const int parts = step->num_parts = count_parts(*decoder, *step);
    size_t size = 0;
    for (int part = 0; part < parts; ++part) size += measure_part(*decoder, *step, part, parts);
    return int64_t(size);
}

// `out`: float32 [S, vocab] logits of each sampling request's last token, or, where step->sampling is null,
// [T, hidden] of the model's type. K and V of all T tokens are in the caches afterwards. The workspace is what
// quire_decoder_workspace asked for, for this very step.
extern "C" void quire_decoder_forward(const QuireDecoder* decoder, const QuireStep* step, void* workspace,
                                      void* out) {
    const int parts = step->num_parts, layers = decoder->num_layers;
    std::deque<Run> runs;
    for (int i = 0; i < parts; ++i) {
        runs.emplace_back(*decoder, *step, i, parts, workspace);
        workspace = static_cast<char*>(workspace) + runs.back().arena.used();
    }
    for (int layer = 0; layer <= layers; ++layer)
        parallel_for(parts, true, [&](int i) {
            Pass& pass = runs[i].pass;
            if (layer == 0)
                pass.embed();
            else
                pass.finish_layer(layer - 1);
            if (layer < layers)
                pass.write_keys(layer);
            else
                pass.write(out, runs[i].first, runs[i].part.first_sampling);
        });
}
