# SPDX-License-Identifier: Apache-2.0
"""Members of enumerations in pickles, read without trusting ``getattr``."""

from __future__ import annotations

import enum
import pickle
from typing import Any

__all__ = ["GETATTR", "Foreign", "enum_member"]

GETATTR = "builtins.getattr"
"""What Python 3.11.0 to 3.11.3 write for a member (Debian 12 has 3.11.2); later versions do not."""


class Foreign:
    """Stands for an object of a class whose code is not here and would not be run."""

    def __new__(cls, *_: Any) -> Foreign:
        """Take whatever the class would."""
        return object.__new__(cls)


def enum_member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration, for `GETATTR` in a pickle: nothing else is looked up.

    Raises:
        pickle.UnpicklingError: It is not the name of a member.
    """
    if kind is Foreign:
        return Foreign()
    if not (isinstance(kind, enum.EnumMeta) and isinstance(name, str)):
        raise pickle.UnpicklingError(f"Unsupported GLOBAL {GETATTR} of {kind!r}")
    if name not in kind.__members__:
        raise pickle.UnpicklingError(
            f"Unsupported GLOBAL {GETATTR} of {kind!r}: no member {name!r}"
        )
    return kind.__members__[name]
