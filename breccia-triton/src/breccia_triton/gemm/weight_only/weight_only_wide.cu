// Weight-only matmul, M > 16: wgmma m64nBATCHk16, the weight decoded in registers as operand A, x in shared memory as operand B.
//
// A block takes 64 * HIGH rows of w and BATCH rows of x. HIGH * DEEP warpgroups compute; the DEEP ones of the same rows take chunks
// along K in turn. One producer warp fills a ring of STAGES stages, each a chunk of 128 columns: weights by bulk copies, x by TMA
// in the 128-byte swizzle that wgmma reads. A warpgroup starts its products, decodes its next chunk while they run, then adds the
// scaled partial sums. SPLIT blocks of a cluster share K; sums meet in shared memory in a fixed order.
//
// GROUPED: blocks along y take BATCH rows of x of one group each.
//
// Macros: BATCH 16, 32, 64, 128, 256; HIGH, DEEP, STAGES, SPLIT, PER_SM blocks of a multiprocessor; see weight_only.cuh.
#include "weight_only.cuh"
#include "wgmma.cuh"

constexpr int GROUPS_OF_WARPS = HIGH * DEEP, WARPS = 4 * GROUPS_OF_WARPS, ROWS = 64 * HIGH;
constexpr int X_TILE = BATCH * 128, X_STAGE = 2 * X_TILE;  // 64 columns, one swizzle atom wide
constexpr int W_STAGE = HIGH * CHUNK;
constexpr int SUM_PITCH = ROWS + 4;
// Registers are given to warps in fours, so a lone producer warp costs as much as a warpgroup. With BATCH 128 two consumers need
// more than the 168 that this leaves: the producer is a warpgroup then, and hands its registers over.
constexpr bool MOVE = BATCH >= 128 && GROUPS_OF_WARPS == 2;
constexpr int THREADS = WARPS * 32 + (MOVE ? 128 : 32);

