// Kernels: for every operator of a GPU the one of the CPU, queued on the current stream.
//
//   operator  ->  shapes of its results, from a run on nothing  ->  room from torch's own allocator
//             ->  a task that runs the CPU's kernel on that memory, when the stream comes to it
//
// What the host must know at once, such as how many entries are not zero, waits for the stream.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>

#include "attention.h"
#include "cells.h"
#include "machine.h"

namespace emulated {

namespace {

using at::IValue;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using Values = std::vector<IValue>;

// Below this no mode, no autograd and no autocast sees what is called.
struct Bare {
  c10::impl::ExcludeDispatchKeyGuard guard{
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
                      DispatchKey::PythonDispatcher, DispatchKey::Functionalize,
                      DispatchKey::ADInplaceOrView}) |
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset};
};

void keep_number(const Tensor& from, const Tensor& to) {
  const bool is_number = from.unsafeGetTensorImpl()->is_wrapped_number();
  if (is_number) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const Tensor host = at::from_blob(
      tensor.storage().mutable_data(), tensor.sizes(), tensor.strides(), tensor.storage_offset(),
      [](void*) {}, tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  keep_number(tensor, host);
  return host;
}

template <typename Map>
IValue map_tensors(const IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<Tensor>> mapped;
    for (const IValue& each : value.toListRef()) {
      mapped.push_back(each.isNone() ? std::optional<Tensor>() : map(each.toTensor()));
    }
    return mapped;
  }
  return value;
}

// A device among the arguments says where a result is to be made.
IValue elsewhere(const IValue& value, c10::DeviceType type) {
  return value.isDevice() && value.toDevice().is_cuda() ? IValue(c10::Device(type)) : value;
}

void call(const OperatorHandle& op, Values& stack, DispatchKey key) {
  const Bare bare;
  if (op.schema().name() != "aten::histc" || key != DispatchKey::CPU ||
      stack[0].toTensor().is_floating_point()) {
    return op.redispatchBoxed(DispatchKeySet(key), &stack);
  }
  const auto type = stack[0].toTensor().scalar_type();  // of integers the CPU has none
  stack[0] = stack[0].toTensor().to(at::kDouble);
  op.redispatchBoxed(DispatchKeySet(key), &stack);
  stack[0] = stack[0].toTensor().to(type);
}

// The random state of a GPU: a seed and an offset, which a captured graph reads when it is
// replayed.
class Draws {
 public:
  Draws(const OperatorHandle& op, const Values& arguments, c10::DeviceIndex device) {
    std::optional<at::Generator> given;
    for (const IValue& value : arguments) {
      if (value.isGenerator()) given = value.toGenerator();
    }
    if (!given && !op.hasTag(at::Tag::nondeterministic_seeded)) return;
    auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
        given, at::cuda::detail::getDefaultCUDAGenerator(device));
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    state_ = generator->philox_cuda_state(4);
  }

  // Runs something that draws from the CPU's generator as this state says.
  template <typename Run>
  void around(Values& stack, const Run& run) const {
    if (!state_) return run();
    uint64_t seed = state_->seed_.val, offset = state_->offset_.val;
    if (state_->captured_) {
      seed = *state_->seed_.ptr;
      offset = *state_->offset_.ptr + state_->offset_intragraph_;
    }
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const Tensor before = generator.get_state();
    generator.set_current_seed(seed * 1000003 + offset);
    for (IValue& value : stack) {
      if (value.isGenerator()) value = IValue();
    }
    run();
    generator.set_state(before);
  }

 private:
  std::optional<at::PhiloxCudaState> state_;
};

// Half of all shapes, others for each operator and each seed: a library chooses once for a shape.
bool is_drawn(int64_t seed, const std::string& name, at::IntArrayRef sizes) {
  const auto text = c10::str(seed, name, sizes);
  return (std::hash<std::string>()(text) >> 7) % 2 != 0;
}

