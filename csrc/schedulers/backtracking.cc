// Backtracking over the devices of groups, for a given order of all ops.
//
// Once the groups of the first ops have devices, these ops can be committed by the one clock, and
// no later op changes their times or frees a tensor earlier: the peaks of a prefix are lower bounds
// on the peaks of every placement that extends it. So a node of the search has devices for some
// groups; it is a dead end where a prefix has no path or passes a memory, where a remaining group
// has no device with room for its persistent bytes and links to its neighbors, or where all
// remaining groups need more memory than there is.
//
// The next group is one with a single device left, or else the first in the order, whose ops come
// next; of groups without ops in the order, the largest. Depth-first search alone would never
// revise an unlucky choice at the top, so it restarts with other rules for the devices and longer
// runs, in the proportions of Luby, Sinclair, Zuckerman (Optimal speedup of Las Vegas algorithms,
// 1993). A run that ends before its budget is exhaustive.
//
// A node costs O(ops + tensors log tensors + groups * (devices + neighbors)).
#include <algorithm>
#include <utility>

#include "clock/core.h"
#include "search/random.h"

namespace baechi {

namespace {

// Nodes of the shortest run per group.
constexpr int64_t kNodes = 4;

// The i-th number of 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ..., i from 1.
int64_t luby(int64_t i) {
  int64_t power = 1;
  while (2 * power - 1 < i) power *= 2;
  return 2 * power - 1 == i ? power : luby(i - power + 1);
}

class Search {
 public:
  Search(const Problem& problem, const std::vector<int32_t>& order, uint64_t seed)
      : problem_(problem),
        order_(order),
        random_(seed),
        twin_(first_twins(problem)),
        home_(problem.groups, -1),
        on_(problem.devices, 0),
        place_(problem.groups, INT32_MAX) {
    for (int32_t i = 0; i < static_cast<int32_t>(order.size()); ++i) {
      int32_t& place = place_[problem.group[order[i]]];
      place = std::min(place, i);
    }
    for (int32_t g = 0; g < problem.groups; ++g) left_.push_back(g);
    std::sort(left_.begin(), left_.end(), [&](int32_t a, int32_t b) {
      if (place_[a] != place_[b]) return place_[a] < place_[b];
      return problem.group_persistent[a] > problem.group_persistent[b] ||
             (problem.group_persistent[a] == problem.group_persistent[b] && a < b);
    });
    link();
    // A timeline reserves these, too.
    for (int32_t g = 0; g < static_cast<int32_t>(problem.only.size()); ++g) {
      if (problem.only[g] >= 0) settle(g, problem.only[g]);
    }
  }

  Backtracked run(int64_t budget) {
    if (problem_.groups == 0) return {{}, false};
    const int64_t node = 1 + (problem_.groups + static_cast<int64_t>(order_.size())) / 2;
    const int64_t shortest = kNodes * problem_.groups * node;
    for (int64_t number = 1; spent_ < budget; ++number) {
      limit_ = std::min(budget, spent_ + luby(number) * shortest);
      rule_ = static_cast<int>((number - 1) % kRules);
      const bool found = extend();
      if (found) return {home_, false};
      if (spent_ < limit_) return {{}, true};
    }
    return {{}, false};
  }

 private:
  // The device with the most room first, or with the least, or where most neighbors are, or any.
  enum { kMost, kLeast, kNear, kAny, kRules };

  // Pairs of devices that reach each other, and pairs of groups that exchange tensors.
  void link() {
    const int32_t n = problem_.devices;
    reaches_.assign(static_cast<size_t>(n) * n, 0);
    for (int32_t a = 0; a < n; ++a) {
      for (int32_t b = 0; b < n; ++b) {
        for (int32_t via : Row(problem_.pool_devices, problem_.pool[b])) {
          const bool there = a == via || problem_.has_path(a, via);
          if (there && (via == b || problem_.has_path(via, b))) reaches_[a * n + b] = 1;
        }
      }
    }
    neighbors_.resize(problem_.groups);
    for (int32_t t = 0; t < problem_.tensors; ++t) {
      const int32_t src = problem_.group[problem_.producer[t]];
      for (int32_t consumer : Row(problem_.consumers, t)) {
        const int32_t dst = problem_.group[consumer];
        if (src == dst) continue;
        neighbors_[src].push_back({dst, true});
        neighbors_[dst].push_back({src, false});
      }
    }
    for (auto& row : neighbors_) {
      std::sort(row.begin(), row.end());
      row.erase(std::unique(row.begin(), row.end()), row.end());
    }
  }

  void settle(int32_t group, int32_t device) {
    home_[group] = device;
    used_ += on_[device]++ == 0;
  }

