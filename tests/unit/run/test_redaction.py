import pytest

from gerl.run.redaction import redact, redacted

SECRET = "s3cret-Value.9"


@pytest.mark.parametrize(
    "text",
    [
        "reward.scorers.vlm.kwargs.api_key=@",
        "reward.scorers.vlm.kwargs={url: 'http://a', token: @, model: b}",
        "'+reward.scorers.vlm.kwargs.headers={Authorization: Bearer @}'",
        'kwargs={"password": "@"}',
        "reward.scorers.vlm.kwargs.url=https://user:@@example.org/v1",
        "https://@@example.org",
        "http://host/score?token=@&n=3",
        "HF_TOKEN=@",
    ],
)
def test_secrets_are_left_out(text: str) -> None:
    hidden = redact(text.replace("@", SECRET, 1))
    assert SECRET not in hidden and "***" in hidden
    assert all(word in hidden for word in ("model: b", "example.org", "n=3") if word in text)


def test_tokens_are_known_by_their_looks() -> None:
    assert redact("model.path=hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123") == "model.path=***"


@pytest.mark.parametrize(
    "text",
    [
        "trainer.steps=10 hydra.run.dir=/tmp/a model.path=owner/name",
        "reward.scorers.vlm_judge.kwargs.max_tokens=8 sampling.call={max_sequence_length: 8}",
        "http://127.0.0.1:8000/v1 data.train=a@b.txt",
        "model.path=/models/sk-tiny",
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


def test_settings_lose_their_secrets_and_nothing_else() -> None:
    settings = {
        "reward": {"scorers": {"vlm": {"kwargs": {"api_key": "abc", "url": "https://me:word@host/v1", "tokens": 512}}}},
        "model": {"path": "a/b", "lora": None, "token": ""},
        "rows": [1, (2.5, "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123")],
    }
    assert redacted(settings) == {
        "reward": {"scorers": {"vlm": {"kwargs": {"api_key": "***", "url": "https://***@host/v1", "tokens": 512}}}},
        "model": {"path": "a/b", "lora": None, "token": ""},
        "rows": [1, [2.5, "***"]],
    }
