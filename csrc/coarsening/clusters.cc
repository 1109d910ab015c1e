// Nested clusters of groups, for a local search that moves many groups at once.
//
// Groups are the vertices of a weighted graph: an edge weighs what it costs to send all tensors
// between its ends, each once, at the mean latency and the mean time per byte of all paths. A level
// is a matching of the previous level: edges are taken by falling weight^2 / (work * work) of their
// ends, as in multilevel partitioning (KaHIP's "expansion*2"), so that costly edges go first and
// clusters have similar sizes. Unmatched vertices pair up if they have the same best neighbor
// (METIS's two-hop matching), so the leaves of a star halve, too. A cluster has one color,
// persistent bytes that the largest memory holds, and at most `kLargest` times the mean work of its
// level.
//
// O(E log E) for the first level with E pairs of a tensor and a consumer, and the levels shrink.
#include <algorithm>
#include <numeric>

#include "clock/core.h"
#include "coarsening/coarse.h"

namespace baechi {

namespace {

// A level is kept if it has at most this share of the clusters of the last one kept.
constexpr double kShrink = 0.75;
// The largest work of a cluster, as a multiple of the mean work after a perfect matching.
constexpr double kLargest = 2.0;
// Minimum number of clusters in a level: with fewer, one would be a whole device's load.
constexpr int32_t kFewest = 4;

struct Edge {
  int32_t u, v;
  double weight;
};

struct GroupGraph {
  std::vector<Edge> edges;  // u < v, each pair once, ascending
  std::vector<double> work, bytes;
  std::vector<int32_t> color;

