// Memory, which is the host's, and copies.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "machine.h"

namespace emulated {

namespace {

constexpr size_t kContext = size_t{500} << 20;  // what a device's context takes
constexpr size_t kPage = 4096;

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

size_t total() { return static_cast<size_t>(setting("MEMORY", int64_t{16} << 30)); }

size_t used(int device) {
  size_t sum = kContext;
  for (const auto& [start, block] : on_devices()) sum += block.device == device ? block.bytes : 0;
  return sum;
}

// With a page behind it, for those that read too far.
size_t mapped(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage + kPage; }

// The most that was used of a device while memory was taken in the order of streams.
std::map<int, size_t>& most_used() {
  static std::map<int, size_t> most;
  return most;
}

int device_of(cudaMemPool_t pool) { return static_cast<int>(reinterpret_cast<intptr_t>(pool)) - 1; }

cudaError_t take(void** made, size_t bytes) {
  if (!fits(bytes, current_device())) return failed(cudaErrorMemoryAllocation);
  *made = mmap(nullptr, mapped(bytes), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*made == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  if (bytes <= kPoisoned) std::memset(*made, 0xFF, bytes);  // not a number, in every format
  add_block(static_cast<char*>(*made), bytes, current_device());
  return cudaSuccess;
}

cudaError_t give(void* pointer) {
  const auto block = on_devices().find(static_cast<char*>(pointer));
  if (block == on_devices().end()) return failed(cudaErrorInvalidValue);
  munmap(pointer, mapped(block->second.bytes));
  on_devices().erase(block);
  return cudaSuccess;
}

}  // namespace

bool fits(size_t bytes, int device) { return used(device) + bytes <= total(); }

void add_block(const char* start, size_t bytes, int device) {
  on_devices()[start] = {bytes, device};
}

void drop_blocks(const char* start, size_t bytes) {
  Blocks& blocks = on_devices();
  blocks.erase(blocks.lower_bound(start), blocks.lower_bound(start + bytes));
}

}  // namespace emulated

using namespace emulated;

extern "C" {

cudaError_t cudaMalloc(void** made, size_t bytes) {
  ENTER;
  if (const cudaError_t error = unsafe_in_capture()) return error;
  return take(made, bytes);
}

cudaError_t cudaFree(void* pointer) {
  ENTER;
  if (const cudaError_t error = unsafe_in_capture()) return error;
  if (pointer == nullptr) return cudaSuccess;
  finish_all();
  return give(pointer);
}

// In the order of a stream (`backend:cudaMallocAsync`), and not in a capture. What is let go of too
// early is no memory any more when somebody reads it.
cudaError_t cudaMallocAsync(void** made, size_t bytes, cudaStream_t on) {
  ENTER;
  if (is_captured(stream_of(on))) return failed(cudaErrorNotSupported);
  const cudaError_t error = take(made, bytes);
  size_t& most = most_used()[current_device()];
  most = std::max(most, used(current_device()));
  return error;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t on) {
  ENTER;
  push(stream_of(on), [pointer] { give(pointer); });
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<intptr_t>(device) + 1);
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const Lock lock(everything());
  const int device = device_of(pool);
  const bool high =
      attribute == cudaMemPoolAttrUsedMemHigh || attribute == cudaMemPoolAttrReservedMemHigh;
  const size_t bytes = high ? std::max(most_used()[device], used(device)) : used(device);
  *static_cast<uint64_t*>(value) = bytes - kContext;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void*) {
  const Lock lock(everything());
  if (attribute == cudaMemPoolAttrUsedMemHigh) most_used()[device_of(pool)] = 0;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  ENTER;
  *all = total();
  const size_t taken = used(current_device());
  *free = taken < *all ? *all - taken : 0;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
  ENTER;
  *made = std::aligned_alloc(kPage, mapped(bytes));
  pinned()[static_cast<char*>(*made)] = {bytes, -1};
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  ENTER;
  finish_all();
  pinned().erase(static_cast<char*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  ENTER;
  pinned()[static_cast<char*>(pointer)] = {bytes, -1};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  ENTER;
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
  ENTER;
  Stream& stream = stream_of(on);
  const auto is_pageable = [](const void* pointer) {
    return find(on_devices(), pointer) == nullptr && find(pinned(), pointer) == nullptr;
  };
  if (is_captured(stream) && (is_pageable(from) || is_pageable(to))) return spoil(stream);
  const int64_t rate = setting("BYTES_PER_US", 1 << 30);
  const int64_t ns = setting("COPY_NS") + static_cast<int64_t>(bytes) * 1000 / rate;
  if (is_pageable(from)) {
    const char* first = static_cast<const char*>(from);
    push(
        stream,
        [to, staged = std::vector<char>(first, first + bytes)] {
          std::memcpy(to, staged.data(), staged.size());
        },
        ns);
  } else {
    push(stream, [=] { std::memmove(to, from, bytes); }, ns);
  }
  if (is_pageable(to)) finish(stream);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  ENTER;
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
  ENTER;
  push(stream_of(on), [=] { std::memset(to, value, bytes); }, setting("KERNEL_NS"));
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

}  // extern "C"
