"""In which loops a kernel is computed: row sweeps, unrolling, intervals, the order of axes."""
