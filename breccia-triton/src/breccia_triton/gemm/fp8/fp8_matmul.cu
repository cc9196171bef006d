// FP8 products on Hopper (sm_90a): out[M,N] = (A * scales) (W * scales)^T + bias, of A [M,K] and W [N,K], K adjacent in memory.
// Also products of BF16 numbers where A alone has scales (ELEMENT 2): A holds the codes of a quantized weight, W activations, and
// the output is written transposed, out[N,M]. So a scale along K belongs to a row of sums, of which a thread has two.
//
// The idea. A persistent grid of thread blocks walks over tiles of the output. In each block one warp (the producer) lets
// TMA fill a ring of STAGES parts of 128 bytes along K; the other NWG warpgroups (consumers) multiply, each H x 64
// rows by BN columns. An FP8 tensor core keeps about 13 fraction bits of its sums, so every step's product is added to FP32
// accumulators by ordinary instructions ("promotion"), times the scales of the step where blocks have scales. Two consumers
// take turns: one promotes while the tensor cores work for the other. Blocks of a cluster share operands (a copy goes to all
// of them; CM blocks along M share W, CN along N share A) or split K (SK blocks; partial sums meet in one block's shared
// memory). Where K is no multiple of a stage, or N of a tile, TMA reads zeros, and writes nothing outside. It takes longer for
// zeros than for rows that exist, so rows of A that do not exist are not copied: their sums, of whatever is there, go nowhere.
//
// Macros, besides those above:
//   TURNS            consumers take turns
//   RASTER           row tiles that share columns before the next columns begin
//   PARTS, BUFFERS   the output of 64 rows is staged in PARTS parts, in BUFFERS buffers
//   DEPENDENT        starts before the kernel ahead has ended (programmatic dependent launch)
//   PROMOTE          0 leaves the sums in the tensor core ("fast")
//   SCALES           OUTER: one scale per tensor or per row of A and W, applied at the end. TILES: 1 x 128 of A and 128 x 128
//                    of W. BLOCKS: 1 x 128 of both. ROWS, with ELEMENT 2: along K of A
//   ELEMENT          bytes of an element: 1, or 2 for BF16, where W has no scales and the output is transposed
//   SPAN             stages of a step, whose product is promoted once: 2 with ROWS means 1 x 128 of A
//   PIECES           parts of a stage that are promoted each. With BLOCKS 4 means 1 x 32 of both, where every instruction's
//                    product is promoted; with ROWS 1, 2 and 4 mean 1 x 64, 1 x 32 and 1 x 16 of A
//   A_E8M0, W_E8M0   scales of 1 x 32 are E8M0 codes, four for each step, which warps of the producer decode; or else FP32
//   A_PLAIN, W_PLAIN scales of blocks are [rows][K / 128] in memory, not [K / 128][rows]; those of 1 x 32 are [rows][K / 32]
//   COPIERS          warps of the producer copy plain scales, one number for each row and step; or else TMA does,
//                    in boxes of 16 bytes for each row, as many as it takes for the codes of the row
//   OUT, BIAS        F32, F16 or BF16; for BIAS also NONE
//   STAGED, PAIRS    the output leaves through shared memory and TMA; or else two columns at once
//   GROUPED          rows of A are in groups, each with its own matrix of W
#include "ptx.cuh"
#include "numbers.cuh"
#include "wgmma.cuh"  // multiply(float* d, u64 a, u64 w, int add): d[64,BN] (+)= A[64,32] W[BN,32]^T, by one warpgroup

#define OUTER 0
#define TILES 1
#define BLOCKS 2
#define ROWS 3
#define NONE 0
#define F32 1
#define F16 2
#define BF16 3

