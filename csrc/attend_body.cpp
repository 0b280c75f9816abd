// Attention over tiles. Compiled once for each instruction set, with TURNKV_ISA as the namespace.
//
// Work is cut into items: (sequence, key-value head, block of query rows, split of the keys). The rows of an item are all
// query heads of its key-value head for some query tokens, so that each key is read once for all of them. An item keeps
// a running maximum, sum and output for each row (online softmax, Milakov & Gimelshein, arXiv:1805.02867); its splits
// are merged in order. Items and their splits depend on lengths alone, so the number of threads changes no bit.
#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "attend.h"
#include "numbers.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace turnkv::TURNKV_ISA {
namespace {

using f16x = float __attribute__((vector_size(64), aligned(64)));         // 16 floats
using i16x = std::int32_t __attribute__((vector_size(64), aligned(64)));  // 16 ints
using f16u = float __attribute__((vector_size(64), aligned(4)));          // the same, unaligned

constexpr int kChunk = 8;             // tiles whose scores are held at once
constexpr int kKeys = kChunk * kTile; // and their keys
constexpr int kGroupRows = 4;         // rows that share a load
constexpr int kFewRows = 16;          // up to this many rows, codes are multiplied as they lie
constexpr int kBlockRows = 64;        // rows of an item
constexpr int kLeastSplit = 16;       // tiles of an item with few rows: from here…
constexpr int kMostSplit = 64;        // …to here, an eighth of the sequence between them
constexpr int kPrefillSplit = 512;    // tiles of an item with many rows
constexpr float kLog2E = 1.44269504F; // scores are kept in units of log 2
constexpr float kNone = -std::numeric_limits<float>::infinity();

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define TURNKV_DOT 1
#endif
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define TURNKV_AMX 1
#endif

inline f16x splat(float value) { return f16x{} + value; }
inline f16x load(const float* from) { return *reinterpret_cast<const f16u*>(from); }
inline void store(float* to, f16x value) { *reinterpret_cast<f16u*>(to) = value; }
inline f16x bits_to_float(i16x bits) { return reinterpret_cast<f16x>(bits); }

inline f16x maximum(f16x a, f16x b) {
#if defined(__AVX512F__)
  return reinterpret_cast<f16x>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  return a > b ? a : b;
#endif
}

inline float highest(f16x value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(value));
#else
  float best = value[0];
  for (int i = 1; i < 16; ++i) best = std::max(best, value[i]);
  return best;
#endif
}

inline float total(f16x value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(value));
#else
  float sums[16];
  store(sums, value);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
#endif
}

// 2 to the power of x <= 0; exactly 0 below -126. Relative error below 2e-7, or 4e-6 where it becomes a bf16 anyway.
template <bool kIsRough>
inline f16x exponential(f16x x) {
#if defined(__AVX512F__)
  const __m512 power = reinterpret_cast<__m512>(x);
  const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const f16x r = reinterpret_cast<f16x>(_mm512_sub_ps(power, whole));
#else
  const f16x low = splat(-126.0F);
  const i16x is_tiny = x < low;
  x = is_tiny ? low : x;
  const f16x magic = splat(12582912.0F);
  const f16x shifted = x + magic;
  const f16x r = x - (shifted - magic);
#endif
  f16x y;
  if constexpr (kIsRough) {
    y = splat(9.6713e-3F) * r + splat(5.55034e-2F);
  } else {
    y = splat(1.540353e-4F) * r + splat(1.3333558e-3F);
    y = y * r + splat(9.6181291e-3F);
    y = y * r + splat(5.5504109e-2F);
  }
  y = y * r + splat(2.4022651e-1F);
  y = y * r + splat(6.9314718e-1F);
  y = y * r + splat(1.0F);
#if defined(__AVX512F__)
  const __mmask16 is_large = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-126.0F), _CMP_GE_OQ);
  return reinterpret_cast<f16x>(_mm512_maskz_scalef_ps(is_large, reinterpret_cast<__m512>(y), whole));
#else
  const i16x power = (reinterpret_cast<i16x>(shifted) - 0x4b400000 + 127) << 23;
  const f16x result = y * bits_to_float(power);
  return is_tiny ? f16x{} : result;
#endif
}

inline f16x from_f16_lanes(const std::uint16_t* from) {
  f16x result;
  for (int i = 0; i < 16; ++i) result[i] = from_f16(from[i]);
  return result;
}

inline f16x scales_of(const std::uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<f16x>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
  std::uint16_t bits[16];
  std::memcpy(bits, from, sizeof bits);
  return from_f16_lanes(bits);
#endif
}

#if defined(__AVX512F__)
// One block of 32: inside two registers.
inline void hadamard32(float* block) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512 low = _mm512_loadu_ps(block), high = _mm512_loadu_ps(block + 16);
  for (int stride = 1; stride < 16; stride *= 2) {
    const __m512i partner = _mm512_xor_si512(lane, _mm512_set1_epi32(stride));
    const __mmask16 is_second = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(stride));
    const auto turn = [partner, is_second](__m512 x) {
      const __m512 other = _mm512_permutexvar_ps(partner, x);
      return _mm512_mask_sub_ps(_mm512_add_ps(x, other), is_second, other, x);
    };
    low = turn(low);
    high = turn(high);
  }
  const __m512 norm = _mm512_set1_ps(0.17677669529663687F);
  _mm512_storeu_ps(block, _mm512_mul_ps(_mm512_add_ps(low, high), norm));
  _mm512_storeu_ps(block + 16, _mm512_mul_ps(_mm512_sub_ps(low, high), norm));
}
#endif

// The normalised Walsh-Hadamard transform of each block, in place.
void hadamard(float* vector, int dims) {
  for (int first = 0; first < dims;) {
    const int size = block_size(first, dims);
    float* block = vector + first;
#if defined(__AVX512F__)
    if (size == kBlock) {
      hadamard32(block);
      first += size;
      continue;
    }
#endif
    for (int stride = 1; stride < size; stride *= 2)
      for (int i = 0; i < size; i += 2 * stride)
        for (int j = i; j < i + stride; ++j) {
          const float a = block[j], b = block[j + stride];
          block[j] = a + b;
          block[j + stride] = a - b;
        }
    const float norm = 1.0F / std::sqrt(static_cast<float>(size));
    for (int i = 0; i < size; ++i) block[i] *= norm;
    first += size;
  }
}

inline float read(const void* from, std::ptrdiff_t at, Dtype dtype) {
  if (dtype == Dtype::f32) return static_cast<const float*>(from)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(from)[at];
  return dtype == Dtype::bf16 ? from_bf16(bits) : from_f16(bits);
}

inline void write(void* to, std::ptrdiff_t at, Dtype dtype, float value) {
  if (dtype == Dtype::f32) static_cast<float*>(to)[at] = value;
  else static_cast<std::uint16_t*>(to)[at] = dtype == Dtype::bf16 ? to_bf16(value) : to_f16(value);
}

// One tile as float32: keys [D][16], values [16][E]; int4 stays in the Hadamard basis.
struct FloatTile {
  alignas(64) float keys[kMaxDim * kTile];
  alignas(64) float values[kTile * kMaxDim];
};

inline int nibble(std::uint8_t byte, int half) { return ((byte >> (4 * half)) & 15) - 8; }

