#include "bounds.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "held.h"
#include "starts.h"

namespace baechi {

namespace {

__extension__ typedef __int128 int128_t;

// A guess joins ops to large groups, whose ops would always gather as many ancestors as they may.
constexpr int32_t kGuessWindow = 24;

struct Job {
  int64_t release, duration, tail;
};

// The shortest makespan of jobs on one device that may interrupt them: of the released jobs always
// the one with the longest tail (Jackson's preemptive schedule).
int64_t preemptive(std::vector<Job>& jobs) {
  std::sort(jobs.begin(), jobs.end(),
            [](const Job& a, const Job& b) { return a.release < b.release; });
  std::priority_queue<std::pair<int64_t, int64_t>> released;  // tail and time left
  int64_t now = 0, longest = 0;
  for (size_t i = 0; i < jobs.size() || !released.empty();) {
    if (released.empty()) now = std::max(now, jobs[i].release);
    for (; i < jobs.size() && jobs[i].release <= now; ++i) {
      released.emplace(jobs[i].tail, jobs[i].duration);
    }
    const auto [tail, left] = released.top();
    released.pop();
    const int64_t end = now + left;
    now = i < jobs.size() ? std::min(end, jobs[i].release) : end;
    if (now < end) {
      released.emplace(tail, end - now);
    } else {
      longest = std::max(longest, end + tail);
    }
  }
  return longest;
}

// What is known of a schedule in which these groups each share a device.
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

  int64_t group() const {
    Rows rows = members();
    int64_t longest = 0;
    std::vector<Job> jobs;
    for (int32_t group = 0; group < groups_.count(); ++group) {
      if (rows.size(group) < 2) continue;
      int64_t best = kForever;
      for (int32_t site = 0; site < sites_.count; ++site) {
        jobs.clear();
        for (int32_t op : Row(rows, group)) {
          if (length(op, site) == kForever) break;
          const size_t at = index(op, site);
          jobs.push_back({heads_[at], sites_.durations[at], tails_[at]});
        }
        if (static_cast<int64_t>(jobs.size()) == rows.size(group)) {
          best = std::min(best, preemptive(jobs));
        }
      }
      longest = std::max(longest, best);
    }
    return longest;
  }

  // The work bound is the interval of the whole step, where a whole group picks its site.
  int64_t work() const {
    int64_t longest = 0;
    const size_t count = static_cast<size_t>(groups_.count());
    std::vector<int64_t> times(sites_.count * count, 0);
    for (int32_t site = 0; site < sites_.count; ++site) {
      for (int32_t op = 0; op < problem_.ops; ++op) {
        times[site * count + groups_.of[op]] += sites_.durations[index(op, site)];
      }
    }
    for (size_t row = 0; row < sites_.weight_sums.size(); ++row) {
      int128_t sum = 0;
      for (size_t group = 0; group < count; ++group) {
        int128_t least = -1;
        for (int32_t site = 0; site < sites_.count; ++site) {
          if (!groups_.allowed[site * count + group]) continue;
          const int128_t busy =
              static_cast<int128_t>(weight(row, site)) * times[site * count + group];
          if (least < 0 || busy < least) least = busy;
        }
        sum += std::max<int128_t>(least, 0);
      }
      longest = std::max(longest, ceil_div(sum, sites_.weight_sums[row]));
    }
    return std::max(longest, crowded(times));
  }

