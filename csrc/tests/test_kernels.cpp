// The kernels without Python, in edge cases, in buffers of exactly the size that they may touch: for ASan and UBSan.
//
// What is computed right is for tests/ to say, against the reference; here every instruction set is held to `portable`.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "../cpu.h"
#include "../numbers.h"

namespace {

using namespace turnkv;

int num_checks = 0;
std::mt19937 random_bits(0);

void check(bool is_true, const char* claim, const std::string& isa = "") {
  ++num_checks;
  if (is_true) return;
  std::fprintf(stderr, "FAILED: %s %s\n", isa.c_str(), claim);
  std::exit(1);
}

// Aligned as arenas are, and not a byte longer than asked for.
struct Free {
  void operator()(std::uint8_t* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};

class Buffer {
 public:
  explicit Buffer(std::size_t size, int fill = 0x5a)
      : size_(size), bytes_(static_cast<std::uint8_t*>(::operator new[](size, std::align_val_t{64}))) {
    std::memset(bytes_.get(), fill, size);
  }
  std::uint8_t* data() const { return bytes_.get(); }
  std::size_t size() const { return size_; }
  bool operator==(const Buffer& other) const {
    return size_ == other.size_ && !std::memcmp(data(), other.data(), size_);
  }

 private:
  std::size_t size_;
  std::unique_ptr<std::uint8_t[], Free> bytes_;
};

std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

void set(const Buffer& numbers, Dtype dtype, std::size_t at, float value) {
  const std::uint16_t half = dtype == Dtype::bf16 ? to_bf16(value) : to_f16(value);
  if (dtype == Dtype::f32) std::memcpy(numbers.data() + at * 4, &value, 4);
  else std::memcpy(numbers.data() + at * 2, &half, 2);
}

float get(const Buffer& numbers, Dtype dtype, std::size_t at) {
  float value = 0;
  std::uint16_t half = 0;
  if (dtype == Dtype::f32) std::memcpy(&value, numbers.data() + at * 4, 4);
  else std::memcpy(&half, numbers.data() + at * 2, 2);
  return dtype == Dtype::f32 ? value : dtype == Dtype::bf16 ? from_bf16(half) : from_f16(half);
}

// Mostly of unit size, with zeros, tiny and huge ones in between.
Buffer numbers(std::size_t count, Dtype dtype, bool has_extremes) {
  Buffer made(count * bytes_of(dtype));
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned kind = has_extremes ? random_bits() % 16 : 15;
    const float x = normal(random_bits);
    set(made, dtype, i, kind == 0 ? 0.0F : kind == 1 ? x * 1e-7F : kind == 2 ? x * 1e4F : x);
  }
  return made;
}

struct Shape {
  int num_heads, key_dim, value_dim, num_pages;
};

struct Tier {
  Format keys, values;
};

TileLayout layout_of(Tier tier, Dtype dtype, const Shape& shape) {
  return TileLayout(tier.keys, tier.values, dtype, shape.key_dim, shape.value_dim);
}

Buffer arena_of(Tier tier, Dtype dtype, const Shape& shape) {
  return Buffer(layout_of(tier, dtype, shape).head_bytes() * static_cast<std::size_t>(shape.num_heads) *
                static_cast<std::size_t>(shape.num_pages));
}

std::vector<std::int32_t> some_slots(int count, int num_pages) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(num_pages * kTile));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
  std::shuffle(all.begin(), all.end(), random_bits);
  all.resize(static_cast<std::size_t>(count));
  all.shrink_to_fit();
  return all;
}

bool has_whole_lanes(Tier tier, Dtype dtype, int key_dim) { return key_dim * code_bits(tier.keys, dtype) % 32 == 0; }

constexpr Tier kExact{Format::exact, Format::exact};
constexpr Format kFormats[] = {Format::exact, Format::int8, Format::fp8, Format::int4};
constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

