// First-order solver of the linear program for favorite children (`placers/linear_programs.py`),
// for graphs too large for a general solver.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace baechi {

// Op i takes times[i] >= 0; edge e, from src[e] to a higher dst[e], costs cost[e] >= 0 of time, of
// which a share y[e] >= 0 can be saved. Where the cost is 0, so is the share. The shares of the
// edges out of an op add up to at most 1, and so do those into an op.
struct Transfers {
  std::vector<double> times;
  std::vector<int32_t> src, dst;
  std::vector<double> cost;
};

struct Shares {
  std::vector<double> y;   // per edge
  double objective = 0;    // the longest path with these shares
  double bound = 0;        // no shares have a shorter one
  int32_t iterations = 0;  // gradient steps taken
};

// Per op, the longest path up to its start, and from its end, where edge e takes length[e] >= 0;
// edges are sorted by src. O(ops + edges).
std::pair<std::vector<double>, std::vector<double>> longest_paths(
    const std::vector<double>& times, const std::vector<int32_t>& src,
    const std::vector<int32_t>& dst, const std::vector<double>& length);

// Shares with objective <= (1 + tolerance) * bound, or the best met in `max_iterations` steps of
// O(ops + edges) each.
Shares save_transfers(const Transfers& transfers, double tolerance, int32_t max_iterations);

}  // namespace baechi
