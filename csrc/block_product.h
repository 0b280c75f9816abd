// Rows times a matrix of panels. Included by block_body.cpp, inside its namespace.

#if defined(TURNKV_DOT)
constexpr bool kHasPairs = true;  // products of bf16 pairs
#else
constexpr bool kHasPairs = false;
#endif

#if defined(TURNKV_AMX)
constexpr int kTiledRows = 16;  // whose pairs lie together, as matrix tiles take them: [K / 32][16 rows][32]
#else
constexpr int kTiledRows = 1;
#endif

constexpr int kBlockRows = 128;  // of a unit of work
constexpr int kPartInputs = 288;  // of two panels: as much as stays in the first-level cache beside 32 rows' inputs
constexpr int kManyBlocks = 4;   // whose inputs stay in the second-level cache while panels go by
constexpr int kAhead = 16384;    // bytes that are asked for in advance: the hardware alone asks for too little

int rounded(int count, int to) { return (count + to - 1) / to * to; }

// To bf16, to nearest even. NaN stays NaN.
void to_pairs(const float* from, int count, std::uint16_t* to) {
  int i = 0;
#if defined(TURNKV_DOT)
  for (; i + 16 <= count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), as<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i))));
#endif
  for (; i < count; ++i) to[i] = to_bf16(from[i]);
}

// Rows as products take them: bf16, or float32 where there are no products of bf16. Zero behind their end.
class Inputs {
 public:
  template <class Parts>
  void lay_out(Parts& parts, std::size_t rows, int dims, bool has_pairs) {
    has_pairs_ = has_pairs;
    parts.take(memory_, rows * static_cast<std::size_t>(dims) * (has_pairs ? 2 : 4));
  }

  bool has_pairs() const { return has_pairs_; }

  // A whole row of `dims` values, of which `stride` are kept.
  void put(int row, const float* from, int dims, int stride) const {
    if (has_pairs_) {
      for (int first = 0; first < stride; first += kDepth) {
        const int count = std::clamp(dims - first, 0, kDepth);
        std::uint16_t* to = pairs(row, first, stride);
        to_pairs(from + first, count, to);
        std::fill(to + count, to + kDepth, std::uint16_t{0});
      }
    } else {
      float* to = floats(row, stride);
      std::copy(from, from + dims, to);
      std::fill(to + dims, to + stride, 0.0F);
    }
  }

  // A whole row that has the dtype of pairs already.
  void put(int row, const std::uint16_t* from, int dims, int stride) const {
    for (int first = 0; first < stride; first += kDepth) {
      const int count = std::clamp(dims - first, 0, kDepth);
      std::uint16_t* to = pairs(row, first, stride);
      std::copy(from + first, from + first + count, to);
      std::fill(to + count, to + kDepth, std::uint16_t{0});
    }
  }

  // 16 values of a row, from `first` on; behind the last panel the row is filled up.
  void put_part(int row, int first, const float* from, int stride) const {
    const bool is_last = first + 2 * kPanel == stride && first % kDepth == 0 && is_odd_;
    if (has_pairs_) {
      std::uint16_t* to = pairs(row, first, stride);
      to_pairs(from, kPanel, to);
      if (is_last) std::fill(to + kPanel, to + 2 * kPanel, std::uint16_t{0});
    } else {
      float* to = floats(row, stride) + first;
      std::copy(from, from + kPanel, to);
      if (is_last) std::fill(to + kPanel, to + 2 * kPanel, 0.0F);
    }
  }

  // Whether parts fill only half of the last 32 values of a row.
  void set_odd(bool is_odd) { is_odd_ = is_odd; }

  float* floats(int row, int stride) const { return reinterpret_cast<float*>(memory_) + at(row, stride); }

  std::uint16_t* pairs(int row, int first, int stride) const {
    const int tiled = row / kTiledRows * kTiledRows;
    return reinterpret_cast<std::uint16_t*>(memory_) + at(tiled, stride) +
           at(first / kDepth * kTiledRows + row - tiled, kDepth) + first % kDepth;
  }

