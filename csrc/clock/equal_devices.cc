// Devices that differ only in their indices.
#include <algorithm>

#include "clock/core.h"

namespace baechi {

namespace {

// A hash of a link.
uint64_t mixed(const Problem& problem, int32_t src, int32_t dst, uint64_t salt) {
  uint64_t x = salt + 0x9e3779b97f4a7c15u;
  for (const int64_t part : {problem.latency_ns(src, dst), problem.bytes_per_s(src, dst),
                             problem.overhead_ns(src, dst)}) {
    x = (x ^ static_cast<uint64_t>(part)) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
  }
  return x;
}

class Twins {
 public:
  explicit Twins(const Problem& problem)
      : problem_(problem),
        uniform_(problem.latency.values.size() == 1 && problem.rate.values.size() == 1) {
    if (uniform_) return;
    sums_.assign(problem.devices, 0);
    for (int32_t a = 0; a < problem.devices; ++a) {
      for (int32_t b = 0; b < problem.devices; ++b) {
        if (a != b) sums_[a] += both_ways(a, b);
      }
    }
  }

  bool equal(int32_t a, int32_t b) const {
    if (!problem_.launch.empty() && !same_host(a, b)) return false;
    const int32_t pools[] = {problem_.pool[a], problem_.pool[b]};
    if (problem_.device_class[a] != problem_.device_class[b]) return false;
    if (problem_.memory[pools[0]] != problem_.memory[pools[1]]) return false;
    for (int32_t pool : pools) {
      if (problem_.pool_devices.size(pool) > 1) return false;
    }
    if (!problem_.allowed.empty()) {
      const uint8_t* rows = problem_.allowed.data();
      const int64_t width = problem_.groups;
      if (!std::equal(rows + a * width, rows + (a + 1) * width, rows + b * width)) return false;
    }
    return uniform_ || equal_links(a, b);
  }

 private:
  // Devices that are alone on their hosts differ in its index alone.
  bool same_host(int32_t a, int32_t b) const {
    const std::vector<int32_t>& host = problem_.host;
    if (problem_.ahead[a] != problem_.ahead[b] || (host[a] < 0) != (host[b] < 0)) return false;
    return host[a] == host[b] || (alone_on_host(host[a]) && alone_on_host(host[b]));
  }
  bool alone_on_host(int32_t index) const {
    return std::count(problem_.host.begin(), problem_.host.end(), index) == 1;
  }

  // The links between `a` and another device; the same for twins of `a`.
  uint64_t both_ways(int32_t a, int32_t b) const {
    const uint64_t salt = static_cast<uint64_t>(b);
    return mixed(problem_, a, b, 2 * salt) + mixed(problem_, b, a, 2 * salt + 1);
  }

  bool same(int32_t a, int32_t b, int32_t c, int32_t d) const {
    return problem_.latency_ns(a, b) == problem_.latency_ns(c, d) &&
           problem_.bytes_per_s(a, b) == problem_.bytes_per_s(c, d) &&
           problem_.overhead_ns(a, b) == problem_.overhead_ns(c, d);
  }

  bool equal_links(int32_t a, int32_t b) const {
    // Different sums, less the links between the two, rule it out at once.
    if (sums_[a] - both_ways(a, b) != sums_[b] - both_ways(b, a) || !same(a, b, b, a)) return false;
    for (int32_t c = 0; c < problem_.devices; ++c) {
      if (c == a || c == b) continue;
      if (!same(a, c, b, c) || !same(c, a, c, b)) return false;
    }
    return true;
  }

  const Problem& problem_;
  const bool uniform_;
  std::vector<uint64_t> sums_;  // per device, of its links with all others
};

}  // namespace

std::vector<int32_t> first_twins(const Problem& problem) {
  const Twins twins(problem);
  std::vector<int32_t> first(problem.devices), firsts;
  for (int32_t device = 0; device < problem.devices; ++device) {
    // Twins form equivalence classes, so one of each represents all.
    const auto found = std::find_if(firsts.begin(), firsts.end(),
                                    [&](int32_t other) { return twins.equal(other, device); });
    first[device] = found == firsts.end() ? device : *found;
    if (found == firsts.end()) firsts.push_back(device);
  }
  return first;
}

}  // namespace baechi
