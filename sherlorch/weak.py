"""A method that can be handed out without keeping its object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def weakly(method: Method) -> Method:
    """The bound method, without the cycle: an owner of its callers is freed when its last user lets go."""
    owner = weakref.ref(method.__self__)  # type: ignore[attr-defined]
    function = method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        target = owner()
        assert target is not None, "the owner of this method is gone"
        return function(target, *args)

    return call  # type: ignore[return-value]