void expand_keys(const std::uint8_t* block, const TileLayout& layout, Dtype dtype, int dims, float* to) {
  const std::uint8_t* codes = block;
  switch (layout.key_format) {
    case Format::exact:
      if (dtype == Dtype::f32) {
        std::memcpy(to, codes, sizeof(float) * static_cast<std::size_t>(dims) * kTile);
      } else {
        const auto* pairs = reinterpret_cast<const std::uint32_t*>(codes);
        for (int i = 0; i < dims / 2; ++i)
          for (int s = 0; s < kTile; ++s) {
            const std::uint32_t pair = pairs[i * kTile + s];
            const auto low = static_cast<std::uint16_t>(pair), high = static_cast<std::uint16_t>(pair >> 16);
            to[(2 * i) * kTile + s] = dtype == Dtype::bf16 ? from_bf16(low) : from_f16(low);
            to[(2 * i + 1) * kTile + s] = dtype == Dtype::bf16 ? from_bf16(high) : from_f16(high);
          }
      }
      return;
    case Format::int8: {
      const f16x scale = scales_of(block + layout.key_scales);
      for (int i = 0; i < dims; ++i)
        for (int s = 0; s < kTile; ++s)
          to[i * kTile + s] =
              static_cast<float>(static_cast<std::int8_t>(codes[(i / 4) * 64 + s * 4 + i % 4])) * scale[s];
      return;
    }
    case Format::fp8:
      for (int i = 0; i < dims; ++i)
        for (int s = 0; s < kTile; ++s) to[i * kTile + s] = from_e4m3(codes[(i / 4) * 64 + s * 4 + i % 4]);
      return;
    case Format::int4:
      for (int first = 0, group = 0; first < dims; ++group) {
        const int size = block_size(first, dims);
        const f16x scale = scales_of(block + layout.key_scales + group * 32);
        for (int i = first; i < first + size; ++i)
          for (int s = 0; s < kTile; ++s)
            to[i * kTile + s] =
                static_cast<float>(nibble(codes[(i / 8) * 64 + s * 4 + (i % 8) / 2], i % 2)) * scale[s];
        first += size;
      }
      return;
  }
}

void expand_values(const std::uint8_t* block, const TileLayout& layout, Dtype dtype, int dims, float* to) {
  const std::uint8_t* codes = block + layout.values;
  const auto row = static_cast<std::size_t>(dims);
  switch (layout.value_format) {
    case Format::exact:
      if (dtype == Dtype::f32) {
        std::memcpy(to, codes, sizeof(float) * row * kTile);
      } else {
        const auto* pairs = reinterpret_cast<const std::uint32_t*>(codes);
        for (int j = 0; j < kTile / 2; ++j)
          for (int e = 0; e < dims; ++e) {
            const std::uint32_t pair = pairs[j * dims + e];
            const auto low = static_cast<std::uint16_t>(pair), high = static_cast<std::uint16_t>(pair >> 16);
            to[(2 * j) * dims + e] = dtype == Dtype::bf16 ? from_bf16(low) : from_f16(low);
            to[(2 * j + 1) * dims + e] = dtype == Dtype::bf16 ? from_bf16(high) : from_f16(high);
          }
      }
      return;
    case Format::int8: {
      const f16x scale = scales_of(block + layout.value_scales);
      for (int s = 0; s < kTile; ++s)
        for (int e = 0; e < dims; ++e)
          to[s * dims + e] =
              static_cast<float>(static_cast<std::int8_t>(codes[((s / 4) * dims + e) * 4 + s % 4])) * scale[s];
      return;
    }
    case Format::fp8:
      for (int s = 0; s < kTile; ++s)
        for (int e = 0; e < dims; ++e) to[s * dims + e] = from_e4m3(codes[((s / 4) * dims + e) * 4 + s % 4]);
      return;
    case Format::int4:
      for (int first = 0, group = 0; first < dims; ++group) {
        const int size = block_size(first, dims);
        const f16x scale = scales_of(block + layout.value_scales + group * 32);
        for (int s = 0; s < kTile; ++s)
          for (int e = first; e < first + size; ++e)
            to[s * dims + e] =
                static_cast<float>(nibble(codes[((s / 8) * dims + e) * 4 + (s % 8) / 2], s % 2)) * scale[s];
        first += size;
      }
      return;
  }
}

// The rows of an item, prepared for one group's offset and key format.
struct Rows {
  int count;   // query rows
  int padded;  // rounded up to a multiple of 16
  std::unique_ptr<float[]> floats;            // [padded][D], scaled and rotated
  std::unique_ptr<std::uint32_t[]> pairs;     // [padded][D/2], bf16 pairs
  std::unique_ptr<std::uint32_t[]> high, low; // [padded][D/4], int8 quads: q = (128 * high + low) * step
  std::unique_ptr<float[]> step;              // [padded]
  std::unique_ptr<std::int32_t[]> high_sum, low_sum;  // [padded][blocks]: sums of codes, by block of 32 dims
};

// What an item works with.
struct Workspace {
  std::size_t padded = 0, dims = 0, width = 0;  // what it has room for
  Rows rows;
  std::unique_ptr<float[]> scores;  // [padded][kKeys]: scores, then weights
  std::unique_ptr<std::uint32_t[]> weights;  // [padded][kKeys / 2], bf16 pairs
  std::unique_ptr<float[]> acc[2];  // [padded][E], plain and in the Hadamard basis
  std::unique_ptr<std::uint8_t[]> tiles;  // kChunk tiles expanded, bf16 pairs
  std::unique_ptr<FloatTile> tile;
  alignas(64) float m[kBlockRows + 512], l[kBlockRows + 512];
};

int rounded(int count, int to) { return (count + to - 1) / to * to; }

struct Item {
  int sequence, head, first_query, num_queries, first_tile, num_tiles, part, num_parts;
  std::size_t partial;  // where its results go, in rows
};

class Body {
 public:
  explicit Body(const Attend& call)
      : call_(call),
        group_heads_(call.num_heads / call.num_kv_heads),
        dims_(call.key_dim),
        value_dims_(call.value_dim),
        value_stride_(rounded(call.value_dim, 16)) {
    for (const Arena& arena : call.arenas)
      layouts_.emplace_back(arena.key_format, arena.value_format, call.dtype, dims_, value_dims_);
#if defined(TURNKV_DOT)
    is_dot_ = call.dtype == Dtype::bf16 && dims_ % 32 == 0 && value_dims_ % 32 == 0;
#endif
  }

