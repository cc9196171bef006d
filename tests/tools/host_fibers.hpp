// Threads of a cluster of blocks as fibers, which change only where one waits, in an order that is drawn.
#pragma once
#include <ucontext.h>

#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "host_basics.hpp"
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef unsigned long long u64;
// A rule of the instructions. Nothing runs on after a false one.
#define CHECK(condition) do { if (!(condition)) throw #condition; } while (0)

struct Meeting {  // of all of `count`, again and again
    int count = 0, here = 0;
    u64 turn = 0;
    void arrive() { if (++here == count) { here = 0; turn++; } }
};
struct Barrier { int count, pending; long long bytes; u64 phase; };
struct Block {
    std::vector<u8> room;
    u8* memory;
    int rank, running;  // threads that have not ended
    Index index;
    std::map<u32, Barrier> barriers;
    std::map<int, Meeting> named;
    Meeting all;
    std::vector<Meeting> warps;
    std::vector<std::vector<std::pair<u32, std::vector<u32>>>> matrices;  // of a warp: addresses and words of its lanes
};
struct Product { float* d; u64 a, w; int add; };  // of tensor cores
struct Fiber {
    ucontext_t context;
    std::vector<u8> stack;
    Block* block;
    int thread;
    bool done = false;
    const std::function<bool()>* awaited = nullptr;
    std::vector<Product> started;
    std::deque<std::vector<Product>> products;
    std::vector<std::function<void()>> copying, copies;
};
static std::vector<std::unique_ptr<Fiber>> fibers;
static std::vector<std::unique_ptr<Block>> blocks;
static std::vector<std::function<void()>> landing;  // copies in and signals to other blocks, which have not landed
static std::vector<std::function<void()>> late;     // signals that land when nothing else can go on; of every other cluster
static bool are_late;
static Meeting cluster;
static ucontext_t scheduler;
static Fiber* fiber;
static u64 state, progress;
static u32 drawn(u32 n) { state = state * 6364136223846793005ull + 1442695040888963407ull; return (u32)(state >> 33) % n; }
static std::function<void()> entry;
static const char* broken;  // the rule

static void enter(Fiber* one) {
    fiber = one;
    threadIdx.x = one->thread;
    blockIdx = one->block->index;
    swapcontext(&scheduler, &one->context);
}
static void wait_until(const std::function<bool()>& condition) {
    if (!condition()) {
        fiber->awaited = &condition;
        swapcontext(&fiber->context, &scheduler);
        fiber->awaited = nullptr;
    }
    progress++;
}
static void meet(Meeting& m) {
    const u64 turn = m.turn;
    m.arrive();
    wait_until([&] { return m.turn != turn; });
}
static void fiber_main() {
    try {
        entry();
        CHECK(fiber->products.empty() && fiber->started.empty() && fiber->copies.empty() && fiber->copying.empty());
    } catch (const char* rule) { broken = rule; }
    fiber->done = true;
    fiber->block->running--;
    progress++;
    swapcontext(&fiber->context, &scheduler);
}
static u8* at(u32 address, u32 bytes) {  // the block of the cluster in the upper 8 bits, if it is not the fiber's own: 1 + rank
    Block* block = address >> 24 ? blocks[(address >> 24) - 1].get() : fiber->block;
    CHECK((address & 0xffffff) + bytes <= block->room.size() - 1024);
    return block->memory + (address & 0xffffff);
}
// Run the blocks of one cluster. False: a deadlock, or a rule is broken.
static bool ran(Index first, int count, int threads, u32 shared) {
    fibers.clear(); blocks.clear(); landing.clear(); late.clear();
    are_late = first.x / count % 2 == 0;
    cluster = Meeting{count * threads};
    for (int i = 0; i < count; i++) {
        auto block = std::make_unique<Block>();
        block->room.assign(shared + 2048, 0xff);  // NaN in every format
        block->memory = (u8*)(((uintptr_t)block->room.data() + 1023) / 1024 * 1024);
        block->rank = i; block->running = threads; block->index = {first.x + i, first.y};
        block->all.count = threads;
        block->warps.resize(threads / 32);
        for (auto& warp : block->warps) warp.count = 32;
        block->matrices.resize(threads / 32);
        for (int t = 0; t < threads; t++) {
            auto made = std::make_unique<Fiber>();
            made->stack.resize(96 << 10);
            made->block = block.get(); made->thread = t;
            getcontext(&made->context);
            made->context.uc_stack.ss_sp = made->stack.data(); made->context.uc_stack.ss_size = made->stack.size();
            made->context.uc_link = nullptr;
            makecontext(&made->context, fiber_main, 0);
            fibers.push_back(std::move(made));
        }
        blocks.push_back(std::move(block));
    }
    std::vector<Fiber*> waiting;
    for (auto& one : fibers) waiting.push_back(one.get());
    while (!waiting.empty()) {
        const u64 before = progress;
        const bool quiet = landing.empty();
        for (u32 n = landing.empty() ? 0 : drawn((u32)landing.size() + 1); n > 0; n--) {
            const u32 i = drawn((u32)landing.size());
            auto copy = landing[i];
            landing.erase(landing.begin() + i);
            copy();
            progress++;
        }
        for (size_t i = waiting.size(); i > 1; i--) std::swap(waiting[i - 1], waiting[drawn((u32)i)]);
        for (Fiber* one : waiting)
            if (one->awaited == nullptr || (fiber = one, (*one->awaited)())) enter(one);
        std::vector<Fiber*> left;
        for (Fiber* one : waiting) if (!one->done) left.push_back(one);
        waiting.swap(left);
        if (broken != nullptr) return false;
        if (!waiting.empty() && progress == before && quiet) {
            if (late.empty()) return false;
            landing.swap(late);
        }
    }
    CHECK(landing.empty() && late.empty());
    return true;
}
static bool run_cluster(Index first, int count, int threads, u32 shared) {
    broken = nullptr;
    bool ended = false;
    try { ended = ran(first, count, threads, shared); } catch (const char* rule) { broken = rule; }
    if (!ended) fprintf(stderr, "%s\n", broken != nullptr ? broken : "deadlock");
    return ended;
}
static void __syncthreads() { meet(fiber->block->all); }
static void __syncwarp() { meet(fiber->block->warps[fiber->thread / 32]); }

