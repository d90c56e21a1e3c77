"""Load numba's compiled code from disk, but never from another user's files. Replace damaged files.

numba unpickles the files that it finds, and unpickling runs code. `compiled_code.set_directory` makes numba import this
module when it first searches for compiled code. From then on, numba compiles as `Library` describes.
"""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, codegen
from numba.core.compiler_lock import global_compiler_lock

logger = logging.getLogger(__name__)
_told: set[str] = set()


def _tell(path: str, reason: str) -> None:
    if path not in _told:
        _told.add(path)
        logger.warning("compiled code at %s is not used: %s", path, reason)


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or directory belongs to this user or to root, or does not exist."""
    try:
        return os.stat(path).st_uid in (os.geteuid(), 0)
    except FileNotFoundError:
        return True


ROOT = Path(__file__).resolve().parents[2]
OURS = ("xrunner", "xsimulator")


class Locator(caching.UserProvidedCacheLocator):
    """Finds code by what a source file contains, so that installations with equal sources share it."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        path = Path(py_file).resolve()
        parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ("",)
        # Other packages' functions may call what differs between environments.
        if parts[0] in OURS:
            return "_".join((*parts[:-1], numba.__version__))
        return str(super().get_suitable_cache_subpath(py_file))

    def get_source_stamp(self) -> str:
        return sha256(Path(self._py_file).read_bytes()).hexdigest()

    def ensure_cache_path(self) -> None:
        try:
            super().ensure_cache_path()
        except OSError as error:
            _tell(
                self.get_cache_path(), f"it cannot be written ({error.strerror}), so functions are compiled each time"
            )


class Files(caching.IndexDataCacheFile):
    def _load_index(self) -> dict[Any, str]:
        found: dict[Any, str] | None = self._read(self._index_path, super()._load_index)
        return found or {}

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name), lambda: super(Files, self)._load_data(name))

    def _read(self, path: str, read: Any) -> Any:
        try:
            if is_ours(self._cache_path) and is_ours(path):
                return read()
            _tell(path, "it belongs to another user")
        except Exception as error:  # a truncated pickle may raise anything
            _tell(path, f"it is damaged ({type(error).__name__}) and is compiled again")
        return None

    def save(self, key: Any, data: Any) -> None:
        try:
            if is_ours(self._cache_path):
                super().save(key, data)
        except OSError as error:
            _tell(self._cache_path, f"it cannot be written ({error.strerror}), so functions are compiled each time")


REPLACED = (
    "_optimize_final_module",
    "_finalize_final_module",
    "_finalize_dynamic_globals",
    "_verify_declare_only_symbols",
    "_get_compiled_object",
    "get_pointer_to_function",
)
"""Methods of numba that this module needs. A version of numba that lacks one of them compiles as usual."""
LOOP_BODY = "__numba_parfor_gufunc"
"""Part of the name of each function that is the body of a parallel loop. Only the function that contains the loop calls
its body.
"""
_set_env = codegen.JITCPUCodegen.set_env


class Library(codegen.JITCodeLibrary):
    """A function's code. It is optimised and emitted only when its address is first needed.

    By default numba optimises and emits each function as soon as it is compiled, together with a copy of every function
    that it calls. So a helper function four levels below the one that Python calls is optimised and emitted four times,
    and only the last copy runs. Here, a function is first linked into its callers, and then optimised together with
    them.
    """

    _is_emitted = False

    def _optimize_final_module(self) -> None:
        """Do nothing, since `_emit` optimises."""

    def _finalize_final_module(self) -> None:
        if self._shared_module is not None:
            self._is_emitted = True
            super()._finalize_final_module()
            return
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def _emit(self) -> None:
        with global_compiler_lock:
            if not self._is_emitted:
                self._is_emitted = True
                super()._optimize_final_module()
                self._final_module.verify()
                super()._finalize_final_module()

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of a function, or 0 for the body of a parallel loop and for a function that this code
        lacks.
        """
        self._ensure_finalized()
        if LOOP_BODY in name:
            return 0
        if any(function.name == name for function in self.get_defined_functions()):
            self._emit()
        address: int = super().get_pointer_to_function(name)
        return address

    def _get_compiled_object(self) -> Any:
        self._ensure_finalized()
        self._emit()
        return super()._get_compiled_object()


def set_env(self: Any, env_name: str, env: object) -> None:
    if self._engine.is_symbol_defined(env_name):
        _set_env(self, env_name, env)


caching.IndexDataCacheFile = Files  # type: ignore[misc]
if all(hasattr(codegen.JITCodeLibrary, name) for name in REPLACED):
    codegen.JITCPUCodegen._library_class = Library
    codegen.JITCPUCodegen.set_env = set_env  # type: ignore[method-assign]
