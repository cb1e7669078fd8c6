// Kernels of a run, one after the other, over values that are pointers. Neither Python nor torch is
// known here: the C interface serves the binding, and whatever else has the pointers.
//
// The values of a run are those that it is given, then those that it makes, then those that lie in
// scratch memory. A kernel's buffers are followed by the numbers that it reads at run time, where it
// reads any. It returns zero, or else what it has written is void and the run has failed.
//
// A run on another device launches its kernels on the stream that is current there.
#include <stddef.h>
#include <stdint.h>

enum { FX_MAX_VALUES = 128 };  // of a run

extern "C" {
typedef long (*fx_kernel_function)(void* const* buffers, long threads);
typedef int (*fx_launch_function)(void* const* buffers, void* scratch, void* stream, int device);
typedef int32_t (*fx_stream_function)(int32_t device, void** stream);  // 0 for no error
typedef int8_t (*fx_exchange_function)(int8_t device);  // makes it current, returns which one was
// Lets go of what lies in slots of the caller's.
typedef void (*fx_release_function)(void* context, const int* slots, int count);

struct fx_kernel {
  void* function;  // a fx_kernel_function, or a fx_launch_function
  int count;
  int* buffers;  // numbers of values
  bool is_parallel;
  const char* numbers;  // NULL where there are none
  int* freed;           // slots that nobody reads after it
  int freed_count;
  int scratch;  // the value that is its own scratch memory, or -1; only where it is launched
};

struct fx_launcher {
  fx_stream_function stream;  // NULL where kernels run on the processor
  fx_exchange_function exchange;
  int device_index;
};

struct fx_run {
  fx_kernel* kernels;
  int kernel_count, input_count, output_count, scratch_count;
  bool is_parallel;  // whether any kernel is
  size_t scratch_bytes;
  size_t* scratch;  // offset of each value in the scratch memory, or
  int* homes;       // in that of the output of this number, unless it is negative
  fx_launcher launcher;
};

// Whether all that a run names is there, and no more than a call has room for.
bool fx_run_fits(const fx_run* run) {
  int values = run->input_count + run->output_count + run->scratch_count;
  bool fits = values <= FX_MAX_VALUES;
  for (int i = 0; i < run->scratch_count; ++i) fits = fits && run->homes[i] < run->output_count;
  for (int k = 0; fits && k < run->kernel_count; ++k) {
    const fx_kernel* kernel = run->kernels + k;
    fits = kernel->count <= FX_MAX_VALUES && kernel->scratch < values;
    for (int i = 0; fits && i < kernel->count; ++i)
      fits = kernel->buffers[i] >= 0 && kernel->buffers[i] < values;
  }
  return fits;
}

// Points to the values that lie in scratch memory; `values` has room for them.
static void point_to_scratch(const fx_run* run, void** values, void* memory) {
  void** outputs = values + run->input_count;
  void** scratch = outputs + run->output_count;
  for (int i = 0; i < run->scratch_count; ++i) {
    void* home = run->homes[i] < 0 ? memory : outputs[run->homes[i]];
    scratch[i] = (char*)home + run->scratch[i];
  }
}

static void release(const fx_kernel* kernel, fx_release_function function, void* context) {
  if (kernel->freed_count && function) function(context, kernel->freed, kernel->freed_count);
}

static int run_here(const fx_run* run, void** values, uint32_t threads, fx_release_function function,
                    void* context) {
  void* buffers[FX_MAX_VALUES + 1];
  for (int k = 0; k < run->kernel_count; ++k) {
    const fx_kernel* kernel = run->kernels + k;
    for (int i = 0; i < kernel->count; ++i) buffers[i] = values[kernel->buffers[i]];
    buffers[kernel->count] = (void*)kernel->numbers;
    if (((fx_kernel_function)kernel->function)(buffers, kernel->is_parallel ? threads : 1))
      return 1;
    release(kernel, function, context);
  }
  return 0;
}

static int launch(const fx_run* run, void** values, fx_release_function function, void* context) {
  const fx_launcher* launcher = &run->launcher;
  void *buffers[FX_MAX_VALUES], *stream;
  if (launcher->stream(launcher->device_index, &stream)) return 1;
  int8_t before = launcher->exchange((int8_t)launcher->device_index);
  int failed = 0;
  for (int k = 0; !failed && k < run->kernel_count; ++k) {
    const fx_kernel* kernel = run->kernels + k;
    for (int i = 0; i < kernel->count; ++i) buffers[i] = values[kernel->buffers[i]];
    void* scratch = kernel->scratch < 0 ? nullptr : values[kernel->scratch];
    failed =
        ((fx_launch_function)kernel->function)(buffers, scratch, stream, launcher->device_index);
    if (!failed) release(kernel, function, context);
  }
  launcher->exchange(before);
  return failed;
}

// Runs kernels: zero when all of them did their work.
//
// `values` begins with the run's inputs and outputs and has room for all values; `memory` is its
// scratch memory. `function`, which may be NULL, is told which slots nobody reads any more.
int fx_run_kernels(const fx_run* run, void** values, void* memory, uint32_t threads,
                   fx_release_function function, void* context) {
  point_to_scratch(run, values, memory);
  if (run->launcher.stream) return launch(run, values, function, context);
  return run_here(run, values, threads, function, context);
}
}
