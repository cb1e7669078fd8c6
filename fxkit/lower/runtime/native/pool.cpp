// Memory that is kept for the next call, in lists of blocks of similar size. Neither Python nor torch
// is known here.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { CLASSES = 8 * 48, SMALLEST = 6, HUGE_PAGE = 1 << 21 };

typedef struct Block {
  struct Block* next;
} Block;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Block* kept[CLASSES];
static size_t limit = (size_t)1 << 30;
static size_t kept_bytes, used_bytes, peak_bytes;
static unsigned long long reused, fresh, dropped;
int is_forked;

// Eight classes for each power of two; the size becomes that of its class.
static int class_of(size_t* bytes) {
  size_t size = *bytes < ((size_t)1 << SMALLEST) ? (size_t)1 << SMALLEST : *bytes;
  int power = 63 - __builtin_clzll(size);
  size_t step = (size_t)1 << (power - 3);
  size_t steps = (size - ((size_t)1 << power) + step - 1) / step;
  if (steps == 8) ++power, steps = 0, step *= 2;
  *bytes = ((size_t)1 << power) + steps * step;
  return (power - SMALLEST) * 8 + (int)steps;
}

static size_t size_of(int index) {
  size_t power = (size_t)1 << (index / 8 + SMALLEST);
  return power + (size_t)(index % 8) * (power / 8);
}

// Frees what is kept; the mutex is held.
static size_t free_all(void) {
  size_t freed = 0;
  for (int index = 0; index < CLASSES; ++index)
    while (kept[index]) {
      Block* block = kept[index];
      kept[index] = block->next;
      freed += size_of(index);
      free(block);
    }
  kept_bytes -= freed;
  return freed;
}

// Returns memory that was not kept, or NULL. Where the system has huge pages for those who ask,
// the whole ones in what will be written are such: 512 faults become one, and writing misses few
// translations. None lies partly beyond it, so that a block touches no more than was asked for.
static void* fresh_block(size_t bytes, size_t asked) {
  void* found;
  if (posix_memalign(&found, 64, bytes)) return NULL;
#ifdef MADV_HUGEPAGE
  uintptr_t first = ((uintptr_t)found + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  uintptr_t last = ((uintptr_t)found + asked) / HUGE_PAGE * HUGE_PAGE;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
  return found;
}

extern "C" {
// Returns memory, or NULL where there is none left.
void* fx_pool_take(size_t bytes) {
  if (bytes > (size_t)1 << 46) return NULL;
  size_t asked = bytes;
  int index = class_of(&bytes);
  pthread_mutex_lock(&mutex);
  void* found = kept[index];
  if (found) {
    kept[index] = kept[index]->next;
    kept_bytes -= bytes;
    ++reused;
  } else {
    pthread_mutex_unlock(&mutex);
    found = fresh_block(bytes, asked);
    pthread_mutex_lock(&mutex);
    if (!found && free_all()) found = fresh_block(bytes, asked);
    if (found) ++fresh;
  }
  if (found) used_bytes += bytes;
  if (used_bytes > peak_bytes) peak_bytes = used_bytes;
  pthread_mutex_unlock(&mutex);
  return found;
}

void fx_pool_give(void* memory, size_t bytes) {
  int index = class_of(&bytes);
  pthread_mutex_lock(&mutex);
  used_bytes -= bytes;
  bool fit = kept_bytes + bytes <= limit;
  if (fit) {
    Block* block = (Block*)memory;
    block->next = kept[index];
    kept[index] = block;
    kept_bytes += bytes;
  } else {
    ++dropped;
  }
  pthread_mutex_unlock(&mutex);
  if (!fit) free(memory);
}

// A fork must not copy a mutex that another thread holds.
static void before_fork(void) { pthread_mutex_lock(&mutex); }

static void after_fork(void) { pthread_mutex_unlock(&mutex); }

static void after_fork_in_child(void) {
  is_forked = 1;
  pthread_mutex_unlock(&mutex);
}

void fx_pool_start(void) { pthread_atfork(before_fork, after_fork, after_fork_in_child); }

struct fx_pool_statistics {
  unsigned long long used, peak, kept, limit, reused, fresh, dropped;  // bytes, then blocks
};

void fx_pool_read(fx_pool_statistics* found) {
  pthread_mutex_lock(&mutex);
  *found = {used_bytes, peak_bytes, kept_bytes, limit, reused, fresh, dropped};
  pthread_mutex_unlock(&mutex);
}

// Frees what is kept and returns how many bytes that was.
size_t fx_pool_trim(void) {
  pthread_mutex_lock(&mutex);
  size_t freed = free_all();
  pthread_mutex_unlock(&mutex);
  return freed;
}

void fx_pool_limit(size_t bytes) {
  pthread_mutex_lock(&mutex);
  limit = bytes;
  if (kept_bytes > limit) free_all();
  pthread_mutex_unlock(&mutex);
}
}
