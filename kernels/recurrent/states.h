// The states that requests have beside their cache, for the operations that advance them token by token.
#pragma once

#include <cstdint>

extern "C" {

// A step's requests and where their states are. A request whose first token stands at position 0 begins from zeros,
// whatever its slot has.
struct QuireStates {
    float* states;                           // [slots, slot_size]
    const int32_t* slots;                    // [R] of each request
    const int32_t *query_starts, *seq_lens;  // [R + 1], [R]
    // Of request r the saves [save_starts[r], save_starts[r + 1]): the state after a token of the step, by its number
    // among all, goes to a slot too. Null: there are none.
    const int32_t *save_starts, *save_tokens, *save_slots;
    int64_t slot_size;
    int32_t num_requests, padding;
};

}  // extern "C"

namespace quire {

// A request of a step with its own slot's numbers from `offset` on.
struct StateRun {
    const QuireStates& all;
    int64_t offset;
    int request, first, end;  // its tokens

    StateRun(const QuireStates& all, int request, int64_t offset)
        : all(all), offset(offset), request(request), first(all.query_starts[request]),
          end(all.query_starts[request + 1]) {}

    bool begins() const { return all.seq_lens[request] == end - first; }

    float* in_slot(int slot) const { return all.states + slot * all.slot_size + offset; }
    float* own() const { return in_slot(all.slots[request]); }

    // Where a run of at most `most` tokens from `token` on ends, so that no save is inside of it.
    int find_end(int token, int most) const {
        int last = end - token > most ? token + most : end;
        each_save([&](int saved, int) { last = saved >= token && saved + 1 < last ? saved + 1 : last; });
        return last;
    }

    // body(its numbers in the other slot) for each save after `token`.
    template <typename Body>
    void save_after(int token, const Body& body) const {
        each_save([&](int saved, int slot) {
            if (saved == token) body(in_slot(slot));
        });
    }

  private:
    template <typename Body>
    void each_save(const Body& body) const {
        if (!all.save_starts) return;
        for (int i = all.save_starts[request]; i < all.save_starts[request + 1]; ++i)
            body(all.save_tokens[i], all.save_slots[i]);
    }
};

}  // namespace quire
