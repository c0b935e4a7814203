// Collectives between processes over mapped memory (shared_group.h).
//
// Each rank has a member, a cache line with a stamp that only grows, and two slots for data that operations take in
// turn. An operation has two phases; who is done with the first stamps its base + 1, with the second base + 2. A rank
// begins an operation when all others have begun the one before: then nobody reads the slots of the one before that.
// Small sums take one phase: everybody sums everything. Large ones two: each slice has an owner, who sums it. Both
// add in the order of ranks, so which of them it is changes no bit, and no rank has other bits than another.
//
// Where there are several stages, of equally many ranks, operations are between the ranks of one stage, and each stage
// has a ring that its first rank writes and all ranks of the next stage read, in a circle. A ring counts the bytes that
// were ever written, and each of its readers those that it has read. An abort and a reset are of all ranks.
#include "group/shared_group.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

#include <sys/stat.h>

#include "group/group_memory.h"
#include "program/thread_pool.h"
#include "linear/tile.h"

namespace {

using namespace quire;

constexpr int64_t kOnePhaseBytes = 1 << 14;
constexpr int64_t kMinParallelBytes = 1 << 18;
constexpr int64_t kMaxRingPieceBytes = 1 << 18;  // readers copy the pieces that are there while others are written

template <typename T>
constexpr int kVecBytes = kLanes * int(sizeof(T));

struct Range {
    int64_t first, last;
};

class Group : public GroupMemory {
  public:
    using GroupMemory::GroupMemory;

    template <typename T>
    int all_reduce(T* x, int64_t count) {
        const int64_t most = slot_bytes_ / int64_t(sizeof(T));
        for (int64_t first = 0; first < count; first += most)
            if (const int status = reduce(x + first, std::min(most, count - first))) return status;
        return QUIRE_GROUP_OK;
    }

    int gather_slices(const char* rows, int64_t num_rows, int64_t width, char* out) {
        for (int64_t first = 0, most = 1; first < most; first += slot_bytes_) {
            const int64_t size = clamp_piece(num_rows * width, first);
            if (const int status = begin(num_rows, width)) return status;
            copy(slot(rank_), rows + first, size);
            if (const int status = meet(1, num_rows)) return status;
            most = 0;
            for (int r = 0; r < size_; ++r) most = std::max(most, num_rows * width_of(r));
            if (out) place_rows(rows, num_rows, first, out);
        }
        return QUIRE_GROUP_OK;
    }

    int broadcast(char* data, int64_t size) {
        for (int64_t first = 0; first < size; first += slot_bytes_) {
            const int64_t piece = clamp_piece(size, first);
            if (const int status = begin(size, 0)) return status;
            if (rank_ == 0) copy(slot(0), data + first, piece);
            own().stamp.set(base_ + 1);
            if (rank_ == 0) continue;
            if (const int status = wait(peer(0).stamp, base_ + 1, first_)) return status;
            if (const int status = compare_amount(0, size)) return status;
            copy(data + first, slot(0), piece);
        }
        return QUIRE_GROUP_OK;
    }

    int send(const char* data, int64_t size) {
        const int64_t said = size;
        if (const int status = write_ring(reinterpret_cast<const char*>(&said), sizeof said)) return status;
        return write_ring(data, size);
    }

    int receive(char* data, int64_t size) {
        int64_t said = 0;
        if (const int status = read_ring(reinterpret_cast<char*>(&said), sizeof said)) return status;
        if (said == size) return read_ring(data, size);
        char text[96];
        abort(text, std::snprintf(text, sizeof text, "rank %d expects %lld bytes, and is sent %lld", number_,
                                  static_cast<long long>(size), static_cast<long long>(said)));
        return QUIRE_GROUP_ABORTED;
    }

    // Nobody is in an operation once all have come here, and none of them can come here twice more before all have
    // left: hence two places for `next`.
    int reset() {
        ++epoch_;
        own().next[epoch_ % 2] = next_;
        own().sent[epoch_ % 2] = sent_;
        own().resets.set(epoch_);
        for (int r = 0; r < shape_.size; ++r)
            if (const int status = wait(member(r).resets, epoch_, r, false)) return status;
        for (int r = 0; r < size_; ++r) {
            const uint32_t theirs = peer(r).next[epoch_ % 2];
            if (int32_t(theirs - next_) > 0) next_ = theirs;
        }
        own().stamp.set(next_);
        if (shape_.ring_bytes) skip_to(member(stage_before() * size_).sent[epoch_ % 2]);
        return QUIRE_GROUP_OK;
    }

  private:
    int parity() const { return base_ / 2 % 2; }
    int64_t width_of(int r) const { return peer(r).width[parity()]; }
    int64_t clamp_piece(int64_t size, int64_t first) const { return std::clamp<int64_t>(size - first, 0, slot_bytes_); }

    char* slot(int r) const {
        return memory_ + kPageBytes * (1 + shape_.size) + (int64_t(first_ + r) * 2 + parity()) * slot_bytes_;
    }

