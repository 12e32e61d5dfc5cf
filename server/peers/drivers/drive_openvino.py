"""OpenVINO GenAI on the GGUF file itself: a pipeline for one stream, with or without prompt lookup, and one that batches."""

import time
from typing import Any

import lines


class OpenVino:
    pipeline: Any
    options: lines.Reply
    batching = False

    def load(self, request: lines.Reply) -> lines.Reply:
        import openvino_genai as genai

        self.genai, self.options = genai, request["options"]
        properties = {"INFERENCE_NUM_THREADS": request["threads"], **self.options.get("properties", {})}
        self.batching = request["streams"] > 1
        if self.batching:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = 1  # GiB
            scheduler.max_num_seqs = request["streams"]
            scheduler.enable_prefix_caching = False
            self.pipeline = genai.ContinuousBatchingPipeline(request["model"], scheduler, "CPU", properties)
        else:
            if self.options.get("lookup"):
                properties["prompt_lookup"] = True
            self.pipeline = genai.LLMPipeline(request["model"], "CPU", **properties)
        return {"ok": True, "versions": {"openvino-genai": genai.get_version()}}

    def answer(self, prompts: list[list[int]], tokens: list[int]) -> lines.Reply:
        import numpy
        import openvino

        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        configs = [self._config(count) for count in tokens]
        if self.batching:
            begun = time.perf_counter()
            done = self.pipeline.generate(inputs, configs)
            seconds = time.perf_counter() - begun
            return {"seconds": seconds, "answers": [lines.result(one.m_generation_ids[0], 0.0, 0.0) for one in done]}
        answers = []
        begun = time.perf_counter()
        for one, config in zip(inputs, configs, strict=True):
            result = self.pipeline.generate(one, config)
            first = result.perf_metrics.get_ttft().mean / 1e3
            whole = result.perf_metrics.get_generate_duration().mean / 1e3
            answers.append(lines.result(result.tokens[0], first, whole - first))
        return {"seconds": time.perf_counter() - begun, "answers": answers}

    def _config(self, tokens: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        if self.options.get("lookup"):
            config.num_assistant_tokens, config.max_ngram_size = self.options["lookup"]
        return config


if __name__ == "__main__":
    peer = OpenVino()
    lines.serve(peer.load, peer.answer)
