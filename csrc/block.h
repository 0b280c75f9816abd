// A decoder layer's arithmetic around attention: norms, products with weights, rotation, gated MLP. No Python, no torch.
//
// A matrix of weights [N][K] lies in panels of 16 outputs, so that a vector holds 16 outputs and a matrix tile what the
// hardware takes as its second operand: `panels[N / 16][K / 2][16][2]` for numbers of 16 bits and of 8, and
// `panels[N / 16][K][16]` for float32; N is rounded up to 16 and K to 32 with zeros. src/turnkv/kernels/matrices.py packs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend.h"
#include "settle.h"

namespace turnkv {

constexpr int kPanel = 16;      // outputs side by side
constexpr int kDepth = 32;      // K is a multiple of it

enum class Weights : int { f32 = 0, bf16 = 1, f16 = 2, int8 = 3 };
enum class Activation : int { silu = 0, gelu_tanh = 1 };

struct Matrix {
  const void* panels;    // null: there is none
  Weights format;
  int outputs, inputs;   // both rounded up
  const float* scales;   // [outputs], int8 only
  const float* bias;     // [outputs], or null
};

// Root mean square over `dims`; weight null: there is none.
struct Norm {
  const float* weight;
  float epsilon;
};

// One decoder layer. The MLP's first matrix holds gate and up in turns of 16 outputs.
struct Block {
  Dtype dtype;
  int hidden;
  int num_heads, num_kv_heads, key_dim, value_dim;
  int num_pairs;  // of rotated dims, in halves from dim 0; 0: no rotation
  Activation activation;
  Norm before_attention, after_attention, before_mlp, after_mlp;
  Norm query, key;  // of each head
  Matrix qkv, out, gate_up, down;  // no gate_up: the layer's second half is another's
};

// One step through a block. `attend`'s query and output, and `write`'s keys and values, are set by the call itself.
struct BlockStep {
  void* rows;  // [count][hidden], in place
  int count;
  const void* cos;  // [count][stride], of the block's dtype, num_pairs of each row count
  const void* sin;
  std::ptrdiff_t angle_row;
  Write write;
  Attend* attend;
};

// Rows [count][inputs] of a dtype, times a matrix, to rows [count][outputs].
struct Product {
  Dtype dtype;
  const void* rows;
  std::ptrdiff_t row;
  int count, inputs;  // of a row, not rounded
  const Matrix* matrix;
  void* out;
  std::ptrdiff_t out_row;
  int outputs;  // not rounded
};

namespace portable {
void block(const Block&, const BlockStep&, const Isa&);
void product(const Product&);
}  // namespace portable
namespace avx2 {
void block(const Block&, const BlockStep&, const Isa&);
void product(const Product&);
}  // namespace avx2
namespace avx512 {
void block(const Block&, const BlockStep&, const Isa&);
void product(const Product&);
}  // namespace avx512
namespace avx512bf16 {
void block(const Block&, const BlockStep&, const Isa&);
void product(const Product&);
}  // namespace avx512bf16
namespace amx {
void block(const Block&, const BlockStep&, const Isa&);
void product(const Product&);
}  // namespace amx

}  // namespace turnkv
