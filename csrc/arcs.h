// The edges of the interior point's program, and where they are in its matrix.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "quasidefinite.h"

namespace baechi {

// An edge, or the way to an op without parents (src -1), or from one without children (dst behind
// all ops).
struct Arc {
  int32_t src, dst;
  double length, cost;
  std::array<int32_t, 2> choices{-1, -1};  // of src and dst, where there is something to choose
};

// Places off the diagonal, in the order of the values that `Interior::build` lists.
inline std::vector<Quasidefinite::Entry> places(const std::vector<Arc>& arcs,
                                                int32_t first_choice) {
  std::vector<Quasidefinite::Entry> places;
  for (const Arc& arc : arcs) {
    if (arc.src >= 0) places.emplace_back(arc.src, arc.dst);
    for (int32_t c : arc.choices)
      if (c >= 0)
        places.emplace_back(arc.src, first_choice + c),
            places.emplace_back(arc.dst, first_choice + c);
    const auto [parent, child] = arc.choices;
    if (parent >= 0 && child >= 0) places.emplace_back(first_choice + parent, first_choice + child);
  }
  return places;
}

}  // namespace baechi
