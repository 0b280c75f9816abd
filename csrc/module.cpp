// The binding: pointers and numbers in, nothing out. Whoever calls keeps the tensors alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "attend.h"
#include "block.h"
#include "cpu.h"
#include "settle.h"

namespace nb = nanobind;

namespace {

using turnkv::Dtype;
using turnkv::Format;

template <class T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Format format(int code) {
  if (code < 0 || code > static_cast<int>(Format::int4)) throw std::invalid_argument("no such format");
  return static_cast<Format>(code);
}

Dtype dtype(int code) {
  if (code < 0 || code > static_cast<int>(Dtype::f16)) throw std::invalid_argument("no such dtype");
  return static_cast<Dtype>(code);
}

void check_dims(int key_dim, int value_dim) {
  if (key_dim < 1 || value_dim < 1 || key_dim > turnkv::kMaxDim || value_dim > turnkv::kMaxDim)
    throw std::invalid_argument("a head has from 1 to 512 dims");
}

// (tier, offset, pages, masks, positions)
using GroupOf = std::tuple<int, int, Array<std::int32_t>, Array<std::uint16_t>, Array<std::int32_t>>;
// (first query, queries, first position, groups)
using SequenceOf = std::tuple<int, int, int, std::vector<GroupOf>>;

class Batch {
 public:
  explicit Batch(std::vector<SequenceOf> given) : given_(std::move(given)) {
    for (const auto& [first_query, num_queries, first_position, groups] : given_) {
      turnkv::Sequence sequence{first_query, num_queries, first_position, {}, {}};
      for (const auto& [tier, offset, pages, masks, positions] : groups) {
        const auto count = static_cast<int>(pages.size());
        if (masks.size() != pages.size() || positions.size() != pages.size() * turnkv::kTile)
          throw std::invalid_argument("pages, masks and positions differ in length");
        sequence.groups.push_back({tier, offset, pages.data(), masks.data(), positions.data(), count});
        for (int tile = 0; tile < count; ++tile) sequence.reach.push_back(reach(sequence.groups.back(), tile));
      }
      sequences.push_back(std::move(sequence));
    }
  }

  std::vector<turnkv::Sequence> sequences;

 private:
  static turnkv::Reach reach(const turnkv::Group& group, int tile) {
    turnkv::Reach found{INT32_MAX, INT32_MIN};
    for (int slot = 0; slot < turnkv::kTile; ++slot)
      if (group.masks[tile] >> slot & 1) {
        found.first = std::min(found.first, group.positions[tile * turnkv::kTile + slot]);
        found.last = std::max(found.last, group.positions[tile * turnkv::kTile + slot]);
      }
    return found;
  }

  std::vector<SequenceOf> given_;  // keeps the arrays alive
};

// (blocks, page bytes, head bytes, format of keys, format of values)
using ArenaOf = std::tuple<std::uintptr_t, std::size_t, std::size_t, int, int>;

// A layer's constants: everything but the queries.
struct Layer {
  turnkv::Attend call;

