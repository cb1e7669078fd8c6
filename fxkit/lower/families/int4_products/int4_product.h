// Products of integers by a matrix of 4-bit integers in groups, for any number of rows.

// The two integers of a byte.
static inline int fx_low_of(unsigned char byte) { return (signed char)(byte << 4) >> 4; }
static inline int fx_high_of(unsigned char byte) { return (signed char)byte >> 4; }

// The same one by one, for groups of any even size; Sum is what a group is summed in.
template <class Sum, class Left, class Zero>
static void fx_plain_groups(const Left* a, long row, const int* zero, const fx_groups<Zero>& b, long rows,
                            long columns, long depth, float* sums) {
  for (long r = 0; r < rows; ++r)
    for (long c = 0; c < columns; ++c) {
      const unsigned char* const bytes = b.packed + c * b.bytes(depth);
      for (long g = 0; g < b.count(depth); ++g) {
        const long place = c * b.count(depth) + g;
        const Sum moved = b.zeros ? (Sum)b.zeros[place] : (Sum)0;
        const Sum lift = zero ? (Sum)zero[r] : (Sum)0;
        Sum sum = 0;
        for (long k = g * b.group; k < (g + 1) * b.group; k += 2) {
          const unsigned char byte = bytes[k / 2];
          sum += ((Sum)a[r * row + k] - lift) * ((Sum)fx_low_of(byte) - moved);
          sum += ((Sum)a[r * row + k + 1] - lift) * ((Sum)fx_high_of(byte) - moved);
        }
        sums[r * FX_GROUP_COLUMNS + c] += (float)sum * b.scales[place];
      }
    }
}

#if defined(FX_INTEGER_STEP)
// Rows enough for it to be worth bytes of the weight in memory: they are multiplied as such.
template <bool HAS_TILES, class Left, class Zero>
static void fx_groups_of_bytes(const Left* a, long row, fx_zeros zeros, const fx_groups<Zero>& b,
                               long rows, long columns, long depth, float* sums) {
  const long most = 1024;
  alignas(64) signed char bytes[FX_GROUP_COLUMNS * most];
  alignas(64) int found[FX_GROUPED_ROWS * FX_GROUP_COLUMNS];
  for (long k = 0; k < depth;) {
    const long rest = b.group - k % b.group, some = rest < most ? rest : most;
    for (long c = 0; c < columns; ++c) {
      const unsigned char* const from = b.packed + c * b.bytes(depth) + k / 2;
      for (long i = 0; i < some / 2; ++i) {
        bytes[c * most + 2 * i] = (signed char)(from[i] << 4) >> 4;
        bytes[c * most + 2 * i + 1] = (signed char)from[i] >> 4;
      }
    }
    fx_add_product<HAS_TILES, false>(
        a + k, row, bytes, most, rows, columns, some, zeros, true, found);
    alignas(64) float scale[FX_GROUP_COLUMNS] = {};
    alignas(64) int moved[FX_GROUP_COLUMNS] = {};
    for (long c = 0; c < columns; ++c) {
      const long place = c * b.count(depth) + k / b.group;
      scale[c] = b.scales[place];
      moved[c] = b.zeros ? (int)b.zeros[place] : 0;
    }
    for (long r = 0; r < rows; ++r) {
      const Left* const x = a + r * row + k;
      int total = 0;
      if (b.zeros) {
        for (long i = 0; i < some; ++i) total += x[i];
        total -= (int)some * zeros.of(r);
      }
      const int* const from = found + r * FX_GROUP_COLUMNS;
      float* const to = sums + r * FX_GROUP_COLUMNS;
      for (long c = 0; c < FX_GROUP_COLUMNS; ++c) to[c] += (float)(from[c] - moved[c] * total) * scale[c];
    }
    k += some;
  }
}
#endif

// Tells whether some rows are multiplied at once, where a call has ROWS; 0: any number.
template <long ROWS, int SOME>
static constexpr bool FX_HAS = ROWS == 0 || (ROWS < FX_GROUP_ROWS ? ROWS == SOME
                                                                  : ROWS % FX_GROUP_ROWS == SOME || SOME == 4);

// sums[rows][64] = (A - zeros) by a panel of columns, for integers A; each group is summed in 32 bits.
// What a thread has in order is that of the block whose number it has. ROWS are 0 where nothing is known of
// rows; where they are more than FX_FEW_ROWS, blocks of fewer are computed as those of many are.
template <bool HAS_TILES, long ROWS, class Left, class Zero>
static void fx_int4_product(const Left* a, long row, fx_zeros zeros, const fx_groups<Zero>& b, long rows,
                            long columns, long depth, long block, fx_bytes_in_order& in_order,
                            float* sums) {
  __builtin_memset(sums, 0, rows * FX_GROUP_COLUMNS * sizeof(float));
#if defined(FX_INTEGER_STEP)
  if constexpr (ROWS == 0 || ROWS > FX_FEW_ROWS)
    if (b.group % FX_UNIT == 0 && (ROWS > FX_FEW_ROWS || rows > FX_FEW_ROWS)) {
      fx_groups_of_bytes<HAS_TILES>(a, row, zeros, b, rows, columns, depth, sums);
      return;
    }
#endif
  const long own = rows <= FX_GROUP_ROWS ? block : -1;
  for (long r = 0; r < rows; r += FX_GROUP_ROWS) {
    const long count = rows - r < FX_GROUP_ROWS ? rows - r : FX_GROUP_ROWS;
    int zero[FX_GROUP_ROWS];
    bool are_bytes = true;
    for (long i = 0; i < count; ++i) {
      zero[i] = zeros.of(r + i);
      are_bytes &= fx_lift_of(a, zero[i]) >= -254 && fx_lift_of(a, zero[i]) <= 256;
    }
    const Left* const from = a + r * row;
    float* const to = sums + r * FX_GROUP_COLUMNS;
#if defined(FX_INTEGER_STEP)
    const auto add = [&]<int SOME>() {
      if constexpr (FX_HAS<ROWS, SOME> && ROWS <= FX_FEW_ROWS)
        fx_integer_rows<SOME>(from, row, zero, b, columns, depth, own, in_order, to);
    };
    if (b.group % FX_UNIT == 0 && are_bytes) {
      if (count == 1) add.template operator()<1>();
      if (count == 2) add.template operator()<2>();
      if (count == 3) add.template operator()<3>();
      if (count == 4) add.template operator()<4>();
      continue;
    }
#endif
    fx_plain_groups<int>(from, row, zero, b, count, columns, depth, to);
  }
}
