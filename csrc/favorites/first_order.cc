// Saving transfers by a smoothed game, with a proof of how good the shares are.
//
// For shares y let F(y) be the longest path where edge e takes c_e (1 - y_e). That is a game: one
// side chooses y, the other a path, or, all the same, a flow f of one unit from the ops without
// parents to those without children.
//
//     min over y of F(y) = max over f of [ sum k f + sum c f - M(c f) ]
//
// where M(c f) is the largest weight of a (fractional) matching whose edges weigh c_e f_e.
//
// Method (Nesterov 2005, "Smooth minimization of non-smooth functions"): replace the maximum over
// paths by mu * log(sum over paths of exp(length / mu)). One pass over the ops in topological order
// gives its value (`forward`), one pass back its gradient -c f, where f is the flow that takes
// every path in proportion to exp(length / mu) (`backward`). Accelerated projected gradient steps
// (Beck and Teboulle 2009) with backtracking, in the norm sum (c_e d_e)^2, in which the curvature
// is about 1 / mu whatever the costs; momentum restarts where it points uphill (O'Donoghue and
// Candes 2015). mu starts near the mean cost and is halved when the smoothing is what keeps the
// proved gap open. All effects are local, so the number of steps hardly depends on the number of
// layers: 20 to 300 for a gap of 0.25 %.
//
// The projection on the matchings is by turns over the ops' children and the ops' parents
// (`project`), `kSweeps` times, starting from the last prices. So it is inexact, which costs steps
// but no soundness: shares and flow are proved afresh (`TransferGraph`).
#include "favorites/first_order.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "favorites/transfers.h"

namespace baechi {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// Turns of the projection; more did not save steps.
constexpr int kSweeps = 2;
// Steps between two proofs, each of which costs about as much as one step.
constexpr int32_t kProofEvery = 10;
// The first mu, in mean costs. Between 0.05 and 0.5 the number of steps changes little.
constexpr double kFirstMu = 0.2;
// mu is halved where it explains that much of the gap.
constexpr double kSmoothingShare = 0.9;
// ... and after so many steps at the latest.
constexpr int32_t kStepsPerMu = 400;
// Cheaper edges, in mean costs, get no share: nothing can be gained there, and their steps, which
// go with 1 / c, would lose all digits.
constexpr double kWorthless = 1e-6;
// exp(-40) is below half a unit in the last place of 1.
constexpr double kNegligible = -40;
// How fast the assumed curvature falls back after it was raised.
constexpr double kForget = 0.95;

class Smoothing {
 public:
  explicit Smoothing(const Transfers& transfers);
  Shares run(double tolerance, int32_t max_iterations);

 private:
  double forward(const Vector& y, double mu);
  double backward(const Vector& y, double value, double mu);
  double step(double value, double curvature, double mu);
  void project();
  double price(const int32_t* first, const int32_t* last, const Vector& other, const int32_t* end);
  void certify();