  void run() {
    plan();
    partials_.reset(new float[num_partial_rows_ * static_cast<std::size_t>(value_stride_ + 2)]);
    const int num_items = static_cast<int>(items_.size());
#pragma omp parallel if (num_items > 1)
    {
      Workspace& work = workspace();
#if defined(TURNKV_AMX)
      if (is_dot_) configure();
#endif
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < num_items; ++i) compute(items_[static_cast<std::size_t>(i)], work);
#pragma omp for schedule(dynamic, 4)
      for (int i = 0; i < num_items; ++i)
        if (items_[static_cast<std::size_t>(i)].part == 0) merge(i);
#if defined(TURNKV_AMX)
      if (is_dot_) _tile_release();
#endif
    }
  }

 private:
  int block_queries() const { return std::max(1, kBlockRows / group_heads_); }

  void plan() {
    const auto& sequences = *call_.sequences;
    for (int s = 0; s < static_cast<int>(sequences.size()); ++s) {
      const Sequence& sequence = sequences[static_cast<std::size_t>(s)];
      const int num_tiles = static_cast<int>(sequence.reach.size());
      for (int q = 0; q < sequence.num_queries; q += block_queries()) {
        const int queries = std::min(block_queries(), sequence.num_queries - q);
        const int rows = queries * group_heads_;
        const int split = rows <= kFewRows ? std::clamp(num_tiles / 8, kLeastSplit, kMostSplit) : kPrefillSplit;
        const int parts = std::max(1, (num_tiles + split - 1) / split);
        for (int head = 0; head < call_.num_kv_heads; ++head)
          for (int part = 0; part < parts; ++part) {
            items_.push_back({s, head, q, queries, part * split, std::min(split, num_tiles - part * split), part,
                              parts, num_partial_rows_});
            num_partial_rows_ += static_cast<std::size_t>(rows);
          }
      }
    }
    for (const Item& item : items_) max_rows_ = std::max(max_rows_, item.num_queries * group_heads_);
  }

  // Kept by each thread from call to call, and made anew when a call needs more.
  Workspace& workspace() const {
    static thread_local Workspace work;
    const auto padded = static_cast<std::size_t>(rounded(max_rows_, 16));
    const auto dims = static_cast<std::size_t>(rounded(dims_, kBlock)), width = static_cast<std::size_t>(value_stride_);
    if (padded <= work.padded && dims <= work.dims && width <= work.width) return work;
    work.padded = std::max(work.padded, padded);
    work.dims = std::max(work.dims, dims);
    work.width = std::max(work.width, width);
    const std::size_t rows = work.padded;
    work.rows.floats.reset(new float[rows * work.dims]());
    work.rows.pairs.reset(new std::uint32_t[rows * work.dims / 2]());
    work.rows.high.reset(new std::uint32_t[rows * work.dims / 4]());
    work.rows.low.reset(new std::uint32_t[rows * work.dims / 4]());
    work.rows.step.reset(new float[rows]());
    work.rows.high_sum.reset(new std::int32_t[rows * work.dims / kBlock]());
    work.rows.low_sum.reset(new std::int32_t[rows * work.dims / kBlock]());
    work.scores.reset(new float[rows * kKeys]());
    work.weights.reset(new std::uint32_t[rows * kKeys / 2]());
    for (auto& acc : work.acc) acc.reset(new float[rows * work.width]());
    work.tiles.reset(new std::uint8_t[kChunk * kTile * 2 * (work.dims + work.width) + 64]());
    work.tile = std::make_unique<FloatTile>();
    return work;
  }

  const Angles* angles(int offset) const {
    for (const Angles& each : call_.angles)
      if (each.offset == offset) return &each;
    return nullptr;
  }

  void rotate(float* vector, const Angles& by) const {  // by minus the offset
    float* part = vector + call_.first_rotated;
    for (int i = 0; i < call_.num_pairs; ++i) {
      float& a = part[call_.is_interleaved ? 2 * i : i];
      float& b = part[call_.is_interleaved ? 2 * i + 1 : i + call_.num_pairs];
      const float first = a * by.cos[i] + b * by.sin[i], second = b * by.cos[i] - a * by.sin[i];
      a = first;
      b = second;
    }
  }

  // Row r of an item is query r / group of it, head r % group.
  void prepare(const Item& item, const Group& group, Rows& rows) const {
    const Sequence& sequence = (*call_.sequences)[static_cast<std::size_t>(item.sequence)];
    const Format format = call_.arenas[static_cast<std::size_t>(group.tier)].key_format;
    const Angles* by = group.offset ? angles(group.offset) : nullptr;
    const bool has_codes =
        item.num_queries * group_heads_ <= kFewRows && (format == Format::int8 || format == Format::int4);
    rows.count = item.num_queries * group_heads_;
    rows.padded = rounded(rows.count, 16);
    for (int r = 0; r < rows.count; ++r) {
      const std::ptrdiff_t row = sequence.first_query + item.first_query + r / group_heads_;
      const std::ptrdiff_t from = row * call_.query_row + (item.head * group_heads_ + r % group_heads_) * call_.query_head;
      float* vector = &rows.floats[static_cast<std::size_t>(r * dims_)];
      read_row(from, vector);
      if (by) rotate(vector, *by);
      if (format == Format::int4) hadamard(vector, dims_);
      const float scale = call_.softcap > 0 ? call_.scale : call_.scale * kLog2E;
      for (int i = 0; i < dims_; ++i) vector[i] *= scale;
      if (is_dot_) pack(rows, r, format, has_codes);
    }
    for (int r = rows.count; r < rows.padded; ++r) {
      std::fill_n(&rows.floats[static_cast<std::size_t>(r * dims_)], dims_, 0.0F);
      if (is_dot_) pack(rows, r, format, has_codes);
    }
  }

  void read_row(std::ptrdiff_t from, float* to) const {
#if defined(__AVX512F__)
    if (call_.dtype == Dtype::bf16 && dims_ % 16 == 0) {
      const auto* bits = static_cast<const std::uint16_t*>(call_.query) + from;
      for (int i = 0; i < dims_; i += 16) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + i));
        _mm512_storeu_si512(to + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
      }
      return;
    }
#endif
    for (int i = 0; i < dims_; ++i) to[i] = read(call_.query, from + i, call_.dtype);
  }

  // A row as bf16 pairs or, for keys in codes, as two int8 parts of 15 bits together.
  void pack(Rows& rows, int r, Format format, bool has_codes) const {
#if defined(TURNKV_DOT)
    const float* vector = &rows.floats[static_cast<std::size_t>(r * dims_)];
    if (!has_codes) {
      auto* pairs = reinterpret_cast<std::uint8_t*>(&rows.pairs[static_cast<std::size_t>(r * dims_ / 2)]);
      for (int i = 0; i < dims_; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + 2 * i),
                            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(vector + i))));
      return;
    }
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < dims_; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(vector + i)));
    const float size = std::min(_mm512_reduce_max_ps(most), 1e30F);
    const float step = size > 0 ? size / 16256.0F : 1.0F;  // 127 * 128
    rows.step[static_cast<std::size_t>(r)] = step;
    const __m512 inverse = _mm512_set1_ps(1.0F / step);
    const __m512i limit = _mm512_set1_epi32(16256);
    auto* high = reinterpret_cast<std::uint8_t*>(&rows.high[static_cast<std::size_t>(r * dims_ / 4)]);
    auto* low = reinterpret_cast<std::uint8_t*>(&rows.low[static_cast<std::size_t>(r * dims_ / 4)]);
    // In a lane of int4 codes the even dims lie in the low nibbles and the odd ones in the high ones.
    const __m128i order = format == Format::int4 ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                                                 : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int block = 0; block < dims_ / kBlock; ++block) {
      std::int32_t high_sum = 0, low_sum = 0;
      for (int i = block * kBlock; i < (block + 1) * kBlock; i += 16) {
        __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(vector + i), inverse));
        code = _mm512_max_epi32(_mm512_min_epi32(code, limit), _mm512_sub_epi32(_mm512_setzero_si512(), limit));
        const __m512i top = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(64)), 7);
        const __m512i rest = _mm512_sub_epi32(code, _mm512_slli_epi32(top, 7));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(top), order));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(rest), order));
        high_sum += _mm512_reduce_add_epi32(top);
        low_sum += _mm512_reduce_add_epi32(rest);
      }
      rows.high_sum[static_cast<std::size_t>(r * (dims_ / kBlock) + block)] = high_sum;
      rows.low_sum[static_cast<std::size_t>(r * (dims_ / kBlock) + block)] = low_sum;
    }
#else
    static_cast<void>(rows), static_cast<void>(r), static_cast<void>(format), static_cast<void>(has_codes);
