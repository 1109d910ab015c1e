// Saving transfers exactly, by an interior point.
//
// With s the starts of the ops (and w the end of all), y the shares and ends counted as ops:
//
//     minimize w
//     z_e = s_dst - s_src - k_src - c_e (1 - y_e) >= 0      price f_e, a unit flow
//     y_e >= 0                                              price r_e = p_src + q_dst - c_e f_e
//     1 - sum of y over the edges out of (into) an op >= 0  price p (q)
//
// Every pair of an unknown and its price is driven to the same small product, by steps of Newton's
// method, each with a predictor and a corrector (Mehrotra 1992), and where solves are cheap beside
// the factorization with more correctors (Gondzio 1996), each as far as it lengthens the step
// (Colombo and Gondzio 2008). r, z, f and y are eliminated edge
// by edge, so that what is left is a quasidefinite system in s, p and q (`Quasidefinite`): one
// unknown per op, and two per op that has to choose. It is as sparse as the graph, and in graphs
// that are long rather than wide its factor is hardly larger. Start: all shares small, all ops
// late, all flows equal; so every step is feasible up to rounding, and the sum of the products is
// the gap.
//
// The answer does not rest on these numbers: shares and flow are proved afresh (`TransferGraph`).
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <tuple>
#include <utility>

#include "arcs.h"
#include "favorites.h"
#include "pairs.h"
#include "quasidefinite.h"
#include "transfers.h"

namespace baechi {

namespace {

// The part of the way to the boundary that a step takes at least.
constexpr double kBold = 0.9;
// Slack of every op at the start, in mean costs. Between 0.3 and 3 little changes.
constexpr double kLate = 1;
// Cheaper edges, in mean costs, get no share: nothing can be gained there.
constexpr double kWorthless = 1e-9;
// What is proved is often less than the sum of the products: proofs start at so many tolerances.
constexpr double kNear = 10;
// How far a choice is from its op; below half, so that both ends of an arc keep apart.
constexpr double kBeside = 0.3;
// Where a factorization takes more multiplications, steps are worth more solves.
constexpr double kCostly = 2e8;
// Corrections of such a step, at most; weights of each, evenly up to 1; by what part of the way it
// tries to lengthen the step; and by what it must, both ways together, to be followed by another.
constexpr int kCorrections = 2, kWeights = 4;
constexpr double kLonger = 0.5, kWorthwhile = 0.1;

class Interior {
 public:
  explicit Interior(const Transfers& transfers);
  Shares run(double tolerance, int32_t max_iterations, double most_work);

 private:
  void start();
  Vector depths() const;
  void measure();
  void build();
  void direct(const Quasidefinite& matrix);
  void keep();
  std::pair<double, double> weigh(double primal, double dual);
  void lengthen(const Quasidefinite& matrix, double aim, double& primal, double& dual);
  void certify(Shares& result) const;
  std::array<Pairs*, 3> pairs() { return {&slack_, &share_, &choice_}; }

