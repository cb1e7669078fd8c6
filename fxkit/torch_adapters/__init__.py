"""All that fxkit uses of torch and that torch does not promise to keep: one file a subject.

A private name of torch is one whose dotted path has a leading underscore in it, such as
`torch._C._len_torch_dispatch_stack` or `torch.utils._pytree`. Operators are none, whatever they are
called (`torch.ops.aten._to_copy`): their schemas say what they do.

Each name is declared with what it is for and with what fxkit does in a torch that lacks it, which
is never an error at import and never a wrong result. `python -m fxkit doctor` says what is missing.
"""
