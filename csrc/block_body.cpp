// A decoder layer, and a product with weights. Compiled once for each instruction set, with TURNKV_ISA as the namespace.
//
// Work is cut by sizes alone and each output is summed by one thread in one order, so that neither the number of threads
// nor the other rows of a step change a bit.
#include "block.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu.h"
#include "memory.h"
#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__)
#define TURNKV_DOT 1
#endif
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define TURNKV_AMX 1
#endif

namespace turnkv::TURNKV_ISA {
namespace {

#include "attend_vector.h"
#include "block_product.h"

constexpr float kLog2e = 1.44269504F;
constexpr int kFewNumbers = 1 << 15;  // of all rows: below, waking threads takes longer than the work

float number(const void* from, std::ptrdiff_t at, Dtype dtype) {
  if (dtype == Dtype::f32) return static_cast<const float*>(from)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(from)[at];
  return dtype == Dtype::bf16 ? from_bf16(bits) : from_f16(bits);
}

void read_row(const void* from, std::ptrdiff_t at, Dtype dtype, int count, float* to) {
  if (dtype == Dtype::f32) {
    std::memcpy(to, static_cast<const float*>(from) + at, static_cast<std::size_t>(count) * 4);
    return;
  }
  const std::uint16_t* bits = static_cast<const std::uint16_t*>(from) + at;
  if (dtype == Dtype::bf16)
    for (int i = 0; i < count; ++i) to[i] = from_bf16(bits[i]);
  else
    for (int i = 0; i < count; ++i) to[i] = from_f16(bits[i]);
}

void write_row(const float* from, int count, void* to, std::ptrdiff_t at, Dtype dtype) {
  if (dtype == Dtype::f32) {
    std::memcpy(static_cast<float*>(to) + at, from, static_cast<std::size_t>(count) * 4);
    return;
  }
  std::uint16_t* bits = static_cast<std::uint16_t*>(to) + at;
  if (dtype == Dtype::bf16) to_pairs(from, count, bits);
  else
    for (int i = 0; i < count; ++i) bits[i] = to_f16(from[i]);
}

void normalise(float* row, int dims, const Norm& norm) {
  float sums[16] = {};
  int i = 0;
  for (; i + 16 <= dims; i += 16)
    for (int lane = 0; lane < 16; ++lane) sums[lane] += row[i + lane] * row[i + lane];
  for (; i < dims; ++i) sums[0] += row[i] * row[i];
  for (int half = 8; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  const float by = 1.0F / std::sqrt(sums[0] / static_cast<float>(dims) + norm.epsilon);
  for (int d = 0; d < dims; ++d) row[d] *= by * norm.weight[d];
}

// 1 / x for x in [1, 2].
inline Floats inverse(Floats x) {
#if defined(__AVX512F__)
  const Floats y = as<Floats>(_mm512_rcp14_ps(as<__m512>(x)));
  return y * (2.0F - x * y);
#else
  return 1.0F / x;
#endif
}

// act(gate) * up, 16 of each; roughly where the result is rounded to 16 bits.
template <bool kIsRough>
void gate(Activation activation, const float* gates, const float* ups, float* to) {
  for (int i = 0; i < kPanel; i += kWidth) {
    const Floats x = load<Floats>(gates + i);
    // Both are x times a sigmoid: gelu's tanh(u) is 2 sigmoid(2u) - 1.
    const Floats u = activation == Activation::silu ? x : x * (x * x * 0.044715F + 1.0F) * 1.5957691216F;
    const Floats size = as<Floats>(as<Words>(u) | 0x80000000U);  // -|u|
    const Floats e = power_of_two<kIsRough>(size * kLog2e);
    const Floats part = x * load<Floats>(ups + i) * inverse(e + 1.0F);
    store(to + i, u > splat(0.0F) ? part : part * e);
  }
}

// Calls f(row) for all rows, on all threads where that pays.
template <class F>
void over_rows(int count, int dims, F&& f) {
#pragma omp parallel for schedule(static) if (count > 1 && std::int64_t{count} * dims >= kFewNumbers)
  for (int row = 0; row < count; ++row) f(row);
}

// Hands out parts of one piece of memory.
class Parts {
 public:
  explicit Parts(std::uint8_t* memory) : memory_(memory) {}

  template <class T>
  void take(T*& to, std::size_t count) {
    to = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
  }

  std::size_t used() const { return used_; }

 private:
  std::uint8_t* memory_;
  std::size_t used_ = 0;
};

class Run {
 public:
  Run(const Block& block, const BlockStep& step, const Isa& isa) : block_(block), step_(step), isa_(isa) {
    static thread_local Memory memory;
    Parts size(nullptr);
    lay_out(size);
    Parts parts(memory.of(size.used()));
    lay_out(parts);
  }

  void run() {
    enter(block_.before_attention);
    const int wide = block_.qkv.outputs;
    product(block_.qkv, input_, step_.count, [&](int row, int first, const float* sums, const float*) {
      std::memcpy(wide_ + at(row, wide) + first, sums, kPanel * sizeof(float));
    });
    spread();
    write();
    attend();
    over_rows(step_.count, attended(), [&](int row) {
      read_row(attended_, static_cast<std::ptrdiff_t>(at(row, attended())), block_.dtype, attended(), scratch());
      input_.put(row, scratch(), attended(), block_.out.inputs);
    });
    add(block_.out, block_.after_attention);
    if (!block_.gate_up.panels) return;
    enter(block_.before_mlp);
    // A pair of panels is a gate and its up.
    gated_.set_odd(block_.gate_up.outputs / 2 != block_.down.inputs);
    product(block_.gate_up, input_, step_.count, [&](int row, int first, const float* gates, const float* ups) {
      alignas(64) float gated[kPanel];
      if (block_.dtype == Dtype::f32) gate<false>(block_.activation, gates, ups, gated);
      else gate<true>(block_.activation, gates, ups, gated);
      gated_.put_part(row, first / 2, gated, block_.down.inputs);
    }, true);
    add(block_.down, block_.after_mlp, &gated_);
  }

 private:
  static std::size_t at(int row, int dims) { return static_cast<std::size_t>(row) * static_cast<std::size_t>(dims); }
  int attended() const { return block_.num_heads * block_.value_dim; }

  float* scratch() const {
    static thread_local Memory memory;
    const int dims = std::max({block_.hidden, attended(), block_.key_dim});
    return reinterpret_cast<float*>(memory.of(static_cast<std::size_t>(dims) * sizeof(float)));
  }

  void lay_out(Parts& parts) {
    const auto rows = static_cast<std::size_t>(rounded(step_.count, 32));
    const auto size = block_.dtype == Dtype::f32 ? std::size_t{4} : std::size_t{2};
    const auto heads = [&](int count, int dims) { return rows * static_cast<std::size_t>(count * dims) * size; };
    parts.take(wide_, rows * static_cast<std::size_t>(std::max(block_.qkv.outputs, block_.out.outputs)));
    parts.take(query_, heads(block_.num_heads, block_.key_dim));
    parts.take(key_, heads(block_.num_kv_heads, block_.key_dim));
    parts.take(value_, heads(block_.num_kv_heads, block_.value_dim));
    parts.take(attended_, heads(block_.num_heads, block_.value_dim));
    const bool has_pairs = kHasPairs && block_.dtype == Dtype::bf16;
    input_.lay_out(parts, rows, std::max({block_.qkv.inputs, block_.out.inputs, block_.gate_up.inputs}), has_pairs);
    gated_.lay_out(parts, rows, block_.down.inputs, has_pairs);
  }

  // The residual stream, normalised, becomes the next product's input.
  void enter(const Norm& norm) {
    over_rows(step_.count, block_.hidden, [&](int row) {
      float* values = scratch();
      read_row(step_.rows, static_cast<std::ptrdiff_t>(at(row, block_.hidden)), block_.dtype, block_.hidden, values);
      normalise(values, block_.hidden, norm);
      input_.put(row, values, block_.hidden, rounded(block_.hidden, kDepth));
    });
  }

  // Adds a product to the residual stream.
  void add(const Matrix& matrix, const Norm& norm, const Inputs* from = nullptr) {
    const int wide = matrix.outputs;
    product(matrix, from ? *from : input_, step_.count, [&](int row, int first, const float* sums, const float*) {
      std::memcpy(wide_ + at(row, wide) + first, sums, kPanel * sizeof(float));
    });
    over_rows(step_.count, block_.hidden, [&](int row) {
      float* added = wide_ + at(row, wide);
      if (norm.weight) normalise(added, block_.hidden, norm);
      float* values = scratch();
      const auto place = static_cast<std::ptrdiff_t>(at(row, block_.hidden));
      read_row(step_.rows, place, block_.dtype, block_.hidden, values);
      for (int d = 0; d < block_.hidden; ++d) values[d] += added[d];
      write_row(values, block_.hidden, step_.rows, place, block_.dtype);
    });
  }

  // Queries, keys and values out of their product: head norms, rotation, and the dtype that the cache holds.
  void spread() {
    const int heads = block_.num_heads, kv_heads = block_.num_kv_heads, dims = block_.key_dim;
    over_rows(step_.count, block_.qkv.outputs, [&](int row) {
      float* from = wide_ + at(row, block_.qkv.outputs);
      for (int head = 0; head < heads + kv_heads; ++head, from += dims) {
        const bool is_query = head < heads;
        const Norm& norm = is_query ? block_.query : block_.key;
        if (norm.weight) normalise(from, dims, norm);
        rotate(from, row);
        if (is_query) write_row(from, dims, query_, static_cast<std::ptrdiff_t>(at(row * heads + head, dims)), block_.dtype);
        else write_row(from, dims, key_, static_cast<std::ptrdiff_t>(at(row * kv_heads + head - heads, dims)), block_.dtype);
      }
      const int all = kv_heads * block_.value_dim;
      write_row(from, all, value_, static_cast<std::ptrdiff_t>(at(row, all)), block_.dtype);
    });
  }

  void rotate(float* head, int row) const {
    const int pairs = block_.num_pairs;
    const std::ptrdiff_t place = row * step_.angle_row;
    for (int i = 0; i < pairs; ++i) {
      const float cos = number(step_.cos, place + i, block_.dtype), sin = number(step_.sin, place + i, block_.dtype);
      const float first = head[i], second = head[i + pairs];
      head[i] = first * cos - second * sin;
      head[i + pairs] = second * cos + first * sin;
    }
  }

  void write() const {
    Write call = step_.write;
    call.key = key_;
    call.key_head = block_.key_dim;
    call.key_token = std::ptrdiff_t{block_.num_kv_heads} * block_.key_dim;
    call.value = value_;
    call.value_head = block_.value_dim;
    call.value_token = std::ptrdiff_t{block_.num_kv_heads} * block_.value_dim;
    turnkv::write(call, isa_);
  }

  void attend() const {
    Attend& call = *step_.attend;
    call.query = query_;
    call.query_row = std::ptrdiff_t{block_.num_heads} * block_.key_dim;
    call.query_head = block_.key_dim;
    call.out = attended_;
    isa_.attend(call);
  }

  const Block& block_;
  const BlockStep& step_;
  const Isa& isa_;
  float* wide_ = nullptr;
  std::uint8_t *query_ = nullptr, *key_ = nullptr, *value_ = nullptr, *attended_ = nullptr;
  Inputs input_, gated_;
};

}  // namespace

void block(const Block& block, const BlockStep& step, const Isa& isa) { Run(block, step, isa).run(); }

void product(const Product& call) {
  static thread_local Memory memory;
  Inputs inputs;
  const auto rows = static_cast<std::size_t>(rounded(call.count, 32));
  const bool has_pairs = kHasPairs && call.dtype == Dtype::bf16;
  Parts size(nullptr);
  inputs.lay_out(size, rows, call.matrix->inputs, has_pairs);
  Parts parts(memory.of(size.used()));
  inputs.lay_out(parts, rows, call.matrix->inputs, has_pairs);
  over_rows(call.count, call.inputs, [&](int row) {
    static thread_local Memory scratch;
    auto* values = reinterpret_cast<float*>(scratch.of(static_cast<std::size_t>(call.inputs) * sizeof(float)));
    read_row(call.rows, row * call.row, call.dtype, call.inputs, values);
    inputs.put(row, values, call.inputs, call.matrix->inputs);
  });
  product(*call.matrix, inputs, call.count, [&](int row, int first, const float* sums, const float*) {
    write_row(sums, std::min(kPanel, call.outputs - first), call.out, row * call.out_row + first, call.dtype);
  });
}

}  // namespace turnkv::TURNKV_ISA
