"""The toy decoders are what their names say, since many other tests lean on them."""

from __future__ import annotations

import pytest
import torch
import toy

from kernels.decoder.reference import ReferenceDecoder


def scores(decoder: toy.Decoder, text: list[int]) -> torch.Tensor:
    pages = list(range(-(-len(text) // 16)))
    row = toy.Row(text, pages)
    logits = decoder.forward(toy.step_inputs([row], 16), toy.new_store(decoder.shape, len(pages)), True).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("vocab", [5, 64, 100, 512])
def test_table_logits_are_the_table_exactly(vocab: int) -> None:
    table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(0)) * 5
    text = [(7 * i) % vocab for i in range(20)]
    assert torch.equal(scores(toy.table_decoder(table), text), table[text])


def test_script_is_spoken() -> None:
    script = [3, 1, 4, 15, 9, 2, 6]
    assert toy.greedy(toy.table_decoder(toy.script_table(script, 64)), [50, 3], 6) == script[1:]
    with pytest.raises(ValueError, match="once only"):
        toy.script_table([1, 2, 1])


def test_rand_text_depends_on_the_whole_context_and_has_a_clear_best() -> None:
    decoder = toy.rand_decoder()
    text = list(range(100, 160))
    first, other = scores(decoder, text), scores(decoder, [400, *text[1:]])
    assert (first.argmax(-1) != other.argmax(-1))[30:].any()
    best = first.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 1.0
    answer = toy.greedy(decoder, text[:5], 60)
    assert len(set(answer)) > 20  # no short loop


def test_noisy_twin_agrees_on_more_than_half() -> None:
    shape, weights = toy.rand_weights()
    target, twin = ReferenceDecoder(shape, weights), ReferenceDecoder(shape, toy.noisy(weights))
    text = [7, 8, 9, *toy.greedy(target, [7, 8, 9], 90)]
    agreement = (scores(target, text).argmax(-1) == scores(twin, text).argmax(-1))[3:].float().mean().item()
    assert 0.45 < agreement < 0.8
    unrelated = scores(toy.rand_decoder(seed=99), text).argmax(-1)
    assert (unrelated == scores(target, text).argmax(-1)).float().mean() < 0.1


def test_swapped_has_the_right_token_second() -> None:
    decoder = toy.rand_decoder()
    text = list(range(30))
    right, swapped = scores(decoder, text), scores(toy.swapped(decoder), text)
    assert torch.equal(swapped.argmax(-1), right.topk(2).indices[:, 1])
    assert torch.equal(swapped.topk(2).indices[:, 1], right.argmax(-1))


@pytest.mark.parametrize(("bits", "worst"), [(8, 0.25), (4, 1.0)])
def test_quantised_twin_is_near(bits: int, worst: float) -> None:
    shape, weights = toy.rand_weights(layers=1)
    text = list(range(40))
    want = scores(ReferenceDecoder(shape, weights), text)
    got = scores(ReferenceDecoder(shape, toy.quantized(weights, bits)), text)
    assert ((got - want).norm() / want.norm()).item() < worst
