"""llama.cpp through xllamacpp: its own server in this process, asked over HTTP without streaming, timed by its own clock."""

import http.client
import json
import threading
import time
import urllib.parse
from typing import Any

import lines


class LlamaCpp:
    """One server. Its `prompt_ms` and `predicted_ms` are taken as they are: they leave out the HTTP around them."""

    address: Any
    server: Any

    def load(self, request: lines.Reply) -> lines.Reply:
        import xllamacpp as x

        p = x.CommonParams()
        p.model.path = request["model"]
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = request["threads"]
        p.n_parallel = request["streams"]
        p.n_ctx = request["context"] * request["streams"]
        p.cache_ram_mib, p.verbosity, p.port = 0, 0, 0
        options = request["options"]
        if "speculation" in options:
            p.speculative.types = [getattr(x.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{options['speculation']}")]
            for name, value in options.get("fields", {}).items():
                setattr(getattr(p.speculative, options["speculation"].lower()), name, value)
        self.server = x.Server(p)
        self.address = urllib.parse.urlparse(self.server.listening_address)
        return {"ok": True, "versions": {"xllamacpp": x.__version__}}

    def answer(self, prompts: list[list[int]], tokens: list[int]) -> lines.Reply:
        replies: list[Any] = [None] * len(prompts)

        def ask(i: int) -> None:
            replies[i] = self._complete(prompts[i], tokens[i])

        begun = time.perf_counter()
        if len(prompts) == 1:
            ask(0)
        else:
            threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "answers": [self._result(reply) for reply in replies]}

    def _complete(self, prompt: list[int], tokens: int) -> Any:
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"cache_prompt": False, "return_tokens": True, "stream": False}
        connection = http.client.HTTPConnection(self.address.hostname, self.address.port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())

    @staticmethod
    def _result(reply: Any) -> lines.Reply:
        if not isinstance(reply, dict) or "timings" not in reply:
            raise RuntimeError(f"the server answered {str(reply)[:200]}")
        return lines.result(reply["tokens"], reply["timings"]["prompt_ms"] / 1e3, reply["timings"]["predicted_ms"] / 1e3)


if __name__ == "__main__":
    peer = LlamaCpp()
    lines.serve(peer.load, peer.answer)
