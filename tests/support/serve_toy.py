"""`serve_toy.py JSON`: the server over the toy engine, as a process of its own for tests of signals and exit codes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
sys.path[:0] = [str(SUPPORT.parent.parent), str(SUPPORT)]


def main() -> int:
    from serving import toy_settings, toy_text

    from server.limits import Limits
    from server.logs import set_up
    from server.serve import ServeOptions, Server, listen, make_gate

    given = json.loads(sys.argv[1])
    set_up(as_json=False)
    settings = toy_settings(given["options"], **given["fields"])

    def tell(port: int) -> None:
        path = Path(given["port_file"])
        path.with_suffix(".new").write_text(str(port))
        path.with_suffix(".new").rename(path)

    options = ServeOptions(
        factory="toy_engine:build", factory_paths=(str(SUPPORT),), on_listening=tell, limits=Limits(**given["limits"])
    )
    text = toy_text(Path(given["folder"]) / "tokenizer")
    sock = listen(settings.host, settings.port)
    return asyncio.run(Server(settings, options, make_gate(settings), text, sock).run())


if __name__ == "__main__":
    raise SystemExit(main())
