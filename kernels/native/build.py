"""`python -m kernels.native.build`: builds the library if needed, prints one line, exits 0 even when there is no compiler."""

from __future__ import annotations

import sys

from kernels.native.toolchain import BuildError, build


def main() -> int:
    try:
        _, line = build()
    except BuildError as error:
        print(f"native kernels: the build failed, the slower torch reference will be used\n{error}", file=sys.stderr)
        return 0
    print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
