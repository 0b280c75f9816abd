// Attention over tiles of any format: what a call is told, and how it is cut into items. No Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout.h"

namespace turnkv {

// Keys of one sequence in one tier and with one offset.
struct Group {
  int tier;
  int offset;
  const std::int32_t* pages;
  const std::uint16_t* masks;
  const std::int32_t* positions;  // [count][16]
  int count;
};

// A tile's first and last virtual position.
struct Reach {
  std::int32_t first, last;
};

struct Sequence {
  int first_query, num_queries, first_position;
  std::vector<Group> groups;
  std::vector<Reach> reach;  // of all tiles, group after group
};

struct Arena {
  const std::uint8_t* blocks;
  std::size_t page_bytes, head_bytes;
  Format key_format, value_format;
};

// The rotation by one offset: cosines and sines of its pairs, float32.
struct Angles {
  int offset;
  const float* cos;
  const float* sin;
};

struct Attend {
  const std::vector<Sequence>* sequences;
  std::vector<Arena> arenas;
  const void* query;
  std::ptrdiff_t query_row, query_head;  // strides in elements
  void* out;                             // [T][H][E], dense
  Dtype dtype;                           // of query, output and exact codes
  int num_heads, num_kv_heads, key_dim, value_dim;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: none
  const float* sinks;    // [H], or null
  std::vector<Angles> angles;
  bool is_interleaved;
  int first_rotated, num_pairs;
};

// Reads memory as fast as this machine does, on all threads: what benchmarks compare attention with. Returns the sum of
// all words in whole pairs of lines.
std::uint64_t read_through(const std::uint64_t* from, std::size_t count);

// One body for each instruction set; the same source, compiled again and again.
namespace portable { void attend(const Attend&); }
namespace avx2 { void attend(const Attend&); }
namespace avx512 { void attend(const Attend&); }
namespace avx512bf16 { void attend(const Attend&); }
namespace amx { void attend(const Attend&); }

}  // namespace turnkv
