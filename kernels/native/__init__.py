"""The C++ library: build (once, cached by source digest and CPU features), load through a plain C interface, thread team."""

from kernels.native.library import NativeError, NativeLibrary, Team, load, require

__all__ = ["NativeError", "NativeLibrary", "Team", "load", "require"]
