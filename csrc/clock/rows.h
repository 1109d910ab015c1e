// Rows of values: immutable ones that copies share, and ones in large pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

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

// Data that grows with the graph is in pages of 2 MiB, if the system has them. Small pages are
// fetched from the system one by one, 4 KiB each, whenever a timeline starts on
// fresh memory: on graphs of 10^5 ops that took half as long as the clock itself.
template <typename T>
struct LargePages {
  using value_type = T;
  static constexpr std::size_t kPage = std::size_t{2} << 20;
  // Smaller vectors would waste most of such a page.
  static constexpr std::size_t kLarge = kPage / 4;

  LargePages() = default;
  template <typename U>
  LargePages(const LargePages<U>&) {}  // NOLINT: the standard's conversion

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes < kLarge) return static_cast<T*>(::operator new(bytes));
    const std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
    void* memory = std::aligned_alloc(kPage, whole);
    if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
    madvise(memory, whole, MADV_HUGEPAGE);  // only advice: systems without such pages refuse
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) {
    if (count * sizeof(T) < kLarge) {
      ::operator delete(memory);
    } else {
      std::free(memory);
    }
  }
  template <typename U>
  bool operator==(const LargePages<U>&) const {
    return true;
  }
  template <typename U>
  bool operator!=(const LargePages<U>&) const {
    return false;
  }
};

template <typename T>
using LargeVector = std::vector<T, LargePages<T>>;

// Prefetches the memory that a row will soon grow into: it is fresh, so not in any cache.
template <typename T>
void fetch_after(const LargeVector<T>& row) {
  constexpr std::uintptr_t kBytesAhead = 1024;
  const auto end = reinterpret_cast<std::uintptr_t>(row.data() + row.size());
  __builtin_prefetch(reinterpret_cast<const void*>(end + kBytesAhead), 1);
}

}  // namespace baechi
