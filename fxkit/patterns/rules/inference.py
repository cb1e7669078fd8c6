"""What does nothing outside of training."""

from __future__ import annotations

import torch.nn.functional as F

from fxkit.patterns.rewriting import rule


@rule
def dropout_in_eval(x, p):
    """Dropout outside of training returns its operand itself.

    Rewrites:
        F.dropout(x, p, training=False)  →  x
    """
    return F.dropout(x, p, training=False), x
