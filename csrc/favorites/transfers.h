// The transfers of a program of favorite children as a graph, and both ends of the gap: computed
// independently from shares and from a flow, they hold however inexact those are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "favorites/first_order.h"

namespace baechi {

using Vector = std::vector<double>;

// A flow of one unit from the ops without parents to those without children, with prices.
struct Flow {
  Vector edge, op;  // per edge what passes, per op what leaves it (or ends there)
  Vector price;     // per op, for its children

  void clear(std::size_t ops, std::size_t edges);
  void add(const Flow& other, double weight);
  void scale(double factor);
};

// Edges sorted by dst; into[j] .. into[j + 1] are op j's, and out[from[i]] .. those that leave op
// i.
struct TransferGraph {
  std::size_t ops, edges;
  Vector times;
  std::vector<int32_t> into, from, out, src, dst;
  std::vector<int32_t> original;  // of every edge, the caller's number
  std::vector<int32_t> sinks;     // ops without children
  Vector cost;

  explicit TransferGraph(const Transfers& transfers);

  // Shares divided by the sums above 1, first of the children, then of the parents.
  Vector feasible(Vector y) const;

  // The longest path with these shares: for feasible ones, no less than the optimum.
  double longest(const Vector& y) const;

  // A lower bound on the longest path with any feasible shares, of which one has `best`. For any
  // f >= 0 and prices p, q >= 0 with p_src + q_dst >= c_e f_e, weak duality says
  //
  //     w >= sum k f + sum c f - sum p - sum q       for every feasible w, if f is a unit flow
  //
  // The flow's prices are made valid first. What enters an op beyond what leaves it, by rounding,
  // is added up and charged `best`. The sums themselves are over ops + 2 edges terms, so that the
  // standard bound (terms * 2^-53 relative) holds for each; twice that, and more, is taken off.
  double bound(const Flow& flow, double best) const;
};

}  // namespace baechi
