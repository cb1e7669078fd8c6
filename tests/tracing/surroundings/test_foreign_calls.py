"""Functions written in C: what is known of them."""

from __future__ import annotations

import types

import pytest

from fxkit.tracing.surroundings.foreign_calls import has_effects, is_known


@pytest.mark.parametrize("given", [types.ModuleType("elsewhere"), None, 3])
def test_functions_whose_module_is_no_text(given: object):
    class Named:
        """Looks like a function of a library that gives the module in place of its name."""

        __name__ = "measure"
        __self__ = types.ModuleType("elsewhere")

        def __init__(self) -> None:
            self.__module__ = given  # type: ignore[assignment]

    assert not is_known(Named())
    assert not has_effects(Named(), None)
