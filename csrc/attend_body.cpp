// Attention over tiles. Compiled once for each instruction set, with TURNKV_ISA as the namespace; items and their order
// are those of attend.cpp.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "attend_items.h"
#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define TURNKV_DOT 1
#endif
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define TURNKV_AMX 1
#endif

namespace turnkv::TURNKV_ISA {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504F;
#if defined(TURNKV_DOT)
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif
#if defined(TURNKV_AMX)
constexpr bool kHasMatrices = true;
#else
constexpr bool kHasMatrices = false;
#endif

#include "hadamard.h"
#include "attend_vector.h"
#include "attend_float.h"
#include "attend_expand.h"
#if defined(TURNKV_DOT)
#include "attend_dot.h"
#endif
#if defined(TURNKV_AMX)
#include "attend_amx.h"
#endif

// How products are made: in float32 from any codes, or by dot-product instructions.
enum class Way { floats, pairs, int8, int4 };

// How the tiles of a tier are read.
struct Method {
  Codes key_codes, value_codes;  // as stored
  Way key_way, value_way;
  bool is_key_expanded, is_value_expanded;
};

Codes codes_of(Format format, Dtype dtype) {
  switch (format) {
    case Format::int8: return Codes::int8;
    case Format::fp8: return Codes::fp8;
    case Format::int4: return Codes::int4;
    default: return dtype == Dtype::f32 ? Codes::f32 : dtype == Dtype::bf16 ? Codes::bf16 : Codes::f16;
  }
}

// vdpbf16ps is no faster than to unpack a lane and multiply in float32 (on Sapphire Rapids it takes two cycles), which is
// more exact; so pairs are for many rows alone, where a tile is expanded once.
Way dot_way(Codes codes, bool is_many) {
  if (is_many) return Way::pairs;
  return codes == Codes::int8 ? Way::int8 : codes == Codes::int4 ? Way::int4 : Way::floats;
}

Method method_of(const Attend& call, const TileLayout& layout, bool is_many) {
  const bool is_dot = kHasDot && call.dtype == Dtype::bf16;
  const Codes plain = is_dot ? Codes::bf16 : Codes::f32;
  const bool is_ragged = call.value_dim % 16 != 0;
  Method method;
  method.key_codes = codes_of(layout.key_format, call.dtype);
  method.value_codes = codes_of(layout.value_format, call.dtype);
  method.key_way = is_dot ? dot_way(method.key_codes, is_many) : Way::floats;
  method.value_way = is_dot && (is_many || !is_ragged) ? dot_way(method.value_codes, is_many) : Way::floats;
  method.is_key_expanded = is_many && method.key_codes != plain;
  method.is_value_expanded = is_ragged || (is_many && (method.value_codes != plain || !is_dot));
  if (is_dot && kHasMatrices && is_many) {  // matrix tiles take 32 dims of keys, and values of two tiles, at a time
    method.is_key_expanded = method.is_key_expanded || call.key_dim % 32 != 0;
    method.is_value_expanded = true;
  }
  return method;
}

int rounded(int count, int to) { return (count + to - 1) / to * to; }

// The transform of each block of a vector, in place.
void turn(float* vector, int dims) {
  for (int first = 0; first < dims; first += block_size(first, dims)) hadamard(vector + first, block_size(first, dims));
}

// The tiles of an item that any of its queries sees, group after group.
struct Seen {
  int count = 0;
  const std::uint8_t* blocks[kManySplit];
  const TileLayout* layouts[kManySplit];
  int tiles[kManySplit];  // in their group
};

class Body {
 public:
  Body(const Job& job, const Item& item, const Scratch& scratch)
      : job_(job),
        call_(*job.call),
        item_(item),
        scratch_(scratch),
        sequence_(sequence_of(item)),
        rows_(item.num_queries * job.group_heads),
        is_many_(rows_ > kFewRows),
        first_position_(sequence_.first_position + item.first_query),
        last_position_(first_position_ + item.num_queries - 1) {
    const float scale = std::max(std::fabs(call_.scale), 1e-30F);
    factor_ = call_.softcap > 0 ? kLog2e : scale * kLog2e;
    cap_factor_ = call_.softcap > 0 ? scale / call_.softcap : 0.0F;
  }