constexpr int BM = 64 * NWG * H, REGISTERS = BN / 2, CLUSTER = CM * CN * SK;
// Registers of a thread of the producer and of a consumer. A block has what its threads were launched with; a consumer that asks
// for more than the producer leaves waits for ever.
constexpr int THREADS = NWG * 128 + 128, LAUNCHED = 65536 / THREADS / 8 * 8;
constexpr int PRODUCER = NWG == 3 ? 56 : 40, CONSUMER = NWG == 3 ? 152 : 232;
static_assert(NWG == 1 || PRODUCER + NWG * CONSUMER <= LAUNCHED * (NWG + 1), "more registers than the block has");
constexpr int WIDTH = 128 / ELEMENT;    // elements along K of a stage
constexpr bool TURNED = ELEMENT == 2;   // out[N,M]
static_assert(ELEMENT == 1 ? SCALES != ROWS && SPAN == 1 : (SCALES == ROWS ? !A_PLAIN : SCALES == OUTER) && !GROUPED, "no form");
static_assert(STAGES >= 2 * SPAN && (SPAN == 1 || PIECES == 1), "a step awaits the next one's stages, then releases its own");
static_assert(STAGES % SPAN == 0, "stages of a step are side by side in the ring");
constexpr int A_PART = BM / CN;  // rows of A that one of the blocks that share it copies
constexpr int A_BYTES = BM * 128, W_BYTES = BN * 128, STAGE_BYTES = A_BYTES + W_BYTES;
constexpr int rounded_up(int n) { return (n + 127) / 128 * 128; }
// Bytes of a row's scales in a stage: of four pieces, of four steps (TMA's least box), or of this step.
constexpr int A_ROW = SCALES == ROWS ? 4 * PIECES : PIECES == 4 || (A_PLAIN && !COPIERS) ? 16 : 4;
constexpr int W_ROW = PIECES == 4 || (W_PLAIN && !COPIERS) ? 16 : 4;
constexpr int SA_BYTES = SCALES == OUTER ? 0 : BM * A_ROW, SW_BYTES = SCALES == BLOCKS ? BN * W_ROW : 0;  // in a stage
constexpr bool A_COPIER = A_E8M0 || (COPIERS && A_PLAIN && SCALES != OUTER);
constexpr bool W_COPIER = W_E8M0 || (COPIERS && W_PLAIN && SCALES == BLOCKS);
static_assert(!(A_E8M0 || W_E8M0) || (SCALES == BLOCKS && PIECES == 4), "no form");
static_assert(!COPIERS || PIECES == 1 || (A_E8M0 && W_E8M0), "FP32 scales of 1 x 32 come by TMA");
constexpr int SW_ROOM = rounded_up(SW_BYTES);
// Products that are in flight at once, each with registers of its own. With blocks of 1 x 32 a product is one instruction, after
// which the tensor core would wait for a promotion.
constexpr int FLIGHT = SCALES == BLOCKS && PIECES == 4 && H == 1 && NWG < 3 ? (BN <= 64 ? 4 : BN <= 128 ? 2 : 1) : 1;
// Columns of one box of the output: 128, 64 or 32 bytes.
constexpr int BOX = BN % 64 == 0 ? 64 : BN % 32 == 0 ? 32 : 16;
constexpr int PART = BN / PARTS, OUT_BYTES = STAGED ? 64 * PART * 2 : 0;
// Tiles start at multiples of UNIT inside a 128 x 128 block of W. Few segments: one scale for each. Else the main loop exists
// once for every offset, and has as many scales as blocks that a tile can touch.
constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }
constexpr int UNIT = gcd(BN, 128);
constexpr bool SEGMENTS = SCALES != TILES || BN / UNIT <= 3;
constexpr int W_SCALES = SCALES != TILES ? 1 : SEGMENTS ? BN / UNIT : (128 - UNIT + BN - 1) / 128 + 1;

struct __align__(64) TensorMap { u8 bytes[128]; };
struct Args {
    const float *sa, *sw;           // scales that TMA does not copy; codes, where they are E8M0
    const void* bias;
    void* out;
    const int* offsets;             // ends of the groups
    long long sa_matrix, sw_matrix; // from one matrix's scales to the next one's
    long long out_row, out_matrix;
    int M, N, K, matrices;
    int sa_row, sw_row;             // from one row's scale (or first scale) to the next one's: 0 for one scale
    int a_matrix, w_matrix;         // 1 where each matrix of the output has its own of A, of W; else 0
};

// ------------------------------------------------------------------------------------------------ PTX
// tests/tools/fp8_matmul_host.cpp has all of this for the host, where the rest of the file runs as it is.

