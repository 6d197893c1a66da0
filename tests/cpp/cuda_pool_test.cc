// A page pool for a GPU, run by the simulator: what loads give is what the host had decided
// when it enqueued them, however late the device is. Streams do as little as they can
// before somebody waits for them, or do things at random.
//
//   cuda_pool_test        some seeds
//   cuda_pool_test all    many, and an entry whose list of pages takes two launches

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/batch.h"
#include "cpu/instruction_sets.h"
#include "cpu/paged_words.h"
#include "cuda/device.h"
#include "device_pool/device_pool.h"
#include "format/affine.h"
#include "format/columns.h"
#include "format/float_type.h"
#include "format/packed.h"
#include "pool/pool.h"
#include "pool/tables.h"
#include "simulator/grid.h"
#include "values.h"

namespace dafjax {
namespace {

using pool::Code;
using pool::Status;

constexpr int64_t kPage = pool::kPageNbytes;

void CheckOk(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  std::exit(1);
}

void PackOnHost(int64_t num_tiles, const uint16_t* bytes, const AffineCodes& planes) {
  PackBytes(BestKernels(), num_tiles, bytes, planes, {});
}

// A pool that remembers the handle of the last put: the device has it only later.
class Recorder final : public pool::AttachablePool {
 public:
  explicit Recorder(pool::Pool* pool) : pool_(pool) {}

  Status Attach(const pool::MakeAttachment& make,
                std::shared_ptr<pool::Attachment>* attachment) noexcept override {
    return pool_->Attach(make, attachment);
  }
  int TakeChanges(pool::Change* changes, int most) noexcept override {
    return pool_->TakeChanges(changes, most);
  }
  Status Put(const pool::Execution& execution, pool::SiteId site,
             const pool::PutRequest& request, pool::PutView* view,
             pool::Handle* handle) noexcept override {
    Status status = pool_->Put(execution, site, request, view, handle);
    last = *handle;
    bits = view->bits;
    return status;
  }
  Status Commit(const pool::Handle& handle) noexcept override {
    return pool_->Commit(handle);
  }
  Status Abort(const pool::Handle& handle) noexcept override {
    return pool_->Abort(handle);
  }
  void MarkSpent(const pool::Handle& handle) noexcept override {
    pool_->MarkSpent(handle);
  }
  void NoteRange(pool::SiteId site, double mean_square,
                 int64_t num_tiles) noexcept override {
    pool_->NoteRange(site, mean_square, num_tiles);
  }
  void NoteSensitivity(pool::SiteId site, double sensitivity) noexcept override {
    pool_->NoteSensitivity(site, sensitivity);
  }
  void NoteGradient(double energy) noexcept override { pool_->NoteGradient(energy); }
  bool measures() const noexcept override { return pool_->measures(); }
  pool::Packer packer() const noexcept override { return pool_->packer(); }

  pool::Handle last;
  int bits = 0;