#endif
  }

  const std::uint8_t* block_of(const Group& group, int tile, int head) const {
    const Arena& arena = call_.arenas[static_cast<std::size_t>(group.tier)];
    return arena.blocks + static_cast<std::size_t>(group.pages[tile]) * arena.page_bytes +
           static_cast<std::size_t>(head) * arena.head_bytes;
  }

  void compute(const Item& item, Workspace& work) {
    const Sequence& sequence = (*call_.sequences)[static_cast<std::size_t>(item.sequence)];
    const int rows = item.num_queries * group_heads_;
    std::fill_n(work.m, rounded(rows, 16), kNone);
    std::fill_n(work.l, rounded(rows, 16), 0.0F);
    bool is_used[2] = {false, false};
    const auto size = static_cast<std::size_t>(rounded(rows, 16) * value_stride_);
    for (auto& acc : work.acc) std::fill_n(acc.get(), size, 0.0F);
    const int first_position = sequence.first_position + item.first_query;
    const int last_position = first_position + item.num_queries - 1;
    int base = 0;  // tiles in the groups before
    for (const Group& group : sequence.groups) {
      const int start = std::max(item.first_tile - base, 0);
      const int stop = std::min(item.first_tile + item.num_tiles - base, group.count);
      bool is_ready = false;
      int chosen[kChunk], count = 0;
      for (int tile = start; tile < stop; ++tile) {
        const Reach& reach = sequence.reach[static_cast<std::size_t>(base + tile)];
        const bool is_seen =
            reach.first <= last_position && (!call_.window || reach.last > first_position - call_.window);
        if (is_seen) chosen[count++] = tile;
        if (count == kChunk || (count && tile + 1 == stop)) {
          if (!is_ready) prepare(item, group, work.rows);
          is_ready = true;
          chunk(item, sequence, group, base, chosen, count, work, is_used);
          count = 0;
        }
      }
      base += group.count;
    }
    float* to = &partials_[item.partial * static_cast<std::size_t>(value_stride_ + 2)];
    for (int r = 0; r < rows; ++r, to += value_stride_ + 2) {
      float* plain = &work.acc[0][static_cast<std::size_t>(r * value_stride_)];
      if (is_used[1]) {
        float* turned = &work.acc[1][static_cast<std::size_t>(r * value_stride_)];
        hadamard(turned, value_dims_);
        for (int e = 0; e < value_dims_; ++e) plain[e] += turned[e];
      }
      to[0] = work.m[r];
      to[1] = work.l[r];
      std::memcpy(to + 2, plain, sizeof(float) * static_cast<std::size_t>(value_dims_));
    }
  }

  // Scores of some tiles of one group, the softmax's running state, and the weighted values.
  void chunk(const Item& item, const Sequence& sequence, const Group& group, int base, const int* tiles, int count,
             Workspace& work, bool* is_used) {
    const TileLayout& layout = layouts_[static_cast<std::size_t>(group.tier)];
    const int rows = work.rows.count;
    const std::uint8_t* blocks[kChunk];
    for (int t = 0; t < count; ++t) blocks[t] = block_of(group, tiles[t], item.head);
    const std::uint8_t* ahead[kChunk];
    look_ahead(group, tiles, count, item.head, ahead);
    const bool is_turned = layout.value_format == Format::int4;
    float* acc = work.acc[is_turned].get();
    is_used[is_turned] = true;
    const int keys = count * kTile;
#if defined(TURNKV_DOT)
    if (is_dot_) {
      const bool is_many = rows > kFewRows;
      const bool is_plain_key = layout.key_format == Format::exact, is_plain_value = layout.value_format == Format::exact;
      const std::uint8_t *key_tiles[kChunk], *value_tiles[kChunk];
      for (int t = 0; t < count; ++t) {
        std::uint8_t* spare = work.tiles.get() + static_cast<std::size_t>(t * kTile * 2 * (dims_ + value_dims_));
        key_tiles[t] = blocks[t];
        value_tiles[t] = blocks[t] + layout.values;
        if ((is_many && !is_plain_key) || layout.key_format == Format::fp8) {
          if (layout.key_format == Format::fp8) {
            expand_keys(blocks[t], layout, call_.dtype, dims_, work.tile->keys);
            round_keys(work.tile->keys, spare);
          } else {
            code_keys_to_pairs(blocks[t], layout, spare);
          }
          key_tiles[t] = spare;
        }
        spare += kTile * 2 * dims_;
        if ((is_many && !is_plain_value) || layout.value_format == Format::fp8) {
          if (layout.value_format == Format::fp8) {
            expand_values(blocks[t], layout, call_.dtype, value_dims_, work.tile->values);
            blank_values(work.tile->values, group.masks[tiles[t]]);
            round_values(work.tile->values, spare);
          } else {
            code_values_to_pairs(blocks[t], layout, group.masks[tiles[t]], spare);
          }
          value_tiles[t] = spare;
        } else if (is_plain_value && group.masks[tiles[t]] != 0xffff) {
          copy_values(value_tiles[t], group.masks[tiles[t]], spare);
          value_tiles[t] = spare;
        }
      }
      const bool is_code_key = !is_many && !is_plain_key && layout.key_format != Format::fp8;
      const bool is_code_value = !is_many && !is_plain_value && layout.value_format != Format::fp8;
      if (is_code_key) {
        for (int r = 0; r < rows; r += kGroupRows) score_codes_some(layout, blocks, ahead, count, work, r);
#if defined(TURNKV_AMX)
      } else if (is_many) {
        score_amx(key_tiles, count, work);
#endif
      } else {
        for (int r = 0; r < rows; r += kGroupRows) score_pairs_some(key_tiles, ahead, count, work, r);
      }
      weigh(item, sequence, group, base, tiles, count, work, acc, !is_code_value);
      if (is_code_value) {
        for (int r = 0; r < rows; r += kGroupRows)
          value_codes_some(layout, blocks, ahead, group, tiles, count, work, acc, r);
#if defined(TURNKV_AMX)
      } else if (is_many) {
        value_amx(value_tiles, count, work, acc);
#endif
      } else {
        for (int r = 0; r < rows; r += kGroupRows) value_pairs_some(value_tiles, ahead, layout.values, count, work, acc, r);
      }
      return;
    }
#endif
    for (int t = 0; t < count; ++t) {
      const bool is_float = call_.dtype == Dtype::f32 && layout.key_format == Format::exact;
      if (!is_float) expand_keys(blocks[t], layout, call_.dtype, dims_, work.tile->keys);
      const float* tile = is_float ? reinterpret_cast<const float*>(blocks[t]) : work.tile->keys;
      for (int r = 0; r < rows; r += kGroupRows) score_floats_some(tile, work, r, t);
    }
    weigh(item, sequence, group, base, tiles, count, work, acc, false);
    for (int t = 0; t < count; ++t) {
      expand_values(blocks[t], layout, call_.dtype, value_dims_, work.tile->values);
      blank_values(work.tile->values, group.masks[tiles[t]]);
      for (int r = 0; r < rows; r += kGroupRows) value_floats_some(work.tile->values, work, acc, r, t);
    }
    static_cast<void>(keys);
  }

  // What lies in slots without a key may be anything, and 0 times that is not always 0.
  void blank_values(float* values, std::uint16_t mask) const {
    if (mask == 0xffff) return;
    for (int s = 0; s < kTile; ++s)
      if (!(mask >> s & 1)) std::fill_n(values + s * value_dims_, value_dims_, 0.0F);
  }

  // The tiles that come a chunk later: each line that is read asks for its counterpart in these.
  void look_ahead(const Group& group, const int* tiles, int count, int head, const std::uint8_t** ahead) const {
    for (int t = 0; t < count; ++t)
      ahead[t] = block_of(group, std::min(tiles[t] + kChunk, group.count - 1), head);
  }

  static void ask(const std::uint8_t* line) { __builtin_prefetch(line, 0, 2); }

  // Scores to weights: cap, mask, running maximum and sum. The weights lie in `scores`, and as bf16 pairs if asked for.
  void weigh(const Item& item, const Sequence& sequence, const Group& group, int base, const int* tiles, int count,
             Workspace& work, float* acc, bool is_paired) {
    const int first_position = sequence.first_position + item.first_query;
    bool is_whole[kChunk];
    for (int t = 0; t < count; ++t) {
      const Reach& reach = sequence.reach[static_cast<std::size_t>(base + tiles[t])];
      const int last_position = first_position + item.num_queries - 1;
      is_whole[t] = group.masks[tiles[t]] == 0xffff && reach.last <= first_position &&
                    (!call_.window || reach.first > last_position - call_.window);
    }
    float* other = acc == work.acc[0].get() ? work.acc[1].get() : work.acc[0].get();
    for (int r = 0; r < work.rows.count; ++r) {
      float* scores = &work.scores[static_cast<std::size_t>(r * kKeys)];
      const int at = first_position + r / group_heads_;
      f16x best = splat(kNone);
      for (int t = 0; t < count; ++t) {
        f16x score = load(scores + t * kTile);
        if (call_.softcap > 0)
          for (int i = 0; i < kTile; ++i) score[i] = kLog2E * call_.softcap * std::tanh(score[i] / call_.softcap);
        if (!is_whole[t]) score = masked(score, group, tiles[t], at);
        if (!is_whole[t] || call_.softcap > 0) store(scores + t * kTile, score);
        best = maximum(best, score);
      }
      const float before = work.m[r], now = std::max(before, highest(best));
      if (now == kNone) {
        for (int t = 0; t < count; ++t) store(scores + t * kTile, f16x{});
        if (is_paired) std::fill_n(&work.weights[static_cast<std::size_t>(r * kKeys / 2)], count * kTile / 2, 0U);
        continue;
      }
      f16x sum{};
      const f16x shift = splat(now);
      if (is_paired) {
        sum = weigh_pairs(scores, count, shift, &work.weights[static_cast<std::size_t>(r * kKeys / 2)]);
      } else {
        for (int t = 0; t < count; ++t) {
          const f16x weight = exponential<false>(load(scores + t * kTile) - shift);
          sum += weight;
          store(scores + t * kTile, weight);
        }
      }
      if (now > before) {
        const float factor = before == kNone ? 0.0F : std::exp2(before - now);
        work.l[r] *= factor;
        for (float* each : {acc, other}) {
          float* row = each + r * value_stride_;
          for (int e = 0; e < value_stride_; e += 16) store(row + e, load(row + e) * factor);
        }
        work.m[r] = now;
      }
      work.l[r] += total(sum);
    }
  }

  f16x masked(f16x score, const Group& group, int tile, int at) const {
    const std::uint32_t mask = group.masks[tile];
    const std::int32_t* positions = group.positions + tile * kTile;
    i16x is_seen{}, where{};
    for (int i = 0; i < kTile; ++i) {
      is_seen[i] = mask >> i & 1 ? -1 : 0;
      where[i] = positions[i];
    }
    is_seen = is_seen & (where <= at);
    if (call_.window) is_seen = is_seen & (where > at - call_.window);
    return is_seen ? score : splat(kNone);
  }

  // Weights as bf16 pairs, and their sums.
  static f16x weigh_pairs(const float* scores, int count, f16x shift, std::uint32_t* to) {
    f16x sum{};
#if defined(TURNKV_DOT)
    for (int t = 0; t < count; t += 2) {
      const f16x first = exponential<true>(load(scores + t * kTile) - shift);
      const f16x second = t + 1 < count ? exponential<true>(load(scores + (t + 1) * kTile) - shift) : f16x{};
      sum += first + second;
      _mm512_storeu_si512(to + t * kTile / 2, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
                                                  reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first))));
    }