// Without .release.cluster, which would cost a fence of the whole device. Nothing but the end of reads is announced.
__device__ __forceinline__ void barrier_arrive_in(u32 b, u32 block) {
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [a];\n}"
                 ::"r"(b), "r"(block) : "memory");
}
__device__ __forceinline__ void copy(u32 to, const TensorMap* map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_to_all(u32 to, const TensorMap* map, int x, int y, int z, u32 barrier, u16 blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks) : "memory");
}
// By threads, without TMA: 4 bytes, zeros unless `there`.
__device__ __forceinline__ void copy_4(u32 to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void barrier_arrive_after_copies(u32 b) {  // once this thread's copies have landed
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(b) : "memory");
}
__device__ __forceinline__ void prefetch(const TensorMap* map, int x, int y, int z) {  // to the L2 cache
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];"
                 ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void copy_out(const TensorMap* map, int x, int y, int z, u32 from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"(map), "r"(x), "r"(y), "r"(z), "r"(from) : "memory");
}
__device__ __forceinline__ void group_sync(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }
__device__ __forceinline__ void group_arrive(int id, int n) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory"); }
__device__ __forceinline__ float load(u32 a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a)); return v; }
__device__ __forceinline__ void load2(u32 a, float& x, float& y) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(a));
}
// Volatile: as plain arithmetic the compiler may sink it below the next product, and both products are then live at once.
__device__ __forceinline__ void add_scaled(float& sum, float d, float f) {
    asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sum) : "f"(d), "f"(f));
}
__device__ __forceinline__ void add(float& sum, float d) { asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(sum) : "f"(d)); }
__device__ __forceinline__ u32 rounded_pair(float low, float high) {
    u32 r;
    if constexpr (OUT == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Registers of each thread of a warpgroup, of those that its block was launched with.
template <int N> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
// Products (`multiply`) are in flight from `products_begin` until `products_wait<N>`: all but the last N that were committed.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void written(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }  // by a product: read it not before
// Copies out, likewise; `copies_out_read`: their buffers may be written again.
__device__ __forceinline__ void copies_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_out_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void copies_out_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void visible_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Four 8 x 8 matrices of 16-bit numbers by a warp: two neighbours of row lane / 4 in each word. to: of row lane % 8 of matrix
// lane / 8, where a row (if TURNED, a column) of 16 bytes goes.
__device__ __forceinline__ void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
    if constexpr (TURNED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                     ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                     ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ u32 address_in(u32 a, int block) {  // of another block of the cluster
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(a), "r"(block));
    return there;
}
__device__ __forceinline__ void store4(u32 to, const float* v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ void store_in(u32 to, const float* v) {  // four numbers
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ float of_f16(u16 h) { float v; asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h)); return v; }

// ------------------------------------------------------------------------------------------------ tiles

struct Tile { int row, column, matrix, end; };  // of the whole cluster: first row and column; end: where its rows end

// The tiles of one cluster, in rising order. RASTER row tiles share a column of tiles, so that their operands stay in L2.
struct Walk {
    int group = -1, first = 0, count = 0, start = 0, end = 0;  // of the group: number of its first tile, its tiles, its rows

    __device__ __forceinline__ bool seek(const Args& args, int t, Tile& tile) {
        const int across = (args.N + BN * CN - 1) / (BN * CN);
        int down, matrix, r;
        if constexpr (GROUPED) {
            while (t >= first + count) {
                if (++group >= args.matrices) return false;
                first += count; start = end;
                end = min(max(start, __ldg(args.offsets + group)), args.M);
                count = (end - start + BM * CM - 1) / (BM * CM) * across;
            }
            down = count / across; matrix = group; r = t - first;
        } else {
            down = (args.M + BM * CM - 1) / (BM * CM); end = args.M;
            if (t >= down * across * args.matrices) return false;
            matrix = 0; r = t;
            if (args.matrices > 1) { matrix = t / (down * across); r = t % (down * across); }
        }
        const int per = RASTER * across, head = r / per * RASTER, rows = min(down - head, RASTER), q = r % per;
        tile = {start + (head + q % rows) * BM * CM, q / rows * BN * CN, matrix, end};
        return true;
    }
};

// Wait for all products but the last n, up to 3: a constant where loops are unrolled.
__device__ __forceinline__ void products_wait_all_but(int n) {
    if (n == 0) products_wait<0>();
    else if (n == 1) products_wait<1>();
    else if (n == 2) products_wait<2>();
    else products_wait<3>();
}

template <int I> struct Constant { static constexpr int value = I; };
// f(offset) with the offset as a constant: one of 0, UNIT, 2 UNIT, ... below 128.
template <int I, class F> __device__ __forceinline__ void with_offset(int offset, F& f) {
    if constexpr (SEGMENTS || (I + 1) * UNIT >= 128) f(Constant<I * UNIT>{});
    else if (offset == I * UNIT) f(Constant<I * UNIT>{});
    else with_offset<I + 1>(offset, f);
}

__device__ __forceinline__ float bias_at(const void* bias, int column) {
    if constexpr (BIAS == F32) return __ldg((const float*)bias + column);
    if constexpr (BIAS == BF16) return of_bf16(__ldg((const u16*)bias + column));
    if constexpr (BIAS == F16) return of_f16(__ldg((const u16*)bias + column));
    return 0.f;
}

// One number of a transposed output.
__device__ __forceinline__ void store(const Args& args, long long at, float x) {
    if constexpr (OUT == F32) ((float*)args.out)[at] = x;
    else ((u16*)args.out)[at] = (u16)rounded_pair(x, 0.f);
}

// Two neighbouring numbers of the output, of which columns below N exist.
__device__ __forceinline__ void store(const Args& args, long long at, int column, float x, float y) {
    if constexpr (OUT == F32) {
        float* to = (float*)args.out + at;
        if constexpr (PAIRS) { if (column < args.N) *(float2*)to = make_float2(x, y); }
        else { if (column < args.N) to[0] = x; if (column + 1 < args.N) to[1] = y; }
    } else {
        const u32 both = rounded_pair(x, y);
        u16* to = (u16*)args.out + at;
        if constexpr (PAIRS) { if (column < args.N) *(u32*)to = both; }
        else { if (column < args.N) to[0] = (u16)both; if (column + 1 < args.N) to[1] = (u16)(both >> 16); }
    }
}

// ------------------------------------------------------------------------------------------------ scales by warps

// What one warp does: copy the scales of COUNT rows of A, or of W, to each stage. Beyond the last row they are any finite numbers.
// first: the block's first row in a tile of its cluster.
template <bool E8M0, int COUNT, bool OF_A>
__device__ __forceinline__ void copy_scales(const Args& args, u32 ring, u32 full, u32 empty, int first, int first_tile, int clusters,
                                            int k0, int k1, int lane) {
    constexpr int ROW = OF_A ? A_ROW : W_ROW, ROOM = OF_A ? SA_BYTES : SW_ROOM, EACH = COUNT < 128 ? (COUNT + 31) / 32 : 4;
    const int limit = OF_A ? args.M : args.N, pitch = OF_A ? args.sa_row : args.sw_row;
    u32 stage = 0, phase = 1;
    Walk walk; Tile tile;
#pragma unroll 1
    for (int t = first_tile; walk.seek(args, t, tile); t += clusters) {
        const int row = (OF_A ? tile.row : tile.column) + first;
        const long long matrix = OF_A ? (GROUPED ? 0 : tile.matrix * args.sa_matrix) : tile.matrix * args.sw_matrix;
        if constexpr (E8M0) {
            const u8* const from = (const u8*)(OF_A ? args.sa : args.sw) + matrix;
#pragma unroll 1
            for (int k = k0; k < k1; k++) {
#pragma unroll 1
                for (int some = 0; some < COUNT; some += 32 * EACH) {
                    u32 codes[EACH];  // of four scales each; the first are read before the stage is free
#pragma unroll
                    for (int i = 0; i < EACH; i++) {
                        const int r = some + 32 * i + lane;
                        const bool there = r < COUNT && row + r < limit;
                        codes[i] = there ? *((const u32*)(from + (long long)(row + r) * pitch) + k) : 0;
                    }
                    if (some == 0) barrier_wait(empty + 8 * stage, phase);
#pragma unroll
                    for (int i = 0; i < EACH; i++) {
                        const int r = some + 32 * i + lane;
                        float scales[4];
#pragma unroll
                        for (int n = 0; n < 4; n++) scales[n] = of_e8m0(codes[i] >> 8 * n & 255);
                        if (r < COUNT) store4(ring + stage * ROOM + r * ROW, scales);
                    }
                }
                barrier_arrive(full + 8 * stage);
                if (++stage == STAGES) { stage = 0; phase ^= 1; }
            }
        } else {
            const float* const from = (OF_A ? args.sa : args.sw) + matrix;
#pragma unroll 1
            for (int k = k0; k < k1; k++) {
                barrier_wait(empty + 8 * stage, phase);
                for (int r = lane; r < COUNT; r += 32) {
                    const bool there = row + r < limit;
                    copy_4(ring + stage * ROOM + r * ROW, from + (long long)(there ? row + r : 0) * pitch + k, there);
                }
                barrier_arrive_after_copies(full + 8 * stage);
                if (++stage == STAGES) { stage = 0; phase ^= 1; }
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------ the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fp8_matmul(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_a_end,
           const __grid_constant__ TensorMap map_w, const __grid_constant__ TensorMap map_sa,
           const __grid_constant__ TensorMap map_sw, const __grid_constant__ TensorMap map_out,
           const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 smem[];
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const u32 ring = shared_address(smem), staging = ring + STAGES * STAGE_BYTES, sa_ring = staging + NWG * BUFFERS * OUT_BYTES;
    const u32 sw_ring = sa_ring + STAGES * SA_BYTES, full = sw_ring + STAGES * SW_ROOM, empty = full + 8 * STAGES;
    // This block in its cluster: ci along M, cj along N, ck along K; and the steps along K that it takes.
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, ci = rank % CM, cj = rank / CM % CN, ck = rank / (CM * CN);
    const int steps = (args.K + SPAN * WIDTH - 1) / (SPAN * WIDTH), k0 = steps * ck / SK, k1 = steps * (ck + 1) / SK, count = k1 - k0;
    const int first_tile = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1 + 32 * (A_COPIER + W_COPIER));
            barrier_init(empty + 8 * s, (CM + CN - 1) * NWG * 4);  // a warp of each consumer that reads what this block copies
        }
        barriers_visible();
    }
    if (CLUSTER > 1) cluster_sync(); else __syncthreads();
    if (DEPENDENT) {
        // Weights too may be what the kernel ahead writes, so nothing is read before it has ended. But the L2 cache, which sees
        // all writes, may fetch them meanwhile. (Where groups end is not known yet.)
        Walk walk; Tile tile;
        if (!GROUPED && threadIdx.x == 0 && walk.seek(args, first_tile, tile))
#pragma unroll 1
            for (int k = SPAN * k0; k < SPAN * min(k1, k0 + STAGES / SPAN); k++)
                prefetch(&map_w, k * WIDTH, tile.column + cj * BN, tile.matrix * args.w_matrix);
        wait_for_grid_ahead();
        start_next_grid();
    }

    // Threads of the producer give registers up for those of the consumers, which hold sums and a product.
    if (group == NWG) {  // ---- the producer
        if (NWG > 1) give_registers<PRODUCER>();
        if (warp == 0 && lane == 0) {
            u32 stage = 0, phase = 1;
            Walk walk; Tile tile;
#pragma unroll 1
            for (int t = first_tile; walk.seek(args, t, tile); t += clusters) {
                const int row = tile.row + ci * BM, column = tile.column + cj * BN;
                const int za = GROUPED ? 0 : tile.matrix * args.a_matrix, zw = tile.matrix * args.w_matrix;
                // The part where A ends has a map of its own, of the next multiple of 8 rows.
                auto rows_of = [&](int part) {
                    return GROUPED ? A_PART : min(max((args.M - row - part * A_PART + 7) & ~7, 0), A_PART);
                };
                const int rows = rows_of(cj);
                int all = 0;
#pragma unroll
                for (int part = 0; part < CN; part++) all += rows_of(part);
                const TensorMap* const map = rows == A_PART ? &map_a : &map_a_end;
#pragma unroll 1
                for (int k = SPAN * k0; k < SPAN * k1; k++) {
                    const u32 a = ring + stage * STAGE_BYTES, w = a + A_BYTES, bar = full + 8 * stage;
                    const bool scaled = k % SPAN == 0;  // the first stage of a step has the scales
                    barrier_wait(empty + 8 * stage, phase);
                    const int scales = (A_COPIER || !scaled ? 0 : SA_BYTES) + (W_COPIER ? 0 : SW_BYTES);
                    barrier_arrive_expecting(bar, 128 * all + W_BYTES + scales);
                    // Each of the blocks that share an operand copies one part of it, to all of them.
                    if (rows > 0) {
                        if (CN == 1) copy(a, map, k * WIDTH, row, za, bar);
                        else copy_to_all(a + cj * (A_BYTES / CN), map, k * WIDTH, row + cj * A_PART, za, bar,
                                         (u16)(((1 << CM * CN) - 1) / ((1 << CM) - 1) << ci << ck * CM * CN));
                    }
                    if (CM == 1) copy(w, &map_w, k * WIDTH, column, zw, bar);
                    else copy_to_all(w + ci * (W_BYTES / CM), &map_w, k * WIDTH, column + ci * (BN / CM), zw, bar,
                                     (u16)(((1 << CM) - 1) << cj * CM << ck * CM * CN));
                    // A box has at least 16 bytes along its last axis: of plain scales, four steps, or four pieces of one.
                    const int four = PIECES == 4 ? 4 * k : k & ~3;
                    if (SCALES != OUTER && !A_COPIER && scaled)
                        copy(sa_ring + stage * SA_BYTES, &map_sa, A_PLAIN ? four : row,
                             A_PLAIN ? row : SCALES == ROWS ? k / SPAN * PIECES : k, za, bar);
                    if (SCALES == BLOCKS && !W_COPIER)
                        copy(sw_ring + stage * SW_ROOM, &map_sw, W_PLAIN ? four : column, W_PLAIN ? column : k, zw, bar);
                    if (++stage == STAGES) { stage = 0; phase ^= 1; }
                }
            }
            // Other blocks release stages here until the end. They come from far, and a block that has ended cannot take them.
            for (int s = 0; CM * CN > 1 && s < STAGES; s++) {
                barrier_wait(empty + 8 * stage, phase);
                if (++stage == STAGES) { stage = 0; phase ^= 1; }
            }
        } else if (A_COPIER && warp == 1) {
            copy_scales<A_E8M0, BM, true>(args, sa_ring, full, empty, ci * BM, first_tile, clusters, k0, k1, lane);
        } else if (W_COPIER && warp == 2) {
            copy_scales<W_E8M0, BN, false>(args, sw_ring, full, empty, cj * BN, first_tile, clusters, k0, k1, lane);
        }
        __syncwarp();
        if (SK > 1) { cluster_meet(); cluster_sync(); }
    } else {  // ---- the consumers
        if (NWG > 1) take_registers<CONSUMER>();
        float sum[H][REGISTERS], d[FLIGHT][REGISTERS];
#pragma unroll
        for (int i = 0; i < FLIGHT * REGISTERS; i++) d[i / REGISTERS][i % REGISTERS] = 0.f;
        u32 stage = 0, phase = 0;
        // Lanes 0 .. CM + CN - 2 each release a stage in one block that copies into it.
        const int releases = lane < CM ? ck * CM * CN + cj * CM + lane : ck * CM * CN + (cj + 1 + lane - CM) % CN * CM + ci;
        // A thread has rows `low` and `low` + 8 of every 64, and columns 8 j + `pair`, + 1.
        const int low = warp * 16 + (lane >> 2), pair = 2 * (lane & 3);
        if (TURNS && group == NWG - 1) group_arrive(1, 256);

        if constexpr (GROUPED) {  // rows of no group are zeros
            const int end = max(0, __ldg(args.offsets + args.matrices - 1));
            for (long long row = end + blockIdx.x; row < args.M; row += gridDim.x)
                for (int column = 2 * threadIdx.x; column < args.N; column += 2 * NWG * 128)
                    store(args, row * args.out_row + column, column, 0.f, 0.f);
            __syncwarp();  // threads of a warp have come apart, and the instructions of warpgroups need all of them
        }

        const float* w_at[W_SCALES]; float w_scale[W_SCALES], sa0[H], sa1[H];
        Walk walk; Tile tile, next;
        auto enter = [&](const Tile& to) {  // the scales of W for the tile's first step
            if constexpr (SCALES == TILES) {
                const int n = to.column + cj * BN, last = (args.N - 1) / 128;
#pragma unroll
                for (int s = 0; s < W_SCALES; s++) {
                    const int block = min(SEGMENTS ? (n + s * UNIT) / 128 : n / 128 + s, last);
                    w_at[s] = args.sw + (u64)to.matrix * args.sw_matrix + (u64)block * steps + k0; w_scale[s] = __ldg(w_at[s]);
                }
            }
        };
        auto row_scales = [&](u32 stage, int k) {  // the scales of this thread's rows in a stage that has arrived
            if constexpr (SCALES != OUTER && PIECES == 1) {
                const u32 at = sa_ring + stage * SA_BYTES + (group * 64 * H + low) * A_ROW + (A_ROW == 16 ? (k & 3) * 4 : 0);
#pragma unroll
                for (int h = 0; h < H; h++) { sa0[h] = load(at + h * 64 * A_ROW); sa1[h] = load(at + (h * 64 + 8) * A_ROW); }
            }
        };
        auto arrived = [&](u32 stage, u32 phase) {  // wait for all stages of a step
            barrier_wait(full + 8 * stage, phase);
            if constexpr (SPAN == 2) barrier_wait(full + 8 * stage + 8, phase);
        };
        bool more = walk.seek(args, first_tile, tile);
        if (more) { enter(tile); arrived(0, 0); row_scales(0, k0); }
        for (int t = first_tile; more; t += clusters, tile = next) {
            const int row = tile.row + ci * BM + group * 64 * H, column = tile.column + cj * BN;
#pragma unroll
            for (int i = 0; i < H * REGISTERS; i++) sum[i / REGISTERS][i % REGISTERS] = 0.f;  // in the loop: a select per step
            // At the top of a step its stages have arrived, and its scales are in registers. The next stage, also the next
            // tile's first, is awaited and its scales are fetched while the products run, so that the next one starts at once.
            auto step = [&](int k, auto offset, auto is_last) {
                constexpr int OFFSET = decltype(offset)::value, last = decltype(is_last)::value;
                const u32 base = ring + stage * STAGE_BYTES, here = stage;
                const bool wraps = stage + SPAN == STAGES;
                const u32 next_stage = wraps ? 0 : stage + SPAN, next_phase = wraps ? phase ^ 1 : phase;
                float f0[H][W_SCALES], f1[H][W_SCALES];
#pragma unroll
                for (int hp = 0; hp < H * PIECES; hp++) {
                    const int h = hp / PIECES, piece = hp % PIECES;
                    const bool final = hp == H * PIECES - 1;  // of this stage
                    float* product = PROMOTE ? d[piece % FLIGHT] : sum[h];
                    // Descriptors of operands: 128-byte swizzle, 1024 bytes from 8 rows to the next 8.
                    const u32 a = __shfl_sync(~0u, ((base + (group * H + h) * 8192) >> 4) | (1u << 16), 0);
                    const u32 w = __shfl_sync(~0u, ((base + A_BYTES) >> 4) | (1u << 16), 0);
                    auto multiply_piece = [&](float* product, u32 a, u32 w, int piece, bool first) {
#pragma unroll
                        for (int i = 0; i < 4 / PIECES; i++) {
                            const int q = piece * (4 / PIECES) + i;  // 32 bytes along K
                            const u64 high = (u64)0x40000040u << 32;
                            multiply(product, high | (a + 2 * q), high | (w + 2 * q), !PROMOTE || !first || i != 0);
                        }
                        products_commit();
                    };
                    if (piece % FLIGHT == 0) {
                        if (TURNS) group_sync(1 + group, 256);
                        products_begin();
                        multiply_piece(product, a, w, piece, true);
#pragma unroll
                        for (int i = 1; i < FLIGHT; i++) multiply_piece(d[i], a, w, piece + i, true);
                        if constexpr (SPAN == 2) multiply_piece(product, a + STAGE_BYTES / 16, w + STAGE_BYTES / 16, piece, false);
                        if (TURNS) group_arrive(1 + (group + 1) % NWG, 256);
                    }
                    if (SCALES != OUTER && !(SCALES == ROWS && PIECES > 1) && hp == 0)
#pragma unroll
                        for (int i = 0; i < H; i++)
#pragma unroll
                            for (int s = 0; s < W_SCALES; s++) {
                                f0[i][s] = SCALES == TILES ? sa0[i] * w_scale[s] : sa0[i];
                                f1[i][s] = SCALES == TILES ? sa1[i] * w_scale[s] : sa1[i];
                            }
                    if constexpr (SCALES == ROWS && PIECES > 1) {
                        const u32 sa = sa_ring + here * SA_BYTES + (piece * BM + (group * H + h) * 64 + low) * 4;
                        f0[h][0] = load(sa); f1[h][0] = load(sa + 32);
                    }
                    if (final) {
                        if constexpr (last) {
                            more = walk.seek(args, t + clusters, next);
                            if (more) enter(next);
                        } else if constexpr (SCALES == TILES) {
#pragma unroll
                            for (int s = 0; s < W_SCALES; s++) w_scale[s] = __ldg(w_at[s] + k + 1);
                        }
                        if (!last || more) {
                            arrived(next_stage, next_phase);
                            row_scales(next_stage, last ? k0 : k0 + k + 1);
                        }
                    }
                    auto release = [&](u32 stage) {
                        if (!final) return;
                        __syncwarp();
                        if (CM * CN == 1) { if (lane == 0) barrier_arrive(empty + 8 * stage); }
                        else if (lane < CM + CN - 1) barrier_arrive_in(empty + 8 * stage, releases);
                    };
                    if constexpr (SPAN == 2) {  // the first stage may be filled while the second one's products run
                        products_wait<1>();
                        release(here);
                    }
                    products_wait_all_but(FLIGHT - 1 - piece % FLIGHT);
#pragma unroll
                    for (int i = 0; i < REGISTERS; i++) written(product[i]);
                    if (SCALES != BLOCKS) release(here + SPAN - 1);
                    if constexpr (PROMOTE) {
                        const int part = PIECES == 4 ? piece : (k0 + k) & 3;  // of four scales side by side
                        const u32 sw = sw_ring + here * SW_ROOM + (W_ROW == 16 ? pair * 16 + part * 4 : pair * 4);
                        if constexpr (SCALES == BLOCKS && PIECES == 4) {
                            const u32 sa = sa_ring + here * SA_BYTES + ((group * H + h) * 64 + low) * 16 + piece * 4;
                            f0[h][0] = load(sa); f1[h][0] = load(sa + 128);
                        }
#pragma unroll
                        for (int j = 0; j < BN / 8; j++) {
                            float* to = sum[h] + 4 * j; const float* from = product + 4 * j;
                            if constexpr (SCALES == OUTER) {
#pragma unroll
                                for (int i = 0; i < 4; i++) add(to[i], from[i]);
                            } else if constexpr (SCALES == TILES || SCALES == ROWS) {
                                const int s = SCALES == ROWS ? 0 : SEGMENTS ? 8 * j / UNIT : (OFFSET + 8 * j) / 128;
                                add_scaled(to[0], from[0], f0[h][s]); add_scaled(to[1], from[1], f0[h][s]);
                                add_scaled(to[2], from[2], f1[h][s]); add_scaled(to[3], from[3], f1[h][s]);
                            } else {
                                float c0, c1;
                                if constexpr (W_ROW == 16) { c0 = load(sw + j * 128); c1 = load(sw + j * 128 + 16); }
                                else load2(sw + j * 32, c0, c1);
                                add_scaled(to[0], from[0], c0 * f0[h][0]); add_scaled(to[1], from[1], c1 * f0[h][0]);
                                add_scaled(to[2], from[2], c0 * f1[h][0]); add_scaled(to[3], from[3], c1 * f1[h][0]);
                            }
                        }
                    }
                    if (SCALES == BLOCKS) release(here + SPAN - 1);
                }
                stage = next_stage; phase = next_phase;
            };
            auto main_loop = [&](auto offset) {  // the last step is a copy of its own: no test for it in the loop
#pragma unroll 1
                for (int k = 0; k + 1 < count; k++) step(k, offset, Constant<0>{});
                step(count - 1, offset, Constant<1>{});
            };
            with_offset<0>(SCALES == TILES ? column & 127 : 0, main_loop);

            // ---- the end of a tile
#if SK > 1
            // Every block of the cluster has a partial sum. They meet in one block's ring (each consumer's own, to spread it).
            const int home = NWG == SK ? group : 0, slot = ck < home ? ck : ck - 1, thread = threadIdx.x & 127;
            cluster_meet();  // no ring is in use any more
            if (ck != home) {
                const u32 to = address_in(ring + ((slot * NWG + group) * 128 + thread) * 16, home * CM * CN + rank % (CM * CN));
#pragma unroll
                for (int i = 0; i < REGISTERS; i += 4)
                    store_in(to + i / 4 * (SK - 1) * NWG * 2048, sum[0] + i);
            }
            cluster_sync();
            if (ck != home) break;
            for (int p = 0; p < SK - 1; p++)
#pragma unroll
                for (int i = 0; i < REGISTERS; i += 4) {
                    const int at = ((p * NWG + group) * 128 + thread) * 16 + i / 4 * (SK - 1) * NWG * 2048;
                    const float4 v = *(const float4*)(smem + at);
                    sum[0][i] += v.x; sum[0][i + 1] += v.y; sum[0][i + 2] += v.z; sum[0][i + 3] += v.w;
                }
#endif
            if constexpr (SCALES == OUTER || BIAS != NONE)
#pragma unroll
                for (int h = 0; h < H; h++) {
                    const float* sa = args.sa + (GROUPED ? 0 : tile.matrix * args.sa_matrix);
                    const float* sw = args.sw + tile.matrix * args.sw_matrix;
                    float r0 = 1.f, r1 = 1.f, b0 = 0.f, b1 = 0.f;
                    if constexpr (TURNED) {
                        b0 = bias_at(args.bias, min(row + h * 64 + low, args.M - 1));
                        b1 = bias_at(args.bias, min(row + h * 64 + low + 8, args.M - 1));
                    }
                    if constexpr (SCALES == OUTER) {
                        r0 = __ldg(sa + (long long)min(row + h * 64 + low, args.M - 1) * args.sa_row);
                        r1 = __ldg(sa + (long long)min(row + h * 64 + low + 8, args.M - 1) * args.sa_row);
                    }
#pragma unroll
                    for (int j = 0; j < BN / 8; j++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const int n = min(column + 8 * j + pair + i, args.N - 1);
                            float c = 1.f;
                            if constexpr (SCALES == OUTER && !TURNED) c = __ldg(sw + (long long)n * args.sw_row);
                            if constexpr (!TURNED) b0 = b1 = bias_at(args.bias, n);
                            float &x = sum[h][4 * j + i], &y = sum[h][4 * j + 2 + i];
                            if constexpr (BIAS == NONE) { x *= r0 * c; y *= r1 * c; }
                            else { x = fmaf(x, r0 * c, b0); y = fmaf(y, r1 * c, b1); }
                        }
                }
#pragma unroll
            for (int hp = 0; hp < H * PARTS; hp++) {
                const int h = hp / PARTS, from = hp % PARTS * PART;  // columns [from, from + PART) of 64 rows
                // TMA would also write rows of the next group.
                const bool staged = STAGED && (!GROUPED || row + h * 64 + 64 <= tile.end);
                if (staged) {
                    const u32 buffer = staging + (group * BUFFERS + hp % BUFFERS) * OUT_BYTES;
                    if (GROUPED || hp % BUFFERS == 0) {  // earlier copies have left the buffers
                        if ((threadIdx.x & 127) == 0) copies_out_read();
                        group_sync(5 + group, 128);
                    }
                    const int r = TURNED ? (lane >> 4) * 8 + (lane & 7) : warp * 16 + (lane & 15);
#pragma unroll
                    for (int j = 0; j < PART / 16; j++) {
                        // Where this lane's 8 numbers of a row of the output go; transposed, a row has 64 of them.
                        u32 to;
                        if constexpr (TURNED) {
                            to = buffer + (16 * j + r) * 128 + (((warp * 2 + (lane >> 3 & 1)) ^ (r & 7)) * 16);
                        } else {
                            const int c = 16 * j + (lane >> 4) * 8, box = c / BOX, chunk = c % BOX / 8;
                            const int swizzle = BOX == 64 ? r & 7 : BOX == 32 ? (r >> 1) & 3 : (r >> 2) & 1;
                            to = buffer + box * (64 * BOX * 2) + r * (BOX * 2) + ((chunk ^ swizzle) * 16);
                        }
                        const float* v = sum[h] + from / 2 + 8 * j;
                        store_matrices(to, rounded_pair(v[0], v[1]), rounded_pair(v[2], v[3]), rounded_pair(v[4], v[5]),
                                               rounded_pair(v[6], v[7]));
                    }
                    visible_to_copies();
                    group_sync(5 + group, 128);
                    if ((threadIdx.x & 127) == 0) {
                        if constexpr (TURNED) copy_out(&map_out, row + h * 64, column + from, tile.matrix, buffer);
                        else
#pragma unroll
                        for (int x = 0; x < PART / BOX; x++)
                            copy_out(&map_out, column + from + x * BOX, row + h * 64, GROUPED ? 0 : tile.matrix,
                                     buffer + x * (64 * BOX * 2));
                        copies_out_commit();
                    }
                } else if constexpr (!STAGED || GROUPED) {
#pragma unroll
                    for (int j = 0; j < PART / 8; j++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const int m = row + h * 64 + low + 8 * i, n = column + from + 8 * j + pair;
                            const float* v = sum[h] + from / 2 + 4 * j + 2 * i;
                            if constexpr (TURNED) {
                                const long long at = tile.matrix * args.out_matrix + n * args.out_row + m;
                                if (m < tile.end && n < args.N) store(args, at, v[0]);
                                if (m < tile.end && n + 1 < args.N) store(args, at + args.out_row, v[1]);
                            } else {
                                const long long at = (GROUPED ? 0 : tile.matrix * args.out_matrix) + m * args.out_row + n;
                                if (m < tile.end) store(args, at, n, v[0], v[1]);
                            }
                        }
                }
            }
        }
        if (STAGED && (threadIdx.x & 127) == 0) copies_out_done();
    }
}
