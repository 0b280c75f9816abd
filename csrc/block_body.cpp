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

TURNKV_INLINE void read_row(const void* from, std::ptrdiff_t at, Dtype dtype, int count, float* to) {
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

TURNKV_INLINE void write_row(const float* from, int count, void* to, std::ptrdiff_t at, Dtype dtype) {
  if (dtype == Dtype::f32) {
    std::memcpy(static_cast<float*>(to) + at, from, static_cast<std::size_t>(count) * 4);
    return;
  }
  std::uint16_t* bits = static_cast<std::uint16_t*>(to) + at;
  if (dtype == Dtype::bf16) to_pairs(from, count, bits);
  else
    for (int i = 0; i < count; ++i) bits[i] = to_f16(from[i]);
}

TURNKV_INLINE void copy_panels(const float* first, const float* next, float* to) {
  std::memcpy(to, first, kPanel * sizeof(float));
  if (next) std::memcpy(to + kPanel, next, kPanel * sizeof(float));
}

// Calls f(count) for what is left of two panels; where both are whole the count is a constant, and f's loops unroll.
template <class F>
TURNKV_INLINE void in_panels(int left, F&& f) {
  if (left >= 2 * kPanel) f(2 * kPanel);
  else f(left);
}

// A row of a dtype becomes a product's input.
void put_row(const Inputs& to, int row, const void* from, std::ptrdiff_t at, Dtype dtype, int dims, int stride) {
  if (to.has_pairs()) return to.put(row, static_cast<const std::uint16_t*>(from) + at, dims, stride);
  static thread_local Memory scratch;
  auto* values = reinterpret_cast<float*>(scratch.of(static_cast<std::size_t>(dims) * sizeof(float)));
  read_row(from, at, dtype, dims, values);
  to.put(row, values, dims, stride);
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
    product(block_.qkv, input_, step_.count, [&](int row, int first, const float* sums, const float* next) {
      copy_panels(sums, next, wide_ + at(row, wide) + first);
    });
    spread();
    write();
    attend();
    over_rows(step_.count, attended(), [&](int row) {
      const auto place = static_cast<std::ptrdiff_t>(at(row, attended()));
      put_row(input_, row, attended_, place, block_.dtype, attended(), block_.out.inputs);
    });
    add(block_.out, block_.after_attention, input_);
    if (!block_.gate_up.panels) return;
    enter(block_.before_mlp);
    // A pair of panels is a gate and its up.
    gated_.set_odd(block_.gate_up.outputs / 2 != block_.down.inputs);
    product(block_.gate_up, input_, step_.count, [&](int row, int first, const float* gates, const float* ups) {
      alignas(64) float gated[kPanel];
      if (block_.dtype == Dtype::f32) gate<false>(block_.activation, gates, ups, gated);
      else gate<true>(block_.activation, gates, ups, gated);
      gated_.put_part(row, first / 2, gated, block_.down.inputs);
    });
    add(block_.down, block_.after_mlp, gated_);
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

  // Adds a product, normalised if it is to be, to the residual stream.
  void add(const Matrix& matrix, const Norm& norm, const Inputs& inputs) {
    const int wide = matrix.outputs, hidden = block_.hidden;
    if (!norm.weight)
      return product(matrix, inputs, step_.count, [&](int row, int first, const float* sums, const float* next) {
        const auto place = static_cast<std::ptrdiff_t>(at(row, hidden)) + first;
        alignas(64) float values[2 * kPanel], added[2 * kPanel];
        copy_panels(sums, next, added);
        in_panels(hidden - first, [&](int few) {
          read_row(step_.rows, place, block_.dtype, few, values);
          for (int i = 0; i < few; ++i) values[i] += added[i];
          write_row(values, few, step_.rows, place, block_.dtype);
        });
      });
    product(matrix, inputs, step_.count, [&](int row, int first, const float* sums, const float* next) {
      copy_panels(sums, next, wide_ + at(row, wide) + first);
    });
    over_rows(step_.count, hidden, [&](int row) {
      float* added = wide_ + at(row, wide);
      normalise(added, hidden, norm);
      float* values = scratch();
      const auto place = static_cast<std::ptrdiff_t>(at(row, hidden));
      read_row(step_.rows, place, block_.dtype, hidden, values);
      for (int d = 0; d < hidden; ++d) values[d] += added[d];
      write_row(values, hidden, step_.rows, place, block_.dtype);
    });
  }

  // Queries, keys and values out of their product: head norms, rotation, and the dtype that the cache holds.
  void spread() {
    const int heads = block_.num_heads, kv_heads = block_.num_kv_heads, dims = block_.key_dim;
    over_rows(step_.count, block_.qkv.outputs, [&](int row) {
      float* from = wide_ + at(row, block_.qkv.outputs);
      alignas(64) float cos[kMaxDim / 2], sin[kMaxDim / 2];
      read_row(step_.cos, row * step_.angle_row, block_.dtype, block_.num_pairs, cos);
      read_row(step_.sin, row * step_.angle_row, block_.dtype, block_.num_pairs, sin);
      for (int head = 0; head < heads + kv_heads; ++head, from += dims) {
        const bool is_query = head < heads;
        const Norm& norm = is_query ? block_.query : block_.key;
        if (norm.weight) normalise(from, dims, norm);
        rotate(from, cos, sin);
        if (is_query) write_row(from, dims, query_, static_cast<std::ptrdiff_t>(at(row * heads + head, dims)), block_.dtype);
        else write_row(from, dims, key_, static_cast<std::ptrdiff_t>(at(row * kv_heads + head - heads, dims)), block_.dtype);
      }
      const int all = kv_heads * block_.value_dim;
      write_row(from, all, value_, static_cast<std::ptrdiff_t>(at(row, all)), block_.dtype);
    });
  }

  void rotate(float* head, const float* cos, const float* sin) const {
    const int pairs = block_.num_pairs;
    alignas(64) float turned[kMaxDim];
    for (int i = 0; i < pairs; ++i) {
      turned[i] = head[i] * cos[i] - head[i + pairs] * sin[i];
      turned[i + pairs] = head[i + pairs] * cos[i] + head[i] * sin[i];
    }
    std::memcpy(head, turned, static_cast<std::size_t>(2 * pairs) * sizeof(float));
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
    put_row(inputs, row, call.rows, row * call.row, call.dtype, call.inputs, call.matrix->inputs);
  });
  product(*call.matrix, inputs, call.count, [&](int row, int first, const float* sums, const float* next) {
    alignas(64) float values[2 * kPanel];
    copy_panels(sums, next, values);
    in_panels(call.outputs - first,
              [&](int few) { write_row(values, few, call.out, row * call.out_row + first, call.dtype); });
  });
}

}  // namespace turnkv::TURNKV_ISA
