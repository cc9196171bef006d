// Weight-only matmul, M <= 16: bound by the bytes of the weight.
//
// mma.sync m16n8k16 with the weight as operand A (16 rows of w) and x as operand B (8 rows of x). A block takes TILES * 16 rows of w;
// its WARPS warps take its chunks along K in turn. Each warp streams chunks (one bulk copy each) and its columns of x (cp.async)
// through a ring of its own with STAGES stages, so warps never wait for each other before the final sum, which meets in shared
// memory and, for SPLIT > 1, across a cluster of SPLIT blocks along K. The order of additions is fixed: results are reproducible.
// x does not use bulk copies: those complete in order, so they would queue behind all prefetched weights.
//
// GROUPED: blocks along y take 8 * BATCH rows of x of one group each; M is the number of all rows.
//
// Macros: BATCH (M <= 8 * BATCH), TILES 2 or 4, WARPS, STAGES, SPLIT, PER_SM blocks of a multiprocessor; see weight_only.cuh.
#include "weight_only.cuh"

constexpr int THREADS = WARPS * 32, ROWS = TILES * 16;
constexpr int STAGE = TILES * SLICE;                     // weight bytes of a warp's stage
constexpr int X_PITCH = COLUMNS * 2 + 16;                // +16: the 8 rows that ldmatrix reads start in different banks
constexpr int SUM_PITCH = ROWS + 4;                      // 4 modulo 32: a warp's writes hit 32 different banks

__device__ __forceinline__ void multiply(float* d, const float* c, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." INPUTS ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
__device__ __forceinline__ void load_matrices(u32 a, u32* r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM)
weight_only_small(const __grid_constant__ Weight given, GROUPS_ARGUMENT const u16* __restrict__ x, const void* __restrict__ bias, void* __restrict__ y,
                  int M, int N, int K, int ldx, int ldy) {
    extern __shared__ __align__(128) u8 memory[];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    const int rank = SPLIT > 1 ? cluster_rank() : 0, row0 = blockIdx.x / SPLIT * ROWS;
#if GROUPED
    wait_for_grid_ahead();                                             // which may write where groups end
    if (thread == 0) start_next_grid();
    const Part part = part_of(groups, blockIdx.y, 8 * BATCH, M, lane);
    if (part.group < 0) return;                                        // the same for all blocks of the cluster
    if (part.group == groups.count) {
        if (rank == 0) write_zeros(y, part.first, part.last, row0, ROWS, N, ldy);
        return;
    }
    const Weight w = weight_of(given, groups, part.group);
    const int m0 = part.first, batch = part.last - part.first;
#else
    const Weight& w = given;
    const int m0 = 0, batch = M;
#endif
    const int chunks = (K + COLUMNS - 1) / COLUMNS, first = chunks * rank / SPLIT, last = chunks * (rank + 1) / SPLIT;
    const int x_stage = batch * X_PITCH;
    const u32 w_ring = shared_address(memory) + warp * STAGES * STAGE;
    const u32 x_ring = shared_address(memory) + WARPS * STAGES * STAGE + warp * STAGES * x_stage;
    const u32 full = shared_address(memory) + WARPS * STAGES * (STAGE + x_stage) + 8 * warp * STAGES;
    const int flags = w.rows[row0 / 64 * 2], largest = w.rows[row0 / 64 * 2 + 1];

    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 33);   // the weights (1) and every lane's part of x (32)
        barriers_visible();
    }
    __syncwarp();

    const int mine = (last - first - warp + WARPS - 1) / WARPS;        // chunks first + warp, first + warp + WARPS, ...
    auto chunk = [&](int i) { return first + warp + i * WARPS; };
    const u8* weights = w.chunks + (u64)(row0 / 64) * chunks * CHUNK + row0 % 64 / 16 * SLICE;
    const u64 policy = policy_of(true);
    auto fetch_w = [&](int i) {                                        // by lane 0
        const int s = i % STAGES;
        barrier_arrive_expecting(full + 8 * s, STAGE);
        bulk_load(w_ring + s * STAGE, weights + (u64)chunk(i) * CHUNK, STAGE, full + 8 * s, policy);
    };
    auto fetch_x = [&](int i) {                                        // 16 bytes at a time, zeros beyond K
        const int s = i % STAGES, k = chunk(i) * COLUMNS;
        for (int p = lane; p < batch * (COLUMNS / 8); p += 32) {
            const int m = p / (COLUMNS / 8), c = p % (COLUMNS / 8) * 8;
            const bool inside = k + c < K;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         ::"r"(x_ring + s * x_stage + m * X_PITCH + c * 2), "l"(x + (u64)(m0 + m) * ldx + (inside ? k + c : 0)), "r"(inside ? 16 : 0) : "memory");
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full + 8 * s) : "memory");
    };
    if (lane == 0)
        for (int i = 0; i < STAGES && i < mine; i++) fetch_w(i);
