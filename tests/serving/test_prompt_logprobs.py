"""/v1/completions with echo and logprobs: the prompt's own log probabilities, and the routes a client without a tokenizer needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from checkpoints import write_rand_checkpoint
from serving import Running, running

from server.limits import Limits
from server.serve import ServeOptions
from server.settings import Settings
from server.tokenizer import Tokenizer, load_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "one two three, one two"}]
PROMPT = "one two three, é and 🙂: one two"
MOST = 4096  # log probabilities of prompts in one answer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_rand_checkpoint(tmp_path_factory.mktemp("model") / "rand"), None)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("real")
    settings = Settings(
        model=str(write_rand_checkpoint(folder / "rand")), port=0, backend="reference", weights="float32", kv_memory=2**24,
        drafters="suffix", tree_shape="chain:4", threads=1, chunk_tokens=24, cache_dir=str(folder / "cache"),
    )  # fmt: skip
    with running(settings, options=ServeOptions(limits=Limits(prompt_scores=MOST))) as run:
        yield run


def post(server: Running, path: str, **fields: Any) -> Any:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def complete(server: Running, **fields: Any) -> Any:
    return post(server, COMPLETIONS, **({"prompt": PROMPT, "max_tokens": 6, "temperature": 0} | fields))


def streamed(server: Running, **fields: Any) -> list[Any]:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True} | fields
    lines = server.http.post(COMPLETIONS, json=body).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


@pytest.mark.parametrize("top", [0, 1, 20])
def test_a_prompt_has_the_log_probabilities_its_tokens_had_as_an_answer(real: Running, tokenizer: Tokenizer, top: int) -> None:
    """An answer is generated with drafts, token by token and run by run; then its ids come back as a prompt, in chunks of 24."""
    ids_of = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    asked = {"max_tokens": 60, "temperature": 0.9, "seed": 4, "ignore_eos": True, "logprobs": True, "top_logprobs": top}
    spoken = post(real, CHAT, messages=MESSAGES, **asked)["choices"][0]["logprobs"]["content"]
    answer = [ids_of[bytes(entry["bytes"])] for entry in spoken]
    ids = post(real, "/tokenize", messages=MESSAGES)["tokens"]
    whole = complete(real, prompt=ids + answer, max_tokens=0, echo=True, logprobs=top)
    (choice,) = whole["choices"]
    found = choice["logprobs"]
    assert found["tokens"][len(ids) :] == [entry["token"] for entry in spoken]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][len(ids) :] == [entry["logprob"] for entry in spoken]
    assert len(found["token_logprobs"]) == len(found["text_offset"]) == len(ids) + len(answer)
    if top:
        best = [{other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in spoken]
        assert found["top_logprobs"][0] is None
        assert found["top_logprobs"][len(ids) :] == best
    else:
        assert found["top_logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert choice["text"] == post(real, "/detokenize", tokens=ids + answer)["prompt"]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (len(ids) + len(answer), 0)


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_the_answer_comes_behind_the_prompt_and_is_the_plain_one(real: Running, max_tokens: int) -> None:
    plain = complete(real, max_tokens=9, logprobs=2)["choices"][0]
    (choice,) = complete(real, max_tokens=max_tokens, echo=True, logprobs=2)["choices"]
    count = len(post(real, "/tokenize", prompt=PROMPT)["tokens"])
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert choice["logprobs"][name][count:] == plain["logprobs"][name][:max_tokens]
    assert choice["text"].startswith(PROMPT)
    if max_tokens == 9:
        assert choice["text"] == PROMPT + plain["text"]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[0] == 0
        assert offsets[count] == len(PROMPT)
        assert offsets[count:] == [len(PROMPT) + offset for offset in plain["logprobs"]["text_offset"]]
    chunks = [c["choices"][0] for c in streamed(real, max_tokens=max_tokens, echo=True, logprobs=2)]
    assert "".join(c["text"] for c in chunks) == choice["text"]
    for name, values in choice["logprobs"].items():
        assert [v for c in chunks if c["logprobs"] for v in c["logprobs"][name]] == values
    assert chunks[-1]["finish_reason"] == "length"


def test_many_prompts_and_choices(real: Running) -> None:
    prompts = ["alpha beta", "gamma", "delta epsilon zeta"]
    together = complete(real, prompt=prompts, n=2, max_tokens=0, echo=True, logprobs=1)["choices"]
    assert [c["index"] for c in together] == list(range(6))
    for index, prompt in enumerate(prompts):
        (alone,) = complete(real, prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"]
        assert alone["text"] == prompt
        assert together[2 * index]["logprobs"] == together[2 * index + 1]["logprobs"] == alone["logprobs"]


def test_others_are_not_disturbed(real: Running) -> None:
    """Answers that draft run beside long scored prompts, and say what they say alone."""
    asked = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0.8}
    alone = [post(real, CHAT, seed=seed, **asked)["choices"] for seed in range(4)]
    long = PROMPT * 5
    first = complete(real, prompt=long, max_tokens=0, echo=True, logprobs=5)["choices"]
    with ThreadPoolExecutor(8) as pool:
        scores = [pool.submit(complete, real, prompt=long, max_tokens=0, echo=True, logprobs=5) for _ in range(4)]
        chats = [pool.submit(post, real, CHAT, seed=seed, **asked) for seed in range(4)]
        assert [c.result()["choices"] for c in chats] == alone
        assert all(s.result()["choices"] == first for s in scores)


def test_the_openai_client(real: Running) -> None:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="x") as client:
        made = client.completions.create(model=real.http.get("/v1/models").json()["data"][0]["id"], prompt=PROMPT, max_tokens=0,
                                         echo=True, logprobs=1)  # fmt: skip
    found = made.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.tokens[0] == PROMPT[: len(found.tokens[0])]
    assert found.token_logprobs[0] is None
    assert len(found.tokens) == len(found.token_logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": 1, "echo": True, "logprobs": 21}, "logprobs"),
        ({"max_tokens": 0, "echo": True, "logprobs": 1, "prompt": []}, "prompt"),
    ],
)
def test_what_is_refused_names_its_field(real: Running, fields: dict[str, Any], param: str) -> None:
    response = real.http.post(COMPLETIONS, json={"prompt": PROMPT} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_text_to_tokens_and_back(real: Running, tokenizer: Tokenizer) -> None:
    for special in (None, True, False):
        ids = post(real, "/tokenize", prompt=PROMPT, add_special_tokens=special)["tokens"]
        assert ids == tokenizer.encode(PROMPT, add_special=special is not False)
        assert post(real, "/detokenize", tokens=ids)["prompt"] == PROMPT
    assert post(real, "/detokenize", tokens=[])["prompt"] == ""
    refused = real.http.post("/detokenize", json={"tokens": [0, tokenizer.vocab_size]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    about = real.http.get("/tokenizer_info").json()
    assert about == {"vocab_size": tokenizer.vocab_size, "chat_template": tokenizer.chat_template}


def test_an_answer_holds_so_many_log_probabilities_of_prompts(real: Running) -> None:
    """Alternatives, prompts and choices count; without log probabilities there is nothing to hold."""
    ids = [5] * (MOST // 32)  # 8 choices of 2 prompts, 1 alternative each: exactly as many as may be
    asked = {"prompt": [ids, ids], "n": 8, "max_tokens": 1, "echo": True}
    assert len(complete(real, **asked, logprobs=1)["choices"]) == 16
    for more in ({"logprobs": 2}, {"logprobs": 1, "prompt": [ids, [*ids, 5]]}):
        refused = real.http.post(COMPLETIONS, json=asked | more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert len(complete(real, **asked)["choices"]) == 16
