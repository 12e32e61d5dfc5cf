"""vLLM for CPUs in bfloat16 on the same weights, dequantised; its engine stepped in this process."""

import os
import time
from typing import Any

import lines


class Vllm:
    engine: Any
    vllm: Any
    asked = 0

    def load(self, request: lines.Reply) -> lines.Reply:
        threads = request["threads"]
        lines.limit_threads(threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # 0.32 cannot load what it kept of that kind and would compile at every start
        import vllm

        self.vllm = vllm
        options = request["options"]
        more: lines.Reply = {"speculative_config": options["speculation"]} if "speculation" in options else {}
        self.engine = vllm.LLM(
            lines.bf16_folder(request["model"], request["bf16"]),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=request["context"],
            max_num_seqs=16,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **more,
        ).llm_engine
        return {"ok": True, "versions": {"vllm": vllm.__version__}}

    def answer(self, prompts: list[list[int]], tokens: list[int]) -> lines.Reply:
        ids: dict[str, list[int]] = {}
        times: dict[str, list[float]] = {}
        begun = time.perf_counter()
        for prompt, count in zip(prompts, tokens, strict=True):
            self.asked += 1
            sampling = self.vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            self.engine.add_request(str(self.asked), {"prompt_token_ids": prompt}, sampling)
            ids[str(self.asked)], times[str(self.asked)] = [], []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                ids[output.request_id] = list(output.outputs[0].token_ids)
                times[output.request_id].append(time.perf_counter() - begun)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "answers": [lines.result(ids[k], t[0], t[-1] - t[0]) for k, t in times.items()]}


if __name__ == "__main__":
    peer = Vllm()
    lines.serve(peer.load, peer.answer)
