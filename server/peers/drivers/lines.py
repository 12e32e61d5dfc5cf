"""What every driver shares: requests and answers as JSON lines, threads, and weights in bfloat16. Stands alone.

A driver is run by its peer's own Python and imports nothing of Forespeak but this file beside it. Requests, one a line:

    {"op": "load", "model": GGUF, "bf16": FOLDER, "threads": N, "streams": N, "context": N, "options": {...}}
    {"op": "answer", "prompts": [[id, ...], ...], "tokens": [N, ...]}      all prompts at once, exactly N new tokens each, greedy

Replies: {"ok": true, "versions": {...}}, or {"answers": [{"token_ids", "first", "decode"}], "seconds"}, or {"error": "one line"}.
`first` is seconds from submission to the first token, `decode` from the first token to the last, `seconds` the whole batch.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]


def limit_threads(threads: int) -> None:
    """For libraries that read the environment when they are imported: call before importing them."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"


def serve(load: Callable[[Reply], Reply], answer: Callable[[list[list[int]], list[int]], Reply]) -> None:
    """Answer requests until the input ends. What libraries print goes to the error stream, so it cannot break a line."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = load(request) if request["op"] == "load" else answer(request["prompts"], request["tokens"])
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            reply = {"error": f"{type(error).__name__}: {first}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def result(token_ids: list[int], first: float, decode: float) -> Reply:
    return {"token_ids": [int(i) for i in token_ids], "first": first, "decode": decode}


def bf16_folder(gguf: str, folder: str) -> str:
    """The same weights dequantised to bfloat16, as a folder of safetensors: for libraries that cannot compute with the file."""
    if os.path.exists(os.path.join(folder, "config.json")):
        return folder
    import torch
    import transformers
    from safetensors.torch import save_file

    model = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.dirname(gguf), gguf_file=os.path.basename(gguf), dtype=torch.float32
    )
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    state = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k not in tied}
    os.makedirs(folder, exist_ok=True)
    save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:  # last: it says that the folder is whole
        json.dump(config, file, indent=1)
    return folder
