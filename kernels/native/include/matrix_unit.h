// The matrix unit's instructions (AMX), for the kernels that use it.
//
// Own statements instead of the compiler's intrinsics, which do not tell it that memory is read.
#pragma once

#if defined(__AMX_INT8__)
#define FS_AMX 1

#include <cstddef>
#include <cstdint>

namespace fs::FS_ISA {

// Shapes of the eight tiles: rows and bytes per row.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int row_count, int bytes) {
        rows[tile] = static_cast<uint8_t>(row_count);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
inline void amx_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void amx_release() { asm volatile("tilerelease" ::); }

template <int Tile>
inline void tile_load(const void* base, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
inline void tile_store(void* base, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(Tile) : "memory");
}
// The same for lines of 64 bytes behind each other. They name the bytes they touch, so that the compiler keeps everything else where it is:
// sums that live in registers stay there.
struct __attribute__((may_alias)) TileBytes {
    char bytes[1024];
};
template <int Tile>
inline void tile_load(const void* base) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(size_t{64}), "i"(Tile), "m"(*static_cast<const TileBytes*>(base)));
}
template <int Tile>
inline void tile_store(void* base) {
    asm volatile("tilestored %%tmm%c2, (%1,%3,1)" : "+m"(*static_cast<TileBytes*>(base)) : "r"(base), "i"(Tile), "r"(size_t{64}));
}
template <int Tile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
// Sums += signed rows times signed, or unsigned, columns.
template <int Sums, int Rows, int Columns, bool Unsigned>
inline void tile_dot() {
    if constexpr (Unsigned) {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Columns));
    } else {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Columns));
    }
}

}  // namespace fs::FS_ISA
#endif
