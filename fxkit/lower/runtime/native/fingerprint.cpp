// Fingerprints of tensors' numbers, which tell of every write, counted by torch or not.

enum { LANES = 16, GROUPS = 8, BLOCK = LANES * GROUPS };

// From so many numbers on, other threads may run meanwhile; and from so many on they help.
static const int64_t LONG_READ = 1 << 14, SHARED_READ = 1 << 17;

// In how many parts that is, and how many bytes ahead memory is asked for.
enum { PARTS = 8, AHEAD = 2048 };

typedef uint32_t Lanes __attribute__((vector_size(LANES * sizeof(uint32_t))));

// Two sums for each lane. A step is a bijection of the sum for any number, and of the number for any
// sum: one number that differs is always seen. Shifts carry high bits down, without which as many
// flipped signs as are even would cancel out.
struct Sums {
  Lanes first[GROUPS], second[GROUPS];
};

static inline void take_block(Sums* sums, const char* data) {
#pragma GCC unroll 8
  for (int i = 0; i < GROUPS; ++i) {
    Lanes numbers;
    memcpy(&numbers, data + i * sizeof numbers, sizeof numbers);
    Lanes first = (sums->first[i] ^ numbers) * 0x9E3779B1u;
    Lanes second = (sums->second[i] + numbers) * 0x85EBCA77u;
    sums->first[i] = first ^ (first >> 15);
    sums->second[i] = second ^ (second >> 13);
  }
}

static void take_part(Sums* sums, const char* data, int64_t count) {
  Sums local = *sums;  // in registers
  for (; count >= BLOCK; count -= BLOCK, data += BLOCK * sizeof(float)) {
    for (int i = 0; i < GROUPS; ++i) __builtin_prefetch(data + AHEAD + i * sizeof(Lanes));
    take_block(&local, data);
  }
  uint32_t rest[BLOCK] = {0};
  memcpy(rest, data, count * sizeof(float));
  if (count) take_block(&local, (const char*)rest);
  *sums = local;
}

// Many numbers are read in PARTS parts by any number of threads; what that gives is read in turn.
static void take_numbers(Sums* sums, const char* data, int64_t count) {
  if (count < SHARED_READ) return take_part(sums, data, count);
  Sums parts[PARTS];
  memset(parts, 0, sizeof parts);
  uint32_t threads = 1;
  if (is_forked || torch_get_num_threads(&threads)) threads = 1;
  const int64_t size = (count / PARTS + BLOCK) / BLOCK * BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int i = 0; i < PARTS; ++i) {
    const int64_t first = i * size < count ? i * size : count;
    const int64_t last = first + size < count ? first + size : count;
    take_part(parts + i, data + first * sizeof(float), last - first);
  }
  take_part(sums, (const char*)parts, sizeof parts / sizeof(uint32_t));
}

// Finds the numbers of a dense float32 tensor in main memory; false where there are none such.
static bool find_numbers(PyObject* tensor, const void** data, int64_t* count) {
  if (!is_tensor(tensor)) return false;
  uint64_t keys = keys_of(tensor);
  if (keys != layout.plain_keys && keys != layout.inference_keys) return false;
  Handle handle = handle_of(tensor);
  int32_t dtype;
  int64_t rank, *sizes, *strides;
  if (aoti_torch_get_dtype(handle, &dtype) || dtype != 6 || aoti_torch_get_dim(handle, &rank) ||
      aoti_torch_get_sizes(handle, &sizes) || aoti_torch_get_strides(handle, &strides) ||
      torch_get_const_data_ptr(handle, data))
    return false;
  *count = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    if (sizes[i] != 1 && strides[i] != *count) return false;
    *count *= sizes[i];
  }
  return *count > 0 && *data;
}

enum { MAX_SOURCES = 8 };

// fingerprint(tensor or None, ...) -> bytes; None where one is no dense float32 tensor
static PyObject* fingerprint(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  const void* data[MAX_SOURCES];
  int64_t counts[MAX_SOURCES + 1] = {0};
  int64_t total = 0;
  if (count > MAX_SOURCES) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (args[i] == Py_None) continue;
    if (!find_numbers(args[i], data + i, counts + i)) Py_RETURN_NONE;
    total += counts[i];
  }
  PyObject* result = PyBytes_FromStringAndSize(nullptr, sizeof(Sums) + sizeof counts);
  if (!result) return nullptr;
  Sums sums;
  memset(&sums, 0, sizeof sums);
  PyThreadState* state = total >= LONG_READ ? PyEval_SaveThread() : nullptr;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (counts[i]) take_numbers(&sums, (const char*)data[i], counts[i]);
  if (state) PyEval_RestoreThread(state);
  memcpy(PyBytes_AS_STRING(result), &sums, sizeof sums);
  memcpy(PyBytes_AS_STRING(result) + sizeof sums, counts, sizeof counts);
  return result;
}
