// Earliest starts of ops, valid for every placement.
#pragma once

#include "bounds/bounds.h"

namespace baechi {

inline int64_t add(int64_t a, int64_t b) {
  return a == kForever || b == kForever ? kForever : a + b;
}

// Groups of ops assumed to share a device, and the sites where each could be.
struct Groups {
  std::vector<int32_t> of;       // per op
  std::vector<int64_t> held;     // held[group * moments + moment], bytes surely in memory then
  int32_t moments = 1;           // times that every schedule has
  std::vector<uint8_t> allowed;  // allowed[site * count() + group]

  int32_t count() const { return static_cast<int32_t>(held.size()) / moments; }
  const int64_t* bytes(int32_t group) const {
    return held.data() + static_cast<size_t>(group) * moments;
  }
  bool possible(int32_t site, int32_t op) const {
    return allowed[static_cast<size_t>(site) * count() + of[op]] != 0;
  }
};

// The cost of sending each tensor between sites.
class Costs {
 public:
  Costs(const Problem& problem, const Sites& sites) : problem_(problem), sites_(sites) {}

  int64_t operator()(int32_t tensor, int32_t from, int32_t to) const {
    const int64_t at = static_cast<int64_t>(from) * sites_.count + to;
    const int64_t latency = sites_.latency[at], rate = sites_.rate[at];
    if (latency == kForever || rate == 0) return latency;
    const int64_t nbytes = problem_.nbytes[tensor];
    // The wide division takes several times as long.
    if (nbytes < 9'000'000'000) {
      // Below 2^64, however fast the link.
      const uint64_t per_s = static_cast<uint64_t>(rate);
      const uint64_t scaled = static_cast<uint64_t>(nbytes) * 1'000'000'000 + per_s - 1;
      return latency + static_cast<int64_t>(scaled / per_s);
    }
    return latency + wide_ns(nbytes, rate);
  }

 private:
  static int64_t wide_ns(int64_t nbytes, int64_t rate);

  const Problem& problem_;
  const Sites& sites_;
};

// Per [site * ops + op]: no valid schedule in which the groups share devices starts `op` earlier at
// `site`, and with `reverse` none ends sooner after the op's end there; kForever where the op
// cannot be there. Of each op's ancestors at most `window` are gathered.
std::vector<int64_t> earliest_starts(const Problem& problem, const Sites& sites,
                                     const Groups& groups, int32_t window, bool reverse);

}  // namespace baechi
