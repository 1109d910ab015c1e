// In what order a sparse symmetric matrix fills least.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace baechi {

// Unknowns in the order in which they are eliminated, and the tree that this makes of them.
struct Elimination {
  std::vector<int32_t> sequence;
  std::vector<int32_t> parent;  // of every unknown, the first below it that is eliminated; or -1
  std::vector<int32_t> height;  // of every unknown, how many are below it
  // Some are eliminated in one go: below the first of them, their leader, are the others, then the
  // rows that all share. Only leaders have rows, in no order but that.
  std::vector<int32_t> leader;
  std::vector<std::vector<int32_t>> rows;
  double work = 0;  // multiplications of a factorization
};

// Approximate minimum degree (Amestoy, Davis and Duff 1996). `near` has the neighbors of every
// unknown, of both, each once; unknowns of a lower stage go before those of higher ones. Where a
// factorization would take more than `most_work`, that much is known of the work, and nothing else.
Elimination least_degree_first(const std::vector<std::vector<int32_t>>& near,
                               std::vector<int32_t> stage,
                               double most_work = std::numeric_limits<double>::infinity());

}  // namespace baechi
