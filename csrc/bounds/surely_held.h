// Bytes that groups hold besides their persistent bytes in every placement.
#pragma once

#include "clock/core.h"

namespace baechi {

// Times that every schedule has, and at which much memory is surely in use: the end of the step,
// the start of the op at which all groups together hold the most, and those of the ops that need
// the most themselves.
class Moments {
 public:
  // O((ops + consumers) * moments that are tried).
  explicit Moments(const Problem& problem);

  int32_t count() const { return static_cast<int32_t>(chosen_.size()); }
  // Bytes per [group * count() + moment]: groups that together exceed a memory at one moment are
  // not on one device. `of` per op, the groups of the problem together.
  std::vector<int64_t> held(const std::vector<int32_t>& of, int32_t groups) const;

 private:
  struct Moment {
    int32_t op;                   // that starts, or -1 at the end of the step
    std::vector<uint8_t> before;  // per op, whether it has ended, or at the end of the step started
    std::vector<uint8_t> after;   // per op, whether it has yet to end
  };

  Moment at(int32_t op) const;
  int64_t needs(int32_t op) const {
    return problem_.output_bytes[op] + problem_.least_workspace[op];
  }
  int32_t fullest() const;
  void add(const Moment& moment, const std::vector<int32_t>& of, int64_t* held,
           int32_t stride) const;

  const Problem& problem_;
  std::vector<uint8_t> lasts_;  // per op, whether it takes time on every device
  std::vector<Moment> chosen_;
};

// The most bytes that all groups together surely hold at one of the moments.
int64_t most_held(const Problem& problem);

}  // namespace baechi
