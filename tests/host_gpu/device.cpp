// A CUDA device made of host memory, for tests on machines without a GPU.
//
// Tensors of `cuda:0` are real: `x.is_cuda` is true, autograd runs their backward in a thread of its
// own, autocast, dispatch keys and error messages are those of CUDA. Each operator runs its CPU
// kernel over the same memory. Operands on both devices are an error, as they are on a GPU.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <set>
#include <string>
#include <unordered_map>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// Memory of the device, and what it is told to when the host would wait for it.
std::atomic<size_t> bytes_held{0}, bytes_most{0}, bytes_all{SIZE_MAX};
void (*observer)(const char*) = nullptr;

void waits(const char* why) {
  if (observer) observer(why);
}

struct Block {
  void* data;
  size_t size;
};

void release(void* p) {
  auto* block = static_cast<Block*>(p);
  if (block->data) c10::GetCPUAllocator()->raw_deallocate(block->data);
  bytes_held -= block->size;
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes_held + n <= bytes_all,
                     "CUDA out of memory. Tried to allocate ", n, " bytes. GPU 0 has a total "
                     "capacity of ", bytes_all.load(), " bytes, of which ", bytes_held.load(),
                     " are in use");
    auto* block = new Block{n ? c10::GetCPUAllocator()->raw_allocate(n) : nullptr, n};
    bytes_held += n;
    bytes_most = std::max(bytes_most.load(), bytes_held.load());
    return {block->data, block, &release, kDevice};
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(kDevice); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void** e, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override { *e = nullptr; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)

// ------------------------------------------------------------------------- both views of a tensor

// The memory of `t` under the other device; keeps its storage alive.
at::Tensor alias(const at::Tensor& t, c10::Device device, c10::DispatchKey key) {
  auto* held = new c10::Storage(t.storage());
  c10::DataPtr data(held->mutable_data(), held,
                    [](void* p) { delete static_cast<c10::Storage*>(p); }, device);
  c10::Allocator* allocator = device.is_cpu() ? c10::GetCPUAllocator() : &memory;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), std::move(data), allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_neg()) made._set_neg(true);
  if (t.is_conj()) made._set_conj(true);
  return made;
}

at::Tensor on_host(const at::Tensor& t) {
  return alias(t, c10::Device(c10::DeviceType::CPU), c10::DispatchKey::CPU);
}
at::Tensor on_device(const at::Tensor& t) { return alias(t, kDevice, c10::DispatchKey::CUDA); }

// Operators that take operands of both devices on a GPU, too.
bool mixes(const std::string& name) {
  static const std::set<std::string> those{
      "aten::copy_",          "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize",
      "aten::_foreach_copy_", "aten::index",    "aten::index_put_", "aten::_index_put_impl_",
      "aten::index_put",      "aten::set_"};
  return those.count(name.substr(0, name.find('.'))) > 0;
}

// Operators whose result has a size that the host has to learn.
bool counts(const std::string& name) {
  static const std::set<std::string> those{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave", "aten::bincount"};
  return those.count(name.substr(0, name.find('.'))) > 0;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = schema.arguments().size();
  const auto begin = stack->size() - arguments;
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals;  // host view -> the tensor given
  std::unordered_map<c10::TensorImpl*, at::Tensor> views;      // the tensor given -> host view
  bool any_cuda = false, any_host = false;

  auto down = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      if (t.is_cpu() && t.dim() > 0) any_host = true;
      return t;
    }
    any_cuda = true;
    auto& view = views[t.unsafeGetTensorImpl()];
    if (!view.defined()) {
      view = on_host(t);
      originals[view.unsafeGetTensorImpl()] = t;
    }
    return view;
  };

  for (size_t i = 0; i < arguments; ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = down(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(down(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
        list.push_back(t.has_value() ? std::optional<at::Tensor>(down(*t)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().is_cuda()) {
        any_cuda = true;
        value = c10::Device(c10::DeviceType::CPU);
      }
    } else if (value.isGenerator()) {
      // generators of both devices are the host's
    }
  }
  const auto name = c10::toString(op.operator_name());
  TORCH_CHECK(!(any_cuda && any_host) || mixes(name),
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda:0 and cpu! (", name, ")");

  if (any_cuda && counts(name)) waits(name.c_str());
  bool by_mask = false;
  for (const auto& [given, view] : views) by_mask |= given->dtype() == at::kBool;
  if (by_mask && (name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0))
    waits("an index by a mask");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  auto up = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined() || !t.is_cpu()) return t;
    const auto found = originals.find(t.unsafeGetTensorImpl());
    if (found != originals.end()) return found->second;
    return on_device(t);
  };
  // What an operator has resized.
  for (auto& [given, view] : views) {
    const bool moved = view.storage().data() != given->storage().data();
    if (moved || view.sizes() != given->sizes() || view.strides() != given->strides()) {
      at::Tensor original = originals[view.unsafeGetTensorImpl()];
      if (moved) original.unsafeGetTensorImpl()->set_storage_keep_dtype(on_device(view).storage());
      original.unsafeGetTensorImpl()->set_sizes_and_strides(
          view.sizes(), view.strides(), view.storage_offset());
    }
  }
  const auto results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = up(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(up(t));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// ------------------------------------------------------------------------- memory, views and copies

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Tensor host(const at::Tensor& t) { return t.is_cuda() ? on_host(t) : t; }

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() && self.is_cuda() != source.is_cuda()) {
    // Of our own copies those that do not block go to pinned memory, and wait for nothing.
    if (self.is_cpu() && !non_blocking) waits("a copy to the host");
    if (self.is_cuda() && !non_blocking) waits("a blocking copy to the device");
  }
  auto to = host(self);
  to.copy_(host(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  auto target = host(to);
  target.copy_(host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), start);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.guard_int(__FILE__, __LINE__));
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      source.sizes(), source.strides(), source.storage_offset());
  return self;
}
at::Scalar local_scalar(const at::Tensor& self) {
  waits("a number");
  return at::_local_scalar_dense(on_host(self));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_local_scalar_dense", local_scalar);
}

struct Registered {
  Registered() { c10::SetAllocator(c10::DeviceType::CUDA, &memory, 1); }
} registered;

}  // namespace

extern "C" {
size_t bytes_now() { return bytes_held; }
size_t bytes_peak() { return bytes_most; }
void bytes_limit(size_t n) { bytes_all = n; }
size_t bytes_reset() { return bytes_most = bytes_held.load(); }
void report_to(void (*function)(const char*)) { observer = function; }
}
