// Scores and outputs with dot-product instructions: bf16 pairs (vdpbf16ps), for many rows of queries, and 8-bit codes
// (vpdpbusd) as they lie in memory, for few.
// Included by attend_body.cpp where there are such instructions.

TURNKV_INLINE __m512i line_at(const std::uint8_t* from) { return _mm512_loadu_si512(from); }
TURNKV_INLINE __m512i spread(std::uint32_t lane) { return _mm512_set1_epi32(static_cast<int>(lane)); }

// Calls f with constants (T, first tile) until `count` tiles are done, kMost of them at a time.
template <int kMost, class F>
TURNKV_INLINE void in_bunches(int count, F&& f) {
  int first = 0;
  for (; first + kMost <= count; first += kMost) f.template operator()<kMost>(first);
  if constexpr (kMost > 4)
    if (first + 4 <= count) f.template operator()<4>(first), first += 4;
  if constexpr (kMost > 2)
    if (first + 2 <= count) f.template operator()<2>(first), first += 2;
  if (first < count) f.template operator()<1>(first);
}

// scores[r][tile][16] of R queries [R][lines] of pairs, over keys that are pairs.
template <int R>
void pair_scores(const Tiles& tiles, const std::uint32_t* query, int stride, int lines, float* scores) {
  in_bunches<(R <= 2 ? 8 : 4)>(tiles.count, [&]<int T>(int first) __attribute__((always_inline)) {
    __m512 sums[R][T];
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) sums[r][t] = _mm512_setzero_ps();
    for (int i = 0; i < lines; ++i) {
      __m512bh rows[R];
      for (int r = 0; r < R; ++r) rows[r] = as<__m512bh>(spread(query[r * stride + i]));
      for (int t = 0; t < T; ++t) {
        const auto key = as<__m512bh>(line_at(tiles.keys[first + t] + i * 64));
        for (int r = 0; r < R; ++r) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], key, rows[r]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) _mm512_storeu_ps(scores + r * kMaxKeys + (first + t) * kTile, sums[r][t]);
  });
}

// Adds weights, pairs [R][tile][8], times values that are pairs [8][row].
template <int R, int V>
TURNKV_INLINE void pair_outputs(const Tiles& tiles, const std::uint32_t* weights, int row, int e, float* outputs,
                                int stride) {
  __m512 sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = _mm512_loadu_ps(outputs + r * stride + e + v * 16);
  for (int t = 0; t < tiles.count; ++t)
    for (int j = 0; j < kTile / 2; ++j) {
      const std::size_t at = static_cast<std::size_t>(j * row + e) * 4;
      __m512bh values[V];
      for (int v = 0; v < V; ++v) values[v] = as<__m512bh>(line_at(tiles.values[t] + at + v * 64));
      for (int r = 0; r < R; ++r) {
        const auto weight = as<__m512bh>(spread(weights[r * (kMaxKeys / 2) + t * 8 + j]));
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], values[v], weight);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(outputs + r * stride + e + v * 16, sums[r][v]);
}

template <int R>
void pair_outputs(const Tiles& tiles, const std::uint32_t* weights, int row, int dims, float* outputs, int stride) {
  int e = 0;
  for (; e + 64 <= dims; e += 64) pair_outputs<R, 4>(tiles, weights, row, e, outputs, stride);
  for (; e + 32 <= dims; e += 32) pair_outputs<R, 2>(tiles, weights, row, e, outputs, stride);
  for (; e < dims; e += 16) pair_outputs<R, 1>(tiles, weights, row, e, outputs, stride);
}

// A query in 15 bits: (128 * high + low) * step. Codes are unsigned to vpdpbusd, off by a bias that `bias` takes back.
struct Query15 {
  const std::uint32_t* high;  // [R][stride] lanes of 4 dims
  const std::uint32_t* low;
  int stride;
  const float* step;          // [R]
  const std::int32_t* bias;   // [R][bias_stride]: sums of the query's codes, group by group of the keys
  int bias_stride;
};

TURNKV_INLINE __m512 joined(__m512i high, __m512i low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low));
}

