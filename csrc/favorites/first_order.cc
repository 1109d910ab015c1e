// First-order solution of m-SCT's program as a smoothed game, with a proved gap.
//
// For shares y let F(y) be the longest path where edge e takes c_e (1 - y_e). That is a game: the
// minimizer chooses y, the maximizer a path, or equivalently a flow f of one unit from the ops
// without parents to those without children.
//
//     min over y of F(y) = max over f of [ sum k f + sum c f - M(c f) ]
//
// where M(c f) is the largest weight of a (fractional) matching whose edges weigh c_e f_e.
//
// Method (Nesterov 2005, "Smooth minimization of non-smooth functions"): replace the maximum over
// paths by mu * log(sum over paths of exp(length / mu)). One pass over the ops in topological order
// gives its value (`forward`), one pass back its gradient -c f, where f is the flow that takes
// every path in proportion to exp(length / mu) (`backward`). Accelerated projected gradient steps
// (Beck and Teboulle 2009) with backtracking; momentum restarts where it points uphill (O'Donoghue
// and Candes 2015). mu starts near the mean cost and is halved when the smoothing is what keeps the
// proved gap open. All effects are local, so the number of steps hardly depends on the number of
// layers: 10 to 350 for a gap of 0.5 %.
//
// A step is measured by the sum of sqrt(f_e) (c_e d_e)^2. The factor c_e^2 makes the curvature
// about 1 / mu whatever the costs. The factor sqrt(f_e), updated for every mu, allows edges with
// little flow to move far; without it graphs in wide layers, where all edges have little flow, take
// twice the steps.
//
// The projection on the matchings is one pass over the ops' children and the ops' parents
// (`project`), starting from the last prices. So it is inexact, which costs steps but not
// soundness: the proof recomputes everything from shares and flow (`TransferGraph`).
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
// Steps between two proofs, each of which costs about as much as one step.
constexpr int32_t kProofEvery = 10;
// The first mu, in mean costs. Between 0.05 and 0.5 the number of steps changes little.
constexpr double kFirstMu = 0.2;
// mu is halved where the smoothing is so many times the gap.
constexpr double kSmoothingShare = 1.2;
// ... and after so many steps at the latest.
constexpr int32_t kStepsPerMu = 400;
// Cheaper edges, in mean costs, get no share: they cannot improve the result, and their steps,
// which are proportional to 1 / c, would lose all digits.
constexpr double kWorthless = 1e-6;
// exp(-40) is below half a unit in the last place of 1.
constexpr double kNegligible = -40;
// Factor by which the assumed curvature decays at every check.
constexpr double kForget = 0.8;
// Steps between two checks of the assumed curvature. The proof does not depend on it, and a check
// costs a pass.
constexpr int32_t kCheckEvery = 5;
// An edge counts as if at least this part of the mean flow passed.
constexpr double kLeastFlow = 0.1;
// ... and this part of the unit, if nearly all of it passes edges that cost nothing.
constexpr double kNoFlow = 1e-12;

// A share that is not projected yet, and how fast it falls with the price at its ends.
struct Wanted {
  double share, slope;
  int32_t src, dst;
};

// The same beside others at one end, where the price at its other end is paid.
struct Offer {
  double share, slope;
};

class Smoothing {
 public:
  explicit Smoothing(const Transfers& transfers);
  Shares run(double tolerance, int32_t max_iterations);

 private:
  double forward(const Vector& y, double mu);
  double backward(const Vector& y, double value, double mu);
  bool step(double value, double curvature, bool checked, double mu);
  void project();
  double price(size_t count, double sum, double slopes);
  void measure(const Vector& flow, double weight);
  void certify();

