#include "front.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace baechi {

namespace {

// Columns that are eliminated before those behind them hear of it, and one by one.
constexpr int64_t kPanel = 64;
constexpr int64_t kFew = 8;
// Columns that the update keeps in registers, and registers for the rows of each.
constexpr int64_t kTile = 4;
constexpr int64_t kTall = 2;

// As many doubles as a register of the machine has, anywhere in memory.
template <size_t kLanes>
struct Register {
  typedef double Type __attribute__((vector_size(kLanes * sizeof(double)), aligned(8), may_alias));
};

// Rows of some columns, tile by tile, and in each column by column; zeros below the last row.
struct Panel {
  int64_t count;  // of columns
  std::vector<double> values;

  Panel(const double* columns, int64_t height, int64_t count, int64_t rows, int64_t tile)
      : count(count), values(static_cast<size_t>((rows + tile - 1) / tile * tile * count)) {
    for (int64_t c = 0; c < count; ++c)
      for (int64_t first = 0; first < rows; first += tile)
        std::copy_n(columns + c * height + first, std::min(tile, rows - first),
                    &values[static_cast<size_t>(first * count + c * tile)]);
  }
  // Of the tile that starts at this row.
  const double* at(int64_t row) const { return &values[static_cast<size_t>(row * count)]; }
};

// Subtracts from columns begin .. end - 1 of the lower triangle what columns first .. begin - 1 say
// of them.
template <size_t kLanes>
__attribute__((always_inline)) inline void subtract(double* front, int64_t height, int64_t first,
                                                    int64_t begin, int64_t end) {
  using Lanes = typename Register<kLanes>::Type;
  constexpr int64_t kLane = kLanes, kRows = kTall * kLane;
  const int64_t count = begin - first, rows = height - begin, columns = end - begin;
  const double* from = front + first * height + begin;
  const Panel left(from, height, count, rows, kRows);
  Panel right(from, height, count, columns, kTile);
  for (int64_t at = 0; at < columns; at += kTile)
    for (int64_t c = 0; c < count; ++c) {
      const double pivot = front[(first + c) * height + first + c];
      double* scaled = &right.values[static_cast<size_t>(at * count + c * kTile)];
      for (int64_t j = 0; j < kTile; ++j) scaled[j] *= pivot;
    }
  for (int64_t column = 0; column < columns; column += kTile)
    for (int64_t row = column / kRows * kRows; row < rows; row += kRows) {
      const double* x = left.at(row);
      const double* y = right.at(column);
      Lanes a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{};
      for (int64_t c = 0; c < count; ++c, x += kRows, y += kTile) {
        const Lanes upper = *reinterpret_cast<const Lanes*>(x);
        const Lanes lower = *reinterpret_cast<const Lanes*>(x + kLane);
        a0 += upper * y[0], a1 += lower * y[0];
        b0 += upper * y[1], b1 += lower * y[1];
        c0 += upper * y[2], c1 += lower * y[2];
        d0 += upper * y[3], d1 += lower * y[3];
      }
      const Lanes sums[kTile][kTall] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}};
      double* to = front + (begin + column) * height + begin + row;
      const int64_t here = std::min(kTile, columns - column), deep = std::min(kRows, rows - row);
      for (int64_t j = 0; j < here; ++j, to += height) {
        if (deep == kRows) {
          for (int64_t k = 0; k < kTall; ++k)
            *reinterpret_cast<Lanes*>(to + k * kLane) -= sums[j][k];
        } else {
          for (int64_t i = 0; i < deep; ++i) to[i] -= sums[j][i / kLane][i % kLane];
        }
      }
    }
}

using Subtract = void (*)(double*, int64_t, int64_t, int64_t, int64_t);

void subtract_by_two(double* front, int64_t height, int64_t first, int64_t begin, int64_t end) {
  subtract<2>(front, height, first, begin, end);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void subtract_by_four(double* front, int64_t height, int64_t first,
                                                      int64_t begin, int64_t end) {
  subtract<4>(front, height, first, begin, end);
}

Subtract fastest() { return __builtin_cpu_supports("avx2") ? subtract_by_four : subtract_by_two; }
#else
Subtract fastest() { return subtract_by_two; }
#endif

void one_by_one(double* front, int64_t height, int64_t first, int64_t end, const double* sign) {
  for (int64_t c = first; c < end; ++c) {
    double* column = front + c * height;
    const double pivot = column[c] * sign[c] > 0 ? column[c] : sign[c] * 1e100;
    column[c] = pivot;
    for (int64_t r = c + 1; r < height; ++r) column[r] /= pivot;
    for (int64_t j = c + 1; j < end; ++j) {
      double* other = front + j * height;
      const double factor = column[j] * pivot;
      for (int64_t r = j; r < height; ++r) other[r] -= factor * column[r];
    }
  }
}

// Columns first .. end - 1: the first half, what it says of the second, the second half.
void halves(double* front, int64_t height, int64_t first, int64_t end, const double* sign,
            Subtract subtract) {
  if (end - first <= kFew) return one_by_one(front, height, first, end, sign);
  const int64_t middle = first + (end - first) / 2;
  halves(front, height, first, middle, sign, subtract);
  subtract(front, height, first, middle, end);
  halves(front, height, middle, end, sign, subtract);
}

}  // namespace

void eliminate(double* front, int64_t height, int64_t columns, const double* sign) {
  const Subtract subtract = fastest();
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t end = std::min(first + kPanel, columns);
    halves(front, height, first, end, sign, subtract);
    if (end < height) subtract(front, height, first, end, height);
  }
}

}  // namespace baechi
