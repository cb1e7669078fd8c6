"""The C++ text of fused steps: one loop over all elements of all parameters.

Each formula is that of the loops over single tensors in `torch.optim`, rounded where those round.
A decay of 0 is left out, as there: 0 times an infinite parameter would be NaN. The work is cut into
chunks, each a part of one parameter, which the threads share.

Source: torch/optim/adam.py `_single_tensor_adam`, torch/optim/sgd.py `_single_tensor_sgd`.
"""

from __future__ import annotations

CHUNK = 16384

_ADAM = """
extern "C" void fx_adam_{name}(
    long chunks, const long* owner, const long* begin, const long* end, void* const* ps,
    void* const* gs, void* const* ms, void* const* vs, void* const* counts,
    const double* step_sizes, const double* roots, const double* options, long parameters,
    long threads) {{
  for (long k = 0; k < parameters; ++k) *(float*)counts[k] += 1.0f;
  const {type} keep = ({type})options[0], blend = ({type})options[1];
  const {type} fade = ({type})options[2], share = ({type})options[3];
  const {type} eps = ({type})options[4], decay = ({type})options[5];
  const {type} shrink = ({type})options[6];
  const bool is_near = options[1] < 0.5, has_decay = options[5] != 0;
  #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long chunk = 0; chunk < chunks; ++chunk) {{
    const long k = owner[chunk];
    {type}* __restrict p = ({type}*)ps[k];
    const {type}* __restrict g = (const {type}*)gs[k];
    {type}* __restrict m = ({type}*)ms[k];
    {type}* __restrict v = ({type}*)vs[k];
    const {type} step = ({type})step_sizes[k], root = ({type})roots[k];
    #pragma omp simd
    for (long i = begin[chunk]; i < end[chunk]; ++i) {{
      const {type} x = p[i] * shrink;
      const {type} d = has_decay ? g[i] + decay * x : g[i];
      const {type} gap = d - m[i];
      const {type} mean = is_near ? m[i] + blend * gap : d - gap * keep;
      const {type} square = v[i] * fade + share * d * d;
      m[i] = mean;
      v[i] = square;
      p[i] = x + step * mean / (__builtin_sqrt{suffix}(square) / root + eps);
    }}
  }}
}}
"""

_SGD = """
extern "C" void fx_sgd_{name}(
    long chunks, const long* owner, const long* begin, const long* end, void* const* ps,
    void* const* gs, void* const* ms, const double* options, long parameters, long threads) {{
  const {type} rate = ({type})options[0], decay = ({type})options[1];
  const {type} momentum = ({type})options[2], fresh = ({type})options[3];
  const bool has_decay = options[1] != 0, has_momentum = options[2] != 0;
  const bool is_nesterov = options[4] != 0;
  #pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long chunk = 0; chunk < chunks; ++chunk) {{
    const long k = owner[chunk];
    {type}* __restrict p = ({type}*)ps[k];
    const {type}* __restrict g = (const {type}*)gs[k];
    if (!has_momentum && !has_decay) {{
      #pragma omp simd
      for (long i = begin[chunk]; i < end[chunk]; ++i) p[i] += rate * g[i];
      continue;
    }}
    if (!has_momentum) {{
      #pragma omp simd
      for (long i = begin[chunk]; i < end[chunk]; ++i) p[i] += rate * (g[i] + decay * p[i]);
      continue;
    }}
    {type}* __restrict m = ({type}*)ms[k];
    #pragma omp simd
    for (long i = begin[chunk]; i < end[chunk]; ++i) {{
      const {type} d = has_decay ? g[i] + decay * p[i] : g[i];
      const {type} mean = m[i] * momentum + fresh * d;
      m[i] = mean;
      p[i] += rate * (is_nesterov ? d + momentum * mean : mean);
    }}
  }}
}}
"""


def step_text() -> str:
    """Return the text of all fused steps, for float32 and float64."""
    kinds = (("f32", "float", "f"), ("f64", "double", ""))
    return "".join(
        text.format(name=name, type=kind, suffix=suffix)
        for text in (_ADAM, _SGD)
        for name, kind, suffix in kinds
    )
