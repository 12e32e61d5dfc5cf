// Buffers that start on a cache line, so that a vector access never touches two lines.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace fs {

template <class T>
struct LineAllocator {
    using value_type = T;
    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
    bool operator==(const LineAllocator&) const { return true; }
};

template <class T>
using Buffer = std::vector<T, LineAllocator<T>>;

template <class T>
void grow(Buffer<T>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
}

}  // namespace fs
