"""The C++ library: build (once, cached by source digest and CPU features), load through a plain C interface, thread team."""
