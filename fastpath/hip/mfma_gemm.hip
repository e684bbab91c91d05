// out[part][M][N] = tree over LOCAL segments of K of x[M][K] w[N][K]^T: the contract mfma-cdna3-g8, instruction by
// instruction. Each segment is one chain of v_mfma_f32_16x16x16_bf16 in ascending K from +0; segments meet in registers
// in a binary counter. No other instruction touches a sum.
//
// A workgroup of four waves computes 64 x 64 outputs, each wave 32 x 32 as 2 x 2 instructions. Operands go through LDS
// in steps of 32 along K; the next step's loads are in flight while this one multiplies.
//
// Requires: K of a segment a multiple of 32, rows of x and w aligned to 16 bytes.

#include "device.h"

typedef short short4v __attribute__((ext_vector_type(4)));
typedef short short8v __attribute__((ext_vector_type(8)));
typedef float float4v __attribute__((ext_vector_type(4)));

namespace {

constexpr int TILE = 64;   // rows of x, and rows of w, of a workgroup
constexpr int STEP = 32;   // elements of K per step
constexpr int PITCH = 40;  // shorts between rows in LDS: 20 banks apart, so that 16 rows meet no bank twice

struct Sums {
  float4v tile[2][2];
};

__device__ inline Sums zero() {
  Sums s;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) s.tile[i][j] = float4v{0.f, 0.f, 0.f, 0.f};
  return s;
}

__device__ inline Sums add(const Sums& left, const Sums& right) {
  Sums s;
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) s.tile[i][j] = left.tile[i][j] + right.tile[i][j];
  return s;
}

// Lane l holds k = 4 (l / 16) .. + 3 of row l % 16 of either operand, and sums of rows 4 (l / 16) .. + 3, column l % 16.
__device__ inline void multiply(Sums& sums, const short* a, const short* b, int lane) {
  const int row = lane & 15, k = (lane >> 4) * 4;
#pragma unroll
  for (int step = 0; step < STEP; step += 16) {
    short4v left[2], right[2];
    for (int i = 0; i < 2; ++i) {
      left[i] = *(const short4v*)(a + (i * 16 + row) * PITCH + step + k);
      right[i] = *(const short4v*)(b + (i * 16 + row) * PITCH + step + k);
    }
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j)
        sums.tile[i][j] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(left[i], right[j], sums.tile[i][j], 0, 0, 0);
  }
}

// The 16 bytes that a thread brings from row `row` of a matrix of `rows` rows: the last row again beyond the end.
__device__ inline short8v fetch(const short* matrix, int row, int rows, long pitch, long k) {
  const long inside = row < rows ? row : rows - 1;
  return *(const short8v*)(matrix + inside * pitch + k);
}

template <int LOCAL>
__device__ inline void gemm(const short* x, const short* w, float* out, int M, int N, long K, int segment) {
  __shared__ short left[TILE * PITCH], right[TILE * PITCH];
  const int thread = RLK_THREAD, lane = thread & 63, wave = thread >> 6;
  const int tiles_n = (N + TILE - 1) / TILE;
  const int row = RLK_BLOCK / tiles_n * TILE, column = RLK_BLOCK % tiles_n * TILE;
  const long first = (long)RLK_BLOCK_Y * LOCAL * segment;
  const int own = thread >> 2, part = (thread & 3) * 8;
  const short* a = left + (wave >> 1) * 32 * PITCH;
  const short* b = right + (wave & 1) * 32 * PITCH;

  Sums one = zero(), two = zero(), four = zero(), total = zero();
#pragma unroll
  for (int index = 0; index < LOCAL; ++index) {
    const long start = first + (long)index * segment;
    total = zero();
    short8v next_x = fetch(x, row + own, M, K, start + part);
    short8v next_w = fetch(w, column + own, N, K, start + part);
    for (int k = 0; k < segment; k += STEP) {
      RLK_BARRIER();
      *(short8v*)(left + own * PITCH + part) = next_x;
      *(short8v*)(right + own * PITCH + part) = next_w;
      RLK_BARRIER();
      if (k + STEP < segment) {
        next_x = fetch(x, row + own, M, K, start + k + STEP + part);
        next_w = fetch(w, column + own, N, K, start + k + STEP + part);
      }
      multiply(total, a, b, lane);
    }
    if (index % 2 == 0 && LOCAL > 1) one = total;
    if (index % 2 == 1) total = add(one, total);
    if (index % 4 == 1) two = total;
    if (index % 4 == 3) total = add(two, total);
    if (index == 3) four = total;
    if (index == 7) total = add(four, total);
  }

  float* sums = out + (long)RLK_BLOCK_Y * M * N;
  const int m = row + (wave >> 1) * 32 + (lane >> 4) * 4, n = column + (wave & 1) * 32 + (lane & 15);
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j)
      for (int r = 0; r < 4; ++r)
        if (m + i * 16 + r < M && n + j * 16 < N) sums[(long)(m + i * 16 + r) * N + n + j * 16] = total.tile[i][j][r];
}

}  // namespace

#define RLK_GEMM(LOCAL)                                                                                            \
  extern "C" __global__ void __launch_bounds__(256)                                                                \
      mfma_gemm_##LOCAL(const short* x, const short* w, float* out, int M, int N, long K, int segment) {           \
    gemm<LOCAL>(x, w, out, M, N, K, segment);                                                                      \
  }
RLK_GEMM(1)
RLK_GEMM(2)
RLK_GEMM(4)
RLK_GEMM(8)
