// A pretend CUDA device for a torch that is built for CPUs only.
//
// Tensors of device "cuda:N" lie in host memory, and every operator runs the CPU's kernel, at once and in the calling
// thread. Code that asks for device.type == "cuda" runs as on a GPU, and its numbers are real. What is registered here:
// a device guard, the hooks of CUDA, an allocator, a generator for each device, and a fallback for all operators.
//
// This library must be loaded before torch's python extension: torch asks for the hooks of CUDA once.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

namespace {

using namespace c10;
using at::Tensor;

constexpr int kMostDevices = 64;
constexpr DispatchKeySet kCudaKey(DispatchKey::CUDA);

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atoll(text) : otherwise;
}

// How many this process sees; a launcher may show each process one.
std::atomic<int64_t>& visible() {
  static std::atomic<int64_t> count{from_environment("TERAPIPE_PRETEND_GPUS", 8)};
  return count;
}

DeviceIndex device_count() {
  return static_cast<DeviceIndex>(visible().load());
}

std::atomic<int64_t> capability{90};  // major and minor, as in 9.0

// Devices and streams. Both are chosen for each thread, as by CUDA. Streams have numbers and nothing else: whatever is
// queued on one has run when the call returns.

thread_local DeviceIndex current_index = 0;
thread_local std::array<StreamId, kMostDevices> current_streams{};

void choose_device(DeviceIndex index) {
  if (index < 0) {
    return;
  }
  TORCH_CHECK(index < device_count(), "CUDA error: invalid device ordinal");
  current_index = index;
}

DeviceIndex exchange_device(DeviceIndex index) {
  const DeviceIndex before = current_index;
  choose_device(index);
  return before;
}

// What the device waits for: transfers that somebody has waited for on it, and that are not through. The host goes on,
// and stops where it runs the next operator, which a real host would only queue. channel.py knows the transfers; with an
// error there, computations go on over whatever is in their buffers.

std::atomic<int64_t> awaited{0};

