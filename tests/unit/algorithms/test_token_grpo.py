"""The update of a language model's tokens against one written by hand."""

from dataclasses import replace

import pytest
import tiny
import torch
import transformers

from gerl.algorithms.base import Batch
from gerl.algorithms.token_grpo import TextTape, TokenGRPO
from gerl.config import Config, from_mapping
from gerl.config.roles import role_config
from gerl.model.language import PART, LanguageModel
from gerl.model.lora import add_lora
from gerl.model.policy import EMA, Policy
from gerl.protocol import Prompt, Sample

SEEDS = [3, 4, 5]


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    sizes = tiny.LANGUAGE | tiny.SPECIAL | {"max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    return LanguageModel(model, tiny.tokenizer(64), 0.9, 6)


def policy() -> Policy:
    language = language_model()
    lora = {f"{PART}.{name}": p for name, p in add_lora(language.model, 2, 2.0, None, 0).items()}
    torch.manual_seed(1)
    for p in lora.values():
        p.data.normal_(0, 0.3)
    return Policy(language, {PART: language.model}, lora, EMA(lora, 0.9))


def config(**keys: object) -> Config:
    roles = {"rewrite": {"kind": "text", "model.path": "lm", **keys}}
    c = from_mapping({"episode": {"turns": [{"role": "rewrite", "images": 3}, {"role": "draw"}], "roles": roles}})
    return role_config(c, "rewrite")


def batch(language: LanguageModel, credit: list[float]) -> Batch:
    prompt = language.encode("a red fox")
    tokens, mask = language.sample(prompt, SEEDS)
    with torch.no_grad():
        tape = TextTape(prompt, tokens, mask, language.log_probs(prompt, tokens))
    samples = [Sample(Prompt(0, "a red fox"), k, seed, 1) for k, seed in enumerate(SEEDS)]
    return Batch(tape, samples, (0,), torch.tensor(credit)[:, None])  # type: ignore[arg-type]


def gradient(p: Policy, algorithm: TokenGRPO, b: Batch, rows: list[int]) -> tuple[torch.Tensor, float | None]:
    for parameter in p.trained.values():
        parameter.grad = None
    stats = algorithm.train(p, b, rows, len(b.samples))
    return torch.cat([q.grad.flatten() for q in p.trained.values() if q.grad is not None]), stats.ratio_deviation


def test_the_gradient_is_that_of_the_mean_log_probability_and_the_ratio_is_1() -> None:
    p, algorithm = policy(), TokenGRPO(config())
    language: LanguageModel = p.pipe  # type: ignore[assignment]
    b = batch(language, [1.0, -2.0, 0.5])
    found, deviation = gradient(p, algorithm, b, [0, 1, 2])
    assert deviation == 0.0
    tape: TextTape = b.tape  # type: ignore[assignment]
    for parameter in p.trained.values():
        parameter.grad = None
    whole = torch.cat([tape.prompt.expand(3, -1), tape.tokens], 1)
    odds = (language.model(whole).logits / 0.9).log_softmax(-1)
    loss = torch.zeros(())
    for row, credit in enumerate(b.credit[:, 0]):
        places = [i for i in range(tape.tokens.shape[1]) if tape.mask[row, i]]
        own = [odds[row, len(tape.prompt) - 1 + i, tape.tokens[row, i]] for i in places]
        loss = loss - credit * torch.stack(own).mean() / 3
    loss.backward()
    expected = torch.cat([q.grad.flatten() for q in p.trained.values() if q.grad is not None])
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_texts_without_credit_and_padding_change_nothing() -> None:
    p, algorithm = policy(), TokenGRPO(config())
    b = batch(p.pipe, [1.0, 0.0, -1.0])  # type: ignore[arg-type]
    whole, _ = gradient(p, algorithm, b, [0, 1, 2])
    part, _ = gradient(p, algorithm, b, [0, 2])
    torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-8)
    tape: TextTape = b.tape  # type: ignore[assignment]
    masked = replace(b, tape=replace(tape, mask=torch.zeros_like(tape.mask)))  # as of texts that were kept
    assert not gradient(p, algorithm, masked, [0, 1, 2])[0].any()


def test_the_kl_is_0_for_the_base_model_and_positive_otherwise() -> None:
    p, algorithm = policy(), TokenGRPO(config(**{"algorithm.kl_coef": 0.1}))
    b = batch(p.pipe, [0.0, 0.0, 0.0])  # type: ignore[arg-type]
    stats = algorithm.train(p, b, [0, 1, 2], 3)
    assert stats.sums["kl"] > 0
    for name, parameter in p.trained.items():
        if "lora_B" in name:
            parameter.data.zero_()
    assert algorithm.train(p, b, [0, 1, 2], 3).sums["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_text_depends_on_its_seed_only() -> None:
    language = language_model()
    prompt = language.encode("blue")
    together, mask = language.sample(prompt, SEEDS)
    for row, seed in enumerate(SEEDS):
        alone, own = language.sample(prompt, [seed])
        length = int(own.sum())
        assert torch.equal(alone[0, :length], together[row, :length]) and int(mask[row].sum()) == length


def test_a_micro_batch_has_one_prompt() -> None:
    algorithm = TokenGRPO(config(**{"rollout.micro_batch_size": 2}))
    samples = [Sample(Prompt(i, "x"), k, 0, 1) for i in range(2) for k in range(3)]
    assert [len(task.samples) for task in algorithm.plan(samples)] == [2, 1, 2, 1]
    assert all(len({s.prompt.id for s in task.samples}) == 1 for task in algorithm.plan(samples))