#else
    static_cast<void>(scores), static_cast<void>(count), static_cast<void>(shift), static_cast<void>(to);
#endif
    return sum;
  }

  // -- float32 ----------------------------------------------------------------------------------------------------

  template <int R>
  void score_floats(const float* tile, Workspace& work, int row, int t) const {
    f16x sums[R] = {};
    const float* query = &work.rows.floats[static_cast<std::size_t>(row * dims_)];
    for (int i = 0; i < dims_; ++i) {
      const f16x key = load(tile + i * kTile);
      for (int r = 0; r < R; ++r) sums[r] += key * query[r * dims_ + i];
    }
    for (int r = 0; r < R; ++r) store(&work.scores[static_cast<std::size_t>((row + r) * kKeys + t * kTile)], sums[r]);
  }

  void score_floats_some(const float* tile, Workspace& work, int row, int t) const {
    switch (std::min(kGroupRows, work.rows.count - row)) {
      case 1: return score_floats<1>(tile, work, row, t);
      case 2: return score_floats<2>(tile, work, row, t);
      case 3: return score_floats<3>(tile, work, row, t);
      default: return score_floats<4>(tile, work, row, t);
    }
  }

  template <int R>
  void value_floats(const float* tile, Workspace& work, float* acc, int row, int t) const {
    const float* weights = &work.scores[static_cast<std::size_t>(row * kKeys + t * kTile)];
    int e = 0;
    for (; e + 16 <= value_dims_; e += 16) {
      f16x sums[R];
      for (int r = 0; r < R; ++r) sums[r] = load(acc + (row + r) * value_stride_ + e);
      for (int s = 0; s < kTile; ++s) {
        const f16x value = load(tile + s * value_dims_ + e);
        for (int r = 0; r < R; ++r) sums[r] += value * weights[r * kKeys + s];
      }
      for (int r = 0; r < R; ++r) store(acc + (row + r) * value_stride_ + e, sums[r]);
    }
    for (; e < value_dims_; ++e)
      for (int r = 0; r < R; ++r) {
        float sum = acc[(row + r) * value_stride_ + e];
        for (int s = 0; s < kTile; ++s) sum += tile[s * value_dims_ + e] * weights[r * kKeys + s];
        acc[(row + r) * value_stride_ + e] = sum;
      }
  }

  void value_floats_some(const float* tile, Workspace& work, float* acc, int row, int t) const {
    switch (std::min(kGroupRows, work.rows.count - row)) {
      case 1: return value_floats<1>(tile, work, acc, row, t);
      case 2: return value_floats<2>(tile, work, acc, row, t);
      case 3: return value_floats<3>(tile, work, acc, row, t);
      default: return value_floats<4>(tile, work, acc, row, t);
    }
  }

