// The one source of chance: seeded, and the same on every machine.
#pragma once

#include <cstdint>

#include "core.h"

namespace baechi {

// splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t x = (state_ += 0x9e3779b97f4a7c15u);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // In [0, n).
  int32_t below(int32_t n) {
    return static_cast<int32_t>((next() >> 32) * static_cast<uint64_t>(n) >> 32);
  }
  // In (0, 1].
  double unit() { return static_cast<double>((next() >> 11) + 1) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

// An op that sends to `op` or receives from it, or -1.
inline int32_t random_neighbor(const Problem& problem, int32_t op, Random& random) {
  const int64_t in = problem.inputs.size(op), out = problem.outputs.size(op);
  if (in + out == 0) return -1;
  const int64_t pick = random.below(static_cast<int32_t>(in + out));
  if (pick < in) return problem.producer[problem.inputs.first(op)[pick]];
  const int32_t tensor = problem.outputs.first(op)[pick - in];
  const int64_t readers = problem.consumers.size(tensor);
  if (readers == 0) return -1;
  return problem.consumers.first(tensor)[random.below(static_cast<int32_t>(readers))];
}

}  // namespace baechi