struct __align__(64) TensorMap { u64 words[16]; };
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// A warpgroup's next chunk: operands A, and the scales of rows g, g + 8 of each group.
struct Decoded { u32 a[UNITS][4]; float s0[GROUPS], s1[GROUPS]; };

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM)
weight_only_wide(const __grid_constant__ Weight given, GROUPS_ARGUMENT const __grid_constant__ TensorMap map, const u16* __restrict__ x, const void* __restrict__ bias,
                 void* __restrict__ y, int M, int N, int K, int ldx, int ldy) {
    extern __shared__ __align__(1024) u8 memory[];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, tile = warp & 3, g = lane >> 2, t = lane & 3;
    const int high = (warp >> 2) / DEEP, deep = (warp >> 2) % DEEP;
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
#if GROUPED
    const int row0 = blockIdx.x / SPLIT * ROWS;
    wait_for_grid_ahead();                                             // which may write where groups end
    if (thread == 0) start_next_grid();
    const Part part = part_of(groups, blockIdx.y, BATCH, M, lane);
    if (part.group < 0) return;                                        // the same for all blocks of the cluster
    if (part.group == groups.count) {
        if (rank == 0) write_zeros(y, part.first, part.last, row0, ROWS, N, ldy);
        return;
    }
    const Weight w = weight_of(given, groups, part.group);
    const int m0 = part.first, m1 = part.last;
#else
    const Weight& w = given;
    // RASTER blocks of rows of x take the same rows of w at about the same time, so that all but one find them in the L2 cache.
    constexpr int RASTER = 8;
    const int across = gridDim.x / SPLIT, at = blockIdx.y * across + blockIdx.x / SPLIT, per = RASTER * across;
    const int head = at / per * RASTER, taken = min((int)gridDim.y - head, RASTER);
    const int row0 = at % per / taken * ROWS;
    const int m0 = (head + at % per % taken) * BATCH, m1 = min(M, m0 + BATCH);
#endif
    const int chunks = (K + COLUMNS - 1) / COLUMNS, first = chunks * rank / SPLIT, mine = chunks * (rank + 1) / SPLIT - first;
    const u32 x_ring = shared_address(memory), w_ring = x_ring + STAGES * X_STAGE;
    const u32 full = w_ring + STAGES * W_STAGE, empty = full + 8 * STAGES;
    const int blocks = (N + 63) / 64;
    auto block = [&](int i) { return min(row0 / 64 + i, blocks - 1); };    // beyond N: any rows, which are not stored
    int flags = 0;
#pragma unroll
    for (int i = 0; i < HIGH; i++) flags |= w.rows[block(i) * 2];
    const int largest = w.rows[block(min(high, HIGH - 1)) * 2 + 1];

    const u64 policy = policy_of(gridDim.y == 1);
    auto fetch_w = [&](int i) {
        const u32 s = i % STAGES;
        barrier_expect(full + 8 * s, W_STAGE);
#pragma unroll
        for (int r = 0; r < HIGH; r++)
            bulk_load(w_ring + s * W_STAGE + r * CHUNK, w.chunks + ((u64)block(r) * chunks + first + i) * CHUNK, CHUNK, full + 8 * s, policy);
    };
    if (thread == WARPS * 32) {
        for (int s = 0; s < STAGES; s++) { barrier_init(full + 8 * s, 1); barrier_init(empty + 8 * s, HIGH * 4); }
        barriers_visible();
        for (int i = 0; i < STAGES && i < mine; i++) fetch_w(i);
    }
    __syncthreads();
    if (flags >> ACT & 1) {                                            // the same for all blocks of the cluster
        if (thread == WARPS * 32)
            for (int i = 0; i < STAGES && i < mine; i++) { barrier_arrive(full + 8 * i); barrier_wait(full + 8 * i, 0); }
#if !GROUPED
        wait_for_grid_ahead();
        if (thread == 0) start_next_grid();
#endif
        if (rank == 0) slow_rows(w, x, bias, y, m0, m1, row0, ROWS, N, K, ldx, ldy);
        __syncthreads();
        return;
    }
    float* shared = (float*)memory;
    if (warp >= WARPS) {
        if (MOVE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == WARPS && lane == 0) {
#if !GROUPED
            wait_for_grid_ahead();
            start_next_grid();
#endif
            for (int i = 0; i < mine; i++) {
                const u32 s = i % STAGES;
                if (i >= STAGES) {
                    barrier_wait(empty + 8 * s, (i / STAGES - 1) & 1);
                    fetch_w(i);
                }
                barrier_arrive_expecting(full + 8 * s, X_STAGE);
                const u32 to = x_ring + s * X_STAGE;
                tma_load(to, &map, (first + i) * COLUMNS, m0, full + 8 * s);
                tma_load(to + X_TILE, &map, (first + i) * COLUMNS + 64, m0, full + 8 * s);
            }
        }
        __syncwarp();
        __syncthreads();                                               // with that of the consumers
    } else {
        if (MOVE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float sums[BATCH / 2];
#pragma unroll
        for (int i = 0; i < BATCH / 2; i++) sums[i] = 0.f;

        auto load_and_decode = [&](int i, Decoded& d) {
            const u32 s = i % STAGES, slice = w_ring + s * W_STAGE + high * CHUNK + tile * SLICE;
            barrier_wait(full + 8 * s, (i / STAGES) & 1);
            Codes codes;
            Rows rows = {};
            load_codes(slice, lane, codes);
            if (!AT_DECODE)
#pragma unroll
                for (int k = 0; k < GROUPS; k++) load_scales(slice, g, k, d.s0[k], d.s1[k]);
#pragma unroll
            for (int j = 0; j < UNITS; j++) decode_tile(codes, slice, g, j, largest, rows, d.a[j]);
        };
        auto step = [&](int i, Decoded& now, Decoded& next) {
            const u32 s = i % STAGES;
            // The descriptor of a tile: swizzled by 128 bytes, groups of 8 rows 1024 bytes apart, the address / 16 in the low word. One
            // base that is uniform in a warp and constants: otherwise ptxas builds each descriptor in vector registers.
            const u32 base = __shfl_sync(0xffffffffu, ((x_ring + s * X_STAGE) >> 4) | (1u << 16), 0);
            auto x_tile = [&](int j) { return ((u64)0x40000040u << 32) | (base + ((j / 4) * X_TILE + (j % 4) * 32) / 16); };
            auto release = [&] { __syncwarp(); if (lane == 0) barrier_arrive(empty + 8 * s); };  // every lane has read the stage
            if constexpr (AT_DECODE) {
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < UNITS; j++) wgmma(sums, now.a[j], x_tile(j), 1);
                wgmma_commit();
                if (i + DEEP < mine) load_and_decode(i + DEEP, next);
                wgmma_wait();
                release();
            } else {
#pragma unroll
                for (int k = 0; k < GROUPS; k++) {
                    float part[BATCH / 2];
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < GROUP / 16; j++) wgmma(part, now.a[k * GROUP / 16 + j], x_tile(k * GROUP / 16 + j), j != 0);
                    wgmma_commit();
                    if (k == 0 && i + DEEP < mine) load_and_decode(i + DEEP, next);
                    wgmma_wait();
                    if (k == GROUPS - 1) release();
#pragma unroll
                    for (int v = 0; v < BATCH / 2; v++) sums[v] += (v & 2 ? now.s1[k] : now.s0[k]) * part[v];
                }
            }
        };
        Decoded even, odd;
        if (deep < mine) load_and_decode(deep, even);
        for (int i = deep; i < mine; i += 2 * DEEP) {
            step(i, even, odd);
            if (i + DEEP < mine) step(i + DEEP, odd, even);
        }
        __syncthreads();                                               // the rings are drained: reuse them as [deep][m][row]
        const float of_rows = factor_of_rows(largest);
#pragma unroll
        for (int v = 0; v < BATCH / 2; v++) {
            const int m = (v / 4) * 8 + 2 * t + (v & 1), row = high * 64 + tile * 16 + g + 4 * (v & 2);
            shared[(deep * BATCH + m) * SUM_PITCH + row] = sums[v] * of_rows;
        }
    }
    __syncthreads();
    const int m_rows = m1 - m0;
    if (DEEP > 1 && SPLIT > 1) {                                       // add up this block's warpgroups before others read
        for (int o = thread; o < m_rows * ROWS; o += THREADS) {
            const int at = o / ROWS * SUM_PITCH + o % ROWS;
            float sum = shared[at];
#pragma unroll
            for (int d = 1; d < DEEP; d++) sum += shared[d * BATCH * SUM_PITCH + at];
            shared[at] = sum;
        }
    }
    if (SPLIT > 1) cluster_sync();
    if (warp < WARPS) {
        const float factor = factor_of(w);
        const int share = m_rows * ROWS / SPLIT;                       // each block of the cluster finishes a part
        for (int o = rank * share + thread; o < (rank + 1) * share; o += WARPS * 32) {
            const int m = o / ROWS, row = o % ROWS;
            float sum = 0.f;
            if (SPLIT == 1) {
#pragma unroll
                for (int d = 0; d < DEEP; d++) sum += shared[(d * BATCH + m) * SUM_PITCH + row];
            } else {
#pragma unroll
                for (int r = 0; r < SPLIT; r++) sum += load_of_rank(shared_address(shared + m * SUM_PITCH + row), r);
            }
            if (row0 + row < N) finish(y, bias, ldy, m0 + m, row0 + row, sum, factor);
        }
    }
    if (SPLIT > 1) cluster_meet();                                     // no block ends while others read its sums
}
