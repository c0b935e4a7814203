// Runs a list of operations over a step in one call (program.h). It adds no arithmetic: every number comes from the
// kernels of this folder, in the order in which the layers in Python call them, so both give the same bits. What is
// needed for sampled tokens only is computed for those: a row does not depend on its neighbours.
//
// Where the weights fit a core's cache, a thread runs all operations for some of the step's tokens, its part; the
// parts meet once a layer, when K and V are written, and not in every operation.
// Legend: T tokens, R requests, S of them that sample, D head size.
#include "program/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <vector>

#include "attention/encoder_attention.h"
#include "linear/experts.h"
#include "linear/gated_activation.h"
#include "linear/head_products.h"
#include "norm/layer_norm.h"
#include "linear/linear.h"
#include "linear/product.h"
#include "attention/paged_attention.h"
#include "norm/rms_norm.h"
#include "attention/rotate_and_write.h"
#include "group/shared_group.h"
#include "sampling/soft_cap.h"
#include "program/thread_pool.h"
#include "linear/tile.h"

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

// The same of a table that begins with row `first` of num_rows; other rows are 0.
void gather_slice(const void* from, const int64_t* index, int count, size_t width, int first, int num_rows, char* to) {
    const char* source = static_cast<const char*>(from);
    for (int i = 0; i < count; ++i, to += width) {
        const int64_t row = index[i] - first;
        if (row >= 0 && row < num_rows) std::memcpy(to, source + row * width, width);
        else std::memset(to, 0, width);
    }
}

void widen_all(const bf16* from, int64_t count, float* to) {
    parallel_runs(count, count * int64_t(sizeof(float)) > kMinParallelBytes, [&](int64_t first, int64_t last) {
        copy_floats(to + first, from + first, int(last - first));
    });
}

template <typename T>
void scale_all(T* x, int64_t count, float factor) {
    parallel_runs(count, count * int64_t(sizeof(T)) > kMinParallelBytes, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) x[i] = narrow<T>(quire::widen(x[i]) * factor);
    });
}

// x *= sigmoid(gate), a number a row; both it and the product are rounded to T.
template <typename T>
void gate_rows(const T* gate, T* x, int rows, size_t size) {
    parallel_runs(rows, rows * size * sizeof(T) > kMinParallelBytes, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const float factor = quire::widen(narrow<T>(1.0f / (1.0f + std::exp(-quire::widen(gate[r])))));
            for (size_t i = r * size; i < (r + 1) * size; ++i) x[i] = narrow<T>(quire::widen(x[i]) * factor);
        }
    });
}

template <typename T>
void add_rows(const T* x, T* total, int rows, size_t size) {
    parallel_runs(rows, rows * size * sizeof(T) > kMinParallelBytes, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) add_row(x + r * size, total + r * size, int(size));
    });
}

// x += rows of the table by index, rounded to T; row 0 where there is no index.
template <typename T>
void add_table_rows(const T* table, const int64_t* index, int rows, size_t size, T* x) {
    parallel_runs(rows, rows * size * sizeof(T) > kMinParallelBytes, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) add_row(table + (index ? index[r] : 0) * size, x + r * size, int(size));
    });
}