void write_into(const Buffer& arena, Dtype dtype, const Shape& shape, const std::vector<std::int32_t>& slots,
                const Buffer& key, const Buffer& value, const Isa& isa) {
  const auto count = static_cast<int>(slots.size());
  const std::size_t head_bytes = layout_of(kExact, dtype, shape).head_bytes();
  write({arena.data(), head_bytes * static_cast<std::size_t>(shape.num_heads), head_bytes, dtype, shape.num_heads,
         shape.key_dim, shape.value_dim, key.data(), value.data(), std::ptrdiff_t{count} * shape.key_dim, shape.key_dim,
         std::ptrdiff_t{count} * shape.value_dim, shape.value_dim, slots.data(), count},
        isa);
}

void settle_into(const Buffer& source, Tier from, const Buffer& target, Tier to, Dtype dtype, const Shape& shape,
                 const std::vector<std::int32_t>& source_slots, const std::vector<std::int32_t>& target_slots,
                 const Isa& isa) {
  const auto heads = static_cast<std::size_t>(shape.num_heads);
  const std::size_t old_bytes = layout_of(from, dtype, shape).head_bytes();
  const std::size_t new_bytes = layout_of(to, dtype, shape).head_bytes();
  settle({{{source.data(), old_bytes * heads, old_bytes, from.keys, from.values, target.data(), new_bytes * heads,
            new_bytes, to.keys, to.values, shape.num_heads, shape.key_dim, shape.value_dim}},
          dtype,
          source_slots.data(),
          target_slots.data(),
          static_cast<int>(source_slots.size())},
         isa);
}

// Where a number of the exact tier lies, by the layout's definition.
float exact_number(const Buffer& arena, Dtype dtype, const Shape& shape, int slot, int head, int dim, bool is_key) {
  const TileLayout layout = layout_of(kExact, dtype, shape);
  const int per_lane = static_cast<int>(4 / bytes_of(dtype)), lane = slot % kTile;
  const int number = is_key ? (dim / per_lane * kTile + lane) * per_lane + dim % per_lane
                            : (lane / per_lane * shape.value_dim + dim) * per_lane + lane % per_lane;
  const std::size_t block = static_cast<std::size_t>(slot / kTile * shape.num_heads + head) * layout.head_bytes();
  return get(arena, dtype, (block + (is_key ? 0 : layout.values)) / bytes_of(dtype) + static_cast<std::size_t>(number));
}

void test_conversions_of_all_codes() {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (!std::isnan(from_f16(half))) check(to_f16(from_f16(half)) == half, "fp16");
    if (!std::isnan(from_bf16(half))) check(to_bf16(from_bf16(half)) == half, "bf16");
  }
  for (std::uint32_t bits = 0; bits < 0x100; ++bits) {
    const float value = from_e4m3(static_cast<std::uint8_t>(bits));
    check(std::isnan(value) ? (bits & 0x7f) == 0x7f : e4m3_bits<std::uint32_t>(value) == bits, "e4m3");
  }
  for (const float special : {INFINITY, -INFINITY, 1e30F, 65520.0F, 65519.0F, 6e-8F, 2e-8F, 0.0F, -0.0F})
    check(std::fabs(from_f16(to_f16(special))) <= INFINITY, "a number stays one");
  check(std::isnan(from_f16(to_f16(NAN))) && std::isnan(from_bf16(to_bf16(NAN))), "a NaN stays one");
}

