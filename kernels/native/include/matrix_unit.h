// The matrix unit's instructions (AMX), for the kernels that use it.
//
// Own statements instead of the compiler's intrinsics, which do not tell it that memory is read.
#pragma once

#if defined(__AMX_INT8__)
#define FS_AMX 1

#include <cstddef>
#include <cstdint>

#define FS_TILE_LOAD(tile, base, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(base), "r"(static_cast<size_t>(stride)) : "memory")
#define FS_TILE_STORE(tile, base, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"(static_cast<size_t>(stride)) : "memory")
#define FS_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define FS_TILE_DOT(name, c, a, b) asm volatile(name " %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

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

}  // namespace fs::FS_ISA
#endif