 private:
  static std::size_t at(int row, int stride) {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(stride);
  }

  std::uint8_t* memory_ = nullptr;
  bool has_pairs_ = false, is_odd_ = false;
};

std::size_t bytes_of(const Matrix& matrix) {  // of a panel
  const std::size_t size = matrix.format == Weights::f32 ? 4 : matrix.format == Weights::int8 ? 1 : 2;
  return static_cast<std::size_t>(matrix.inputs) * kPanel * size;
}

// Codes of 8 bits as the numbers that they are: bf16 pairs or, where there are none, float32.
void expand(const std::uint8_t* from, int inputs, bool has_pairs, std::uint8_t* to) {
  for (int k = 0; k < inputs; k += 2) {
    ask_for(from + kAhead);
#if defined(TURNKV_DOT)
    if (has_pairs) {
      const auto numbers = [&](int half) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + half)));
      };
      _mm512_storeu_si512(to, as<__m512i>(_mm512_cvtne2ps_pbh(numbers(1), numbers(0))));
      from += 2 * kPanel;
      to += 4 * kPanel;
      continue;
    }
#endif
    static_cast<void>(has_pairs);
    using Halves = std::uint16_t __attribute__((vector_size(kWidth * 2)));
    for (int v = 0; v < kVectors; ++v) {
      const Words pairs = __builtin_convertvector(load<Halves>(from + v * kWidth * 2), Words);
      store(to + v * kWidth * 4, __builtin_convertvector(as<Ints>(pairs << 24) >> 24, Floats));
      store(to + kPanel * 4 + v * kWidth * 4, __builtin_convertvector(as<Ints>(pairs << 16) >> 24, Floats));
    }
    from += 2 * kPanel;
    to += 8 * kPanel;
  }
}

// sums[p][R][16] of rows with P panels, in float32: kCodes are f32, bf16 or f16.
template <Codes kCodes, int R, int P>
void panel_floats(const std::uint8_t* panel, std::size_t panel_bytes, int inputs, const float* rows, std::size_t stride,
                  float* sums, std::size_t sums_panel) {
  constexpr int kEach = codes_a_lane(kCodes);
  Floats found[R][P][kVectors] = {};
  for (int k = 0; k < inputs; k += kEach) {
    Words lanes[P][kVectors];
    for (int p = 0; p < P; ++p) {
      const std::uint8_t* at = panel + static_cast<std::size_t>(p) * panel_bytes;
      ask_for(at + kAhead);
      for (int v = 0; v < kVectors; ++v) lanes[p][v] = load<Words>(at + v * kWidth * 4);
    }
    for (int each = 0; each < kEach; ++each) {
      Floats weights[P][kVectors];
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVectors; ++v) weights[p][v] = code_of<kCodes>(lanes[p][v], each);
      for (int r = 0; r < R; ++r) {
        const Floats value = splat(rows[static_cast<std::size_t>(r) * stride + static_cast<std::size_t>(k + each)]);
        for (int p = 0; p < P; ++p)
          for (int v = 0; v < kVectors; ++v) found[r][p][v] += weights[p][v] * value;
      }
    }
    panel += kPanel * 4;
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kVectors; ++v)
        store(sums + static_cast<std::size_t>(p) * sums_panel + r * kPanel + v * kWidth, found[r][p][v]);
}