  TransferGraph graph_;
  Vector y_, before_, ahead_;        // shares: now, one step ago, extrapolated
  Vector metric_, inverse_;          // of a step: the weight of every edge, and 1 over it, or 0
  Vector end_, share_, sink_share_;  // of the forward pass: per op, per edge, per sink
  Flow flow_, mean_;
  double mean_weight_ = 0, least_ = 0, uphill_ = 0;
  Vector child_price_;          // per op, as a child; flow_.price is as a parent
  std::vector<Wanted> wanted_;  // per edge
  std::vector<Offer> offers_;   // of one op
  Vector best_y_;
  double best_ = kNever, bound_ = 0;
};

Smoothing::Smoothing(const Transfers& transfers) : graph_(transfers) {
  for (Vector* row : {&y_, &before_, &ahead_, &metric_, &inverse_, &share_, &best_y_})
    row->assign(graph_.edges, 0.0);
  wanted_.resize(graph_.edges), offers_.resize(graph_.edges);
  end_.assign(graph_.ops, 0.0), child_price_.assign(graph_.ops, 0.0),
      sink_share_.assign(graph_.sinks.size(), 0.0);
  flow_.clear(graph_.ops, graph_.edges), mean_.clear(graph_.ops, graph_.edges);
}

// The smoothed longest path.
double Smoothing::forward(const Vector& y, double mu) {
  const double per_mu = 1 / mu;
  // The maximum of values[0 .. count), softened; values become the shares of each in it.
  const auto soften = [mu, per_mu](double* values, int32_t count, double top) {
    double sum = 0;
    for (int32_t i = 0; i < count; ++i) {
      const double below = (values[i] - top) * per_mu;
      sum += values[i] = below == 0 ? 1.0 : below < kNegligible ? 0.0 : std::exp(below);
    }
    if (sum == 1) return top;
    const double part = 1 / sum;
    for (int32_t i = 0; i < count; ++i) values[i] *= part;
    return top + mu * std::log(sum);
  };
  for (size_t j = 0; j < graph_.ops; ++j) {
    const int32_t first = graph_.into[j], count = graph_.into[j + 1] - first;
    double start = 0;
    for (int32_t e = first; e < first + count; ++e) {
      share_[e] = end_[graph_.src[e]] + graph_.cost[e] * (1 - y[e]);
      start = std::max(start, share_[e]);
    }
    if (count > 0) start = soften(&share_[first], count, start);
    end_[j] = start + graph_.times[j];
  }
  double top = 0;
  for (size_t s = 0; s < graph_.sinks.size(); ++s)
    sink_share_[s] = end_[graph_.sinks[s]], top = std::max(top, sink_share_[s]);
  return soften(sink_share_.data(), static_cast<int32_t>(graph_.sinks.size()), top);
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

// The metric where so much flow, times `weight`, passes every edge.
void Smoothing::measure(const Vector& flow, double weight) {
  double mean = 0;
  size_t worth = 0;
  for (size_t e = 0; e < graph_.edges; ++e)
    if (graph_.cost[e] > least_) mean += flow[e], ++worth;
  const double least = std::max(kLeastFlow * mean / static_cast<double>(worth), kNoFlow);
  for (size_t e = 0; e < graph_.edges; ++e) {
    const double cost = graph_.cost[e];
    metric_[e] = cost * cost * std::sqrt(std::max(flow[e], least) * weight);
    inverse_[e] = cost > least_ ? 1 / metric_[e] : 0.0;
  }
}

// One accelerated step from ahead_, where the smoothed path is `value`; whether the curvature was
// enough, which is looked at only where it is to be `checked`.
bool Smoothing::step(double value, double curvature, bool checked, double mu) {
  const double per_curvature = 1 / curvature;
  for (size_t e = 0; e < graph_.edges; ++e) {
    const double slope = inverse_[e] * per_curvature;
    wanted_[e] = {ahead_[e] + flow_.edge[e] * graph_.cost[e] * slope, slope, graph_.src[e],
                  graph_.dst[e]};
  }
  project();
  double model = value, distance = 0;
  uphill_ = 0;
  const Vector& parent_price = flow_.price;
  for (size_t e = 0; e < graph_.edges; ++e) {
    const auto& [share, slope, src, dst] = wanted_[e];
    y_[e] = std::max(0.0, share - (parent_price[src] + child_price_[dst]) * slope);
    const double moved = y_[e] - ahead_[e], metric = metric_[e];
    uphill_ -= metric * moved * (y_[e] - before_[e]);
    model -= flow_.edge[e] * graph_.cost[e] * moved;
    distance += metric * moved * moved;
  }
  // The last term is what rounding can add to two sums of this size.
  return !checked || forward(y_, mu) <= model + curvature / 2 * distance + 1e-12 * value;
}

// The least price p >= 0 at which max(0, share - p * slope) of the first offers add up to at
// most 1.
double Smoothing::price(size_t count, double sum, double slopes) {
  // At the price of the remaining offers, some may have no share (Michelot 1986).
  double found = 0;
  while (sum > 1) {
    const double next = (sum - 1) / slopes;
    if (next <= found) break;
    found = next;
    sum = slopes = 0;
    for (size_t i = 0; i < count; ++i) {
      const bool keeps = offers_[i].share > found * offers_[i].slope;
      sum += keeps ? offers_[i].share : 0.0, slopes += keeps ? offers_[i].slope : 0.0;
    }
  }
  return found;
}

void Smoothing::project() {
  Vector& parent_price = flow_.price;
  const auto priced = [this](int32_t first, int32_t last, auto offer) {
    double sum = 0, slopes = 0;
    Offer* next = offers_.data();
    for (int32_t k = first; k < last; ++k) {
      const Offer o = offer(k);
      *next++ = o;
      sum += o.share > 0 ? o.share : 0.0, slopes += o.share > 0 ? o.slope : 0.0;
    }
    return sum > 1 ? price(static_cast<size_t>(last - first), sum, slopes) : 0.0;
  };
  for (size_t i = 0; i < graph_.ops; ++i)
    parent_price[i] = priced(graph_.from[i], graph_.from[i + 1], [this](int32_t k) {
      const Wanted& w = wanted_[graph_.out[k]];
      return Offer{w.share - child_price_[w.dst] * w.slope, w.slope};
    });
  for (size_t j = 0; j < graph_.ops; ++j)
    child_price_[j] = priced(graph_.into[j], graph_.into[j + 1], [&](int32_t k) {
      const Wanted& w = wanted_[k];
      return Offer{w.share - parent_price[w.src] * w.slope, w.slope};
    });
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
  backward(ahead_, forward(ahead_, mu), mu);
  measure(flow_.edge, 1);
  while (result.iterations < max_iterations) {
    const double value = forward(ahead_, mu);
    backward(ahead_, value, mu);
    const bool checked = result.iterations % kCheckEvery == 0;
    std::swap(y_, before_);
    while (!step(value, curvature, checked, mu)) curvature *= 2;
    if (checked) curvature *= kForget;
    ++result.iterations, ++steps_at_mu;
    if (uphill_ > 0) momentum = 1;
    if (momentum == 1) mean_.clear(graph_.ops, graph_.edges), mean_weight_ = 0;
    mean_.add(flow_, momentum), mean_weight_ += momentum;
    const double next = (1 + std::sqrt(1 + 4 * momentum * momentum)) / 2;
    const double far = (momentum - 1) / next;
    for (size_t e = 0; e < graph_.edges; ++e) ahead_[e] = y_[e] + far * (y_[e] - before_[e]);
    momentum = next;
    if (result.iterations % kProofEvery != 0 && result.iterations < max_iterations) continue;
    const double smoothing = backward(y_, forward(y_, mu), mu);
    certify();
    const double gap = best_ - bound_;
    if (gap <= tolerance * bound_) break;
    if (smoothing > kSmoothingShare * gap || steps_at_mu >= kStepsPerMu) {
      mu /= 2, curvature *= 2, momentum = 1, steps_at_mu = 0;
      ahead_ = y_;
      measure(mean_.edge, 1 / mean_weight_);
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
