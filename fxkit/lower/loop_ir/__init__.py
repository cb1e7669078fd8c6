"""The loop IR: what a fused kernel computes, before anything says in which loops."""
