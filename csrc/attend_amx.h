// Scores and outputs of 32 rows by matrix tiles (AMX). Keys [D / 2][16] and values of two tiles [16][E] are what a
// matrix product takes as its second operand. Included by attend_body.cpp where there is AMX.

constexpr int kMatrixRows = 32;

void configure_matrices() {
  struct {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  _tile_loadconfig(&shape);
}

// scores[32][tile][16] of queries [32][lines], pairs; an even number of tiles, lines a multiple of 16.
void matrix_scores(const Tiles& tiles, const std::uint32_t* query, int lines, float* scores) {
  const std::size_t row = static_cast<std::size_t>(lines) * 4;
  for (int t = 0; t < tiles.count; t += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < lines; i += 16) {
      _tile_loadd(4, query + i, row);
      _tile_loadd(5, query + 16 * lines + i, row);
      _tile_loadd(6, tiles.keys[t] + i * 64, 64);
      _tile_loadd(7, tiles.keys[t + 1] + i * 64, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* to = scores + t * kTile;
    _tile_stored(0, to, kMaxKeys * 4);
    _tile_stored(1, to + kTile, kMaxKeys * 4);
    _tile_stored(2, to + 16 * kMaxKeys, kMaxKeys * 4);
    _tile_stored(3, to + 16 * kMaxKeys + kTile, kMaxKeys * 4);
  }
}

// Adds weights [32][tile][8], pairs, times values [tile][8][stride], pairs, two tiles one behind the other in memory.
void matrix_outputs(const std::uint8_t* values, int count, const std::uint32_t* weights, float* outputs, int stride) {
  const auto row = static_cast<std::size_t>(stride) * 4;
  constexpr std::size_t kWeightRow = kMaxKeys * 2;
  for (int e = 0; e < stride; e += 32) {
    float* to = outputs + e;
    const bool is_pair = e + 32 <= stride;
    _tile_loadd(0, to, row);
    _tile_loadd(2, to + 16 * stride, row);
    if (is_pair) {
      _tile_loadd(1, to + 16, row);
      _tile_loadd(3, to + 16 * stride + 16, row);
    }
    for (int t = 0; t < count; t += 2) {
      const std::uint8_t* from = values + static_cast<std::size_t>(t * 8 * stride + e) * 4;
      _tile_loadd(4, weights + t * 8, kWeightRow);
      _tile_loadd(5, weights + 16 * (kMaxKeys / 2) + t * 8, kWeightRow);
      _tile_loadd(6, from, row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if (is_pair) {
        _tile_loadd(7, from + 64, row);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to, row);
    _tile_stored(2, to + 16 * stride, row);
    if (is_pair) {
      _tile_stored(1, to + 16, row);
      _tile_stored(3, to + 16 * stride + 16, row);
    }
  }
}