  Layer(std::vector<ArenaOf> arenas, int dtype_code, std::tuple<int, int, int, int> shape, float scale, float softcap,
        int window, std::uintptr_t sinks, bool is_interleaved, int first_rotated, int num_pairs) {
    for (const auto& [blocks, page_bytes, head_bytes, keys, values] : arenas)
      call.arenas.push_back({pointer<const std::uint8_t>(blocks), page_bytes, head_bytes, format(keys), format(values)});
    call.dtype = dtype(dtype_code);
    std::tie(call.num_heads, call.num_kv_heads, call.key_dim, call.value_dim) = shape;
    check_dims(call.key_dim, call.value_dim);
    if (call.num_kv_heads < 1 || call.num_heads % call.num_kv_heads || call.num_heads / call.num_kv_heads > 512)
      throw std::invalid_argument("query heads must be a multiple of key-value heads, up to 512 times");
    call.scale = scale;
    call.softcap = softcap;
    call.window = window;
    call.sinks = pointer<const float>(sinks);
    call.is_interleaved = is_interleaved;
    call.first_rotated = first_rotated;
    call.num_pairs = num_pairs;
  }
};

// (offset, cosines, sines)
using AnglesOf = std::tuple<int, std::uintptr_t, std::uintptr_t>;

// Tells a layer the sequences of a step.
turnkv::Attend& attend_to(Layer& layer, const Batch& batch, const std::vector<AnglesOf>& angles) {
  turnkv::Attend& call = layer.call;
  const int num_tiers = static_cast<int>(call.arenas.size());
  for (const auto& sequence : batch.sequences)
    for (const auto& group : sequence.groups)
      if (group.tier < 0 || group.tier >= num_tiers) throw std::invalid_argument("no such tier");
  call.sequences = &batch.sequences;
  call.angles.clear();
  for (const auto& [offset, cos, sin] : angles)
    call.angles.push_back({offset, pointer<const float>(cos), pointer<const float>(sin)});
  return call;
}

void attend_step(Layer& layer, const Batch& batch, const std::vector<AnglesOf>& angles, std::uintptr_t query,
                 std::ptrdiff_t row, std::ptrdiff_t head, std::uintptr_t out, int isa) {
  turnkv::Attend& call = attend_to(layer, batch, angles);
  call.query = pointer<const void>(query);
  call.query_row = row;
  call.query_head = head;
  call.out = pointer<void>(out);
  nb::gil_scoped_release release;
  turnkv::isas().at(static_cast<std::size_t>(isa)).attend(call);
}

// (blocks, page bytes, head bytes, dtype, G, D, E)
using ExactOf = std::tuple<std::uintptr_t, std::size_t, std::size_t, int, int, int, int>;
// (address, stride of heads, stride of tokens)
using VectorsOf = std::tuple<std::uintptr_t, std::ptrdiff_t, std::ptrdiff_t>;

// By its index; the fastest where none is given.
const turnkv::Isa& isa_of(std::optional<std::size_t> index) {
  return index ? turnkv::isas().at(*index) : turnkv::isas().back();
}

// Where new tokens go; not yet what they are.
turnkv::Write write_to(const ExactOf& arena, const Array<std::int32_t>& slots) {
  turnkv::Write call{};
  const auto [blocks, page_bytes, head_bytes, dtype_code, num_heads, key_dim, value_dim] = arena;
  check_dims(key_dim, value_dim);
  call.blocks = pointer<std::uint8_t>(blocks);
  call.page_bytes = page_bytes;
  call.head_bytes = head_bytes;
  call.dtype = dtype(dtype_code);
  call.num_heads = num_heads;
  call.key_dim = key_dim;
  call.value_dim = value_dim;
  call.slots = slots.data();
  call.count = static_cast<int>(slots.size());
  return call;
}

void write_tokens(const ExactOf& arena, const VectorsOf& key, const VectorsOf& value, const Array<std::int32_t>& slots,
                  std::optional<std::size_t> isa) {
  turnkv::Write call = write_to(arena, slots);
  call.key = pointer<const void>(std::get<0>(key));
  call.key_head = std::get<1>(key);
  call.key_token = std::get<2>(key);
  call.value = pointer<const void>(std::get<0>(value));
  call.value_head = std::get<1>(value);
  call.value_token = std::get<2>(value);
  nb::gil_scoped_release release;
  turnkv::write(call, isa_of(isa));
}

// (source arena, target arena, G, D, E)
using SettleOf = std::tuple<ArenaOf, ArenaOf, int, int, int>;

void settle_tokens(const std::vector<SettleOf>& layers, int dtype_code, const Array<std::int32_t>& source_slots,
                   const Array<std::int32_t>& target_slots, std::optional<std::size_t> isa) {
  if (source_slots.size() != target_slots.size()) throw std::invalid_argument("each source slot needs a target");
  turnkv::Settle call{{}, dtype(dtype_code), source_slots.data(), target_slots.data(),
                      static_cast<int>(source_slots.size())};
  for (const auto& [source, target, num_heads, key_dim, value_dim] : layers) {
    check_dims(key_dim, value_dim);
    call.layers.push_back({pointer<const std::uint8_t>(std::get<0>(source)), std::get<1>(source), std::get<2>(source),
                           format(std::get<3>(source)), format(std::get<4>(source)),
                           pointer<std::uint8_t>(std::get<0>(target)), std::get<1>(target), std::get<2>(target),
                           format(std::get<3>(target)), format(std::get<4>(target)), num_heads, key_dim, value_dim});
  }
  nb::gil_scoped_release release;
  turnkv::settle(call, isa_of(isa));
}

// (panels, format, outputs, inputs, scales, bias), addresses 0 where there are none
using MatrixOf = std::tuple<std::uintptr_t, int, int, int, std::uintptr_t, std::uintptr_t>;
// (weight, epsilon)
using NormOf = std::tuple<std::uintptr_t, float>;

turnkv::Matrix matrix(const MatrixOf& given) {
  const auto [panels, format_code, outputs, inputs, scales, bias] = given;
  if (format_code < 0 || format_code > static_cast<int>(turnkv::Weights::int8)) throw std::invalid_argument("no such weights");
  if (outputs % turnkv::kPanel || inputs % turnkv::kDepth) throw std::invalid_argument("a matrix is rounded up to 16 by 32");
  return {pointer<const void>(panels), static_cast<turnkv::Weights>(format_code), outputs, inputs,
          pointer<const float>(scales), pointer<const float>(bias)};
}

turnkv::Norm norm(const NormOf& given) { return {pointer<const float>(std::get<0>(given)), std::get<1>(given)}; }

// A decoder layer's constants.
struct Block {
  turnkv::Block call;

