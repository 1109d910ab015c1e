// Memory, which is the host's, and copies.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "machine.h"

namespace emulated {

namespace {

constexpr size_t kTotal = size_t{16} << 30;     // of a device
constexpr size_t kContext = size_t{500} << 20;  // what its context takes
constexpr size_t kPage = 4096;
constexpr size_t kPoisoned = size_t{32} << 20;  // larger ones are zeros: their pages cost time

struct Block {
  size_t bytes;
  int device;
};

using Blocks = std::map<const char*, Block>;

Blocks& on_devices() {
  static Blocks blocks;
  return blocks;
}

Blocks& pinned() {
  static Blocks blocks;
  return blocks;
}

const Block* find(const Blocks& blocks, const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return nullptr;
  const auto& [start, block] = *--next;
  return address < start + (block.bytes == 0 ? 1 : block.bytes) ? &block : nullptr;
}

size_t used(int device) {
  size_t sum = 0;
  for (const auto& [start, block] : on_devices()) sum += block.device == device ? block.bytes : 0;
  return sum;
}

// With a page behind it, for those that read too far.
size_t mapped(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage + kPage; }

}  // namespace

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaMalloc(void** made, size_t bytes) {
  const Lock lock(everything());
  if (const cudaError_t error = unsafe_in_capture()) return error;
  if (used(current_device()) + bytes > kTotal) return failed(cudaErrorMemoryAllocation);
  *made = mmap(nullptr, mapped(bytes), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*made == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  if (bytes <= kPoisoned) std::memset(*made, 0xFF, bytes);  // not a number, in every format
  on_devices()[static_cast<char*>(*made)] = {bytes, current_device()};
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  const Lock lock(everything());
  if (const cudaError_t error = unsafe_in_capture()) return error;
  if (pointer == nullptr) return cudaSuccess;
  finish_all();
  const auto block = on_devices().find(static_cast<char*>(pointer));
  if (block == on_devices().end()) return failed(cudaErrorInvalidValue);
  munmap(pointer, mapped(block->second.bytes));
  on_devices().erase(block);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock lock(everything());
  *total = kTotal;
  const size_t taken = used(current_device()) + kContext;
  *free = taken < kTotal ? kTotal - taken : 0;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
  const Lock lock(everything());
  *made = std::aligned_alloc(kPage, mapped(bytes));
  pinned()[static_cast<char*>(*made)] = {bytes, -1};
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  const Lock lock(everything());
  finish_all();
  pinned().erase(static_cast<char*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  const Lock lock(everything());
  pinned()[static_cast<char*>(pointer)] = {bytes, -1};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  const Lock lock(everything());
  pinned().erase(static_cast<char*>(pointer));
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Lock lock(everything());
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->devicePointer = const_cast<void*>(pointer);
  if (const Block* block = find(on_devices(), pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = block->device;
  } else if (find(pinned(), pointer) != nullptr) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

// https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html: what comes from pageable
// memory is staged at once, and what goes there is there when the call returns.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t on) {
  const Lock lock(everything());
  Stream& stream = stream_of(on);
  const auto is_pageable = [](const void* pointer) {
    return find(on_devices(), pointer) == nullptr && find(pinned(), pointer) == nullptr;
  };
  if (is_captured(stream) && (is_pageable(from) || is_pageable(to))) return spoil(stream);
  if (is_pageable(from)) {
    const char* first = static_cast<const char*>(from);
    push(stream, [to, staged = std::vector<char>(first, first + bytes)] {
      std::memcpy(to, staged.data(), staged.size());
    });
  } else {
    push(stream, [=] { std::memmove(to, from, bytes); });
  }
  if (is_pageable(to)) finish(stream);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const Lock lock(everything());
  if (const cudaError_t error = unsafe_in_capture()) return error;
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  finish(stream_of(nullptr));
  return error;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t on) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t on) {
  const Lock lock(everything());
  push(stream_of(on), [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

}  // extern "C"