void await_device() {
  if (awaited == 0) {
    return;
  }
  static const OperatorHandle hook = Dispatcher::singleton().findSchemaOrThrow("pretend::await_device", "");
  const impl::ExcludeDispatchKeyGuard no_modes(DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
  torch::jit::Stack stack;
  hook.callBoxed(&stack);
}

struct PretendEvent {
  std::chrono::steady_clock::time_point time;
  DeviceIndex device = 0;

  // CUDA asks the current device, whichever the event is of: a thread that has not chosen one gets a context on the
  // first GPU, 0.5 GB that nobody counts.
  static void check_thread(void* event) {
    const DeviceIndex device = event == nullptr ? current_index : static_cast<PretendEvent*>(event)->device;
    TORCH_CHECK(
        device == current_index, "an event of cuda:", static_cast<int>(device),
        " was asked for by a thread whose current device is cuda:", static_cast<int>(current_index),
        ", where a real one would make a context");
  }
};

struct PretendGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return kCUDA;
  }
  Device exchangeDevice(Device device) const override {
    return {kCUDA, exchange_device(device.index())};
  }
  Device getDevice() const override {
    return {kCUDA, current_index};
  }
  void setDevice(Device device) const override {
    choose_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) {
      current_index = device.index();
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  DeviceCapability getDeviceCapability(Device) const override {
    return {};
  }

  Stream getStream(Device device) const override {
    const Device which = with_index(device);
    return Stream(Stream::UNSAFE, which, current_streams[which.index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, with_index(device), 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> made{0};
    return Stream(Stream::UNSAFE, with_index(device), ++made);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {
    await_device();
  }
  void synchronizeDevice(const DeviceIndex) const override {
    await_device();
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (*event == nullptr) {
      *event = new PretendEvent;
    }
    static_cast<PretendEvent*>(*event)->time = std::chrono::steady_clock::now();
    static_cast<PretendEvent*>(*event)->device = stream.device_index();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override {
    PretendEvent::check_thread(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    PretendEvent::check_thread(event);
    await_device();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<PretendEvent*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const auto span = static_cast<PretendEvent*>(second)->time - static_cast<PretendEvent*>(first)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }

 private:
  static Device with_index(Device device) {
    return device.has_index() ? device : Device(kCUDA, current_index);
  }
};

const impl::DeviceGuardImplRegistrar guard_registrar(kCUDA, new PretendGuard());

// Memory of the devices. Fresh memory is filled with ones, so that numbers which nobody wrote are NaN. What a kernel
// allocates for itself while it runs is not counted; its results are, and what the doubles of operators.py allocate. The
// context takes its part before anything else does.

constexpr int64_t kUsualMemory = int64_t{80} << 30;
constexpr int64_t kContext = int64_t{512} << 20;

class Memory {
 public:
  struct Usage {
    int64_t current = 0;
    int64_t peak = 0;
    int64_t total = from_environment("TERAPIPE_PRETEND_MEMORY", kUsualMemory);  // of the device
  };

  void take(DeviceIndex device, int64_t size) {
    const std::lock_guard lock(mutex_);
    Usage& usage = usages_[device];
    TORCH_CHECK_WITH(
        OutOfMemoryError, usage.current + size <= usage.total, "CUDA out of memory. Tried to allocate ", mib(size),
        ". GPU ", static_cast<int>(device), " has a total capacity of ", mib(usage.total), " of which ",
        mib(usage.total - usage.current), " is free. Including non-PyTorch memory, this process has ",
        mib(usage.current), " memory in use. Of the allocated memory ", mib(usage.current),
        " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.");
    usage.current += size;
    usage.peak = std::max(usage.peak, usage.current);
  }
  void give_back(DeviceIndex device, int64_t size) {
    const std::lock_guard lock(mutex_);
    usages_[device].current -= size;
  }
  Usage of(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    return usages_.at(device);
  }
  void reset_peak(DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    usages_.at(device).peak = usages_[device].current;
  }
  void set_total(DeviceIndex device, int64_t size) {
    const std::lock_guard lock(mutex_);
    usages_.at(device).total = size;
  }

 private:
  static std::string mib(int64_t size) {
    std::ostringstream text;
    text.precision(2);
    text << std::fixed << static_cast<double>(size) / (1 << 20) << " MiB";
    return text.str();
  }

  std::mutex mutex_;
  std::array<Usage, kMostDevices> usages_;
};

Memory& memory() {
  static auto* kept = new Memory;  // tensors may outlive everything else
  return *kept;
}

// What a pointer of a device stands for: memory of its own, or the storage of a tensor that a CPU kernel made.
struct Block {
  void* own;
  Storage adopted;
  DeviceIndex device;
  int64_t size;

  static void release(void* block) {
    auto* self = static_cast<Block*>(block);
    memory().give_back(self->device, self->size);
    std::free(self->own);
    delete self;
  }
};

struct PretendAllocator final : DeviceAllocator {
  DataPtr allocate(size_t size) override {
    const DeviceIndex device = current_index;
    memory().take(device, static_cast<int64_t>(size));
    void* own = nullptr;
    if (size > 0) {
      TORCH_CHECK(posix_memalign(&own, 512, size) == 0, "the host has no memory left for the pretend GPU");
      std::memset(own, 0xFF, size);
    }
    auto* block = new Block{own, Storage(), device, static_cast<int64_t>(size)};
    return {own, block, &Block::release, Device(kCUDA, device)};
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }

  bool initialized() override {
    return true;
  }
  void emptyCache(MempoolId_t) override {}
  void recordStream(const DataPtr&, Stream) override {}
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const Memory::Usage usage = memory().of(device);
    CachingDeviceAllocator::DeviceStats stats;
    for (auto* kind : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& all = (*kind)[static_cast<size_t>(CachingAllocator::StatType::AGGREGATE)];
      all.current = usage.current;
      all.peak = usage.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    memory().reset_peak(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const Memory::Usage usage = memory().of(device);
    return {std::max<int64_t>(0, usage.total - usage.current - kContext), usage.total};
  }
};

PretendAllocator* allocator() {
  static auto* kept = new PretendAllocator;
  return kept;
}

REGISTER_ALLOCATOR(kCUDA, allocator())

// Products of matrices. As with cuBLAS, a thread that multiplies takes a workspace out of the device's memory, and keeps
// it; threads that end leave theirs to others. Where torch was told that float32 may be TF32, it is.

class Workspace {
 public:
  void take(DeviceIndex device) {
    if (taken_[device]) {
      return;
    }
    taken_[device] = true;
    const std::lock_guard lock(mutex());
    if (left(device) > 0) {
      left(device) -= 1;
    } else {
      memory().take(device, capability >= 90 ? 32 << 20 : (8 << 20) + (128 << 10));
    }
  }
  ~Workspace() {
    const std::lock_guard lock(mutex());
    for (DeviceIndex device = 0; device < kMostDevices; ++device) {
      left(device) += taken_[device];
    }
  }

 private:
  static std::mutex& mutex() {
    static auto* kept = new std::mutex;
    return *kept;
  }
  static int& left(DeviceIndex device) {
    static auto* kept = new std::array<int, kMostDevices>{};
    return kept->at(device);
  }

  std::array<bool, kMostDevices> taken_{};
};

thread_local Workspace workspace;

Tensor as_tf32(const Tensor& tensor) {
  Tensor rounded = tensor.clone();
  auto* numbers = static_cast<uint32_t*>(rounded.mutable_data_ptr());
  for (int64_t i = 0; i < rounded.numel(); ++i) {
    numbers[i] = (numbers[i] + 0x1000) & ~uint32_t{0x1FFF};  // of 23 bits behind the point, 10 are left
  }
  return rounded;
}

// Pinned memory of the host: the hooks must know any address inside it.

class PinnedMemory final : public Allocator {
 public:
  DataPtr allocate(size_t size) override {
    void* pointer = nullptr;
    if (size > 0) {
      TORCH_CHECK(posix_memalign(&pointer, 512, size) == 0, "the host has no memory left to pin");
      const std::lock_guard lock(mutex_);
      sizes_[reinterpret_cast<uintptr_t>(pointer)] = size;
    }
    return {pointer, pointer, &release, Device(kCPU)};
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
  bool contains(const void* pointer) {
    const std::lock_guard lock(mutex_);
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const auto after = sizes_.upper_bound(address);
    return after != sizes_.begin() && address < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static void release(void* pointer);

  std::mutex mutex_;
  std::map<uintptr_t, size_t> sizes_;
};

PinnedMemory* pinned_memory() {
  static auto* kept = new PinnedMemory;
  return kept;
}

void PinnedMemory::release(void* pointer) {
  {
    const std::lock_guard lock(pinned_memory()->mutex_);
    pinned_memory()->sizes_.erase(reinterpret_cast<uintptr_t>(pointer));
  }
  std::free(pointer);
}

// Where the host would wait for the device. waits.py listens, while a test counts.

std::atomic<int64_t> listeners{0};

void note_wait(const std::string& kind) {
  if (listeners == 0) {
    return;
  }
  static const OperatorHandle note = Dispatcher::singleton().findSchemaOrThrow("pretend::note_wait", "");
  const impl::ExcludeDispatchKeyGuard no_modes(DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
  torch::jit::Stack stack{IValue(kind)};
  note.callBoxed(&stack);
}

// A copy between the host and a device is one, unless it was asked not to be and the host's memory is pinned.
void note_copy(const Tensor& target, const Tensor& source, bool non_blocking) {
  if (target.device().type() == source.device().type() || source.numel() == 0) {
    return;
  }
  const bool to_host = target.device().is_cpu();
  const bool pinned = pinned_memory()->contains((to_host ? target : source).const_data_ptr());
  if (!pinned || !non_blocking) {
    note_wait(to_host ? "copy to the host" : pinned ? "copy from the host" : "copy from pageable memory");
  }
}

// Random numbers. As with CUDA's Philox generator, the state is a seed and an offset, 16 bytes; every call of an
// operator draws from a generator of the CPU that is made from the two, and moves the offset on.

struct PretendGenerator final : GeneratorImpl {
  explicit PretendGenerator(DeviceIndex device) : GeneratorImpl(Device(kCUDA, device), kCudaKey) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  void set_state(const TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0];
    offset_ = numbers[1];
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    at::TensorBase state = at::detail::empty_cpu({16}, at::kByte);
    auto* numbers = static_cast<uint64_t*>(state.mutable_data_ptr());
    numbers[0] = seed_;
    numbers[1] = offset_;
    return state.getIntrusivePtr();
  }

  at::Generator draw() {
    const std::lock_guard lock(mutex_);
    const uint64_t offset = offset_;
    offset_ += 4;
    return at::make_generator<at::CPUGeneratorImpl>(mixed(seed_ + 0x9E3779B97F4A7C15 * (offset + 1)));
  }

 private:
  PretendGenerator* clone_impl() const override {
    auto* copy = new PretendGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  static uint64_t mixed(uint64_t x) {  // splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  uint64_t seed_ = default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* kept = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(at::make_generator<PretendGenerator>(i));
    }
    return made;
  }();
  return kept->at(device < 0 ? current_index : device);
}

// Puts another generator in place of the CPU's default one, for operators that take none as an argument. Whatever else
// asks for the default one meanwhile, in another thread, gets this one too.
class SwappedGenerator {
 public:
  explicit SwappedGenerator(const at::Generator& other) : lock_(swapping()), kept_(exchange(state_of(other))) {}
  ~SwappedGenerator() {
    exchange(kept_);
  }
  SwappedGenerator(const SwappedGenerator&) = delete;
  SwappedGenerator& operator=(const SwappedGenerator&) = delete;

 private:
  struct State {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
  };
  static std::recursive_mutex& swapping() {
    static auto* kept = new std::recursive_mutex;
    return *kept;
  }
  static State state_of(const at::Generator& generator) {
    auto* impl = generator.get<at::CPUGeneratorImpl>();
    return {impl->engine(), impl->next_float_normal_sample(), impl->next_double_normal_sample()};
  }
  static State exchange(const State& state) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    const State before = state_of(generator);
    auto* impl = generator.get<at::CPUGeneratorImpl>();
    impl->set_engine(state.engine);
    impl->set_next_float_normal_sample(state.next_float);
    impl->set_next_double_normal_sample(state.next_double);
    return before;
  }

  std::lock_guard<std::recursive_mutex> lock_;
  State kept_;
};

}  // namespace

// Hooks

namespace at {

struct PretendHooks final : CUDAHooksInterface {
  explicit PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  int getNumGPUs() const override {
    return device_count();
  }
  DeviceIndex deviceCount() const override {
    return device_count();
  }
  DeviceIndex current_device() const override {
    return current_index;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_index;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    choose_device(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getCUDADeviceAllocator() const override {
    return allocator();
  }
  Allocator* getPinnedMemoryAllocator() const override {
    return pinned_memory();
  }
  bool isPinnedPtr(const void* pointer) const override {
    return pinned_memory()->contains(pointer);
  }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator<PretendGenerator>(device < 0 ? current_index : device);
  }
};

using CUDAHooks = PretendHooks;  // torch looks for this name
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

// Tensors: the same memory seen from the CPU, and results of CPU kernels as tensors of a device

bool is_pretend(const Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cuda();
}

Tensor tensor_of(Storage storage, DispatchKeySet keys, const Tensor& like) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

Tensor as_cpu(const Tensor& tensor) {
  if (!is_pretend(tensor)) {
    return tensor;
  }
  const Storage& storage = tensor.storage();
  const auto release = [](void* held) { delete static_cast<Storage*>(held); };
  DataPtr pointer(storage.mutable_data(), new Storage(storage), release, kCPU);
  Storage alias(Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), GetCPUAllocator(), true);
  return tensor_of(std::move(alias), DispatchKeySet(DispatchKey::CPU), tensor);
}

DataPtr adopt(const Storage& storage, DeviceIndex device) {
  const auto size = static_cast<int64_t>(storage.nbytes());
  memory().take(device, size);
  auto* block = new Block{nullptr, storage, device, size};
  return {storage.mutable_data(), block, &Block::release, Device(kCUDA, device)};
}

Tensor adopted(const Tensor& tensor, DeviceIndex device) {
  TORCH_CHECK(tensor.layout() == kStrided, "the pretend GPU has no tensors of layout ", tensor.layout());
  const Storage& storage = tensor.storage();
  Storage own(Storage::use_byte_size_t(), storage.nbytes(), adopt(storage, device), allocator(), true);
  return tensor_of(std::move(own), kCudaKey, tensor);
}

void resize_storage(const Storage& storage, int64_t size) {
  StorageImpl* impl = storage.unsafeGetStorageImpl();
  const DeviceGuard guard(storage.device());
  DataPtr fresh = allocator()->allocate(size);
  if (const auto kept = std::min<size_t>(size, impl->nbytes())) {
    std::memcpy(fresh.get(), impl->data(), kept);
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(size);
}

// The fallback: arguments become tensors of the CPU that alias their memory, the CPU's kernel runs, and what it returns
// becomes a tensor of the device again. An argument that the kernel has resized or returned is the caller's own tensor.

class Call {
 public:
  Call(const OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), first_(stack->size() - op.schema().arguments().size()) {
    for (size_t i = first_; i < stack_->size(); ++i) {
      (*stack_)[i] = argument((*stack_)[i]);
    }
  }

  void run() {
    await_device();
    if (const auto kind = kind_of_wait()) {
      note_wait(*kind);
    }
    if (is_product()) {
      workspace.take(device_);
      if (at::globalContext().allowTF32CuBLAS()) {
        round_factors();
      }
    }
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) {
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
    } else if (!has_generator_) {
      const SwappedGenerator swapped(default_of(default_generator(device_)));
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
    } else {
      give_default_generator();
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
    }
    for (const Alias& alias : aliases_) {
      take_over_size(alias);
    }
    for (size_t i = stack_->size() - op_.schema().returns().size(); i < stack_->size(); ++i) {
      (*stack_)[i] = result((*stack_)[i]);
    }
  }

 private:
  struct Alias {
    Tensor given;
    Tensor cpu;
  };

  IValue argument(const IValue& value) {
    if (value.isTensor()) {
      return aliased(value.toTensor(), false);
    }
    if (value.isTensorList()) {
      List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(aliased(tensor, false));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {  // only indices are given so, and those may lie on the CPU
      List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor) {
          count_index(*tensor);
        }
        list.push_back(tensor ? std::optional<Tensor>(aliased(*tensor, true)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice()) {
      if (value.toDevice().is_cuda() && value.toDevice().has_index()) {
        device_ = value.toDevice().index();
      }
      return Device(kCPU);
    }
    if (value.isGenerator()) {
      const at::Generator& given = value.toGenerator();
      TORCH_CHECK(
          given.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", given.device().type(),
          "'");
      return default_of(given);
    }
    return value;
  }

  void count_index(const Tensor& index) {
    indices_ += 1;
    masks_ += index.scalar_type() == kBool || index.scalar_type() == kByte;
    indices_on_host_ = indices_on_host_ || !is_pretend(index);
  }

  Tensor aliased(const Tensor& tensor, bool may_be_on_cpu) {
    if (!is_pretend(tensor)) {
      host_number_ = host_number_ || (tensor.defined() && tensor.dim() == 0 && !may_be_on_cpu);
      if (tensor.defined() && tensor.dim() > 0 && !may_be_on_cpu) {
        check_same_device(tensor.device());
      }
      return tensor;
    }
    check_same_device(tensor.device());
    device_ = tensor.device().index();
    aliases_.push_back({tensor, as_cpu(tensor)});
    return aliases_.back().cpu;
  }

  void check_same_device(Device device) {
    TORCH_CHECK(
        !seen_ || *seen_ == device, "Expected all tensors to be on the same device, but found at least two devices, ",
        *seen_, " and ", device, "! (when checking arguments of ", op_.operator_name(), ")");
    seen_ = device;
  }

  // Shapes and numbers that the host must know. Masks become indices, and how many the host must know, too; indices of
  // the host are copied. Where a tensor is read, torch has done both before this call.
  std::optional<std::string> kind_of_wait() const {
    const std::string& name = op_.operator_name().name;
    if (name == "aten::index") {
      return std::nullopt;
    }
    if (indices_ > 0) {
      const bool fills = host_number_ && masks_ == 1 && indices_ == 1;  // which masked_fill does
      return indices_on_host_ ? std::optional("index on the host")
          : masks_ > 0 && !fills ? std::optional("index by a mask")
                                 : std::nullopt;
    }
    const bool depends =
        op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
    if (!depends || (name == "aten::repeat_interleave" && stack_->back().isInt())) {  // whose length is given
      return std::nullopt;
    }
    return name.substr(name.find("::") + 2);
  }

  bool is_product() const {
    const std::string& name = op_.operator_name().name;
    return name == "aten::mm" || name == "aten::bmm" || adds_product();
  }

  bool adds_product() const {
    const std::string& name = op_.operator_name().name;
    return name == "aten::addmm" || name == "aten::addmm_" || name == "aten::baddbmm" || name == "aten::baddbmm_";
  }

  void round_factors() {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = adds_product() ? 1 : 0; i < arguments.size(); ++i) {
      IValue& value = (*stack_)[first_ + i];
      if (arguments[i].name() != "out" && value.isTensor() && value.toTensor().scalar_type() == kFloat) {
        value = as_tf32(value.toTensor());
      }
    }
  }

  static at::Generator default_of(const at::Generator& generator) {
    return generator.get<PretendGenerator>()->draw();
  }

  void give_default_generator() {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      IValue& value = (*stack_)[first_ + i];
      if (arguments[i].name() == "generator" && value.isNone()) {
        value = default_of(default_generator(device_));
      }
    }
  }

  void take_over_size(const Alias& alias) const {
    if (alias.cpu.sizes() == alias.given.sizes() && alias.cpu.strides() == alias.given.strides()) {
      return;
    }
    StorageImpl* storage = alias.given.storage().unsafeGetStorageImpl();
    if (alias.cpu.storage().data() != storage->data()) {
      storage->set_data_ptr_noswap(adopt(alias.cpu.storage(), device_));
      storage->set_nbytes(alias.cpu.storage().nbytes());
    }
    alias.given.unsafeGetTensorImpl()->set_sizes_and_strides(
        alias.cpu.sizes(), alias.cpu.strides(), alias.cpu.storage_offset());
  }

  IValue result(const IValue& value) const {
    if (value.isTensor()) {
      return returned(value.toTensor());
    }
    if (value.isTensorList()) {
      List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(returned(tensor));
      }
      return list;
    }
    return value;
  }

  Tensor returned(const Tensor& tensor) const {
    if (!tensor.defined()) {
      return tensor;
    }
    for (const Alias& alias : aliases_) {
      if (tensor.is_same(alias.cpu)) {
        return alias.given;
      }
    }
    for (const Alias& alias : aliases_) {
      if (tensor.storage().is_alias_of(alias.cpu.storage())) {
        return tensor_of(alias.given.storage(), kCudaKey, tensor);
      }
    }
    return adopted(tensor, device_);
  }

  static bool takes_generator(const FunctionSchema& schema) {
    return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const Argument& argument) {
      return argument.name() == "generator";
    });
  }

  const OperatorHandle& op_;
  torch::jit::Stack* stack_;
  size_t first_;
  bool has_generator_ = takes_generator(op_.schema());
  DeviceIndex device_ = current_index;
  std::optional<Device> seen_;
  std::vector<Alias> aliases_;
  bool indices_on_host_ = false;
  bool host_number_ = false;  // a tensor of the host without dimensions
  int indices_ = 0;
  int masks_ = 0;
};

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

// Operators about memory rather than numbers, which the CPU's kernels would do to its own memory

Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool> pinned, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const DeviceGuard guard(device.value_or(Device(kCUDA)));
  return at::detail::empty_generic(size, allocator(), kCudaKey, dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  const DeviceGuard guard(device.value_or(Device(kCUDA)));
  return at::detail::empty_strided_generic(size, stride, allocator(), kCudaKey, dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  await_device();
  note_copy(self, source, non_blocking);
  as_cpu(self).copy_(as_cpu(source));
  return self;
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  TensorImpl* impl = self.unsafeGetTensorImpl();
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) {
    resize_storage(self.storage(), static_cast<int64_t>(bytes));
  }
  impl->set_sizes_contiguous(size);
  if (format && *format != MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

Tensor& set_storage(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_nothing(Tensor& self) {
  const DeviceGuard guard(self.device());
  Storage none(Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage(self, std::move(none), 0, {0}, {1});
}

void record_stream(Tensor&, Stream) {}

// Which of torch's fused kernels scaled_dot_product_attention takes, as far as the doubles in operators.py go

int64_t attention_backend(
    const Tensor& query, const Tensor& key, const Tensor&, const std::optional<Tensor>& mask, double dropout,
    bool causal, std::optional<double>, bool grouped) {
  const auto dtype = query.scalar_type();
  const bool half = dtype == kHalf || dtype == kBFloat16;
  const bool plain = query.dim() != 4 || mask.has_value() || dropout > 0.0;
  const bool square = query.dim() != 4 || query.size(2) == key.size(2);
  const auto& context = at::globalContext();
  const bool repeats = context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
  auto chosen = at::SDPBackend::math;
  if (plain) {
    chosen = at::SDPBackend::math;
  } else if (
      (capability == 90 || capability == 100 || capability == 103) && context.userEnabledCuDNNSDP() &&
      !repeats && half && query.size(3) % 8 == 0 && query.size(3) <= (capability == 90 ? 256 : 128) &&
      key.size(2) > 1) {
    chosen = at::SDPBackend::cudnn_attention;
  } else if (
      context.userEnabledFlashSDP() && half && query.size(3) <= 256 && capability >= 80 &&
      (square || !causal)) {
    chosen = at::SDPBackend::flash_attention;
  } else if (context.userEnabledMemEfficientSDP() && !grouped && (half || dtype == kFloat)) {
    chosen = at::SDPBackend::efficient_attention;
  }
  return static_cast<int64_t>(chosen);
}

}  // namespace

namespace at::native {

REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &attention_backend)

}  // namespace at::native

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("resize_", &resize_);
  library.impl("view", &at::native::view);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("set_", &set_nothing);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("record_stream", &record_stream);
  library.impl("_fused_sdp_choice", &attention_backend);
  // These would choose kernels that only CUDA has.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// What the python half asks for

TORCH_LIBRARY(pretend, library) {
  library.def("as_cpu(Tensor x) -> Tensor", [](const Tensor& x) {
    await_device();
    return as_cpu(x);
  });
  library.def("memory_of(Tensor x) -> Tensor", [](const Tensor& x) { return as_cpu(x); });  // for who must not wait
  library.def("await_device() -> ()");  // by channel.py
  library.def("add_awaited(int count) -> ()", [](int64_t count) { awaited += count; });
  library.def("device_count() -> int", []() { return visible().load(); });
  library.def("set_device_count(int count) -> ()", [](int64_t count) { visible() = count; });
  library.def("resize_storage(Storage storage, int size) -> ()", [](Storage storage, int64_t size) {
    resize_storage(storage, size);
  });
  library.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<DeviceIndex>(device));
  });
  library.def("note_wait(str kind) -> ()");  // by waits.py
  library.def("listen(bool on) -> ()", [](bool on) { listeners += on ? 1 : -1; });
  library.def("set_memory(int device, int size) -> ()", [](int64_t device, int64_t size) {
    memory().set_total(static_cast<DeviceIndex>(device), size);
  });
  library.def("set_capability(int major, int minor) -> ()", [](int64_t major, int64_t minor) {
    capability = 10 * major + minor;
  });
  library.def("capability() -> int[]", []() { return std::vector<int64_t>{capability / 10, capability % 10}; });
}
