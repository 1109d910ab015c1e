#pragma once

#include <atomic>

#include "clock/core.h"

namespace baechi {

// Ends searches early at the request of another thread: an interrupt. Their results are then to be
// ignored.
struct Halt {
  std::atomic<bool> asked{false};
};
inline bool halted(const Halt* halt) {
  return halt != nullptr && halt->asked.load(std::memory_order_relaxed);
}

// Result of `local_search`: a placement with its time and memory.
struct Found {
  std::vector<int32_t> devices, order;
  int64_t makespan = 0, overflow = 0;  // ns, and bytes that do not fit
  int64_t evaluations = 0;             // ops evaluated, what the search has cost
};

// The best placement met from a start on, never worse than it. `devices` per op, groups together;
// `order` topological; `clusters` per level and group a cluster of groups that may move as one;
// `budget` in evaluated ops, which one more change may pass; the search ends before where a
// placement that fits takes `target` or less. Where the start needs a path that does not exist, it
// comes back with a makespan and an overflow of a quarter of `kForever`. With `from` above 0 no
// order is listed anew, and what changes are ops from that position of the order on, and what must
// or may move with them.
Found local_search(const Problem& problem, const std::vector<int32_t>& devices,
                   const std::vector<int32_t>& order,
                   const std::vector<std::vector<int32_t>>& clusters, int64_t budget,
                   int64_t target, uint64_t seed, int32_t from = 0, const Halt* halt = nullptr);

// Devices per op that balance the work and cut little, whatever the order; from a start on. `loads`
// are bytes per group, and a ns of transfer counts as `cut_weight` ns of work.
std::vector<int32_t> partition_search(const Problem& problem, const std::vector<int32_t>& devices,
                                      const std::vector<std::vector<int32_t>>& clusters,
                                      const std::vector<int64_t>& loads, double cut_weight,
                                      int32_t windows, int64_t moves, uint64_t seed,
                                      const Halt* halt = nullptr);

// A placement grown along time, `stretch` ops at once; without devices if an op finds none. Its
// cost is not computed. `clusters` and `seed` as above; `budget` in evaluated ops, which every
// stretch may pass by one evaluation.
Found grown(const Problem& problem, const std::vector<std::vector<int32_t>>& clusters,
            int32_t stretch, int64_t budget, uint64_t seed, const Halt* halt = nullptr);

// All ops in a topological order, each about as far from its producers as from its consumers (by
// trophic levels, see growth.cc): few tensors are in flight.
std::vector<int32_t> level_order(const Problem& problem);

// The members of every cluster, ascending.
Rows members_of(const std::vector<int32_t>& cluster);

// Per op the longest way from its start to the end of the step on those devices, with transfers.
std::vector<int64_t> ranks(const Problem& problem, const std::vector<int32_t>& devices);

// A topological order in which devices are not idle while an op could start, highest rank first.
std::vector<int32_t> list_order(const Problem& problem, const std::vector<int32_t>& devices,
                                const std::vector<int64_t>& rank);

}  // namespace baechi
