// Placements grown along time: anneal the beginning of the step until it is good, then add more
// ops.
//
// Local search of a whole step cannot repair two devices of which one works first and the other
// later: every single change makes the step longer. In the beginning of a step it shows at once,
// since one of them is idle there. So ops are added by time, `stretch` of them at once, each to
// the device where it ends first, and the search then changes only the last `kBack` stretches of
// the order. Earlier stretches are good enough already, and an evaluation from there on is cheap.
//
// The time of an op that nobody has placed is guessed by its level: numbers that are one more than
// those of the producers, as nearly as least squares can have it (trophic levels: MacKay, Johnson
// and Sansom, Royal Society Open Science 7, 2020). The longest path to an op is too early an
// estimate for ops whose results are needed late.
#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

#include "search/local_search.h"

namespace baechi {

namespace {

constexpr int32_t kBack = 3;
constexpr int kRounds = 1'000;
// Extra memory for the beginning of a step beyond its share, as a part of the memory.
constexpr double kSpare = 0.05;

double product(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Levels by conjugate gradients, O(arcs) a round.
std::vector<double> levels(const Problem& problem) {
  const size_t n = static_cast<size_t>(problem.ops);
  std::vector<double> level(n, 0), rest(n, 0), image(n);
  const auto each_arc = [&](const auto& visit) {
    for (int32_t tensor = 0; tensor < problem.tensors; ++tensor) {
      for (int32_t consumer : Row(problem.consumers, tensor)) {
        visit(problem.producer[tensor], consumer);
      }
    }
  };
  each_arc([&](int32_t from, int32_t to) {
    rest[from] -= 1;
    rest[to] += 1;
  });
  std::vector<double> step = rest;
  double norm = product(rest, rest);
  const double enough = 1e-12 * norm;
  for (int round = 0; round < kRounds && norm > enough; ++round) {
    std::fill(image.begin(), image.end(), 0);
    each_arc([&](int32_t from, int32_t to) {
      const double gap = step[to] - step[from];
      image[from] -= gap;
      image[to] += gap;
    });
    const double size = norm / product(step, image);
    for (size_t i = 0; i < n; ++i) {
      level[i] += size * step[i];
      rest[i] -= size * image[i];
    }
    const double now = product(rest, rest);
    for (size_t i = 0; i < n; ++i) step[i] = rest[i] + now / norm * step[i];
    norm = now;
  }
  return level;
}

// The problem of some ops alone, ascending, each with its part of the memory.
Problem part_of(const Problem& problem, const std::vector<int32_t>& ops) {
  Problem part = problem;
  std::vector<int32_t> index(problem.ops, -1), group_index(problem.groups, -1), group, producer;
  std::vector<int32_t> groups;
  std::vector<int64_t> workspace, launch, persistent, nbytes;
  std::vector<uint8_t> kept;
  double all = 0, here = 0;
  for (int64_t bytes : problem.group_persistent) all += static_cast<double>(bytes);
  for (int32_t op : ops) {
    index[op] = static_cast<int32_t>(workspace.size());
    workspace.push_back(problem.workspace[op]);
    if (!problem.launch.empty()) launch.push_back(problem.launch[op]);
    int32_t& at = group_index[problem.group[op]];
    if (at < 0) {
      at = static_cast<int32_t>(groups.size());
      groups.push_back(problem.group[op]);
      persistent.push_back(problem.group_persistent[problem.group[op]]);
      here += static_cast<double>(persistent.back());
    }
    group.push_back(at);
  }
  Rows consumers;
  consumers.begin.push_back(0);
  for (int32_t tensor = 0; tensor < problem.tensors; ++tensor) {
    if (index[problem.producer[tensor]] < 0) continue;
    producer.push_back(index[problem.producer[tensor]]);
    nbytes.push_back(problem.nbytes[tensor]);
    kept.push_back(problem.kept[tensor]);
    for (int32_t consumer : Row(problem.consumers, tensor)) {
      if (index[consumer] >= 0) consumers.values.push_back(index[consumer]);
    }
    consumers.begin.push_back(static_cast<int64_t>(consumers.values.size()));
  }
  part.ops = static_cast<int32_t>(ops.size());
  part.tensors = static_cast<int32_t>(producer.size());
  part.groups = static_cast<int32_t>(groups.size());
  part.durations.clear();
  for (size_t row = 0; row < problem.durations.size(); row += static_cast<size_t>(problem.ops)) {
    const auto first = problem.durations.begin() + static_cast<int64_t>(row);
    for (int32_t op : ops) part.durations.push_back(first[op]);
  }
  if (!problem.allowed.empty()) {
    part.allowed.clear();
    for (int32_t device = 0; device < problem.devices; ++device) {
      for (int32_t g : groups) part.allowed.push_back(problem.allows(g, device));
    }
  }
  const double share = all > 0 ? std::min(1.0, here / all + kSpare) : 1.0;
  for (int64_t& memory : part.memory) {
    if (share < 1) memory = static_cast<int64_t>(static_cast<double>(memory) * share);
  }
  part.workspace = std::move(workspace);
  part.beside = {};  // as if all of them were together
  part.beside_bytes = {};
  part.part_begin = part.part_bytes = {};
  part.launch = std::move(launch);
  part.group = std::move(group);
  part.group_persistent = std::move(persistent);
  part.producer = std::move(producer);
  part.nbytes = std::move(nbytes);
  part.kept = std::move(kept);
  part.consumers = shared(std::move(consumers));
  part.derive();
  part.finish();
  return part;
}

// The clusters of the groups of the part that these ops make.
std::vector<std::vector<int32_t>> clusters_of(const Problem& problem, const Problem& part,
                                              const std::vector<int32_t>& ops,
                                              const std::vector<std::vector<int32_t>>& clusters) {
  std::vector<std::vector<int32_t>> result;
  for (const std::vector<int32_t>& level : clusters) {
    std::vector<int32_t> number(level.size(), -1), row(part.groups);
    int32_t count = 0;
    for (size_t i = 0; i < ops.size(); ++i) {
      int32_t& named = number[level[problem.group[ops[i]]]];
      if (named < 0) named = count++;
      row[part.group[i]] = named;
    }
    result.push_back(std::move(row));
  }
  return result;
}

// The ops in `sequence` from `begin` to `end`, behind the others, each to where it ends first;
// whether all have found a device.
bool extend(const Problem& problem, const std::vector<int32_t>& sequence, int32_t begin,
            int32_t end, std::vector<int32_t>& devices, std::vector<int32_t>& order) {
  Timeline timeline(problem);
  std::vector<int32_t> home(problem.groups, -1);
  for (int32_t op : order) {
    timeline.commit(op, devices[op]);
    home[problem.group[op]] = devices[op];
  }
  for (int32_t at = begin; at < end; ++at) {
    const int32_t op = sequence[at], group = problem.group[op];
    int32_t best = -1;
    int64_t least = kForever;
    for (int32_t device = 0; device < problem.devices; ++device) {
      if (home[group] >= 0 ? home[group] != device : !problem.allows(group, device)) continue;
      const std::optional<int64_t> end = timeline.earliest_end(op, device);
      if (!end || *end >= least) continue;
      least = *end;
      best = device;
    }
    if (best < 0) return false;
    timeline.commit(op, best);
    devices[op] = home[group] = best;
    order.push_back(op);
  }
  return true;
}

}  // namespace

std::vector<int32_t> level_order(const Problem& problem) {
  const std::vector<double> level = levels(problem);
  using Entry = std::pair<double, int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> ready;
  std::vector<int64_t> waiting(problem.ops);
  for (int32_t op = 0; op < problem.ops; ++op) {
    waiting[op] = problem.inputs.size(op);
    if (waiting[op] == 0) ready.emplace(level[op], op);
  }
  std::vector<int32_t> order;
  while (!ready.empty()) {
    const int32_t op = ready.top().second;
    ready.pop();
    order.push_back(op);
    for (int32_t tensor : Row(problem.outputs, op)) {
      for (int32_t consumer : Row(problem.consumers, tensor)) {
        if (--waiting[consumer] == 0) ready.emplace(level[consumer], consumer);
      }
    }
  }
  return order;
}

Found grown(const Problem& problem, const std::vector<std::vector<int32_t>>& clusters,
            int32_t stretch, int64_t budget, uint64_t seed, const Halt* halt) {
  Found result;
  std::vector<int32_t>&devices = result.devices, &order = result.order;
  devices.assign(problem.ops, 0);
  const std::vector<int32_t> sequence = level_order(problem);
  const int32_t n = problem.ops;
  const int64_t each = budget / std::max(1, (n + stretch - 1) / stretch);
  for (int32_t done = 0; done < n;) {
    const int32_t end = std::min(n - done, stretch) + done;
    if (halted(halt) || !extend(problem, sequence, done, end, devices, order)) return {};
    done = end;
    std::vector<int32_t> ops(sequence.begin(), sequence.begin() + end), index(n, -1);
    std::sort(ops.begin(), ops.end());
    const Problem part = part_of(problem, ops);
    std::vector<int32_t> there, launches;
    for (int32_t op : ops) {
      index[op] = static_cast<int32_t>(there.size());
      there.push_back(devices[op]);
    }
    for (int32_t op : order) launches.push_back(index[op]);
    const int32_t from = std::max(0, end - kBack * stretch);
    const Found found =
        local_search(part, there, launches, clusters_of(problem, part, ops, clusters), each, 0,
                     seed++, from, halt);
    result.evaluations += found.evaluations;
    for (int32_t i = 0; i < end; ++i) {
      devices[ops[i]] = found.devices[i];
      order[i] = ops[found.order[i]];
    }
  }
  return result;
}

}  // namespace baechi
