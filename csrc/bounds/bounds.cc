#include "bounds/bounds.h"

#include <algorithm>

#include "bounds/earliest_starts.h"
#include "bounds/surely_held.h"

namespace baechi {

namespace {

__extension__ typedef __int128 int128_t;

// A guess joins ops into large groups, whose ops would always gather the maximum of ancestors.
constexpr int32_t kGuessWindow = 24;

// Bounds on schedules in which each of these groups shares a device.
class Relaxation {
 public:
  Relaxation(const Problem& problem, const Sites& sites, const Effort& effort,
             const Moments& moments)
      : problem_(problem), sites_(sites), effort_(effort), moments_(moments) {
    groups_ = {problem.group.copy(), {}, moments.count(), sites.allowed};
    weigh();
    update();
  }

  int64_t path() const { return path_; }

  // The work of the whole step; added to the larger of it and the path bound, the excess of the
  // work required between two times over the capacity of all devices (Fernandez and Bussell 1973).
  int64_t work() const {
    if (path_ == kForever) return kForever;
    const int64_t floor = std::max(path_, whole());
    int64_t longest = floor;
    std::vector<int64_t> from, to;
    for (int32_t op = 0; op < problem_.ops; ++op) {
      const int32_t site = nearest(op);
      const size_t at = index(op, site);
      from.push_back(heads_[at]);
      to.push_back(floor - tails_[at]);
    }
    from = spread(from);
    to = spread(to);
    for (size_t row = 0; row < sites_.weight_sums.size(); ++row) {
      for (int64_t begin : from) longest = std::max(longest, floor + excess(row, begin, to, floor));
    }
    return longest;
  }

  // Joins ops that a schedule shorter than `guess` cannot separate, and removes from each group the
  // sites that would make it too long. Returns whether anything changed.
  bool assume(int64_t guess) {
    effort_.window = std::min(effort_.window, kGuessWindow);
    const size_t count = static_cast<size_t>(groups_.count());
    bool changed = false;
    for (int32_t op = 0; op < problem_.ops; ++op) {
      for (int32_t site = 0; site < sites_.count; ++site) {
        uint8_t& allowed = groups_.allowed[site * count + groups_.of[op]];
        if (allowed && length(op, site) >= guess) {
          allowed = 0;
          changed = true;
        }
      }
    }
    Union groups(groups_.count());
    const Costs costs(problem_, sites_);
    bool joined = false;
    for (int32_t t = 0; t < problem_.tensors; ++t) {
      const int32_t producer = problem_.producer[t];
      for (int32_t consumer : Row(problem_.consumers, t)) {
        const int32_t a = groups_.of[producer], b = groups_.of[consumer];
        if (groups.find(a) == groups.find(b)) continue;
        if (apart(costs, t, producer, consumer, guess)) continue;
        groups.join(a, b);
        joined = true;
      }
    }
    if (joined) join(groups);
    if (joined || changed) update();
    return joined || changed;
  }

  // Whether some op or group has no device left.
  bool refuted() const { return path_ == kForever; }

 private:
  size_t index(int32_t op, int32_t site) const {
    return static_cast<size_t>(site) * problem_.ops + op;
  }
  int64_t weight(size_t row, int32_t site) const {
    return sites_.weights[row * sites_.count + site];
  }
  static int64_t ceil_div(int128_t a, int64_t b) { return static_cast<int64_t>((a + b - 1) / b); }

  // All devices at work all the time, every op on its best site.
  int64_t whole() const {
    int64_t longest = 0;
    for (size_t row = 0; row < sites_.weight_sums.size(); ++row) {
      int128_t sum = 0;
      for (int32_t op = 0; op < problem_.ops; ++op) {
        int128_t least = -1;
        for (int32_t site = 0; site < sites_.count; ++site) {
          if (length(op, site) == kForever) continue;
          const int128_t busy =
              static_cast<int128_t>(weight(row, site)) * sites_.durations[index(op, site)];
          if (least < 0 || busy < least) least = busy;
        }
        sum += std::max<int128_t>(least, 0);
      }
      longest = std::max(longest, ceil_div(sum, sites_.weight_sums[row]));
    }
    return longest;
  }