#if !GROUPED
    wait_for_grid_ahead();
    if (thread == 0) start_next_grid();
#endif
    for (int i = 0; i < STAGES && i < mine; i++) fetch_x(i);

    if (flags >> ACT & 1) {                                            // the same for all blocks of the cluster
        for (int i = 0; i < STAGES && i < mine; i++) barrier_wait(full + 8 * i, 0);
        if (rank == 0) slow_rows(w, x, bias, y, m0, m0 + batch, row0, ROWS, N, K, ldx, ldy);
        return;
    }

    float sums[TILES][BATCH][4] = {};
    // ldmatrix.x4 reads 8 rows of x by 32 columns: operands B of two steps along K. Rows past the batch repeat its last; their
    // results are never stored.
    u32 x_offset[BATCH];
#pragma unroll
    for (int n = 0; n < BATCH; n++) x_offset[n] = min(n * 8 + (lane & 7), batch - 1) * X_PITCH + (lane >> 3) * 16;

    for (int i = 0; i < mine; i++) {
        const int s = i % STAGES;
        barrier_wait(full + 8 * s, (i / STAGES) & 1);
        u32 b[BATCH][UNITS][2];
#pragma unroll
        for (int n = 0; n < BATCH; n++)
#pragma unroll
            for (int j = 0; j < UNITS; j += 2) load_matrices(x_ring + s * x_stage + x_offset[n] + j * 32, b[n][j]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const u32 slice = w_ring + s * STAGE + tile * SLICE;
            const float zeros[4] = {};
            Codes codes;
            Rows rows = {};
            float part[BATCH][4];
            load_codes(slice, lane, codes);
#pragma unroll
            for (int j = 0; j < UNITS; j++) {
                u32 a[4];
                decode_tile(codes, slice, g, j, largest, rows, a);
#pragma unroll
                for (int n = 0; n < BATCH; n++)
                    if (AT_DECODE) multiply(sums[tile][n], sums[tile][n], a, b[n][j]);
                    else multiply(part[n], j * 16 % GROUP == 0 ? zeros : part[n], a, b[n][j]);
                if (!AT_DECODE && (j + 1) * 16 % GROUP == 0) {          // the end of a group: its scale in FP32
                    float s0, s1;
                    load_scales(slice, g, j * 16 / GROUP, s0, s1);
#pragma unroll
                    for (int n = 0; n < BATCH; n++)
#pragma unroll
                        for (int v = 0; v < 4; v++) sums[tile][n][v] += (v < 2 ? s0 : s1) * part[n][v];
                }
            }
        }
        __syncwarp();                                                  // all lanes have read the stage: refill it
        if (i + STAGES < mine) {
            if (lane == 0) fetch_w(i + STAGES);
            fetch_x(i + STAGES);
        }
    }

    __syncthreads();                                                   // the rings are drained: reuse them as [warp][m][row]
    float* shared = (float*)memory;
    const int plane = batch * SUM_PITCH;
    const float of_rows = factor_of_rows(largest);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int n = 0; n < BATCH; n++)
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const int m = n * 8 + 2 * t + (v & 1), row = tile * 16 + g + 8 * (v >> 1);
                if (m < batch) shared[warp * plane + m * SUM_PITCH + row] = sums[tile][n][v] * of_rows;
            }
    __syncthreads();
    const float factor = factor_of(w);
    for (int o = thread; o < batch * ROWS; o += THREADS) {
        const int m = o / ROWS, row = o % ROWS;
        float sum = 0.f;
#pragma unroll
        for (int each = 0; each < WARPS; each++) sum += shared[each * plane + m * SUM_PITCH + row];
        if (SPLIT > 1) shared[m * SUM_PITCH + row] = sum;              // only this thread reads or writes the element
        else if (row0 + row < N) finish(y, bias, ldy, m0 + m, row0 + row, sum, factor);
    }
    if (SPLIT > 1) {
        cluster_sync();
        const int share = batch * ROWS / SPLIT;                            // each block of the cluster finishes a part
        for (int o = rank * share + thread; o < (rank + 1) * share; o += THREADS) {
            const int m = o / ROWS, row = o % ROWS;
            float sum = 0.f;
#pragma unroll
            for (int r = 0; r < SPLIT; r++) sum += load_of_rank(shared_address(shared + m * SUM_PITCH + row), r);
            if (row0 + row < N) finish(y, bias, ldy, m0 + m, row0 + row, sum, factor);
        }
        cluster_meet();
    }
}