#if defined(TURNKV_DOT) && !defined(TURNKV_AMX)
// sums[R][16] of rows with P panels that lie one behind the other, P * R * 16 sums, bf16 pairs.
template <int R, int P>
void panel_pairs(const std::uint8_t* panel, std::size_t panel_bytes, int inputs, const std::uint16_t* rows,
                 std::size_t stride, float* sums, std::size_t sums_panel) {
  __m512 found[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) found[r][p] = _mm512_setzero_ps();
  for (int k = 0; k < inputs; k += 2) {
    __m512bh pairs[R];
    for (int r = 0; r < R; ++r) {
      std::int32_t pair;
      std::memcpy(&pair, rows + static_cast<std::size_t>(r) * stride + k, sizeof pair);
      pairs[r] = as<__m512bh>(_mm512_set1_epi32(pair));
    }
    for (int p = 0; p < P; ++p) {
      const std::uint8_t* at = panel + static_cast<std::size_t>(p) * panel_bytes + k * kPanel * 2;
      ask_for(at + kAhead);
      const auto weights = as<__m512bh>(_mm512_loadu_si512(at));
      for (int r = 0; r < R; ++r) found[r][p] = _mm512_dpbf16_ps(found[r][p], weights, pairs[r]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      _mm512_storeu_ps(sums + static_cast<std::size_t>(p) * sums_panel + r * kPanel, found[r][p]);
}
#endif

#if defined(TURNKV_AMX)
void configure_products() {
  struct {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  _tile_loadconfig(&shape);
}

// 16 pairs of inputs, from codes of 8 bits if they are such; `room` holds a tile.
template <bool kIsInt8>
TURNKV_INLINE const std::uint8_t* weights_tile(const std::uint8_t* panel, int k, std::uint8_t* room) {
  if constexpr (!kIsInt8) return panel + k * kPanel * 2;
  expand(panel + k * kPanel, kDepth, true, room);
  return room;
}

// sums[2][32][16]: 32 rows with two panels, or with one, over inputs [from, to); added to what is there if from > 0.
template <bool kHasTwo, bool kHasMany, bool kIsInt8>
void panel_matrices(const std::uint8_t* panel, std::size_t panel_bytes, int inputs, int from, int to,
                    const std::uint16_t* rows, float* sums, std::size_t sums_panel) {
  const std::uint16_t* others = rows + static_cast<std::size_t>(inputs) * kTiledRows;
  alignas(64) std::uint8_t rooms[4][kIsInt8 ? 1024 : 1];  // two steps', so that none waits for the one before
  if (from) {
    _tile_loadd(0, sums, 64);
    if constexpr (kHasTwo) _tile_loadd(1, sums + sums_panel, 64);
    if constexpr (kHasMany) _tile_loadd(2, sums + 16 * kPanel, 64);
    if constexpr (kHasTwo && kHasMany) _tile_loadd(3, sums + sums_panel + 16 * kPanel, 64);
  } else {
    _tile_zero(0);
    if constexpr (kHasTwo) _tile_zero(1);
    if constexpr (kHasMany) _tile_zero(2);
    if constexpr (kHasTwo && kHasMany) _tile_zero(3);
  }
  for (int k = from; k < to; k += kDepth) {
    if constexpr (!kHasMany && !kIsInt8)
      for (int line = 0; line < 16; ++line) {
        const std::uint8_t* at = panel + k * kPanel * 2 + kAhead + line * 64;
        ask_for(at);
        if constexpr (kHasTwo) ask_for(at + panel_bytes);
      }
    const int turn = k / kDepth % 2;
    const std::uint8_t* first = weights_tile<kIsInt8>(panel, k, rooms[turn]);
    _tile_loadd(4, rows + k * kTiledRows, 64);
    _tile_loadd(6, first, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kHasTwo) {
      const std::uint8_t* second = weights_tile<kIsInt8>(panel + panel_bytes, k, rooms[2 + turn]);
      _tile_loadd(7, second, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kHasMany) {
      _tile_loadd(5, others + k * kTiledRows, 64);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kHasTwo) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (kHasTwo) _tile_stored(1, sums + sums_panel, 64);
  if constexpr (kHasMany) {
    _tile_stored(2, sums + 16 * kPanel, 64);
    if constexpr (kHasTwo) _tile_stored(3, sums + sums_panel + 16 * kPanel, 64);
  }
}
#endif

// sums[p][kBlockRows][16] of up to kBlockRows rows, with one panel or two that lie `panel_bytes` apart.
struct Unit {
  const std::uint8_t* panel;
  std::size_t panel_bytes;
  int panels, inputs;
  Codes codes;
  float* sums;
};

constexpr std::size_t kSumsPanel = std::size_t{kBlockRows} * kPanel;

// Calls some<R>(row) until all rows are done, kMost of them at a time.
template <int kMost, class Some>
TURNKV_INLINE void in_rows(int row, int count, Some&& some) {
  for (; count - row >= kMost; row += kMost) some.template operator()<kMost>(row);
  if constexpr (kMost > 4)
    if (count - row >= 4) some.template operator()<4>(row), row += 4;
  if constexpr (kMost > 2)
    if (count - row >= 2) some.template operator()<2>(row), row += 2;
  if (row < count) some.template operator()<1>(row);
}

#if defined(TURNKV_DOT)
template <int P>
void sum_pairs(const Unit& unit, const Inputs& inputs, int first, int count) {
#if defined(TURNKV_AMX)
  // Of many rows, each part of a pair of panels goes over all before the next does, and stays in the nearest cache.
  const int part = count > 32 ? kPartInputs : unit.inputs;
  for (int begin = 0; begin < unit.inputs; begin += part)
    for (int row = 0; row < count; row += 32) {
      const std::uint16_t* from = inputs.pairs(first + row, 0, unit.inputs);
      float* to = unit.sums + row * kPanel;
      const int end = std::min(begin + part, unit.inputs);
      const auto some = [&]<bool kIsInt8>() {
        const auto each = count - row > 16 ? panel_matrices<P == 2, true, kIsInt8> : panel_matrices<P == 2, false, kIsInt8>;
        each(unit.panel, unit.panel_bytes, unit.inputs, begin, end, from, to, kSumsPanel);
      };
      if (unit.codes == Codes::int8) some.template operator()<true>();
      else some.template operator()<false>();
    }
#else
  in_rows<8>(0, count, [&]<int R>(int row) {
    panel_pairs<R, P>(unit.panel, unit.panel_bytes, unit.inputs, inputs.pairs(first + row, 0, unit.inputs),
                      static_cast<std::size_t>(unit.inputs), unit.sums + row * kPanel, kSumsPanel);
  });
#endif
}
#endif

template <Codes kCodes, int P>
void sum_floats(const Unit& unit, const float* rows, int count) {
  const auto stride = static_cast<std::size_t>(unit.inputs);
  const auto some = [&]<int R>(int row) {
    const float* from = rows + static_cast<std::size_t>(row) * stride;
    float* to = unit.sums + row * kPanel;
    if constexpr (kVectors == 1) {
      panel_floats<kCodes, R, P>(unit.panel, unit.panel_bytes, unit.inputs, from, stride, to, kSumsPanel);
    } else {
      for (std::size_t p = 0; p < P; ++p)
        panel_floats<kCodes, R, 1>(unit.panel + p * unit.panel_bytes, unit.panel_bytes, unit.inputs, from, stride,
                                   to + p * kSumsPanel, kSumsPanel);
    }
  };
  in_rows<kVectors == 4 ? 2 : kVectors == 2 ? 4 : 8>(0, count, some);
}

template <int P>
void sum_floats(const Unit& unit, const float* rows, int count) {
  if (unit.codes == Codes::f32) sum_floats<Codes::f32, P>(unit, rows, count);
  else if (unit.codes == Codes::bf16) sum_floats<Codes::bf16, P>(unit, rows, count);
  else sum_floats<Codes::f16, P>(unit, rows, count);
}

void sum(const Unit& unit, const Inputs& inputs, int first_row, int count) {
#if defined(TURNKV_DOT)
  if (inputs.has_pairs())
    return unit.panels == 2 ? sum_pairs<2>(unit, inputs, first_row, count)
                            : sum_pairs<1>(unit, inputs, first_row, count);
#endif
  const float* rows = inputs.floats(first_row, unit.inputs);
  return unit.panels == 2 ? sum_floats<2>(unit, rows, count) : sum_floats<1>(unit, rows, count);
}

// Calls each(row, first output, sums[16], sums[16] of the next panel or null) for all rows and pairs of panels, on all
// threads: two panels fill a line of memory where 32 results of 16 bits are written.
template <class Each>
void product(const Matrix& matrix, const Inputs& inputs, int count, Each&& each) {
  const int panels = matrix.outputs / kPanel, pairs = (panels + 1) / 2;
  const int blocks = (count + kBlockRows - 1) / kBlockRows;
  const int units = pairs * blocks;
  const std::size_t panel_bytes = bytes_of(matrix);
  const bool is_int8 = matrix.format == Weights::int8;
  const std::size_t expanded_bytes =
      static_cast<std::size_t>(matrix.inputs) * kPanel * (inputs.has_pairs() ? 2 : 4);
  const bool is_in_tiles = kTiledRows > 1 && inputs.has_pairs();
  const bool is_small = static_cast<std::size_t>(panels) * panel_bytes < (std::size_t{1} << 14);
#pragma omp parallel if (units > 1 && !is_small)
  {
    static thread_local Memory memory;
    const std::size_t room = 2 * kSumsPanel * sizeof(float) + (is_int8 ? 2 * expanded_bytes : 0);
    float* sums = reinterpret_cast<float*>(memory.of(room));
    std::uint8_t* expanded = reinterpret_cast<std::uint8_t*>(sums + 2 * kSumsPanel);
    int expanded_pair = -1;
    const int several = std::clamp(units / (8 * omp_get_num_threads()), 1, 8);
#if defined(TURNKV_AMX)
    configure_products();
#endif
#pragma omp for schedule(dynamic, several)
    for (int u = 0; u < units; ++u) {
      // Several blocks of rows go through all panels before the next do.
      const int group = u / (pairs * kManyBlocks), within = u - group * pairs * kManyBlocks;
      const int in_group = std::min(kManyBlocks, blocks - group * kManyBlocks);
      const int pair = within / in_group, first = (group * kManyBlocks + within % in_group) * kBlockRows;
      const int rows = std::min(kBlockRows, count - first);
      Unit unit{static_cast<const std::uint8_t*>(matrix.panels) + static_cast<std::size_t>(2 * pair) * panel_bytes,
                panel_bytes, std::min(2, panels - 2 * pair), matrix.inputs, Codes::f32, sums};
      if (is_int8 && is_in_tiles && count <= 32) {
        unit.codes = Codes::int8;  // expanded tile by tile
      } else if (is_int8) {
        if (pair != expanded_pair)
          for (int p = 0; p < unit.panels; ++p)
            expand(unit.panel + static_cast<std::size_t>(p) * panel_bytes, matrix.inputs, inputs.has_pairs(),
                   expanded + static_cast<std::size_t>(p) * expanded_bytes);
        expanded_pair = pair;
        unit.panel = expanded;
        unit.panel_bytes = expanded_bytes;
      } else if (matrix.format != Weights::f32) {
        unit.codes = matrix.format == Weights::bf16 ? Codes::bf16 : Codes::f16;
      }
      sum(unit, inputs, first, rows);
      for (int p = 0; p < unit.panels; ++p) {
        const int output = (2 * pair + p) * kPanel;
        float* found = sums + static_cast<std::size_t>(p) * kSumsPanel;
        if (!matrix.scales && !matrix.bias) continue;
        for (int r = 0; r < rows; ++r)
          for (int i = 0; i < kPanel; ++i) {
            float& value = found[r * kPanel + i];
            if (matrix.scales) value *= matrix.scales[output + i];
            if (matrix.bias) value += matrix.bias[output + i];
          }
      }
      for (int r = 0; r < rows; ++r) {
        const float* found = sums + r * kPanel;
        each(first + r, 2 * pair * kPanel, found, unit.panels == 2 ? found + kSumsPanel : nullptr);
      }
    }
#if defined(TURNKV_AMX)
    _tile_release();
#endif
  }
}