void test_write_puts_tokens_where_the_layout_says_and_nothing_else(const Isa& isa) {
  for (const Dtype dtype : kDtypes)
    for (const Shape& shape : {Shape{1, 2, 1, 1}, {3, 40, 7, 3}, {2, 64, 64, 4}, {1, 512, 511, 2}, {5, 80, 96, 2}})
      for (const int count : {0, 1, 2, 15, 16}) {
        const auto heads = static_cast<std::size_t>(shape.num_heads), tokens = static_cast<std::size_t>(count);
        const Buffer key = numbers(heads * tokens * static_cast<std::size_t>(shape.key_dim), dtype, true);
        const Buffer value = numbers(heads * tokens * static_cast<std::size_t>(shape.value_dim), dtype, true);
        const Buffer arena = arena_of(kExact, dtype, shape), before = arena_of(kExact, dtype, shape);
        const std::vector<std::int32_t> slots = some_slots(count, shape.num_pages);
        write_into(arena, dtype, shape, slots, key, value, isa);
        for (int slot = 0; slot < shape.num_pages * kTile; ++slot) {
          const auto found = std::find(slots.begin(), slots.end(), slot);
          const auto t = static_cast<std::size_t>(found - slots.begin());
          for (int head = 0; head < shape.num_heads; ++head)
            for (const bool is_key : {true, false})
              for (int dim = 0; dim < (is_key ? shape.key_dim : shape.value_dim); ++dim) {
                const auto dims = static_cast<std::size_t>(is_key ? shape.key_dim : shape.value_dim);
                const float wanted = found == slots.end()
                                         ? exact_number(before, dtype, shape, slot, head, dim, is_key)
                                         : get(is_key ? key : value, dtype,
                                               (static_cast<std::size_t>(head) * tokens + t) * dims +
                                                   static_cast<std::size_t>(dim));
                check(exact_number(arena, dtype, shape, slot, head, dim, is_key) == wanted, "write puts each number in its place", isa.name);
              }
        }
      }
}

void test_settle_gives_the_bytes_of_the_portable_body(const Isa& isa) {
  const Isa& judge = isas().front();
  for (const Dtype dtype : kDtypes)
    for (const Shape& shape : {Shape{1, 8, 1, 1}, {3, 40, 7, 3}, {2, 80, 96, 2}, {1, 512, 511, 2}})
      for (const Format from : kFormats)
        for (const Format to : kFormats)
          for (const int count : {0, 1, 16}) {
            // Keys and values cross over, so that each meets the other's format.
            const Tier source{from, to}, target{to, from};
            if (!has_whole_lanes(source, dtype, shape.key_dim) || !has_whole_lanes(target, dtype, shape.key_dim)) continue;
            const std::size_t tokens = static_cast<std::size_t>(shape.num_heads * count);
            const Buffer key = numbers(tokens * static_cast<std::size_t>(shape.key_dim), dtype, true);
            const Buffer value = numbers(tokens * static_cast<std::size_t>(shape.value_dim), dtype, true);
            const auto first = some_slots(count, shape.num_pages), second = some_slots(count, shape.num_pages);
            const auto third = some_slots(count, shape.num_pages);
            Buffer results[2] = {arena_of(target, dtype, shape), arena_of(target, dtype, shape)};
            const Isa* bodies[2] = {&judge, &isa};
            for (int i = 0; i < 2; ++i) {
              const Buffer exact = arena_of(kExact, dtype, shape), middle = arena_of(source, dtype, shape);
              write_into(exact, dtype, shape, first, key, value, *bodies[i]);
              settle_into(exact, kExact, middle, source, dtype, shape, first, second, *bodies[i]);
              settle_into(middle, source, results[i], target, dtype, shape, second, third, *bodies[i]);
            }
            check(results[0] == results[1], "settle agrees with portable", isa.name);
            check(count > 0 || results[1] == arena_of(target, dtype, shape), "no tokens change nothing");
          }
}

// One step of several sequences over several tiers, as an attention body is told.
struct Step {
  Shape shape;
  Dtype dtype;
  int num_heads;
  std::vector<Tier> tiers;
  std::vector<Buffer> arenas;
  std::vector<std::vector<std::int32_t>> pages, positions;
  std::vector<std::vector<std::uint16_t>> masks;
  std::vector<Sequence> sequences;
  std::vector<float> cosines, sines, sinks;
  Buffer query{0};
  int num_rows = 0;

