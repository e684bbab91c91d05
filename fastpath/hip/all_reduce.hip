// Sum over ranks in one balanced tree, read straight from the other ranks' memory (IPC handles): the contract of
// all_reduce, merge tree, float32. Every rank adds all elements itself, in the same order, so all hold the same bits.
//
// Each rank owns a float buffer `data` that it fills before the call, and counters `signals` [blocks][RANKS], all zero at
// first. Call number `epoch` = 1, 2, ... A block waits until its namesakes on all ranks have arrived, reads, and waits
// again, so that nobody overwrites what another still reads.

#include "device.h"

namespace {

constexpr int MAX_RANKS = 8;

struct Peers {
  float* data[MAX_RANKS];
  unsigned* signals[MAX_RANKS];
};

struct alignas(16) Four {
  float v[4];
};

__device__ inline void publish(unsigned* flag, unsigned value) {
#if defined(__CUDACC__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#else
  __hip_atomic_store(flag, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}

__device__ inline unsigned observe(const unsigned* flag) {
#if defined(__CUDACC__)
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
#else
  return __hip_atomic_load(flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}

// Block number RLK_BLOCK of every rank has reached `value`.
template <int RANKS>
__device__ inline void meet(const Peers& peers, int rank, unsigned value) {
  RLK_BARRIER();
  const unsigned peer = RLK_THREAD;
  if (peer < RANKS) {
    publish(peers.signals[peer] + RLK_BLOCK * RANKS + rank, value);
    const unsigned* own = peers.signals[rank] + RLK_BLOCK * RANKS + peer;
    while ((int)(observe(own) - value) < 0) {
    }
  }
  RLK_BARRIER();
}

// Tree of adjacent pairs over COUNT neighbours from FIRST; COUNT is a power of two.
template <int FIRST, int COUNT>
__device__ inline Four tree(const Peers& peers, long i) {
  if constexpr (COUNT == 1) {
    return *(const Four*)(peers.data[FIRST] + i);
  } else {
    const Four left = tree<FIRST, COUNT / 2>(peers, i), right = tree<FIRST + COUNT / 2, COUNT / 2>(peers, i);
    Four sum;
    for (int j = 0; j < 4; ++j) sum.v[j] = left.v[j] + right.v[j];
    return sum;
  }
}

// out[i] for i < size, size a multiple of 4; `blocks` blocks of 256 threads on every rank.
template <int RANKS>
__device__ inline void all_reduce(const Peers& peers, float* out, long size, int rank, unsigned epoch, int blocks) {
  meet<RANKS>(peers, rank, 2 * epoch - 1);
  for (long i = ((long)RLK_BLOCK * 256 + RLK_THREAD) * 4; i < size; i += (long)blocks * 256 * 4)
    *(Four*)(out + i) = tree<0, RANKS>(peers, i);
  meet<RANKS>(peers, rank, 2 * epoch);
}

}  // namespace

#define RLK_ALL_REDUCE(RANKS)                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                            \
      tree_all_reduce_##RANKS(Peers peers, float* out, long size, int rank, unsigned epoch, int blocks) {      \
    all_reduce<RANKS>(peers, out, size, rank, epoch, blocks);                                                  \
  }
RLK_ALL_REDUCE(2)
RLK_ALL_REDUCE(4)
RLK_ALL_REDUCE(8)

#if defined(__CUDACC__)
// Host side, for nvcc: each function returns a cudaError_t, 0 if all is well.

extern "C" int rlk_use(int device) { return cudaSetDevice(device); }

extern "C" int rlk_allocate(void** pointer, size_t bytes) {
  const int error = cudaMalloc(pointer, bytes);
  return error ? error : cudaMemset(*pointer, 0, bytes);
}

extern "C" int rlk_free(void* pointer) { return cudaFree(pointer); }

extern "C" int rlk_export(void* pointer, void* handle) {
  return cudaIpcGetMemHandle((cudaIpcMemHandle_t*)handle, pointer);
}

extern "C" int rlk_import(const void* handle, void** pointer) {
  return cudaIpcOpenMemHandle(pointer, *(const cudaIpcMemHandle_t*)handle, cudaIpcMemLazyEnablePeerAccess);
}

extern "C" int rlk_close(void* pointer) { return cudaIpcCloseMemHandle(pointer); }

extern "C" int rlk_all_reduce(int ranks, int rank, void** data, void** signals, const void* x, void* out, long size,
                              unsigned epoch, int blocks, void* stream) {
  Peers peers = {};
  for (int r = 0; r < ranks; ++r) {
    peers.data[r] = (float*)data[r];
    peers.signals[r] = (unsigned*)signals[r];
  }
  const cudaStream_t on = (cudaStream_t)stream;
  const int error = cudaMemcpyAsync(data[rank], x, size * sizeof(float), cudaMemcpyDeviceToDevice, on);
  if (error) return error;
  float* sum = (float*)out;
  if (ranks == 2) tree_all_reduce_2<<<blocks, 256, 0, on>>>(peers, sum, size, rank, epoch, blocks);
  else if (ranks == 4) tree_all_reduce_4<<<blocks, 256, 0, on>>>(peers, sum, size, rank, epoch, blocks);
  else if (ranks == 8) tree_all_reduce_8<<<blocks, 256, 0, on>>>(peers, sum, size, rank, epoch, blocks);
  else return cudaErrorInvalidValue;
  return cudaGetLastError();
}
#endif