#if defined(TURNKV_DOT)
  // -- bf16 pairs -------------------------------------------------------------------------------------------------

  void round_keys(const float* keys, std::uint8_t* to) const {
    for (int i = 0; i < dims_; i += 2) {
      const __m512i low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(
          _mm512_cvtneps_pbh(reinterpret_cast<__m512>(load(keys + i * kTile)))));
      const __m512i high = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(
          _mm512_cvtneps_pbh(reinterpret_cast<__m512>(load(keys + (i + 1) * kTile)))));
      _mm512_storeu_si512(to + i * 32, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }

  void round_values(const float* values, std::uint8_t* to) const {
    for (int s = 0; s < kTile; s += 2)
      for (int e = 0; e < value_dims_; e += 16) {
        const __m512i low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(
            _mm512_cvtneps_pbh(reinterpret_cast<__m512>(load(values + s * value_dims_ + e)))));
        const __m512i high = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(
            _mm512_cvtneps_pbh(reinterpret_cast<__m512>(load(values + (s + 1) * value_dims_ + e)))));
        _mm512_storeu_si512(to + (s / 2 * value_dims_ + e) * 4, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
  }

  // Two floats as a bf16 pair in each lane; half up, which no finite value notices.
  static __m512i pair(__m512 low, __m512 high) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
    const __m512i b = _mm512_add_epi32(_mm512_castps_si512(high), half);
    return _mm512_or_si512(a, _mm512_and_si512(b, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
  }

  // Code number k of each lane.
  template <bool kIsInt8>
  static __m512 code(__m512i lanes, int k) {
    if constexpr (kIsInt8)
      return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sll_epi32(lanes, _mm_cvtsi32_si128(24 - 8 * k)), 24));
    const __m512i nibble_codes =
        _mm512_and_si512(_mm512_srl_epi32(lanes, _mm_cvtsi32_si128(4 * k)), _mm512_set1_epi32(15));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(nibble_codes, _mm512_set1_epi32(8)));
  }

  template <bool kIsInt8>
  void keys_to_pairs(const std::uint8_t* block, const TileLayout& layout, std::uint8_t* to) const {
    constexpr int kCodes = kIsInt8 ? 4 : 8;
    for (int i = 0; i < dims_; i += kCodes) {
      const std::size_t group = kIsInt8 ? 0 : static_cast<std::size_t>(i / kBlock);
      const auto scale = reinterpret_cast<__m512>(scales_of(block + layout.key_scales + group * 32));
      const __m512i lanes = _mm512_loadu_si512(block + i / kCodes * 64);
      for (int k = 0; k < kCodes; k += 2)
        _mm512_storeu_si512(to + (i + k) * 32, pair(_mm512_mul_ps(code<kIsInt8>(lanes, k), scale),
                                                    _mm512_mul_ps(code<kIsInt8>(lanes, k + 1), scale)));
    }
  }

  void code_keys_to_pairs(const std::uint8_t* block, const TileLayout& layout, std::uint8_t* to) const {
    if (layout.key_format == Format::int8) keys_to_pairs<true>(block, layout, to);
    else keys_to_pairs<false>(block, layout, to);
  }

  template <bool kIsInt8>
  void values_to_pairs(const std::uint8_t* block, const TileLayout& layout, std::uint16_t mask,
                       std::uint8_t* to) const {
    constexpr int kCodes = kIsInt8 ? 4 : 8;
    alignas(64) float scales[kTile];
    for (int e = 0; e < value_dims_; e += 16) {
      if (e == 0 || (!kIsInt8 && e % kBlock == 0)) {
        const std::size_t group = kIsInt8 ? 0 : static_cast<std::size_t>(e / kBlock);
        const auto scale = reinterpret_cast<__m512>(scales_of(block + layout.value_scales + group * 32));
        _mm512_store_ps(scales, _mm512_maskz_mov_ps(mask, scale));
      }
      for (int j = 0; j < kTile / kCodes; ++j) {
        const __m512i lanes = _mm512_loadu_si512(block + layout.values + (j * value_dims_ + e) * 4);
        for (int k = 0; k < kCodes; k += 2) {
          const int slot = j * kCodes + k;
          _mm512_storeu_si512(to + (slot / 2 * value_dims_ + e) * 4,
                              pair(_mm512_mul_ps(code<kIsInt8>(lanes, k), _mm512_set1_ps(scales[slot])),
                                   _mm512_mul_ps(code<kIsInt8>(lanes, k + 1), _mm512_set1_ps(scales[slot + 1]))));
        }
      }
    }
  }

  void code_values_to_pairs(const std::uint8_t* block, const TileLayout& layout, std::uint16_t mask,
                            std::uint8_t* to) const {
    if (layout.value_format == Format::int8) values_to_pairs<true>(block, layout, mask, to);
    else values_to_pairs<false>(block, layout, mask, to);
  }

  // Pairs of values with those of empty slots blanked.
  void copy_values(const std::uint8_t* from, std::uint16_t mask, std::uint8_t* to) const {
    for (int j = 0; j < kTile / 2; ++j) {
      const std::uint32_t keep = (mask >> (2 * j) & 1 ? 0xffffU : 0U) | (mask >> (2 * j + 1) & 1 ? 0xffff0000U : 0U);
      const __m512i kept = _mm512_set1_epi32(static_cast<int>(keep));
      for (int e = 0; e < value_dims_; e += 16) {
        const int at = (j * value_dims_ + e) * 4;
        _mm512_storeu_si512(to + at, _mm512_and_si512(kept, _mm512_loadu_si512(from + at)));
      }
    }
  }

  template <int R>
  void score_pairs(const std::uint8_t* const* tiles, const std::uint8_t* const* ahead, int count, Workspace& work, int row) const {
    const std::uint32_t* query = &work.rows.pairs[static_cast<std::size_t>(row * dims_ / 2)];
    for (int t = 0; t < count; ++t) {
      __m512 even[R], odd[R];
      for (int r = 0; r < R; ++r) even[r] = odd[r] = _mm512_setzero_ps();
      for (int i = 0; i < dims_ / 2; i += 2) {
        const auto first = reinterpret_cast<__m512bh>(_mm512_loadu_si512(tiles[t] + i * 64));
        const auto second = reinterpret_cast<__m512bh>(_mm512_loadu_si512(tiles[t] + i * 64 + 64));
        ask(ahead[t] + i * 64);
        ask(ahead[t] + i * 64 + 64);
        for (int r = 0; r < R; ++r) {
          even[r] = _mm512_dpbf16_ps(even[r], first, spread(query[r * dims_ / 2 + i]));
          odd[r] = _mm512_dpbf16_ps(odd[r], second, spread(query[r * dims_ / 2 + i + 1]));
        }
      }
      for (int r = 0; r < R; ++r)
        _mm512_storeu_ps(&work.scores[static_cast<std::size_t>((row + r) * kKeys + t * kTile)],
                         _mm512_add_ps(even[r], odd[r]));
    }
  }

  static __m512bh spread(std::uint32_t pair) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair)));
  }

  void score_pairs_some(const std::uint8_t* const* tiles, const std::uint8_t* const* ahead, int count, Workspace& work, int row) const {
    switch (std::min(kGroupRows, work.rows.count - row)) {
      case 1: return score_pairs<1>(tiles, ahead, count, work, row);
      case 2: return score_pairs<2>(tiles, ahead, count, work, row);
      case 3: return score_pairs<3>(tiles, ahead, count, work, row);
      default: return score_pairs<4>(tiles, ahead, count, work, row);
    }
  }

  template <int R>
  void value_pairs(const std::uint8_t* const* tiles, const std::uint8_t* const* ahead, std::size_t at, int count, Workspace& work, float* acc, int row) const {
    const std::uint32_t* weights = &work.weights[static_cast<std::size_t>(row * kKeys / 2)];
    for (int e = 0; e < value_dims_; e += 32) {
      __m512 sums[R][2];
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) sums[r][h] = _mm512_loadu_ps(acc + (row + r) * value_stride_ + e + 16 * h);
      for (int t = 0; t < count; ++t) {
        const std::uint8_t *from = tiles[t] + e * 4, *next = ahead[t] + at + e * 4;
#pragma GCC unroll 1
        for (int j = 0; j < kTile / 2; ++j, from += value_dims_ * 4, next += value_dims_ * 4) {
          ask(next);
          ask(next + 64);
          const auto first = reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
          const auto second = reinterpret_cast<__m512bh>(_mm512_loadu_si512(from + 64));
          for (int r = 0; r < R; ++r) {
            const __m512bh weight = spread(weights[r * kKeys / 2 + t * kTile / 2 + j]);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], first, weight);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], second, weight);
          }
        }
      }
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) _mm512_storeu_ps(acc + (row + r) * value_stride_ + e + 16 * h, sums[r][h]);
    }
  }

  void value_pairs_some(const std::uint8_t* const* tiles, const std::uint8_t* const* ahead, std::size_t at, int count, Workspace& work, float* acc, int row) const {
    switch (std::min(kGroupRows, work.rows.count - row)) {
      case 1: return value_pairs<1>(tiles, ahead, at, count, work, acc, row);
      case 2: return value_pairs<2>(tiles, ahead, at, count, work, acc, row);
      case 3: return value_pairs<3>(tiles, ahead, at, count, work, acc, row);
      default: return value_pairs<4>(tiles, ahead, at, count, work, acc, row);
    }
  }

  // -- codes as they lie ------------------------------------------------------------------------------------------

  template <int R>
  void score_codes(const TileLayout& layout, const std::uint8_t* const* blocks, const std::uint8_t* const* ahead, int count, Workspace& work,
                   int row) const {
    const std::uint32_t* high = &work.rows.high[static_cast<std::size_t>(row * dims_ / 4)];
    const std::uint32_t* low = &work.rows.low[static_cast<std::size_t>(row * dims_ / 4)];
    const int num_groups = dims_ / kBlock;
    const std::int32_t* high_sum = &work.rows.high_sum[static_cast<std::size_t>(row * num_groups)];
    const std::int32_t* low_sum = &work.rows.low_sum[static_cast<std::size_t>(row * num_groups)];
    const bool is_int8 = layout.key_format == Format::int8;
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80)), nibbles = _mm512_set1_epi8(15);
    for (int t = 0; t < count; ++t) {
      __m512 sums[R];
      for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
      __m512i tops[R], lows[R];
      for (int g = 0; g < num_groups; ++g) {
        if (g == 0 || !is_int8)
          for (int r = 0; r < R; ++r) tops[r] = lows[r] = _mm512_setzero_si512();
        if (is_int8) {
          for (int i = g * 8; i < g * 8 + 8; ++i) {
            const __m512i key = _mm512_xor_si512(flip, _mm512_loadu_si512(blocks[t] + i * 64));
            ask(ahead[t] + i * 64);
            for (int r = 0; r < R; ++r) {
              tops[r] = _mm512_dpbusd_epi32(tops[r], key, _mm512_set1_epi32(static_cast<int>(high[r * dims_ / 4 + i])));
              lows[r] = _mm512_dpbusd_epi32(lows[r], key, _mm512_set1_epi32(static_cast<int>(low[r * dims_ / 4 + i])));
            }
          }
          continue;
        }
        for (int i = g * 4; i < g * 4 + 4; ++i) {
          const __m512i both = _mm512_loadu_si512(blocks[t] + i * 64);
          ask(ahead[t] + i * 64);
          const __m512i keys[2] = {_mm512_and_si512(nibbles, both),
                                   _mm512_and_si512(nibbles, _mm512_srli_epi32(both, 4))};
          for (int h = 0; h < 2; ++h)
            for (int r = 0; r < R; ++r) {
              const int at = r * dims_ / 4 + 2 * i + h;
              tops[r] = _mm512_dpbusd_epi32(tops[r], keys[h], _mm512_set1_epi32(static_cast<int>(high[at])));
              lows[r] = _mm512_dpbusd_epi32(lows[r], keys[h], _mm512_set1_epi32(static_cast<int>(low[at])));
            }
        }
        const __m512 scale = reinterpret_cast<__m512>(scales_of(blocks[t] + layout.key_scales + g * 32));
        for (int r = 0; r < R; ++r) {
          const int at = r * num_groups + g;
          sums[r] = _mm512_fmadd_ps(dot(tops[r], lows[r], 8 * high_sum[at], 8 * low_sum[at]), scale, sums[r]);
        }
      }
      if (is_int8) {
        const __m512 scale = reinterpret_cast<__m512>(scales_of(blocks[t] + layout.key_scales));
        for (int r = 0; r < R; ++r) {
          int tops_bias = 0, lows_bias = 0;
          for (int g = 0; g < num_groups; ++g) {
            tops_bias += 128 * high_sum[r * num_groups + g];
            lows_bias += 128 * low_sum[r * num_groups + g];
          }
          sums[r] = _mm512_mul_ps(dot(tops[r], lows[r], tops_bias, lows_bias), scale);
        }
      }
      for (int r = 0; r < R; ++r)
        _mm512_storeu_ps(&work.scores[static_cast<std::size_t>((row + r) * kKeys + t * kTile)],
                         _mm512_mul_ps(sums[r], _mm512_set1_ps(work.rows.step[static_cast<std::size_t>(row + r)])));
    }
  }

  static __m512 dot(__m512i tops, __m512i lows, int tops_bias, int lows_bias) {
    const __m512 top = _mm512_cvtepi32_ps(_mm512_sub_epi32(tops, _mm512_set1_epi32(tops_bias)));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_sub_epi32(lows, _mm512_set1_epi32(lows_bias)));
    return _mm512_fmadd_ps(top, _mm512_set1_ps(128.0F), low);
  }

  void score_codes_some(const TileLayout& layout, const std::uint8_t* const* blocks, const std::uint8_t* const* ahead, int count, Workspace& work,
                        int row) const {
    switch (std::min(kGroupRows, work.rows.count - row)) {
      case 1: return score_codes<1>(layout, blocks, ahead, count, work, row);
      case 2: return score_codes<2>(layout, blocks, ahead, count, work, row);
      case 3: return score_codes<3>(layout, blocks, ahead, count, work, row);
      default: return score_codes<4>(layout, blocks, ahead, count, work, row);
    }
  }

  // Values in codes. Weights times the tokens' scales become integers too, over all tiles of a chunk by one step: of 16
  // bits in two parts for int8, of 8 bits with a sign (as the scales have) for int4.
  template <int R>
  void value_codes(const TileLayout& layout, const std::uint8_t* const* blocks, const std::uint8_t* const* ahead,
                   const Group& group, const int* tiles, int count, Workspace& work, float* acc, int row) const {
    if (layout.value_format == Format::int8) int8_values<R>(layout, blocks, ahead, group, tiles, count, work, acc, row);
    else int4_values<R>(layout, blocks, ahead, group, tiles, count, work, acc, row);
  }

  // Weights times scales of one group, in `scores`' order of rows; gives the largest size of each row.
  template <int R>
  void scaled_weights(const std::uint8_t* const* blocks, std::size_t at, const Group& group, const int* tiles,
                      int count, const Workspace& work, int row, __m512 (*scaled)[R], float* most) const {
    __m512 highest_of[R];
    for (int r = 0; r < R; ++r) highest_of[r] = _mm512_setzero_ps();
    for (int t = 0; t < count; ++t) {
      const auto scale = reinterpret_cast<__m512>(scales_of(blocks[t] + at));
      const __m512 kept = _mm512_maskz_mov_ps(group.masks[tiles[t]], scale);
      for (int r = 0; r < R; ++r) {
        const float* from = &work.scores[static_cast<std::size_t>((row + r) * kKeys + t * kTile)];
        scaled[t][r] = _mm512_mul_ps(_mm512_loadu_ps(from), kept);
        highest_of[r] = _mm512_max_ps(highest_of[r], _mm512_abs_ps(scaled[t][r]));
      }
    }
    for (int r = 0; r < R; ++r) most[r] = _mm512_reduce_max_ps(highest_of[r]);
  }

  template <int R>
  void int8_values(const TileLayout& layout, const std::uint8_t* const* blocks, const std::uint8_t* const* ahead,
                   const Group& group, const int* tiles, int count, Workspace& work, float* acc, int row) const {
    __m512 scaled[kChunk][R];
    alignas(64) std::uint32_t high[kChunk][R][4], low[kChunk][R][4];
    float most[R];
    scaled_weights<R>(blocks, layout.value_scales, group, tiles, count, work, row, scaled, most);
    for (int r = 0; r < R; ++r) {
      const __m512 factor = _mm512_set1_ps(most[r] > 1e-30F ? 65535.0F / most[r] : 0.0F);
      for (int t = 0; t < count; ++t) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[t][r], factor));
        const __m512i bound = _mm512_min_epi32(code, _mm512_set1_epi32(65535));
        _mm_store_si128(reinterpret_cast<__m128i*>(high[t][r]), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bound, 8)));
        _mm_store_si128(reinterpret_cast<__m128i*>(low[t][r]), _mm512_cvtepi32_epi8(bound));
      }
    }
    for (int e = 0; e < value_dims_; e += 16) {
      __m512i tops[R], rests[R];
      for (int r = 0; r < R; ++r) tops[r] = rests[r] = _mm512_setzero_si512();
      for (int t = 0; t < count; ++t) {
        const std::uint8_t *from = blocks[t] + layout.values + e * 4, *next = ahead[t] + layout.values + e * 4;
        for (int j = 0; j < 4; ++j, from += value_dims_ * 4, next += value_dims_ * 4) {
          const __m512i value = _mm512_loadu_si512(from);
          ask(next);
          for (int r = 0; r < R; ++r) {
            tops[r] = _mm512_dpbusd_epi32(tops[r], _mm512_set1_epi32(static_cast<int>(high[t][r][j])), value);
            rests[r] = _mm512_dpbusd_epi32(rests[r], _mm512_set1_epi32(static_cast<int>(low[t][r][j])), value);
          }
        }
      }
      for (int r = 0; r < R; ++r) {
        const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(tops[r]), _mm512_set1_ps(256.0F),
                                           _mm512_cvtepi32_ps(rests[r]));
        add(acc + (row + r) * value_stride_ + e, sum, most[r] / 65535.0F);
      }
    }
    ask_scales(layout, ahead, count);
  }

  template <int R>
  void int4_values(const TileLayout& layout, const std::uint8_t* const* blocks, const std::uint8_t* const* ahead,
                   const Group& group, const int* tiles, int count, Workspace& work, float* acc, int row) const {
    __m512 scaled[kChunk][R];
    alignas(64) std::uint32_t codes[kChunk][R][4];  // slots 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15: as nibbles lie
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m512i nibbles = _mm512_set1_epi8(15);
    for (int g = 0; g < value_dims_ / kBlock; ++g) {
      float most[R];
      int sums[R];
      scaled_weights<R>(blocks, layout.value_scales + static_cast<std::size_t>(g) * 32, group, tiles, count, work, row,
                        scaled, most);
      for (int r = 0; r < R; ++r) {
        const __m512 factor = _mm512_set1_ps(most[r] > 1e-30F ? 127.0F / most[r] : 0.0F);
        __m512i sum = _mm512_setzero_si512();
        for (int t = 0; t < count; ++t) {
          const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[t][r], factor));
          sum = _mm512_add_epi32(sum, code);
          _mm_store_si128(reinterpret_cast<__m128i*>(codes[t][r]),
                          _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(code), order));
        }
        sums[r] = _mm512_reduce_add_epi32(sum);
      }
      for (int e = g * kBlock; e < (g + 1) * kBlock; e += 16) {
        __m512i dots[R];
        for (int r = 0; r < R; ++r) dots[r] = _mm512_set1_epi32(-8 * sums[r]);
        for (int t = 0; t < count; ++t) {
          const std::uint8_t *from = blocks[t] + layout.values + e * 4, *next = ahead[t] + layout.values + e * 4;
          for (int j = 0; j < 2; ++j, from += value_dims_ * 4, next += value_dims_ * 4) {
            const __m512i both = _mm512_loadu_si512(from);
            ask(next);
            const __m512i first = _mm512_and_si512(nibbles, both);
            const __m512i second = _mm512_and_si512(nibbles, _mm512_srli_epi32(both, 4));
            for (int r = 0; r < R; ++r) {
              dots[r] = _mm512_dpbusd_epi32(dots[r], first, _mm512_set1_epi32(static_cast<int>(codes[t][r][2 * j])));
              dots[r] =
                  _mm512_dpbusd_epi32(dots[r], second, _mm512_set1_epi32(static_cast<int>(codes[t][r][2 * j + 1])));
            }
          }
        }
        for (int r = 0; r < R; ++r)
          add(acc + (row + r) * value_stride_ + e, _mm512_cvtepi32_ps(dots[r]), most[r] / 127.0F);
      }
    }
    ask_scales(layout, ahead, count);
  }

  static void add(float* to, __m512 dots, float step) {
    _mm512_storeu_ps(to, _mm512_fmadd_ps(dots, _mm512_set1_ps(step), _mm512_loadu_ps(to)));
  }

  static void ask_scales(const TileLayout& layout, const std::uint8_t* const* ahead, int count) {
    for (int t = 0; t < count; ++t) {
      ask(ahead[t] + layout.key_scales);
      ask(ahead[t] + layout.value_scales);
    }
  }

  void value_codes_some(const TileLayout& layout, const std::uint8_t* const* blocks, const std::uint8_t* const* ahead, const Group& group,
                        const int* tiles, int count, Workspace& work, float* acc, int row) const {
    switch (std::min(kGroupRows, work.rows.count - row)) {
      case 1: return value_codes<1>(layout, blocks, ahead, group, tiles, count, work, acc, row);
      case 2: return value_codes<2>(layout, blocks, ahead, group, tiles, count, work, acc, row);
      case 3: return value_codes<3>(layout, blocks, ahead, group, tiles, count, work, acc, row);
      default: return value_codes<4>(layout, blocks, ahead, group, tiles, count, work, acc, row);
    }
  }
