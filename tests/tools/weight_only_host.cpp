// The decoding of weight_only.cuh on the host: test_weight_only.py includes the header after this file, with the lines of a few
// PTX functions replaced by those below, and compiles it as C++.
#include "host_basics.hpp"
#if GROUPED
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#endif
#define asm(...)
#define volatile
static const uint8_t* host_memory;                        // what shared memory is on the device
static inline unsigned __cvta_generic_to_shared(const void* p) { return (unsigned)((const uint8_t*)p - host_memory); }
static inline uint32_t bits_of(float f) { uint32_t i; memcpy(&i, &f, 4); return i; }
template <class T> static T host_load(uint32_t a) { T v; memcpy(&v, host_memory + (int32_t)a, sizeof v); return v; }

static inline uint16_t host_to_bf16(float f) {
    const uint32_t i = bits_of(f);
    return f != f ? 0x7fff : (i + 0x7fff + (i >> 16 & 1)) >> 16;
}
static inline float host_of_f16(uint32_t h) { _Float16 v; uint16_t b = h; memcpy(&v, &b, 2); return v; }
static inline uint16_t host_to_f16(float f) { _Float16 v = f; uint16_t b; memcpy(&b, &v, 2); return b; }
template <class F> static uint32_t halves(F f) { return f(0) | (uint32_t)f(16) << 16; }
#if ACT == 0
static inline float host_of(uint32_t h) { return __uint_as_float((h & 0xffff) << 16); }
#define host_to host_to_bf16
#else
static inline float host_of(uint32_t h) { return host_of_f16(h & 0xffff); }
#define host_to host_to_f16
#endif
static inline uint32_t host_sub2(uint32_t a, uint32_t b) { return halves([=](int s) { return host_to(host_of(a >> s) - host_of(b >> s)); }); }
static inline uint32_t host_mul2(uint32_t a, uint32_t b) { return halves([=](int s) { return host_to(host_of(a >> s) * host_of(b >> s)); }); }
static inline uint32_t host_fma2(uint32_t a, uint32_t b, uint32_t c) {
    return halves([=](int s) { return host_to((float)((double)host_of(a >> s) * host_of(b >> s) + host_of(c >> s))); });
}

#if GROUPED
// A warp as 32 threads, which meet at each exchange of numbers.
struct Meeting {
    std::mutex lock;
    std::condition_variable all;
    int waiting = 0, turn = 0;
    void wait() {
        std::unique_lock<std::mutex> held(lock);
        const int now = turn;
        if (++waiting == 32) { waiting = 0; turn++; all.notify_all(); }
        else all.wait(held, [&] { return turn != now; });
    }
} meeting;
static int words[32];
static thread_local int host_lane;
template <class F> static auto exchanged(int v, F read) {   // what `read` makes of all lanes' numbers
    words[host_lane] = v;
    meeting.wait();
    const auto found = read();
    meeting.wait();
    return found;
}
static inline int __shfl_up_sync(unsigned, int v, int o) { return exchanged(v, [=] { return words[host_lane >= o ? host_lane - o : host_lane]; }); }
static inline int __shfl_sync(unsigned, int v, int from) { return exchanged(v, [=] { return words[from]; }); }
static inline unsigned __ballot_sync(unsigned, bool v) {
    return exchanged(v, [] { unsigned found = 0; for (int i = 0; i < 32; i++) found |= (unsigned)words[i] << i; return found; });
}
static inline int __ffs(unsigned v) { return __builtin_ffs(v); }
#endif
