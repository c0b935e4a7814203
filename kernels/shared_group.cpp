// Collectives between processes over mapped memory (shared_group.h).
//
// Each rank has a member, a cache line with a stamp that only grows, and two slots for data that operations take in
// turn. An operation has two phases; who is done with the first stamps its base + 1, with the second base + 2. A rank
// begins an operation when all others have begun the one before: then nobody reads the slots of the one before that.
// Small sums take one phase: everybody sums everything. Large ones two: each slice has an owner, who sums it. Both
// add in the order of ranks, so which of them it is changes no bit, and no rank has other bits than another.
#include "shared_group.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <new>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "thread_pool.h"
#include "tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using namespace quire;

constexpr int64_t kOnePhaseBytes = 1 << 14;
constexpr int64_t kMinParallelBytes = 1 << 18;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPageBytes = 4096;
constexpr int kLooksPerClock = 16;
// A sleeper looks up this often: an abort may come just before it falls asleep. Every so many times it asks whether
// who it waits for still lives.
constexpr long kSleepNs = 20'000'000;
constexpr int kSleepsPerLook = 25;
constexpr int kTextBytes = 1024;

typedef std::atomic<uint32_t> Word;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a futex is 4 bytes");

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

long call_futex(Word& word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

// A number that only grows, and who sleeps until it has. Numbers may pass 2^32: only differences count.
struct Stamp {
    Word value;
    Word num_sleepers;

    bool has_reached(uint32_t target) const { return int32_t(value.load() - target) >= 0; }

    void set(uint32_t to) {
        value.store(to);
        if (num_sleepers.load() != 0) wake();
    }

    void wake() { call_futex(value, FUTEX_WAKE, INT_MAX, nullptr); }
};

// What one rank says, in lines that only it writes (but for sleepers).
struct alignas(kLineBytes) Member {
    Stamp stamp;
    std::atomic<int64_t> amount[2], width[2];  // of the operation, by slot: all ranks must mean the same
    alignas(kLineBytes) Stamp resets;
    Word next[2];  // its next operation's base, by reset
    Word is_watched;
};

struct Header {
    alignas(kLineBytes) Word claimed;  // 1 + the epoch that was aborted last; then its text is written
    Word aborted;                      // and then this
    int32_t text_size;
    char text[kTextBytes];
};

template <typename T>
constexpr int kVecBytes = kLanes * int(sizeof(T));

struct Range {
    int64_t first, last;
};

class Group {
  public:
    static int64_t find_size(int size, int64_t slot_bytes) {
        return kPageBytes * (1 + size) + int64_t(size) * 2 * slot_bytes;
    }

    Group(int fd, char* memory, int rank, int size, int64_t slot_bytes, int spin_us)
        : fd_(fd), memory_(memory), rank_(rank), size_(size), slot_bytes_(slot_bytes), spin_(spin_us) {
        member(rank).is_watched = lock();
    }

    ~Group() {
        munmap(memory_, find_size(size_, slot_bytes_));
        close(fd_);
    }

    int status() const { return header().aborted == epoch_ + 1 ? QUIRE_GROUP_ABORTED : QUIRE_GROUP_OK; }

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
            if (const int status = wait(member(0).stamp, base_ + 1, 0)) return status;
            if (const int status = compare_amount(0, size)) return status;
            copy(data + first, slot(0), piece);
        }
        return QUIRE_GROUP_OK;
    }

    void abort(const char* text, int size) {
        Header& head = header();
        uint32_t before = head.claimed;
        if (before == epoch_ + 1 || !head.claimed.compare_exchange_strong(before, epoch_ + 1)) return;
        head.text_size = std::min(size, kTextBytes);
        std::memcpy(head.text, text, head.text_size);
        head.aborted = epoch_ + 1;
        for (int r = 0; r < size_; ++r) member(r).stamp.wake();
    }

    int read_text(char* text, int size) const {
        const int length = status() == QUIRE_GROUP_OK ? 0 : std::min(size, int(header().text_size));
        std::memcpy(text, header().text, length);
        return length;
    }

    // Nobody is in an operation once all have come here, and none of them can come here twice more before all have
    // left: hence two places for `next`.
    int reset() {
        ++epoch_;
        own().next[epoch_ % 2] = next_;
        own().resets.set(epoch_);
        for (int r = 0; r < size_; ++r)
            if (const int status = wait(member(r).resets, epoch_, r, false)) return status;
        for (int r = 0; r < size_; ++r) {
            const uint32_t theirs = member(r).next[epoch_ % 2];
            if (int32_t(theirs - next_) > 0) next_ = theirs;
        }
        own().stamp.set(next_);
        return QUIRE_GROUP_OK;
    }

  private:
    Header& header() const { return *reinterpret_cast<Header*>(memory_); }
    Member& member(int r) const { return *reinterpret_cast<Member*>(memory_ + kPageBytes * (1 + r)); }
    Member& own() const { return member(rank_); }
    int parity() const { return base_ / 2 % 2; }
    int64_t width_of(int r) const { return member(r).width[parity()]; }
    int64_t clamp_piece(int64_t size, int64_t first) const { return std::clamp<int64_t>(size - first, 0, slot_bytes_); }

    char* slot(int r) const {
        return memory_ + kPageBytes * (1 + size_) + (int64_t(r) * 2 + parity()) * slot_bytes_;
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
                if (const int status = wait(member(r).stamp, target, r)) return status;
        return QUIRE_GROUP_OK;
    }

    int wait(Stamp& stamp, uint32_t target, int peer, bool may_abort = true) {
        if (stamp.has_reached(target) || spin(stamp, target, may_abort)) return QUIRE_GROUP_OK;
        ++stamp.num_sleepers;
        const int status = sleep(stamp, target, peer, may_abort);
        --stamp.num_sleepers;
        return status;
    }

    bool spin(const Stamp& stamp, uint32_t target, bool may_abort) const {
        if (spin_.count() == 0) return false;
        const auto deadline = std::chrono::steady_clock::now() + spin_;
        do {
            for (int i = 0; i < kLooksPerClock; ++i) {
                if (stamp.has_reached(target)) return true;
                relax();
            }
            if (may_abort && status() != QUIRE_GROUP_OK) return false;
        } while (std::chrono::steady_clock::now() < deadline);
        return false;
    }

    int sleep(Stamp& stamp, uint32_t target, int peer, bool may_abort) {
        const timespec timeout{0, kSleepNs};
        for (int num_sleeps = 1;;) {
            const uint32_t seen = stamp.value.load();
            if (int32_t(seen - target) >= 0) return QUIRE_GROUP_OK;
            if (may_abort && status() != QUIRE_GROUP_OK) return QUIRE_GROUP_ABORTED;
            if (call_futex(stamp.value, FUTEX_WAIT, seen, &timeout) == 0 || errno != ETIMEDOUT) continue;
            if (num_sleeps++ % kSleepsPerLook == 0 && has_died(peer) && !stamp.has_reached(target)) return lose(peer);
        }
    }

    int lose(int peer) {
        char text[64];
        abort(text, std::snprintf(text, sizeof text, "rank %d is gone", peer));
        return QUIRE_GROUP_LOST;
    }

    int compare_amount(int r, int64_t amount) {
        const int64_t theirs = member(r).amount[parity()];
        if (theirs == amount) return QUIRE_GROUP_OK;
        char text[128];
        abort(text, std::snprintf(text, sizeof text, "rank %d is at an operation over %lld, rank %d at one over %lld",
                                  r, static_cast<long long>(theirs), rank_, static_cast<long long>(amount)));
        return QUIRE_GROUP_ABORTED;
    }

    // A lock on the byte of this rank's number, which the system takes away at the end of the process, however it ends.
    bool lock() const {
        struct flock wanted = describe_lock(rank_);
        return fcntl(fd_, F_OFD_SETLK, &wanted) == 0;
    }

    bool has_died(int r) const {
        struct flock wanted = describe_lock(r);
        return member(r).is_watched && fcntl(fd_, F_OFD_GETLK, &wanted) == 0 && wanted.l_type == F_UNLCK;
    }

    static struct flock describe_lock(int r) {
        struct flock lock {};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = r;
        lock.l_len = 1;
        return lock;
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

    const int fd_;
    char* const memory_;
    const int rank_, size_;
    const int64_t slot_bytes_;
    const std::chrono::microseconds spin_;
    uint32_t epoch_ = 0, base_ = 0, next_ = 0;
};

Group& as_group(void* group) { return *static_cast<Group*>(group); }

}  // namespace

extern "C" void* quire_group_join(int fd, int rank, int size, int64_t slot_bytes, int spin_us) {
    const int64_t bytes = Group::find_size(size, slot_bytes);
    struct stat status;
    if (fstat(fd, &status) != 0 || (status.st_size < bytes && ftruncate(fd, bytes) != 0)) return nullptr;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return nullptr;
    return new (std::nothrow) Group(fd, static_cast<char*>(memory), rank, size, slot_bytes, spin_us);
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

extern "C" void quire_group_abort(void* group, const char* text, int size) { as_group(group).abort(text, size); }

extern "C" int quire_group_status(void* group) { return as_group(group).status(); }

extern "C" int quire_group_abort_text(void* group, char* text, int size) {
    return as_group(group).read_text(text, size);
}

extern "C" int quire_group_reset(void* group) { return as_group(group).reset(); }
