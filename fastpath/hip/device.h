// What the kernels need of the compiler: clang for gfx942 without ROCm's headers, ROCm's hipcc, or nvcc.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define RLK_THREAD threadIdx.x
#define RLK_BLOCK blockIdx.x
#define RLK_BLOCK_Y blockIdx.y
#define RLK_BLOCKS gridDim.x
#define RLK_BARRIER() __syncthreads()
#else
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define RLK_THREAD __builtin_amdgcn_workitem_id_x()
#define RLK_BLOCK __builtin_amdgcn_workgroup_id_x()
#define RLK_BLOCK_Y __builtin_amdgcn_workgroup_id_y()
#define RLK_BARRIER()                                    \
  do {                                                   \
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \
    __builtin_amdgcn_s_barrier();                        \
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); \
  } while (0)
#endif
