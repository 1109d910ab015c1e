// Lower bounds on the makespan of every valid schedule; `docs/bounds.md` has the proofs.
//
// A site is a set of devices that the bounds do not distinguish. An op runs at one site; its time
// there, and the transfer time between sites, is at most that on any of the devices.
#pragma once

#include "clock/core.h"

namespace baechi {

struct Sites {
  int32_t count = 0;
  std::vector<int64_t> durations;  // durations[site * ops + op]
  std::vector<uint8_t> allowed;    // allowed[site * groups + group]
  std::vector<int64_t> memory;     // per site, the largest
  // To another device, per [from * count + to], the same site included: the latency, kForever where
  // there is no path, and bytes per second, 0 where bytes cost nothing.
  std::vector<int64_t> latency, rate;
  // One row per choice of weights: weights[row * count + site], and the sum over all devices that a
  // schedule may use at once.
  std::vector<int64_t> weights, weight_sums;
};

// Effort; time grows with each of them.
struct Effort {
  int32_t window;      // ancestors considered for one op's earliest start
  int32_t thresholds;  // times between which work is added up
  int32_t guesses;     // makespans to try to refute
};

// Each is at most the makespan of every valid schedule. kForever: no schedule is valid.
struct Bounds {
  int64_t path;   // an op's earliest start, its time and what must follow; or a whole group's time
  int64_t work;   // the work that must be done between two times, over all devices
  int64_t guess;  // the shortest makespan that could not be refuted
};

Bounds lower_bounds(const Problem& problem, const Sites& sites, const Effort& effort);

}  // namespace baechi