template <typename T>
void scale_rows(T* x, const float* table, const int64_t* positions, int rows, size_t stride, size_t size) {
    parallel_runs(rows, rows * size * sizeof(T) > kMinParallelBytes, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const float factor = table[positions[r]];
            T* row = x + r * stride;
            for (size_t i = 0; i < size; ++i) row[i] = narrow<T>(quire::widen(row[i]) * factor);
        }
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

// Tokens [first, last) of a step as a step of its own. A request may be cut: what is left of it here is a chunk
// like any other, whose keys may be written by another thread in this very step.
struct Part {
    QuireStep step;
    const QuireStep& whole;
    const int first_token;
    int first_sampling = 0;  // sampling requests of the step before this part's

    Part(const QuireStep& whole, int first, int last, Arena& arena) : step(whole), whole(whole), first_token(first) {
        const int32_t* starts = whole.query_starts;
        const int begin = int(std::upper_bound(starts, starts + whole.num_requests, first) - starts) - 1;
        const int end = int(std::lower_bound(starts, starts + whole.num_requests, last) - starts);
        step.num_tokens = last - first;
        step.num_requests = end - begin;
        step.input_ids += first;
        step.positions += first;
        step.slots += first;
        if (step.types) step.types += first;
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

// The buffers that all parts of a step share, by slot; null in other places.
std::vector<char*> take_whole_slots(const QuireProgram& program, const QuireStep& step, Arena& arena) {
    std::vector<char*> slots(program.num_slots);
    for (int i = 0; i < program.num_slots; ++i)
        if (program.slots[i].is_whole) slots[i] = arena.take<char>(step.num_tokens * program.slots[i].row_bytes);
    return slots;
}

// A part of a step on its way through the operations. Tokens that are dropped free their places in the slots.
class Pass {
  public:
    Pass(const QuireProgram& program, const Part& part, const std::vector<char*>& whole_slots, void* out, Arena& arena)
        : program_(program),
          step_(part.step),
          whole_(part.whole),
          first_token_(part.first_token),
          rows_(step_.num_tokens),
          requests_(step_.num_requests),
          starts_(step_.query_starts),
          lengths_(step_.seq_lens),
          tables_(step_.block_tables),
          table_stride_(size_t(whole_.num_requests) * whole_.table_width) {
        slots_ = arena.take<char*>(program.num_slots * sizeof(char*));
        for (int i = 1; i < program.num_slots; ++i) {
            const QuireSlot& slot = program.slots[i];
            const int rows = slot.is_whole ? 0 : slot.is_sampled ? step_.num_sampling : rows_;
            char* memory = arena.take<char>(rows * slot.row_bytes);
            if (arena.is_real()) slots_[i] = slot.is_whole ? whole_slots[i] + first_token_ * slot.row_bytes : memory;
        }
        last_tokens_ = arena.take<int64_t>(rows_ * sizeof(int64_t));
        kept_starts_ = arena.take<int32_t>((rows_ + 1) * sizeof(int32_t));
        kept_lengths_ = arena.take<int32_t>(rows_ * sizeof(int32_t));
        kept_tables_ = arena.take<int32_t>(size_t(step_.num_groups) * requests_ * step_.table_width * sizeof(int32_t));
        if (!arena.is_real()) return;
        const QuireSlot& result = program.slots[0];
        const int first_row = result.is_sampled ? part.first_sampling : first_token_;
        slots_[0] = static_cast<char*>(out) + first_row * result.row_bytes;
    }

    void run(const QuireOperation* operation, const QuireOperation* end) {
        for (; operation < end && rows_ > 0 && !has_failed_; ++operation) run(*operation);
    }

    bool has_failed() const { return has_failed_; }

  private:
    void run(const QuireOperation& operation) {
        const void* p = operation.arguments;
        switch (operation.kind) {
            case QUIRE_EMBED: return embed(*static_cast<const QuireEmbed*>(p));
            case QUIRE_ANGLES: return find_angles(*static_cast<const QuireAngles*>(p));
            case QUIRE_NORM: return norm(*static_cast<const QuireNorm*>(p), false);
            case QUIRE_ADD_NORM: return norm(*static_cast<const QuireNorm*>(p), true);
            case QUIRE_LINEAR: return multiply(*static_cast<const QuireMultiply*>(p));
            case QUIRE_ROTATE: return rotate_and_write(*static_cast<const QuireRotate*>(p));
            case QUIRE_KEEP: return keep_sampled(*static_cast<const QuireKeep*>(p));
            case QUIRE_ATTEND: return attend(*static_cast<const QuireAttend*>(p));
            case QUIRE_ACTIVATE: return activate(*static_cast<const QuireActivate*>(p));
            case QUIRE_WIDEN: return widen(*static_cast<const QuireWiden*>(p));
            case QUIRE_SCALE: return scale(*static_cast<const QuireScale*>(p));
            case QUIRE_CAP: return cap(*static_cast<const QuireCap*>(p));
            case QUIRE_ROUTE: return route(*static_cast<const QuireRoute*>(p));
            case QUIRE_EXPERTS: return run_experts(*static_cast<const QuireExperts*>(p));
            case QUIRE_ADD: return add(*static_cast<const QuireAdd*>(p));
            case QUIRE_LAYER_NORM: return layer_norm(*static_cast<const QuireLayerNorm*>(p));
            case QUIRE_ADD_ROWS: return add_rows_of(*static_cast<const QuireAddRows*>(p));
            case QUIRE_ALL_REDUCE: return all_reduce(*static_cast<const QuireAllReduce*>(p));
            case QUIRE_SHARED_NORM: return norm_of_ranks(*static_cast<const QuireNormOfRanks*>(p));
            case QUIRE_ENCODER_ATTEND: return attend_whole(*static_cast<const QuireEncoderAttend*>(p));
            case QUIRE_LOAD: return load(*static_cast<const QuireEmbed*>(p));
            case QUIRE_SCALE_ROWS: return scale_rows_of(*static_cast<const QuireScaleRows*>(p));
            case QUIRE_XIELU: return activate_xielu(*static_cast<const QuireActivateXielu*>(p));
            case QUIRE_ROTATE_LATENT: return rotate_latent(*static_cast<const QuireRotateLatent*>(p));
            case QUIRE_MULTIPLY_HEADS: return multiply_heads(*static_cast<const QuireMultiplyHeads*>(p));
            case QUIRE_CONVOLVE: return convolve(*static_cast<const QuireConvolve*>(p));
            case QUIRE_DELTA_RULE: return advance_delta(*static_cast<const QuireAdvanceDelta*>(p));
            case QUIRE_MAMBA2: return scan(*static_cast<const QuireScan*>(p));
            case QUIRE_PRODUCT: return multiply_by_columns(*static_cast<const QuireProduct*>(p));
        }
    }

    template <typename T = void>
    T* at(int slot) const {
        return static_cast<T*>(static_cast<void*>(slots_[slot]));
    }

    size_t number_size() const { return program_.is_bf16 ? sizeof(bf16) : sizeof(float); }

    char* column(int slot, int first) const { return at<char>(slot) + first * number_size(); }

    void embed(const QuireEmbed& op) {
        const size_t width = program_.slots[op.y].row_bytes;
        if (op.num_rows > 0)
            gather_slice(op.table, step_.input_ids, rows_, width, op.first, op.num_rows, at<char>(op.y));
        else
            gather_rows(op.table, step_.input_ids, rows_, width, at(op.y));
    }

    void load(const QuireEmbed& op) {
        const size_t width = program_.slots[op.y].row_bytes;
        std::memcpy(at(op.y), static_cast<const char*>(op.table) + first_token_ * width, rows_ * width);
    }

    void add_rows_of(const QuireAddRows& op) {
        with_type(program_.is_bf16, [&](auto zero) {
            using T = decltype(zero);
            add_table_rows(static_cast<const T*>(op.table), op.by_type ? step_.types : step_.positions, rows_, op.size,
                           at<T>(op.x));
        });
    }

    void find_angles(const QuireAngles& op) {
        const size_t width = op.half * sizeof(float);
        if (step_.cos) {
            const size_t first = (size_t(op.rope) * whole_.num_tokens + first_token_) * op.half;
            slots_[op.cos] = const_at(step_.cos + first);
            slots_[op.sin] = const_at(step_.sin + first);
            return;
        }
        gather_rows(op.cos_table, step_.positions, rows_, width, at(op.cos));
        gather_rows(op.sin_table, step_.positions, rows_, width, at(op.sin));
    }

    // The step's own angles, which are only read.
    static char* const_at(const float* angles) { return reinterpret_cast<char*>(const_cast<float*>(angles)); }

    void norm(const QuireNorm& op, bool adds) {
        for (int i = 0; i < op.count; ++i) {
            const size_t first = (op.first + size_t(i) * op.size) * number_size();
            quire_rms_norm(program_.is_bf16, at<char>(op.x) + first, adds ? at(op.residual) : nullptr, op.weight,
                           at<char>(op.y) + first, rows_, op.size, op.stride, op.eps, op.weight_offset,
                           op.rounds_normed);
        }
    }

    void layer_norm(const QuireLayerNorm& op) {
        quire_layer_norm(program_.is_bf16, at(op.x), op.adds ? at(op.residual) : nullptr, op.weight, op.bias, at(op.y),
                         rows_, op.size, op.eps);
    }

    void add(const QuireAdd& op) {
        with_type(program_.is_bf16, [&](auto zero) {
            using T = decltype(zero);
            if (op.gate) gate_rows(at<T>(op.gate), at<T>(op.x), rows_, op.size);
            add_rows(at<T>(op.x), at<T>(op.residual), rows_, op.size);
        });
    }

    void multiply(const QuireMultiply& op) {
        const bool is_bf16 = program_.is_bf16 && op.linear.format != QUIRE_LINEAR_FLOAT32;
        quire::multiply(op.linear, is_bf16, at(op.x), rows_, at(op.y));
    }

    // The slots of this part's tokens in the cache's group.
    const int64_t* slots_of(const QuireCache& cache) const {
        return step_.slots + size_t(cache.group) * whole_.num_tokens;
    }

    void rotate_and_write(const QuireRotate& op) {
        const QuireCache cache = op.writes ? program_.caches[op.layer] : QuireCache{};
        const float *cos = op.cos ? at<float>(op.cos) : nullptr, *sin = op.cos ? at<float>(op.sin) : nullptr;
        quire_rotate_and_write(program_.is_bf16, at(op.qkv), rows_, op.stride, cos, sin, op.query_norm, op.key_norm,
                               op.eps, op.norms_after, cache.k, cache.v, slots_of(cache), op.num_heads, op.num_kv_heads, op.head_size,
                               program_.block_size, program_.kv_format);
    }

    void rotate_latent(const QuireRotateLatent& op) {
        const QuireCache& cache = program_.caches[op.layer];
        const float *cos = op.cos ? at<float>(op.cos) : nullptr, *sin = op.cos ? at<float>(op.sin) : nullptr;
        quire_rotate_latent(program_.is_bf16, at(op.query), at(op.y), at(op.latent), rows_, cos, sin,
                            cache.k, slots_of(cache), op.num_heads, op.nope, op.rope, op.rank,
                            program_.block_size, program_.kv_format);
    }

    void multiply_heads(const QuireMultiplyHeads& op) {
        quire_multiply_heads(op.layers, op.num_heads, program_.is_bf16, at(op.x), op.x_stride, op.x_step, rows_,
                             at(op.y), op.y_stride, op.y_step);
    }

    void keep_sampled(const QuireKeep& op) {
        const int kept = step_.num_sampling;
        if (kept == rows_) return;
        for (int i = 0; i < kept; ++i) {
            const int64_t request = step_.sampling[i];
            last_tokens_[i] = step_.query_starts[request + 1] - 1;
            kept_lengths_[i] = step_.seq_lens[request];
        }
        for (int i = 0; i <= kept; ++i) kept_starts_[i] = i;
        for (int i = 0; i < op.num_slots; ++i)
            gather_rows(at(op.slots[i]), last_tokens_, kept, program_.slots[op.slots[i]].row_bytes, at(op.slots[i]));
        const size_t width = step_.table_width;
        for (int group = 0; group < step_.num_groups; ++group)
            gather_rows(tables_ + group * table_stride_, step_.sampling, kept, width * sizeof(int32_t),
                        kept_tables_ + group * kept * width);
        table_stride_ = kept * width;
        rows_ = requests_ = kept;
        starts_ = kept_starts_;
        lengths_ = kept_lengths_;
        tables_ = kept_tables_;
    }

    void attend(const QuireAttend& op) {
        const QuireCache& cache = program_.caches[op.layer];
        quire_paged_attention(program_.is_bf16, at(op.qkv), op.stride,
                              at(op.y), cache.k, cache.v, tables_ + cache.group * table_stride_, step_.table_width, starts_, lengths_,
                              requests_, op.num_heads, op.num_kv_heads, op.head_size, op.value_size, program_.block_size,
                              op.window, op.scale, op.soft_cap, op.sinks, program_.kv_format);
    }

    void attend_whole(const QuireEncoderAttend& op) {
        const char* qkv = at<char>(op.qkv) - first_token_ * program_.slots[op.qkv].row_bytes;
        quire_encoder_attention(program_.is_bf16, qkv, at(op.y), whole_.query_starts, whole_.num_requests, first_token_,
                                rows_, op.bias, op.num_heads, op.num_kv_heads, op.head_size, op.window, op.reach,
                                op.scale, op.soft_cap);
    }

    void activate(const QuireActivate& op) {
        quire_gated_activation(program_.is_bf16, op.activation, at(op.x), at(op.y), rows_, op.size);
    }

    void widen(const QuireWiden& op) { widen_all(at<bf16>(op.x), int64_t(rows_) * op.size, at<float>(op.y)); }

    void scale(const QuireScale& op) {
        with_type(program_.is_bf16, [&](auto zero) {
            scale_all(at<decltype(zero)>(op.x), int64_t(rows_) * op.size, op.factor);
        });
    }

    void scale_rows_of(const QuireScaleRows& op) {
        with_type(program_.is_bf16, [&](auto zero) {
            scale_rows(at<decltype(zero)>(op.x), op.table, step_.positions, rows_, op.stride, op.size);
        });
    }

    void activate_xielu(const QuireActivateXielu& op) {
        quire_xielu(program_.is_bf16, at(op.x), int64_t(rows_) * op.size, &op.numbers);
    }

    void multiply_by_columns(const QuireProduct& op) {
        quire_product(program_.is_bf16, op.gate, at(op.x), rows_, op.size, column(op.y, op.first), op.stride);
    }

    QuireStates states() const {
        return {step_.states,      step_.state_slots, step_.query_starts, step_.seq_lens,
                step_.save_starts, step_.save_tokens, step_.save_slots,   step_.state_stride, step_.num_requests, 0};
    }

    void convolve(const QuireConvolve& op) {
        const QuireStates states = this->states();
        quire_causal_conv(program_.is_bf16, &op.conv, &states, at(op.x), op.stride, at(op.y));
    }

    void advance_delta(const QuireAdvanceDelta& op) {
        const QuireStates states = this->states();
        quire_delta_rule(program_.is_bf16, &op.rule, &states, at(op.qkv), op.qkv_stride,
                         column(op.decay, op.decay_first), op.decay_stride, column(op.beta, op.beta_first),
                         op.beta_stride, at(op.y));
    }

    void scan(const QuireScan& op) {
        const QuireStates states = this->states();
        quire_mamba2(program_.is_bf16, &op.scan, &states, at(op.x), column(op.steps, op.first),
                     op.stride, at(op.y));
    }

    void cap(const QuireCap& op) { quire_soft_cap(at<float>(op.x), int64_t(rows_) * op.size, op.cap); }

    void route(const QuireRoute& op) {
        quire_route(program_.is_bf16 && !op.is_float32, at(op.logits), rows_, &op.router, at<int32_t>(op.choices),
                    at<float>(op.weights));
    }

    void run_experts(const QuireExperts& op) {
        const QuireExpertsScratch scratch{at(op.routed), at(op.wide), at(op.gated)};
        quire_experts(program_.is_bf16, op.activation, at(op.x), rows_, at<int32_t>(op.choices),
                      at<float>(op.weights), op.num_experts, op.per_token, op.scales_inputs,
                      op.gate_up, op.down, &scratch, at(op.y));
    }

    void all_reduce(const QuireAllReduce& op) {
        has_failed_ = quire_all_reduce(op.group, at(op.x), int64_t(rows_) * op.size, program_.is_bf16) != QUIRE_GROUP_OK;
    }

    void norm_of_ranks(const QuireNormOfRanks& op) {
        char* x = column(op.x, op.first);
        has_failed_ = quire_shared_norm(program_.is_bf16, &op.norm, x, rows_, op.stride, at<float>(op.squares)) != 0;
    }

    const QuireProgram& program_;
    const QuireStep& step_;
    const QuireStep& whole_;
    const int first_token_;
    char** slots_;
    int rows_, requests_;
    bool has_failed_ = false;
    const int32_t *starts_, *lengths_, *tables_;
    size_t table_stride_;  // numbers between the tables of two KV groups
    int64_t* last_tokens_;
    int32_t *kept_starts_, *kept_lengths_, *kept_tables_;
};

// First token of a part; that of the part after the last is T.
int find_first(const QuireStep& step, int part, int parts) { return int(int64_t(step.num_tokens) * part / parts); }

struct Run {
    Arena arena;
    const Part part;
    Pass pass;

    // Without memory, only its size is of use.
    Run(const QuireProgram& program, const QuireStep& step, const std::vector<char*>& whole_slots, int index, int parts,
        void* memory, void* out)
        : arena(memory),
          part(step, find_first(step, index, parts), find_first(step, index + 1, parts), arena),
          pass(program, part, whole_slots, out, arena) {}
};

}  // namespace

// Sizes of the structs that Python makes: what mirrors them is checked against these.
extern "C" int quire_program_layout(int which) {
    const size_t sizes[] = {
        sizeof(QuireLinear), sizeof(QuireSlot), sizeof(QuireCache), sizeof(QuireRouter), sizeof(QuireEmbed), sizeof(QuireAngles),
        sizeof(QuireNorm), sizeof(QuireMultiply), sizeof(QuireRotate), sizeof(QuireKeep), sizeof(QuireAttend),
        sizeof(QuireActivate), sizeof(QuireWiden), sizeof(QuireScale), sizeof(QuireCap), sizeof(QuireRoute),
        sizeof(QuireExperts), sizeof(QuireAdd), sizeof(QuireLayerNorm), sizeof(QuireAddRows), sizeof(QuireAllReduce),
        sizeof(QuireSharedNorm), sizeof(QuireNormOfRanks), sizeof(QuireEncoderAttend), sizeof(QuireScaleRows),
        sizeof(QuireActivateXielu), sizeof(QuireRotateLatent), sizeof(QuireMultiplyHeads), sizeof(QuireProduct),
        sizeof(QuireConvolve), sizeof(QuireAdvanceDelta), sizeof(QuireScan),
        sizeof(QuireOperation),
        sizeof(QuireProgram), sizeof(QuireStep),
    };
    return int(sizes[which]);
}

// Bytes of the workspace for a step. The number of its parts is fixed here, because the number of threads may change
// before it is computed.
extern "C" int64_t quire_program_workspace(const QuireProgram* program, QuireStep* step) {
    const int most = program->splits_tokens ? std::min(num_threads(), step->num_tokens / kMinPartTokens) : 1;
    const int parts = step->num_parts = std::max(1, most);
    Arena arena(nullptr);
    const std::vector<char*> whole_slots = take_whole_slots(*program, *step, arena);
    size_t size = arena.used();
    for (int part = 0; part < parts; ++part)
        size += Run(*program, *step, whole_slots, part, parts, nullptr, nullptr).arena.used();
    return int64_t(size);
}

// `out` is slot 0, for all rows of the step. K and V of all T tokens are in the caches afterwards. The workspace is
// what quire_program_workspace asked for, for this very step. Returns 0, or 1 if the group of ranks has been aborted: then
// `out` and what the caches have of this step mean nothing.
extern "C" int quire_program_run(const QuireProgram* program, const QuireStep* step, void* workspace, void* out) {
    const int parts = step->num_parts;
    Arena arena(workspace);
    const std::vector<char*> whole_slots = take_whole_slots(*program, *step, arena);
    workspace = static_cast<char*>(workspace) + arena.used();
    std::deque<Run> runs;
    for (int i = 0; i < parts; ++i) {
        runs.emplace_back(*program, *step, whole_slots, i, parts, workspace, out);
        workspace = static_cast<char*>(workspace) + runs.back().arena.used();
    }
    const QuireOperation *first = program->operations, *end = first + program->num_operations;
    while (first < end) {
        const QuireOperation* last = first + 1;
        // Attention waits for all parts of the step.
        while (last < end && last->kind != QUIRE_ATTEND && last->kind != QUIRE_ENCODER_ATTEND) ++last;
        parallel_for(parts, true, [&](int i) { runs[i].pass.run(first, last); });
        first = last;
    }
    return std::any_of(runs.begin(), runs.end(), [](const Run& run) { return run.pass.has_failed(); });
}
