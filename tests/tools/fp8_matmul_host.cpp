// A GPU for fp8_matmul.cu on the host: tests/tools/host_kernels.py compiles the source as C++ with this in place of its section of PTX.
//
// What runs beside threads on a GPU is as late as it may be: copies in land at some time before their barrier is waited for, signals
// to other blocks at any time, products and copies out when somebody waits for them. So memory that is released or read too early makes a wrong result, and a wait
// for nothing is found as a deadlock.
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __shfl_sync(u32, T v, int) { return v; }  // the source exchanges numbers that all lanes have

static u32 shared_address(const void* p) { return (u32)((const u8*)p - fiber->block->memory); }
static Barrier& barrier_in(Block& block, u32 b) { CHECK(b % 8 == 0 && block.barriers.count(b)); return block.barriers[b]; }
static void settle(Barrier& b) {
    CHECK(b.pending >= 0);
    if (b.pending == 0 && b.bytes == 0) { b.phase++; b.pending = b.count; }
    progress++;
}
static void barrier_init(u32 b, u32 n) { at(b, 8); fiber->block->barriers[b] = {(int)n, (int)n, 0, 0}; }
static void barriers_visible() {}
static void barrier_arrive(u32 b) { auto& found = barrier_in(*fiber->block, b); found.pending--; settle(found); }
static void barrier_arrive_in(u32 b, u32 block) {
    Block& there = *blocks[block];
    if (&there == fiber->block) return barrier_arrive(b);
    (are_late ? late : landing).push_back([&there, b] {
        CHECK(there.running > 0);  // a block that has ended has no barriers
        auto& found = barrier_in(there, b);
        found.pending--;
        settle(found);
    });
}
static void barrier_arrive_expecting(u32 b, u32 bytes) {
    auto& found = barrier_in(*fiber->block, b);
    found.bytes += bytes; found.pending--;
    settle(found);
}
static void barrier_arrive_after_copies(u32 b) { barrier_arrive(b); }
static void barrier_wait(u32 b, u32 phase) {
    auto& found = barrier_in(*fiber->block, b);
    wait_until([&] { return (found.phase & 1) != phase; });
}
static void wait_for_grid_ahead() {}
static void start_next_grid() {}
static int cluster_rank() { return fiber->block->rank; }
static void cluster_sync() { meet(cluster); }
static void cluster_meet() { meet(cluster); }
static Meeting& named(int id, int n) {
    auto& found = fiber->block->named[id];
    CHECK(found.count == 0 || found.count == n);
    found.count = n;
    return found;
}
static void group_sync(int id, int n) { meet(named(id, n)); }
static void group_arrive(int id, int n) { named(id, n).arrive(); progress++; }

// What the test writes into a TensorMap: lengths, strides in bytes and boxes from the last axis on.
struct HostMap { u64 address, strides[2]; u32 lengths[3], box[3], item, swizzle; };
static u32 swizzled(u32 address, u32 swizzle) {
    const u32 bits = swizzle == 128 ? 7 : swizzle == 64 ? 3 : swizzle == 32 ? 1 : 0;
    return address ^ ((address >> 7 & bits) << 4);
}
template <class F> static void elements_of(const HostMap& map, u32 to, int x, int y, int z, F each) {
    CHECK(map.item && to % (map.swizzle ? 1024 : 128) == 0 && map.address % 16 == 0 && map.strides[0] % 16 == 0 && map.strides[1] % 16 == 0);
    CHECK(map.box[0] * map.item % 16 == 0 && (map.swizzle == 0 || map.box[0] * map.item == map.swizzle));
    CHECK(map.box[0] <= 256 && map.box[1] <= 256 && map.box[2] <= 256 && x * map.item % 16 == 0);
    u32 i = 0;
    for (u32 c = 0; c < map.box[2]; c++)
        for (u32 b = 0; b < map.box[1]; b++)
            for (u32 a = 0; a < map.box[0]; a++, i++) {
                const u32 p[3] = {x + a, y + b, z + c};
                const bool there = p[0] < map.lengths[0] && p[1] < map.lengths[1] && p[2] < map.lengths[2];
                u8* const global = (u8*)map.address + p[0] * (u64)map.item + p[1] * map.strides[0] + p[2] * map.strides[1];
                each(swizzled(to + i * map.item, map.swizzle), there ? global : nullptr, map.item);
            }
}
static void copy_to_all(u32 to, const TensorMap* given, int x, int y, int z, u32 barrier, u16 all) {
    HostMap map;
    memcpy(&map, given, sizeof map);
    Fiber* const by = fiber;
    landing.push_back([=] {
        fiber = by;
        for (auto& block : blocks)
            if (all >> block->rank & 1) {
                const u32 window = (u32)(block->rank + 1) << 24;
                elements_of(map, to, x, y, z, [&](u32 s, const u8* g, u32 n) {
                    if (g) memcpy(at(window | s, n), g, n); else memset(at(window | s, n), 0, n);
                });
                auto& b = barrier_in(*block, barrier);
                b.bytes -= map.box[0] * map.box[1] * map.box[2] * map.item;
                settle(b);
            }
    });
}
static void copy(u32 to, const TensorMap* map, int x, int y, int z, u32 barrier) {
    copy_to_all(to, map, x, y, z, barrier, (u16)(1 << fiber->block->rank));
}
static void copy_4(u32 to, const void* from, bool there) { if (there) memcpy(at(to, 4), from, 4); else memset(at(to, 4), 0, 4); }
static void prefetch(const TensorMap*, int, int, int) {}
static void copy_out(const TensorMap* given, int x, int y, int z, u32 from) {
    HostMap map;
    memcpy(&map, given, sizeof map);
    fiber->copying.push_back([=] { elements_of(map, from, x, y, z, [](u32 s, u8* g, u32 n) { if (g) memcpy(g, at(s, n), n); }); });
}
static void copies_out_commit() { for (auto& one : fiber->copying) fiber->copies.push_back(one); fiber->copying.clear(); }
static void copies_out_done() { for (auto& one : fiber->copies) one(); fiber->copies.clear(); }
static void copies_out_read() { copies_out_done(); }
static void visible_to_copies() {}