  Step(const Shape& shape_in, Dtype dtype_in, int num_heads_in) : shape(shape_in), dtype(dtype_in), num_heads(num_heads_in) {
    for (const Tier tier : {kExact, Tier{Format::int8, Format::int8}, Tier{Format::int4, Format::int4},
                            Tier{Format::fp8, Format::int4}, Tier{Format::int4, Format::exact}}) {
      if (!has_whole_lanes(tier, dtype, shape.key_dim)) continue;
      const auto all = some_slots(shape.num_pages * kTile, shape.num_pages);
      const std::size_t tokens = all.size() * static_cast<std::size_t>(shape.num_heads);
      const Buffer exact = arena_of(kExact, dtype, shape);
      write_into(exact, dtype, shape, all, numbers(tokens * static_cast<std::size_t>(shape.key_dim), dtype, false),
                 numbers(tokens * static_cast<std::size_t>(shape.value_dim), dtype, false), isas().front());
      arenas.push_back(arena_of(tier, dtype, shape));
      settle_into(exact, kExact, arenas.back(), tier, dtype, shape, all, all, isas().front());
      tiers.push_back(tier);
    }
    const int num_pairs = shape.key_dim / 4;
    for (int i = 0; i < num_pairs; ++i) {
      cosines.push_back(std::cos(static_cast<float>(i)));
      sines.push_back(std::sin(static_cast<float>(i)));
    }
    for (int head = 0; head < num_heads; ++head) sinks.push_back(static_cast<float>(head) - 1);
    for (auto* list : {&cosines, &sines, &sinks}) list->shrink_to_fit();
    // Without keys, one key, tiles whose last slots are empty, more rows than a block, and many tiles.
    add(1, {});
    add(3, {0, 0});
    add(1, {1});
    add(0, {5});
    add(17, {20, 3, 33});
    add(70, {1, 40, 0, 7, 15});
    add(1, {900, 16, 500});
    query = numbers(static_cast<std::size_t>(num_rows * num_heads * shape.key_dim), dtype, false);
  }

  // A sequence whose groups have so many keys each, tier after tier, behind which come the queries.
  void add(int num_queries, const std::vector<int>& lengths) {
    Sequence sequence{num_rows, num_queries, 0, {}, {}};
    std::int32_t position = 0;
    std::size_t tier = 0;
    for (const int length : lengths) {
      const int count = (length + kTile - 1) / kTile;
      std::vector<std::int32_t> tiles, where(static_cast<std::size_t>(count * kTile), -12345);
      std::vector<std::uint16_t> seen;
      for (int tile = 0; tile < count; ++tile) {
        tiles.push_back(static_cast<std::int32_t>(random_bits()) % shape.num_pages);
        if (tiles.back() < 0) tiles.back() += shape.num_pages;
        const int filled = std::min(kTile, length - tile * kTile);
        // Every other tile is filled from its end.
        const int skipped = tile % 2 ? kTile - filled : 0;
        seen.push_back(static_cast<std::uint16_t>(((1 << filled) - 1) << skipped));
        sequence.reach.push_back({position, position + filled - 1});
        for (int i = 0; i < filled; ++i) where[static_cast<std::size_t>(tile * kTile + skipped + i)] = position++;
      }
      tiles.shrink_to_fit();
      seen.shrink_to_fit();
      pages.push_back(std::move(tiles));
      positions.push_back(std::move(where));
      masks.push_back(std::move(seen));
      sequence.groups.push_back({static_cast<int>(tier % tiers.size()), tier % 2 ? 7 : 0, pages.back().data(),
                                 masks.back().data(), positions.back().data(), count});
      ++tier;
    }
    // The last half of the queries are newer than all keys; the first see only some.
    sequence.first_position = std::max(0, position - num_queries / 2);
    sequences.push_back(std::move(sequence));
    num_rows += num_queries;
  }

  Attend call(const Buffer& out, bool is_plain) const {
    Attend made{};
    made.sequences = &sequences;
    for (std::size_t i = 0; i < tiers.size(); ++i) {
      const std::size_t head_bytes = layout_of(tiers[i], dtype, shape).head_bytes();
      made.arenas.push_back({arenas[i].data(), head_bytes * static_cast<std::size_t>(shape.num_heads), head_bytes,
                             tiers[i].keys, tiers[i].values});
    }
    made.query = query.data();
    made.query_row = std::ptrdiff_t{num_heads} * shape.key_dim;
    made.query_head = shape.key_dim;
    made.out = out.data();
    made.dtype = dtype;
    made.num_heads = num_heads;
    made.num_kv_heads = shape.num_heads;
    made.key_dim = shape.key_dim;
    made.value_dim = shape.value_dim;
    made.scale = 0.3F;
    if (is_plain) return made;
    made.softcap = 20;
    made.window = 25;
    made.sinks = sinks.data();
    made.angles = {{7, cosines.data(), sines.data()}};
    made.is_interleaved = shape.key_dim % 16 == 0;
    made.first_rotated = 0;
    made.num_pairs = static_cast<int>(cosines.size());
    return made;
  }
};