// One call of an operator.
class Call {
 public:
  Call(const OperatorHandle& op, Values arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)), device_(device()) {}

  Values run() {
    check_devices();
    const c10::cuda::CUDAGuard on(device_);
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index());
    plan();
    const Draws draws(op_, arguments_, device_.index());
    if (asks()) {
      Values host = on_hosts();
      C10_CUDA_CHECK(cudaStreamSynchronize(stream));
      draws.around(host, [&] { call(op_, host, DispatchKey::CPU); });
      return taken(host);
    }
    const Values results = rooms();  // which may resize an argument
    const Values host = on_hosts();
    Values there;
    std::vector<bool> is_argument;
    for (size_t result = 0; result < results.size(); ++result) {
      there.push_back(map_tensors(results[result], on_host));
      is_argument.push_back(argument_of(result) >= 0);
    }
    const auto task = [op = op_, host, there, is_argument, draws] {
      Values stack = host;
      draws.around(stack, [&] { call(op, stack, DispatchKey::CPU); });
      const Bare bare;
      for (size_t result = 0; result < there.size(); ++result) {
        if (!is_argument[result]) put(stack[result], there[result]);
      }
    };
    C10_CUDA_CHECK(launch(stream_of(stream), schema_.name(), task));
    return results;
  }

 private:
  // A GPU's kernel reads the memory of that GPU alone; of the host's, what is passed to it by
  // value, and tables of indices, which are moved.
  void check_devices() const {
    const bool moves = schema_.name().find("index") != std::string::npos;
    for (const IValue& value : arguments_) {
      map_tensors(value, [&](const Tensor& tensor) {
        const bool is_there = !tensor.defined() || tensor.device() == device_ ||
                              (tensor.is_cpu() && (tensor.dim() == 0 || moves));
        TORCH_CHECK(is_there, schema_.name(),
                    ": expected all tensors to be on the same device, but ",
                    "found at least two devices, ", device_, " and ", tensor.device(), "!");
        return tensor;
      });
    }
  }

  // Libraries make a plan for a shape when a thread first asks for it, which no capture survives.
  void plan() const {
    static const std::set<std::string> planned = {
        "aten::addmm",   "aten::mm",          "aten::bmm",
        "aten::baddbmm", "aten::convolution", "aten::convolution_backward"};
    if (setting("PLANS") == 0 || planned.count(schema_.name()) == 0) return;
    std::string key = schema_.name();
    for (const IValue& value : arguments_) {
      if (value.isTensor() && value.toTensor().defined()) key += c10::str(value.toTensor().sizes());
    }
    thread_local std::set<std::string> made;
    if (!made.insert(key).second) return;
    const Lock lock(everything());
    C10_CUDA_CHECK(unsafe_in_capture());
  }

  static void put(const IValue& made, const IValue& room) {
    if (made.isTensor() && made.toTensor().defined()) {
      room.toTensor().copy_(made.toTensor());
    } else if (made.isTensorList()) {
      const auto from = made.toTensorVector(), to = room.toTensorVector();
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
  }

  c10::Device device() const {
    std::optional<c10::Device> found;
    const auto see = [&](const Tensor& tensor) {
      if (!found && tensor.defined() && tensor.is_cuda()) found = tensor.device();
      return tensor;
    };
    for (const IValue& value : arguments_) {
      map_tensors(value, see);
      if (!found && value.isDevice() && value.toDevice().is_cuda()) found = value.toDevice();
    }
    if (found && found->has_index()) return *found;
    return {at::kCUDA, c10::cuda::current_device()};
  }

  // Whether the host must know what comes out, or how large it is.
  bool asks() const {
    static const std::set<std::string> known = {"aten::nonzero",
                                                "aten::nonzero_static",
                                                "aten::masked_select",
                                                "aten::_unique",
                                                "aten::_unique2",
                                                "aten::unique_dim",
                                                "aten::unique_consecutive",
                                                "aten::unique_dim_consecutive",
                                                "aten::equal",
                                                "aten::is_nonzero",
                                                "aten::bincount",
                                                "aten::repeat_interleave"};
    static const std::set<std::string> by_masks = {"aten::index", "aten::index_put_",
                                                   "aten::_index_put_impl_"};
    if (known.count(schema_.name()) != 0) return true;
    if (by_masks.count(schema_.name()) != 0) {
      for (const IValue& index : arguments_[1].toListRef()) {
        if (index.isNone() || !index.toTensor().defined()) continue;
        const auto type = index.toTensor().scalar_type();
        if (type == at::kBool || type == at::kByte) return true;
      }
    }
    return std::any_of(schema_.returns().begin(), schema_.returns().end(), [](const auto& each) {
      const auto kind = each.type()->kind();
      return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
    });
  }

  // The argument that a result is; -1 for what is made.
  int argument_of(size_t result) const {
    const auto* info = schema_.returns()[result].alias_info();
    for (size_t i = 0; info != nullptr && i < arguments_.size(); ++i) {
      const auto* other = schema_.arguments()[i].alias_info();
      if (other != nullptr && other->beforeSet() == info->beforeSet()) return static_cast<int>(i);
    }
    return -1;
  }

  // The arguments as the CPU's kernel gets them. Small tensors of the host are copied, as a launch
  // copies its arguments.
  Values on_hosts() const {
    Values host;
    for (const IValue& value : arguments_) {
      const IValue there = map_tensors(value, [](const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cpu() || tensor.numel() >= 1000) return on_host(tensor);
        const Bare bare;
        const Tensor copied = tensor.clone();
        keep_number(tensor, copied);
        return copied;
      });
      host.push_back(elsewhere(there, at::kCPU));
    }
    return host;
  }

  // All that shapes of results depend on, as text.
  std::string key() const {
    std::ostringstream text;
    text << schema_.operator_name() << ' ' << at::get_default_dtype();
    for (const IValue& value : arguments_) {
      bool has_tensors = false;
      map_tensors(value, [&](const Tensor& tensor) {
        has_tensors = true;
        text << " tensor ";
        if (!tensor.defined()) return tensor;
        text << tensor.sizes() << tensor.strides() << tensor.scalar_type() << tensor.device().type()
             << tensor.unsafeGetTensorImpl()->is_wrapped_number() << tensor.is_conj()
             << tensor.is_neg();
        return tensor;
      });
      if (!has_tensors) text << ' ' << value;
    }
    return text.str();
  }

  // The results of a run on nothing, without memory. One run for all calls that are alike: what
  // torch does for shapes is in Python, and takes it milliseconds.
  Values shapes() const {
    static std::mutex mutex;
    static auto& known = *new std::unordered_map<std::string, Values>();  // to the end of all
    const std::string like = key();
    {
      const std::lock_guard<std::mutex> lock(mutex);
      const auto found = known.find(like);
      if (found != known.end()) return found->second;
    }
    Values results;
    for (const IValue& result : found_shapes()) {
      results.push_back(map_tensors(result, [](const Tensor& tensor) {
        const Bare bare;
        return tensor.defined() ? at::empty_strided(tensor.sizes(), tensor.strides(),
                                                    tensor.options().device(at::kMeta))
                                : tensor;
      }));
    }
    const std::lock_guard<std::mutex> lock(mutex);
    return known.emplace(like, results).first->second;
  }

  // By no memory where shapes tell them, else by zeros.
  Values found_shapes() const {
    const bool has_meta = op_.hasKernelForDispatchKey(DispatchKey::Meta) &&
                          schema_.name().find("batch_norm") == std::string::npos;
    if (has_meta) {
      try {
        Values stack = blank(at::kMeta);
        call(op_, stack, DispatchKey::Meta);
        return stack;
      } catch (const std::exception&) {  // it has one for other arguments
      }
    }
    Values stack = blank(at::kCPU);
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const Tensor before = generator.get_state();
    call(op_, stack, DispatchKey::CPU);
    generator.set_state(before);
    return stack;
  }

  Values blank(c10::DeviceType type) const {
    Values stack;
    for (const IValue& value : arguments_) {
      const IValue made = map_tensors(value, [&](const Tensor& tensor) {
        const bool is_number = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0;
        if (!tensor.defined() || (is_number && type == at::kCPU)) return tensor;
        const Bare bare;
        const auto options = tensor.options().device(type).requires_grad(false);
        const Tensor empty = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        if (type == at::kCPU) empty.zero_();
        keep_number(tensor, empty);
        return empty;
      });
      stack.push_back(value.isGenerator() ? IValue() : elsewhere(made, type));
    }
    return stack;
  }

  // What the call returns, before it has run.
  Values rooms() const {
    const Values made = shapes();
    Values results;
    for (size_t result = 0; result < made.size(); ++result) {
      const int argument = argument_of(result);
      if (argument < 0) {
        results.push_back(map_tensors(made[result], [&](const Tensor& t) { return room(t); }));
        continue;
      }
      const IValue& given = arguments_[argument];
      if (given.isTensor() && given.toTensor().sizes() != made[result].toTensor().sizes()) {
        given.toTensor().resize_(made[result].toTensor().sizes());
      }
      results.push_back(given);
    }
    return results;
  }

  Tensor room(const Tensor& like) const {
    if (!like.defined()) return like;
    const auto options = like.options().device(device_);
    const int64_t seed = setting("LAYOUTS");
    static const std::set<std::string> free = {
        "aten::convolution",        "aten::convolution_backward",
        "aten::native_batch_norm",  "aten::native_batch_norm_backward",
        "aten::native_group_norm",  "aten::max_pool2d_with_indices",
        "aten::avg_pool2d",         "aten::_adaptive_avg_pool2d",
        "aten::upsample_nearest2d", "aten::upsample_bilinear2d",
        "aten::_softmax",           "aten::native_layer_norm"};
    if (seed == 0 || like.dim() != 4 || free.count(schema_.name()) == 0) {
      return at::empty_strided(like.sizes(), like.strides(), options);
    }
    const bool last = is_drawn(seed, schema_.name(), like.sizes());
    const auto format = last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    return at::empty(like.sizes(), options, format);
  }

  // What a call returns that has run already.
  Values taken(const Values& made) const {
    Values results;
    for (size_t result = 0; result < made.size(); ++result) {
      const int argument = argument_of(result);
      results.push_back(argument >= 0 ? arguments_[argument]
                                      : map_tensors(made[result], [&](const Tensor& tensor) {
                                          const Tensor to = room(tensor);
                                          const Bare bare;
                                          if (to.defined()) on_host(to).copy_(tensor);
                                          return to;
                                        }));
    }
    return results;
  }

  const OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const Values arguments_;
  const c10::Device device_;
};

