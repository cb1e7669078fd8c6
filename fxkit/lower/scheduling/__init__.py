"""How a kernel is computed: the passes that decide it for a CPU and a GPU, and what both ask."""
