// Scores and outputs with fused multiply-adds in float32, from codes of any format. Included by attend_body.cpp.

// Tiles that are read together: where their keys and values lie, and what lies a chunk further on.
struct Tiles {
  int count;
  const std::uint8_t* keys[kManyTiles];
  const std::uint8_t* key_scales[kManyTiles];
  const std::uint8_t* values[kManyTiles];
  const std::uint8_t* value_scales[kManyTiles];
  const std::uint8_t* ahead_keys[kManyTiles];
  const std::uint8_t* ahead_values[kManyTiles];
  std::uint16_t masks[kManyTiles];
};

// scores[r][tile][16] of R queries [R][dims] over T tiles from `first` on.
template <Codes kCodes, int R, int T>
void float_scores(const Tiles& tiles, int first, const float* query, int dims, float* scores) {
  constexpr int kCount = codes_a_lane(kCodes);
  Floats sums[R][T][kVectors] = {};
  const int lines = dims / kCount;
  const auto dot_line = [&](int i, Floats(&to)[R][T][kVectors]) __attribute__((always_inline)) {
    for (int t = 0; t < T; ++t) {
      const std::uint8_t* line = tiles.keys[first + t] + i * 64;
      if constexpr (kCodes != Codes::ready) ask_for(tiles.ahead_keys[first + t] + i * 64);
      for (int v = 0; v < kVectors; ++v) {
        const Words lane = load<Words>(line + v * kWidth * 4);
        for (int k = 0; k < kCount; ++k) {
          const Floats key = code_of<kCodes>(lane, k);
          for (int r = 0; r < R; ++r) to[r][t][v] += key * query[r * dims + i * kCount + k];
        }
      }
    }
  };
  if constexpr (kCodes == Codes::int4) {
    for (int i = 0, group = 0; i < lines; ++group) {
      const int stop = i + block_size(i * 8, dims) / 8;
      Floats part[R][T][kVectors] = {};
      for (; i < stop; ++i) dot_line(i, part);
      for (int t = 0; t < T; ++t)
        for (int v = 0; v < kVectors; ++v) {
          const Floats scale = scales_of(tiles.key_scales[first + t] + group * 32, v);
          for (int r = 0; r < R; ++r) sums[r][t][v] += part[r][t][v] * scale;
        }
    }
  } else {
    for (int i = 0; i < lines; ++i) dot_line(i, sums);
  }
  for (int t = 0; t < T; ++t)
    for (int v = 0; v < kVectors; ++v) {
      const Floats scale = kCodes == Codes::int8 ? scales_of(tiles.key_scales[first + t], v) : splat(1.0F);
      for (int r = 0; r < R; ++r)
        store(scores + r * kMaxKeys + (first + t) * kTile + v * kWidth, sums[r][t][v] * scale);
    }
}

template <Codes kCodes, int R>
void float_scores(const Tiles& tiles, const float* query, int dims, float* scores) {
  constexpr int kTogether = kWidth < 16 ? 1 : R <= 2 || kCodes == Codes::ready ? 4 : 2;
  int first = 0;
  for (; first + kTogether <= tiles.count; first += kTogether)
    float_scores<kCodes, R, kTogether>(tiles, first, query, dims, scores);
  for (; first < tiles.count; ++first) float_scores<kCodes, R, 1>(tiles, first, query, dims, scores);
}

// Adds weights [R][tile][16] times the values' dims [e, e + V * kWidth) to outputs [R][stride]. `row` is the distance of
// lanes (j, e) and (j + 1, e). Without a scale: where the values have one, it is in the weights.
template <Codes kCodes, int R, int V>
void float_outputs(const Tiles& tiles, const float* weights, int row, int e, float* outputs, int stride) {
  constexpr int kCount = codes_a_lane(kCodes);
  Floats sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = load<Floats>(outputs + r * stride + e + v * kWidth);
  for (int t = 0; t < tiles.count; ++t) {
    const std::uint16_t mask = tiles.masks[t];
    for (int j = 0; j < kTile / kCount; ++j) {
      const std::size_t at = static_cast<std::size_t>(j * row + e) * 4;
      Words lanes[V];
      for (int v = 0; v < V; ++v) {
        lanes[v] = load<Words>(tiles.values[t] + at + v * kWidth * 4);
        if (kCodes != Codes::ready && v * kWidth % 16 == 0) ask_for(tiles.ahead_values[t] + at + v * kWidth * 4);
      }
      for (int k = 0; k < kCount; ++k) {
        const int slot = j * kCount + k;
        // What lies in a slot without a key may be anything, and 0 times that is not always 0.
        if (!is_scaled(kCodes) && kCodes != Codes::ready && !(mask >> slot & 1)) continue;
        for (int v = 0; v < V; ++v) {
          const Floats value = code_of<kCodes>(lanes[v], k);
          for (int r = 0; r < R; ++r) sums[r][v] += value * weights[r * kMaxKeys + t * kTile + slot];
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(outputs + r * stride + e + v * kWidth, sums[r][v]);
}

template <Codes kCodes, int R>
void float_outputs(const Tiles& tiles, const float* weights, int row, int e, int stop, float* outputs, int stride) {
  constexpr int kMost = kWidth == 16 ? 4 : 2;  // few enough for the registers; wide enough to read memory in order
  for (; e + kMost * kWidth <= stop; e += kMost * kWidth)
    float_outputs<kCodes, R, kMost>(tiles, weights, row, e, outputs, stride);
  for (; e + 16 <= stop; e += 16) float_outputs<kCodes, R, kVectors>(tiles, weights, row, e, outputs, stride);
}

// Weights times the scales of the values' group, 0 where a slot holds no key.
template <int R>
void scale_weights(const Tiles& tiles, const float* weights, int group, float* to) {
  for (int t = 0; t < tiles.count; ++t)
    for (int v = 0; v < kVectors; ++v) {
      Words held{};
      for (int i = 0; i < kWidth; ++i) held[i] = tiles.masks[t] >> (v * kWidth + i) & 1 ? ~0U : 0U;
      const Floats scale = as<Floats>(as<Words>(scales_of(tiles.value_scales[t] + group * 32, v)) & held);
      for (int r = 0; r < R; ++r) {
        const int at = r * kMaxKeys + t * kTile + v * kWidth;
        store(to + at, load<Floats>(weights + at) * scale);
      }
    }
}