void test_attend_agrees_with_the_portable_body(const Isa& isa) {
  for (const Dtype dtype : kDtypes)
    for (const auto& [shape, num_heads] :
         {std::pair{Shape{1, 8, 1, 3}, 1}, {Shape{2, 40, 7, 5}, 6}, {Shape{1, 64, 64, 4}, 9}, {Shape{2, 80, 96, 2}, 2}}) {
      const Step step(shape, dtype, num_heads);
      for (const bool is_plain : {true, false}) {
        const auto count = static_cast<std::size_t>(step.num_rows * num_heads * shape.value_dim);
        const Buffer wanted(count * bytes_of(dtype)), found(count * bytes_of(dtype));
        isas().front().attend(step.call(wanted, is_plain));
        isa.attend(step.call(found, is_plain));
        const float most = dtype == Dtype::f32 ? 4e-5F : dtype == Dtype::bf16 ? 8e-2F : 1e-2F;
        for (std::size_t i = 0; i < count; ++i)
          check(std::fabs(get(found, dtype, i) - get(wanted, dtype, i)) <= most, "attend agrees with portable", isa.name);
        for (std::size_t i = 0; i < static_cast<std::size_t>(4 * num_heads * shape.value_dim); ++i)
          check(get(found, dtype, i) == 0, "gives zeros where there are no keys", isa.name);
      }
    }
}

// Weights in panels, as src/turnkv/kernels/matrices.py packs them, and exactly as large as they say.
struct Weighed {
  Matrix matrix;
  Buffer panels, scales, bias;

  Weighed(Weights format, int outputs, int inputs)
      : matrix{}, panels(size_of(format, outputs, inputs)), scales(static_cast<std::size_t>(outputs) * 4), bias(static_cast<std::size_t>(outputs) * 4) {
    const auto count = static_cast<std::size_t>(outputs * inputs);
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(inputs)));
    for (std::size_t i = 0; i < count; ++i) {
      if (format == Weights::int8) panels.data()[i] = static_cast<std::uint8_t>(random_bits() % 255 - 127);
      else set(panels, static_cast<Dtype>(format), i, normal(random_bits));
    }
    for (std::size_t i = 0; i < static_cast<std::size_t>(outputs); ++i) {
      set(scales, Dtype::f32, i, 0.01F / std::sqrt(static_cast<float>(inputs)));
      set(bias, Dtype::f32, i, normal(random_bits));
    }
    matrix = {panels.data(), format, outputs, inputs, nullptr, reinterpret_cast<const float*>(bias.data())};
    if (format == Weights::int8) matrix.scales = reinterpret_cast<const float*>(scales.data());
  }

  static std::size_t size_of(Weights format, int outputs, int inputs) {
    const std::size_t size = format == Weights::f32 ? 4 : format == Weights::int8 ? 1 : 2;
    return static_cast<std::size_t>(outputs * inputs) * size;
  }
};

void test_product_agrees_with_the_portable_body(const Isa& isa) {
  for (const Dtype dtype : kDtypes)
    for (const Weights format : {static_cast<Weights>(dtype), Weights::int8})
      for (const auto& [outputs, inputs, filled] : {std::tuple{16, 32, 1}, {48, 64, 50}, {160, 96, 96}}) {
        const Weighed weights(format, outputs, inputs);
        for (const int count : {1, 2, 9, 17, 150}) {
          const auto wanted_outputs = outputs - 3;
          const Buffer rows = numbers(static_cast<std::size_t>(count * filled), dtype, false);
          const auto size = static_cast<std::size_t>(count * wanted_outputs);
          const Buffer wanted(size * bytes_of(dtype)), found(size * bytes_of(dtype));
          Product call{dtype, rows.data(), filled, count, filled, &weights.matrix, wanted.data(), wanted_outputs,
                       wanted_outputs};
          isas().front().product(call);
          call.out = found.data();
          isa.product(call);
          const float most = dtype == Dtype::f32 ? 2e-5F : dtype == Dtype::bf16 ? 8e-2F : 1e-2F;
          for (std::size_t i = 0; i < size; ++i)
            check(std::fabs(get(found, dtype, i) - get(wanted, dtype, i)) <= most, "product agrees with portable", isa.name);
        }
      }
}

