import pytest

from gerl.run.redaction import redact, redacted, secrets

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
        "aws_secret_access_key=@",
        "kwargs={access_key: @, model: b}",
        "private_key=@",
        "secretKey=@",
        'kwargs={"accessToken": "@"}',
        "passphrase: @",
        "pwd=@",
        "bearer: @",
        "the server said: Authorization: Bearer @",
        "https://example.org/v1?key=@&n=3",
        "kwargs={token: [@], model: b}",
        "the token: @ was refused",
        "token: @\nmodel: b",
    ],
)
def test_secrets_are_left_out(text: str) -> None:
    hidden = redact(text.replace("@", SECRET, 1))
    assert SECRET not in hidden and "***" in hidden
    assert all(word in hidden for word in ("model: b", "example.org", "n=3") if word in text)


@pytest.mark.parametrize(
    "token",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmNHl0w5N",
    ],
)
def test_tokens_are_known_by_their_looks(token: str) -> None:
    assert redact(f"model.path={token} x") == "model.path=*** x"
    assert redact(f"got Bearer {token}") == "got Bearer ***"


@pytest.mark.parametrize(
    "text",
    [
        "trainer.steps=10 hydra.run.dir=/tmp/a model.path=owner/name",
        "reward.scorers.vlm_judge.kwargs.max_tokens=8 sampling.call={max_sequence_length: 8}",
        "http://127.0.0.1:8000/v1 data.train=a@b.txt",
        "model.path=/models/sk-tiny",
        "the secret: a house",
        "secret: a house by the sea",
        'a sign that says "password: swordfish is wrong"',
        "commit 8f3c2a1b9d4e5f60718293a4b5c6d7e8f9012345",
        "sort_key=3 monkey=a key: b",
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


def test_the_keys_of_secrets_are_named() -> None:
    kwargs = {"api_key": "abc", "url": "https://me:word@host/v1", "tokens": [1, 2], "accessToken": ["a"], "n": (1, 2)}
    settings = {"reward": {"kwargs": kwargs}, "model": {"token": ""}}
    assert secrets(settings) == ["reward.kwargs.api_key", "reward.kwargs.url", "reward.kwargs.accessToken"]
    assert redacted(settings)["reward"]["kwargs"]["accessToken"] == "***"
