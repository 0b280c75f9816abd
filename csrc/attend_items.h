// How a call is cut into items, what an item is given, and how items are run and merged.
//
// An item is (sequence, key-value head, block of query tokens, split of the tiles). Its rows are all query heads of its
// key-value head for its query tokens, so that each key is read once for all of them. For each row it leaves a maximum,
// a sum and an output (online softmax, Milakov & Gimelshein, arXiv:1805.02867); whoever computes the last part of a block
// merges all its parts, in order. Items depend on lengths alone, so the number of threads changes no bit.
#pragma once

#include "attend.h"

namespace turnkv {

constexpr int kFewRows = 16;     // up to so many rows, tiles are read as they lie; beyond, they are expanded first
constexpr int kFewSplit = 32;    // tiles of an item with few rows
constexpr int kManyRows = 256;   // rows of an item with many
constexpr int kManySplit = 512;  // and its tiles
constexpr int kFewTiles = 8;     // tiles whose scores are held at once, with few rows
constexpr int kManyTiles = 16;   // and with many
constexpr int kMaxKeys = kManyTiles * kTile;

struct Item {
  int sequence, head, first_query, num_queries, first_tile, num_tiles, part, num_parts;
  int block;        // the same for all parts of the same rows
  std::size_t row;  // the first of its rows among all partial results
};

// What all items of a call share.
struct Job {
  const Attend* call;
  const TileLayout* layouts;  // of the arenas
  int group_heads;            // query heads of a key-value head
  int value_stride;           // E rounded up to 16
  int partial_stride;         // floats of a row's partial result: maximum (of score * scale * log2(e)), sum, output
};

// Memory that a thread works in, 64-byte aligned; rows are rounded up to 32, dims of keys to 32 and of values to 16.
struct Scratch {
  float* floats;            // [rows][D]: queries, rotated and transformed as a group asks for
  std::uint32_t* pairs;     // [rows][D / 2]: the same as bf16
  std::uint32_t* high;      // [kFewRows][D / 4]: the same as 15 bits, query = (128 * high + low) * step
  std::uint32_t* low;
  float* step;              // [kFewRows]
  std::int32_t* bias;       // [kFewRows][D / 8]: sums of the codes, group by group
  float* scores;            // [32][kMaxKeys]: scores, then weights
  std::uint32_t* weights;   // [32][kMaxKeys / 2]: weights as bf16
  float* scaled;            // [4][kMaxKeys]: weights times scales
  std::uint32_t* codes;     // [2][4][kMaxKeys / 4]: the same in 8 bits, high and low
  float* outputs[2];        // [rows][value_stride]: plain, and in the Hadamard basis
  float* highest;           // [rows]
  float* sums;              // [rows][16]
  std::uint8_t* keys;       // kManyTiles tiles, expanded
  std::uint8_t* values;
};

// `next` is what the thread will probably do after, or null: its memory may be asked for.
using Compute = void (*)(const Job&, const Item& item, const Item* next, const Scratch&, float* partials);

void run(const Attend&, Compute);

}  // namespace turnkv
