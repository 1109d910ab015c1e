// The rules of `baechi.problem.coarsening`.
#include <algorithm>

#include "coarsening/coarse.h"
#include "coarsening/contraction.h"

namespace baechi {

namespace {

using namespace contraction;

// The smallest latency, with the overhead, and the smallest ns per byte between pools; 0 where
// nothing is sent.
struct Link {
  double latency = 0, per_byte = 0;

  explicit Link(const Problem& problem) {
    int64_t smallest = kForever, rate = 0;
    for (int32_t src = 0; src < problem.devices; ++src) {
      for (int32_t dst = 0; dst < problem.devices; ++dst) {
        if (problem.pool[src] == problem.pool[dst] || !problem.has_path(src, dst)) continue;
        const int64_t empty = problem.latency_ns(src, dst) + problem.overhead_ns(src, dst);
        smallest = std::min(smallest, empty);
        rate = std::max(rate, problem.bytes_per_s(src, dst));
      }
    }
    if (rate == 0) return;
    latency = static_cast<double>(smallest);
    per_byte = 1e9 / static_cast<double>(rate);
  }
  double send_ns(int64_t nbytes) const { return latency + static_cast<double>(nbytes) * per_byte; }
};

// The groups other than its own that a part has neighbors in, if it is one; the nearest of those
// neighbors: the first successor or the last predecessor.
struct Outside {
  int32_t nearest = -1;
  bool one_group = true;

  Outside(const Parts& parts, const Arcs& side, int32_t part, bool first) {
    int32_t group = -1;
    for (const Arc& arc : Side(side, part)) {
      if (parts.group[arc.part] == parts.group[part]) continue;
      if (group >= 0 && parts.group[arc.part] != group) one_group = false;
      group = parts.group[arc.part];
      if (nearest < 0 || (arc.part < nearest) == first) nearest = arc.part;
    }
  }
};

// The part that the rules `chain` and `mates` join `u` to, or -1.
int32_t chained(const Parts& parts, const Neighbors& neighbors,
                const std::vector<Outside>& outside_before, int32_t u) {
  const Outside outside(parts, neighbors.after, u, true);
  if (outside.nearest < 0) {
    return neighbors.after.size(u) == 1 ? neighbors.after.first(u)->part : -1;
  }
  const int32_t v = outside.nearest;
  if (!outside.one_group) return -1;
  return outside_before[v].one_group && outside_before[v].nearest == u ? v : -1;
}

// The part that the rule `idle` joins `u` to, or -1.
int32_t idle_target(const Neighbors& neighbors, int32_t u) {
  const Arc* target = nullptr;
  for (const Arcs* side : {&neighbors.before, &neighbors.after}) {
    if (side->size(u) != 1) continue;
    const Arc* arc = side->first(u);
    if (target == nullptr || arc->nbytes > target->nbytes) target = arc;
  }
  return target == nullptr ? -1 : target->part;
}

Proposal apply_rules(const Parts& parts, const Neighbors& neighbors, const Link& link,
                     int64_t limit) {
  const int32_t n = parts.size();
  Proposal proposal(parts);
  Groups groups(parts, neighbors, limit);
  std::vector<uint8_t> joined(n, 0);
  const auto join = [&](int32_t u, int32_t v, int64_t cheap_ns) {
    if (!groups.join(parts.group[u], parts.group[v])) return;
    joined[u] = joined[v] = 1;
    const int32_t a = proposal.sets.find(u), b = proposal.sets.find(v);
    if (a == b) return;
    const int64_t absorbed = proposal.absorbed[a] + proposal.absorbed[b] + cheap_ns;
    proposal.absorbed[proposal.sets.join(a, b)] = absorbed;
  };
  std::vector<Outside> outside_before;
  outside_before.reserve(n);
  for (int32_t v = 0; v < n; ++v) outside_before.emplace_back(parts, neighbors.before, v, false);
  for (int32_t u = 0; u < n; ++u) {
    int32_t v = chained(parts, neighbors, outside_before, u);
    if (v < 0 && parts.idle[u]) v = idle_target(neighbors, u);
    if (v >= 0) join(u, v, 0);
  }
  for (int32_t u = 0; u < n; ++u) {
    for (const Arcs* side : {&neighbors.before, &neighbors.after}) {
      // Parts joined in this round are considered again in the next, as one.
      if (side->size(u) != 1 || joined[u]) continue;
      const auto& [v, nbytes] = *side->first(u);
      const int64_t absorbed = proposal.absorbed[proposal.sets.find(v)] + parts.absorbed[u];
      if (static_cast<double>(absorbed + parts.time[u]) <= link.send_ns(nbytes)) {
        join(u, v, parts.time[u]);
      }
    }
  }
  return proposal;
}

}  // namespace

CoarseGraph coarsen(const Problem& problem, const std::vector<uint8_t>& idle,
                    const std::vector<int32_t>& color, int64_t limit) {
  const Link link(problem);
  Parts parts = parts_of(problem, idle, color);
  CoarseGraph result;
  result.part_of.resize(problem.ops);
  std::iota(result.part_of.begin(), result.part_of.end(), 0);
  for (int32_t before = parts.size() + 1; parts.size() < before;) {
    before = parts.size();
    const Neighbors neighbors = neighbors_of(parts);
    Proposal proposal = apply_rules(parts, neighbors, link, limit);
    const std::vector<int32_t> rank = settle(parts, neighbors, proposal);
    for (int32_t& part : result.part_of) part = rank[part];
  }
  result.group = std::move(parts.group);
  return result;
}

}  // namespace baechi
