// Random numbers for annealing: seeded, and the same on every machine, since no logarithm of the C
// library is used.
#pragma once

#include "clock/core.h"

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
  // Exponentially distributed with mean 1: -log(unit()).
  double exponential() {
    double x = unit(), sum = 0;
    while (x < 0.5) {
      x *= 2;
      sum += 0.69314718055994531;
    }
    // -log(x) = 2 artanh(t) with t = (1 - x) / (1 + x) <= 1 / 3.
    const double t = (1 - x) / (1 + x), t2 = t * t;
    double power = t;
    for (int k = 1; k < 16; k += 2) {
      sum += 2 * power / k;
      power *= t2;
    }
    return sum;
  }

 private:
  uint64_t state_;
};

// A temperature that falls from 1 by a factor of ten for each of `decades`, in even steps.
class Cooling {
 public:
  explicit Cooling(int decades) : decades_(decades) {}
  // At a progress in [0, 1).
  double at(double progress) {
    const int step = static_cast<int>(progress * kSteps * decades_);
    if (step < step_) {
      step_ = 0;
      heat_ = 1;
    }
    for (; step_ < step; ++step_) heat_ *= 0.86596432336006535;  // 10^(-1 / 16)
    return heat_;
  }

 private:
  static constexpr int kSteps = 16;
  const int decades_;
  int step_ = 0;
  double heat_ = 1;
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