  TransferGraph graph_;
  Vector y_, before_, ahead_, target_;  // shares: now, one step ago, extrapolated, not projected
  Vector weight_, slope_;               // of a step: curvature times c^2, and 1 over it, or 0
  Vector end_, share_, sink_share_;     // of the forward pass: per op, per edge, per sink
  Flow flow_, mean_;
  double mean_weight_ = 0, least_ = 0;
  Vector child_price_;  // per op, as a child; flow_.price is as a parent
  std::vector<std::pair<double, double>> breaks_;
  Vector best_y_;
  double best_ = kNever, bound_ = 0;
};

Smoothing::Smoothing(const Transfers& transfers) : graph_(transfers) {
  for (Vector* row : {&y_, &before_, &ahead_, &target_, &weight_, &slope_, &share_, &best_y_})
    row->assign(graph_.edges, 0.0);
  end_.assign(graph_.ops, 0.0), child_price_.assign(graph_.ops, 0.0),
      sink_share_.assign(graph_.sinks.size(), 0.0);
  flow_.clear(graph_.ops, graph_.edges), mean_.clear(graph_.ops, graph_.edges);
}

// The smoothed longest path.
double Smoothing::forward(const Vector& y, double mu) {
  // The maximum of values[0 .. count), softened; values become the shares of each in it.
  const auto soften = [mu](double* values, int32_t count) {
    const double top = *std::max_element(values, values + count);
    double sum = 0;
    for (int32_t i = 0; i < count; ++i) {
      const double below = (values[i] - top) / mu;
      sum += values[i] = below < kNegligible ? 0.0 : std::exp(below);
    }
    for (int32_t i = 0; i < count; ++i) values[i] /= sum;
    return top + mu * std::log(sum);
  };
  for (size_t j = 0; j < graph_.ops; ++j) {
    const int32_t first = graph_.into[j], count = graph_.into[j + 1] - first;
    for (int32_t e = first; e < first + count; ++e)
      share_[e] = end_[graph_.src[e]] + graph_.cost[e] * (1 - y[e]);
    double start = 0;
    if (count == 1) {
      start = std::exchange(share_[first], 1.0);
    } else if (count > 1) {
      start = soften(&share_[first], count);
    }
    end_[j] = start + graph_.times[j];
  }
  for (size_t s = 0; s < graph_.sinks.size(); ++s) sink_share_[s] = end_[graph_.sinks[s]];
  return soften(sink_share_.data(), static_cast<int32_t>(graph_.sinks.size()));
}

// Fills flow_ after `forward` gave `value`; how much of that is smoothing.
double Smoothing::backward(const Vector& y, double value, double mu) {
  std::fill(flow_.op.begin(), flow_.op.end(), 0.0);
  for (size_t s = 0; s < graph_.sinks.size(); ++s) flow_.op[graph_.sinks[s]] = sink_share_[s];
  double length = 0;
  for (size_t j = graph_.ops; j-- > 0;) {
    const double leaves = flow_.op[j];
    length += leaves * graph_.times[j];
    for (int32_t e = graph_.into[j]; e < graph_.into[j + 1]; ++e) {
      const double passes = leaves * share_[e];
      flow_.edge[e] = passes;
      flow_.op[graph_.src[e]] += passes;
      length += passes * graph_.cost[e] * (1 - y[e]);
    }
  }
  return std::max(value - length, std::numeric_limits<double>::epsilon() * mu);
}

// One accelerated step from ahead_, where the smoothed path is `value`; the curvature that it took.
double Smoothing::step(double value, double curvature, double mu) {
  std::swap(y_, before_);
  for (;; curvature *= 2) {
    for (size_t e = 0; e < graph_.edges; ++e) {
      weight_[e] = curvature * graph_.cost[e] * graph_.cost[e];
      slope_[e] = graph_.cost[e] > least_ ? 1 / weight_[e] : 0.0;
      target_[e] = ahead_[e] + flow_.edge[e] * graph_.cost[e] * slope_[e];
      if (graph_.cost[e] <= least_) target_[e] = 0;
    }
    project();
    double model = value, distance = 0;
    for (size_t e = 0; e < graph_.edges; ++e) {
      const double moved = graph_.cost[e] * (y_[e] - ahead_[e]);
      model -= flow_.edge[e] * moved;
      distance += moved * moved;
    }
    // The last term is what rounding can add to two sums of this size.
    if (forward(y_, mu) <= model + curvature / 2 * distance + 1e-12 * value) return curvature;
  }
}

// The least price p >= 0 at which the shares of some edges add up to at most 1, where a share is
// max(0, target - (p + other[end]) / weight).
double Smoothing::price(const int32_t* first, const int32_t* last, const Vector& other,
                        const int32_t* end) {
  breaks_.clear();  // the price at which a share is 0, and how fast it falls
  double sum = 0;
  for (; first != last; ++first) {
    const int32_t e = *first;
    const double share = target_[e] - other[end[e]] * slope_[e];
    if (share > 0) breaks_.emplace_back(share * weight_[e], slope_[e]), sum += share;
  }
  if (sum <= 1) return 0;
  std::sort(breaks_.begin(), breaks_.end(), std::greater<>());
  double all = 0, slopes = 0, found = 0;
  for (size_t i = 0; i < breaks_.size(); ++i) {
    all += breaks_[i].first * breaks_[i].second;
    slopes += breaks_[i].second;
    found = (all - 1) / slopes;
    if (i + 1 < breaks_.size() && found >= breaks_[i + 1].first) break;
  }
  return std::max(0.0, found);
}

void Smoothing::project() {
  Vector& parent_price = flow_.price;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (size_t i = 0; i < graph_.ops; ++i)
      parent_price[i] = price(&graph_.out[0] + graph_.from[i], &graph_.out[0] + graph_.from[i + 1],
                              child_price_, graph_.dst.data());
    for (size_t j = 0; j < graph_.ops; ++j)
      child_price_[j] = price(&graph_.in[0] + graph_.into[j], &graph_.in[0] + graph_.into[j + 1],
                              parent_price, graph_.src.data());
  }
  for (size_t e = 0; e < graph_.edges; ++e) {
    const double paid = parent_price[graph_.src[e]] + child_price_[graph_.dst[e]];
    y_[e] = std::max(0.0, target_[e] - paid * slope_[e]);
  }
}

