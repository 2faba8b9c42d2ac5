import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical

from engine.algorithms import log_probs as module
from engine.algorithms.language_modeling import causal_lm_loss
from engine.algorithms.log_probs import entropy, token_log_probs


def sample(batch=3, seq=7, vocabulary=11, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(batch, seq, vocabulary, generator=generator)
    tokens = torch.randint(vocabulary, (batch, seq), generator=generator)
    return logits.to(dtype), tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_and_entropy_are_those_of_the_sampling_distribution(temperature):
    logits, tokens = sample()
    distribution = Categorical(logits=logits / temperature)
    found = token_log_probs(logits, tokens, temperature)
    assert torch.allclose(found, distribution.log_prob(tokens), atol=1e-5)
    assert torch.allclose(entropy(logits, temperature), distribution.entropy(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_normalised_in_fp32(dtype):
    logits, tokens = sample(vocabulary=500, dtype=dtype)
    found = token_log_probs(logits, tokens)
    assert found.dtype == torch.float32
    every = torch.arange(500).expand(3, 500)
    total = token_log_probs(logits[:, :1].expand(3, 500, 500), every).exp().sum(dim=1)
    assert torch.allclose(total, torch.ones(3), atol=1e-5)
    assert entropy(logits).dtype == torch.float32


def test_chunks_change_neither_values_nor_gradients(monkeypatch):
    logits, tokens = sample()

    def values_and_gradient():
        leaf = logits.clone().requires_grad_()
        found = token_log_probs(leaf, tokens, 0.7)
        (found * torch.arange(7)).sum().backward()
        return found.detach(), entropy(logits), leaf.grad

    whole = values_and_gradient()
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 2 * 3 * 11)
    for one, other in zip(whole, values_and_gradient(), strict=True):
        assert torch.equal(one, other)


def test_chunks_bound_how_much_is_in_fp32_at_once(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 66)
    logits, _ = sample()
    sizes = [chunk.numel() for chunk in module._log_softmax_chunks(logits, 1.0)]
    assert max(sizes) <= 66
    assert sum(sizes) == logits.numel()


def test_entropy_of_known_distributions():
    uniform = torch.zeros(1, 1, 8)
    certain = torch.full((1, 1, 8), -math.inf).index_fill(2, torch.tensor(3), 0.0)
    halves = torch.tensor([[[0.0, 0.0, -math.inf]]])
    assert entropy(uniform).item() == pytest.approx(math.log(8))
    assert entropy(certain).item() == 0.0
    assert entropy(halves).item() == pytest.approx(math.log(2))


def test_entropy_has_a_finite_gradient_at_excluded_tokens():
    logits = torch.tensor([[[0.0, 1.0, -math.inf]]], requires_grad=True)
    entropy(logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    # More of the likelier token lowers the entropy.
    assert logits.grad[0, 0, 1] < 0 < logits.grad[0, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_without_probabilities_is_refused(temperature):
    logits, tokens = sample()
    with pytest.raises(ValueError, match=f"{temperature}"):
        token_log_probs(logits, tokens, temperature)


def test_language_model_loss_is_next_token_cross_entropy():
    logits, tokens = sample()
    loss, count = causal_lm_loss(logits, tokens)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert count == 3 * 6
    assert loss / count == pytest.approx(expected.item(), rel=1e-6)


def test_uniform_logits_have_the_vocabulary_as_perplexity():
    loss, count = causal_lm_loss(torch.zeros(2, 5, 32), torch.ones(2, 5, dtype=torch.long))
    assert math.exp(loss / count) == pytest.approx(32, rel=1e-5)


def test_ignored_labels_have_neither_loss_nor_gradient():
    logits, labels = sample()
    labels[0, :4] = -100
    labels[2] = -100
    ignored = F.pad(labels[:, 1:] == -100, (0, 1), value=True)
    noisy = torch.where(ignored.unsqueeze(-1), 1e6 * torch.randn(3, 7, 11), logits)
    results = []
    for each in (logits, noisy):
        leaf = each.clone().requires_grad_()
        loss, count = causal_lm_loss(leaf, labels)
        loss.backward()
        assert count == 3 + 6
        assert not leaf.grad[ignored].any()
        assert leaf.grad[~ignored].any(dim=1).all()
        results.append((loss.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_rows_without_labels_add_zero_and_can_still_run_backward():
    logits = torch.randn(2, 4, 5, requires_grad=True)
    loss, count = causal_lm_loss(logits, torch.full((2, 4), -100))
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert not logits.grad.any()