void test_block_agrees_with_the_portable_body(const Isa& isa) {
  constexpr int kHidden = 40, kHeads = 6, kGated = 80;
  const Shape shape{2, 40, 7, 5};
  const auto up = [](int count, int to) { return (count + to - 1) / to * to; };
  const int wide = up(kHeads * shape.key_dim + shape.num_heads * (shape.key_dim + shape.value_dim), 16);
  for (const Dtype dtype : kDtypes) {
    const Step step(shape, dtype, kHeads);
    const Weights format = static_cast<Weights>(dtype);
    const Weighed qkv(format, wide, 64), out(format, 48, 64), gate_up(format, 2 * kGated, 64), down(format, 48, 96);
    const Buffer weight = numbers(64, Dtype::f32, false);
    const Norm norm{reinterpret_cast<const float*>(weight.data()), 1e-5F};
    const Block block{dtype, kHidden, kHeads, shape.num_heads, shape.key_dim, shape.value_dim, shape.key_dim / 4,
                      Activation::gelu_tanh, norm, norm, norm, norm, norm, norm, qkv.matrix, out.matrix, gate_up.matrix,
                      down.matrix};
    const auto count = static_cast<std::size_t>(step.num_rows);
    const Buffer rows = numbers(count * kHidden, dtype, false);
    const Buffer angles = numbers(count * static_cast<std::size_t>(block.num_pairs), dtype, false);
    std::vector<std::int32_t> slots;
    for (int row = 0; row < step.num_rows; ++row) slots.push_back(row % (shape.num_pages * kTile));
    slots.shrink_to_fit();
    const auto run = [&](const Isa& on) {
      // The block writes into the exact arena: each run has its own.
      Attend attend = step.call(step.query, true);
      Buffer arena = arena_of(kExact, dtype, shape), changed(count * kHidden * bytes_of(dtype));
      std::memcpy(arena.data(), step.arenas[0].data(), arena.size());
      attend.arenas[0].blocks = arena.data();
      std::memcpy(changed.data(), rows.data(), count * kHidden * bytes_of(dtype));
      Write write{};
      write.blocks = arena.data();
      write.page_bytes = attend.arenas[0].page_bytes;
      write.head_bytes = attend.arenas[0].head_bytes;
      write.dtype = dtype;
      write.num_heads = shape.num_heads;
      write.key_dim = shape.key_dim;
      write.value_dim = shape.value_dim;
      write.slots = slots.data();
      write.count = step.num_rows;
      on.block(block, {changed.data(), step.num_rows, angles.data(), angles.data(), block.num_pairs, write, &attend}, on);
      return changed;
    };
    const Buffer wanted = run(isas().front()), found = run(isa);
    const float most = dtype == Dtype::f32 ? 2e-4F : dtype == Dtype::bf16 ? 2e-1F : 3e-2F;
    for (std::size_t i = 0; i < count * kHidden; ++i)
      check(std::fabs(get(found, dtype, i) - get(wanted, dtype, i)) <= most, "block agrees with portable", isa.name);
  }
}

}  // namespace

int main() {
  test_conversions_of_all_codes();
  for (const Isa& isa : isas()) {
    test_write_puts_tokens_where_the_layout_says_and_nothing_else(isa);
    test_settle_gives_the_bytes_of_the_portable_body(isa);
    test_attend_agrees_with_the_portable_body(isa);
    test_product_agrees_with_the_portable_body(isa);
    test_block_agrees_with_the_portable_body(isa);
  }
  std::printf("%d checks passed on", num_checks);
  for (const Isa& isa : isas()) std::printf(" %s", isa.name.c_str());
  std::printf("\n");
}
