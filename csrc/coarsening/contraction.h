// Contraction of an operator graph, round by round, for the rounds of `coarsening.cc`.
//
// A round reads the parts and the arcs between them, and proposes sets of parts; `settle` splits
// the sets that make a cycle and contracts the others. Since each round reads a smaller graph,
// rounds get cheaper: a round is O(arcs) except for a heap of the ready parts.
#pragma once

#include "clock/core.h"

namespace baechi::contraction {

// The parts between two rounds, in topological order, and the tensors between them. A group is
// identified by its first part, and per-group data is stored there.
struct Parts {
  std::vector<int32_t> first;           // per part, its first op
  std::vector<int32_t> group;           // per part
  std::vector<int64_t> time, absorbed;  // per part; absorbed: time of its cheap parts
  std::vector<uint8_t> idle;            // per part
  std::vector<int64_t> bytes;           // per group: persistent and all outputs
  std::vector<int64_t> workspace;       // per group, the largest
  std::vector<int32_t> color;           // per group
  std::vector<int32_t> producer;        // per tensor
  std::vector<int64_t> nbytes;          // per tensor
  Rows consumers;                       // per tensor, without its producer

  int32_t size() const { return static_cast<int32_t>(first.size()); }
};

struct Arc {
  int32_t part;
  int64_t nbytes;
};

// Per part its neighbors on one side, each once.
struct Arcs {
  std::vector<int64_t> begin;
  std::vector<Arc> arcs;

  const Arc* first(int32_t part) const { return arcs.data() + begin[part]; }
  const Arc* last(int32_t part) const { return arcs.data() + begin[part + 1]; }
  int64_t size(int32_t part) const { return begin[part + 1] - begin[part]; }
};

struct Side {
  const Arc *from, *to;
  Side(const Arcs& arcs, int32_t part) : from(arcs.first(part)), to(arcs.last(part)) {}
  const Arc* begin() const { return from; }
  const Arc* end() const { return to; }
};

struct Neighbors {
  Arcs before, after;
};

Neighbors neighbors_of(const Parts& parts);

// Every op alone. For `idle` and `color` see `coarsen`.
Parts parts_of(const Problem& problem, const std::vector<uint8_t>& idle,
               const std::vector<int32_t>& color);

// The groups of the parts, which merge during a round.
class Groups {
 public:
  // The arguments must outlive it. No group gets more than `limit` bytes.
  Groups(const Parts& parts, const Neighbors& neighbors, int64_t limit);

  // Joins two groups if allowed; returns whether they are one afterwards. A part of each is a
  // neighbor of the other's, or they have one part each.
  bool join(int32_t a, int32_t b);

 private:
  bool touch(int32_t a, int32_t b);

  const Parts& parts_;
  const Neighbors& neighbors_;
  const int64_t limit_;
  Union union_;
  std::vector<int64_t> load_;
  Rows members_;                 // per group
  std::vector<int64_t> degree_;  // per group
  std::vector<int64_t> seen_;    // per part, the query that visited it last
  int64_t asked_ = 0;
};

// Proposals of a round: sets of parts as a union-find, and per root the absorbed time.
struct Proposal {
  Union sets;
  std::vector<int64_t> absorbed;

  explicit Proposal(const Parts& parts) : sets(parts.size()), absorbed(parts.absorbed) {}
};

// Contracts the sets that make no cycle. Returns the place of every old part among the new ones.
std::vector<int32_t> settle(Parts& parts, const Neighbors& neighbors, Proposal& proposal);

}  // namespace baechi::contraction