template <int R>
void int8_scores(const Tiles& tiles, const Query15& query, int lines, float* scores) {
  in_bunches<(R == 1 ? 4 : 2)>(tiles.count, [&]<int T>(int first) __attribute__((always_inline)) {
    __m512i high[R][T], low[R][T];
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) {
        high[r][t] = _mm512_setzero_si512();
        low[r][t] = _mm512_set1_epi32(-128 * query.bias[r * query.bias_stride]);
      }
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
    for (int i = 0; i < lines; ++i)
      for (int t = 0; t < T; ++t) {
        const __m512i key = _mm512_xor_si512(flip, line_at(tiles.keys[first + t] + i * 64));
        ask_for(tiles.ahead_keys[first + t] + i * 64);
        for (int r = 0; r < R; ++r) {
          high[r][t] = _mm512_dpbusd_epi32(high[r][t], key, spread(query.high[r * query.stride + i]));
          low[r][t] = _mm512_dpbusd_epi32(low[r][t], key, spread(query.low[r * query.stride + i]));
        }
      }
    for (int t = 0; t < T; ++t) {
      const auto scale = as<__m512>(scales_of(tiles.key_scales[first + t], 0));
      for (int r = 0; r < R; ++r)
        _mm512_storeu_ps(scores + r * kMaxKeys + (first + t) * kTile,
                         _mm512_mul_ps(joined(high[r][t], low[r][t]), _mm512_mul_ps(scale, _mm512_set1_ps(query.step[r]))));
    }
  });
}

// In a lane of int4 keys the even dims lie in the low nibbles, the odd ones in the high; the query is arranged to match.
template <int R>
void int4_scores(const Tiles& tiles, const Query15& query, int dims, float* scores) {
  in_bunches<(R <= 2 ? 4 : 2)>(tiles.count, [&]<int T>(int first) __attribute__((always_inline)) {
    __m512 sums[R][T];
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) sums[r][t] = _mm512_setzero_ps();
    const __m512i nibbles = _mm512_set1_epi8(15);
    for (int i = 0, group = 0; i < dims / 8; ++group) {
      const int stop = i + block_size(i * 8, dims) / 8;
      __m512i high[R][T], low[R][T];
      for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
          high[r][t] = _mm512_setzero_si512();
          low[r][t] = _mm512_set1_epi32(-8 * query.bias[r * query.bias_stride + group]);
        }
      for (; i < stop; ++i)
        for (int t = 0; t < T; ++t) {
          const __m512i both = line_at(tiles.keys[first + t] + i * 64);
          ask_for(tiles.ahead_keys[first + t] + i * 64);
          const __m512i even = _mm512_and_si512(nibbles, both);
          const __m512i odd = _mm512_and_si512(nibbles, _mm512_srli_epi32(both, 4));
          for (int r = 0; r < R; ++r) {
            const int at = r * query.stride + 2 * i;
            high[r][t] = _mm512_dpbusd_epi32(high[r][t], even, spread(query.high[at]));
            low[r][t] = _mm512_dpbusd_epi32(low[r][t], even, spread(query.low[at]));
            high[r][t] = _mm512_dpbusd_epi32(high[r][t], odd, spread(query.high[at + 1]));
            low[r][t] = _mm512_dpbusd_epi32(low[r][t], odd, spread(query.low[at + 1]));
          }
        }
      for (int t = 0; t < T; ++t) {
        const auto scale = as<__m512>(scales_of(tiles.key_scales[first + t] + group * 32, 0));
        for (int r = 0; r < R; ++r) sums[r][t] = _mm512_fmadd_ps(joined(high[r][t], low[r][t]), scale, sums[r][t]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t)
        _mm512_storeu_ps(scores + r * kMaxKeys + (first + t) * kTile,
                         _mm512_mul_ps(sums[r][t], _mm512_set1_ps(query.step[r])));
  });
}

// Weights times scales in 8 + 8 bits: [2][R][kMaxKeys / 4] lanes of 4 slots.
struct Weights16 {
  std::uint32_t* codes;
  float step[4];
  std::int32_t bias[4];  // sums of the codes

  std::uint32_t* high(int r) const { return codes + r * (kMaxKeys / 4); }
  std::uint32_t* low(int r) const { return codes + (4 + r) * (kMaxKeys / 4); }
};