// Improves best_, best_y_ and bound_ where y_, flow_ and mean_ are better.
void Smoothing::certify() {
  Vector y = graph_.feasible(y_);
  const double objective = graph_.longest(y);
  if (objective < best_) best_ = objective, best_y_ = std::move(y);
  bound_ = std::max(bound_, graph_.bound(flow_, best_));
  if (mean_weight_ > 0) {
    Flow mean = mean_;
    mean.scale(1 / mean_weight_);
    bound_ = std::max(bound_, graph_.bound(mean, best_));
  }
}

Shares Smoothing::run(double tolerance, int32_t max_iterations) {
  Shares result;
  result.y.assign(graph_.edges, 0.0);
  const double total = std::accumulate(graph_.cost.begin(), graph_.cost.end(), 0.0);
  if (total <= 0) {
    result.objective = result.bound = graph_.longest(y_);
    return result;
  }
  const auto costly =
      std::count_if(graph_.cost.begin(), graph_.cost.end(), [](double c) { return c > 0; });
  const double mean = total / static_cast<double>(costly);
  least_ = kWorthless * mean;
  double mu = kFirstMu * mean;
  double curvature = 1 / mu, momentum = 1;
  int32_t steps_at_mu = 0;
  while (result.iterations < max_iterations) {
    const double value = forward(ahead_, mu);
    backward(ahead_, value, mu);
    curvature = step(value, curvature, mu);
    ++result.iterations, ++steps_at_mu;
    double uphill = 0;
    for (size_t e = 0; e < graph_.edges; ++e)
      uphill += (ahead_[e] - y_[e]) * (y_[e] - before_[e]) * graph_.cost[e] * graph_.cost[e];
    if (uphill > 0) momentum = 1;
    if (momentum == 1) mean_.clear(graph_.ops, graph_.edges), mean_weight_ = 0;
    mean_.add(flow_, momentum), mean_weight_ += momentum;
    const double next = (1 + std::sqrt(1 + 4 * momentum * momentum)) / 2;
    for (size_t e = 0; e < graph_.edges; ++e)
      ahead_[e] = y_[e] + (momentum - 1) / next * (y_[e] - before_[e]);
    momentum = next, curvature *= kForget;
    if (result.iterations % kProofEvery != 0 && result.iterations < max_iterations) continue;
    const double smoothing = backward(y_, forward(y_, mu), mu);
    certify();
    const double gap = best_ - bound_;
    if (gap <= tolerance * bound_) break;
    if (smoothing > kSmoothingShare * gap || steps_at_mu >= kStepsPerMu) {
      mu /= 2, curvature *= 2, momentum = 1, steps_at_mu = 0;
      ahead_ = y_;
    }
  }
  for (size_t e = 0; e < graph_.edges; ++e) result.y[graph_.original[e]] = best_y_[e];
  result.objective = best_, result.bound = std::min(bound_, best_);
  return result;
}

}  // namespace

std::pair<std::vector<double>, std::vector<double>> longest_paths(
    const std::vector<double>& times, const std::vector<int32_t>& src,
    const std::vector<int32_t>& dst, const std::vector<double>& length) {
  Vector before(times.size(), 0.0), after(times.size(), 0.0);
  for (size_t e = 0; e < src.size(); ++e)
    before[dst[e]] = std::max(before[dst[e]], before[src[e]] + times[src[e]] + length[e]);
  for (size_t e = src.size(); e-- > 0;)
    after[src[e]] = std::max(after[src[e]], after[dst[e]] + times[dst[e]] + length[e]);
  return {std::move(before), std::move(after)};
}

Shares save_transfers(const Transfers& transfers, double tolerance, int32_t max_iterations) {
  return Smoothing(transfers).run(tolerance, max_iterations);
}

}  // namespace baechi