  TransferGraph graph_;
  int32_t ops_;
  std::vector<Arc> arcs_;                  // sorted by dst, edges first
  std::vector<int32_t> free_;              // arcs that may have a share
  std::vector<int32_t> as_parent_;         // choice of every op, or -1
  Vector time_, step_, kept_;              // s and w
  Pairs slack_{0}, share_{0}, choice_{0};  // z and f; y and r; what is left of a choice, and p or q
  Vector time_error_, slack_error_, share_error_, choice_error_;  // what the equations lack
  Vector stiff_, soft_;  // of an arc: f / z; and r / y + c^2 f / z, or 0
  Vector diagonal_, values_;
};

Interior::Interior(const Transfers& transfers)
    : graph_(transfers), ops_(static_cast<int32_t>(graph_.ops)) {
  const double total = std::accumulate(graph_.cost.begin(), graph_.cost.end(), 0.0);
  const double least = kWorthless * total / static_cast<double>(std::max<size_t>(1, graph_.edges));
  std::vector<int32_t> children(graph_.ops, 0), parents(graph_.ops, 0);
  for (size_t e = 0; e < graph_.edges; ++e) {
    const int32_t src = graph_.src[e], dst = graph_.dst[e];
    arcs_.push_back({src, dst, graph_.times[src] + graph_.cost[e], graph_.cost[e]});
    if (graph_.cost[e] <= least) continue;
    ++children[src], ++parents[dst];
    free_.push_back(static_cast<int32_t>(e));
  }
  for (int32_t j = 0; j < ops_; ++j)
    if (graph_.into[j] == graph_.into[j + 1]) arcs_.push_back({-1, j, 0.0, 0.0});
  for (int32_t i : graph_.sinks) arcs_.push_back({i, ops_, graph_.times[i], 0.0});
  // Every edge is bounded at one of its ends at least; an edge alone at an end needs no bound
  // there.
  int32_t choices = 0;
  as_parent_.assign(graph_.ops, -1);
  std::vector<int32_t> as_child(graph_.ops, -1);
  for (int32_t e : free_) {
    Arc& arc = arcs_[e];
    if (as_child[arc.dst] < 0 && (parents[arc.dst] > 1 || children[arc.src] == 1))
      as_child[arc.dst] = choices++;
    if (as_parent_[arc.src] < 0 && children[arc.src] > 1) as_parent_[arc.src] = choices++;
    arc.choices = {as_parent_[arc.src], as_child[arc.dst]};
  }
  time_.assign(graph_.ops + 1, 0.0), step_ = time_;
  slack_ = Pairs(arcs_.size());
  share_ = Pairs(free_.size());
  choice_ = Pairs(static_cast<size_t>(choices));
}

void Interior::start() {
  std::vector<int32_t> count(choice_.x.size(), 0);
  double mean = 0;
  for (int32_t e : free_) {
    mean += arcs_[e].cost / static_cast<double>(free_.size());
    for (int32_t c : arcs_[e].choices)
      if (c >= 0) ++count[c];
  }
  Vector y(arcs_.size(), 0.0);
  for (size_t k = 0; k < free_.size(); ++k) {
    int32_t most = 0;
    for (int32_t c : arcs_[free_[k]].choices)
      if (c >= 0) most = std::max(most, count[c]);
    y[free_[k]] = share_.x[k] = 1.0 / (most + 1);
    for (int32_t c : arcs_[free_[k]].choices)
      if (c >= 0) choice_.x[c] -= share_.x[k];
  }
  std::vector<std::vector<int32_t>> into(time_.size());
  for (size_t e = 0; e < arcs_.size(); ++e) into[arcs_[e].dst].push_back(static_cast<int32_t>(e));
  for (size_t j = 0; j < time_.size(); ++j) {
    for (int32_t e : into[j]) {
      const Arc& arc = arcs_[e];
      slack_.x[e] = arc.length - arc.cost * y[e] + (arc.src >= 0 ? time_[arc.src] : 0.0);
      time_[j] = std::max(time_[j], slack_.x[e] + kLate * mean);
    }
    for (int32_t e : into[j]) slack_.x[e] = time_[j] - slack_.x[e];
  }
  Vector leaves(time_.size(), 0.0);
  leaves.back() = 1;
  for (size_t j = time_.size(); j-- > 0;) {
    double sum = 0;
    for (int32_t e : into[j]) sum += 1 / slack_.x[e];
    for (int32_t e : into[j]) {
      slack_.price[e] = leaves[j] / (slack_.x[e] * sum);
      if (arcs_[e].src >= 0) leaves[arcs_[e].src] += slack_.price[e];
    }
  }
  const double product = slack_.product(0, 0) / static_cast<double>(arcs_.size());
  for (size_t c = 0; c < choice_.x.size(); ++c) choice_.price[c] = product / choice_.x[c];
  for (size_t k = 0; k < free_.size(); ++k) {
    const Arc& arc = arcs_[free_[k]];
    double lacks = arc.cost * slack_.price[free_[k]] + product / share_.x[k];
    for (int32_t c : arc.choices)
      if (c >= 0) lacks -= choice_.price[c];
    for (int32_t c : arc.choices)
      if (c >= 0) choice_.price[c] += std::max(0.0, lacks);
  }
  for (size_t k = 0; k < free_.size(); ++k) {
    const Arc& arc = arcs_[free_[k]];
    share_.price[k] = -arc.cost * slack_.price[free_[k]];
    for (int32_t c : arc.choices)
      if (c >= 0) share_.price[k] += choice_.price[c];
  }
}

void Interior::measure() {
  time_error_.assign(time_.size(), 0.0), choice_error_.assign(choice_.x.size(), 1.0);
  slack_error_.resize(arcs_.size()), share_error_.resize(free_.size());
  time_error_.back() = -1;
  for (size_t e = 0; e < arcs_.size(); ++e) {
    const Arc& arc = arcs_[e];
    slack_error_[e] = time_[arc.dst] - arc.length - slack_.x[e];
    time_error_[arc.dst] += slack_.price[e];
    if (arc.src < 0) continue;
    slack_error_[e] -= time_[arc.src];
    time_error_[arc.src] -= slack_.price[e];
  }
  for (size_t c = 0; c < choice_.x.size(); ++c) choice_error_[c] -= choice_.x[c];
  for (size_t k = 0; k < free_.size(); ++k) {
    const Arc& arc = arcs_[free_[k]];
    slack_error_[free_[k]] += arc.cost * share_.x[k];
    share_error_[k] = -arc.cost * slack_.price[free_[k]] - share_.price[k];
    for (int32_t c : arc.choices)
      if (c >= 0) share_error_[k] += choice_.price[c], choice_error_[c] -= share_.x[k];
  }
}

// Arcs on the longest way to every unknown; a choice is a bit off its op, towards the others.
Vector Interior::depths() const {
  Vector depth(time_.size() + choice_.x.size(), 0.0);
  for (const Arc& arc : arcs_)
    if (arc.src >= 0) depth[arc.dst] = std::max(depth[arc.dst], depth[arc.src] + 1);
  for (const Arc& arc : arcs_) {
    const auto [parent, child] = arc.choices;
    if (parent >= 0) depth[time_.size() + static_cast<size_t>(parent)] = depth[arc.src] + kBeside;
    if (child >= 0) depth[time_.size() + static_cast<size_t>(child)] = depth[arc.dst] - kBeside;
  }
  return depth;
}

void Interior::build() {
  const size_t first_choice = time_.size();
  diagonal_.assign(first_choice + choice_.x.size(), 0.0), values_.clear();
  for (size_t c = 0; c < choice_.x.size(); ++c)
    diagonal_[first_choice + c] = -choice_.x[c] / choice_.price[c];
  stiff_.resize(arcs_.size()), soft_.assign(arcs_.size(), 0.0);
  for (size_t e = 0; e < arcs_.size(); ++e) stiff_[e] = slack_.price[e] / slack_.x[e];
  Vector conducts = stiff_;
  for (size_t k = 0; k < free_.size(); ++k) {
    const int32_t e = free_[k];
    const double own = share_.price[k] / share_.x[k];
    soft_[e] = own + arcs_[e].cost * arcs_[e].cost * stiff_[e];
    conducts[e] *= own / soft_[e];
  }
  for (size_t e = 0; e < arcs_.size(); ++e) {
    const Arc& arc = arcs_[e];
    diagonal_[arc.dst] += conducts[e];
    if (arc.src >= 0) diagonal_[arc.src] += conducts[e], values_.push_back(-conducts[e]);
    const double pull = soft_[e] > 0 ? arc.cost * stiff_[e] / soft_[e] : 0.0;
    for (int32_t c : arc.choices)
      if (c >= 0) {
        values_.push_back(pull), values_.push_back(-pull);
        diagonal_[first_choice + static_cast<size_t>(c)] -= 1 / soft_[e];
      }
    if (arc.choices[0] >= 0 && arc.choices[1] >= 0) values_.push_back(-1 / soft_[e]);
  }
}

// The step that changes the products as wanted and mends what the equations lack.
void Interior::direct(const Quasidefinite& matrix) {
  const size_t first_choice = time_.size();
  Vector x = time_error_, pull(arcs_.size(), 0.0);
  for (size_t c = 0; c < choice_.x.size(); ++c)
    x.push_back(choice_error_[c] - choice_.wanted[c] / choice_.price[c]);
  const auto flow = [&](size_t e) {
    return slack_.wanted[e] / slack_.x[e] - stiff_[e] * slack_error_[e];
  };
  for (size_t k = 0; k < free_.size(); ++k) {
    const int32_t e = free_[k];
    pull[e] =
        (share_.wanted[k] / share_.x[k] - share_error_[k] + arcs_[e].cost * flow(e)) / soft_[e];
    for (int32_t c : arcs_[e].choices)
      if (c >= 0) x[first_choice + static_cast<size_t>(c)] -= pull[e];
  }
  for (size_t e = 0; e < arcs_.size(); ++e) {
    const double change = flow(e) - stiff_[e] * arcs_[e].cost * pull[e];
    x[arcs_[e].dst] += change;
    if (arcs_[e].src >= 0) x[arcs_[e].src] -= change;
  }
  matrix.solve(x);
  std::copy_n(x.begin(), first_choice, step_.begin());
  std::copy(x.begin() + static_cast<std::ptrdiff_t>(first_choice), x.end(), choice_.dprice.begin());
  choice_.dx = choice_error_, slack_.dx = slack_error_;
  for (size_t e = 0; e < arcs_.size(); ++e)
    slack_.dx[e] += step_[arcs_[e].dst] - (arcs_[e].src >= 0 ? step_[arcs_[e].src] : 0.0);
  for (size_t k = 0; k < free_.size(); ++k) {
    const Arc& arc = arcs_[free_[k]];
    const size_t e = static_cast<size_t>(free_[k]);
    double prices = arc.cost * stiff_[e] * (slack_.dx[e] - slack_error_[e]);
    for (int32_t c : arc.choices)
      if (c >= 0) prices += choice_.dprice[c];
    share_.dx[k] = pull[e] - prices / soft_[e];
    slack_.dx[e] += arc.cost * share_.dx[k];
    for (int32_t c : arc.choices)
      if (c >= 0) choice_.dx[c] -= share_.dx[k];
    share_.set_dprice(k);
  }
  for (size_t e = 0; e < arcs_.size(); ++e) slack_.set_dprice(e);
}

void Interior::keep() {
  kept_ = step_;
  for (Pairs* some : pairs()) some->keep();
}

// Changes the kept step towards the new one as far as it becomes the longest, the primal and the
// dual part each for itself; tells their lengths. The kept one is told to have these.
std::pair<double, double> Interior::weigh(double primal, double dual) {
  double primal_weight = 0, dual_weight = 0;
  for (int k = kWeights; k > 0; --k) {
    const double weight = static_cast<double>(k) / kWeights;
    double primal_now = 1, dual_now = 1;
    for (const Pairs* some : pairs()) {
      primal_now = std::min(primal_now, reach(some->x, some->kept_dx, some->dx, weight));
      dual_now = std::min(dual_now, reach(some->price, some->kept_dprice, some->dprice, weight));
    }
    if (primal_now > primal) primal = primal_now, primal_weight = weight;
    if (dual_now > dual) dual = dual_now, dual_weight = weight;
  }
  for (size_t j = 0; j < step_.size(); ++j) step_[j] = between(kept_[j], step_[j], primal_weight);
  for (Pairs* some : pairs()) some->change(primal_weight, dual_weight);
  return {primal, dual};
}

// Corrects a step of these lengths: products that a longer one leaves far from the aim come nearer.
void Interior::lengthen(const Quasidefinite& matrix, double aim, double& primal, double& dual) {
  for (int k = 0; k < kCorrections; ++k) {
    keep();
    const double longer = std::min(1.0, primal + kLonger), dearer = std::min(1.0, dual + kLonger);
    for (Pairs* some : pairs()) some->want_near(aim, longer, dearer);
    direct(matrix);
    const double before = primal + dual;
    std::tie(primal, dual) = weigh(primal, dual);
    if (primal + dual < before + kWorthwhile) break;
  }
}

// Improves the result where these shares, or this flow, are better.
void Interior::certify(Shares& result) const {
  Vector y(graph_.edges, 0.0);
  for (size_t k = 0; k < free_.size(); ++k) y[free_[k]] = share_.x[k];
  y = graph_.feasible(std::move(y));
  const double objective = graph_.longest(y);
  if (objective < result.objective) {
    result.objective = objective;
    for (size_t e = 0; e < graph_.edges; ++e) result.y[graph_.original[e]] = y[e];
  }
  // What leaves an op came in proportion to what the arcs into it carry.
  Flow flow;
  flow.clear(graph_.ops, graph_.edges);
  Vector total(time_.size(), 0.0);
  for (size_t e = 0; e < arcs_.size(); ++e) total[arcs_[e].dst] += slack_.price[e];
  for (size_t e = graph_.edges; e < arcs_.size(); ++e)
    if (arcs_[e].dst == ops_) flow.op[arcs_[e].src] = slack_.price[e] / total.back();
  for (size_t e = graph_.edges; e-- > 0;) {
    flow.edge[e] = flow.op[graph_.dst[e]] * slack_.price[e] / total[graph_.dst[e]];
    flow.op[graph_.src[e]] += flow.edge[e];
  }
  for (size_t i = 0; i < graph_.ops; ++i)
    if (as_parent_[i] >= 0) flow.price[i] = choice_.price[as_parent_[i]];
  result.bound = std::max(result.bound, graph_.bound(flow, result.objective));
}

Shares Interior::run(double tolerance, int32_t max_iterations, double most_work) {
  Shares result;
  result.y.assign(graph_.edges, 0.0);
  result.objective = graph_.longest(result.y);
  Quasidefinite matrix(static_cast<int32_t>(time_.size() + choice_.x.size()),
                       places(arcs_, static_cast<int32_t>(time_.size())), depths(), most_work);
  if (matrix.work() > most_work) return result;
  start();
  const double count = static_cast<double>(arcs_.size() + free_.size() + choice_.x.size());
  const auto product = [&](double primal, double dual) {
    double sum = 0;
    for (const Pairs* some : pairs()) sum += some->product(primal, dual);
    return sum;
  };
  const auto step = [&](double aim, bool corrected) {
    for (Pairs* some : pairs()) some->want(aim, corrected);
    direct(matrix);
    double primal = 1, dual = 1;
    for (const Pairs* some : pairs()) {
      primal = std::min(primal, reach(some->x, some->dx));
      dual = std::min(dual, reach(some->price, some->dprice));
    }
    return std::pair(primal, dual);
  };
  const bool costly = matrix.work() > kCostly;
  while (result.iterations < max_iterations) {
    const double gap = product(0, 0);
    if (!std::isfinite(gap)) break;
    if (gap <= kNear * tolerance * time_.back()) certify(result);
    if (result.objective <= (1 + tolerance) * result.bound) break;
    ++result.iterations;
    measure();
    build();
    matrix.factor(diagonal_, values_);
    auto [primal, dual] = step(0, false);
    const double left = product(primal, dual) / gap;
    const double aim = left * left * left * gap / count;
    if (costly) keep();
    std::tie(primal, dual) = step(aim, true);
    if (costly) {
      std::tie(primal, dual) = weigh(0, 0);
      lengthen(matrix, aim, primal, dual);
    }
    const double part = std::max(kBold, 1 - left / 10);
    if (primal < 1) primal *= part;
    if (dual < 1) dual *= part;
    for (size_t j = 0; j < time_.size(); ++j) time_[j] += primal * step_[j];
    for (Pairs* some : pairs()) some->move(primal, dual);
  }
  result.bound = std::min(result.bound, result.objective);
  return result;
}

}  // namespace

Shares save_most_transfers(const Transfers& transfers, double tolerance, int32_t max_iterations,
                           double most_work) {
  return Interior(transfers).run(tolerance, max_iterations, most_work);
}

}  // namespace baechi
