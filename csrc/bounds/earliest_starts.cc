#include "bounds/earliest_starts.h"

#include <algorithm>

namespace baechi {

namespace {

__extension__ typedef __int128 int128_t;

// Ancestors of an ancestor are considered only if there are at most so many.
constexpr int64_t kManyAncestors = 64;

// Ops that one device must run before a time, each from its release on.
class Serial {
 public:
  void clear() { items_.clear(); }
  int64_t end() const { return items_.empty() ? 0 : items_.front().end; }

  // Amortized O(1) where releases fall.
  void add(int64_t release, int64_t duration) {
    auto at = std::partition_point(items_.begin(), items_.end(),
                                   [&](const Item& item) { return item.release > release; });
    size_t i = static_cast<size_t>(at - items_.begin());
    items_.insert(at, {release, duration, 0});
    int64_t before = i + 1 < items_.size() ? items_[i + 1].end : 0;
    while (true) {
      const int64_t end = std::max(before, items_[i].release) + items_[i].duration;
      if (items_[i].end == end) break;
      items_[i].end = before = end;
      if (i-- == 0) break;
    }
  }

 private:
  struct Item {
    int64_t release, duration, end;
  };
  std::vector<Item> items_;  // by release, the latest first
};

// Earliest starts in one direction. Backward, producers and consumers swap roles.
class Starts {
 public:
  Starts(const Problem& problem, const Sites& sites, const Groups& groups, int32_t window,
         bool reverse)
      : problem_(problem),
        sites_(sites),
        groups_(groups),
        costs_(problem, sites),
        window_(window),
        reverse_(reverse),
        slots_(reverse ? problem.consumers.values.size() : static_cast<size_t>(problem.tensors)),
        starts_(static_cast<size_t>(sites.count) * problem.ops, kForever),
        remote_(slots_ * sites.count, kForever),
        local_(problem.ops, 0),
        seen_(problem.ops, 0),
        below_(problem.ops, 0),
        group_local_(groups.count(), 0),
        held_(groups.moments, 0) {}

  std::vector<int64_t> run() {
    for (int32_t i = 0; i < problem_.ops; ++i) {
      const int32_t op = reverse_ ? problem_.ops - 1 - i : i;
      for (int32_t site = 0; site < sites_.count; ++site) {
        if (groups_.possible(site, op)) start(op, site) = earliest(op, site);
      }
      send(op);
    }
    return std::move(starts_);
  }

 private:
  int64_t& start(int32_t op, int32_t site) {
    return starts_[static_cast<size_t>(site) * problem_.ops + op];
  }
  int64_t duration(int32_t op, int32_t site) const {
    return sites_.durations[static_cast<size_t>(site) * problem_.ops + op];
  }
  int64_t end(int32_t op, int32_t site) { return add(start(op, site), duration(op, site)); }
  // Earliest time of a slot's data on a device other than the producer's.
  int64_t& remote(int64_t slot, int32_t site) { return remote_[slot * sites_.count + site]; }

  int64_t degree(int32_t op) const {
    if (!reverse_) return problem_.inputs.size(op);
    int64_t sum = 0;
    for (int32_t t : Row(problem_.outputs, op)) sum += problem_.consumers.size(t);
    return sum;
  }

  // Calls f(slot, op) for every tensor that `op` waits for and the op that it comes from.
  template <typename F>
  void each_before(int32_t op, F f) {
    if (!reverse_) {
      for (int32_t t : Row(problem_.inputs, op)) f(t, problem_.producer[t]);
      return;
    }
    for (int32_t t : Row(problem_.outputs, op)) {
      for (int64_t i = problem_.consumers.begin[t]; i < problem_.consumers.begin[t + 1]; ++i) {
        f(i, problem_.consumers.values[i]);
      }
    }
  }

  void send(int32_t op) {
    if (!reverse_) {
      for (int32_t t : Row(problem_.outputs, op)) send(t, t, op);
      return;
    }
    for (int32_t t : Row(problem_.inputs, op)) {
      const int32_t* first = problem_.consumers.first(t);
      const int32_t* at = std::lower_bound(first, problem_.consumers.last(t), op);
      send(problem_.consumers.begin[t] + (at - first), t, op);
    }
  }