  void run(const Item* next, float* partials) {
    std::fill_n(scratch_.highest, rows_, kNone);
    std::memset(scratch_.sums, 0, static_cast<std::size_t>(rows_) * 64);
    Seen seen;
    int base = 0, ends[kManySplit];  // tiles seen up to the end of a group; groups behind the item have none
    const int num_groups = static_cast<int>(sequence_.groups.size());
    int first_group = -1, stop_group = 0;
    for (int g = 0; g < num_groups; ++g) {
      const Group& group = sequence_.groups[static_cast<std::size_t>(g)];
      const int before = seen.count;
      find(group, base, seen);
      base += group.count;
      if (seen.count == before) continue;
      if (first_group < 0) first_group = stop_group = 0;
      groups_[stop_group] = g;
      ends[stop_group++] = seen.count;
    }
    after_.count = 0;
    if (next && !is_many_) look_after(*next);
#if defined(TURNKV_AMX)
    if (is_many_ && call_.dtype == Dtype::bf16) configure_matrices();
#endif
    for (int g = 0, at = 0; g < stop_group; at = ends[g++]) attend_group(groups_[g], seen, at, ends[g]);
#if defined(TURNKV_AMX)
    if (is_many_ && call_.dtype == Dtype::bf16) _tile_release();
#endif
    finish(partials);
  }

 private:
  struct After {
    int count;
    const std::uint8_t* blocks[kFewTiles];
    const TileLayout* layouts[kFewTiles];
  };

  const Sequence& sequence_of(const Item& item) const {
    return (*call_.sequences)[static_cast<std::size_t>(item.sequence)];
  }

  const std::uint8_t* block_of(const Group& group, int tile, int head) const {
    const Arena& arena = call_.arenas[static_cast<std::size_t>(group.tier)];
    return arena.blocks + static_cast<std::size_t>(group.pages[tile]) * arena.page_bytes +
           static_cast<std::size_t>(head) * arena.head_bytes;
  }

  void find(const Group& group, int base, Seen& seen) const {
    const int start = std::max(item_.first_tile - base, 0);
    const int stop = std::min(item_.first_tile + item_.num_tiles - base, group.count);
    const Reach* reach = sequence_.reach.data() + base;
    for (int tile = start; tile < stop; ++tile) {
      if (reach[tile].first > last_position_) continue;
      if (call_.window && reach[tile].last <= first_position_ - call_.window) continue;
      seen.blocks[seen.count] = block_of(group, tile, item_.head);
      seen.layouts[seen.count] = job_.layouts + group.tier;
      seen.tiles[seen.count++] = tile;
    }
  }

  // The first tiles of the item that comes after.
  void look_after(const Item& next) {
    const Sequence& sequence = sequence_of(next);
    int base = 0;
    for (const Group& group : sequence.groups) {
      for (int tile = std::max(next.first_tile - base, 0); tile < group.count && after_.count < kFewTiles; ++tile) {
        after_.blocks[after_.count] = block_of(group, tile, next.head);
        after_.layouts[after_.count++] = job_.layouts + group.tier;
      }
      base += group.count;
    }
  }

  void attend_group(int index, const Seen& seen, int start, int stop) {
    const Group& group = sequence_.groups[static_cast<std::size_t>(index)];
    int base = 0;
    for (int g = 0; g < index; ++g) base += sequence_.groups[static_cast<std::size_t>(g)].count;
    reach_ = sequence_.reach.data() + base;
    const TileLayout& layout = job_.layouts[group.tier];
    method_ = method_of(call_, layout, is_many_);
    prepare(group);
    const bool is_turned = method_.value_codes == Codes::int4;
    outputs_ = scratch_.outputs[is_turned];
    if (!is_used_[is_turned]) {
      is_used_[is_turned] = true;
      std::memset(outputs_, 0, static_cast<std::size_t>(rounded(rows_, 32) * job_.value_stride) * sizeof(float));
    }
    const int together = is_many_ ? kManyTiles : kFewTiles;
    for (int at = start; at < stop; at += together) {
      const int count = std::min(together, stop - at);
      place(group, layout, seen, at, count);
      expand();
      if (kHasMatrices && is_many_ && method_.key_way == Way::pairs) attend_matrices(seen, at + count);
      else attend_rows();
    }
  }

  // -- queries ----------------------------------------------------------------------------------------------------

