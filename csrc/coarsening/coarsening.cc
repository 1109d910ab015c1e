// The rules of `baechi.problem.coarsening`, and the matching for fewer parts.
#include <algorithm>

#include "coarsening/coarse.h"
#include "coarsening/contraction.h"

namespace baechi {

namespace {

using namespace contraction;

// No group takes up more than this share of the work of a device, if all work is shared out evenly.
constexpr double kShareOfDevice = 0.5;
// The most work of a group of a level with n parts, as a multiple of a part's mean.
constexpr double kLargest = 4.0;
// A round of matching that leaves more than this share of the parts is the last of its kind: rounds
// that join almost nothing cost as much as others.
constexpr double kProgress = 0.97;
// A level is kept if it has less than this share of the parts of the last one kept.
constexpr double kShrink = 0.9;

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

// Per part the most arcs on a path to it, and from it.
struct Levels {
  std::vector<int32_t> top, bottom;

  Levels(const Neighbors& neighbors, int32_t n) : top(n, 0), bottom(n, 0) {
    for (int32_t u = 0; u < n; ++u) {
      for (const Arc& arc : Side(neighbors.after, u)) {
        top[arc.part] = std::max(top[arc.part], top[u] + 1);
      }
    }
    for (int32_t u = n - 1; u >= 0; --u) {
      for (const Arc& arc : Side(neighbors.after, u)) {
        bottom[u] = std::max(bottom[u], bottom[arc.part] + 1);
      }
    }
  }
  // Whether the arc u -> v is proved to be the only path from u to v.
  bool tight(int32_t u, int32_t v) const {
    return top[v] == top[u] + 1 || bottom[u] == bottom[v] + 1;
  }
  // Whether it is proved that there is no path between u and v.
  bool apart(int32_t u, int32_t v) const { return top[u] == top[v] || bottom[u] == bottom[v]; }
};

// Two groups and what it costs to separate them.
struct Bond {
  double rating;
  int32_t a, b;

  bool operator<(const Bond& other) const {
    if (rating != other.rating) return rating > other.rating;
    return a != other.a ? a < other.a : b < other.b;
  }
};

// The pairs of groups with a tight arc between them: the only path between its ends, which the
// levels prove. Sorted by falling weight^2 / (work * work).
std::vector<Bond> bonds_of(const Parts& parts, const Neighbors& neighbors, const Link& link,
                           const Levels& levels, const std::vector<double>& work) {
  const int32_t n = parts.size();
  const Rows members = rows_by(parts.group, n);
  std::vector<Bond> bonds;
  std::vector<int64_t> seen(n, -1);
  std::vector<uint8_t> tight;
  for (int32_t a = 0; a < n; ++a) {
    const size_t begin = bonds.size();
    for (int32_t u : Row(members, a)) {
      for (const bool forward : {false, true}) {
        for (const Arc& arc : Side(forward ? neighbors.after : neighbors.before, u)) {
          const int32_t b = parts.group[arc.part];
          if (b <= a) continue;
          if (seen[b] < static_cast<int64_t>(begin)) {
            seen[b] = static_cast<int64_t>(bonds.size());
            bonds.push_back({0.0, a, b});
            tight.push_back(0);
          }
          bonds[seen[b]].rating += 1.0 + link.send_ns(arc.nbytes);
          tight[seen[b]] |= forward ? levels.tight(u, arc.part) : levels.tight(arc.part, u);
        }
      }
    }
    size_t end = begin;
    for (size_t i = begin; i < bonds.size(); ++i) {
      if (!tight[i]) continue;
      const double weight = bonds[i].rating;
      bonds[end] = bonds[i];
      bonds[end++].rating = weight * weight / ((1.0 + work[a]) * (1.0 + work[bonds[i].b]));
    }
    bonds.resize(end);
    tight.resize(end);
  }
  std::sort(bonds.begin(), bonds.end());
  return bonds;
}

// Matches groups and proposes to join their parts along tight arcs, or, if `siblings`, those next
// to each other among the successors or the predecessors of a part, between which the levels prove
// that there is no path.
Proposal match_groups(const Parts& parts, const Neighbors& neighbors, const Link& link,
                      int64_t limit, double most_work, bool siblings) {
  const int32_t n = parts.size();
  const Levels levels(neighbors, n);
  std::vector<double> work(n, 0.0);
  for (int32_t u = 0; u < n; ++u) work[parts.group[u]] += static_cast<double>(parts.time[u]);
  Groups groups(parts, neighbors, limit);
  std::vector<int32_t> partner(n, -1);
  const auto match = [&](int32_t a, int32_t b) {
    if (partner[a] >= 0 || partner[b] >= 0 || a == b || work[a] + work[b] > most_work) return;
    if (!groups.join(a, b)) return;
    partner[a] = b;
    partner[b] = a;
  };
  Proposal proposal(parts);
  std::vector<uint8_t> joined(n, 0);
  const auto join = [&](int32_t u, int32_t v) {
    if (joined[u] || joined[v] || parts.group[v] != partner[parts.group[u]]) return;
    proposal.sets.join(u, v);
    joined[u] = joined[v] = 1;
  };
  if (siblings) {
    for (int32_t u = 0; u < n; ++u) {
      for (const Arcs* side : {&neighbors.after, &neighbors.before}) {
        const Arc* last = nullptr;
        for (const Arc& arc : Side(*side, u)) {
          if (partner[parts.group[arc.part]] >= 0) continue;
          if (last != nullptr && levels.apart(last->part, arc.part)) {
            match(parts.group[last->part], parts.group[arc.part]);
            join(last->part, arc.part);
          }
          last = &arc;
        }
      }
    }
    return proposal;
  }
  for (const auto& [rating, a, b] : bonds_of(parts, neighbors, link, levels, work)) match(a, b);
  for (int32_t u = 0; u < n; ++u) {
    for (const Arc& arc : Side(neighbors.after, u)) {
      if (levels.tight(u, arc.part)) join(u, arc.part);
    }
  }
  return proposal;
}

// The parts of all ops while they are contracted.
class Contraction {
 public:
  Contraction(const Problem& problem, Parts parts) : parts_(std::move(parts)), link_(problem) {
    result_.part_of.resize(problem.ops);
    std::iota(result_.part_of.begin(), result_.part_of.end(), 0);
  }

