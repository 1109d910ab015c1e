// What groups hold besides their persistent bytes, whatever is placed where.
#pragma once

#include <cstdint>
#include <vector>

#include "core.h"

namespace baechi {

// A time that every schedule has, and at which much memory is surely in use: that at which some op
// starts, or the end of the step.
class Moment {
 public:
  // The one at which the groups of the problem hold the most, of those that are tried. O((ops +
  // consumers) * tried).
  explicit Moment(const Problem& problem);

  // Bytes per group: no device whose memory they pass can have these groups together. `of` per op,
  // the groups of the problem together.
  std::vector<int64_t> held(const std::vector<int32_t>& of, int32_t count) const;

 private:
  // Makes the op's start the moment, or, below 0, the end of the step.
  void choose(int32_t op);
  int64_t total() const;

  const Problem& problem_;
  bool ends_ = true;             // whether it is the end of the step
  std::vector<uint8_t> lasts_;   // per op, whether it takes time on every device
  std::vector<uint8_t> before_;  // per op, whether it has ended, or at the end of the step started
  std::vector<uint8_t> after_;   // per op, whether it has yet to end
};

}  // namespace baechi
