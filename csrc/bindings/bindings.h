// Conversions of arrays shared by the bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

namespace baechi {

namespace nb = nanobind;

// What Python objects hold.
void bind_identity(nb::module_& m);

// The result of a function that runs without Python's lock.
template <typename F>
auto unlocked(F function) {
  nb::gil_scoped_release released;
  return function();
}

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> vector_of(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.shape(0));
}

template <typename T>
using OutArray = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// The vector as a NumPy array that owns it.
template <typename T>
OutArray<T> array_of(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {kept->data(), {kept->size()}, owner};
}

}  // namespace baechi