  void rotate(float* vector, const Angles& by) const {  // by minus the offset
    float* part = vector + call_.first_rotated;
    const int step = call_.is_interleaved ? 2 : 1, far = call_.is_interleaved ? 1 : call_.num_pairs;
    for (int i = 0; i < call_.num_pairs; ++i) {
      const float a = part[step * i], b = part[step * i + far];
      part[step * i] = a * by.cos[i] + b * by.sin[i];
      part[step * i + far] = b * by.cos[i] - a * by.sin[i];
    }
  }

  void read_query(std::ptrdiff_t from, float* to) const {
    const int dims = call_.key_dim;
    if (call_.dtype == Dtype::f32) {
      std::memcpy(to, static_cast<const float*>(call_.query) + from, static_cast<std::size_t>(dims) * sizeof(float));
      return;
    }
    const auto* codes = static_cast<const std::uint16_t*>(call_.query) + from;
    if (call_.dtype == Dtype::bf16)
      for (int i = 0; i < dims; ++i) to[i] = from_bf16(codes[i]);
    else
      for (int i = 0; i < dims; ++i) to[i] = from_f16(codes[i]);
  }

  // Row r of an item is query r / group of it, head r % group. Prepared for one group's offset and codes of keys.
  void prepare(const Group& group) {
    const bool is_turned = method_.key_codes == Codes::int4;
    if (is_prepared_ && prepared_offset_ == group.offset && is_turned == is_prepared_turned_ &&
        method_.key_way == prepared_way_)
      return;
    is_prepared_ = true;
    prepared_offset_ = group.offset;
    is_prepared_turned_ = is_turned;
    prepared_way_ = method_.key_way;
    const Angles* by = nullptr;
    if (group.offset)
      for (const Angles& each : call_.angles)
        if (each.offset == group.offset) by = &each;
    for (int r = 0; r < rows_; ++r) {
      const std::ptrdiff_t row = sequence_.first_query + item_.first_query + r / job_.group_heads;
      const int head = item_.head * job_.group_heads + r % job_.group_heads;
      float* vector = scratch_.floats + r * call_.key_dim;
      read_query(row * call_.query_row + head * call_.query_head, vector);
      if (by) rotate(vector, *by);
      if (is_turned) turn(vector, call_.key_dim);
      if (call_.scale < 0)
        for (int i = 0; i < call_.key_dim; ++i) vector[i] = -vector[i];
#if defined(TURNKV_DOT)
      if (method_.key_way == Way::pairs) pack_pairs(r);
      else if (method_.key_way != Way::floats) pack_15_bits(r, is_turned);
#endif
    }
#if defined(TURNKV_AMX)
    const int stride = pair_stride();
    if (is_many_ && method_.key_way == Way::pairs)
      std::memset(scratch_.pairs + rows_ * stride, 0, static_cast<std::size_t>((rounded(rows_, 32) - rows_) * stride) * 4);
#endif
  }

  int pair_stride() const { return rounded(call_.key_dim, 32) / 2; }

#if defined(TURNKV_DOT)
  static __m512 some_of(const float* from, int left) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(left >= 16 ? 0xffffU : (1U << left) - 1), from);
  }

  // A row as bf16 pairs, with zeros behind its dims.
  void pack_pairs(int r) const {
    const float* vector = scratch_.floats + r * call_.key_dim;
    std::uint32_t* to = scratch_.pairs + r * pair_stride();
    for (int i = 0; i < 2 * pair_stride(); i += 32) {
      const __m512 low = some_of(vector + i, std::max(call_.key_dim - i, 0));
      const __m512 high = some_of(vector + i + 16, std::max(call_.key_dim - i - 16, 0));
      _mm512_storeu_si512(to + i / 2, as<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    }
  }

  // A row in 15 bits, and the sums of its codes: of each group of int4 keys, or of all dims.
  void pack_15_bits(int r, bool is_turned) const {
    const int dims = call_.key_dim, stride = rounded(dims, 32) / 4, bias_stride = rounded(dims, 32) / 8;
    const float* vector = scratch_.floats + r * dims;
    __m512 sizes = _mm512_setzero_ps();
    for (int i = 0; i < dims; i += 16) sizes = _mm512_max_ps(sizes, _mm512_abs_ps(some_of(vector + i, dims - i)));
    float size = _mm512_reduce_max_ps(sizes);
    if (!(size < 1e30F)) size = 1e30F;
    if (size < 1e-30F) size = 1e-30F;
    scratch_.step[r] = size / 16256.0F;  // 127 * 128
    const __m512 inverse = _mm512_set1_ps(16256.0F / size);
    const __m128i order = is_turned ? _mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0)
                                    : _mm_set_epi8(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    std::int32_t* bias = scratch_.bias + r * bias_stride;
    int stop = is_turned ? block_size(0, dims) : dims;
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < dims; i += 16) {
      const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(some_of(vector + i, dims - i), inverse));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(64)), 7);
      const __m512i low = _mm512_sub_epi32(code, _mm512_slli_epi32(high, 7));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(scratch_.high + r * stride + i / 4),
                       _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(scratch_.low + r * stride + i / 4),
                       _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), order));
      sum = _mm512_add_epi32(sum, code);
      if (i + 16 >= stop) {
        *bias++ = _mm512_reduce_add_epi32(sum);
        sum = _mm512_setzero_si512();
        if (stop < dims) stop += block_size(stop, dims);
      }
    }
  }