 private:
  pool::Pool* pool_;
};

// What an array is when the CPU has encoded it and all planes but the first are lost.
std::vector<uint8_t> Expected(AffineShape shape, const std::vector<uint8_t>& x,
                              bool stochastic, uint32_t seed, int bits_put,
                              int bits_kept) {
  shape.bits = bits_put;
  const int64_t num_tiles = shape.num_rows * shape.NumTiles();
  const int64_t num_blocks = shape.num_rows * shape.NumBlocks();
  std::vector<uint8_t> memory[kMaxPlanes + 2];
  uint8_t* data[kMaxPlanes + 2];
  PlacesOfCodes<uint8_t> places = {};
  PlacesOfCodes<const uint8_t> left = {};
  const uint8_t* const_data[kMaxPlanes + 2];
  for (int i = 0; i < kMaxPlanes + 2; ++i) {
    const int width = i < kMaxPlanes ? PlanesOf(bits_put).widths[i] : 0;
    memory[i].resize(i < kMaxPlanes ? num_tiles * pool::TileNbytes(width)
                                    : 2 * num_blocks);
    data[i] = memory[i].data();
    const_data[i] = data[i];
    if (i >= kMaxPlanes) continue;
    places.planes[i] = {&data[i], kEndlessPage, 0};
    left.planes[i] = {&const_data[i], kEndlessPage, 0};
    places.words_per_row[i] = WordsOfTiles(shape.NumTiles(), width);
    left.words_per_row[i] = places.words_per_row[i];
  }
  places.scale = {&data[kMaxPlanes], kEndlessPage, 0};
  places.minimum = {&data[kMaxPlanes + 1], kEndlessPage, 0};
  left.scale = {&const_data[kMaxPlanes], kEndlessPage, 0};
  left.minimum = {&const_data[kMaxPlanes + 1], kEndlessPage, 0};
  places.kept_bits = bits_put;
  left.kept_bits = bits_kept;
  PackAffine(BestKernels(), shape, {stochastic, seed}, x.data(), places, {});
  std::vector<uint8_t> y(x.size());
  UnpackAffine(BestKernels(), shape, left, y.data(), {});
  return y;
}

std::vector<uint8_t> Repeated(FloatType type, int64_t count, uint32_t bits) {
  const int64_t nbytes = ElementNbytes(type);
  std::vector<uint8_t> values(count * nbytes);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(values.data() + i * nbytes, &bits, nbytes);
  }
  return values;
}

std::vector<uint8_t> Nans(FloatType type, int64_t count) {
  return Repeated(type, count,
                  type == FloatType::kFloat32    ? 0x7fc00000
                  : type == FloatType::kBFloat16 ? 0x7fc0
                                                 : 0x7e00);
}

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { CHECK(cudaEventDestroy(event) == 0); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;

struct Put {
  AffineShape shape;
  bool stochastic;
  uint32_t seed;
  int bits;
  std::vector<uint8_t> x;
  pool::Handle handle;
  std::unique_ptr<uint8_t[]> x_on_device;
  std::unique_ptr<uint32_t[]> seed_on_device;
  std::unique_ptr<uint32_t[]> handle_on_device;
  Event done;
};

struct Load {
  std::vector<uint8_t> expected;
  std::unique_ptr<uint8_t[]> y;
  std::string what;
};

// Done with before what was enqueued on them is destroyed.
struct Streams {
  explicit Streams(int count) : all(count) {
    for (Stream& stream : all) CHECK(cudaStreamCreateWithFlags(&stream, 0) == 0);
  }
  ~Streams() {
    for (const Stream stream : all) CHECK(cudaStreamDestroy(stream) == 0);
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  std::vector<Stream> all;
};

struct Plan {
  uint64_t seed;
  int num_streams;
  unsigned delay;
  int64_t budget;
  int in_flight;
  pool::Packer packer = pool::Packer::kGpu;
};

// Random executions with random puts and loads.
class Scenario {
 public:
  explicit Scenario(const Plan& plan)
      : plan_(plan), streams_(plan.num_streams), pool_(OptionsOf(plan)), recorder_(&pool_) {
    for (uint64_t i = 0; i < plan.seed * 1000; ++i) random_.Next();
    simulator::CurrentSettings().seed = plan.seed;
    simulator::CurrentDevice() = {};
    simulator::CurrentDevice().delay = plan.delay;
    std::shared_ptr<pool::Attachment> attachment;
    CheckOk(recorder_.Attach(
        [this](pool::Memory* system, Status* status) {
          return MakeDevicePool(&recorder_, PackOnHost, system, status);
        },
        &attachment));
    on_device_ = std::static_pointer_cast<DevicePool>(attachment);
  }

  void Run(int num_executions) {
    for (run_ = 1; run_ <= num_executions; ++run_) {
      if (Below(3) == 0 && plan_.budget != pool::Options::kUnlimited) {
        CheckOk(pool_.SetBudget((1 + Below(5)) * kPage));
      }
      const int num_puts = 2 + static_cast<int>(Below(6));
      const size_t first = puts_.size();
      for (int i = 0; i < num_puts; ++i) {
        PutSome();
        if (Below(4) == 0) LoadSome(Below(puts_.size()));
        if (Below(12) == 0) CollectSome();
      }
      // The backward pass: never, once or twice.
      for (int64_t times = Below(3); times > 0; --times) {
        for (size_t i = puts_.size(); i > first; --i) LoadSome(i - 1, Below(3));
      }
      if (Below(3) == 0) LoadNothing();
      if (Below(5) == 0) Synchronize();
    }
    Synchronize();
    Tell(on_device_->Settle());
    CHECK(on_device_->num_refused() == num_refused_);
    CheckPinned();
  }

  // Memory of two executions is released, the second time while the first is awaited.
  void LowerTheBudgetTwice() {
    const AffineShape shape = {FloatType::kFloat32, 1, 1024, 1, 600000, 0};
    PutThis(shape, 8);
    LoadSome(0);
    CheckOk(pool_.SetBudget(24 * kPage));
    ++run_;
    PutThis(shape, 8);
    cudaEvent_t first = puts_.back().done.get();
    LoadSome(1);
    CheckOk(pool_.SetBudget(4 * kPage));
    ++run_;
    PutThis(shape, 8);
    CHECK(cudaEventSynchronize(first) == 0);
    ++run_;
    PutThis(shape, 8);
    Synchronize();
    CheckOk(on_device_->Settle());
    CheckPinned();
  }

  // Memory is refused next to released memory that has been written and has yet to be
  // read.
  void FailToGrow() {
    const AffineShape shape = {FloatType::kFloat32, 1, 1024, 1, 600000, 0};
    PutThis(shape, 8);
    CHECK(cudaEventSynchronize(puts_.back().done.get()) == 0);
    LoadSome(0);
    CheckOk(pool_.SetBudget(4 * kPage));
    ++run_;
    PutThis({FloatType::kFloat32, 1, 64, 1, 3000, 0}, 8);
    simulator::CurrentDevice().most_registered = simulator::NumRegistered();
    CheckOk(pool_.SetBudget(60 * kPage));
    ++run_;
    PutThis(shape, 8);
    LoadSome(2);
    Synchronize();
  }

  // The metadata of an entry go to pages that the CPU is still to pack another one into.
  void EvictWhatIsYetToBePacked() {
    PutThis({FloatType::kFloat32, 1, 1024, 1, 600000, 0}, 8);
    PutThis({FloatType::kFloat32, 1, 64, 1, 20000, 20000}, 8);
    CHECK(stats().evictions > 0);
    // The GPU is done before the CPU begins.
    CHECK(cudaEventSynchronize(puts_.back().done.get()) == 0);
    LoadSome(1);
    LoadSome(0);
    Synchronize();
  }

  // Slots are used again by entries of the same shape.
  void LoadWhatIsLongGone() {
    for (; run_ <= 4; ++run_) {
      PutThis({FloatType::kFloat32, 1, 64, 1, 3000, 0}, 8);
      pool_.Collect();
      for (size_t i = 0; i < puts_.size(); ++i) LoadSome(i);
    }
    Synchronize();
    CHECK(num_refused_ > 0 && on_device_->num_refused() == num_refused_);
  }

  // The device has yet to run all loads when the host asks what has been read.
  void CollectWhatHasBeenRead() {
    for (int i = 0; i < 3; ++i) PutThis({FloatType::kFloat32, 1, 64, 1, 3000, 0}, 8);
    LoadSome(0, 2);
    LoadSome(1, 1);
    Collect();
    CHECK(pool_.Snapshot().entries_live == 2);
    LoadSome(0, 2);
    LoadSome(1);
    Collect();
    CHECK(pool_.Snapshot().entries_live == 1);
    // Its slot is another entry's, which nothing has read.
    PutThis({FloatType::kFloat32, 1, 64, 1, 3000, 0}, 8);
    Collect();
    CHECK(pool_.Snapshot().entries_live == 2);
    for (size_t i = 0; i < puts_.size(); ++i) LoadSome(i);
    Synchronize();
    CHECK(num_refused_ == 3 && on_device_->num_refused() == 3);
  }

  int64_t num_loads() const { return num_loads_; }
  const pool::Stats stats() const { return pool_.Snapshot(); }

 private:
  static pool::Options OptionsOf(const Plan& plan) {
    pool::Options options;
    options.budget = plan.budget;
    options.executions_in_flight = plan.in_flight;
    options.packer = plan.packer;
    return options;
  }

  int64_t Below(int64_t n) { return random_.Next() % n; }
  Stream AnyStream() { return streams_.all[Below(static_cast<int64_t>(streams_.all.size()))]; }

  // Loads that found nothing are told by the first call after they have run.
  bool Tell(const Status& status) {
    if (status.code == Code::kStaleHandle || status.code == Code::kInvalidArgument) {
      CHECK(on_device_->num_refused() > num_told_);
      num_told_ = on_device_->num_refused();
      return false;
    }
    CheckOk(status);
    return true;
  }

  AffineShape AnyShape() {
    const FloatType type = kTypes[Below(3)];
    const int64_t block_size = kBlockSizes[Below(5)];
    const int64_t num_rows = 1 + Below(3);
    if (Below(3) == 0) {
      const int64_t columns = 1 + Below(70);
      return {type, 1, block_size, num_rows, columns * (1 + Below(60)), columns};
    }
    const int64_t long_rows = Below(4) == 0 ? 60000 : 5000;
    return {type, 1, block_size, num_rows, 1 + Below(long_rows), 0};
  }

  void PutSome() {
    constexpr int kBits[] = {1, 2, 8, 8};
    const AffineShape shape = AnyShape();
    PutThis(shape, kBits[Below(4)]);
  }

 public:
  void PutThis(const AffineShape& shape, int bits) {
    Put put;
    put.shape = shape;
    put.stochastic = Below(2) == 1;
    put.seed = random_.Next();
    const int64_t count = put.shape.num_rows * put.shape.row_elements;
    const int64_t nbytes = count * ElementNbytes(put.shape.type);
    const Kind kind = Below(6) == 0 ? kSomeNotFinite : kSmooth;
    put.x = MakeValues(kind, put.shape.type, count, &random_);
    put.x.erase(put.x.begin(), put.x.begin() + ElementNbytes(put.shape.type));
    put.x.resize(nbytes);
    put.x_on_device.reset(new uint8_t[nbytes]);
    std::memcpy(put.x_on_device.get(), put.x.data(), nbytes);
    put.seed_on_device.reset(new uint32_t[1]{put.seed});
    put.handle_on_device.reset(new uint32_t[4]{~0u, ~0u, ~0u, ~0u});
    const Stream stream = AnyStream();
    const DevicePut call = {stream,
                            {run_, 0},
                            static_cast<pool::SiteId>(Below(7)),
                            bits,
                            8,
                            put.shape,
                            put.stochastic,
                            put.seed_on_device.get(),
                            put.x_on_device.get(),
                            put.handle_on_device.get()};
    Status status;
    do {
      status = on_device_->Put(call);
    } while (status.code != Code::kPoolExhausted && !Tell(status));
    CheckValid();
    if (status.code == Code::kPoolExhausted) return;
    // XLA gives the operand to others as soon as the stream is done with it.
    CHECK(cudaMemsetAsync(put.x_on_device.get(), 0xee, nbytes, stream) == 0);
    cudaEvent_t done = nullptr;
    CHECK(cudaEventCreateWithFlags(&done, 0) == 0);
    put.done.reset(done);
    CHECK(cudaEventRecord(done, stream) == 0);
    put.handle = recorder_.last;
    put.bits = recorder_.bits;
    puts_.push_back(std::move(put));
  }

  void LoadSome(size_t index, int64_t reads = 0) {
    const Put& put = puts_[index];
    const int64_t count = put.shape.num_rows * put.shape.row_elements;
    Load load;
    load.what = "run " + std::to_string(run_) + " put " + std::to_string(index) + " type " +
                std::to_string(static_cast<int>(put.shape.type)) + " columns " +
                std::to_string(put.shape.columns) + " rows " +
                std::to_string(put.shape.num_rows) + " elements " +
                std::to_string(put.shape.row_elements);
    const Stream stream = AnyStream();
    // As the program orders them.
    CHECK(cudaStreamWaitEvent(stream, put.done.get(), 0) == 0);
    load.y.reset(new uint8_t[count * ElementNbytes(put.shape.type)]);
    Enqueue(stream, put.shape, put.handle_on_device.get(), load.y.get(), reads);
    // What the host has decided so far.
    pool::GetView view;
    if (pool_.Get({run_, 0}, put.handle, &view).ok()) {
      load.expected = Expected(put.shape, put.x, put.stochastic, put.seed, view.bits_put,
                               view.bits_kept);
      load.what += " bits " + std::to_string(view.bits_put) + " left " +
                   std::to_string(view.bits_kept);
      CheckOk(pool_.Unpin(put.handle));
    } else {
      load.expected = Nans(put.shape.type, count);
      load.what += " gone";
      ++num_refused_;
    }
    loads_.push_back(std::move(load));
  }

  void Synchronize() {
    for (const Stream stream : streams_.all) CHECK(cudaStreamSynchronize(stream) == 0);
    for (const Load& load : loads_) {
      if (std::memcmp(load.y.get(), load.expected.data(), load.expected.size()) == 0) {
        continue;
      }
      std::fprintf(stderr, "seed %d delay %u: loaded values are wrong: %s\n",
                   static_cast<int>(plan_.seed), plan_.delay, load.what.c_str());
      std::exit(1);
    }
    num_loads_ += static_cast<int64_t>(loads_.size());
    loads_.clear();
  }

 private:
  // Handles of zeros, of nothing, and of an entry of another shape.
  void LoadNothing() {
    AffineShape shape = {kTypes[Below(3)], 1, 64, 1, 1 + Below(2000), 0};
    auto handle = std::make_unique<uint32_t[]>(4);
    Load load;
    load.what = "a handle of nothing";
    const int64_t which = puts_.empty() ? Below(3) : Below(4);
    if (which == 3) shape.row_elements = 200000;
    if (which == 0) {
      load.expected = Repeated(shape.type, shape.row_elements, 0);
    } else {
      load.expected = Nans(shape.type, shape.row_elements);
      ++num_refused_;
      handle[0] = which == 1 ? static_cast<uint32_t>(Below(300)) : random_.Next();
      for (int i = 1; i < 4; ++i) handle[i] = random_.Next();
    }
    load.y.reset(new uint8_t[load.expected.size()]);
    const Stream stream = AnyStream();
    const uint32_t* words = handle.get();
    if (which == 3) {
      words = puts_.back().handle_on_device.get();
      CHECK(cudaStreamWaitEvent(stream, puts_.back().done.get(), 0) == 0);
    }
    Enqueue(stream, shape, words, load.y.get());
    handles_.push_back(std::move(handle));
    loads_.push_back(std::move(load));
  }

  void Enqueue(Stream stream, const AffineShape& shape, const uint32_t* handle, void* y,
               int64_t reads = 0) {
    while (!Tell(on_device_->Get(stream, shape, handle, reads, y))) {
    }
  }

  void Collect() {
    CheckOk(on_device_->TellReads());
    pool_.Collect();
    Tell(on_device_->Settle());
  }

  void CollectSome() {
    if (Below(2) == 0) CheckOk(on_device_->TellReads());
    pool_.Collect();
    if (Below(2) == 0) {
      Tell(on_device_->Settle());
      CheckPinned();
    }
    CheckValid();
  }

  void CheckPinned() {
    CHECK(static_cast<int64_t>(simulator::NumRegistered()) * kPage ==
          pool_.Snapshot().committed.current);
  }

  void CheckValid() {
    std::string why;
    if (pool_.IsValid(&why)) return;
    std::fprintf(stderr, "violated: %s\n", why.c_str());
    std::exit(1);
  }

  const Plan plan_;
  Random random_;
  // What the device may still use is destroyed after the pool, which waits for it.
  std::vector<Put> puts_;
  std::vector<Load> loads_;
  std::vector<std::unique_ptr<uint32_t[]>> handles_;
  Streams streams_;
  pool::Pool pool_;
  Recorder recorder_;
  std::shared_ptr<DevicePool> on_device_;
  int64_t run_ = 1;
  int64_t num_loads_ = 0;
  int64_t num_refused_ = 0;
  int64_t num_told_ = 0;
};

int64_t num_loads = 0;
int64_t num_evictions = 0;
int64_t num_reclaims = 0;

void RunScenario(const Plan& plan, int num_executions) {
  Scenario scenario(plan);
  scenario.Run(num_executions);
  num_loads += scenario.num_loads();
  num_evictions += scenario.stats().evictions;
  num_reclaims += scenario.stats().reclaims;
}

void TestRandomScenarios(int num_seeds, int num_executions) {
  for (int seed = 1; seed <= num_seeds; ++seed) {
    for (const unsigned delay : {100u, 60u, 0u}) {
      const uint64_t number = seed * 3 + delay;
      const int64_t budget = seed % 4 == 0 ? pool::Options::kUnlimited : 3 * kPage;
      const pool::Packer packer = (seed + delay / 20) % 2 == 0 ? pool::Packer::kGpu
                                                               : pool::Packer::kCpu;
      RunScenario({number, 1 + seed % 3, delay, budget, 1 + seed % 2, packer},
                  num_executions);
    }
  }
}

Status MakeFor(pool::Pool* pool, std::shared_ptr<pool::Attachment>* attachment) {
  return pool->Attach(
      [pool](pool::Memory* system, Status* status) {
        return MakeDevicePool(pool, PackOnHost, system, status);
      },
      attachment);
}

void TestMemoryIsGivenBackWhenItHasBeenRead() {
  for (const pool::Packer packer : {pool::Packer::kGpu, pool::Packer::kCpu}) {
    Scenario({7, 1, 100, 60 * kPage, 1, packer}).LowerTheBudgetTwice();
  }
}

void TestPagesThatAreTakenAwayAreNotPackedInto() {
  Scenario({7, 1, 100, 10 * kPage, 1, pool::Packer::kCpu}).EvictWhatIsYetToBePacked();
}

void TestSlotsThatAreUsedAgain() {
  Scenario({7, 1, 100, pool::Options::kUnlimited, 1}).LoadWhatIsLongGone();
}

void TestWhatHasBeenReadIsCollected() {
  for (const unsigned delay : {100u, 60u, 0u}) {
    Scenario({7, 2, delay, pool::Options::kUnlimited, 1}).CollectWhatHasBeenRead();
  }
}

// Who packs, on a GPU that is integrated or not, where executions take so long with each.
pool::Packer Chosen(pool::Packer wanted, int integrated, float by_gpu, float by_cpu) {
  simulator::CurrentDevice() = {};
  simulator::CurrentDevice().integrated = integrated;
  // What the device may still use is destroyed after the pool, which waits for it.
  const std::vector<float> x(64, 1.0f);
  uint32_t handle[4];
  Streams streams(1);
  pool::Options options;
  options.packer = wanted;
  pool::Pool pool{options};
  std::shared_ptr<pool::Attachment> attachment;
  CheckOk(MakeFor(&pool, &attachment));
  const auto on_device = std::static_pointer_cast<DevicePool>(attachment);
  for (int64_t run = 1; run <= 20; ++run) {
    CheckOk(on_device->Put({streams.all[0], {run, 0}, 1, 2, 8,
                            {FloatType::kFloat32, 1, 64, 1, 64, 0}, false, nullptr,
                            x.data(), handle}));
    const bool gpu = on_device->packer() == pool::Packer::kGpu;
    simulator::CurrentDevice().milliseconds += gpu ? by_gpu : by_cpu;
    // The host is up to three executions ahead.
    if (run % 3 == 0) CHECK(cudaStreamSynchronize(streams.all[0]) == 0);
  }
  const pool::Packer last = on_device->packer();
  CheckOk(on_device->Put({streams.all[0], {21, 0}, 1, 2, 8,
                          {FloatType::kFloat32, 1, 64, 1, 64, 0}, false, nullptr,
                          x.data(), handle}));
  CHECK(on_device->packer() == last);
  return last;
}

void TestWhoPacksIsChosenByMeasurement() {
  using pool::Packer;
  CHECK(Chosen(Packer::kAuto, 1, 5, 4) == Packer::kCpu);
  CHECK(Chosen(Packer::kAuto, 1, 4, 5) == Packer::kGpu);
  CHECK(Chosen(Packer::kAuto, 0, 5, 4) == Packer::kGpu);
  CHECK(Chosen(Packer::kCpu, 0, 4, 5) == Packer::kCpu);
  CHECK(Chosen(Packer::kGpu, 1, 5, 4) == Packer::kGpu);
}

// A pool that is destroyed while the device is behind.
void TestThePoolWaitsForTheDeviceAtItsEnd() {
  Scenario scenario({5, 1, 100, pool::Options::kUnlimited, 1, pool::Packer::kCpu});
  for (int i = 0; i < 5; ++i) {
    scenario.PutThis({FloatType::kFloat32, 1, 64, 1, 3000, 0}, 8);
    scenario.LoadSome(i);
  }
}

void ExpectUnsupported(const Status& status, const char* why) {
  CHECK(status.code == Code::kUnsupported);
  CHECK(status.message.find(why) != std::string::npos);
}

void TestHardwareThatCannotIsRefused() {
  std::shared_ptr<pool::Attachment> attachment;
  simulator::CurrentDevice() = {};
  simulator::CurrentDevice().can_map_host_memory = 0;
  pool::Pool first{pool::Options{}};
  ExpectUnsupported(MakeFor(&first, &attachment), "cudaDevAttrCanMapHostMemory");
  simulator::CurrentDevice() = {};
  simulator::CurrentDevice().host_register_supported = 0;
  ExpectUnsupported(MakeFor(&first, &attachment), "cudaDevAttrHostRegisterSupported");
  // And what can, serves: nothing of the attempts is left.
  simulator::CurrentDevice() = {};
  CheckOk(MakeFor(&first, &attachment));

  simulator::CurrentDevice().ordinal = 1;
  const auto on_device = std::static_pointer_cast<DevicePool>(attachment);
  uint32_t handle[4] = {};
  float y[64];
  ExpectUnsupported(
      on_device->Get(nullptr, {FloatType::kFloat32, 1, 64, 1, 64, 0}, handle, 0, y),
      "GPU 0, and not GPU 1");
  simulator::CurrentDevice() = {};
}

void TestAPoolWithResidualsOfTheHostIsRefused() {
  pool::Pool pool{pool::Options{}};
  pool::PutView view;
  pool::Handle handle;
  CheckOk(pool.Put({1, 0}, 1, {10, 8, 100, 0}, &view, &handle));
  CheckOk(pool.Commit(handle));
  std::shared_ptr<pool::Attachment> attachment;
  const Status status = MakeFor(&pool, &attachment);
  CHECK(status.code == Code::kInvalidArgument && attachment == nullptr);
  pool.CollectAll();
  CheckOk(MakeFor(&pool, &attachment));

  pool::Options options;
  options.backward_once = true;
  pool::Pool once{options};
  CHECK(MakeFor(&once, &attachment).message.find("backward_once") != std::string::npos);
}

// What cannot be pinned is not there: the pool makes do with less, or says so.
void TestMemoryThatCannotBePinned() {
  Scenario({7, 1, 100, 60 * kPage, 1}).FailToGrow();
  Scenario scenario({9, 1, 100, pool::Options::kUnlimited, 1});
  simulator::CurrentDevice().most_registered = 2;
  scenario.Run(30);
  CHECK(scenario.stats().evictions + scenario.stats().exhausted > 0);
}

// The mean squared range of the blocks of an array.
double MeanSquaredRange(AffineShape shape, const std::vector<uint8_t>& x, int bits) {
  shape.bits = bits;
  const int64_t num_blocks = shape.num_rows * shape.NumBlocks();
  std::vector<uint16_t> codes(shape.num_rows * shape.NumWords());
  std::vector<uint16_t> scale(num_blocks);
  std::vector<uint16_t> minimum(num_blocks);
  const PiecesOfCodes<uint8_t> pieces = {reinterpret_cast<uint8_t*>(codes.data()),
                                         reinterpret_cast<uint8_t*>(scale.data()),
                                         reinterpret_cast<uint8_t*>(minimum.data())};
  PackAffine(BestKernels(), shape, {false, 0}, x.data(),
             Contiguous(shape, bits, pieces), {});
  double sum = 0;
  for (const uint16_t stored : scale) {
    const double step = __uint_as_float((stored & (kFlaggedBit - 1u)) << 16);
    sum += step * step;
  }
  return sum * ((1 << bits) - 1) * ((1 << bits) - 1) / static_cast<double>(num_blocks);
}

// Ranges and sensitivities come an execution late or so, and together.
void TestMeasuresArrive() {
  simulator::CurrentDevice() = {};
  Random random;
  // What the device may still use is destroyed after the pool, which waits for it.
  const AffineShape shape = {FloatType::kFloat32, 1, 64, 3, 5000, 0};
  std::vector<uint8_t> x = MakeValues(kSmooth, shape.type, 15000, &random);
  x.erase(x.begin(), x.begin() + 4);
  const uint32_t seed = 0;
  uint32_t handle[4];
  // Two rows, which are added up, of two sites and the gradient.
  const float sensitivities[] = {1.5f, 0.25f, 7.0f, 0.5f, 0.5f, 3.0f};
  const int64_t sites[] = {11, 12};
  Streams streams(1);
  const Stream stream = streams.all[0];
  pool::Pool pool{pool::Options{}};
  pool.SetTarget({pool::Target::kAverageBits, 4});
  std::shared_ptr<pool::Attachment> attachment;
  CheckOk(MakeFor(&pool, &attachment));
  const auto on_device = std::static_pointer_cast<DevicePool>(attachment);
  for (int64_t run = 1; run <= 3; ++run) {
    // The second execution is enqueued before the first has begun.
    if (run == 3) CHECK(cudaStreamSynchronize(stream) == 0);
    for (const int64_t site : sites) {
      CheckOk(on_device->Put({stream, {run, 0}, static_cast<pool::SiteId>(site), 2, 8,
                              shape, false, &seed, x.data(), handle}));
    }
    const pool::Stats stats = pool.Snapshot();
    CHECK(stats.sites.at(11).importance_known == (run == 3));
    CheckOk(on_device->Note(stream, sensitivities, 2, sites, 2));
  }
  const pool::Stats stats = pool.Snapshot();
  // Of two executions of which the measures came together.
  const double range = MeanSquaredRange(shape, x, 2);
  const double first = stats.sites.at(11).importance / (2 * 2.0 * range);
  const double second = stats.sites.at(12).importance / (2 * 0.75 * range);
  CHECK(first > 1 - 1e-9 && first < 1 + 1e-9);
  CHECK(second > 1 - 1e-9 && second < 1 + 1e-9);
  CHECK(stats.gradient_energy > 0);
}

// Where nothing measures sensitivities, ranges do not fill the board for ever.
void TestTheBoardOfNotesIsAlwaysThere() {
  simulator::CurrentDevice() = {};
  const std::vector<float> x(64, 1.0f);
  uint32_t handle[4];
  std::vector<int64_t> sites(5000, 1);
  const std::vector<float> sensitivities(5001, 1.0f);
  Streams streams(1);
  pool::Options options;
  options.budget = 64 * kPage;
  pool::Pool pool{options};
  std::shared_ptr<pool::Attachment> attachment;
  CheckOk(MakeFor(&pool, &attachment));
  const auto on_device = std::static_pointer_cast<DevicePool>(attachment);
  for (int64_t run = 1; run <= 20; ++run) {
    CheckOk(on_device->Put({streams.all[0], {run, 0}, 1, 2, 8,
                            {FloatType::kFloat32, 1, 64, 1, 64, 0}, false, nullptr,
                            x.data(), handle}));
    CheckOk(on_device->Note(streams.all[0], sensitivities.data(), 1, sites.data(), 5000));
    if (run % 5 == 0) CHECK(cudaStreamSynchronize(streams.all[0]) == 0);
  }
  CheckOk(on_device->Settle());
  CHECK(pool.Snapshot().gradient_energy > 0);
}

// 1.4 million columns of one row: mostly padding, and more pages than one launch takes.
void TestAListOfManyPages() {
  Scenario scenario({11, 1, 100, pool::Options::kUnlimited, 1});
  scenario.PutThis({FloatType::kFloat32, 1, 64, 1, 1500000, 1500000}, 8);
  scenario.LoadSome(0);
  scenario.Synchronize();
}

}  // namespace
}  // namespace dafjax

int main(int argc, char** argv) {
  const bool all = argc > 1 && std::string(argv[1]) == "all";
  dafjax::TestHardwareThatCannotIsRefused();
  dafjax::TestAPoolWithResidualsOfTheHostIsRefused();
  dafjax::TestThePoolWaitsForTheDeviceAtItsEnd();
  dafjax::TestRandomScenarios(all ? 60 : 3, 12);
  dafjax::TestMemoryIsGivenBackWhenItHasBeenRead();
  dafjax::TestPagesThatAreTakenAwayAreNotPackedInto();
  dafjax::TestSlotsThatAreUsedAgain();
  dafjax::TestWhatHasBeenReadIsCollected();
  dafjax::TestWhoPacksIsChosenByMeasurement();
  dafjax::TestMemoryThatCannotBePinned();
  dafjax::TestMeasuresArrive();
  dafjax::TestTheBoardOfNotesIsAlwaysThere();
  if (all) dafjax::TestAListOfManyPages();
  std::printf("%d loads, %d evictions, %d reclaims\n", static_cast<int>(dafjax::num_loads),
              static_cast<int>(dafjax::num_evictions),
              static_cast<int>(dafjax::num_reclaims));
  return 0;
}