  void update() {
    heads_ = earliest_starts(problem_, sites_, groups_, effort_.window, false);
    tails_ = earliest_starts(problem_, sites_, groups_, effort_.window, true);
    path_ = 0;
    for (int32_t op = 0; op < problem_.ops; ++op) {
      path_ = std::max(path_, length(op, nearest(op)));
    }
    if (path_ < kForever) path_ = std::max(path_, longest_group());
  }

  // A group's ops run on one device, one at a time; kForever where no site has all of them.
  int64_t longest_group() const {
    const size_t count = static_cast<size_t>(groups_.count());
    std::vector<int64_t> times(count), least(count, kForever);
    for (int32_t site = 0; site < sites_.count; ++site) {
      std::fill(times.begin(), times.end(), 0);
      for (int32_t op = 0; op < problem_.ops; ++op) {
        int64_t& time = times[groups_.of[op]];
        time =
            length(op, site) == kForever ? kForever : add(time, sites_.durations[index(op, site)]);
      }
      for (size_t group = 0; group < count; ++group) {
        least[group] = std::min(least[group], times[group]);
      }
    }
    int64_t longest = 0;
    for (int64_t time : least) longest = std::max(longest, time);
    return longest;
  }

  int64_t length(int32_t op, int32_t site) const {
    const size_t at = index(op, site);
    return add(add(heads_[at], tails_[at]), sites_.durations[at]);
  }

  int32_t nearest(int32_t op) const {
    int32_t best = 0;
    for (int32_t site = 1; site < sites_.count; ++site) {
      if (length(op, site) < length(op, best)) best = site;
    }
    return best;
  }

  // At most `thresholds` of the values, spread over their ranks, ascending.
  std::vector<int64_t> spread(std::vector<int64_t> values) const {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    const size_t most = static_cast<size_t>(effort_.thresholds);
    if (values.size() <= most) return values;
    std::vector<int64_t> chosen;
    for (size_t i = 0; i < most; ++i) {
      chosen.push_back(values[i * (values.size() - 1) / std::max<size_t>(1, most - 1)]);
    }
    return chosen;
  }

  // The largest of (work required in [begin, end]) / speed - (end - begin), rounded up, over
  // `ends`, for a step of `floor`. From max(begin, its latest start) on, an op does the work that
  // it could not do before `begin`; of several sites the least counts, as if done at the end of the
  // last.
  int64_t excess(size_t row, int64_t begin, const std::vector<int64_t>& ends, int64_t floor) const {
    // Work done by `end` is constant + slope * end.
    std::vector<int128_t> constant(ends.size() + 1, 0), slope(ends.size() + 1, 0);
    const auto bin = [&](int64_t time) {
      return std::lower_bound(ends.begin(), ends.end(), time) - ends.begin();
    };
    for (int32_t op = 0; op < problem_.ops; ++op) {
      int128_t amount = -1;
      int64_t last = 0, steepest = 0;
      for (int32_t site = 0; site < sites_.count; ++site) {
        const size_t at = index(op, site);
        if (length(op, site) == kForever) continue;
        const int64_t time = sites_.durations[at];
        const int64_t inside = std::min(time, heads_[at] + time - begin);
        const int64_t latest = std::max(begin, floor - tails_[at] - time);
        const int128_t busy =
            static_cast<int128_t>(weight(row, site)) * std::max<int64_t>(0, inside);
        if (amount < 0 || busy < amount) amount = busy;
        last = std::max(last, latest + std::max<int64_t>(0, inside));
        steepest = std::max(steepest, weight(row, site));
      }
      if (amount <= 0) continue;
      const auto first = bin(last - static_cast<int64_t>(amount / steepest)), full = bin(last);
      constant[first] += amount - static_cast<int128_t>(steepest) * last;
      slope[first] += steepest;
      constant[full] += static_cast<int128_t>(steepest) * last;
      slope[full] -= steepest;
    }
    int64_t most = 0;
    int128_t fixed = 0, rising = 0;
    for (size_t i = 0; i < ends.size(); ++i) {
      fixed += constant[i];
      rising += slope[i];
      if (ends[i] <= begin) continue;
      const int64_t busy = ceil_div(fixed + rising * ends[i], sites_.weight_sums[row]);
      most = std::max(most, busy - (ends[i] - begin));
    }
    return most;
  }

