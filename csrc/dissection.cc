// Nested dissection with smallest separators.
//
// A part is sorted by position. Its first and last unknowns are the two sides, and a separator is
// taken from the rest: the smallest one is as large as there are paths between the sides that share
// no unknown (Menger 1927). The paths are found one after the other, by depth-first search in what
// the paths before leave (Ford and Fulkerson 1956); the separator is where the search ends at last.
// Where it is large beside what it cuts off, the part stays whole: there minimum degree does
// better.
#include "dissection.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace baechi {

namespace {

// The part of the unknowns that is each side at least. Between 0.25 and 0.4 little changes.
constexpr double kSide = 0.3;
// Separators larger than so much of the smaller side gain nothing. Between 0.25 and 0.35 little
// changes; at 0.5 a factorization takes up to 1.5 times as much.
constexpr double kLargest = 0.3;
// Smaller parts are dense soon, and no longer worth the search.
constexpr size_t kSmallest = 200;
// Halves of halves, at most; stage of the first separator.
constexpr int32_t kDepth = 30;
// No unknown before, or behind, on a path; and the side, where a path starts or ends.
constexpr int32_t kNone = -1, kEnd = -2;

class Dissection {
 public:
  explicit Dissection(const std::vector<std::vector<int32_t>>& near)
      : near_(near),
        stage_(near.size(), 0),
        side_(near.size(), kOutside),
        before_(near.size(), kNone),
        behind_(near.size(), kNone),
        entered_(near.size(), 0),
        left_(near.size(), 0) {}

  // Unknowns in the order of their positions.
  void split(const std::vector<int32_t>& part, int32_t stage);
  std::vector<int32_t> take() { return std::move(stage_); }

 private:
  enum Side : char { kOutside, kFirst, kMiddle, kLast };
  // A search is about to leave an unknown to its next neighbor, or has only entered it.
  struct Visit {
    int32_t at;
    bool leaving;
    size_t next = 0;
  };

  void choose_sides(const std::vector<int32_t>& part);
  void find_paths(const std::vector<int32_t>& part);
  bool extend(int32_t start);
  bool advance(std::vector<Visit>& way);
  void enter(std::vector<Visit>& way, int32_t i) { entered_[i] = 1, way.push_back({i, false}); }
  void leave(std::vector<Visit>& way, int32_t i) { left_[i] = 1, way.push_back({i, true}); }
  void follow(const std::vector<Visit>& way);

  const std::vector<std::vector<int32_t>>& near_;
  std::vector<int32_t> stage_;
  std::vector<Side> side_;
  std::vector<int32_t> before_, behind_;  // on the path through an unknown
  std::vector<char> entered_, left_;      // by the search
};

void Dissection::split(const std::vector<int32_t>& part, int32_t stage) {
  if (part.size() < kSmallest || stage == 0) return;
  choose_sides(part);
  find_paths(part);
  std::vector<int32_t> first, last, between;
  for (int32_t i : part) {
    if (side_[i] == kMiddle && entered_[i] && !left_[i])
      between.push_back(i);
    else
      (side_[i] == kFirst || left_[i] ? first : last).push_back(i);
  }
  for (int32_t i : part) side_[i] = kOutside;
  const auto smaller = static_cast<double>(std::min(first.size(), last.size()));
  if (static_cast<double>(between.size()) > kLargest * smaller) return;
  for (int32_t i : between) stage_[i] = stage;
  split(first, stage - 1);
  split(last, stage - 1);
}

void Dissection::choose_sides(const std::vector<int32_t>& part) {
  const size_t size = part.size();
  const auto side = static_cast<size_t>(kSide * static_cast<double>(size));
  for (size_t k = 0; k < size; ++k)
    side_[part[k]] = k < side ? kFirst : k < size - side ? kMiddle : kLast;
  // The sides may not touch.
  for (size_t k = 0; k < side; ++k)
    for (int32_t j : near_[part[k]])
      if (side_[j] == kLast) side_[j] = kMiddle;
}

void Dissection::find_paths(const std::vector<int32_t>& part) {
  std::vector<int32_t> starts;
  for (int32_t i : part) {
    before_[i] = behind_[i] = kNone;
    const auto in_first = [&](int32_t j) { return side_[j] == kFirst; };
    if (side_[i] == kMiddle && std::any_of(near_[i].begin(), near_[i].end(), in_first))
      starts.push_back(i);
  }
  for (bool more = true; more;) {
    more = false;
    for (int32_t i : part) entered_[i] = left_[i] = 0;
    for (int32_t i : starts) {
      if (entered_[i]) continue;
      if (before_[i] == kEnd)
        entered_[i] = 1;
      else
        more |= extend(i);
    }
  }
}

// One path more, where the search from this unknown reaches the other side.
bool Dissection::extend(int32_t start) {
  std::vector<Visit> way;
  enter(way, start);
  while (!way.empty())
    if (advance(way)) {
      follow(way);
      return true;
    }
  return false;
}

// One step of the search, forward or back; true if it has come to the other side.
bool Dissection::advance(std::vector<Visit>& way) {
  Visit& last = way.back();
  const int32_t i = last.at, before = before_[i];
  const size_t turn = last.next++;
  if (!last.leaving) {
    // Free unknowns are passed; from one on a path the search goes back along it, which frees the
    // unknown for the new path.
    const int32_t to = before == kNone ? i : before;
    if (turn == 0 && to >= 0 && !left_[to])
      leave(way, to);
    else
      way.pop_back();
    return false;
  }
  if (turn == 0) {
    if (before != kNone && !entered_[i]) enter(way, i);
    return false;
  }
  if (turn > near_[i].size()) {
    way.pop_back();
    return false;
  }
  const int32_t j = near_[i][turn - 1];
  if (side_[j] == kLast) return true;
  if (side_[j] == kMiddle && behind_[i] != j && !entered_[j]) enter(way, j);
  return false;
}

// Takes back what the search went back along, then adds what it went ahead.
void Dissection::follow(const std::vector<Visit>& way) {
  for (size_t k = 0; k + 1 < way.size(); ++k)
    if (!way[k].leaving && way[k].at != way[k + 1].at)
      before_[way[k].at] = behind_[way[k + 1].at] = kNone;
  for (size_t k = 0; k + 1 < way.size(); ++k)
    if (way[k].leaving && way[k].at != way[k + 1].at)
      behind_[way[k].at] = way[k + 1].at, before_[way[k + 1].at] = way[k].at;
  before_[way.front().at] = behind_[way.back().at] = kEnd;
}

}  // namespace

std::vector<int32_t> dissect(const std::vector<std::vector<int32_t>>& near,
                             const std::vector<double>& position) {
  std::vector<int32_t> all(near.size());
  std::iota(all.begin(), all.end(), 0);
  std::stable_sort(all.begin(), all.end(),
                   [&](int32_t a, int32_t b) { return position[a] < position[b]; });
  Dissection dissection(near);
  dissection.split(all, kDepth);
  return dissection.take();
}

}  // namespace baechi
