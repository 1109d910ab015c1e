// Search for devices with which everything fits at every time, whatever the makespan.
#pragma once

#include <cstdint>
#include <vector>

#include "clock/core.h"

namespace baechi {

struct Backtracked {
  std::vector<int32_t> devices;  // per group; empty where none were found
  bool proven;                   // where none were found: that there are none
};

// Devices of all groups with which the ops, committed in `order`, stay within the memory. The order
// is a topological one of all ops. Or it is empty: then devices that hold the persistent bytes and
// have the links, and if there are none, nothing fits in any order. `budget` is counted in
// committed ops and examined groups.
Backtracked backtrack(const Problem& problem, const std::vector<int32_t>& order, int64_t budget,
                      uint64_t seed);

}  // namespace baechi
