// Makes recorded calls of the native library, on whatever machine it was compiled for. tape.py writes the tapes and the list of functions.
//
//   replay LIBRARY                  prints the instruction sets that the library runs here, best first
//   replay LIBRARY SET TAPE RESULT  makes the tape's calls with that set and writes what the tape's memory holds afterwards
//
// A tape is three counts (bytes, pointers, calls), so many bytes of memory, the places in it that hold addresses within it, and the calls.
// The memory begins with kSetBytes for the set's name.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr size_t kSetBytes = 16, kMostArguments = 16, kAlign = 64;

enum Kind : uint64_t { kWhole, kFloat, kPlace, kHeld };  // a number, a float64, an address in memory, the word at that address

struct Argument {
    uint64_t kind, bits;
};

struct Call {
    uint64_t name, result;  // places of the function's name and of what it gives back
    Argument arguments[kMostArguments];
};

[[noreturn]] void fail(const std::string& why) {
    std::fprintf(stderr, "replay: %s\n", why.c_str());
    std::exit(1);
}

template <class T>
T take(const Argument& argument, uint8_t* memory) {
    if constexpr (std::is_floating_point_v<T>) {
        double x;
        std::memcpy(&x, &argument.bits, sizeof x);
        return static_cast<T>(x);
    } else if constexpr (std::is_pointer_v<T>) {
        T pointer = argument.kind == kWhole ? nullptr : reinterpret_cast<T>(memory + argument.bits);
        if (argument.kind == kHeld) std::memcpy(&pointer, memory + argument.bits, sizeof pointer);
        return pointer;
    } else {
        return static_cast<T>(static_cast<int64_t>(argument.bits));
    }
}

// Whether the call worked: an error code of 0, a pointer to something.
template <class R, class... A, size_t... I>
bool make(R (*function)(A...), const Call& call, uint8_t* memory, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
        function(take<A>(call.arguments[I], memory)...);
        return true;
    } else {
        const R result = function(take<A>(call.arguments[I], memory)...);
        std::memcpy(memory + call.result, &result, sizeof result);
        return std::is_pointer_v<R> ? result != R{} : result == R{};
    }
}

template <class Function>
struct Caller;
template <class R, class... A>
struct Caller<R(A...)> {
    static bool run(void* function, const Call& call, uint8_t* memory) {
        static_assert(sizeof...(A) <= kMostArguments);
        return make(reinterpret_cast<R (*)(A...)>(function), call, memory, std::index_sequence_for<A...>{});
    }
};

struct Entry {
    const char* name;
    bool (*run)(void* function, const Call& call, uint8_t* memory);
};

#define FS_ENTRY(name, type) {name, Caller<type>::run},
const Entry kEntries[] = {
#include "entries.inc"
};

void* find(void* library, const char* name) {
    void* function = dlsym(library, name);
    if (function == nullptr) fail(std::string("the library has no ") + name);
    return function;
}

bool run(void* library, const Call& call, uint8_t* memory) {
    const char* name = reinterpret_cast<const char*>(memory + call.name);
    for (const Entry& entry : kEntries) {
        if (std::strcmp(entry.name, name) == 0) return entry.run(find(library, name), call, memory);
    }
    fail(std::string("there is no entry ") + name);
}

template <class T>
void read(std::ifstream& file, T* into, size_t count) {
    if (!file.read(reinterpret_cast<char*>(into), static_cast<std::streamsize>(count * sizeof(T)))) fail("the tape ends early");
}

void replay(void* library, const char* set, const char* tape, const char* result) {
    std::ifstream file(tape, std::ios::binary);
    uint64_t counts[3];
    read(file, counts, 3);
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kAlign, counts[0]));
    std::vector<uint64_t> pointers(counts[1]);
    std::vector<Call> calls(counts[2]);
    read(file, memory, counts[0]);
    read(file, pointers.data(), pointers.size());
    read(file, calls.data(), calls.size());
    std::strncpy(reinterpret_cast<char*>(memory), set, kSetBytes - 1);
    for (const uint64_t place : pointers) {
        uint64_t offset;
        std::memcpy(&offset, memory + place, sizeof offset);
        const uint8_t* address = memory + offset;
        std::memcpy(memory + place, &address, sizeof address);
    }
    for (const Call& call : calls) {
        if (!run(library, call, memory)) fail(std::string("refused: ") + reinterpret_cast<const char*>(memory + call.name));
    }
    std::ofstream out(result, std::ios::binary);
    if (!out.write(reinterpret_cast<const char*>(memory), static_cast<std::streamsize>(counts[0]))) fail("the result cannot be written");
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 2 && count != 5) fail("replay LIBRARY [SET TAPE RESULT]");
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr) fail(dlerror());
    if (count == 5) {
        replay(library, arguments[2], arguments[3], arguments[4]);
        return 0;
    }
    const auto name_of = reinterpret_cast<const char* (*)(int)>(find(library, "fs_isa_name"));
    for (int i = 0; name_of(i) != nullptr; ++i) std::puts(name_of(i));
    return 0;
}