  void send(int64_t slot, int32_t tensor, int32_t op) {
    for (int32_t to = 0; to < sites_.count; ++to) {
      int64_t best = kForever;
      for (int32_t from = 0; from < sites_.count; ++from) {
        const int64_t cost = reverse_ ? costs_(tensor, to, from) : costs_(tensor, from, to);
        best = std::min(best, add(end(op, from), cost));
      }
      remote(slot, to) = best;
    }
  }

  int64_t earliest(int32_t op, int32_t site) {
    int64_t ready = 0;
    each_before(op, [&](int64_t slot, int32_t before) {
      int64_t here = end(before, site);
      if (groups_.of[before] != groups_.of[op]) here = std::min(here, remote(slot, site));
      ready = std::max(ready, here);
    });
    const bool known = ready == 0 || ready == kForever || window_ == 0;
    return known ? ready : std::max(ready, gathered(op, site, ready));
  }

  // Ancestors are taken one by one, starting with the one that would delay the op longest from
  // another device. Either there is a first one on another device, and the op waits for its
  // transfer and for those before it, which are here and run one at a time; or all are here.
  int64_t gathered(int32_t op, int32_t site, int64_t known) {
    ++epoch_;
    serial_.clear();
    heap_.clear();
    held_.assign(groups_.moments, 0);
    hold(groups_.of[op]);
    group_local_[groups_.of[op]] = epoch_;
    reach(op, site, 0);
    int64_t best = kForever;
    for (int32_t count = 0; best > known; ++count) {
      while (!heap_.empty() && local_[heap_.front().second] == epoch_) pop();
      if (heap_.empty() || count == window_) return std::min(best, serial_.end());
      const auto [away, before] = heap_.front();
      pop();
      best = std::min(best, std::max(away, serial_.end()));
      if (serial_.end() >= away || !groups_.possible(site, before)) return best;
      const int32_t group = groups_.of[before];
      if (group_local_[group] != epoch_) {
        group_local_[group] = epoch_;
        if (hold(group) > sites_.memory[site]) return best;
      }
      if (start(before, site) == kForever) return best;
      local_[before] = epoch_;
      serial_.add(start(before, site), duration(before, site));
      // Any ancestors may be left out. Those of an op with very many are reached from many others
      // too.
      if (degree(before) <= kManyAncestors) {
        reach(before, site, below_[before] + duration(before, site));
      }
    }
    return best;
  }

  // Adds a group to those here; returns the most bytes that they hold at once.
  int64_t hold(int32_t group) {
    int64_t most = 0;
    for (int32_t i = 0; i < groups_.moments; ++i) {
      held_[i] += groups_.bytes(group)[i];
      most = std::max(most, held_[i]);
    }
    return most;
  }

  // Offers the ops before `op`, which starts at least `distance` before the op that gathers.
  void reach(int32_t op, int32_t site, int64_t distance) {
    each_before(op, [&](int64_t slot, int32_t before) {
      if (local_[before] == epoch_) return;
      if (seen_[before] != epoch_) below_[before] = 0;
      seen_[before] = epoch_;
      below_[before] = std::max(below_[before], distance);
      const bool bound = group_local_[groups_.of[before]] == epoch_;
      heap_.emplace_back(bound ? kForever : add(remote(slot, site), distance), before);
      std::push_heap(heap_.begin(), heap_.end());
    });
  }

  void pop() {
    std::pop_heap(heap_.begin(), heap_.end());
    heap_.pop_back();
  }

  const Problem& problem_;
  const Sites& sites_;
  const Groups& groups_;
  const Costs costs_;
  const int32_t window_;
  const bool reverse_;
  const size_t slots_;
  std::vector<int64_t> starts_, remote_;
  // Scratch of `gathered`; entries of another epoch are from an earlier call.
  int32_t epoch_ = 0;
  std::vector<int32_t> local_, seen_;
  std::vector<int64_t> below_;
  std::vector<int32_t> group_local_;
  std::vector<int64_t> held_;  // per moment, what the gathered groups hold
  std::vector<std::pair<int64_t, int32_t>> heap_;
  Serial serial_;
};

}  // namespace

int64_t Costs::wide_ns(int64_t nbytes, int64_t rate) {
  const int128_t scaled = static_cast<int128_t>(nbytes) * 1'000'000'000;
  return static_cast<int64_t>((scaled + rate - 1) / rate);
}

std::vector<int64_t> earliest_starts(const Problem& problem, const Sites& sites,
                                     const Groups& groups, int32_t window, bool reverse) {
  return Starts(problem, sites, groups, window, reverse).run();
}

}  // namespace baechi