  int32_t size() const { return static_cast<int32_t>(work.size()); }
};

// Sorts by (u, v) in two counting passes and adds up the weights of a pair.
std::vector<Edge> merged(const std::vector<Edge>& edges, int32_t n) {
  std::vector<Edge> rows(edges.size()), result;
  std::vector<int64_t> begin;
  const auto pass = [&begin, n](const std::vector<Edge>& from, std::vector<Edge>& to,
                                int32_t Edge::* key) {
    begin.assign(static_cast<size_t>(n) + 1, 0);
    for (const Edge& edge : from) ++begin[edge.*key + 1];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    for (const Edge& edge : from) to[begin[edge.*key]++] = edge;
  };
  std::vector<Edge> by_v(edges.size());
  pass(edges, by_v, &Edge::v);
  pass(by_v, rows, &Edge::u);
  for (const Edge& edge : rows) {
    if (!result.empty() && result.back().u == edge.u && result.back().v == edge.v) {
      result.back().weight += edge.weight;
    } else {
      result.push_back(edge);
    }
  }
  return result;
}

// The mean latency, with the overhead, and the mean time per byte between pools; 1 ns and no time
// where nothing is sent.
std::pair<double, double> mean_link(const Problem& problem) {
  double latency = 0, per_byte = 0;
  int64_t paths = 0;
  for (int32_t src = 0; src < problem.devices; ++src) {
    for (int32_t dst = 0; dst < problem.devices; ++dst) {
      if (problem.pool[src] == problem.pool[dst] || !problem.has_path(src, dst)) continue;
      latency += static_cast<double>(problem.latency_ns(src, dst) + problem.overhead_ns(src, dst));
      per_byte += 1e9 / static_cast<double>(problem.bytes_per_s(src, dst));
      ++paths;
    }
  }
  if (paths == 0) return {1.0, 0.0};
  return {1.0 + latency / static_cast<double>(paths), per_byte / static_cast<double>(paths)};
}

GroupGraph group_graph(const Problem& problem, const std::vector<int32_t>& color) {
  const int32_t n = problem.groups;
  GroupGraph graph;
  graph.color = color.empty() ? std::vector<int32_t>(n, 0) : color;
  graph.bytes.assign(problem.group_persistent.begin(), problem.group_persistent.end());
  graph.work.assign(n, 1.0);  // so that no product of two is 0
  for (int32_t op = 0; op < problem.ops; ++op) {
    graph.work[problem.group[op]] += static_cast<double>(problem.durations[op]);
  }
  const auto [latency, per_byte] = mean_link(problem);
  std::vector<Edge> edges;
  std::vector<int32_t> seen(n, -1);  // the tensor that met a group last
  for (int32_t tensor = 0; tensor < problem.tensors; ++tensor) {
    const int32_t u = problem.group[problem.producer[tensor]];
    const double weight = latency + per_byte * static_cast<double>(problem.nbytes[tensor]);
    seen[u] = tensor;
    for (int32_t consumer : Row(problem.consumers, tensor)) {
      const int32_t v = problem.group[consumer];
      if (seen[v] == tensor) continue;
      seen[v] = tensor;
      edges.push_back({std::min(u, v), std::max(u, v), weight});
    }
  }
  graph.edges = merged(edges, n);
  return graph;
}

// A matching: per vertex its partner, or itself.
std::vector<int32_t> match(const GroupGraph& graph, double largest_work, double largest_bytes) {
  const auto may_join = [&](int32_t u, int32_t v) {
    return graph.color[u] == graph.color[v] && graph.work[u] + graph.work[v] <= largest_work &&
           graph.bytes[u] + graph.bytes[v] <= largest_bytes;
  };
  std::vector<std::pair<double, int32_t>> order;  // minus the rating, and the edge
  for (int32_t i = 0; i < static_cast<int32_t>(graph.edges.size()); ++i) {
    const Edge& edge = graph.edges[i];
    const double sizes = graph.work[edge.u] * graph.work[edge.v];
    order.emplace_back(-edge.weight * edge.weight / sizes, i);
  }
  std::sort(order.begin(), order.end());
  std::vector<int32_t> partner(graph.size()), hub(graph.size(), -1), waiting(graph.size(), -1);
  std::iota(partner.begin(), partner.end(), 0);
  for (const auto& [rating, i] : order) {
    const auto& [u, v, weight] = graph.edges[i];
    if (hub[u] < 0) hub[u] = v;
    if (hub[v] < 0) hub[v] = u;
    if (partner[u] == u && partner[v] == v && may_join(u, v)) {
      partner[u] = v;
      partner[v] = u;
    }
  }
  for (int32_t u = 0; u < graph.size(); ++u) {
    if (partner[u] != u || hub[u] < 0) continue;
    const int32_t other = waiting[hub[u]];
    if (other >= 0 && may_join(u, other)) {
      partner[u] = other;
      partner[other] = u;
      waiting[hub[u]] = -1;
    } else {
      waiting[hub[u]] = u;
    }
  }
  return partner;
}

// Joins the partners; per vertex its vertex in the result.
std::vector<int32_t> contract(GroupGraph& graph, const std::vector<int32_t>& partner) {
  std::vector<int32_t> next(graph.size());
  GroupGraph result;
  for (int32_t u = 0; u < graph.size(); ++u) {
    const int32_t v = partner[u];
    if (v < u) {
      next[u] = next[v];
      continue;
    }
    next[u] = result.size();
    result.work.push_back(graph.work[u] + (v == u ? 0 : graph.work[v]));
    result.bytes.push_back(graph.bytes[u] + (v == u ? 0 : graph.bytes[v]));
    result.color.push_back(graph.color[u]);
  }
  std::vector<Edge> edges;
  for (const auto& [from, to, weight] : graph.edges) {
    const int32_t u = next[from], v = next[to];
    if (u != v) edges.push_back({std::min(u, v), std::max(u, v), weight});
  }
  result.edges = merged(edges, result.size());
  graph = std::move(result);
  return next;
}

}  // namespace

std::vector<std::vector<int32_t>> group_clusters(const Problem& problem,
                                                 const std::vector<int32_t>& color) {
  GroupGraph graph = group_graph(problem, color);
  std::vector<int32_t> cluster(graph.size());
  std::iota(cluster.begin(), cluster.end(), 0);
  std::vector<std::vector<int32_t>> levels = {cluster};
  const double total = std::accumulate(graph.work.begin(), graph.work.end(), 0.0);
  const double memory =
      static_cast<double>(*std::max_element(problem.memory.begin(), problem.memory.end()));
  int32_t kept = graph.size();
  double largest = graph.size() > 0 ? kLargest * 2 * total / graph.size() : 0;
  while (graph.size() > kFewest) {
    const int32_t before = graph.size();
    const std::vector<int32_t> next = contract(graph, match(graph, largest, memory));
    for (int32_t& c : cluster) c = next[c];
    if (graph.size() <= kept * kShrink && graph.size() >= kFewest) {
      kept = graph.size();
      levels.push_back(cluster);
    }
    if (graph.size() == before && largest >= total) break;
    largest = std::max(2 * largest, kLargest * 2 * total / graph.size());
  }
  return levels;
}

}  // namespace baechi