  Block(int dtype_code, int hidden, std::tuple<int, int, int, int> shape, int num_pairs, int activation,
        const std::vector<NormOf>& norms, const std::vector<MatrixOf>& matrices) {
    if (norms.size() != 6 || matrices.size() != 4) throw std::invalid_argument("six norms and four matrices are wanted");
    call.dtype = dtype(dtype_code);
    call.hidden = hidden;
    std::tie(call.num_heads, call.num_kv_heads, call.key_dim, call.value_dim) = shape;
    check_dims(call.key_dim, call.value_dim);
    if (num_pairs < 0 || 2 * num_pairs > call.key_dim) throw std::invalid_argument("more rotated dims than a head has");
    call.num_pairs = num_pairs;
    call.activation = static_cast<turnkv::Activation>(activation);
    call.before_attention = norm(norms[0]);
    call.after_attention = norm(norms[1]);
    call.before_mlp = norm(norms[2]);
    call.after_mlp = norm(norms[3]);
    call.query = norm(norms[4]);
    call.key = norm(norms[5]);
    call.qkv = matrix(matrices[0]);
    call.out = matrix(matrices[1]);
    call.gate_up = matrix(matrices[2]);
    call.down = matrix(matrices[3]);
  }
};

// (cosines, sines, stride of rows)
using RowAnglesOf = std::tuple<std::uintptr_t, std::uintptr_t, std::ptrdiff_t>;

void block_step(const Block& block, Layer& layer, const Batch& batch, const std::vector<AnglesOf>& angles,
                const ExactOf& arena, const Array<std::int32_t>& slots, std::uintptr_t rows,
                const RowAnglesOf& row_angles, int isa) {
  turnkv::BlockStep step{pointer<void>(rows), static_cast<int>(slots.size()), pointer<const void>(std::get<0>(row_angles)),
                         pointer<const void>(std::get<1>(row_angles)), std::get<2>(row_angles), write_to(arena, slots),
                         &attend_to(layer, batch, angles)};
  nb::gil_scoped_release release;
  const turnkv::Isa& chosen = turnkv::isas().at(static_cast<std::size_t>(isa));
  chosen.block(block.call, step, chosen);
}

// (address, stride of rows, numbers of a row)
using RowsOf = std::tuple<std::uintptr_t, std::ptrdiff_t, int>;

void product_of(const MatrixOf& given, int dtype_code, const RowsOf& rows, int count, const RowsOf& out, int isa) {
  const turnkv::Matrix by = matrix(given);
  const turnkv::Product call{dtype(dtype_code), pointer<const void>(std::get<0>(rows)), std::get<1>(rows), count,
                             std::get<2>(rows), &by, pointer<void>(std::get<0>(out)), std::get<1>(out), std::get<2>(out)};
  nb::gil_scoped_release release;
  turnkv::isas().at(static_cast<std::size_t>(isa)).product(call);
}

std::uint64_t read_memory(std::uintptr_t address, std::size_t count) {
  nb::gil_scoped_release release;
  return turnkv::read_through(pointer<const std::uint64_t>(address), count);
}

std::vector<std::string> names() {
  std::vector<std::string> found;
  for (const auto& isa : turnkv::isas()) found.push_back(isa.name);
  return found;
}

}  // namespace

NB_MODULE(_kernels, module) {
  nb::set_leak_warnings(false);  // layers live as long as the caches that tests and users still hold at exit
  nb::class_<Batch>(module, "Batch").def(nb::init<std::vector<SequenceOf>>());
  nb::class_<Layer>(module, "Layer")
      .def(nb::init<std::vector<ArenaOf>, int, std::tuple<int, int, int, int>, float, float, int, std::uintptr_t, bool,
                    int, int>());
  nb::class_<Block>(module, "Block")
      .def(nb::init<int, int, std::tuple<int, int, int, int>, int, int, const std::vector<NormOf>&,
                    const std::vector<MatrixOf>&>());
  module.def("attend", &attend_step);
  module.def("block", &block_step);
  module.def("product", &product_of);
  module.def("write", &write_tokens, nb::arg("arena"), nb::arg("key"), nb::arg("value"), nb::arg("slots"),
             nb::arg("isa") = nb::none());
  module.def("settle", &settle_tokens, nb::arg("layers"), nb::arg("dtype"), nb::arg("source_slots"),
             nb::arg("target_slots"), nb::arg("isa") = nb::none());
  module.def("read", &read_memory);
  module.def("isas", &names);
}
