// Exact products of 8-bit integers in the tiles of a processor.
#if defined(__AMX_INT8__) && defined(FX_DOTS)
#define FX_READ_TILE(N, FROM, STEP) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #N : : "r"(FROM), "r"((long)(STEP)) : "memory")
#define FX_CLEAR_TILE(N) asm volatile("tilezero %%tmm" #N : :)
#define FX_WRITE_TILE(N, TO, STEP) \
  asm volatile("tilestored %%tmm" #N ", (%0,%1,1)" : : "r"(TO), "r"((long)(STEP)) : "memory")
#define FX_DOT_TILES(KIND, A, B, C) \
  asm volatile(KIND " %%tmm" #B ", %%tmm" #A ", %%tmm" #C : :)

static inline __attribute__((always_inline)) void fx_dot_tiles(const unsigned char*) {
  FX_DOT_TILES("tdpbusd", 4, 6, 0);
  FX_DOT_TILES("tdpbusd", 4, 7, 1);
}

static inline __attribute__((always_inline)) void fx_dot_more_tiles(const unsigned char*) {
  FX_DOT_TILES("tdpbusd", 5, 6, 2);
  FX_DOT_TILES("tdpbusd", 5, 7, 3);
}

static inline __attribute__((always_inline)) void fx_dot_tiles(const signed char*) {
  FX_DOT_TILES("tdpbssd", 4, 6, 0);
  FX_DOT_TILES("tdpbssd", 4, 7, 1);
}

static inline __attribute__((always_inline)) void fx_dot_more_tiles(const signed char*) {
  FX_DOT_TILES("tdpbssd", 5, 6, 2);
  FX_DOT_TILES("tdpbssd", 5, 7, 3);
}

// 16 rows, or 32 where there are TWO tiles of them, by 32 turned columns: set where sums[rows][64] are
// fresh, else added to them. HAS_ROOM tells that of A up to a multiple of 64 terms something may be read,
// whose factors are 0. Some columns that lie ahead are asked for meanwhile.
template <bool TWO, bool HAS_ROOM, class Left>
static inline void fx_square_in_tiles(const Left* a, long row, const signed char* panel, long terms,
                                      const signed char* ahead, long column, long some, bool are_fresh,
                                      int* sums) {
  const long whole = (HAS_ROOM ? terms + 63 : terms) / 64 * 64;
  const long width = FX_PANEL_COLUMNS * sizeof(int);
  if (are_fresh) {
    FX_CLEAR_TILE(0);
    FX_CLEAR_TILE(1);
    if (TWO) FX_CLEAR_TILE(2);
    if (TWO) FX_CLEAR_TILE(3);
  } else {
    FX_READ_TILE(0, sums, width);
    FX_READ_TILE(1, sums + 16, width);
    if (TWO) FX_READ_TILE(2, sums + 16 * FX_PANEL_COLUMNS, width);
    if (TWO) FX_READ_TILE(3, sums + 16 * FX_PANEL_COLUMNS + 16, width);
  }
  const auto step = [&](const Left* from, long apart, long k) __attribute__((always_inline)) {
    FX_READ_TILE(4, from, apart);
    FX_READ_TILE(6, panel + k * 32, 64);
    FX_READ_TILE(7, panel + k * 32 + 1024, 64);
    if (TWO) FX_READ_TILE(5, from + 16 * apart, apart);
    fx_dot_tiles(from);
    if (TWO) fx_dot_more_tiles(from);
  };
  for (long k = 0; k < whole; k += 64) {
    for (long c = 0; c < some; ++c) __builtin_prefetch(ahead + c * column + k, 0, 2);
    step(a + k, row, k);
  }
  if (whole < terms) {
    alignas(64) Left rest[32 * 64];
    for (long r = 0; r < (TWO ? 32 : 16); ++r)
      *(fx_dots*)(rest + r * 64) = fx_first_bytes(a + r * row + whole, terms - whole);
    step(rest, 64, whole);
  }
  FX_WRITE_TILE(0, sums, width);
  FX_WRITE_TILE(1, sums + 16, width);
  if (TWO) FX_WRITE_TILE(2, sums + 16 * FX_PANEL_COLUMNS, width);
  if (TWO) FX_WRITE_TILE(3, sums + 16 * FX_PANEL_COLUMNS + 16, width);
}

// Tiles of 16 rows of 64 bytes.
static inline void fx_open_tiles() {
  alignas(64) unsigned char shapes[64] = {1};
  for (int tile = 0; tile < 8; ++tile) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}

static inline void fx_close_tiles() { asm volatile("tilerelease" : :); }

// A multiple of 16 rows by 32 turned columns, set where sums[rows][64] are fresh, else added to them. The
// 32 columns that lie ahead are asked for meanwhile, some by each block of rows: all at once are too many.
template <bool HAS_ROOM, class Left>
static void fx_rows_in_tiles(const Left* a, long row, long rows, const signed char* panel, long terms,
                             const signed char* ahead, long column, bool are_fresh, int* sums) {
  const long blocks = (rows + 31) / 32;
  const long some = blocks == 1 ? 32 : blocks == 2 ? 16 : blocks == 3 ? 11 : 8;
  long r = 0;
  for (; r + 32 <= rows; r += 32, ahead += some * column)
    fx_square_in_tiles<true, HAS_ROOM>(a + r * row, row, panel, terms, ahead, column, r < 128 ? some : 0,
                                       are_fresh, sums + r * FX_PANEL_COLUMNS);
  if (r < rows)
    fx_square_in_tiles<false, HAS_ROOM>(a + r * row, row, panel, terms, ahead, column,
                                        r < 128 ? some : 0, are_fresh, sums + r * FX_PANEL_COLUMNS);
}
#else
static inline void fx_open_tiles() {}
static inline void fx_close_tiles() {}

template <bool HAS_ROOM, class Left>
static void fx_rows_in_tiles(const Left*, long, long, const signed char*, long, const signed char*, long,
                             bool, int*) {}
#endif
