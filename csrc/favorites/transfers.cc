#include "favorites/transfers.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace baechi {

namespace {

// Sweeps that lower the prices of a proof.
constexpr int kPriceSweeps = 4;

}  // namespace

void Flow::clear(size_t ops, size_t edges) {
  edge.assign(edges, 0.0), op.assign(ops, 0.0), price.assign(ops, 0.0);
}

void Flow::add(const Flow& other, double weight) {
  for (size_t e = 0; e < edge.size(); ++e) edge[e] += weight * other.edge[e];
  for (size_t i = 0; i < op.size(); ++i) {
    op[i] += weight * other.op[i];
    price[i] += weight * other.price[i];
  }
}

void Flow::scale(double factor) {
  for (Vector* row : {&edge, &op, &price})
    for (double& x : *row) x *= factor;
}

TransferGraph::TransferGraph(const Transfers& t)
    : ops(t.times.size()), edges(t.src.size()), times(t.times) {
  into.assign(ops + 1, 0), from.assign(ops + 1, 0);
  for (size_t e = 0; e < edges; ++e) ++into[t.dst[e] + 1], ++from[t.src[e] + 1];
  std::partial_sum(into.begin(), into.end(), into.begin());
  std::partial_sum(from.begin(), from.end(), from.begin());
  src.resize(edges), dst.resize(edges), original.resize(edges), cost.resize(edges);
  out.resize(edges);
  std::vector<int32_t> next = into;
  for (size_t e = 0; e < edges; ++e) {
    const int32_t at = next[t.dst[e]]++;
    src[at] = t.src[e], dst[at] = t.dst[e], cost[at] = t.cost[e];
    original[at] = static_cast<int32_t>(e), out[e] = at;
  }
  for (size_t i = 0; i < ops; ++i)
    if (from[i] == from[i + 1]) sinks.push_back(static_cast<int32_t>(i));
}

Vector TransferGraph::feasible(Vector y) const {
  for (const std::vector<int32_t>* end : {&dst, &src}) {
    Vector total(ops, 0.0);
    for (size_t e = 0; e < edges; ++e) total[(*end)[e]] += y[e];
    for (size_t e = 0; e < edges; ++e) y[e] /= std::max(1.0, total[(*end)[e]]);
  }
  return y;
}

double TransferGraph::longest(const Vector& y) const {
  Vector ends(ops);
  double longest = 0;
  for (size_t j = 0; j < ops; ++j) {
    double start = 0;
    for (int32_t e = into[j]; e < into[j + 1]; ++e)
      start = std::max(start, ends[src[e]] + cost[e] * (1 - y[e]));
    ends[j] = start + times[j];
    longest = std::max(longest, ends[j]);
  }
  return longest;
}

double TransferGraph::bound(const Flow& flow, double best) const {
  double value = 0, unit = 0, surplus = 0;
  for (int32_t i : sinks) unit += flow.op[i];
  for (size_t j = 0; j < ops; ++j) {
    double enters = 0, leaves = from[j] == from[j + 1] ? flow.op[j] : 0.0;
    for (int32_t e = into[j]; e < into[j + 1]; ++e) {
      enters += flow.edge[e];
      value += flow.edge[e] * cost[e];
    }
    for (int32_t i = from[j]; i < from[j + 1]; ++i) leaves += flow.edge[out[i]];
    value += leaves * times[j];
    surplus += std::max(0.0, enters - leaves);
  }
  // Each sweep keeps the prices valid and lowers them as far as the edges allow.
  Vector parent = flow.price, child(ops);
  for (int sweep = 0; sweep < kPriceSweeps; ++sweep) {
    std::fill(child.begin(), child.end(), 0.0);
    for (size_t e = 0; e < edges; ++e)
      child[dst[e]] = std::max(child[dst[e]], cost[e] * flow.edge[e] - parent[src[e]]);
    std::fill(parent.begin(), parent.end(), 0.0);
    for (size_t e = 0; e < edges; ++e)
      parent[src[e]] = std::max(parent[src[e]], cost[e] * flow.edge[e] - child[dst[e]]);
  }
  const double prices = std::accumulate(parent.begin(), parent.end(), 0.0) +
                        std::accumulate(child.begin(), child.end(), 0.0);
  const double terms = 2 * static_cast<double>(ops + edges + 1);
  const double rounding = terms * std::numeric_limits<double>::epsilon() * (value + prices + best);
  return (value - prices - surplus * best - rounding) / unit;
}

}  // namespace baechi