  // Whether producer and consumer could be on different devices in less than `guess`.
  bool apart(const Costs& costs, int32_t tensor, int32_t producer, int32_t consumer,
             int64_t guess) const {
    for (int32_t from = 0; from < sites_.count; ++from) {
      const size_t p = index(producer, from);
      const int64_t end = add(heads_[p], sites_.durations[p]);
      if (end >= guess) continue;
      for (int32_t to = 0; to < sites_.count; ++to) {
        const size_t c = index(consumer, to);
        const int64_t rest = add(tails_[c], sites_.durations[c]);
        if (add(add(end, costs(tensor, from, to)), rest) < guess) return true;
      }
    }
    return false;
  }

  void join(Union& groups) {
    const size_t count = static_cast<size_t>(groups_.count());
    std::vector<int32_t> name(count, -1);
    int32_t names = 0;
    for (size_t group = 0; group < count; ++group) {
      const int32_t to = groups.find(static_cast<int32_t>(group));
      if (name[to] < 0) name[to] = names++;
      name[group] = name[to];
    }
    Groups next;
    next.moments = groups_.moments;
    next.allowed.assign(static_cast<size_t>(sites_.count) * names, 1);
    for (size_t group = 0; group < count; ++group) {
      for (int32_t site = 0; site < sites_.count; ++site) {
        next.allowed[static_cast<size_t>(site) * names + name[group]] &=
            groups_.allowed[site * count + group];
      }
    }
    next.of = groups_.of;
    for (int32_t& group : next.of) group = name[group];
    groups_ = std::move(next);
    weigh();
  }

  // Bytes that every group holds; sites without room for them are excluded.
  void weigh() {
    const int32_t count = static_cast<int32_t>(groups_.allowed.size() / sites_.count);
    groups_.held = moments_.held(groups_.of, count);
    for (int32_t group = 0; group < count; ++group) {
      const int64_t* bytes = groups_.bytes(group);
      const int64_t most = *std::max_element(bytes, bytes + groups_.moments);
      for (int32_t site = 0; site < sites_.count; ++site) {
        if (most > sites_.memory[site]) {
          groups_.allowed[static_cast<size_t>(site) * count + group] = 0;
        }
      }
    }
  }

  const Problem& problem_;
  const Sites& sites_;
  Effort effort_;
  const Moments& moments_;
  Groups groups_;
  std::vector<int64_t> heads_, tails_;  // per [site * ops + op]
  int64_t path_ = 0;
};

// At most `guess`, and at most the makespan of every valid schedule.
int64_t refute(const Relaxation& known, int64_t guess) {
  Relaxation relaxation(known);
  // The second round uses the results of the first; more rounds rarely help.
  for (int i = 0; i < 2 && !relaxation.refuted(); ++i) {
    if (!relaxation.assume(guess)) break;
  }
  return relaxation.path() >= guess ? guess : std::min(guess, relaxation.work());
}

}  // namespace

Bounds lower_bounds(const Problem& problem, const Sites& sites, const Effort& effort) {
  const Moments moments(problem);
  const Relaxation relaxation(problem, sites, effort, moments);
  Bounds bounds{relaxation.path(), 0, 0};
  if (relaxation.refuted()) return bounds;
  bounds.work = bounds.guess = relaxation.work();
  // Growing steps up while makespans are refuted, then bisection below one that was not.
  int64_t above = kForever, step = bounds.guess / 16;
  for (int32_t i = 0; i < effort.guesses && step > 0; ++i) {
    const int64_t guess = bounds.guess + std::min(step, kForever - bounds.guess);
    const int64_t reached = refute(relaxation, guess);
    if (reached < guess) above = guess;
    bounds.guess = std::max(bounds.guess, reached);
    step = above == kForever ? 2 * std::min(step, kForever / 2) : (above - bounds.guess) / 2;
  }
  return bounds;
}

}  // namespace baechi
