// Local search over placements, by simulated annealing with restarts from the best.
//
// A state is a device per group and an order of all ops, evaluated by `Trial`. A step proposes one
// change, draws a limit on the time beforehand, and evaluates only up to that limit, so that most
// proposals end early. Memory is checked only if the time is good enough. As long as nothing has
// fitted, the cost is the memory that is missing over time, what changes is mostly what is held
// where most is missing, and the order is not listed anew, since that would not look at memory.
//
// One seeded generator, and no function whose last bit differs between machines: equal input gives
// equal output. The budget is counted in evaluated ops.
#include "search/local_search.h"

#include <algorithm>
#include <cmath>

#include "search/random.h"
#include "search/trial.h"

namespace baechi {

namespace {

class Search {
 public:
  Search(const Problem& problem, const std::vector<int32_t>& devices,
         const std::vector<int32_t>& order, const std::vector<std::vector<int32_t>>& clusters,
         uint64_t seed, int32_t from, const Halt* halt)
      : problem_(problem),
        trial_(problem, devices, order),
        random_(seed),
        cluster_of_(clusters),
        from_(from),
        halt_(halt) {
    for (const std::vector<int32_t>& cluster : clusters) levels_.push_back(members_of(cluster));
  }

  Found run(int64_t budget, int64_t target) {
    if (!trial_.valid()) {
      // Worse than anything.
      return {trial_.devices(), trial_.order(), kForever / 4, kForever / 4, 0};
    }
    if (problem_.ops > 0) {
      double work = 0;
      for (int32_t d = 0; d < problem_.devices; ++d) work += static_cast<double>(trial_.work(d));
      scale_ = work / problem_.ops;
    }
    current_ = state();
    remember();
    if (problem_.ops == 0) return best_;
    double memory = 0;
    for (int64_t nbytes : problem_.memory) memory += static_cast<double>(nbytes);
    least_price_ = 1e-2 * static_cast<double>(best_.makespan) / std::max(1.0, memory);
    price_ = least_price_ * 100;
    if (from_ == 0) relist();
    const int64_t begin = spent();
    const double cycles = static_cast<double>(
        std::clamp<int64_t>((budget - begin) / (kCycle * problem_.ops), kFewest, kMost));
    while (spent() < budget && (best_.overflow > 0 || best_.makespan > target) && !halted(halt_)) {
      const double progress = static_cast<double>(spent() - begin) /
                              static_cast<double>(std::max<int64_t>(1, budget - begin));
      const double cycle = progress * cycles - std::floor(progress * cycles);
      const double heat = scale_ * kHot * cooling_.at(cycle);
      if (++proposals_ % 64 == 0) focus();
      if (cycle < last_cycle_) restart();
      last_cycle_ = cycle;
      const bool listing =
          from_ == 0 && cycle < kListing && problem_.devices > 1 && best_.overflow == 0;
      if (listing ? !reassign() : !propose()) {
        trial_.undo();
        continue;
      }
      if (listing) list();
      const double limit = cost(current_) + heat * random_.exponential();
      const double left = limit - static_cast<double>(trial_.least_overflow()) * price_;
      if (left < 0 || !trial_.evaluate(static_cast<int64_t>(std::min(left, 4e18)))) {
        trial_.undo();
        continue;
      }
      const State candidate = state();
      if (cost(candidate) <= limit) {
        trial_.keep();
        current_ = candidate;
        if (is_better(candidate)) remember();
        if (++kept_ % 32 == 0) weigh();
      } else {
        trial_.undo();
      }
    }
    best_.evaluations = spent();
    return best_;
  }

 private:
  // Cycles of cooling, each from the best on: evaluations of the whole order in one, and how many
  // there are at least and at most. The heat at their begin, in mean op times; and the part of a
  // cycle in which the order is listed anew. All were found by trying.
  static constexpr int64_t kCycle = 20'000, kFewest = 3, kMost = 20;
  static constexpr double kHot = 0.1, kListing = 0.4;
  // Weights of a ns of a device's last end and of a transfer, in ns of makespan (for a transfer per
  // mean op time): of equal steps the one with fewer transfers wins.
  static constexpr double kFinish = 1.0 / 1024, kTransfer = 1.0 / 1024;

