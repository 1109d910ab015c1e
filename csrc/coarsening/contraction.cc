#include "coarsening/contraction.h"

#include <algorithm>
#include <functional>
#include <queue>

namespace baechi::contraction {

namespace {

// The longest time of every op on any device.
std::vector<int64_t> longest_times(const Problem& problem) {
  std::vector<int64_t> times(problem.ops, 0);
  for (size_t i = 0; i < problem.durations.size(); ++i) {
    int64_t& time = times[i % times.size()];
    time = std::max(time, problem.durations[i]);
  }
  return times;
}

// Splits sets into their parts until the sets make no cycle: Kahn's algorithm, and where it is
// stuck, the set of the first remaining part is split. All predecessors of this part are done, so
// it is next; only sets that block the order are split.
void split_cycles(const Neighbors& neighbors, std::vector<int32_t>& set) {
  const int32_t n = static_cast<int32_t>(set.size());
  const Rows members = places(set, n);
  std::vector<int64_t> waiting(n, 0);  // per set, arcs from parts that are not done
  std::vector<uint8_t> done(n, 0);
  std::vector<int32_t> ready;
  for (int32_t u = 0; u < n; ++u) {
    for (const Arc& arc : Side(neighbors.after, u))
      waiting[set[arc.part]] += set[arc.part] != set[u];
  }
  const auto finish = [&](int32_t u) {
    done[u] = 1;
    for (const Arc& arc : Side(neighbors.after, u)) {
      const int32_t to = set[arc.part];
      if (to != set[u] && --waiting[to] == 0) ready.push_back(to);
    }
  };
  for (int32_t s = 0; s < n; ++s) {
    if (set[s] == s && waiting[s] == 0) ready.push_back(s);
  }
  for (int32_t low = 0; low < n;) {
    while (!ready.empty()) {
      const int32_t s = ready.back();
      ready.pop_back();
      // A set that was split has the name of its first part, which alone is in it now.
      if (members.size(s) > 1 && set[*(members.first(s) + 1)] == s) {
        for (int32_t u : Row(members, s)) finish(u);
      } else {
        finish(s);
      }
    }
    while (low < n && done[low]) ++low;
    if (low == n) return;
    const int32_t split = set[low];
    for (int32_t u : Row(members, split)) set[u] = u;
    for (int32_t u : Row(members, split)) {
      waiting[u] = 0;
      for (const Arc& arc : Side(neighbors.before, u)) waiting[u] += !done[arc.part];
      if (waiting[u] == 0) ready.push_back(u);
    }
  }
}

// The sets in topological order, by first op; for each part the place of its set there.
std::vector<int32_t> ranks(const Parts& parts, const Neighbors& neighbors,
                           const std::vector<int32_t>& set) {
  const int32_t n = parts.size();
  const Rows members = places(set, n);
  std::vector<int64_t> waiting(n, 0);
  std::vector<int32_t> first(n, INT32_MAX), rank(n);
  for (int32_t u = 0; u < n; ++u) {
    first[set[u]] = std::min(first[set[u]], parts.first[u]);
    for (const Arc& arc : Side(neighbors.after, u))
      waiting[set[arc.part]] += set[arc.part] != set[u];
  }
  using Entry = std::pair<int32_t, int32_t>;  // a set after its first op
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> ready;
  for (int32_t s = 0; s < n; ++s) {
    if (set[s] == s && waiting[s] == 0) ready.emplace(first[s], s);
  }
  for (int32_t next = 0; !ready.empty(); ++next) {
    const int32_t s = ready.top().second;
    ready.pop();
    for (int32_t u : Row(members, s)) {
      rank[u] = next;
      for (const Arc& arc : Side(neighbors.after, u)) {
        const int32_t to = set[arc.part];
        if (to != s && --waiting[to] == 0) ready.emplace(first[to], to);
      }
    }
  }
  return rank;
}

// The tensors between the parts of `rank`, without those that stay inside one.
void contract_tensors(const Parts& parts, const std::vector<int32_t>& rank, Parts& result) {
  result.consumers.begin.assign(1, 0);
  std::vector<int64_t> seen(result.size(), -1);
  for (int32_t tensor = 0; tensor < static_cast<int32_t>(parts.producer.size()); ++tensor) {
    const int32_t producer = rank[parts.producer[tensor]];
    seen[producer] = tensor;
    for (int32_t consumer : Row(parts.consumers, tensor)) {
      const int32_t v = rank[consumer];
      if (seen[v] == tensor) continue;
      seen[v] = tensor;
      result.consumers.values.push_back(v);
    }
    const int64_t end = static_cast<int64_t>(result.consumers.values.size());
    if (end == result.consumers.begin.back()) continue;
    result.consumers.begin.push_back(end);
    result.producer.push_back(producer);
    result.nbytes.push_back(parts.nbytes[tensor]);
  }
}

}  // namespace

Neighbors neighbors_of(const Parts& parts) {
  const int32_t n = parts.size();
  const Rows outputs = places(parts.producer, n);
  Neighbors result;
  Arcs& after = result.after;
  std::vector<int64_t> seen(n, -1);  // where a successor stands, if it does so in this part's row
  after.begin.push_back(0);
  for (int32_t u = 0; u < n; ++u) {
    for (int32_t tensor : Row(outputs, u)) {
      for (int32_t v : Row(parts.consumers, tensor)) {
        if (seen[v] < after.begin[u]) {
          seen[v] = static_cast<int64_t>(after.arcs.size());
          after.arcs.push_back({v, 0});
        }
        after.arcs[seen[v]].nbytes += parts.nbytes[tensor];
      }
    }
    after.begin.push_back(static_cast<int64_t>(after.arcs.size()));
  }
  Arcs& before = result.before;
  before.begin.assign(static_cast<size_t>(n) + 1, 0);
  for (const Arc& arc : after.arcs) ++before.begin[arc.part + 1];
  std::partial_sum(before.begin.begin(), before.begin.end(), before.begin.begin());
  before.arcs.resize(after.arcs.size());
  std::vector<int64_t> next(before.begin.begin(), before.begin.end() - 1);
  for (int32_t u = 0; u < n; ++u) {
    for (const Arc& arc : Side(after, u)) before.arcs[next[arc.part]++] = {u, arc.nbytes};
  }
  return result;
}

Parts parts_of(const Problem& problem, const std::vector<uint8_t>& idle,
               const std::vector<int32_t>& color) {
  const int32_t n = problem.ops;
  Parts parts;
  parts.first.resize(n);
  std::iota(parts.first.begin(), parts.first.end(), 0);
  parts.time = longest_times(problem);
  parts.absorbed.assign(n, 0);
  parts.idle = idle;
  parts.group.resize(n);
  parts.bytes.assign(n, 0);
  parts.workspace.assign(n, 0);
  parts.color.assign(n, 0);
  for (int32_t op = 0; op < n; ++op) {
    const int32_t g = parts.group[op] = *problem.group_ops.first(problem.group[op]);
    if (g == op) parts.bytes[g] = problem.group_persistent[problem.group[op]];
    if (g == op && !color.empty()) parts.color[g] = color[problem.group[op]];
    parts.bytes[g] += problem.output_bytes[op];
    parts.workspace[g] = std::max(parts.workspace[g], problem.workspace[op]);
  }
  parts.producer = problem.producer.copy();
  parts.nbytes = problem.nbytes.copy();
  parts.consumers = {problem.consumers.begin.copy(), problem.consumers.values.copy()};
  return parts;
}

Groups::Groups(const Parts& parts, const Neighbors& neighbors, int64_t limit)
    : parts_(parts),
      neighbors_(neighbors),
      limit_(limit),
      union_(parts.size()),
      load_(parts.bytes),
      members_(places(parts.group, parts.size())),
      degree_(parts.size(), 0),
      seen_(parts.size(), -1) {
  for (int32_t part = 0; part < parts.size(); ++part) {
    load_[part] += parts.workspace[part];
    degree_[parts.group[part]] += neighbors.before.size(part) + neighbors.after.size(part);
  }
}

bool Groups::join(int32_t a, int32_t b) {
  const int32_t at = union_.find(a), bt = union_.find(b);
  if (at == bt) return true;
  const int64_t load = load_[at] + load_[bt];
  if (load > limit_ || parts_.color[a] != parts_.color[b] || !touch(a, b)) return false;
  load_[union_.join(at, bt)] = load;
  return true;
}

// Whether each part of the group with fewer parts has a neighbor in the other. Looks at the side
// with fewer arcs, so that the many small neighbors of a large group cost no more than their own.
bool Groups::touch(int32_t a, int32_t b) {
  const int64_t sizes[] = {members_.size(a), members_.size(b)};
  const bool first = sizes[0] != sizes[1] ? sizes[0] < sizes[1] : a < b;
  const int32_t few = first ? a : b, many = first ? b : a;
  if (members_.size(few) == 1) return true;
  const bool forward = degree_[few] <= degree_[many];
  ++asked_;
  int64_t touched = 0;
  for (int32_t part : Row(members_, forward ? few : many)) {
    for (const Arcs* side : {&neighbors_.before, &neighbors_.after}) {
      for (const Arc& arc : Side(*side, part)) {
        if (parts_.group[arc.part] != (forward ? many : few)) continue;
        const int32_t counted = forward ? part : arc.part;
        touched += seen_[counted] != asked_;
        seen_[counted] = asked_;
      }
    }
  }
  return touched == members_.size(few);
}

std::vector<int32_t> settle(Parts& parts, const Neighbors& neighbors, Proposal& proposal) {
  const int32_t n = parts.size();
  std::vector<int32_t> set(n);
  for (int32_t u = 0; u < n; ++u) set[u] = proposal.sets.find(u);
  split_cycles(neighbors, set);
  const std::vector<int32_t> rank = ranks(parts, neighbors, set);
  const int32_t count = n == 0 ? 0 : 1 + *std::max_element(rank.begin(), rank.end());

  Union groups(n);
  for (int32_t u = 0; u < n; ++u) groups.join(parts.group[u], parts.group[set[u]]);
  Parts result;
  result.first.assign(count, INT32_MAX);
  result.time.assign(count, 0);
  result.absorbed.assign(count, 0);
  result.idle.assign(count, 1);
  std::vector<int32_t> new_group(n, INT32_MAX), sizes(count, 0);
  for (int32_t u = 0; u < n; ++u) {
    const int32_t part = rank[u];
    result.first[part] = std::min(result.first[part], parts.first[u]);
    result.time[part] += parts.time[u];
    result.idle[part] &= parts.idle[u];
    result.absorbed[part] = ++sizes[part] == 1 ? parts.absorbed[u] : proposal.absorbed[set[u]];
    int32_t& group = new_group[groups.find(parts.group[u])];
    group = std::min(group, part);
  }
  result.group.resize(count);
  result.bytes.assign(count, 0);
  result.workspace.assign(count, 0);
  result.color.assign(count, 0);
  for (int32_t u = 0; u < n; ++u) {
    const int32_t group = result.group[rank[u]] = new_group[groups.find(parts.group[u])];
    if (parts.group[u] != u) continue;
    result.bytes[group] += parts.bytes[u];
    result.workspace[group] = std::max(result.workspace[group], parts.workspace[u]);
    result.color[group] = parts.color[u];
  }
  contract_tensors(parts, rank, result);
  parts = std::move(result);
  return rank;
}

}  // namespace baechi::contraction
