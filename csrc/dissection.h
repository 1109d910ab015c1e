// When unknowns of a sparse system should be eliminated: parts of the graph first, what lies
// between them afterwards.
#pragma once

#include <cstdint>
#include <vector>

namespace baechi {

// The stage of every unknown; those of a lower stage go first, in any order. Nested dissection
// (George 1973): unknowns of stage 0 fall into parts with no edge between them, and what separates
// two parts is the smallest set that does so near the middle of them. The middle is told by
// `position`: neighbors should be close in it. `near` has the neighbors of every unknown, of both.
// O(edges * separator) at worst per level of the recursion; a few passes in practice.
std::vector<int32_t> dissect(const std::vector<std::vector<int32_t>>& near,
                             const std::vector<double>& position);

}  // namespace baechi
