// PTX instructions that the kernels of this folder share. Addresses of shared memory are 32-bit numbers.
#pragma once
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- barriers in shared memory (mbarrier) ----

// n: arrivals that complete a phase.
__device__ __forceinline__ void barrier_init(u32 b, u32 n) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n));
}
// Also to the cluster's other blocks, and to TMA.
__device__ __forceinline__ void barriers_visible() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 b) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory");
}
// Arrive, and let the phase also wait for so many bytes of copies.
__device__ __forceinline__ void barrier_arrive_expecting(u32 b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 b, u32 phase) {
    asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}"
                 ::"r"(b), "r"(phase) : "memory");
}

// ---- programmatic dependent launch: this grid may start before the one ahead has ended ----

__device__ __forceinline__ void wait_for_grid_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- clusters of blocks ----

__device__ __forceinline__ int cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return (int)r; }
// All threads of the cluster meet, and see each other's writes.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// They only meet: keeps a block's shared memory alive while others read it. A release would flush the whole device's writes.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