void run(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const size_t n = op.schema().arguments().size();
  Values arguments(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
  const Values results = Call(op, std::move(arguments)).run();
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(n), stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

// Room from torch's own allocator is filled with what is no number, in the order of its stream: so
// who still reads there what was let go of too early does not find it.
Tensor filled(const Tensor& room) {
  const size_t bytes = room.storage().nbytes();
  if (bytes == 0 || bytes > kPoisoned || setting("FILL", 1) == 0) return room;
  const c10::cuda::CUDAGuard on(room.device());
  const Lock lock(everything());
  push(stream_of(c10::cuda::getCurrentCUDAStream()),
       [data = room.storage().mutable_data(), bytes] { std::memset(data, 0xFF, bytes); });
  return room;
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
             std::optional<at::Layout> layout, std::optional<at::Device> device,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  return filled(at::detail::empty_cuda(sizes, type, layout, device, pinned, format));
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pinned) {
  return filled(at::detail::empty_strided_cuda(sizes, strides, type, layout, device, pinned));
}

// torch's own copy where memory is copied as it lies, which is the runtime's work, and else as it
// does it: made of one form where that is on the GPU.
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.numel() == 0) return self;
  const bool is_plain = self.is_contiguous() && from.is_contiguous() &&
                        self.scalar_type() == from.scalar_type() && self.sizes() == from.sizes();
  const bool is_one = self.is_cuda() && from.is_cuda() && self.device() == from.device();
  const bool is_same = self.is_neg() == from.is_neg() && self.is_conj() == from.is_conj();
  if (is_plain && (is_same || !is_one)) return at::native::copy_(self, from, non_blocking);
  if (is_one) {
    const c10::cuda::CUDAGuard on(self.device());
    const auto task = [to = on_host(self), from = on_host(from)] {
      const Bare bare;
      to.copy_(from);
    };
    C10_CUDA_CHECK(launch(stream_of(c10::cuda::getCurrentCUDAStream()), "aten::copy_", task));
    return self;
  }
  const Tensor formed =
      at::empty(self.sizes(), from.options().dtype(self.scalar_type()).requires_grad(false));
  if (from.is_cuda()) {
    formed.copy_(from.expand(self.sizes()));
  } else {
    const Bare bare;
    formed.copy_(from.expand(self.sizes()));
  }
  Tensor to = self.is_contiguous() ? self : at::empty(self.sizes(), self.options());
  at::native::copy_(to, formed, non_blocking && from.is_cuda() && self.is_contiguous());
  if (!self.is_contiguous()) self.copy_(to);
  return self;
}

