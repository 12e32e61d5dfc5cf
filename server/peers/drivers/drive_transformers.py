"""transformers' `generate` in bfloat16 on the same weights, dequantised; many prompts as one left-padded batch."""

import time
from typing import Any

import lines


class Clock:
    """A streamer that keeps when the first and the last new tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())  # the first call brings the prompt

    def end(self) -> None:
        pass


class Transformers:
    model: Any
    torch: Any
    options: lines.Reply

    def load(self, request: lines.Reply) -> lines.Reply:
        lines.limit_threads(request["threads"])
        import torch
        import transformers

        torch.set_num_threads(request["threads"])
        folder = lines.bf16_folder(request["model"], request["bf16"])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model.eval()
        self.torch, self.options = torch, request["options"]
        return {"ok": True, "versions": {"transformers": transformers.__version__, "torch": str(torch.__version__)}}

    def answer(self, prompts: list[list[int]], tokens: list[int]) -> lines.Reply:
        longest, count = max(len(prompt) for prompt in prompts), max(tokens)
        ids = self.torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = self.torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        clock = Clock()
        more: lines.Reply = {"streamer": clock} if len(prompts) == 1 else {}
        if "lookup" in self.options:
            more["prompt_lookup_num_tokens"] = self.options["lookup"]
        begun = time.perf_counter()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **more
            )
        ended = time.perf_counter()
        new = [row[longest : longest + n].tolist() for row, n in zip(out, tokens, strict=True)]
        first = clock.times[1] - begun if len(clock.times) > 1 else 0.0
        decode = clock.times[-1] - clock.times[1] if len(clock.times) > 1 else 0.0
        return {"seconds": ended - begun, "answers": [lines.result(row, first, decode) for row in new]}


if __name__ == "__main__":
    peer = Transformers()
    lines.serve(peer.load, peer.answer)