static float load(u32 a) { float v; memcpy(&v, at(a, 4), 4); return v; }
static void store4(u32 to, const float* v) { memcpy(at(to, 16), v, 16); }
static void load2(u32 a, float& x, float& y) { x = load(a); y = load(a + 4); }
static void add_scaled(float& sum, float d, float f) { sum = fmaf(d, f, sum); }
static void add(float& sum, float d) { sum += d; }
static float of_f16(u16 h) { _Float16 v; memcpy(&v, &h, 2); return v; }
static u16 rounded(float f) {
    u32 i;
    memcpy(&i, &f, 4);
    if (OUT == 2) { const _Float16 v = f; u16 h; memcpy(&h, &v, 2); return h; }
    return f != f ? 0x7fff : (u16)((i + 0x7fff + (i >> 16 & 1)) >> 16);
}
static u32 rounded_pair(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
template <int N> static void give_registers() {}
template <int N> static void take_registers() {}
static u32 address_in(u32 a, int block) { return a | (u32)(block + 1) << 24; }
static void store_in(u32 to, const float* v) { memcpy(at(to, 16), v, 16); }
static void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
    const int warp = fiber->thread / 32, lane = fiber->thread % 32;
    auto& lanes = fiber->block->matrices[warp];
    lanes.resize(32);
    lanes[lane] = {to, {a, b, c, d}};
    __syncwarp();
    if (lane == 0)
        for (int m = 0; m < 4; m++)
            for (int row = 0; row < 8; row++)
                for (int i = 0; i < 8; i++) {
                    const int from_row = TURNED ? i : row, from = TURNED ? row : i;
                    const u16 v = (u16)(lanes[from_row * 4 + from / 2].second[m] >> 16 * (from % 2));
                    const u32 address = lanes[m * 8 + row].first;
                    CHECK(address % 16 == 0);
                    memcpy(at(address + 2 * i, 2), &v, 2);
                }
    __syncwarp();
}

// Products: D[64,BN] (+)= A[64,k] W[BN,k]^T, k elements of 32 bytes, of operands in the 128-byte swizzle.
static float element_at(u64 descriptor, int row, int i) {
    CHECK(descriptor >> 32 == 0x40000040u);
    const u32 start = (u32)(descriptor & 0x3fff) << 4;
    const u32 address = swizzled(start + row / 8 * 1024 + row % 8 * 128 + i * ELEMENT, 128);
    if (ELEMENT == 2) { u16 h; memcpy(&h, at(address, 2), 2); return __uint_as_float((u32)h << 16); }
    const u8 c = *at(address, 1);  // E4M3
    const int e = c >> 3 & 15, m = c & 7;
    const float v = (c & 127) == 127 ? NAN : e == 0 ? ldexpf((float)m, -9) : ldexpf((float)(8 + m), e - 10);
    return c & 128 ? -v : v;
}
static void multiply(float* d, u64 a, u64 w, int add) { fiber->started.push_back({d, a, w, add}); }
static void products_begin() {}
static void products_commit() { fiber->products.push_back(fiber->started); fiber->started.clear(); }
template <int N> static void products_wait() {
    const int warp = fiber->thread / 32 % 4, lane = fiber->thread % 32;
    while (fiber->products.size() > N) {
        for (const Product& p : fiber->products.front()) {
            float rows[2][32 / ELEMENT];
            for (int i = 0; i < 32 / ELEMENT; i++)
                for (int r = 0; r < 2; r++) rows[r][i] = element_at(p.a, warp * 16 + lane / 4 + 8 * r, i);
            for (int j = 0; j < BN / 8; j++)
                for (int c = 0; c < 2; c++) {
                    double sum[2] = {0, 0};
                    for (int i = 0; i < 32 / ELEMENT; i++) {
                        const float v = element_at(p.w, 8 * j + 2 * (lane % 4) + c, i);
                        sum[0] += (double)rows[0][i] * v; sum[1] += (double)rows[1][i] * v;
                    }
                    for (int r = 0; r < 2; r++) { float& to = p.d[4 * j + 2 * r + c]; to = (float)((p.add ? to : 0.) + sum[r]); }
                }
        }
        fiber->products.pop_front();
    }
}
static void written(float&) {}