  // Weight of a byte that is missing on average over the step, in bytes missing at a peak. A peak
  // alone would not tell whether a change helps where there are several.
  static constexpr double kOverTime = 8;

  // Cost of a placement: ns, the sum of the devices' last ends, and bytes that do not fit.
  struct State {
    int64_t makespan;
    double finishes;
    int64_t transfers;
    Overflow overflow;
  };

  State state() {
    return {trial_.makespan(), trial_.finishes(), trial_.transfers(), trial_.overflow()};
  }

  // The makespan, the tie-breaker, and a price per byte that does not fit.
  double cost(const State& state) const {
    double missing = static_cast<double>(state.overflow.bytes);
    if (best_.overflow > 0) missing += kOverTime * state.overflow.mean_bytes;
    return static_cast<double>(state.makespan) + aside(state) + missing * price_;
  }

  // The tie-breaker of equal makespans.
  double aside(const State& state) const {
    return state.finishes * kFinish / problem_.devices +
           static_cast<double>(state.transfers) * kTransfer * scale_;
  }

  bool is_better(const State& state) const {
    if (state.overflow.bytes != best_.overflow) return state.overflow.bytes < best_.overflow;
    return state.makespan != best_.makespan ? state.makespan < best_.makespan
                                            : aside(state) < best_aside_;
  }

  void remember() {
    best_ = {trial_.devices(), trial_.order(), current_.makespan, current_.overflow.bytes, 0};
    best_aside_ = aside(current_);
    focus();
  }

  void restart() {
    trial_.reset(best_.devices, best_.order);
    current_ = state();
    focus();
  }

  // The ops that most changes are about.
  void focus() {
    const Overflow& overflow = current_.overflow;
    focus_ = best_.overflow > 0 && overflow.bytes > 0 ? trial_.crowd(overflow.pool, overflow.time)
                                                      : trial_.critical();
  }

  // The price of memory rises while it does not suffice, and falls while it does.
  void weigh() {
    price_ *= current_.overflow.bytes > 0 ? 1.3 : 0.8;
    price_ = std::clamp(price_, least_price_, least_price_ * 1e6);
  }

  // A proposal costs something, too, even one that changes nothing.
  int64_t spent() const { return trial_.evaluations() + proposals_ + listed_; }

  // The order that the devices suggest, at the cost of evaluating it four times.
  void list() {
    trial_.reorder(list_order(problem_, trial_.devices(), ranks(problem_, trial_.devices())));
    listed_ += 4 * problem_.ops;
  }

  void relist() {
    list();
    if (trial_.evaluate(kForever) && is_better(state())) {
      trial_.keep();
      current_ = state();
      remember();
    } else {
      trial_.undo();
    }
  }

  bool propose() {
    return problem_.devices == 1 || random_.below(16) < 5 ? shift(pick()) : reassign();
  }

  // An op that makes the step long or the memory full, or any.
  int32_t pick() {
    if (random_.below(2) == 0 && !focus_.empty()) {
      const int32_t op = focus_[random_.below(static_cast<int32_t>(focus_.size()))];
      if (trial_.position(op) >= from_) return op;
    }
    if (from_ == 0) return random_.below(problem_.ops);
    return trial_.order()[from_ + random_.below(problem_.ops - from_)];
  }

  bool reassign() {
    const int32_t op = pick(), kind = random_.below(11);
    if (kind < 4) return move(problem_.group[op], target(op));
    if (kind < 7) return move_cluster(op, target(op));
    if (kind < 9) return swap(op);
    return move_run(op, target(op));
  }

  bool move(int32_t group, int32_t device) {
    if (trial_.device(*problem_.group_ops.first(group)) == device) return false;
    if (!problem_.allows(group, device)) return false;
    trial_.move_group(group, device);
    return true;
  }

  // The device of a neighbor, if that is another one; else any other.
  int32_t target(int32_t op) {
    const int32_t here = trial_.device(op);
    const int32_t other = random_.below(4) > 0 ? random_neighbor(problem_, op, random_) : -1;
    if (other >= 0 && trial_.device(other) != here) return trial_.device(other);
    const int32_t device = random_.below(problem_.devices - 1);
    return device + (device >= here ? 1 : 0);
  }