  // The excess of the work that must be done between two times over what all devices can do then,
  // on top of `floor`, which no schedule is shorter than (Fernandez and Bussell 1973).
  int64_t interval(int64_t floor) const {
    int64_t longest = floor;
    if (floor == kForever || effort_.thresholds == 0) return floor;
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

  // Joins what a schedule shorter than `guess` cannot part, and takes from each group the sites
  // that would make it too long. Returns whether anything changed.
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
    std::vector<int32_t> root(count);
    std::iota(root.begin(), root.end(), 0);
    const auto find = [&](int32_t group) {
      while (root[group] != group) group = root[group] = root[root[group]];
      return group;
    };
    const Costs costs(problem_, sites_);
    bool joined = false;
    for (int32_t t = 0; t < problem_.tensors; ++t) {
      const int32_t producer = problem_.producer[t];
      for (int32_t consumer : Row(problem_.consumers, t)) {
        const int32_t a = find(groups_.of[producer]), b = find(groups_.of[consumer]);
        if (a == b || apart(costs, t, producer, consumer, guess)) continue;
        root[std::max(a, b)] = std::min(a, b);
        joined = true;
      }
    }
    if (joined) join(root, find);
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

  void update() {
    heads_ = earliest_starts(problem_, sites_, groups_, effort_.window, false);
    tails_ = earliest_starts(problem_, sites_, groups_, effort_.window, true);
    path_ = 0;
    for (int32_t op = 0; op < problem_.ops; ++op) {
      path_ = std::max(path_, length(op, nearest(op)));
    }
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

  Rows members() const {
    Rows rows;
    rows.begin.assign(static_cast<size_t>(groups_.count()) + 1, 0);
    for (int32_t group : groups_.of) ++rows.begin[group + 1];
    for (size_t i = 1; i < rows.begin.size(); ++i) rows.begin[i] += rows.begin[i - 1];
    std::vector<int64_t> next(rows.begin.begin(), rows.begin.end() - 1);
    rows.values.resize(groups_.of.size());
    for (int32_t op = 0; op < problem_.ops; ++op) rows.values[next[groups_.of[op]]++] = op;
    return rows;
  }

  // Of the k m + 1 longest groups, some device of m gets k + 1, at best the shortest of them.
  int64_t crowded(const std::vector<int64_t>& times) const {
    const size_t count = static_cast<size_t>(groups_.count());
    const size_t devices = static_cast<size_t>(sites_.devices);
    std::vector<int64_t> least;
    for (size_t group = 0; group < count; ++group) {
      int64_t best = kForever;
      for (int32_t site = 0; site < sites_.count; ++site) {
        if (groups_.allowed[site * count + group])
          best = std::min(best, times[site * count + group]);
      }
      least.push_back(best == kForever ? 0 : best);
    }
    std::sort(least.begin(), least.end(), std::greater<int64_t>());
    std::vector<int64_t> sums(count + 1, 0);
    for (size_t i = 0; i < count; ++i) sums[i + 1] = sums[i] + least[i];
    int64_t longest = 0;
    for (size_t k = 0; k * devices + 1 <= count; ++k) {
      longest = std::max(longest, sums[k * devices + 1] - sums[k * devices - k]);
    }
    return longest;
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

  // The largest of (work that must be done in [begin, end]) / speed - (end - begin), rounded up,
  // over `ends`, where a step takes `floor`. An op at its latest start does from max(begin, that)
  // on what it could not do before `begin`; of several sites the least of it counts, as if it was
  // done at the end of the last of them.
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

  template <typename Find>
  void join(const std::vector<int32_t>& root, const Find& find) {
    const size_t count = root.size();
    std::vector<int32_t> name(count, -1);
    int32_t names = 0;
    for (size_t group = 0; group < count; ++group) {
      const int32_t to = find(static_cast<int32_t>(group));
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

  // What every group holds; it is not where it has no room.
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
  // The second time with what the first found out; more rarely find anything.
  for (int i = 0; i < 2 && !relaxation.refuted(); ++i) {
    if (!relaxation.assume(guess)) break;
  }
  if (relaxation.path() >= guess) return guess;
  const int64_t bound = std::max({relaxation.path(), relaxation.group(), relaxation.work()});
  if (bound >= guess) return guess;
  return std::min(guess, relaxation.interval(bound));
}

}  // namespace

Bounds lower_bounds(const Problem& problem, const Sites& sites, const Effort& effort,
                    int64_t known) {
  const Moments moments(problem);
  const Relaxation relaxation(problem, sites, effort, moments);
  Bounds bounds{relaxation.path(), 0, 0, 0, 0};
  if (relaxation.refuted()) return bounds;
  bounds.group = relaxation.group();
  if (bounds.group == kForever) return bounds;  // no site has all of a group's ops
  bounds.work = relaxation.work();
  bounds.interval = relaxation.interval(std::max({bounds.path, bounds.group, bounds.work, known}));
  bounds.guess = bounds.interval;
  // Ever larger steps up while makespans are refuted, then bisection below one that was not.
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