// The scaled weights of R rows, zero behind the last tile up to a multiple of 4, and the largest of each row by size.
template <int R>
TURNKV_INLINE void scaled_weights(const Tiles& tiles, const float* weights, int group, __m512 (*to)[kFewTiles],
                                  float* most) {
  __m512 sizes[R];
  for (int r = 0; r < R; ++r) sizes[r] = _mm512_setzero_ps();
  for (int t = 0; t < tiles.count; ++t) {
    const auto scale = as<__m512>(scales_of(tiles.value_scales[t] + group * 32, 0));
    for (int r = 0; r < R; ++r) {
      to[r][t] = _mm512_maskz_mul_ps(tiles.masks[t], _mm512_loadu_ps(weights + r * kMaxKeys + t * kTile), scale);
      constexpr int kLargestSize = 0x0b;
      sizes[r] = _mm512_range_ps(sizes[r], to[r][t], kLargestSize);
    }
  }
  for (int t = tiles.count; t % 4; ++t)
    for (int r = 0; r < R; ++r) to[r][t] = _mm512_setzero_ps();
  for (int r = 0; r < R; ++r) most[r] = _mm512_reduce_max_ps(sizes[r]);
}

// What packing leaves as [4 slots][tile][slot] becomes [tile][4 slots][slot].
TURNKV_INLINE __m512i by_tile(__m512i packed) {
  return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), packed);
}

// Unsigned, 16 bits: int8 scales are never negative.
template <int R>
TURNKV_INLINE void to_unsigned(const Tiles& tiles, const float* weights, Weights16& to) {
  __m512 scaled[R][kFewTiles];
  float most[R];
  scaled_weights<R>(tiles, weights, 0, scaled, most);
  const __m512i bytes = _mm512_set1_epi16(255);
  for (int r = 0; r < R; ++r) {
    const __m512 factor = _mm512_set1_ps(most[r] > 1e-30F ? 65535.0F / most[r] : 0.0F);
    to.step[r] = most[r] * (1.0F / 65535.0F);
    for (int t = 0; t < tiles.count; t += 4) {
      __m512i codes[4];
      for (int i = 0; i < 4; ++i) codes[i] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[r][t + i], factor));
      const __m512i first = _mm512_packus_epi32(codes[0], codes[1]), second = _mm512_packus_epi32(codes[2], codes[3]);
      const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
      const __m512i low = _mm512_packus_epi16(_mm512_and_si512(first, bytes), _mm512_and_si512(second, bytes));
      _mm512_store_si512(to.high(r) + t * 4, by_tile(high));
      _mm512_store_si512(to.low(r) + t * 4, by_tile(low));
    }
  }
}

// Signed, 15 bits; the slots of each 8 in the order in which nibbles hold them: 0 2 4 6, 1 3 5 7.
template <int R>
TURNKV_INLINE void to_signed(const Tiles& tiles, const float* weights, int group, Weights16& to) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0));
  const __m512i half = _mm512_set1_epi16(64), one = _mm512_set1_epi16(1);
  __m512 scaled[R][kFewTiles];
  float most[R];
  scaled_weights<R>(tiles, weights, group, scaled, most);
  for (int r = 0; r < R; ++r) {
    const __m512 factor = _mm512_set1_ps(most[r] > 1e-30F ? 16256.0F / most[r] : 0.0F);
    to.step[r] = most[r] * (1.0F / 16256.0F);
    __m512i sum = _mm512_setzero_si512();
    for (int t = 0; t < tiles.count; t += 4) {
      __m512i codes[4];
      for (int i = 0; i < 4; ++i) codes[i] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled[r][t + i], factor));
      __m512i parts[2] = {_mm512_packs_epi32(codes[0], codes[1]), _mm512_packs_epi32(codes[2], codes[3])}, tops[2];
      for (int i = 0; i < 2; ++i) {
        sum = _mm512_dpwssd_epi32(sum, parts[i], one);
        tops[i] = _mm512_srai_epi16(_mm512_add_epi16(parts[i], half), 7);
        parts[i] = _mm512_sub_epi16(parts[i], _mm512_slli_epi16(tops[i], 7));
      }
      const __m512i high = by_tile(_mm512_packs_epi16(tops[0], tops[1]));
      const __m512i low = by_tile(_mm512_packs_epi16(parts[0], parts[1]));
      _mm512_store_si512(to.high(r) + t * 4, _mm512_shuffle_epi8(high, order));
      _mm512_store_si512(to.low(r) + t * 4, _mm512_shuffle_epi8(low, order));
    }
    to.bias[r] = _mm512_reduce_add_epi32(sum);
  }
}

