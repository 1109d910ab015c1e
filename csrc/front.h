// Dense fronts of a sparse factorization.
#pragma once

#include <cstdint>

namespace baechi {

// Eliminates the first `columns` columns of a symmetric front, of which only the lower triangle
// counts: they become those of L, with D on the diagonal, and the rest what is left without them.
// Row r of column c is front[c * height + r]. A pivot whose sign is not that of `sign` becomes so
// large that its unknown is 0 in solutions. The same to the last bit on every machine: each entry
// has its own sum, always in the same order, whatever the width of the registers.
void eliminate(double* front, int64_t height, int64_t columns, const double* sign);

}  // namespace baechi
