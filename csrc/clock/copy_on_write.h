// An immutable row of values.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace baechi {

// Copies share the values, which live as long as any of them. Reads like a vector.
template <typename T>
class Shared {
 public:
  Shared() = default;
  Shared(std::vector<T>&& values)
      : kept_(std::make_shared<const std::vector<T>>(std::move(values))),
        data_(kept_->data()),
        size_(kept_->size()) {}

  const T* data() const { return data_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T& operator[](std::size_t at) const { return data_[at]; }
  std::vector<T> copy() const { return {begin(), end()}; }

 private:
  std::shared_ptr<const std::vector<T>> kept_;
  const T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace baechi
