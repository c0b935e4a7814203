// The memory that the ranks of a group share (shared_group.h): where what lies, how one waits for another, and how one
// that cannot go on says so. What is done with it is in shared_group.cpp.
#pragma once

#include "group/shared_group.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

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

inline long call_futex(Word& word, int operation, uint32_t value, const timespec* timeout) {
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
    Word num_steps;  // that it has done; for who watches the ranks
    std::atomic<int64_t> amount[2], width[2];  // of the operation, by slot: all ranks must mean the same
    alignas(kLineBytes) Stamp resets;
    Word next[2];  // its next operation's base, by reset
    Word sent[2];  // what it has written of its ring, by reset
    Word is_watched;
};

struct alignas(kLineBytes) RingReader {
    Stamp received;
};

struct Ring {
    Stamp sent;
    RingReader readers[kPageBytes / kLineBytes - 1];  // by rank in its stage
};
static_assert(sizeof(Ring) <= kPageBytes, "data follows on the next page");

struct Header {
    alignas(kLineBytes) Word claimed;  // 1 + the epoch that was aborted last; then its text is written
    Word aborted;                      // and then this
    int32_t text_size;
    char text[kTextBytes];
};

class GroupMemory {
  public:
    static int64_t find_size(const QuireGroupShape& shape) {
        const int64_t rings = shape.ring_bytes ? shape.size / shape.stage_size * (kPageBytes + shape.ring_bytes) : 0;
        return kPageBytes * (1 + shape.size) + int64_t(shape.size) * 2 * shape.slot_bytes + rings;
    }

    GroupMemory(int fd, char* memory, int number, const QuireGroupShape& shape, int spin_us)
        : fd_(fd), memory_(memory), shape_(shape), number_(number), rank_(number % shape.stage_size),
          size_(shape.stage_size), first_(number - rank_), slot_bytes_(shape.slot_bytes), spin_(spin_us) {
        own().is_watched = lock();
    }

    ~GroupMemory() {
        munmap(memory_, find_size(shape_));
        close(fd_);
    }

    int status() const { return header().aborted == epoch_ + 1 ? QUIRE_GROUP_ABORTED : QUIRE_GROUP_OK; }

    void note_step() { ++own().num_steps; }

    void abort(const char* text, int size) {
        Header& head = header();
        uint32_t before = head.claimed;
        if (before == epoch_ + 1 || !head.claimed.compare_exchange_strong(before, epoch_ + 1)) return;
        head.text_size = std::min(size, kTextBytes);
        std::memcpy(head.text, text, head.text_size);
        head.aborted = epoch_ + 1;
        for (int r = 0; r < shape_.size; ++r) member(r).stamp.wake();
    }

    int read_text(char* text, int size) const {
        const int length = status() == QUIRE_GROUP_OK ? 0 : std::min(size, int(header().text_size));
        std::memcpy(text, header().text, length);
        return length;
    }

  protected:
    Header& header() const { return *reinterpret_cast<Header*>(memory_); }
    Member& member(int r) const { return *reinterpret_cast<Member*>(memory_ + kPageBytes * (1 + r)); }
    Member& own() const { return member(number_); }
    Member& peer(int rank) const { return member(first_ + rank); }  // of this stage
    int num_stages() const { return shape_.size / size_; }
    int stage() const { return number_ / size_; }
    int stage_before() const { return (stage() + num_stages() - 1) % num_stages(); }

    // Its data lies on the pages after it.
    Ring& ring(int stage) const {
        char* rings = memory_ + kPageBytes * (1 + shape_.size) + int64_t(shape_.size) * 2 * slot_bytes_;
        return *reinterpret_cast<Ring*>(rings + stage * (kPageBytes + shape_.ring_bytes));
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

    // A lock on the byte of this rank's number, which the system takes away at the end of the process, however it ends.
    bool lock() const {
        struct flock wanted = describe_lock(number_);
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

    const int fd_;
    char* const memory_;
    const QuireGroupShape shape_;
    const int number_, rank_, size_, first_;  // of all ranks; in its stage; of ranks of a stage; this stage's rank 0
    const int64_t slot_bytes_;
    const std::chrono::microseconds spin_;
    uint32_t epoch_ = 0;
};

}  // namespace quire