  int32_t size() const { return parts_.size(); }

  CoarseLevel level() const {
    CoarseLevel level = result_;
    level.group = parts_.group;
    return level;
  }

  // One round of the rules; whether anything has joined.
  bool rules(int64_t limit) {
    const Neighbors neighbors = neighbors_of(parts_);
    Proposal proposal = apply_rules(parts_, neighbors, link_, limit);
    return contract(neighbors, proposal);
  }

  // One round of matching; whether enough has joined for another like it.
  bool matching(int64_t limit, double most_work, bool siblings) {
    const Neighbors neighbors = neighbors_of(parts_);
    Proposal proposal = match_groups(parts_, neighbors, link_, limit, most_work, siblings);
    const int32_t before = parts_.size();
    contract(neighbors, proposal);
    return parts_.size() <= kProgress * before;
  }

  double total_work() const {
    return static_cast<double>(std::accumulate(parts_.time.begin(), parts_.time.end(), int64_t{0}));
  }

 private:
  bool contract(const Neighbors& neighbors, Proposal& proposal) {
    const int32_t before = parts_.size();
    const std::vector<int32_t> rank = settle(parts_, neighbors, proposal);
    for (int32_t& part : result_.part_of) part = rank[part];
    return parts_.size() < before;
  }

  Parts parts_;
  Link link_;
  CoarseLevel result_;
};

}  // namespace

std::vector<CoarseLevel> coarsen(const Problem& problem, const std::vector<uint8_t>& idle,
                                 const std::vector<int32_t>& color, int64_t limit,
                                 const std::vector<int32_t>& targets) {
  Contraction contraction(problem, parts_of(problem, idle, color));
  while (contraction.rules(limit)) {
  }
  std::vector<CoarseLevel> levels = {contraction.level()};
  const double total = contraction.total_work();
  const double share = kShareOfDevice * total / problem.devices;
  int32_t kept = contraction.size();
  for (int32_t target : targets) {
    const double most_work = std::min(share, kLargest * total / std::max(target, 1));
    while (contraction.size() > target && (contraction.matching(limit, most_work, false) ||
                                           contraction.matching(limit, most_work, true))) {
    }
    if (contraction.size() >= kShrink * kept) continue;
    kept = contraction.size();
    levels.push_back(contraction.level());
  }
  return levels;
}

}  // namespace baechi