    int64_t clamp_ring_piece(int64_t left) const {
        return std::min({left, kMaxRingPieceBytes, shape_.ring_bytes / 2});
    }

    // The size of a ring is a power of 2, so that places go on where the number of bytes begins at 0 again.
    template <typename Copy>
    void go_around(Ring& ring, uint32_t from, int64_t size, Copy&& copy) const {
        char* data = reinterpret_cast<char*>(&ring) + kPageBytes;
        const int64_t place = from % shape_.ring_bytes, before_end = std::min(size, shape_.ring_bytes - place);
        copy(data + place, 0, before_end);
        copy(data, before_end, size - before_end);
    }

    int write_ring(const char* data, int64_t size) {
        Ring& to = ring(stage());
        const int next_first = (stage() + 1) % num_stages() * size_;
        if (status() != QUIRE_GROUP_OK) return QUIRE_GROUP_ABORTED;
        for (int64_t done = 0, piece; done < size; done += piece) {
            piece = clamp_ring_piece(size - done);
            const uint32_t end = sent_ + uint32_t(piece);
            for (int r = 0; r < size_; ++r)
                if (const int status = wait(to.readers[r].received, end - uint32_t(shape_.ring_bytes), next_first + r))
                    return status;
            go_around(to, sent_, piece, [&](char* place, int64_t first, int64_t count) {
                std::memcpy(place, data + done + first, count);
            });
            to.sent.set(sent_ = end);
        }
        return QUIRE_GROUP_OK;
    }

    int read_ring(char* data, int64_t size) {
        Ring& from = ring(stage_before());
        if (status() != QUIRE_GROUP_OK) return QUIRE_GROUP_ABORTED;
        for (int64_t done = 0, piece; done < size; done += piece) {
            piece = clamp_ring_piece(size - done);
            if (const int status = wait(from.sent, received_ + uint32_t(piece), stage_before() * size_)) return status;
            go_around(from, received_, piece, [&](const char* place, int64_t first, int64_t count) {
                std::memcpy(data + done + first, place, count);
            });
            skip_to(received_ + uint32_t(piece));
        }
        return QUIRE_GROUP_OK;
    }

    void skip_to(uint32_t received) {
        received_ = received;
        ring(stage_before()).readers[rank_].received.set(received);
    }

    int begin(int64_t amount, int64_t width) {
        if (status() != QUIRE_GROUP_OK) return QUIRE_GROUP_ABORTED;
        base_ = next_;
        next_ += 2;
        if (const int status = wait_for_all(base_ - 1)) return status;
        own().amount[parity()] = amount;
        own().width[parity()] = width;
        return QUIRE_GROUP_OK;
    }

    // Says that this phase's data is in the slot, and waits for the others'.
    int meet(int phase, int64_t amount) {
        own().stamp.set(base_ + phase);
        if (const int status = wait_for_all(base_ + phase)) return status;
        for (int r = 0; r < size_; ++r)
            if (const int status = compare_amount(r, amount)) return status;
        return QUIRE_GROUP_OK;
    }

    int wait_for_all(uint32_t target) {
        for (int r = 0; r < size_; ++r)
            if (r != rank_)
                if (const int status = wait(peer(r).stamp, target, first_ + r)) return status;
        return QUIRE_GROUP_OK;
    }

    int compare_amount(int r, int64_t amount) {
        const int64_t theirs = peer(r).amount[parity()];
        if (theirs == amount) return QUIRE_GROUP_OK;
        char text[128];
        abort(text, std::snprintf(text, sizeof text, "rank %d is at an operation over %lld, rank %d at one over %lld",
                                  first_ + r, static_cast<long long>(theirs), number_,
                                  static_cast<long long>(amount)));
        return QUIRE_GROUP_ABORTED;
    }

    // Bytes of numbers that rank r owns.
    Range find_slice(int r, int64_t size) const {
        const auto border = [&](int i) { return i == size_ ? size : size * i / size_ / kLineBytes * kLineBytes; };
        return {border(r), border(r + 1)};
    }

    template <typename T>
    int reduce(T* x, int64_t count) {
        char* bytes = reinterpret_cast<char*>(x);
        const int64_t size = count * int64_t(sizeof(T));
        if (const int status = begin(count, sizeof(T))) return status;
        if (size <= kOnePhaseBytes) {
            std::memcpy(slot(rank_), x, size);
            if (const int status = meet(1, count)) return status;
            sum<T>(bytes, {0, size}, nullptr);
            return QUIRE_GROUP_OK;
        }
        const Range mine = find_slice(rank_, size);
        copy(slot(rank_), bytes, mine.first);
        copy(slot(rank_) + mine.last, bytes + mine.last, size - mine.last);
        if (const int status = meet(1, count)) return status;
        sum<T>(bytes, mine, slot(rank_));
        if (const int status = meet(2, count)) return status;
        for (int r = 0; r < size_; ++r) {
            const Range theirs = find_slice(r, size);
            if (r != rank_) copy(bytes + theirs.first, slot(r) + theirs.first, theirs.last - theirs.first);
        }
        return QUIRE_GROUP_OK;
    }