#endif

  // -- tiles ------------------------------------------------------------------------------------------------------

  void place(const Group& group, const TileLayout& layout, const Seen& seen, int at, int count) {
    tiles_.count = count;
    is_all_whole_ = true;
    for (int t = 0; t < count; ++t) {
      const std::uint8_t* block = seen.blocks[at + t];
      tiles_.keys[t] = block;
      tiles_.key_scales[t] = block + layout.key_scales;
      tiles_.values[t] = block + layout.values;
      tiles_.value_scales[t] = block + layout.value_scales;
      const int tile = seen.tiles[at + t];
      tiles_.masks[t] = group.masks[tile];
      positions_[t] = group.positions + tile * kTile;
      is_whole_[t] = tiles_.masks[t] == 0xffff && reach_[tile].last <= first_position_ &&
                     (!call_.window || reach_[tile].first > last_position_ - call_.window);
      is_all_whole_ = is_all_whole_ && is_whole_[t];
      if (!is_many_) look_ahead(seen, at + t, t);
    }
  }

  // Where the tile lies that comes a chunk later: each line that is read asks for its counterpart there.
  void look_ahead(const Seen& seen, int at, int t) {
    const std::uint8_t* block = seen.blocks[at];  // in the cache already: asking for it costs little
    const TileLayout* layout = seen.layouts[at];
    const int then = at + kFewTiles;
    if (then < seen.count) {
      block = seen.blocks[then];
      layout = seen.layouts[then];
    } else if (then - seen.count < after_.count) {
      block = after_.blocks[then - seen.count];
      layout = after_.layouts[then - seen.count];
    }
    tiles_.ahead_keys[t] = block;
    tiles_.ahead_values[t] = block + layout->values;
    for (std::size_t line = layout->key_scales & ~std::size_t{63}; line < layout->end; line += 64) ask_for(block + line);
  }

  template <bool kIsPaired>
  void expand_key(int t) const {
    std::uint8_t* to = scratch_.keys + static_cast<std::size_t>(t * rounded(call_.key_dim, 32)) * 64;
    with_codes(method_.key_codes, [&]<Codes kCodes>() {
      expand_keys<kCodes, kIsPaired>(tiles_.keys[t], tiles_.key_scales[t], call_.key_dim, rounded(call_.key_dim, 32), to);
    });
  }

  template <bool kIsPaired>
  void expand_value(int t, std::uint8_t* to) const {
    with_codes(method_.value_codes, [&]<Codes kCodes>() {
      expand_values<kCodes, kIsPaired>(tiles_.values[t], tiles_.value_scales[t], tiles_.masks[t], call_.value_dim,
                                       job_.value_stride, to);
    });
  }

  // Expands what has to be, and lets `tiles_` point there.
  void expand() {
    if (method_.is_key_expanded)
      for (int t = 0; t < tiles_.count; ++t) {
        if (kHasDot && method_.key_way == Way::pairs) expand_key<kHasDot>(t);
        else expand_key<false>(t);
        tiles_.keys[t] = scratch_.keys + static_cast<std::size_t>(t * rounded(call_.key_dim, 32)) * 64;
      }
    if (method_.is_value_expanded) expand_all_values();
    else if (method_.value_way == Way::pairs) blank_values();
  }

  void expand_all_values() {
    const bool is_paired = kHasDot && method_.value_way == Way::pairs;
    const std::size_t size = static_cast<std::size_t>(job_.value_stride) * kTile * (is_paired ? 2 : 4);
    for (int t = 0; t < tiles_.count; ++t) {
      std::uint8_t* to = scratch_.values + static_cast<std::size_t>(t) * size;
      if (is_paired) expand_value<kHasDot>(t, to);
      else expand_value<false>(t, to);
      tiles_.values[t] = to;
    }
    if (is_paired && tiles_.count % 2) std::memset(scratch_.values + static_cast<std::size_t>(tiles_.count) * size, 0, size);
  }

  // Pairs of values are read as they lie; where slots hold no key, from a copy with those blanked.
  void blank_values() {
#if defined(TURNKV_DOT)
    for (int t = 0; t < tiles_.count; ++t) {
      if (tiles_.masks[t] == 0xffff) continue;
      std::uint8_t* to = scratch_.values + static_cast<std::size_t>(t * job_.value_stride) * kTile * 2;
      for (int j = 0; j < kTile / 2; ++j) {
        const unsigned pair = tiles_.masks[t] >> (2 * j);
        const __m512i kept = spread((pair & 1U ? 0xffffU : 0U) | (pair & 2U ? 0xffff0000U : 0U));
        for (int e = 0; e < call_.value_dim; e += 16) {
          const int at = (j * call_.value_dim + e) * 4;
          _mm512_storeu_si512(to + at, _mm512_and_si512(kept, line_at(tiles_.values[t] + at)));
        }
      }
      tiles_.values[t] = to;
    }
#endif
  }

  // -- rows -------------------------------------------------------------------------------------------------------

  void attend_rows() {
    for (int r = 0; r < rows_; r += 4)
      with_rows(rows_ - r, [&]<int R>() {
        score_rows<R>(r);
        for (int i = 0; i < R; ++i) {
          float* scores = scratch_.scores + i * kMaxKeys;
          std::uint32_t* pairs = scratch_.weights + i * (kMaxKeys / 2);
          if (method_.value_way == Way::pairs) weigh<true, true>(r + i, scores, pairs);
          else if (method_.value_way == Way::floats) weigh<false, false>(r + i, scores, pairs);
          else weigh<true, false>(r + i, scores, pairs);
        }
        add_outputs<R>(r);
      });
  }

  template <int R>
  void score_rows(int r) const {
    float* scores = scratch_.scores;
    const int dims = call_.key_dim;
    const float* query = scratch_.floats + r * dims;
#if defined(TURNKV_DOT)
    const int quads = rounded(dims, 32) / 4, biases = rounded(dims, 32) / 8;
    const Query15 codes{scratch_.high + r * quads, scratch_.low + r * quads, quads,
                        scratch_.step + r, scratch_.bias + r * biases, biases};
    if (method_.key_way == Way::pairs)
      return pair_scores<R>(tiles_, scratch_.pairs + r * pair_stride(), pair_stride(), method_.is_key_expanded ? pair_stride() : dims / 2, scores);
    if (method_.key_way == Way::int8) return int8_scores<R>(tiles_, codes, dims / 4, scores);
    if (method_.key_way == Way::int4) return int4_scores<R>(tiles_, codes, dims, scores);
#endif
    if (is_many_) return float_scores<Codes::ready, R>(tiles_, query, dims, scores);
    with_codes(method_.key_codes, [&]<Codes kCodes>() { float_scores<kCodes, R>(tiles_, query, dims, scores); });
  }

  template <int R>
  void add_outputs(int r) const {
    const int stride = job_.value_stride, dims = method_.is_value_expanded ? stride : call_.value_dim;
    float* to = outputs_ + r * stride;
    const float* weights = scratch_.scores;
#if defined(TURNKV_DOT)
    if (method_.value_way == Way::pairs) return pair_outputs<R>(tiles_, scratch_.weights, dims, dims, to, stride);
    if (method_.value_way == Way::int8) return int8_outputs<R>(tiles_, weights, scratch_.codes, dims, dims, to, stride);
    if (method_.value_way == Way::int4) return int4_outputs<R>(tiles_, weights, scratch_.codes, dims, dims, to, stride);
#endif
    if (method_.is_value_expanded) return float_outputs<Codes::ready, R>(tiles_, weights, dims, 0, dims, to, stride);
    with_codes(method_.value_codes, [&]<Codes kCodes>() {
      if constexpr (!is_scaled(kCodes)) {
        float_outputs<kCodes, R>(tiles_, weights, dims, 0, dims, to, stride);
      } else {
        const int step = kCodes == Codes::int8 ? dims : kBlock;
        for (int e = 0, group = 0; e < dims; e += step, ++group) {
          scale_weights<R>(tiles_, weights, group, scratch_.scaled);
          float_outputs<kCodes, R>(tiles_, scratch_.scaled, dims, e, std::min(e + step, dims), to, stride);
        }
      }
    });
  }

  void attend_matrices(const Seen& seen, int after) {
#if defined(TURNKV_AMX)
    if (tiles_.count % 2) {  // matrices take two tiles: the last one comes again, with no weight
      tiles_.keys[tiles_.count] = tiles_.keys[tiles_.count - 1];
    }
    const int count = tiles_.count;
    const int blocks = rounded(rows_, kMatrixRows) / kMatrixRows, stop = std::min(seen.count, after + kManyTiles);
    for (int b = 0; b < blocks; ++b) {
      const int r = b * kMatrixRows;
      for (int at = after + (stop - after) * b / blocks; at < after + (stop - after) * (b + 1) / blocks; ++at)
        for (std::size_t line = 0; line < seen.layouts[at]->end; line += 64) ask_for(seen.blocks[at] + line);
      tiles_.count = rounded(count, 2);
      matrix_scores(tiles_, scratch_.pairs + r * pair_stride(), pair_stride(), scratch_.scores);
      tiles_.count = count;
      for (int i = 0; i < std::min(kMatrixRows, rows_ - r); ++i)
        weigh<true, true>(r + i, scratch_.scores + i * kMaxKeys, scratch_.weights + i * (kMaxKeys / 2));
      matrix_outputs(scratch_.values, count, scratch_.weights, outputs_ + r * job_.value_stride, job_.value_stride);
    }
#else
    static_cast<void>(seen), static_cast<void>(after);
#endif
  }

  // -- softmax ----------------------------------------------------------------------------------------------------

  Floats capped(Floats score) const {
    const Floats x = score * splat(cap_factor_);
    const Floats size = x < Floats{} ? -x : x;
    const Floats z = power_of_two<false>(size * splat(-2.0F * kLog2e));
    const Floats value = splat(call_.softcap) * (splat(1.0F) - z) / (splat(1.0F) + z);
    return x < Floats{} ? -value : value;
  }

  Floats masked(Floats score, int t, int v, int at) const {
    Ints lanes;
    for (int i = 0; i < kWidth; ++i) lanes[i] = 1 << (v * kWidth + i);
    const Ints positions = load<Ints>(positions_[t] + v * kWidth);
    Ints is_seen = (lanes & static_cast<std::int32_t>(tiles_.masks[t])) != 0;
    is_seen = is_seen & (positions <= at);
    if (call_.window) is_seen = is_seen & (positions > at - call_.window);
    return is_seen ? score : splat(kNone);
  }

  // Scores of row r to weights: cap, mask, running maximum and sum. Weights take the scores' place, or lie in `pairs`.
  template <bool kIsRough, bool kIsPaired>
  void weigh(int r, float* scores, std::uint32_t* pairs) {
    const int count = tiles_.count, at = first_position_ + r / job_.group_heads;
    Floats best = splat(kNone);
    if (is_all_whole_ && !(call_.softcap > 0)) {
      for (int i = 0; i < count * kVectors; ++i) best = maximum(best, load<Floats>(scores + i * kWidth));
    } else {
      for (int t = 0; t < count; ++t)
        for (int v = 0; v < kVectors; ++v) {
          float* to = scores + t * kTile + v * kWidth;
          Floats score = load<Floats>(to);
          if (call_.softcap > 0) score = capped(score);
          if (!is_whole_[t]) score = masked(score, t, v, at);
          store(to, score);
          best = maximum(best, score);
        }
    }
    float most = scratch_.highest[r];
    if (any_above(best * splat(factor_), most)) {
      const float now = highest_of(best) * factor_;
      if (most != kNone) rescale(r, std::exp2(most - now));
      scratch_.highest[r] = most = now;
    }
    if (most == kNone) {
      std::memset(scores, 0, static_cast<std::size_t>(count) * kTile * 4);
      if (kIsPaired) std::memset(pairs, 0, static_cast<std::size_t>(rounded(count, 2)) * kTile * 2);
      return;
    }
    const Floats factor = splat(factor_), shift = splat(-most);
    Floats sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = load<Floats>(scratch_.sums + r * kTile + v * kWidth);
    if constexpr (kIsPaired) {
#if defined(TURNKV_DOT)
      for (int t = 0; t < count; t += 2) {
        const Floats first = power_of_two<kIsRough>(load<Floats>(scores + t * kTile) * factor + shift);
        Floats second{};
        if (t + 1 < count) second = power_of_two<kIsRough>(load<Floats>(scores + (t + 1) * kTile) * factor + shift);
        sums[0] += first + second;
        _mm512_store_si512(pairs + t * 8, as<__m512i>(_mm512_cvtne2ps_pbh(as<__m512>(second), as<__m512>(first))));
      }
#endif
    } else {
      for (int t = 0; t < count; ++t)
        for (int v = 0; v < kVectors; ++v) {
          float* to = scores + t * kTile + v * kWidth;
          const Floats weight = power_of_two<kIsRough>(load<Floats>(to) * factor + shift);
          sums[v] += weight;
          store(to, weight);
        }
    }
    for (int v = 0; v < kVectors; ++v) store(scratch_.sums + r * kTile + v * kWidth, sums[v]);
  }

  void rescale(int r, float by) const {
    for (int v = 0; v < kVectors; ++v) {
      float* sums = scratch_.sums + r * kTile + v * kWidth;
      store(sums, load<Floats>(sums) * by);
    }
    for (int basis = 0; basis < 2; ++basis) {
      if (!is_used_[basis]) continue;
      float* row = scratch_.outputs[basis] + r * job_.value_stride;
      for (int e = 0; e < job_.value_stride; e += kWidth) store(row + e, load<Floats>(row + e) * by);
    }
  }

  void finish(float* partials) const {
    const int dims = call_.value_dim;
    for (int r = 0; r < rows_; ++r) {
      float* to = partials + static_cast<std::size_t>(r) * static_cast<std::size_t>(job_.partial_stride);
      float width[kTile];
      std::memcpy(width, scratch_.sums + r * kTile, sizeof width);
      for (int half = kTile / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) width[i] += width[i + half];
      to[0] = scratch_.highest[r];
      to[1] = width[0];
      const float* plain = scratch_.outputs[0] + r * job_.value_stride;
      float* turned = scratch_.outputs[1] + r * job_.value_stride;
      if (is_used_[1]) turn(turned, dims);
      for (int e = 0; e < dims; ++e) to[2 + e] = (is_used_[0] ? plain[e] : 0.0F) + (is_used_[1] ? turned[e] : 0.0F);
    }
  }

  const Job& job_;
  const Attend& call_;
  const Item& item_;
  const Scratch& scratch_;
  const Sequence& sequence_;
  const int rows_;
  const bool is_many_;
  const int first_position_, last_position_;
  float factor_, cap_factor_;  // a score times the factor is an exponent of 2
  Method method_{};
  Tiles tiles_{};
  After after_{};
  int groups_[kManySplit];
  const Reach* reach_ = nullptr;  // of the group's tiles
  const std::int32_t* positions_[kManyTiles];
  bool is_whole_[kManyTiles];
  bool is_all_whole_ = false;
  float* outputs_ = nullptr;
  bool is_used_[2] = {false, false};
  bool is_prepared_ = false, is_prepared_turned_ = false;
  int prepared_offset_ = 0;
  Way prepared_way_ = Way::floats;
};

void compute(const Job& job, const Item& item, const Item* next, const Scratch& scratch, float* partials) {
  Body(job, item, scratch).run(next, partials);
}

}  // namespace

void attend(const Attend& call) { turnkv::run(call, compute); }

}  // namespace turnkv::TURNKV_ISA
