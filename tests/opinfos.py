"""torch's own table of operators, with samples of what each may be called with (OpInfo)."""

from __future__ import annotations

import functools
import warnings
from typing import Any


@functools.cache
def table() -> Any:
    """Return the module that holds the table, as `op_db`.

    For each operator that is asked for samples torch looks for the test of `unittest`'s that it is
    called in, and reads the source of all functions on the stack: 50 ms. There is no such test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations, common_utils
    vars(common_utils)["extract_test_fn"] = lambda: None
    return common_methods_invocations