#endif

#if defined(TURNKV_AMX)
  // -- AMX: 16 rows by 16 keys, or by 16 dims of the values, at a time ----------------------------------------------

  static void configure() {
    // 0: sums; 1: query rows (32 dims); 2: weights (16 keys); 3: values (8 pairs); 4 to 7: keys (16 pairs each).
    alignas(64) static const struct {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t columns[16] = {64, 64, 32, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 8, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
  }

  void score_amx(const std::uint8_t* const* tiles, int count, Workspace& work) const {
    const auto stride = static_cast<std::size_t>(dims_) * 2;
    for (int t = 0; t < count; ++t) {
      _tile_loadd(4, tiles[t], 64);
      if (dims_ > 32) _tile_loadd(5, tiles[t] + 1024, 64);
      if (dims_ > 64) _tile_loadd(6, tiles[t] + 2048, 64);
      if (dims_ > 96) _tile_loadd(7, tiles[t] + 3072, 64);
      for (int r = 0; r < work.rows.padded; r += 16) {
        const std::uint32_t* query = &work.rows.pairs[static_cast<std::size_t>(r * dims_ / 2)];
        _tile_zero(0);
        _tile_loadd(1, query, stride);
        _tile_dpbf16ps(0, 1, 4);
        if (dims_ > 32) {
          _tile_loadd(1, query + 16, stride);
          _tile_dpbf16ps(0, 1, 5);
        }
        if (dims_ > 64) {
          _tile_loadd(1, query + 32, stride);
          _tile_dpbf16ps(0, 1, 6);
        }
        if (dims_ > 96) {
          _tile_loadd(1, query + 48, stride);
          _tile_dpbf16ps(0, 1, 7);
        }
        for (int i = 128; i < dims_; i += 32) {
          _tile_loadd(1, query + i / 2, stride);
          _tile_loadd(7, tiles[t] + i * 32, 64);
          _tile_dpbf16ps(0, 1, 7);
        }
        if (dims_ > 128) _tile_loadd(7, tiles[t] + 3072, 64);
        _tile_stored(0, &work.scores[static_cast<std::size_t>(r * kKeys + t * kTile)], kKeys * 4);
      }
    }
  }

  void value_amx(const std::uint8_t* const* tiles, int count, Workspace& work, float* acc) const {
    for (int r = 0; r < work.rows.padded; r += 16)
      for (int e = 0; e < value_dims_; e += 16) {
        _tile_loadd(0, acc + r * value_stride_ + e, static_cast<std::size_t>(value_stride_) * 4);
        for (int t = 0; t < count; ++t) {
          _tile_loadd(2, &work.weights[static_cast<std::size_t>((r * kKeys + t * kTile) / 2)], kKeys * 2);
          _tile_loadd(3, tiles[t] + e * 4, static_cast<std::size_t>(value_dims_) * 4);
          _tile_dpbf16ps(0, 2, 3);
        }
        _tile_stored(0, acc + r * value_stride_ + e, static_cast<std::size_t>(value_stride_) * 4);
      }
  }
#endif

  // The parts of an item's rows, in order, as one softmax.
  void merge(int first) const {
    const Item& item = items_[static_cast<std::size_t>(first)];
    const Sequence& sequence = (*call_.sequences)[static_cast<std::size_t>(item.sequence)];
    const int rows = item.num_queries * group_heads_;
    const auto stride = static_cast<std::size_t>(value_stride_ + 2);
    std::array<float, kMaxDim> sum;
    for (int r = 0; r < rows; ++r) {
      const int head = item.head * group_heads_ + r % group_heads_;
      const float sink = call_.sinks ? call_.sinks[head] * kLog2E : kNone;
      float most = kNone;
      for (int p = 0; p < item.num_parts; ++p) most = std::max(most, part(item, p, rows, r)[0]);
      const bool is_blind = most == kNone;
      most = std::max(most, sink);
      float weight = sink == kNone ? 0.0F : std::exp2(sink - most);
      sum.fill(0.0F);
      for (int p = 0; p < item.num_parts && !is_blind; ++p) {
        const float* from = part(item, p, rows, r);
        if (from[0] == kNone) continue;
        const float factor = std::exp2(from[0] - most);
        weight += factor * from[1];
        for (int e = 0; e < value_dims_; ++e) sum[static_cast<std::size_t>(e)] += factor * from[2 + e];
      }
      const std::ptrdiff_t row = sequence.first_query + item.first_query + r / group_heads_;
      const std::ptrdiff_t to = (row * call_.num_heads + head) * value_dims_;
      for (int e = 0; e < value_dims_; ++e)
        write(call_.out, to + e, call_.dtype, is_blind ? 0.0F : sum[static_cast<std::size_t>(e)] / weight);
    }
    static_cast<void>(stride);
  }

  const float* part(const Item& item, int p, int rows, int r) const {
    return &partials_[(item.partial + static_cast<std::size_t>(p * rows + r)) *
                      static_cast<std::size_t>(value_stride_ + 2)];
  }

  const Attend& call_;
  int group_heads_, dims_, value_dims_, value_stride_;
  bool is_dot_ = false;
  std::vector<TileLayout> layouts_;
  std::vector<Item> items_;
  std::unique_ptr<float[]> partials_;
  std::size_t num_partial_rows_ = 0;
  int max_rows_ = 1;
};

}  // namespace

void attend(const Attend& call) { Body(call).run(); }

}  // namespace turnkv::TURNKV_ISA