template <int R, int V>
TURNKV_INLINE void int8_outputs(const Tiles& tiles, const Weights16& weights, int row, int e, float* outputs,
                                int stride) {
  __m512i high[R][V], low[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
  for (int t = 0; t < tiles.count; ++t)
    for (int j = 0; j < 4; ++j) {
      const std::size_t at = static_cast<std::size_t>(j * row + e) * 4;
      __m512i values[V];
      for (int v = 0; v < V; ++v) {
        values[v] = line_at(tiles.values[t] + at + v * 64);
        ask_for(tiles.ahead_values[t] + at + v * 64);
      }
      for (int r = 0; r < R; ++r) {
        const __m512i tops = spread(weights.high(r)[t * 4 + j]), lows = spread(weights.low(r)[t * 4 + j]);
        for (int v = 0; v < V; ++v) {
          high[r][v] = _mm512_dpbusd_epi32(high[r][v], tops, values[v]);
          low[r][v] = _mm512_dpbusd_epi32(low[r][v], lows, values[v]);
        }
      }
    }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* to = outputs + r * stride + e + v * 16;
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][v], 8), low[r][v]));
      _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, _mm512_set1_ps(weights.step[r]), _mm512_loadu_ps(to)));
    }
}

template <int R>
void int8_outputs(const Tiles& tiles, const float* weights, std::uint32_t* codes, int row, int dims, float* outputs,
                  int stride) {
  Weights16 quantised{codes, {}, {}};
  to_unsigned<R>(tiles, weights, quantised);
  constexpr int kTogether = R <= 3 ? 4 : 2;
  int e = 0;
  for (; e + kTogether * 16 <= dims; e += kTogether * 16)
    int8_outputs<R, kTogether>(tiles, quantised, row, e, outputs, stride);
  for (; e < dims; e += 16) int8_outputs<R, 1>(tiles, quantised, row, e, outputs, stride);
}

template <int R, int V>
TURNKV_INLINE void int4_outputs(const Tiles& tiles, const Weights16& weights, int row, int e, float* outputs,
                                int stride) {
  const __m512i nibbles = _mm512_set1_epi8(15);
  __m512i high[R][V], low[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      high[r][v] = _mm512_setzero_si512();
      low[r][v] = _mm512_set1_epi32(-8 * weights.bias[r]);
    }
  for (int t = 0; t < tiles.count; ++t)
    for (int j = 0; j < 2; ++j)
      for (int v = 0; v < V; ++v) {
        const std::size_t at = static_cast<std::size_t>(j * row + e + v * 16) * 4;
        const __m512i both = line_at(tiles.values[t] + at);
        ask_for(tiles.ahead_values[t] + at);
        const __m512i even = _mm512_and_si512(nibbles, both);
        const __m512i odd = _mm512_and_si512(nibbles, _mm512_srli_epi32(both, 4));
        for (int r = 0; r < R; ++r) {
          const int from = t * 4 + j * 2;
          high[r][v] = _mm512_dpbusd_epi32(high[r][v], even, spread(weights.high(r)[from]));
          low[r][v] = _mm512_dpbusd_epi32(low[r][v], even, spread(weights.low(r)[from]));
          high[r][v] = _mm512_dpbusd_epi32(high[r][v], odd, spread(weights.high(r)[from + 1]));
          low[r][v] = _mm512_dpbusd_epi32(low[r][v], odd, spread(weights.low(r)[from + 1]));
        }
      }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* to = outputs + r * stride + e + v * 16;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(joined(high[r][v], low[r][v]), _mm512_set1_ps(weights.step[r]),
                                           _mm512_loadu_ps(to)));
    }
}

template <int R>
void int4_outputs(const Tiles& tiles, const float* weights, std::uint32_t* codes, int row, int dims, float* outputs,
                  int stride) {
  for (int e = 0, group = 0; e < dims; e += kBlock, ++group) {
    Weights16 quantised{codes, {}, {}};
    to_signed<R>(tiles, weights, group, quantised);
    if (e + kBlock <= dims) int4_outputs<R, 2>(tiles, quantised, row, e, outputs, stride);
    else int4_outputs<R, 1>(tiles, quantised, row, e, outputs, stride);
  }
}
