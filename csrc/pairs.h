// Unknowns of an interior point, with their prices and the step of both.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace baechi {

// A product further than so many times off the aim is corrected.
constexpr double kFar = 3;

inline double between(double from, double to, double weight) { return from + weight * (to - from); }

// Unknowns that are at least 0, and their prices.
struct Pairs {
  std::vector<double> x, price;
  std::vector<double> dx, dprice;            // the step
  std::vector<double> kept_dx, kept_dprice;  // an earlier one
  std::vector<double> wanted;                // change of the product

  explicit Pairs(std::size_t size)
      : x(size, 1.0), price(size, 0.0), dx(size, 0.0), dprice(size, 0.0), wanted(size, 0.0) {}

  // The sum of the products after these parts of the step.
  double product(double primal, double dual) const {
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i)
      sum += (x[i] + primal * dx[i]) * (price[i] + dual * dprice[i]);
    return sum;
  }
  void want(double product, bool corrected) {
    for (std::size_t i = 0; i < x.size(); ++i)
      wanted[i] = product - x[i] * price[i] - (corrected ? dx[i] * dprice[i] : 0.0);
  }
  // What the step does, and products near the aim after these parts of it; a large one is lowered
  // by no more than the largest that is near.
  void want_near(double aim, double primal, double dual) {
    const double low = aim / kFar, high = aim * kFar;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double then = (x[i] + primal * dx[i]) * (price[i] + dual * dprice[i]);
      const double near = std::max(std::clamp(then, low, high) - then, -high);
      wanted[i] = x[i] * dprice[i] + price[i] * dx[i] + near;
    }
  }
  void set_dprice(std::size_t i) { dprice[i] = (wanted[i] - price[i] * dx[i]) / x[i]; }
  void move(double primal, double dual) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += primal * dx[i], price[i] += dual * dprice[i];
  }
  void keep() { kept_dx = dx, kept_dprice = dprice; }
  // From the kept step so far towards this one.
  void change(double primal, double dual) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      dx[i] = between(kept_dx[i], dx[i], primal);
      dprice[i] = between(kept_dprice[i], dprice[i], dual);
    }
  }
};

// The part of a step that keeps all values at least 0, 1 at most.
inline double reach(const std::vector<double>& values, const std::vector<double>& step) {
  double reach = 1;
  for (std::size_t i = 0; i < values.size(); ++i)
    if (step[i] < 0) reach = std::min(reach, -values[i] / step[i]);
  return reach;
}

// The same for a step between two.
inline double reach(const std::vector<double>& values, const std::vector<double>& from,
                    const std::vector<double>& to, double weight) {
  double reach = 1;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double step = between(from[i], to[i], weight);
    if (values[i] + reach * step < 0) reach = -values[i] / step;
  }
  return reach;
}

}  // namespace baechi
