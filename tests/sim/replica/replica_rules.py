"""native/replica/ built separately for the simulator, with planted bugs that can be switched on
(native/replica/planted_bugs.h).
"""

from __future__ import annotations

from tests.planted_library import build

_module = build("replica_rules", "replica", ["replica/rules.h"])
ffi, lib = _module.ffi, _module.lib
