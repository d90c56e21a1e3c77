"""Make numba compile in half the time: optimise and emit only those functions that are called by their address.

By default numba optimises and emits each function as soon as it is compiled, together with a copy of every function
that it calls. A helper four levels below the function that Python calls is optimised and emitted four times, and only
the last copy runs. Here a function is linked into its callers as it is, and optimised together with them.
"""

from __future__ import annotations

from typing import Any

from numba.core import codegen
from numba.core.compiler_lock import global_compiler_lock

REPLACED = (
    "_optimize_final_module",
    "_finalize_final_module",
    "_finalize_dynamic_globals",
    "_verify_declare_only_symbols",
    "_get_compiled_object",
    "get_pointer_to_function",
)
"""Methods of numba on which this depends. A version without one of them compiles as usual."""
LOOP_BODY = "__numba_parfor_gufunc"
"""A text that occurs in the names of functions that hold the body of a parallel loop. Only the function with the loop
calls them.
"""
_set_env = codegen.JITCPUCodegen.set_env


class Library(codegen.JITCodeLibrary):
    """A function's code, which is optimised and emitted when its address is first needed."""

    _is_emitted = False

    def _optimize_final_module(self) -> None:
        """Do nothing: `_emit` optimises."""

    def _finalize_final_module(self) -> None:
        """Make the code ready to be linked into other code. Code that was loaded from disk is also ready to run."""
        if self._shared_module is not None:
            self._is_emitted = True
            super()._finalize_final_module()
            return
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def _emit(self) -> None:
        """Make the code ready to run."""
        with global_compiler_lock:
            if not self._is_emitted:
                self._is_emitted = True
                super()._optimize_final_module()
                self._final_module.verify()
                super()._finalize_final_module()

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of a function, or 0 if this code does not define it, or if it is the body of a loop."""
        self._ensure_finalized()
        if LOOP_BODY in name:
            return 0
        if any(function.name == name for function in self.get_defined_functions()):
            self._emit()
        address: int = super().get_pointer_to_function(name)
        return address

    def _get_compiled_object(self) -> Any:
        """Return the machine code to keep on disk."""
        self._ensure_finalized()
        self._emit()
        return super()._get_compiled_object()


def set_env(self: Any, env_name: str, env: object) -> None:
    """Set a function's environment if its code has been emitted. Before that, there is no place to store it."""
    if self._engine.is_symbol_defined(env_name):
        _set_env(self, env_name, env)


def install() -> None:
    """Make numba compile in the way that this module describes, from now on."""
    if all(hasattr(codegen.JITCodeLibrary, name) for name in REPLACED):
        codegen.JITCPUCodegen._library_class = Library
        codegen.JITCPUCodegen.set_env = set_env  # type: ignore[method-assign]