  void unsettle(int32_t group) {
    used_ -= --on_[home_[group]] == 0;
    home_[group] = -1;
  }

  // Free bytes of the pools at their lowest possible peaks; false at a dead end.
  bool look(std::vector<int64_t>& room) {
    Timeline timeline(problem_);
    for (int32_t g = 0; g < problem_.groups; ++g) {
      if (home_[g] >= 0) timeline.reserve(*problem_.group_ops.first(g), home_[g]);
    }
    bool linked = true;
    ++spent_;
    for (int32_t op : order_) {
      const int32_t home = home_[problem_.group[op]];
      if (home < 0) break;
      ++spent_;
      if (!timeline.earliest_start(op, home)) {
        linked = false;
        break;
      }
      timeline.commit(op, home);
    }
    if (!linked) return false;
    room = timeline.least_peaks();
    for (int32_t pool = 0; pool < problem_.pools; ++pool) {
      room[pool] = problem_.memory[pool] - room[pool];
      if (room[pool] < 0) return false;
    }
    return true;
  }

  bool may(int32_t group, int32_t device, const std::vector<int64_t>& room, bool full) const {
    if (!problem_.allows(group, device)) return false;
    if (room[problem_.pool[device]] < problem_.group_persistent[group]) return false;
    if (on_[device] == 0 && full) return false;
    for (const auto& [other, sends] : neighbors_[group]) {
      const int32_t home = home_[other];
      if (home < 0) continue;
      const int32_t src = sends ? device : home, dst = sends ? home : device;
      if (!reaches_[src * problem_.devices + dst]) return false;
    }
    return true;
  }

  // Devices of all groups that have none yet.
  bool extend() {
    std::vector<int64_t> room;
    if (spent_ >= limit_ || !look(room)) return false;
    const bool full = used_ >= problem_.max_devices;
    int32_t next = -1, fewest = INT32_MAX;
    double needed = 0, there = 0;
    for (int64_t bytes : room) there += static_cast<double>(bytes);
    for (int32_t group : left_) {
      if (home_[group] >= 0) continue;
      ++spent_;
      needed += static_cast<double>(problem_.group_persistent[group]);
      int32_t count = 0;
      for (int32_t d = 0; d < problem_.devices && count < 2; ++d)
        count += may(group, d, room, full);
      if (count == 0) return false;
      if (next < 0 || (count == 1 && fewest > 1)) {
        next = group;
        fewest = count;
      }
    }
    if (next < 0) return true;
    if (needed > there) return false;
    for (const auto& [score, device] : choices(next, room, full)) {
      settle(next, device);
      if (extend()) return true;
      unsettle(next);
    }
    return false;
  }

  // Devices for a group, the most promising first. Of unused twins only the first.
  std::vector<std::pair<double, int32_t>> choices(int32_t group, const std::vector<int64_t>& room,
                                                  bool full) {
    std::vector<std::pair<double, int32_t>> rows;
    for (int32_t d = 0; d < problem_.devices; ++d) {
      if (!may(group, d, room, full)) continue;
      if (on_[d] == 0 && std::any_of(rows.begin(), rows.end(), [&](const auto& row) {
            return on_[row.second] == 0 && twin_[row.second] == twin_[d];
          })) {
        continue;
      }
      rows.emplace_back(score(group, d, room), d);
    }
    std::sort(rows.begin(), rows.end());
    return rows;
  }

  double score(int32_t group, int32_t device, const std::vector<int64_t>& room) {
    const double left = static_cast<double>(room[problem_.pool[device]]);
    const double chance = random_.unit();
    switch (rule_) {
      case kMost:
        return -left * (1 + chance / 4);
      case kLeast:
        return left * (1 + chance / 4);
      case kNear: {
        double near = chance;
        for (const auto& [other, sends] : neighbors_[group]) near += home_[other] == device;
        return -near;
      }
      default:
        return chance;
    }
  }

  const Problem& problem_;
  const std::vector<int32_t>& order_;
  Random random_;
  const std::vector<int32_t> twin_;
  std::vector<int32_t> home_;   // per group, its device or -1
  std::vector<int32_t> on_;     // per device, groups there
  std::vector<int32_t> place_;  // per group, where its first op is in the order
  std::vector<int32_t> left_;   // groups by place
  int32_t used_ = 0;
  std::vector<uint8_t> reaches_;                                  // source, destination
  std::vector<std::vector<std::pair<int32_t, bool>>> neighbors_;  // per group; whether it sends
  int rule_ = kMost;
  int64_t spent_ = 0, limit_ = 0;
};

}  // namespace

Backtracked backtrack(const Problem& problem, const std::vector<int32_t>& order, int64_t budget,
                      uint64_t seed) {
  return Search(problem, order, seed).run(budget);
}

}  // namespace baechi