at::Scalar local_scalar(const Tensor& tensor) {
  const c10::cuda::CUDAGuard on(tensor.device());
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()));
  const Bare bare;
  return on_host(tensor).item();
}

// Which attention runs: plain, or with layouts that vary in one operator for half of all shapes.
int64_t choice_of_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                            const std::optional<Tensor>&, double dropout, bool,
                            std::optional<double>, bool) {
  const int64_t seed = setting("LAYOUTS");
  const bool can = query.dim() == 4 && query.size(1) == key.size(1) && dropout == 0 &&
                   key.size(1) == value.size(1) && query.scalar_type() != at::kDouble;
  const bool fused = seed != 0 && can && is_drawn(seed, "attention", query.sizes());
  return static_cast<int64_t>(fused ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
}

// What torch does without a kernel: views, and room.
const std::set<std::string> kOwn = {"aten::copy_",
                                    "aten::_local_scalar_dense",
                                    "aten::_fused_sdp_choice",
                                    "aten::set_",
                                    "aten::resize_",
                                    "aten::record_stream",
                                    "aten::empty",
                                    "aten::empty_strided",
                                    "aten::is_pinned",
                                    "aten::_pin_memory",
                                    "aten::is_set_to",
                                    "aten::_efficientzerotensor",
                                    "aten::view",
                                    "aten::as_strided",
                                    "aten::_reshape_alias",
                                    "aten::resize_as_sparse_",
                                    "aten::_nested_tensor_size",
                                    "aten::is_coalesced"};

}  // namespace

}  // namespace emulated