  // The groups of a cluster that are where this op is, to another device.
  bool move_cluster(int32_t op, int32_t device) {
    if (levels_.empty()) return false;
    const int32_t level = random_.below(static_cast<int32_t>(levels_.size()));
    const int32_t here = trial_.device(op);
    bool moved = false;
    for (int32_t group : Row(levels_[level], cluster_of_[level][problem_.group[op]])) {
      if (trial_.device(*problem_.group_ops.first(group)) == here) moved |= move(group, device);
    }
    return moved;
  }

  // Two groups change places.
  bool swap(int32_t op) {
    const int32_t here = trial_.device(op);
    int32_t other = from_ == 0 ? random_.below(problem_.ops)
                               : trial_.order()[from_ + random_.below(problem_.ops - from_)];
    if (random_.below(2) == 0) {
      // One that runs at about the same time.
      const int32_t at = trial_.position(op) + random_.below(33) - 16;
      if (at >= 0 && at < problem_.ops) other = trial_.order()[at];
    }
    const int32_t there = trial_.device(other);
    if (here == there) return false;
    return move(problem_.group[op], there) && move(problem_.group[other], here);
  }

  // Some ops in a row on one device, from this one on forward or backward, to another device.
  bool move_run(int32_t op, int32_t device) {
    const int32_t here = trial_.device(op), step = random_.below(2) == 0 ? 1 : -1;
    int32_t left = 2 + random_.below(1 << (1 + random_.below(6)));
    const std::vector<int32_t>& order = trial_.order();
    bool moved = false;
    for (int32_t at = trial_.position(op); at >= 0 && at < problem_.ops && left > 0; at += step) {
      if (trial_.device(order[at]) == here) {
        moved |= move(problem_.group[order[at]], device);
        --left;
      }
    }
    return moved;
  }

  // Earlier or later in the order, past one or more ops of its device.
  bool shift(int32_t op) {
    const int32_t at = trial_.position(op), here = trial_.device(op);
    const std::vector<int32_t>& order = trial_.order();
    int32_t passes = 1 + random_.below(1 << random_.below(4)), to = at;
    if (random_.below(2) == 0) {
      int32_t low = 0;
      for (int32_t tensor : Row(problem_.inputs, op)) {
        low = std::max(low, trial_.position(problem_.producer[tensor]) + 1);
      }
      for (int32_t i = at - 1; i >= low && passes > 0; --i) {
        if (trial_.device(order[i]) == here) {
          to = i;
          --passes;
        }
      }
      if (to == at && low < at) to = low + random_.below(at - low);
    } else {
      int32_t high = problem_.ops - 1;
      for (int32_t tensor : Row(problem_.outputs, op)) {
        for (int32_t consumer : Row(problem_.consumers, tensor)) {
          high = std::min(high, trial_.position(consumer) - 1);
        }
      }
      for (int32_t i = at + 1; i <= high && passes > 0; ++i) {
        if (trial_.device(order[i]) == here) {
          to = i;
          --passes;
        }
      }
      if (to == at && high > at) to = at + 1 + random_.below(high - at);
    }
    if (to == at) return false;
    trial_.move_op(op, to);
    return true;
  }

  const Problem& problem_;
  Trial trial_;
  Random random_;
  Cooling cooling_{3};
  std::vector<Rows> levels_;
  const std::vector<std::vector<int32_t>>& cluster_of_;
  const int32_t from_;
  const Halt* const halt_;
  std::vector<int32_t> focus_;
  State current_ = {0, 0, 0, {}};
  double best_aside_ = 0, scale_ = 0;
  int64_t proposals_ = 0, listed_ = 0, kept_ = 0;
  double price_ = 0, least_price_ = 0;
  double last_cycle_ = 0;
  Found best_;
};

}  // namespace

Rows members_of(const std::vector<int32_t>& cluster) {
  int32_t count = 0;
  for (int32_t c : cluster) count = std::max(count, c + 1);
  return places(cluster, count);
}

Found local_search(const Problem& problem, const std::vector<int32_t>& devices,
                   const std::vector<int32_t>& order,
                   const std::vector<std::vector<int32_t>>& clusters, int64_t budget,
                   int64_t target, uint64_t seed, int32_t from, const Halt* halt) {
  return Search(problem, devices, order, clusters, seed, from, halt).run(budget, target);
}

}  // namespace baechi