    // Of the bytes in a range of all ranks' slots; this rank's own are still in x, which gets the sums, as does `also`.
    template <typename T>
    void sum(char* x, Range range, char* also) const {
        const int64_t lines = (range.last - range.first + kLineBytes - 1) / kLineBytes;
        parallel_runs(lines, range.last - range.first > kMinParallelBytes, [&](int64_t from, int64_t to) {
            const int64_t last = std::min(range.last, range.first + to * kLineBytes);
            int64_t i = range.first + from * kLineBytes;
            for (; i + kVecBytes<T> <= last; i += kVecBytes<T>) sum_vector<T>(x, i, kVecBytes<T>, also);
            if (i < last) sum_vector<T>(x, i, int(last - i), also);
        });
    }

    // A vector that is not full is computed as one that is: no number's bits depend on its place.
    template <typename T>
    void sum_vector(char* x, int64_t at, int size, char* also) const {
        Vec total{};
        for (int r = 0; r < size_; ++r) {
            alignas(kLineBytes) T part[kLanes] = {};
            std::memcpy(part, (r == rank_ ? x : slot(r)) + at, size);
            total = r == 0 ? load(part) : total + load(part);
        }
        alignas(kLineBytes) T rounded[kLanes];
        store(rounded, total);
        std::memcpy(x + at, rounded, size);
        if (also) std::memcpy(also + at, rounded, size);
    }

    void copy(char* to, const char* from, int64_t size) const {
        const int64_t lines = (size + kLineBytes - 1) / kLineBytes;
        parallel_runs(lines, size > kMinParallelBytes, [&](int64_t first, int64_t last) {
            const int64_t start = first * kLineBytes;
            std::memcpy(to + start, from + start, std::min(size, last * kLineBytes) - start);
        });
    }

    // Puts what the slots hold of the ranks' rows, from byte `first` of each on, where it belongs.
    void place_rows(const char* rows, int64_t num_rows, int64_t first, char* out) const {
        int64_t total = 0, column = 0;
        for (int r = 0; r < size_; ++r) total += width_of(r);
        for (int r = 0; r < size_; ++r) {
            const int64_t width = width_of(r), last = first + clamp_piece(num_rows * width, first);
            const char* from = (r == rank_ ? rows + first : slot(r)) - first;  // as if it held all of them
            const int64_t row = width ? first / width : 0, end = width ? (last + width - 1) / width : 0;
            parallel_runs(end - row, last - first > kMinParallelBytes, [&](int64_t i, int64_t to) {
                for (i += row, to += row; i < to; ++i) {
                    const int64_t start = std::max(first, i * width), stop = std::min(last, (i + 1) * width);
                    std::memcpy(out + i * total + column + start - i * width, from + start, stop - start);
                }
            });
            column += width;
        }
    }

    uint32_t base_ = 0, next_ = 0, sent_ = 0, received_ = 0;
};

Group& as_group(void* group) { return *static_cast<Group*>(group); }

}  // namespace

extern "C" void* quire_group_join(int fd, int rank, const QuireGroupShape* shape, int spin_us) {
    const int64_t bytes = Group::find_size(*shape);
    struct stat status;
    if (fstat(fd, &status) != 0 || (status.st_size < bytes && ftruncate(fd, bytes) != 0)) return nullptr;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return nullptr;
    return new (std::nothrow) Group(fd, static_cast<char*>(memory), rank, *shape, spin_us);
}

extern "C" void quire_group_leave(void* group) { delete static_cast<Group*>(group); }

extern "C" int quire_all_reduce(void* group, void* x, int64_t count, int is_bf16) {
    return is_bf16 ? as_group(group).all_reduce(static_cast<bf16*>(x), count)
                   : as_group(group).all_reduce(static_cast<float*>(x), count);
}

extern "C" int quire_gather_slices(void* group, const void* rows, int64_t num_rows, int64_t width, void* out) {
    return as_group(group).gather_slices(static_cast<const char*>(rows), num_rows, width, static_cast<char*>(out));
}

extern "C" int quire_broadcast(void* group, void* data, int64_t size) {
    return as_group(group).broadcast(static_cast<char*>(data), size);
}

extern "C" int quire_group_send(void* group, const void* data, int64_t size) {
    return as_group(group).send(static_cast<const char*>(data), size);
}

extern "C" int quire_group_receive(void* group, void* data, int64_t size) {
    return as_group(group).receive(static_cast<char*>(data), size);
}

extern "C" void quire_group_note_step(void* group) { as_group(group).note_step(); }

extern "C" void quire_group_abort(void* group, const char* text, int size) { as_group(group).abort(text, size); }

extern "C" int quire_group_status(void* group) { return as_group(group).status(); }

extern "C" int quire_group_abort_text(void* group, char* text, int size) {
    return as_group(group).read_text(text, size);
}

extern "C" int quire_group_reset(void* group) { return as_group(group).reset(); }