// Puts the CPU's kernels in the place of the GPU's; how many.
extern "C" int install_kernels() {
  using namespace emulated;
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__,
                                __LINE__);
  int installed = 0;
  const auto install = [&](const c10::OperatorName& name) {
    if (name.name.rfind("aten::", 0) != 0 || kOwn.count(name.name) != 0) return;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) return;
    for (const auto& each : op->schema().returns()) {
      if (each.alias_info() != nullptr && !each.alias_info()->isWrite()) return;  // a view
    }
    const bool has_kernel = op->hasKernelForDispatchKey(DispatchKey::CPU) ||
                            op->hasComputedKernelForDispatchKey(DispatchKey::CPU);
    if (!has_kernel) return;
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    ++installed;
  };
  for (const auto& name :
       c10::Dispatcher::singleton().getRegistrationsForDispatchKey(DispatchKey::CUDA)) {
    install(name);
  }
  for (const char* name : {"convolution", "convolution_backward", "native_group_norm"}) {
    install({std::string("aten::") + name, ""});
  }
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  library.impl("_fused_sdp_choice", TORCH_FN(choice_of_attention));
  library.impl("_scaled_dot_product_efficient_attention", TORCH_FN(attention));
  library.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(attention_backward));
  library.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  library.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  return installed;
}
